from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from hpc_elastic.cli import report
from hpc_elastic.errors import UsageError
from tests.rigs.run_builder import RunBuilder, make_failure


def call(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    report.add_parser(parser.add_subparsers())
    return report.run(parser.parse_args(argv))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    builder = RunBuilder(tmp_path / "run-1")
    builder.attempt(0)
    builder.round(0, 0, at=1)
    builder.fail(make_failure(2, at=9, exception="ValueError: b\u00e4d"))
    builder.end(0, at=10, outcome="failed", code=1)
    builder.attempt(1, at=20)
    (builder.root / "latest").symlink_to("attempt-000")
    return builder.root


@pytest.mark.parametrize("name", ["report", "why"])
def test_text(root: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert call(name, str(root)) == 0
    out = capsys.readouterr().out
    assert "Root Cause (first observed failure):\n  ValueError: b\u00e4d\n" in out
    assert "attempt 1" in out


def test_json(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("report", str(root), "--format", "json") == 0
    assert json.loads(capsys.readouterr().out)["verdict"]["failure"]["global_rank"] == 2


@pytest.mark.parametrize("tail", ["attempt-000", "latest"])
def test_an_attempts_folder_means_that_attempt(root: Path, capsys: pytest.CaptureFixture[str], tail: str) -> None:
    assert call("report", str(root / tail)) == 0
    assert "FAILED (exit code 1) - attempt 0" in capsys.readouterr().out


def test_attempt_and_width_and_all(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("report", str(root), "--attempt", "1", "--width", "70", "--all") == 0
    assert "No worker failed by itself." in capsys.readouterr().out
    with pytest.raises(UsageError, match="has no attempt 7; it has 0, 1"):
        call("report", str(root), "--attempt", "7")


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is no run directory"):
        call("report", str(tmp_path))


@pytest.mark.parametrize("wrong", [["--width", "-3"], ["--attempt", "x"], ["--format", "pdf"]])
def test_wrong_values(root: Path, wrong: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        call("report", str(root), *wrong)
    assert caught.value.code == 2
