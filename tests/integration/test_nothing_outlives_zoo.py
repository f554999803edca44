"""Workers that misbehave in every way at once, in a real run, however they must go; with a run beside it."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.rigs.local_run import LocalRun
from tests.rigs.processes import cost, guardian_of, is_alive
from tests.rigs.waiting import until

_ZOO = """
def child(code, **how):
    text = "import os, signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    process = subprocess.Popen([sys.executable, "-S", "-c", text + code], stdout=subprocess.PIPE, **how)
    return int(process.stdout.readline() or 0)

SLEEPS = "print(os.getpid(), flush=True); os.close(1); time.sleep(1000)"
DAEMON = "os.fork() and os._exit(0); os.setsid(); os.fork() and os._exit(0); " + SLEEPS
family, way = [os.getpid()], RANK if ROUND == 0 else -1
if way in (2, 3):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if way == 0:
    family += [child(SLEEPS)]
elif way == 1:
    family += [child(DAEMON)]
elif way == 5:
    family += [child(SLEEPS, start_new_session=True)]
elif way == 6:
    family += [child(SLEEPS, env={}), child(DAEMON, env={})]
elif way == 7:
    os.setpgid(0, 0) if os.getpgid(0) != os.getpid() else None
    family += [child("os.setpgid(0, 0); " + SLEEPS)]
tell("here", family=family)
if way == 0:
    os._exit(0)
elif way == 3:
    os.kill(os.getpid(), signal.SIGSTOP)
elif way == 4:
    os.closerange(0, 3)
elif way == 7:
    wait_for("fail")
    os._exit(1)
wait_for("end" if ROUND else "never")
"""
_NEIGHBOUR = """
subprocess.Popen(["sh", "-c", "(setsid sleep 1000 &)"]).wait()
tell("here")
wait_for("end")
"""
_CLEARED = 6
GONE_WITHIN = 15.0
"""Seconds after the death of the agents and nothing else."""


@pytest.mark.parametrize("ending", ["worker fails", "agents killed", "guardians and agents killed"])
def test_whatever_workers_do_nothing_of_them_stays(tmp_path: Path, ending: str) -> None:
    for name in ("run", "beside"):
        (tmp_path / name).mkdir()
    options = ["--shutdown-timeout", "1"]
    beside = LocalRun(tmp_path / "beside", _NEIGHBOUR, nodes=2)
    with beside, LocalRun(tmp_path / "run", _ZOO, nodes=2, nproc=4, options=options) as run:
        here = run.wait_moments("here", count=8, round_index=0)
        beside.wait_moments("here", count=2)
        neighbours = [p for p in beside.processes() if "RANK" in p.environ]
        agents = [run.agent(0).pid, run.agent(1).pid]
        guardians = [guardian_of(agent) for agent in agents]
        doomed = {pid for moment in here for pid in moment["family"]}
        assert len(doomed) == 14
        strays = set(here[_CLEARED]["family"][1:])
        if ending == "worker fails":
            run.say("fail")
        elif ending == "agents killed":
            for guardian in guardians:
                _wait_for_looks(guardian)
            _kill(agents)
            until(lambda: not any(map(is_alive, doomed)), seconds=GONE_WITHIN, what="the end of all")
        else:
            _kill(guardians)
            _kill(agents)
            doomed -= strays  # without a mark and without anybody who knew them: Slurm ends them, with the step
        run.wait_moments("here", count=8, round_index=1)
        assert [pid for pid in doomed if is_alive(pid)] == [], "before the next round begins"
        _kill([pid for pid in strays if is_alive(pid)])
        run.finish_well()
        assert neighbours
        assert all(process.lives() for process in neighbours)
        assert {event["round"] for event in beside.events("round_final")} == {0}
        beside.say("end")


@contextmanager
def _usual_file_limit() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def _wait_for_looks(guardian: int) -> None:
    _, before = cost(guardian)
    until(lambda: cost(guardian)[1] >= before + 2, what="two looks of the guardian")


def _kill(pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("ending", [pytest.param("stopped", marks=pytest.mark.slow), "agent killed"])
def test_two_hundred_workers_on_one_node(tmp_path: Path, ending: str) -> None:
    """Started within the descriptors of a usual shell (1024), and all gone soon after one has failed."""
    stage = tmp_path / "stage"
    script = "trap 'exit 0' TERM; echo out; echo err >&2; "
    script += f"test $(ulimit -n) = 1024 && touch {stage}/$RANK.$TORCHELASTIC_RESTART_COUNT.$$; sleep 1000 & wait"
    run = LocalRun(
        tmp_path,
        "",
        nodes=1,
        nproc=200,
        interpreter=["--no-python", "sh", "-c", script],
        options=["--max-restarts", "1"],
    )
    with _usual_file_limit(), run:

        def started(round_index: int) -> list[str]:
            return [path.name for path in stage.glob(f"*.{round_index}.*")]

        run.until(lambda: len(started(0)) == 200, "200 workers", within=120)
        first = [int(name.rpartition(".")[2]) for name in started(0)]
        began = time.monotonic()
        if ending == "stopped":
            os.kill(first[0], signal.SIGKILL)
            (stopped,) = run.until(lambda: run.events("workers_stopped"), "stop")
            assert stopped["seconds"] < 25
        else:
            os.kill(run.agent(0).pid, signal.SIGKILL)
            until(lambda: not any(map(is_alive, first)), seconds=GONE_WITHIN, what="the end of all")
        run.until(lambda: len(started(1)) == 200, "200 workers again", within=120)
        assert not any(map(is_alive, first))
        assert time.monotonic() - began < 120
        assert len(os.listdir(f"/proc/{run.agent(0).pid}/fd")) < 5 * 200 + 60
        run.signal(signal.SIGTERM)
        assert run.finish(within=120) == 128 + signal.SIGTERM
        run.check_nothing_left(within=10)
