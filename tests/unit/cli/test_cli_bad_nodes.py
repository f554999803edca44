"""How a person looks at what is known of bad nodes, and clears it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from hpc_elastic.cli.main import main
from hpc_elastic.run.node_records import NodeRecord, account_evidence, load_record, remember, save_record
from hpc_elastic.run.node_score import Evidence, EvidenceKind
from tests.unit.launch.test_launch_run_status import RUN_ID, Run


def test_an_account_shows_and_forgets_what_it_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    state = {"XDG_STATE_HOME": str(tmp_path / "state")}
    monkeypatch.setenv("XDG_STATE_HOME", state["XDG_STATE_HOME"])
    assert main(["list", "--bad-nodes"]) == 0
    assert "no bad nodes are recorded" in capsys.readouterr().err
    now = time.time_ns()
    seen = [
        Evidence(node="n3", kind=EvidenceKind.LOST, at_ns=now, why="node n3\x1b[31m was lost"),
        Evidence(node="n4", kind=EvidenceKind.FIRST_FAILURE, at_ns=now, why="rank 3 failed first"),
    ]
    assert remember(seen, cluster="c", run_id="r", attempt=0, now_ns=now, env=state) is None
    assert main(["list", "--bad-nodes"]) == 0
    bad, fair = capsys.readouterr().out.splitlines()
    assert bad.split()[:3] == ["n3", "bad", "1.00"]
    assert "\x1b" not in bad
    assert fair.split()[:3] == ["n4", "fair", "0.50"]
    assert main(["list", "--forget-nodes", "n[3,9]"]) == 0
    assert capsys.readouterr().out == "1 record forgotten\n"
    assert [item.node for item in account_evidence(state)] == ["n4"]
    for wrong in ("", "n[3", "None assigned"):
        assert main(["list", "--forget-nodes", wrong]) == 2
        assert "--forget-nodes" in capsys.readouterr().err
    assert main(["list", "--forget-nodes", "all"]) == 0
    assert account_evidence(state) == ()


def test_a_run_shows_and_forgets_what_it_knows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(tmp_path)
    lost = Evidence(node="n3", kind=EvidenceKind.LOST, at_ns=1)
    save_record(run.paths.nodes_json, NodeRecord(evidence=(lost,), excluded=("n3",)))
    arguments = ["status", RUN_ID, "--runs-dir", str(tmp_path), "--no-slurm"]
    assert main(arguments) == 0
    assert "left out : n3" in capsys.readouterr().out
    assert main([*arguments, "--forget-nodes", "n3"]) == 0
    assert load_record(run.paths.nodes_json) == NodeRecord(excluded=("n3",)), "a requeue lets it in again"
