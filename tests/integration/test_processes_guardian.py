"""An agent dies, is stopped, or comes back: what it left on the node is ended, and nothing else is."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpc_elastic.workers.guardian import GUARDIAN_NAME
from tests.rigs.agent_stand_in import StandIn, run_stand_in
from tests.rigs.processes import is_alive
from tests.rigs.waiting import until

# An agent with a guardian, a worker, and the daemon that the worker made.
_AGENT = """
tag = tree.Tag(run_uid=os.environ["RUN"], node_key=os.environ["NODE"], agent_uid=os.environ["UID_OF_AGENT"],
               jobs=frozenset(os.environ.get("JOBS", "").split()))
limit = float(os.environ["LIMIT"]) if "LIMIT" in os.environ else None
guard = guardian.start_guardian(tag, remove=[*filter(None, [os.environ.get("LOCAL")])], stopped_limit=limit)
worker = start(DAEMON, HPC_ELASTIC_TAG=str(tag))
daemon = int(read_line(worker.stdout_fd))
until(lambda: (tree.look_at(guard.pid).name, tree.look_at(guard.pid).state) == (guardian.GUARDIAN_NAME, "S"))
report(guardian=guard.pid, worker=worker.pid, daemon=daemon, sid=os.getsid(guard.pid),
       fds=sorted(os.readlink(f"/proc/{guard.pid}/fd/{n}") for n in os.listdir(f"/proc/{guard.pid}/fd")),
       held=tree.look_at(guard.pid).name)
"""
_NEXT_AGENT = """
tag = tree.Tag(run_uid=os.environ["RUN"], node_key="0", agent_uid="a2", jobs=frozenset(os.environ["JOBS"].split()))
report(left=len(guardian.kill_stale_processes(tag, clock=clock)))
"""
_STARTER = 'env -u HPC_ELASTIC_NODE_TAG sleep 600 >/dev/null 2>&1 & export SIBLING=$!; "$@"; exit $?'
_WAIT = "time.sleep(600)\n"


def _env(tmp_path: Path, *, run: str = "run1", node: str = "0", agent: str = "a1") -> dict[str, str]:
    # The test's own path makes tags unique to this test, whoever else runs it on this machine.
    run = f"{run}-{abs(hash(str(tmp_path))):x}"
    return {"RUN": run, "NODE": node, "UID_OF_AGENT": agent, "HPC_ELASTIC_NODE_TAG": f"{run}:{node}"}


@pytest.fixture
def spawned() -> Iterator[list[int]]:
    """Pids that a failing test must not leave behind."""
    pids: list[int] = []
    yield pids
    for pid in pids:
        if is_alive(pid):
            os.kill(pid, signal.SIGKILL)


def ends(pid: int) -> None:
    until(lambda: not is_alive(pid), what=f"the end of process {pid}")


def family_of(agent: StandIn, spawned: list[int]) -> dict[str, Any]:
    """What an agent reported of its guardian, worker and daemon."""
    facts = agent.report()
    spawned += [facts[key] for key in ("guardian", "worker", "daemon")]
    return facts


def test_the_workers_of_an_agent_that_stays_stopped_are_ended(tmp_path: Path, spawned: list[int]) -> None:
    code = "report(code=until(worker.poll).exitcode)\n"
    with StandIn(_AGENT + code + _WAIT, env={**_env(tmp_path), "LIMIT": "1"}) as agent:
        facts = family_of(agent, spawned)
        os.kill(agent.pid, signal.SIGSTOP)
        ends(facts["daemon"])
        assert is_alive(facts["guardian"])
        os.kill(agent.pid, signal.SIGCONT)
        assert agent.report()["code"] == -signal.SIGKILL, "it goes on, and sees what became of its workers"


def test_the_next_workers_of_an_agent_that_goes_on_are_left_alone(tmp_path: Path, spawned: list[int]) -> None:
    code = """
for _ in range(20):
    until(worker.poll)
    worker = start(DAEMON, HPC_ELASTIC_TAG=str(tag))
    report(worker=worker.pid, daemon=int(read_line(worker.stdout_fd)))
"""
    with StandIn(_AGENT + code + _WAIT, env={**_env(tmp_path), "LIMIT": "1"}) as agent:
        facts = family_of(agent, spawned)
        os.kill(agent.pid, signal.SIGSTOP)
        ends(facts["daemon"])
        os.kill(agent.pid, signal.SIGCONT)  # the guardian is still looking for more
        new = agent.report()
        spawned += [new["worker"], new["daemon"]]
        time.sleep(1.0)
        assert [is_alive(new[key]) for key in ("worker", "daemon")] == [True, True], "of the next round"


def test_guardian_ends_all_when_the_agent_is_killed(tmp_path: Path, spawned: list[int]) -> None:
    local = tmp_path / "local"
    (local / "deep").mkdir(parents=True)
    (local / "deep" / "file").write_text("x")
    neighbour = subprocess.Popen(
        ["sleep", "600"], env={**os.environ, "HPC_ELASTIC_TAG": "another-run:0:a1"}, start_new_session=True
    )
    spawned.append(neighbour.pid)
    with StandIn(_AGENT + _WAIT, env={**_env(tmp_path), "LOCAL": str(local)}) as agent:
        facts = family_of(agent, spawned)
        assert facts["sid"] == facts["guardian"]
        assert facts["held"] == GUARDIAN_NAME
        assert facts["fds"][:3] == ["/dev/null"] * 3, "srun's pipes must not stay open in the guardian"
        assert [name.split(":")[0] for name in facts["fds"][3:]] == ["anon_inode", "socket"]
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            os.kill(facts["guardian"], number)
        agent.kill()
        ends(facts["daemon"])
        ends(facts["guardian"])
        assert not is_alive(facts["worker"])
        assert not local.exists()
        assert neighbour.poll() is None
    neighbour.kill()
    neighbour.wait()


def test_guardian_told_to_leave_ends_nothing(tmp_path: Path, spawned: list[int]) -> None:
    code = (
        _AGENT
        + """
daemon_was = is_alive(daemon)
gone = guard.release()
report(gone=gone, known=guard.pid in tree.children(os.getpid()), daemon=daemon_was and is_alive(daemon))
os.kill(daemon, 9)
"""
    )
    local = tmp_path / "local"
    local.mkdir()
    with StandIn(code, env={**_env(tmp_path), "LOCAL": str(local)}) as agent:
        facts = agent.report()
        spawned += [facts["worker"], facts["daemon"]]
        assert agent.report() == {"gone": True, "known": False, "daemon": True}
        assert agent.process.wait(20) == 0
    assert local.exists()


def test_guardian_sees_the_death_though_somebody_holds_its_pipe(tmp_path: Path, spawned: list[int]) -> None:
    code = (
        _AGENT
        + """
os.set_inheritable(guard._control_fd, True)
holder = subprocess.Popen(["sleep", "600"], close_fds=False, start_new_session=True)
report(holder=holder.pid)
"""
        + _WAIT
    )
    with StandIn(code, env=_env(tmp_path)) as agent:
        facts = agent.report()
        holder = agent.report()["holder"]
        spawned += [facts["guardian"], facts["worker"], facts["daemon"], holder]
        agent.kill()
        ends(facts["daemon"])
        ends(facts["guardian"])
        assert is_alive(holder), "it carries no tag"


def test_guardian_is_small_and_comes_before_threads() -> None:
    facts = run_stand_in(
        """
        guard = guardian.start_guardian(tree.Tag(run_uid="small", node_key="0", agent_uid="a"))
        until(lambda: tree.look_at(guard.pid).name == guardian.GUARDIAN_NAME)
        junk = [bytes(1000) for _ in range(10_000)]  # the agent lives on, and makes its pages its own
        until(lambda: tree.look_at(guard.pid).state == "S")
        rollup = open(f"/proc/{guard.pid}/smaps_rollup").read()
        private = sum(int(l.split()[1]) for l in rollup.splitlines() if l.startswith("Private_"))
        guard.release()
        stop_it = threading.Event()
        thread = threading.Thread(target=stop_it.wait)
        thread.start()
        try:
            guardian.start_guardian(tree.Tag(run_uid="small", node_key="0", agent_uid="a"))
            refused = ""
        except RuntimeError as error:
            refused = str(error)
        stop_it.set()
        report(private=private, refused=refused)
        """
    )
    assert facts["private"] < 4096, "KiB that only the guardian holds"
    assert "thread" in facts["refused"]


def test_guardian_ends_those_who_have_cleared_their_environment(tmp_path: Path, spawned: list[int]) -> None:
    """One in the worker's session, and a daemon; and nobody who merely looks like one of the run's."""
    code = """
tag = tree.Tag(run_uid=os.environ["RUN"], node_key=os.environ["NODE"], agent_uid=os.environ["UID_OF_AGENT"])
guard = guardian.start_guardian(tag)
worker = start('''
    import subprocess
    clean = subprocess.Popen(["sleep", "600"], env={})
    quiet = ["sh", "-c", "env -i setsid sleep 600 >/dev/null 2>&1 & echo $!"]
    daemon = subprocess.run(quiet, stdout=subprocess.PIPE, env={"PATH": os.environ["PATH"]}).stdout
    print(clean.pid, int(daemon), flush=True)
    time.sleep(600)
''', HPC_ELASTIC_TAG=str(tag))
clean, daemon = map(int, read_line(worker.stdout_fd).split())
until(lambda: tree.look_at(daemon).ppid == os.getpid() and tree.look_at(daemon).name == "sleep")
def looks():
    text = open(f"/proc/{guard.pid}/status").read()
    return int(text.partition("\\nvoluntary_ctxt_switches:")[2].split()[0])
before = looks()
until(lambda: looks() >= before + 2)
report(guardian=guard.pid, worker=worker.pid, clean=clean, daemon=daemon, tag=str(tag))
"""
    with StandIn(code + _WAIT, env=_env(tmp_path)) as agent:
        facts = agent.report()
        spawned += [facts[key] for key in ("guardian", "worker", "clean", "daemon")]
        assert Path(f"/proc/{facts['clean']}/environ").read_bytes() == b""
        look_alikes = [
            subprocess.Popen(["sleep", "600"], env=env, start_new_session=True)
            for env in (
                {"HPC_ELASTIC_TAG": facts["tag"] + "x"},
                {"HPC_ELASTIC_TAG": facts["tag"].replace("run1", "run11")},
                {"MY_HPC_ELASTIC_TAG": facts["tag"]},
                {"NOTE": f"HPC_ELASTIC_TAG={facts['tag']}"},
            )
        ]
        try:
            agent.kill()
            ends(facts["guardian"])
            assert [key for key in ("worker", "clean", "daemon") if is_alive(facts[key])] == []
            assert [process.poll() for process in look_alikes] == [None] * 4
        finally:
            for process in look_alikes:
                process.kill()
                process.wait()


@pytest.mark.parametrize("is_stopped", [True, False])
def test_new_agent_ends_the_one_before_it(tmp_path: Path, spawned: list[int], is_stopped: bool) -> None:
    local = tmp_path / "local"
    local.mkdir()
    with (
        StandIn(_AGENT + _WAIT, env={**_env(tmp_path), "LOCAL": str(local)}) as old,
        StandIn(_AGENT + _WAIT, env=_env(tmp_path, node="1")) as other_node,
        StandIn(_AGENT + _WAIT, env=_env(tmp_path, run="run2")) as other_run,
    ):
        facts = old.report()
        others = [other_node.report(), other_run.report()]
        bystanders = [pid for f in others for pid in (f["guardian"], f["worker"], f["daemon"])]
        bystanders += [other_node.pid, other_run.pid]
        prey = [facts["guardian"], facts["worker"], facts["daemon"], old.pid]
        spawned += bystanders + prey
        if is_stopped:
            os.kill(old.pid, signal.SIGSTOP)
        else:
            # The agent and its guardian are gone already; only the daemon is left.
            os.kill(facts["guardian"], signal.SIGKILL)
            old.kill()
            assert is_alive(facts["daemon"])
        new = run_stand_in(
            """
            tag = tree.Tag(run_uid=os.environ["RUN"], node_key=os.environ["NODE"], agent_uid=os.environ["UID_OF_AGENT"])
            guard = guardian.start_guardian(tag)
            own = start("print('ready', flush=True); time.sleep(600)", HPC_ELASTIC_TAG=str(tag))
            read_line(own.stdout_fd)
            sibling = int(os.environ["SIBLING"])
            until(lambda: "HPC_ELASTIC_NODE_TAG" not in open(f"/proc/{sibling}/environ").read())
            left = guardian.kill_stale_processes(tag, clock=clock)
            looks = []
            really = tree.own_processes_where
            tree.own_processes_where = lambda matches: looks.append(1) or really(matches)
            guardian.kill_stale_processes(tag, clock=clock)
            again = len(looks)
            alive = [is_alive(own.pid), is_alive(guard.pid)]
            stop_now([own], clock=clock, excluding={guard.pid})
            guard.release()
            was_alive = is_alive(sibling)
            os.kill(sibling, 9)
            report(left=len(left), alive=alive, again=again, sibling=was_alive)
            """,
            env=_env(tmp_path, agent="a2"),
            # A starter that carries the node's tag and waits for the agent must survive, with what else it runs.
            prefix=["sh", "-c", _STARTER, "sh"],
        )
        assert new["left"] == 0
        assert new["alive"] == [True, True]
        assert new["sibling"]
        assert new["again"] == 1, "with nothing to end it takes one look"
        old.process.wait(30)
        assert [pid for pid in prey if is_alive(pid)] == []
        assert [pid for pid in bystanders if not is_alive(pid)] == []
        assert local.exists() is not is_stopped, "the old guardian, where it lived, cleared up by itself"
        for pid in bystanders:
            os.kill(pid, signal.SIGKILL)


def test_younger_agent_is_left_to_end_us(tmp_path: Path, spawned: list[int]) -> None:
    env = _env(tmp_path)
    with StandIn(
        """
        tag = tree.Tag(run_uid=os.environ["RUN"], node_key=os.environ["NODE"], agent_uid="a1")
        report()
        until(lambda: os.path.exists(os.environ["GO"]))
        report(left=len(guardian.kill_stale_processes(tag, clock=clock)))
        """,
        env={**env, "GO": str(tmp_path / "go")},
    ) as elder:
        elder.report()
        younger = subprocess.Popen(["sleep", "600"], env={**os.environ, **env}, start_new_session=True)
        spawned.append(younger.pid)
        (tmp_path / "go").touch()
        assert elder.report() == {"left": 0}
        assert younger.poll() is None
        younger.kill()
        younger.wait()


@pytest.mark.parametrize("agent_job", ["12", ""])
def test_a_job_that_a_worker_submitted_lives_on(tmp_path: Path, spawned: list[int], agent_job: str) -> None:
    """It carries all tags of the run that it was submitted from. Neither the guardian nor the next agent ends it."""
    env = _env(tmp_path)
    tag = f"{env['RUN']}:0:a1"
    job = {"SLURM_JOB_ID": agent_job} if agent_job else {}
    others = [
        subprocess.Popen(["sleep", "600"], env={**env, **marks, "SLURM_JOB_ID": "13"}, start_new_session=True)
        for marks in ({"HPC_ELASTIC_TAG": tag}, {"HPC_ELASTIC_TAG": f"{env['RUN']}:0:a0"}, {})
    ]
    spawned += [process.pid for process in others]
    with StandIn(_AGENT + _WAIT, env={**env, **job, "JOBS": agent_job}) as agent:
        facts = family_of(agent, spawned)
        agent.kill()
        ends(facts["guardian"])
        assert not is_alive(facts["daemon"]), "what the agent's own job runs is ended"
    assert [process.poll() for process in others] == [None] * 3
    assert run_stand_in(_NEXT_AGENT, env={**env, **job, "JOBS": agent_job}) == {"left": 0}
    assert [process.poll() for process in others] == [None] * 3
    for process in others:
        process.kill()
        process.wait()


@pytest.mark.parametrize(("before", "now"), [("12", "12"), ("12", "14 12")], ids=["requeued", "follow-on job"])
def test_the_next_attempt_ends_what_the_last_one_left(
    tmp_path: Path, spawned: list[int], before: str, now: str
) -> None:
    env = _env(tmp_path)
    with StandIn(_AGENT + _WAIT, env={**env, "SLURM_JOB_ID": before, "JOBS": before}) as agent:
        facts = family_of(agent, spawned)
        os.kill(facts["guardian"], signal.SIGKILL)
        agent.kill()
        assert is_alive(facts["daemon"])
    assert run_stand_in(_NEXT_AGENT, env={**env, "SLURM_JOB_ID": now.split()[0], "JOBS": now}) == {"left": 0}
    assert not is_alive(facts["daemon"])
