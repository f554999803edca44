"""What no agent can do: the report names it as the cause, no node is blamed, and the run is not tried again."""

from __future__ import annotations

from pathlib import Path

from hpc_elastic.run.paths import ExitCode
from tests.rigs.local_run import LocalRun


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
        text = " ".join(run.attempt().report_text.read_text().split())
        assert "train.py FAILED (exit code 93)" in text
        assert "did without : node node0 refused to start: --health-check: cannot start" in text
        assert run.events("attempt_requeued") == []
