"""The pure parts of workers/: tags, command paths, process tables, pipe sizes, set-up commands, cgroups."""

from __future__ import annotations

import errno
import pickle
import signal
import sys
import threading
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hpc_elastic.workers.guardian import StoppedWatch
from hpc_elastic.workers.linux import node_oom_kill_count, oom_kill_count
from hpc_elastic.workers.spawn import (
    NO_CHANGE,
    WorkerStartError,
    candidates,
    exec_failure,
    find_program,
    pipe_bytes_for,
)
from hpc_elastic.workers.tree import (
    Environ,
    Proc,
    Tag,
    TreeKiller,
    ancestors,
    parse_cgroup_job,
    parse_stat,
    read_environments,
    subtree,
)
from hpc_elastic.workers.user_command import CommandEnd, describe_end, last_lines, read_change, setup_command


def _proc(pid: int, ppid: int) -> Proc:
    return Proc(pid=pid, starttime=pid, ppid=ppid, pgid=pid, sid=pid, state="S", name="p")


@pytest.mark.parametrize(
    ("other", "is_other"),
    [
        ("run:3:a2", True),
        *((text, False) for text in ("run:3:a1", "run:33:a2", "run2:3:a2", "xrun:3:a2", "run:3")),
    ],
)
def test_tag_text_and_incarnations(other: str, is_other: bool) -> None:
    tag = Tag(run_uid="run", node_key="3", agent_uid="a1")
    assert (str(tag), tag.node) == ("run:3:a1", "run:3")
    assert tag.is_of_other_incarnation(other) is is_other


OWN, OTHER = b"HPC_ELASTIC_TAG=run:host:a1\0", b"HPC_ELASTIC_TAG=run:host:a2\0"


@pytest.mark.parametrize(
    ("jobs", "raw", "cgroup", "is_own"),
    [
        (("12",), OWN + b"SLURM_JOB_ID=12\0", None, True),
        (("12",), OWN + b"SLURM_JOB_ID=13\0", "12", False),
        (("14", "12"), OWN + b"SLURM_JOB_ID=12\0", None, True),
        (("12",), OTHER + b"SLURM_JOB_ID=12\0", None, False),
        (("12",), OWN, "12", True),
        (("12",), OWN, "13", False),
        (("12",), OWN, None, False),
        ((), OWN, "12", True),
        ((), OWN + b"SLURM_JOB_ID=12\0", "12", False),
        ((), OWN + b"SLURM_JOB_ID=\0", None, True),
    ],
)
def test_a_tag_counts_in_the_runs_own_jobs_alone(
    jobs: tuple[str, ...], raw: bytes, cgroup: str | None, is_own: bool
) -> None:
    """A job that a worker submits inherits it; a worker may drop what Slurm says of its job."""
    tag = Tag(run_uid="run", node_key="host", agent_uid="a1", jobs=frozenset(jobs))
    assert tag.is_own_worker(Environ(raw), lambda: cgroup) is is_own


@pytest.mark.parametrize(
    ("text", "job"),
    [
        ("0::/system.slice/slurmstepd.scope/job_12/step_0/user/task_0\n", "12"),
        ("9:cpuset:/\n4:freezer:/slurm/uid_1000/job_345/step_batch\n0::/user.slice\n", "345"),
        ("4:freezer:/slurm_n1/uid_1000/job_7/step_0\n", "7"),
        ("0::/user.slice/job_12\n", None),
        ("0::/\n", None),
        ("", None),
        ("4:freezer:/slurm/uid_1000/job_x\n", None),
    ],
)
def test_the_job_of_a_cgroup(text: str, job: str | None) -> None:
    assert parse_cgroup_job(text.encode()) == job


@pytest.mark.parametrize("value", ["", "a:b", "a=b", "a\n", "ü"])
def test_tag_refuses_what_would_blur_it(value: str) -> None:
    with pytest.raises(ValueError, match="node_key"):
        Tag(run_uid="run", node_key=value, agent_uid="a")


def test_candidates_follow_the_workers_path() -> None:
    assert candidates("/bin/x", {"PATH": "/a"}) == ["/bin/x"]
    assert candidates("./x", {"PATH": "/a"}) == ["./x"]
    assert candidates("x", {"PATH": "/a:/b"}) == ["/a/x", "/b/x"]
    assert candidates("x", {"PATH": "/a:"}) == ["/a/x", "./x"], "an empty entry is the working directory"
    assert candidates("x", {}), "without PATH the system's default"


def test_start_error_pickles_with_its_facts() -> None:
    error = exec_failure(command="x", cwd="/w", path="/a/x", code=errno.EACCES, path_exists=True)
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), copy.errno) == (WorkerStartError, str(error), errno.EACCES)


@pytest.mark.parametrize(
    ("command", "path", "code", "path_exists", "text"),
    [
        ("x", "/root/bin/x", errno.EACCES, False, "no such command in PATH"),  # a closed folder
        ("/root/bin/x", "/root/bin/x", errno.EACCES, False, "may not be executed"),
        ("x", "/a/x", errno.EIO, True, "cannot start 'x': /a/x: Input/output error"),
    ],
)
def test_an_exec_failure_says_why(command: str, path: str, code: int, path_exists: bool, text: str) -> None:
    assert text in str(exec_failure(command=command, cwd="/w", path=path, code=code, path_exists=path_exists))


@pytest.mark.parametrize("name", ["bash", "a) R 1 (b", "two words", ") ", "("])
def test_stat_is_read_whatever_the_process_calls_itself(name: str) -> None:
    tail = "S 10 20 30 0 -1 4194304 1 2 3 4 5 6 7 8 20 0 1 0 987654 11 12"
    proc = parse_stat(f"77 ({name}) {tail}\n".encode())
    assert proc == Proc(pid=77, starttime=987654, ppid=10, pgid=20, sid=30, state="S", name=name)
    assert not proc.is_dead


@pytest.mark.parametrize("raw", [b"", b"77", b"77 (x) S 1", b"x (x) S 10 20 30"])
def test_torn_stat_is_no_process(raw: bytes) -> None:
    assert parse_stat(raw) is None


def test_environ_finds_whole_names_only() -> None:
    environ = Environ(b"XTAG=no\0TAGX=no\0TAG=a=b\0EMPTY=\0VALUE=TAG2=x\0")
    assert environ.get("TAG") == "a=b"
    assert environ.get("EMPTY") == ""
    assert environ.get("TAG2") is None
    assert Environ(b"LAST=x").get("LAST") == "x"


def test_subtree_and_ancestors() -> None:
    table = {p.pid: p for p in (_proc(1, 0), _proc(2, 1), _proc(3, 2), _proc(4, 3), _proc(5, 2), _proc(6, 1))}
    assert {p.pid for p in subtree(table, (2,))} == {3, 4, 5}
    assert {p.pid for p in subtree(table, (2,), excluding={3})} == {5}
    assert {p.pid for p in subtree(table, (3, 5))} == {4}
    assert ancestors(table, 4) == {4, 3, 2, 1}


@given(st.dictionaries(st.integers(1, 30), st.integers(0, 30), max_size=30), st.sets(st.integers(1, 30), max_size=3))
def test_subtree_ends_even_in_a_table_that_was_torn_into_circles(parents: dict[int, int], excluding: set[int]) -> None:
    table = {pid: _proc(pid, ppid) for pid, ppid in parents.items()}
    found = [p.pid for p in subtree(table, (1,), excluding=excluding)]
    assert len(found) == len(set(found))
    assert not set(found) & (excluding | {1})
    for pid in found:
        assert 1 in ancestors(table, pid)


@given(st.integers(0, 5000))
@example(0)
@example(8)
def test_pipes_stay_within_the_users_share(workers: int) -> None:
    size = pipe_bytes_for(workers)
    assert size & (size - 1) == 0
    assert 64 << 10 <= size <= 1 << 20
    assert size == 64 << 10 or 2 * workers * size <= 16 << 20
    assert workers > 8 or size == 1 << 20, "a usual node gets the largest pipes"


def test_program_is_found_where_it_may_be_executed(tmp_path: Path) -> None:
    for name, mode in (("a", 0o644), ("b", 0o755)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tool").write_text("")
        (tmp_path / name / "tool").chmod(mode)
    (tmp_path / "b" / "folder").mkdir()
    env = {"PATH": f"{tmp_path}/a:{tmp_path}/b"}
    assert find_program("tool", env) == f"{tmp_path}/b/tool"
    assert find_program(f"{tmp_path}/b/tool", {}) == f"{tmp_path}/b/tool"
    assert find_program("folder", env) is None
    assert find_program("nothing", env) is None


@pytest.mark.parametrize(
    ("seen", "is_over"),
    [
        (
            [(0, "S"), *((now, "T") for now in range(1, 6))],
            [False] * 4 + [True] * 2,
        ),  # from the first look that shows it
        ([(0, "T"), (2, "T"), (3, "R"), (4, "T"), (6, "T")], [False] * 5),  # it runs in between
        ([(now, "t") for now in range(9)], [False] * 9),  # a debugger
        # A suspended job: the guardian slept with the agent, and cannot tell for how long that was stopped.
        ([(0, "T"), (1, "T"), (600, "T"), (601, "T"), (602, "S")], [False] * 5),
    ],
)
def test_an_agent_that_is_stopped_is_so_for_a_time(seen: list[tuple[float, str]], is_over: list[bool]) -> None:
    watch = StoppedWatch(limit=3.0, longest_gap=2.5)
    assert [watch.look(state, now) for now, state in seen] == is_over


def _sent(killer: TreeKiller, *looks: Iterable[int]) -> list[signal.Signals]:
    return [killer.next_signal([_proc(pid, 1) for pid in pids]) for pids in looks]


def test_those_who_stand_still_are_killed_and_those_who_multiply_stopped_until_all_are_known() -> None:
    assert _sent(TreeKiller(), *[(1, 2)] * 9) == [signal.SIGKILL] * 9
    killer = TreeKiller()
    sent = _sent(killer, *(range(10 * look) for look in range(1, 6)))
    assert sent == [signal.SIGKILL] * 3 + [signal.SIGSTOP] * 2
    assert _sent(killer, range(50), (60,)) == [signal.SIGKILL, signal.SIGSTOP]


def test_it_does_not_stop_them_for_ever() -> None:
    """Where each one that is stopped is followed by another without end, somebody must be killed at last."""
    assert _sent(TreeKiller(), *((look,) for look in range(500)))[-1] is signal.SIGKILL


def test_what_can_be_read_is() -> None:
    assert read_environments([1, 2, 3], lambda pid: None if pid == 2 else b"%d" % pid) == {1: b"1", 3: b"3"}
    assert read_environments([], lambda _: b"x") == {}

    def refuse(pid: int) -> bytes:
        raise OSError(24, "too many open files")

    with pytest.raises(OSError, match="too many"):
        read_environments([1], refuse)


def test_those_that_never_answer_hold_nobody_up() -> None:
    never = threading.Event()

    def read(pid: int) -> bytes:
        if pid in (2, 5):
            never.wait(30)
        return b"%d" % pid

    try:
        assert read_environments([1, 2, 3, 4, 5], read, patience=0.05) == {1: b"1", 3: b"3", 4: b"4"}
    finally:
        never.set()


BASE = {"PATH": "/usr/bin", "GONE": "1", "KEPT": "1", "HPC_ELASTIC_TAG": "mine", "PWD": "/here"}


def printed(env: dict[str, str]) -> bytes:
    return b"".join(f"{name}={value}".encode() + b"\0" for name, value in env.items())


def test_what_was_set_and_removed_is_the_change_and_what_is_ours_stays() -> None:
    after = {"PATH": "/usr/bin", "KEPT": "1", "NEW": "a=b\nc", "HPC_ELASTIC_TAG": "other", "PWD": "/", "SHLVL": "1"}
    change = read_change(CommandEnd(exitcode=0, stdout=printed(after)), BASE)
    assert (change.put, change.unset, change.python) == ({"NEW": "a=b\nc"}, {"GONE"}, "")
    assert change.apply({"GONE": "2", "RANK": "0"}) == {"RANK": "0", "NEW": "a=b\nc"}


def test_another_python_first_on_path_is_the_workers(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.touch(mode=0o700)
    change = read_change(CommandEnd(exitcode=0, stdout=printed({**BASE, "PATH": f"{tmp_path}:/usr/bin"})), BASE)
    assert change.command([sys.executable, "-u", "train.py"]) == [str(python), "-u", "train.py"]
    assert change.command(["/chosen/python", "train.py"]) == ["/chosen/python", "train.py"]
    assert NO_CHANGE.command([sys.executable]) == [sys.executable]


@pytest.mark.parametrize(
    ("end", "why"),
    [
        (CommandEnd(exitcode=3, stderr=b"loading\nno licence\n"), "exit code 3: no licence"),
        (CommandEnd(exitcode=1, stdout=b"\x014\0ls  /x\0"), "exit code 1 from 'ls /x' (line 4)"),
        (CommandEnd(exitcode=2, stdout=b'\x01\0eval "$1"\0'), "exit code 2"),
        (CommandEnd(exitcode=-9), "SIGKILL"),
        (CommandEnd(exitcode=-9, is_late=True, seconds=300.1), "it had not ended after 300 s"),
        (CommandEnd(exitcode=0), "it has ended before its environment could be read"),
    ],
)
def test_why_a_setup_has_failed(end: CommandEnd, why: str) -> None:
    assert read_change(end, BASE) == why


@pytest.mark.parametrize(
    ("setup", "depth"),
    [("source /a/b.sh", "1"), ("source '/a b/c.sh'", "1"), ("source a.sh; module load x", "0"), ("true", "0")],
)
def test_a_file_that_is_given_is_judged_line_by_line(setup: str, depth: str) -> None:
    assert setup_command(setup)[-2:] == [setup, depth]


def test_what_a_terminal_would_act_on_is_not_passed_on() -> None:
    assert last_lines(b"\x1b[31mred\n\n  \nhpc-elastic: line 19: module: command not found\n", 5) == [
        "?[31mred",
        "module: command not found",
    ]
    assert describe_end(CommandEnd(exitcode=0)) == ""


EVENTS = "low 0\nhigh 0\nmax 12\noom 3\noom_kill 2\noom_group_kill 0\n"
CONTROL = "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n"


def tree(tmp_path: Path, *, cgroup: str, mounts: str, files: dict[str, str]) -> str:
    proc = tmp_path / "proc"
    for pid in ("self", "77"):
        (proc / pid).mkdir(parents=True)
        (proc / pid / "cgroup").write_text(cgroup)
    (proc / "self" / "mountinfo").write_text(mounts.replace("@", str(tmp_path)))
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return str(proc)


V2 = "30 23 0:26 / @/cg rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = (
    "31 23 0:28 / @/cg rw - tmpfs tmpfs rw\n32 31 0:29 / @/cg/cpu rw - cgroup cgroup rw,cpu\n"
    "35 31 0:32 / @/cg/memory rw - cgroup cgroup rw,memory\n38 31 0:35 / @/cg/unified rw - cgroup2 cgroup2 rw\n"
)


def test_of_the_whole_node(tmp_path: Path) -> None:
    assert node_oom_kill_count(proc=str(tmp_path)) is oom_kill_count(1, proc=str(tmp_path)) is None, "nothing is there"
    (tmp_path / "vmstat").write_text("nr_free_pages 7\noom_kill 83\n")
    assert node_oom_kill_count(proc=str(tmp_path)) == 83


TASK = "job_1/step_0/task_0"
PART = "30 23 0:26 /docker/abc @/c\\040g rw - cgroup2 cgroup2 rw\n"
OVER = (
    V1.replace(" / @/cg/memory", " /.. @/cg/memory")
    + "80 31 0:96 / @/cg rw - tmpfs cgroup rw\n82 80 0:32 / @/cg/memory rw - cgroup memory rw,memory\n"
)
TWO = "29 23 0:26 /other @/old rw - cgroup2 cgroup2 rw\n30 23 0:26 /docker @/cg rw - cgroup2 cgroup2 rw\n"


@pytest.mark.parametrize(
    ("cgroup", "mounts", "files", "count"),
    [
        (f"0::/system.slice/{TASK}\n", V2, {f"cg/system.slice/{TASK}/memory.events": EVENTS}, 2),
        (
            f"9:name=systemd:/x\n4:memory:/slurm/uid_0/{TASK}\n1:cpu:/\n0::/\n",
            V1,
            {f"cg/memory/slurm/uid_0/{TASK}/memory.oom_control": CONTROL},
            5,
        ),
        # A container that sees a part of the tree.
        ("0::/docker/abc/sub\n", PART, {"c g/sub/memory.events": EVENTS}, 2),
        # As seen on a node of the Slurm rig: the machine's mounts are still listed, from above the namespace's top.
        (
            "4:memory:/slurm/job_1\n",
            OVER,
            {"cg/memory/slurm/job_1/memory.oom_control": CONTROL, "cg/memory/memory.oom_control": "oom_kill 0\n"},
            5,
        ),
        # A container's own part of the tree is mounted beside another one's.
        ("0::/docker/abc\n", TWO, {"cg/abc/memory.events": EVENTS, "old/memory.events": "oom_kill 7\n"}, 2),
        # Nothing is known.
        ("0::/\n", V2, {}, None),
        ("0::/a\n", "", {"cg/a/memory.events": EVENTS}, None),
        ("", V2, {"cg/memory.events": EVENTS}, None),
        ("nonsense\n\n", "nonsense - \n", {}, None),
        ("0::/a\n", V2, {"cg/a/memory.events": "oom_kill many\n"}, None),
        ("0::/../a\n", V2, {"cg/memory.events": EVENTS}, None),
        ("0::/a\n", V2.replace(" / ", " /.. "), {"cg/memory.events": EVENTS}, None),
    ],
)
def test_the_kills_of_a_cgroup_are_counted_where_its_files_are_found(
    tmp_path: Path, cgroup: str, mounts: str, files: dict[str, str], count: int | None
) -> None:
    proc = tree(tmp_path, cgroup=cgroup, mounts=mounts, files=files)
    assert oom_kill_count(proc=proc) == oom_kill_count(77, proc=proc) == count
