"""``hpc-elastic logs``: which lines are shown, in which order, and how; following is tested with real runs."""

from __future__ import annotations

import os
import pathlib
import shutil
from pathlib import Path

import pytest

from hpc_elastic.base.text import time_text
from hpc_elastic.cli import logs as logs_module
from hpc_elastic.cli.main import main
from hpc_elastic.output.log_files import STDERR, STDOUT, LogFile, TimesFile, times_path
from tests.rigs.run_builder import START_NS, RunBuilder, make_failure


class LogRun(RunBuilder):
    """A run whose workers print, too."""

    def say(self, rank: int, text: str | bytes, *, at: float, round_index: int = 0, stderr: bool = False) -> None:
        attempt = self.paths.attempt(0)
        paths = attempt.rank(round_index, rank)
        node = rank // self.per_node
        times = TimesFile(times_path(attempt.round_dir(round_index), node)).stream(rank, STDERR if stderr else STDOUT)
        path = paths.stderr if stderr else paths.stdout
        log = LogFile(path, on_end=list, on_loss=lambda *_: None, times=times)
        data = text if isinstance(text, bytes) else f"{text}\n".encode()
        log.write(data, now=0.0, at_us=(START_NS + int(at * 1e9)) // 1000)
        log.finish()


@pytest.fixture
def run(tmp_path: Path) -> LogRun:
    """Four ranks on two nodes; rank 2 fails in round 0 at 20 s; round 1 goes well."""
    builder = LogRun(tmp_path / "20261121-053000-train-9f3c", nodes=2, per_node=2).begin()
    for second in range(2, 22, 2):
        for rank in range(4):
            if rank != 2 or second < 20:
                builder.say(rank, f"step {second} of {rank}", at=second + rank / 10)
    builder.say(2, "ValueError: bad", at=19.95, stderr=True)
    builder.fail(make_failure(2, at=20, exception="ValueError: bad", per_node=2))
    builder.round(0, 1, at=25, reason="restart 1 of 3")
    for rank in (1, 0):
        builder.say(rank, f"again {rank}", at=26 - rank, round_index=1)
    return builder


def shown(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> list[str]:
    assert main(["logs", *argv]) == code
    out, err = capsys.readouterr()
    return (out if code == 0 else err).splitlines()


def test_the_newest_round_in_the_order_of_time(run: LogRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, str(run.root)) == ["[rank 1] again 1", "[rank 0] again 0"]
    assert shown(capsys, str(run.root / "attempt-000")) == ["[rank 1] again 1", "[rank 0] again 0"]


def test_of_some_ranks_nodes_and_streams(run: LogRun, capsys: pytest.CaptureFixture[str]) -> None:
    root = str(run.root)
    assert shown(capsys, root, "--round", "0", "--rank", "1-2", "--tail", "3") == [
        "[rank 2] step 18 of 2",
        "[rank 2] ValueError: bad",
        "[rank 1] step 20 of 1",
    ]
    assert shown(capsys, root, "--round", "0", "--stderr") == ["[rank 2] ValueError: bad"]
    assert len(shown(capsys, root, "--round", "0", "--stdout")) == 39
    for nodes in ("n2", "1", "n[2]"):
        lines = shown(capsys, root, "--round", "0", "--node", nodes, "--tail", "2")
        assert lines == ["[rank 2] ValueError: bad", "[rank 3] step 20 of 3"]


def test_all_rounds_each_with_its_title(run: LogRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, str(run.root), "--round", "all", "--tail", "3", "--no-prefix") == [
        "--- attempt 0, round 0 ---",
        "step 20 of 3",
        "--- attempt 0, round 1 ---",
        "again 1",
        "again 0",
    ]


def test_times(run: LogRun, capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = shown(capsys, str(run.root), "--tail", "1", "--timestamps")
    stamp, rest = line.split(" ", 1)
    assert stamp == time_text(START_NS + 26 * 10**9, fine=True)
    assert rest == "[rank 0] again 0"


def test_around_the_first_failure(run: LogRun, capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys, str(run.root), "--around-failure", "--seconds", "3")
    assert lines[0] == "--- attempt 0, round 0, 3 s before and after the first failure ---"
    middle = next(number for number, line in enumerate(lines) if "rank 2 on n2 failed: ValueError: bad" in line)
    assert lines[1:middle] == [
        "[rank 0] step 18 of 0",
        "[rank 1] step 18 of 1",
        "[rank 2] step 18 of 2",
        "[rank 3] step 18 of 3",
        "[rank 2] ValueError: bad",
        "[rank 0] step 20 of 0",
    ]
    assert lines[middle + 2 :] == ["[rank 1] step 20 of 1", "[rank 3] step 20 of 3"]


def test_what_the_failed_rank_printed_last_was_before_its_end(run: LogRun, capsys: pytest.CaptureFixture[str]) -> None:
    """Its agent may learn of the end before it has read the last line."""
    run.say(2, "really last", at=20.05, stderr=True)
    lines = shown(capsys, str(run.root), "--around-failure", "--seconds", "1")
    middle = next(number for number, line in enumerate(lines) if "failed: ValueError" in line)
    assert lines[middle - 1] == "[rank 2] really last"


def test_around_the_first_failure_at_most_so_many_lines(run: LogRun, capsys: pytest.CaptureFixture[str]) -> None:
    run.say(0, b"".join(b"burst %d\n" % number for number in range(100)), at=19.97)
    run.say(3, "", at=19.98)
    lines = shown(capsys, str(run.root), "--around-failure", "--lines", "2", "--rank", "0,2")
    assert lines[1:4] == ["[rank 2] step 16 of 2", "[rank 2] step 18 of 2", "[rank 2] ValueError: bad"]
    assert lines[4:6] == ["[rank 0] burst 98", "[rank 0] burst 99"]


def test_who_printed_nothing_around_the_failure_is_named(run: LogRun, capsys: pytest.CaptureFixture[str]) -> None:
    run.paths.attempt(0).rank(0, 3).stdout.write_bytes(b"")
    lines = shown(capsys, str(run.root), "--around-failure")
    assert lines[-1] == "--- nothing of rank 3 in that time ---"


def test_options_with_underlines(run: LogRun, capsys: pytest.CaptureFixture[str]) -> None:
    root = str(run.root)
    assert shown(capsys, root, "--no_prefix", "--tail=1") == ["again 0"]
    assert shown(capsys, root, "--around_failure", "--seconds", "3") == shown(
        capsys, root, "--around-failure", "--seconds", "3"
    )


def test_nothing_has_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    builder = LogRun(tmp_path / "r", nodes=1).begin()
    (line,) = shown(capsys, str(builder.root), "--around-failure", code=2)
    assert "nothing has failed in run r" in line


@pytest.mark.parametrize("lost", ["attempt.json", "events", "round-000", "run.json", "times-node-00000"])
def test_a_copy_with_half_of_the_files(
    run: LogRun, capsys: pytest.CaptureFixture[str], tmp_path: Path, lost: str
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run.root, copy)
    for path in [*copy.rglob(lost)]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert sorted(shown(capsys, str(copy))) == ["[rank 0] again 0", "[rank 1] again 1"]


def test_without_times_it_says_so(run: LogRun, capsys: pytest.CaptureFixture[str]) -> None:
    for path in run.root.rglob("times-node-*"):
        path.unlink()
    assert main(["logs", str(run.root)]) == 0
    out, err = capsys.readouterr()
    assert out == "[rank 0] again 0\n[rank 1] again 1\n"
    assert err == "hpc-elastic: no times are kept for ranks 0-1: one after the other\n"


def test_into_a_pipe_as_it_came_and_on_a_terminal_harmless(
    run: LogRun, capsysbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    run.say(0, b"\x1b[2J\x1b[31mred\x1b[0m \xff\n", at=30, round_index=1)
    arguments = ["logs", str(run.root), "--tail", "1"]
    assert main(arguments) == 0
    assert capsysbinary.readouterr().out == b"[rank 0] \x1b[2J\x1b[31mred\x1b[0m \xff\n"
    monkeypatch.setattr(logs_module, "is_terminal", lambda stream: True)
    assert main(arguments) == 0
    assert capsysbinary.readouterr().out == b"[rank 0] \x1b[31mred\x1b[0m \\xff\n"
    assert main([*arguments, "--raw"]) == 0
    assert capsysbinary.readouterr().out == b"[rank 0] \x1b[2J\x1b[31mred\x1b[0m \xff\n"


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--rank", "4"], "--rank 4: round 1 of attempt 0 has ranks 0-3"),
        (["--rank", "x"], "--rank x: x is not a number or a range"),
        (["--node", "n7"], "--node n7: its nodes are n[1-2]"),
        (["--round", "5"], "--round 5: attempt 0 has 0-1"),
        (["--attempt", "3"], "has no attempt 3; it has 0"),
        (["--tail", "many"], "--tail many: give a number of lines, or all"),
        (["--lines", "3"], "--lines 3 needs --around-failure"),
        (["--around-failure", "--follow"], "--follow can't be used with --around-failure"),
        (["--around-failure", "--round", "0"], "--round can't be used with"),
        (["--follow", "--round", "all"], "--round all: --follow shows later rounds"),
        (["--stdout", "--stderr"], "--stdout"),
        (["--attempt", "-1"], "--attempt"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(
    run: LogRun, capsys: pytest.CaptureFixture[str], argv: list[str], says: str
) -> None:
    (line,) = shown(capsys, str(run.root), *argv, code=2)
    assert line.startswith("hpc-elastic: error: ")
    assert says in line


def test_a_run_that_has_not_begun(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    builder = RunBuilder(tmp_path / "r")
    (line,) = shown(capsys, str(builder.root), code=2)
    assert "has no attempt yet; hpc-elastic logs --follow waits for one" in line
    builder.attempt(0)
    assert main(["logs", str(builder.root)]) == 0
    assert "no round yet" in capsys.readouterr().err


def test_a_silent_run_is_said_to_be_silent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    builder = LogRun(tmp_path / "r", nodes=1, per_node=2).begin()
    for rank in (0, 1):
        builder.paths.attempt(0).rank(0, rank).root.mkdir(parents=True)
    assert main(["logs", str(builder.root)]) == 0
    assert capsys.readouterr() == ("", "hpc-elastic: no output from any worker in round 0 of attempt 0\n")
    builder.say(1, "hello", at=2)
    assert main(["logs", str(builder.root), "--stderr"]) == 0
    assert capsys.readouterr().err == "hpc-elastic: no stderr from any worker in round 0 of attempt 0\n"
    assert main(["logs", str(builder.root), "--rank", "0"]) == 0
    assert capsys.readouterr().err == "hpc-elastic: no output from these workers in round 0 of attempt 0\n"
    assert main(["logs", str(builder.root)]) == 0
    assert capsys.readouterr() == ("[rank 1] hello\n", "")


def test_a_folder_of_somebody_else(
    run: LogRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    really = os.listdir

    def refused(path: object = ".") -> list[str]:
        if str(path) == str(run.root):
            raise PermissionError(13, "Permission denied", str(path))
        return really(path)  # type: ignore[call-overload,no-any-return]

    monkeypatch.setattr(os, "listdir", refused)
    (line,) = shown(capsys, str(run.root), code=2)
    assert f"{run.root} can't be read: Permission denied; it belongs to uid {os.getuid()}" in line
    assert "ask for a copy" in line


@pytest.mark.parametrize("by_id", [True, False])
def test_a_run_below_a_folder_of_somebody_else(
    run: LogRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, by_id: bool
) -> None:
    really = os.stat

    def refused(path: object, **options: object) -> os.stat_result:
        if str(path).startswith(str(run.root)) and (not by_id or str(path).endswith("run.json")):
            raise PermissionError(13, "Permission denied", str(path))
        return really(path, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "stat", refused)
    if accessor := getattr(pathlib, "_NormalAccessor", None):  # Python 3.10's pathlib has taken it at its import
        monkeypatch.setattr(accessor, "stat", staticmethod(refused))
    argv = [run.root.name, "--runs-dir", str(run.root.parent)] if by_id else [str(run.root)]
    (line,) = shown(capsys, *argv, code=2)
    assert f"{run.root}" in line
    assert "can't be read: Permission denied; only their owner can read a run's files" in line
