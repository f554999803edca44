"""The files that a run on two nodes leaves when it is over, what commands make of them, and a node that is late."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_elastic.launch.agents import agent_command
from tests.rigs.local_run import LocalRun


def _said(*argv: str) -> str:
    done = subprocess.run([sys.executable, "-m", "hpc_elastic", *argv], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.torch
@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param((), id="undisturbed", marks=pytest.mark.slow),
        pytest.param(("--fail", "raise@5"), id="with-a-restart"),
    ],
)
def test_a_run_that_is_over_leaves_few_files(ddp_run: Callable[..., LocalRun], arguments: tuple[str, ...]) -> None:
    with ddp_run("--steps", "12", *arguments) as run:
        assert run.finish(within=200.0) == 0
        root = run.paths.root
        found = [Path(folder, name) for folder, folders, files in os.walk(root) for name in (*folders, *files)]
        assert [path for path in found if path.is_symlink()] == []
        files = [path for path in found if path.is_file()]
        assert len(files) <= 10, files  # on Slurm the script and the job log come to these
        assert len(found) - len(files) + 1 <= 8

        attempt = run.paths.attempt(0)
        assert _said("report", str(root)) == attempt.report_text.read_text()
        newest = str(len(arguments) // 2)
        logs = _said("logs", str(root), "--round", newest)
        assert all(f"[rank {rank}] " in logs for rank in range(2)), logs
        assert "attempt_ended" in _said("logs", str(root), "--events")
        status = _said("status", str(root))
        assert f"used     : {newest} of 3 restarts" in status
        assert str(attempt.root / "output.log") in status
        if arguments:
            assert "bad batch" in _said("logs", str(root), "--around-failure")
            assert Path(json.loads(attempt.report_json.read_text())["verdict"]["failure"]["error_file"]).exists()

        before = sorted(root.rglob("*"))
        late = subprocess.run(agent_command(run.paths, 0, "--node", "1"), capture_output=True, text=True, timeout=60)
        assert late.returncode == 2
        assert "is over" in late.stderr
        assert sorted(root.rglob("*")) == before, "the late agent made no new store"
