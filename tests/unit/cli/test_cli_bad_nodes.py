"""How a person looks at what is known of bad nodes, and clears it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_elastic.cli.main import main
from hpc_elastic.run.node_score import Evidence, EvidenceKind, NodeRecord, load_record, save_record
from tests.unit.launch.test_launch_run_status import RUN_ID, Run


def test_a_run_shows_and_forgets_what_it_knows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(tmp_path)
    lost = Evidence(node="n3", kind=EvidenceKind.LOST, at_ns=1)
    save_record(run.paths.nodes_json, NodeRecord(evidence=(lost,), excluded=("n3",)))
    arguments = ["status", RUN_ID, "--runs-dir", str(tmp_path), "--no-slurm"]
    assert main(arguments) == 0
    assert "left out : n3" in capsys.readouterr().out
    for wrong in ("", "n[3", "None assigned"):
        assert main([*arguments, "--forget-nodes", wrong]) == 2
        assert "--forget-nodes" in capsys.readouterr().err
    assert main([*arguments, "--forget-nodes", "n[3,9]"]) == 0
    assert capsys.readouterr().out == "1 record forgotten\n"
    assert load_record(run.paths.nodes_json) == NodeRecord(excluded=("n3",)), "a requeue lets it in again"
