from __future__ import annotations

from pathlib import Path

import pytest

from hpc_elastic.cli.main import main
from tests.rigs.run_builder import RunBuilder, make_failure


def call(*argv: str) -> int:
    return main(list(argv))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    builder = RunBuilder(tmp_path / "run-1").begin()
    builder.fail(make_failure(2, at=9, exception="ValueError: b\u00e4d"))
    builder.end(0, at=10, outcome="failed", code=1)
    builder.attempt(1, at=20)
    (builder.root / "latest").symlink_to("attempt-000")
    return builder.root


@pytest.mark.parametrize("tail", ["attempt-000", "latest"])
def test_an_attempts_folder_means_that_attempt(root: Path, capsys: pytest.CaptureFixture[str], tail: str) -> None:
    assert call("report", str(root / tail)) == 0
    assert "FAILED (exit code 1) - attempt 0" in capsys.readouterr().out


def test_attempt_and_width_and_all(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("report", str(root), "--attempt", "1", "--width", "70", "--all") == 0
    assert "No failures so far." in capsys.readouterr().out
    assert call("report", str(root), "--attempt", "7") == 2
    assert "has no attempt 7; it has 0, 1" in capsys.readouterr().err


def test_a_copy_without_its_run_json(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "run.json").unlink()
    assert call("report", str(root)) == 0
    assert "ValueError" in capsys.readouterr().out


@pytest.mark.parametrize("text", [".", "no-such-run", "424242"])
def test_what_means_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert call("report", text) == 2
    err = capsys.readouterr().err
    assert err.startswith("hpc-elastic: error: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("wrong", [["--width", "-3"], ["--attempt", "x"], ["--format", "pdf"], ["--nope"]])
def test_wrong_values(root: Path, wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert call("report", str(root), *wrong) == 2
    assert wrong[0].lstrip("-") in capsys.readouterr().err
