"""Nodes are warm before they are needed: spares, nodes that join late, requeued attempts, replaced processes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from hpc_elastic.agent.fork_server import ServerState
from hpc_elastic.run.paths import ExitCode
from hpc_elastic.run.spec import Preload, load_preload
from tests.integration.test_inprocess_replacement import _HEAD
from tests.integration.test_local_run_growth import _QUICK, GatedRun
from tests.rigs.local_run import LocalRun
from tests.rigs.start_methods import Starter, finish
from tests.rigs.waiting import until

_SCRIPT = """
was = "slow" in sys.modules
import slow
tell("here", host=int(os.environ["HPC_ELASTIC_TAG"].split(":")[1]), warm=was)
others_in_round()
wait_for("end")
"""
_FORKS = ("--start-method", "forkserver", "--preload", "slow")


def _slow(folder: Path, seconds: float) -> None:
    (folder / "slow.py").write_text(f"import time\ntime.sleep({seconds})")


def _fresh(run: LocalRun) -> set[str]:
    return {event["started_fresh"] for event in run.events("workers_started")}


def test_a_spare_that_takes_over_forks_and_imports_nothing(tmp_path: Path) -> None:
    _slow(tmp_path, 2.0)
    options = [*_FORKS, "--spares", "1", "--rdzv-conf", f"{_QUICK},last_call_timeout=100"]
    with GatedRun(tmp_path, _SCRIPT, nodes=2, options=options) as run:
        assert run.seats(0, count=2) == [0, 1]
        run.until(lambda: run.waiting() == ["node2 waits as a spare"], "word that a spare waits")
        run.until(lambda: len(run.events("fork_server_ready")) == 3, "a warm spare")
        run.refuse(0)
        os.kill(run.agent(0).pid, signal.SIGKILL)
        assert run.seats(1, count=2) == [2, 1]
        run.finish_well()
        assert _fresh(run) == {""}
        assert {value["warm"] for value in run.moments("here")} == {True}
        (started,) = [e for e in run.events("workers_started") if (e["round"], e["node"]) == (1, 2)]
        assert started["start_seconds"] < 1.5, "no import is waited for"


def test_a_node_that_comes_late_joins_the_running_round_when_it_is_warm(tmp_path: Path) -> None:
    _slow(tmp_path, 6.0)
    options = [*_FORKS, "--grow", "now", "--rdzv-conf", f"{_QUICK},last_call_timeout=100"]
    with GatedRun(tmp_path, _SCRIPT, nodes=3, min_nodes=2, options=options) as run:
        assert run.seats(0, count=3) == [0, 1, 2]
        run.close_gate(1)
        run.until(lambda: any(one["node"] == 1 for one in run.events("fork_server_ready")), "the event of its server")
        os.kill(run.agent(1).pid, signal.SIGKILL)
        assert run.seats(1, count=2) == [0, 2]
        run.open_gate(1)
        assert run.seats(2, count=3) == [0, 2, 1]
        run.finish_well()
        assert _fresh(run) == {""}
        first, second = [event["t"] for event in run.events("fork_server_ready") if event["node"] == 1]
        assert first < second < run.opened(2)["t"], "the round goes on while the node that comes imports"


def test_a_spare_imports_what_workers_elsewhere_have_learned(tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text("")
    (tmp_path / "unfit.py").write_text("import socket\nS = socket.socket()")
    (tmp_path / "train.py").write_text("import sys; print('late' in sys.modules)")
    with Starter(tmp_path, preload=("json",), is_auto=True) as starter:
        starter.ready()
        known = Preload(modules=("json",), learned=("late", "unfit"), is_auto=True).without("unfit", "why")
        known.save(tmp_path / "preload.json")
        until(lambda: (starter.server.handle(), "late" in starter.server.preload.learned)[1], "the spare's look")
        assert starter.server.preload.left_out == {"unfit": "why"}
        until(lambda: (starter.server.handle(), starter.imports() == 2)[1], "the second import")
        starter.until(ServerState.READY)
        assert starter.server.due is not None
        assert finish(starter.fork()).stdout == "True\n"
        starter.server.fork_workers([{**starter.base, "GROUP_RANK": "1"}])
        assert starter.server.due is None, "with workers of its own it learns from them"


@pytest.mark.torch
def test_a_requeued_attempt_starts_with_what_the_one_before_has_learned(tmp_path: Path) -> None:
    library = tmp_path / "site-packages" / "lib"
    library.mkdir(parents=True)
    for name in ("__init__", "late"):
        (library / f"{name}.py").write_text("")
    script = """
    import lib
    tell("here", warm="lib.late" in sys.modules)
    import lib.late
    while "lib.late" not in open(os.environ["HPC_ELASTIC_RUN_DIR"] + "/preload.json").read():
        time.sleep(0.05)
    sys.exit(0 if ATTEMPT else 3)
    """
    options = ["--start-method", "forkserver", "--max-restarts", "0", "--max-requeues", "1"]
    environ = {"PYTHONPATH": f"{tmp_path / 'site-packages'}:{Path(__file__).parents[2]}"}
    with LocalRun(tmp_path, script, nodes=1, options=options, environ=environ) as run:
        assert run.finish(within=240) == ExitCode.OK
        assert [run.moments("here", attempt=attempt)[0]["warm"] for attempt in (0, 1)] == [False, True]
        kept = load_preload(run.paths.preload)
        assert kept is not None
        assert {"lib", "lib.late"} <= {*kept.learned}
        assert kept.modules == ("torch",)


@pytest.mark.torch
def test_a_process_that_takes_a_dead_ones_place_is_a_fork(tmp_path: Path) -> None:
    (tmp_path / "marker.py").write_text("")
    script = (
        "import sys\nwas = 'marker' in sys.modules\n"
        + _HEAD
        + """
@inprocess.Wrapper(initialize=inprocess.initialize.RetryController(max_iterations=3))
def train(call: inprocess.CallWrapper):
    rank, total = join(call)
    tell(f"here{call.iteration}", now=rank, total=total, warm=was)
    all_have_told(call.iteration)
    if call.iteration == 0 and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()

train()
"""
    )
    options = ["--start-method", "forkserver", "--preload", "torch,marker", "--restart-policy", "in-process"]
    with LocalRun(tmp_path, script, nodes=2, options=options) as run:
        assert run.finish(within=240) == ExitCode.OK
        (replaced,) = run.events("worker_replaced")
        (fresh,) = [value for value in run.moments("here1") if value["now"] == 1]
        assert fresh["pid"] == replaced["pid"]
        assert fresh["warm"] is True
        assert "started fresh" not in run.log()
        assert {value["total"] for value in run.moments("here1")} == {2}
