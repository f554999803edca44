"""``list --goodput``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpc_elastic.cli.main import main
from hpc_elastic.report.collect import collect_run
from hpc_elastic.report.goodput import goodput_of
from tests.rigs.run_builder import RunBuilder
from tests.unit.report.test_report_advice import failing_run


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    (tmp_path / "runs").mkdir()
    for name in ("20261118T110640-a", "20261118T110641-b"):
        failing_run(tmp_path / "runs" / name)
    return tmp_path / "runs"


def test_list_shows_where_the_time_of_all_runs_went(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--goodput", "--no-slurm", "--runs-dir", str(runs)]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["goodput", "of", "run"]
    goodput = goodput_of(collect_run(next(runs.iterdir())))
    share = f"{100 * (goodput.share or 0):.1f} %"
    assert [share in line for line in lines] == [True] * 3
    assert lines[0].endswith("% to end") or "% in checkpoints" in lines[0]
    assert lines[2].endswith("all 2 runs together")


def test_a_run_without_steps_is_in_the_whole_by_its_uptime(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    builder = RunBuilder(runs / "20261118T110642-c", nodes=2).begin(at=10)
    builder.succeeded(0, 0, at=200)
    builder.end(0, at=201, outcome="succeeded", code=0)
    assert main(["list", "--goodput", "--no-slurm", "--runs-dir", str(runs)]) == 0
    _, first, *_, last = capsys.readouterr().out.splitlines()
    assert first.endswith("uptime of the processes, since no step was reported or counted")
    assert last.endswith("all 3 runs together, 1 of them by uptime")


def test_the_parts_in_json_add_up_to_the_whole(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--goodput", "--json", "--no-slurm", "--runs-dir", str(runs)]) == 0
    found = [json.loads(line)["goodput"] for line in capsys.readouterr().out.splitlines()]
    assert len(found) == 2
    for one in found:
        assert sum(one["parts"].values()) == pytest.approx(one["wall"])
        assert one["share"] == pytest.approx(one["parts"]["training"] / one["wall"])
    assert main(["list", "--json", "--no-slurm", "--runs-dir", str(runs)]) == 0
    assert "goodput" not in json.loads(capsys.readouterr().out.splitlines()[0])
