from __future__ import annotations

import os
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
    (root / "run.json").unlink()  # as in a copy
    assert call("report", str(root)) == 0
    assert "ValueError" in capsys.readouterr().out


def test_a_page_beside_the_report_or_elsewhere(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("report", str(root), "--format", "html", "--output", str(tmp_path / "o.html")) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'o.html'}\n"
    assert call("report", str(root), "--format", "html", "--output", "-") == 0
    assert capsys.readouterr().out == (tmp_path / "o.html").read_text()
    assert not (root / "attempt-001" / "report.html").exists()
    for more, folder in (([], "attempt-001"), (["--attempt", "0"], "attempt-000")):
        assert call("report", str(root), "--format", "html", *more) == 0
        path = Path(capsys.readouterr().out.rstrip("\n"))
        assert path == root / folder / "report.html"
        assert path.read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("/no-such-folder/x.html", "/no-such-folder/x.html can't be written"),
        ("a-pipe", "not a regular file"),
        (".", "not a regular file"),
    ],
)
def test_where_no_page_can_be_written(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], output: str, words: str
) -> None:
    monkeypatch.chdir(root.parent)
    os.mkfifo("a-pipe")
    assert call("report", str(root), "--format", "html", "--output", output) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1
