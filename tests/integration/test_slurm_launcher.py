"""Agents as srun steps, against an srun that prints what real ones printed and ends, or does not, as they did."""

from __future__ import annotations

import errno
import os
import select
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hpc_elastic.base.clock import SystemClock
from hpc_elastic.launch.agents import AgentEnd
from hpc_elastic.launch.slurm_launcher import SlurmLauncher
from hpc_elastic.launch.slurm_site import SlurmSite, own_script
from hpc_elastic.run.paths import RunPaths
from hpc_elastic.run.spec import EntryKind, Entrypoint
from tests.rigs.processes import is_alive
from tests.rigs.specs import make_attempt, make_spec
from tests.rigs.waiting import until

NODES = ["n1", "n2", "n3", "n4"]
FAKE_SRUN = """\
#!/bin/sh
# Plays what the test wrote for its N-th call; notes its arguments and environment.
n=1
until mkdir "$FAKE/call.$n" 2>/dev/null; do n=$((n + 1)); done
for word in "$@"; do printf '%s\\n' "$word"; done > "$FAKE/call.$n/argv"
env > "$FAKE/call.$n/env"
umask > "$FAKE/call.$n/umask"
echo $$ > "$FAKE/call.$n/pid"
[ -f "$FAKE/plan.$n" ] || exit 0
. "$FAKE/plan.$n"
"""
MARKED = """\
while [ "$1" != /bin/sh ]; do shift; done
exec "$@" > "$FAKE/agent"
"""
FOREVER = "while :; do sleep 0.02; done\n"
LAUNCH_FAILED = """\
printf '%s\\n' >&2 \\
  'srun: error: Task launch for StepId=5.0 failed on node {node}: Communication connection failure' \\
  'srun: error: Application launch failed: Communication connection failure' \\
  'srun: Job step aborted: Waiting up to 7 seconds for job step to finish.' \\
  'srun: error: n1: task 0: Killed' 'srun: error: n2: task 1: Killed'
exit 233
"""


class Srun:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "bin").mkdir()
        script = folder / "bin/srun"
        script.write_text(FAKE_SRUN)
        script.chmod(0o755)
        self.env = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "FAKE": str(folder), "SLURM_NTASKS": "2"}

    def plan(self, *plans: str) -> None:
        for number, text in enumerate(plans, start=1):
            (self.folder / f"plan.{number}").write_text(text)

    def argv(self, call: int) -> list[str]:
        until(lambda: (self.folder / f"call.{call}/pid").exists(), f"call {call} of srun")
        return (self.folder / f"call.{call}/argv").read_text().splitlines()

    def read(self, call: int, name: str) -> str:
        self.argv(call)
        return (self.folder / f"call.{call}/{name}").read_text().strip()

    @property
    def calls(self) -> int:
        return len(list(self.folder.glob("call.*")))


@pytest.fixture
def srun(tmp_path: Path) -> Srun:
    return Srun(tmp_path)


Launch = Callable[..., SlurmLauncher]


@pytest.fixture
def make(srun: Srun) -> Iterator[Launch]:
    made: list[SlurmLauncher] = []

    def build(**changes: Any) -> SlurmLauncher:
        arguments: dict[str, Any] = {"environment": srun.env, "min_nodes": 2, "umask": 0o027, **changes}
        made.append(SlurmLauncher(NODES, ["agent", "--run-dir", "/runs/a b"], **arguments))
        return made[-1]

    yield build
    for launcher in made:
        launcher.end(within=0.1)


@pytest.fixture
def launch(srun: Srun, make: Launch) -> Launch:
    """A launcher that has launched its agents, by an srun that plays these plans."""

    def begin(*plans: str, **changes: Any) -> SlurmLauncher:
        srun.plan(*plans)
        launcher = make(**changes)
        launcher.launch()
        return launcher

    return begin


def test_an_srun_that_closes_its_stderr_and_stays_keeps_nobody_busy(srun: Srun, launch: Launch) -> None:
    launcher = launch(f"exec 2>&-\n{FOREVER}")

    def is_quiet() -> bool:
        return launcher.take() == [] and launcher.filenos() == []

    until(is_quiet, "the end of what srun says")
    assert launcher.running()
    assert launcher.due() is None
    os.kill(int(srun.read(1, "pid")), signal.SIGKILL)
    assert [found.node for found in ended(launcher, 4)] == [0, 1, 2, 3]


def ended(launcher: SlurmLauncher, count: int) -> list[AgentEnd]:
    """The next `count` agents that end, by node; waits for them."""
    found: list[AgentEnd] = []
    deadline = time.monotonic() + 60
    while len(found) < count:
        assert time.monotonic() < deadline, f"only {found}"
        select.select(launcher.filenos(), [], [], 0.05)
        found += launcher.take()
    assert len(found) == count, found
    return sorted(found, key=lambda end: end.node)


def nothing_more(launcher: SlurmLauncher) -> None:
    end = time.monotonic() + 0.1
    while time.monotonic() < end:
        assert launcher.take() == []
        time.sleep(0.01)


# -- how it is called


def test_one_agent_per_node_whatever_the_jobs_shape(srun: Srun, launch: Launch) -> None:
    launcher = launch(extra=["--mpi=none"])
    argv = srun.argv(1)
    assert {"-N4", "-n4", "--ntasks-per-node=1", "--overlap", "--no-kill", "--kill-on-bad-exit=0"} <= set(argv)
    assert argv[-4:] == ["--mpi=none", "agent", "--run-dir", "/runs/a b"]
    assert not [word for word in argv if word.startswith("--exclude")]
    assert "SLURM_NTASKS" not in srun.read(1, "env")
    assert int(srun.read(1, "umask"), 8) == 0o027
    ended(launcher, 4)
    assert not launcher.running()


def test_srun_is_no_child_of_the_terminal(srun: Srun, launch: Launch) -> None:
    """A Ctrl-C is for the supervisor to hand on: srun would abort the step at once."""
    launcher = launch("readlink /proc/$$/fd/0 > $FAKE/stdin; cut -d' ' -f6 /proc/$$/stat > $FAKE/session; exit 0")
    ended(launcher, 4)
    assert (srun.folder / "stdin").read_text().strip() == "/dev/null"
    assert (srun.folder / "session").read_text().strip() == srun.read(1, "pid")


# -- how agents end


@pytest.mark.parametrize(("code", "expected"), [(0, 0), (1, None), (137, None)])
def test_the_steps_end_is_the_end_of_all_its_agents(launch: Launch, code: int, expected: int | None) -> None:
    launcher = launch(f"exit {code}")
    found = ended(launcher, 4)
    assert [(end.node, end.code, end.started) for end in found] == [(n, expected, True) for n in range(4)]
    assert not launcher.running()
    assert launcher.filenos() == []


def test_an_agent_that_is_killed_is_told_of_while_the_others_run(srun: Srun, launch: Launch) -> None:
    launcher = launch(
        "echo 'srun: error: n3: task 2: Killed' >&2; until [ -e $FAKE/end ]; do sleep 0.01; done; exit 137"
    )
    assert ended(launcher, 1) == [AgentEnd(node=2, code=-9, detail="Killed")]
    assert launcher.running()
    (srun.folder / "end").touch()
    assert [end.node for end in ended(launcher, 3)] == [0, 1, 3]


def test_an_agents_own_words_are_no_events(launch: Launch, capfd: pytest.CaptureFixture[str]) -> None:
    launcher = launch(
        "printf 'Traceback (most recent call last):\\nn3: task 2: Killed\\n\\377\\376 not UTF-8\\n' >&2; "
        "printf 'the last line has no end' >&2; exit 0"
    )
    assert all(end.code == 0 for end in ended(launcher, 4))
    text = capfd.readouterr().err
    assert "Traceback" in text, "they go on into the job log"
    assert "not UTF-8\n" in text
    assert "the last line has no end\n" in text


def test_a_full_job_log_does_not_end_the_supervisor(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        flush = write

    launcher = launch("echo 'srun: error: n3: task 2: Killed' >&2; exit 137")
    monkeypatch.setattr(sys, "stderr", Full())
    found = ended(launcher, 4)
    monkeypatch.undo()
    assert [(end.node, end.code) for end in found] == [(0, None), (1, None), (2, -9), (3, None)]


# -- a node that is dead at launch


def test_a_launch_that_fails_for_a_dead_node_is_made_again_without_it(srun: Srun, launch: Launch) -> None:
    launcher = launch(LAUNCH_FAILED.format(node="n3"), FOREVER)
    (gone,) = ended(launcher, 1)
    assert (gone.node, gone.started) == (2, False)
    assert "Communication connection failure" in gone.detail
    argv = srun.argv(2)
    assert {"-N3", "-n3", "--exclude=n3"} <= set(argv)
    nothing_more(launcher)  # those that srun killed on the way run again: nobody is to start them too
    assert launcher.running()


def test_with_too_few_left_it_is_not_made_again(srun: Srun, launch: Launch) -> None:
    launcher = launch(LAUNCH_FAILED.format(node="n3"), FOREVER, min_nodes=4)
    found = ended(launcher, 4)
    assert not any(end.started for end in found)
    assert "Communication connection failure" in found[2].detail
    assert srun.calls == 1
    assert not launcher.running()


@pytest.mark.parametrize(
    ("said", "reason", "lasts"),
    [
        ("srun: fatal: SLURM_MEM_PER_CPU, SLURM_MEM_PER_GPU, and SLURM_MEM_PER_NODE are mutually exclusive.", "", True),
        ("srun: error: Couldn't find the specified plugin name for mpi/x looking at all files", "", True),
        ("srun: unrecognized option '--mpii=x'\nTry \"srun --help\" for more information", "--mpii=x", True),
        ("srun: error: Unable to create step for job 5: Invalid generic resource (gres) specification", "gres", True),
        ("srun: error: Unable to create step for job 5: Socket timed out on send/recv operation", "Socket", False),
        ("srun: error: Unable to create step for job 5: Requested nodes are busy", "busy", False),
    ],
)
def test_srun_says_itself_why_there_is_no_step(srun: Srun, launch: Launch, said: str, reason: str, lasts: bool) -> None:
    refused = f"printf '%s\\n' {shlex.quote(said)} 'srun: Job step creation' >&2; exit 1"
    launcher = launch(refused, refused)
    found = ended(launcher, 4)
    assert [(end.started, end.lasts) for end in found] == [(False, lasts)] * 4
    assert (reason or said.partition(": ")[2]) in found[0].detail
    assert srun.calls == (2 if lasts else 1), "that it comes back the same way is to be seen"


def test_it_is_not_tried_for_ever(srun: Srun, launch: Launch) -> None:
    launcher = launch(*[LAUNCH_FAILED.format(node=node) for node in ("n4", "n3", "n2", "n1")], min_nodes=1)
    found = ended(launcher, 4)
    assert not any(end.started for end in found)
    assert srun.calls == 3
    assert not launcher.running()


def test_an_agent_that_was_started_again_meanwhile_is_not_started_twice(srun: Srun, launch: Launch) -> None:
    """A second agent of a node would end the first one."""
    first = "echo 'srun: error: n1: task 0: Exited with exit code 1' >&2; until [ -e $FAKE/go ]; do sleep 0.01; done\n"
    launcher = launch(first + LAUNCH_FAILED.format(node="n3"), FOREVER, FOREVER)
    assert [(end.node, end.code) for end in ended(launcher, 1)] == [(0, 1)]
    launcher.relaunch(0)
    assert srun.argv(2)[:3] == ["-N1", "-n1", "-w"]
    (srun.folder / "go").touch()
    assert [end.node for end in ended(launcher, 1)] == [2]
    argv = srun.argv(3)
    assert {"-N2", "-n2", "--exclude=n[1,3]"} <= set(argv)
    nothing_more(launcher)


def test_a_node_that_is_dead_when_its_agent_is_started_again_is_given_up(srun: Srun, launch: Launch) -> None:
    launcher = launch(FOREVER, LAUNCH_FAILED.format(node="n2"))
    srun.argv(1)
    launcher.relaunch(1)
    (end,) = ended(launcher, 1)
    assert (end.node, end.started) == (1, False)
    assert srun.calls == 2


def test_a_node_that_slurm_gives_up_gets_no_other_agent(launch: Launch) -> None:
    launcher = launch("echo 'srun: error: Node failure on n3' >&2\n" + FOREVER)
    (end,) = ended(launcher, 1)
    assert (end.node, end.code, end.started) == (2, None, False)
    assert "gave the node up" in end.detail
    assert end.gone
    nothing_more(launcher)
    assert launcher.running()


def test_an_agent_that_outlived_a_failed_trial_on_its_node_is_still_heard_of(srun: Srun, launch: Launch) -> None:
    """The node was cut off while another agent was to be started there, and Slurm gave it up in the end."""
    launcher = launch(
        "until [ -e $FAKE/go ]; do sleep 0.01; done; echo 'srun: error: n2: task 1: Killed' >&2\n"
        "until [ -e $FAKE/gone ]; do sleep 0.01; done; echo 'srun: error: Node failure on n2' >&2\n" + FOREVER,
        LAUNCH_FAILED.format(node="n2"),
        "echo 'srun: error: Node failure on n2' >&2\n" + FOREVER,
    )
    srun.argv(1)
    launcher.relaunch(1)
    (end,) = ended(launcher, 1)
    assert (end.started, end.gone) == (False, False)
    (srun.folder / "go").touch()
    (end,) = ended(launcher, 1)
    assert (end.node, end.code, end.started) == (1, -9, True)
    launcher.relaunch(1)
    (end,) = ended(launcher, 1)
    assert (end.node, end.started, end.gone) == (1, False, True)
    (srun.folder / "gone").touch()
    nothing_more(launcher)


# -- a step that can not be made


def test_a_container_without_srun(launch: Launch, tmp_path: Path) -> None:
    launcher = launch(environment={"PATH": str(tmp_path)})
    found = ended(launcher, 4)
    assert not any(end.started for end in found)
    assert all("srun" in end.detail for end in found)
    assert not launcher.running()
    launcher.relaunch(2)
    assert [(end.node, end.started) for end in ended(launcher, 1)] == [(2, False)]


# -- starting again


def test_one_agent_is_started_again_in_a_step_of_its_own(srun: Srun, launch: Launch) -> None:
    first = "echo 'srun: error: n2: task 1: Killed' >&2; until [ -e $FAKE/end ]; do sleep 0.01; done; exit 137"
    launcher = launch(first, "until [ -e $FAKE/end2 ]; do sleep 0.01; done; exit 3", extra=["--mpi=none"])
    ended(launcher, 1)
    launcher.relaunch(1)
    argv = srun.argv(2)
    assert argv[:4] == ["-N1", "-n1", "-w", "n2"]
    assert {"--overlap", "--no-kill", "--mpi=none"} <= set(argv)
    assert len(launcher.filenos()) == 2
    (srun.folder / "end").touch()
    assert [end.node for end in ended(launcher, 3)] == [0, 2, 3], "the older step knows nothing of the newer agent"
    assert launcher.running()
    (srun.folder / "end2").touch()
    assert [(end.node, end.code) for end in ended(launcher, 1)] == [(1, None)]
    assert not launcher.running()


# -- the end


def test_sigterm_is_handed_on_each_time(srun: Srun, launch: Launch) -> None:
    launcher = launch("trap 'echo term >> $FAKE/terms' TERM; touch $FAKE/ready; " + FOREVER)
    until((srun.folder / "ready").exists, "the trap")
    for count in (1, 2):
        launcher.terminate()
        until(
            lambda count=count: (
                (srun.folder / "terms").exists() and len((srun.folder / "terms").read_text()) == 5 * count
            ),
            "SIGTERM",
        )  # type: ignore[misc]


def test_an_srun_that_never_returns_is_ended(srun: Srun, launch: Launch) -> None:
    launcher = launch("trap '' TERM; touch $FAKE/ready; " + FOREVER)
    until((srun.folder / "ready").exists, "the trap")
    pid = int(srun.read(1, "pid"))
    began = time.monotonic()
    launcher.end(within=0.3)
    assert 0.2 < time.monotonic() - began < 9
    assert not is_alive(pid)
    assert not launcher.running()
    assert launcher.filenos() == []
    launcher.end(within=10)
    assert time.monotonic() - began < 9, "nothing is left to wait for"


def test_one_that_returns_is_not_waited_for_longer(srun: Srun, launch: Launch) -> None:
    launcher = launch("trap 'exit 143' TERM; touch $FAKE/ready; " + FOREVER)
    until((srun.folder / "ready").exists, "the trap")
    began = time.monotonic()
    launcher.end(within=20)
    assert time.monotonic() - began < 18


def test_at_the_end_nothing_is_launched_again(srun: Srun, launch: Launch) -> None:
    """A node was dead, and before that was known the run was cancelled."""
    failed = LAUNCH_FAILED.format(node="n3")
    launcher = launch(f"fail() {{\n{failed}}}\ntrap fail TERM; touch $FAKE/ready; {FOREVER}", FOREVER)
    until((srun.folder / "ready").exists, "the trap")
    launcher.end(within=5)
    assert srun.calls == 1
    assert not launcher.running()


def test_ending_what_was_never_launched_is_nothing(make: Launch) -> None:
    launcher = make()
    launcher.end(within=1)
    launcher.terminate()
    assert launcher.take() == []


def test_a_step_that_ended_by_itself_needs_no_signal(srun: Srun, launch: Launch) -> None:
    launcher = launch()
    pid = int(srun.read(1, "pid"))
    until(lambda: not is_alive(pid), "srun's end")
    launcher.terminate()
    assert [end.code for end in ended(launcher, 4)] == [0] * 4
    with pytest.raises(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)  # and was reaped


def test_an_interpreter_whose_path_holds_an_equals_sign(
    srun: Srun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An environment in a folder named lr=0.1, say. The agent gets its mark, and the path is not taken for one."""
    python = tmp_path / "lr=0.1/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "$HPC_ELASTIC_NODE_TAG" "$*"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    srun.plan(MARKED)
    env = {**srun.env, "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_JOB_NUM_NODES": "1"}
    entrypoint = Entrypoint(kind=EntryKind.SCRIPT, target="train.py")
    spec = make_spec(run_id="r", entrypoint=entrypoint)
    attempt = make_attempt(number=3)
    site = SlurmSite(env, clock=SystemClock(), umask=0o22, script=own_script(RunPaths(tmp_path)))
    launcher = site.launcher(spec, RunPaths(tmp_path), attempt)
    launcher.launch()
    ended(launcher, 1)
    said = (tmp_path / "agent").read_text()
    assert said.startswith(f"{spec.uid}:host -")
    assert " -c " in said
    assert said.endswith(f" agent --run-dir {tmp_path} --attempt 3\n")


def test_the_last_message_of_a_node_is_what_names_it_or_what_its_own_step_printed_last(launch: Launch) -> None:
    """Lines carry no node; that the folder could not be changed is only a warning."""
    launcher = launch(
        "printf '%s\\n' >&2 'slurmstepd-n3: error: TaskProlog failed status=3' "
        "'srun: error: n3: task 2: Exited with exit code 3' "
        '"slurmstepd-n4: error: couldn\'t chdir to /x: No such file or directory: going to /tmp instead" '
        "'env: python: No such file or directory' 'srun: error: n4: task 3: Exited with exit code 127'\n" + FOREVER,
        "printf '%s\\n' >&2 'first' 'n1.local: Permission denied' '  <no Python frame>' "
        "'srun: error: n4: task 0: Exited with exit code 126'",
    )
    ended: list[AgentEnd] = []
    until(lambda: ended.extend(launcher.take()) or len(ended) == 2, "two ends")  # type: ignore[func-returns-value]
    assert [launcher.last_message(node) for node in (2, 3)] == [
        "slurmstepd-n3: error: TaskProlog failed status=3",
        "env: python: No such file or directory",
    ]
    launcher.relaunch(3)
    until(lambda: ended.extend(launcher.take()) or len(ended) == 3, "the third")  # type: ignore[func-returns-value]
    until(lambda: launcher.take() or launcher.last_message(3) == "n1.local: Permission denied", "its message")
    assert launcher.last_message(2) == "slurmstepd-n3: error: TaskProlog failed status=3", "still"
