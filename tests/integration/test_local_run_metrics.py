"""An agent's figures of a run that restarts once: to JSON lines, for Prometheus, into events and the job log."""

from __future__ import annotations

import json
import re
from pathlib import Path

from hpc_elastic.base.outcome import ExitCode
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


def test_json_lines_events_and_the_job_log(tmp_path: Path) -> None:
    options = ["--metrics", f"jsonl:{tmp_path}/figures-{{host}}.jsonl", "--role", "trainer"]
    with LocalRun(tmp_path, _TRAINS, options=options) as run:
        restarted_once(run)
        lines = [json.loads(line) for line in (tmp_path / "figures-node0.jsonl").read_text().splitlines()]
        assert {(line["host"], line["node"], line["run"]) for line in lines} == {("node0", "0", run.paths.run_id)}
        names = [line["name"].removeprefix("workers.trainer.") for line in lines]
        states = [name for name in names if not name.endswith(("_seconds", "_restarts"))]
        assert states == ["init", "healthy", "unhealthy", "stopped", "healthy", "succeeded"]
        left = [line["value"] for line in lines if line["name"] == "workers.trainer.remaining_restarts"]
        assert left == [3, 2]
        spans = [(name, line["value"]) for name, line in zip(names, lines, strict=True) if name.endswith("_seconds")]
        first, again = ["rendezvous", "start"], ["stop", "rendezvous", "start", "restart"]
        assert [name.removesuffix("_seconds") for name, _ in spans][:6] == first + again
        assert all(0 <= value < 30 for _, value in spans)
        events = [event for event in run.events("workers_started") if event["node"] == 0]
        assert [event["restart_seconds"] is None for event in events] == [True, False]
        told = [value for name, value in spans if name == "rendezvous_seconds"]
        assert [event["rendezvous_seconds"] for event in events] == told
        assert events[1]["restart_seconds"] >= events[1]["rendezvous_seconds"] + events[1]["start_seconds"] - 0.01
        # The block of each round, and of the restart its reason with what is left of the budget.
        log = run.log()
        block = (
            r"\[node1\] round 1: role trainer, ranks 1 of 2, node 1 of 2, master 127\.0\.0\.1:\d+, 1 of 3 restarts used"
        )
        assert re.search(block, log)
        assert re.search(r"\] restart 1 of 3 \(2 left\) after: rank 1: Signal 9 \(SIGKILL\)", log)


def test_prometheus_reads_how_it_ended(tmp_path: Path) -> None:
    options = ["--metrics", f"prometheus:{tmp_path}/hpc-{{host}}.prom"]
    with LocalRun(tmp_path, _TRAINS, options=options) as run:
        restarted_once(run)
        text = (tmp_path / "hpc-node1.prom").read_text()
        labels = f'host="node1",node="1",role="default",run="{run.paths.run_id}"'
        assert f"hpc_elastic_workers_remaining_restarts{{{labels}}} 2\n" in text
        assert f'hpc_elastic_workers_state{{{labels},state="succeeded"}} 1\n' in text
        assert f'hpc_elastic_workers_state{{{labels},state="healthy"}} 0\n' in text
