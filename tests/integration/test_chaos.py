"""``hpc-elastic chaos`` on a run that is going on: what is done, and that the report blames no node for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from hpc_elastic.report.collect import collect_run
from hpc_elastic.report.goodput import goodput_of
from hpc_elastic.report.node_evidence import node_evidence
from tests.rigs.local_run import LocalRun

TRAIN = 'tell("here")\nwait_for("end")\n'


def chaos(run: LocalRun, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hpc_elastic", "chaos", str(run.paths.root), *arguments],
        cwd=run.folder,
        env=run._environ(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_planted_kill_is_survived_recorded_and_blamed_on_no_node(tmp_path: Path) -> None:
    with LocalRun(tmp_path, TRAIN, nodes=2) as run:
        run.wait_moments("here", count=2, round_index=0)
        run.until(lambda: len(run.events("workers_started")) == 2, "workers on both nodes")
        refused = chaos(run, "--fault", "kill-worker")
        assert refused.returncode == 2
        assert "confirm it with --yes" in refused.stderr
        assert run.events("fault_planted") == []
        done = chaos(run, "--fault", "kill-worker", "--rank", "1", "--yes")
        assert done.returncode == 0, done.stderr
        assert done.stdout == "worker killed -9: rank 1 on node1\n"
        run.wait_moments("here", count=2, round_index=1)
        run.say("end")
        assert run.finish() == 0
        (event,) = run.events("fault_planted")
        assert (event["fault"], event["rank"], event["node"], event["round"]) == ("kill-worker", 1, 1, 0)
        (first, _) = run.report()["attempts"][0]["rounds"]
        assert first["planted"] == ["kill-worker: worker killed -9"]
        assert first["failures"][0]["first"]["reason"] == "planted by hpc-elastic chaos: kill-worker"
        assert "planted by hpc-elastic chaos: kill-worker" in run.attempt().report_text.read_text()
        history = collect_run(run.paths.root)
        assert node_evidence(history, attempt=0) == ()
        assert [cost.is_failure for cost in goodput_of(history).costs] == [False]
        ended = chaos(run, "--fault", "kill-worker", "--yes")
        assert ended.returncode == 2
        assert "does not train now" in ended.stderr


def test_a_series_goes_on_until_it_was_done_so_often(tmp_path: Path) -> None:
    with LocalRun(tmp_path, TRAIN, nodes=2) as run:
        run.wait_moments("here", count=2, round_index=0)
        run.until(lambda: len(run.events("workers_started")) == 2, "workers on both nodes")
        done = chaos(run, "--fault", "kill-worker,kill-agent", "--every", "8s", "--times", "2", "--seed", "3", "--yes")
        assert done.returncode == 0, done.stderr
        assert len(done.stdout.splitlines()) == 2
        assert {event["fault"] for event in run.events("fault_planted")} == {"kill-worker", "kill-agent"}
        run.say("end")
        assert run.finish() == 0


def test_what_makes_no_sense_is_misuse(tmp_path: Path) -> None:
    with LocalRun(tmp_path, TRAIN, nodes=1) as run:
        run.wait_moments("here", count=1, round_index=0)
        for arguments, message in (
            (("--fault", "disk-full", "--yes"), "no fault 'disk-full'"),
            (("--fault", "hang", "--every", "soon", "--yes"), "--every soon"),
            (("--fault", "hang", "--rank", "7", "--yes"), "no worker of rank 7"),
        ):
            done = chaos(run, *arguments)
            assert done.returncode == 2
            assert message in done.stderr
        run.say("end")
