"""What no agent can do: the report names it as the cause, no node is blamed, and the run is not tried again."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_elastic.base.outcome import ExitCode
from tests.rigs.local_run import LocalRun


@pytest.mark.skipif(any(Path("/dev").glob("nvidia[0-9]*")), reason="this host has what the case asks for in vain")
def test_a_refusal_at_the_start_of_all_workers_is_the_reports_cause(tmp_path: Path) -> None:
    with LocalRun(tmp_path, "tell('here')", nproc="gpu", options=["--max-requeues", "3"]) as run:
        assert run.finish() == ExitCode.NOT_RETRYABLE
        assert [event["event"] for event in run.events("start_refused")] == ["start_refused"] * 2
        text = run.attempt().report_text.read_text()
        head, cause = text.splitlines()[1], text.splitlines()[4:7]
        assert head == "train.py FAILED (exit code 93) - attempt 0"
        assert cause == [
            "Root Cause (first observed failure):",
            "  --nproc-per-node gpu: no NVIDIA GPU was found (/dev/nvidia*); give the number of workers",
            "  verdict   : each of the 2 agents refused to start the workers; no node is to blame",
        ]
        assert "TOO FEW NODES" not in text
        assert "no worker failed" not in text
        (verdict,) = run.events("verdict")
        assert verdict["outcome"] == "failed"


def test_a_health_check_that_is_not_there_at_run_time_ends_the_run_and_blames_no_node(tmp_path: Path) -> None:
    """It is there at submit: the first worker's round takes it away, as `module unload` may."""
    check = tmp_path / "check.sh"
    check.write_text("#!/bin/sh\nexit 0\n")
    check.chmod(0o700)
    script = f"""
    import os
    os.path.exists({str(check)!r}) and RANK == 0 and os.unlink({str(check)!r})
    tell("here")
    others_in_round()
    raise SystemExit(3)
    """
    options = ["--health-check", str(check), "--max-requeues", "3"]
    with LocalRun(tmp_path, script, options=options) as run:
        assert run.finish() == ExitCode.NOT_RETRYABLE
        assert len(run.events("start_refused")) == 2
        assert run.events("node_left") == run.events("health_check_failed") == []
        assert {event["reason"] for event in run.events("start_refused")} == {
            f"--health-check: cannot start '{check}': there is no such file (looked from '{tmp_path}')"
        }
