"""An agent's figures of a run that restarts once: for Prometheus, into events and the job log."""

from __future__ import annotations

import re
from pathlib import Path

from hpc_elastic.run.paths import ExitCode
from tests.rigs.local_run import LocalRun

_TRAINS = """
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
tell("here")
others_in_round()
wait_for(f"end-{ROUND}")
"""


def restarted_once(run: LocalRun) -> None:
    run.wait_moments("here", count=2)
    run.kill_worker(1, round_index=0)
    run.wait_moments("here", count=2, round_index=1)
    run.say("end-1")
    assert run.finish() == ExitCode.OK


def test_prometheus_events_and_the_job_log(tmp_path: Path) -> None:
    options = ["--metrics", f"prometheus:{tmp_path}/hpc-{{host}}.prom", "--role", "trainer"]
    with LocalRun(tmp_path, _TRAINS, options=options) as run:
        restarted_once(run)
        text = (tmp_path / "hpc-node0.prom").read_text()
        labels = f'host="node0",node="0",role="trainer",run="{run.paths.run_id}"'
        assert f"hpc_elastic_workers_remaining_restarts{{{labels}}} 2\n" in text
        assert f'hpc_elastic_workers_state{{{labels},state="succeeded"}} 1\n' in text
        assert f'hpc_elastic_workers_state{{{labels},state="healthy"}} 0\n' in text
        events = [event for event in run.events("workers_started") if event["node"] == 0]
        assert [event["restart_seconds"] is None for event in events] == [True, False]
        last = events[1]
        for name in ("rendezvous_seconds", "start_seconds", "restart_seconds"):
            assert f"hpc_elastic_workers_{name}{{{labels}}} {last[name]:g}\n" in text
        assert f"hpc_elastic_workers_stop_seconds{{{labels}}} " in text
        assert 0 < last["rendezvous_seconds"] + last["start_seconds"] <= last["restart_seconds"] + 0.01 < 30
        # The block of each round, and of the restart its reason with what is left of the budget.
        log = run.log()
        block = r"\[node0\] round 1: role trainer, 2 ranks on 2 nodes, master 127\.0\.0\.1:\d+, 1 of 3 restarts used"
        assert re.search(block, log)
        assert re.search(r"\] restart 1 of 3 \(2 left\) after: rank 1: Signal 9 \(SIGKILL\)", log)
