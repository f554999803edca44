"""``hpc-elastic report``: single ranks, colours, finding runs; following is tested with real runs."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from hpc_elastic.cli.main import main, wants_colour
from hpc_elastic.cli.report import coloured_report
from tests.rigs.run_builder import RunBuilder, make_failure
from tests.rigs.specs import store_result


@pytest.fixture
def builder(tmp_path: Path) -> RunBuilder:
    """Eight ranks: 1 fails alone in round 0, 2 and 3 alike in round 1."""
    (tmp_path / "runs").mkdir(mode=0o700)
    builder = RunBuilder(tmp_path / "runs" / "20261121-053000-train-9f3c", nodes=4, per_node=2).begin()
    builder.fail(make_failure(1, at=9, exception="KeyError: 'first'", per_node=2))
    builder.stopped(0, 0, at=10)
    builder.round(0, 1, at=11, reason="restart 1 of 3")
    for rank in (2, 3):
        builder.fail(
            make_failure(rank, at=20 + rank, exception="ValueError: bad", per_node=2, round_index=1, last_step=7)
        )
    builder.end(0, at=30, outcome="failed", code=1)
    return builder


def shown(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> str:
    assert main(["report", *argv]) == code
    out, err = capsys.readouterr()
    return out if code == 0 else err


def test_single_ranks_in_full(builder: RunBuilder, capsys: pytest.CaptureFixture[str]) -> None:
    (builder.paths.attempt(0).rank(1, 3).stacks).write_text("Thread 0x7f (most recent call first):\n  here\x1b[2J\n")
    out = shown(capsys, str(builder.root), "--rank", "1-3")
    assert "Attempt 0, round 1" in out
    assert "round 0" not in out
    assert "Rank 1 on n1: no failure of it is recorded" in out
    assert "Rank 2 (local_rank: 0) on n2: ValueError: bad" in out
    assert out.count("loss.backward()") == 1, "the same traceback once"
    assert "the same as that of rank 2 above" in out
    assert "last step : 7" in out
    assert f"output    : {builder.paths.attempt(0).rank(1, 2).root}" in out
    assert "    Thread 0x7f (most recent call first):\n      here\n" in out
    assert "and 1 failure of theirs in other rounds (--all shows them)" in out


def test_single_ranks_in_all_rounds_and_uncut(builder: RunBuilder, capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, str(builder.root), "--rank", "1", "--all")
    assert [text for text in ("Attempt 0, round 0", "KeyError: 'first'", "Attempt 0, round 1") if text not in out] == []
    builder.event(0, "agent", 0, 21, "node_lost", round=1, node=3, host="n4", age=8.0)
    message = "ValueError: " + "x" * 3000
    builder.fail(make_failure(4, at=21, exception=message, per_node=2, round_index=1))
    out = shown(capsys, str(builder.root), "--rank", "4-6")
    assert message in out
    assert "Rank 5 on n3: no failure of it is recorded\n" in out
    assert "Rank 6 on n4: no failure of it is recorded; node n4 was lost" in out


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--rank", "8"], "--rank 8: run 20261121-053000-train-9f3c has ranks 0-7"),
        (["--rank", "8", "--attempt", "0"], "attempt 0 of run 20261121-053000-train-9f3c has ranks 0-7"),
        (["--rank", "1", "--format", "json"], "--rank 1 goes with --format text"),
        (["--follow", "--format", "html"], "--follow goes with --format text or json"),
        (["--output", "x"], "--output x goes with --format html"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(
    builder: RunBuilder, capsys: pytest.CaptureFixture[str], argv: list[str], says: str
) -> None:
    err = shown(capsys, str(builder.root), *argv, code=2)
    assert says in err
    assert err.count("\n") == 1


def test_by_the_beginning_of_its_id(
    builder: RunBuilder, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    runs = ["--runs-dir", str(builder.root.parent)]
    err = shown(capsys, str(builder.root / "attempt-000"), "--attempt", "1", code=2)
    assert re.search("--attempt 1: .* is attempt 0", err), "it contradicts the folder"
    for text in ("20261121-053000-train-9f3c", "20261121-05", "20261121"):
        assert "ValueError: bad" in shown(capsys, text, *runs)
    RunBuilder(builder.root.parent / "20261121-060000-other-0000")
    for text in ("20261121-0", "20261121"):
        err = shown(capsys, text, *runs, code=2)
        assert "begins 2 runs in" in err
        assert "20261121-053000-train-9f3c, 20261121-060000-other-0000" in err
    assert "job 99: no such run" in shown(capsys, "99", *runs, code=2)
    monkeypatch.chdir(builder.root.parent)
    assert "no such run" in shown(capsys, "", *runs, code=2)


def test_follow_of_a_run_that_has_ended_gives_its_code(builder: RunBuilder, capsys: pytest.CaptureFixture[str]) -> None:
    store_result(builder.paths.attempt(0), 93, reason="why")
    assert main(["report", str(builder.root), "--follow"]) == 93
    out, err = capsys.readouterr()
    assert out.count("Root Cause (first observed failure):") == 1
    assert err == "hpc-elastic: run 20261121-053000-train-9f3c ended: failed: why (exit code 93)\n"
    assert main(["report", str(builder.root), "--follow", "--format", "json"]) == 93
    assert capsys.readouterr().out.count("\n") == 1


@pytest.mark.parametrize(
    ("env", "terminal", "wanted"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"NO_COLOR": "1"}, True, False),
        ({"NO_COLOR": ""}, True, True),
        ({"FORCE_COLOR": "1"}, False, True),
        ({"FORCE_COLOR": "0"}, True, False),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, True, False),
        ({"TERM": "dumb"}, True, False),
        ({"TERM": "dumb", "FORCE_COLOR": "1"}, False, True),
    ],
)
def test_when_there_are_colours(
    monkeypatch: pytest.MonkeyPatch, env: dict[str, str], terminal: bool, wanted: bool
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal, raising=False)
    assert wants_colour(sys.stdout, env) is wanted


def test_colours_change_nothing_else(
    builder: RunBuilder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = shown(capsys, str(builder.root))
    assert "\x1b" not in plain
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    coloured = shown(capsys, str(builder.root))
    assert "\x1b[1;31mRoot Cause (first observed failure):\x1b[0m" in coloured
    assert "\x1b[1m  ValueError: bad\x1b[0m" in coloured
    assert "\x1b[1;31mtrain.py FAILED" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == plain
    assert coloured_report(plain) == coloured
