"""``hpc-elastic logs``: which lines and events are shown, in which order, and how; real runs test following."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_elastic.base.codec import to_json
from hpc_elastic.base.text import time_text
from hpc_elastic.cli import logs as logs_module
from hpc_elastic.cli.log_events import describe_event
from hpc_elastic.cli.main import main
from hpc_elastic.output.log_files import STDERR, STDOUT, LogFile, TimesFile, times_path
from hpc_elastic.run.event_reader import EVENTS, event_line
from hpc_elastic.run.events import RunEvent, SupervisorEvent
from tests.rigs.event_samples import KINDS, sample
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


STEP_20 = [f"[rank {rank}] step 20 of {rank}" for rank in (1, 3)]
ERROR = "[rank 2] ValueError: bad"


@pytest.mark.parametrize(
    ("argv", "lines"),
    [
        pytest.param([], ["[rank 1] again 1", "[rank 0] again 0"], id="the newest round in the order of time"),
        (["--no_prefix", "--tail=1"], ["again 0"]),
        (["--round", "0", "--rank", "1-2", "--tail", "3"], ["[rank 2] step 18 of 2", ERROR, STEP_20[0]]),
        (["--round", "0", "--stderr"], [ERROR]),
        (["--round", "0", "--node", "n2", "--tail", "2"], [ERROR, STEP_20[1]]),
        (["--round", "0", "--node", "1", "--tail", "2"], [ERROR, STEP_20[1]]),
        (["--round", "0", "--node", "n[2]", "--tail", "2"], [ERROR, STEP_20[1]]),
        (
            ["--round", "all", "--tail", "3", "--no-prefix"],
            ["--- attempt 0, round 0 ---", "step 20 of 3", "--- attempt 0, round 1 ---", "again 1", "again 0"],
        ),
        (["--timestamps", "--tail", "1"], [f"{time_text(START_NS + 26 * 10**9, fine=True)} [rank 0] again 0"]),
    ],
)
def test_which_lines_are_shown(
    run: LogRun, capsys: pytest.CaptureFixture[str], argv: list[str], lines: list[str]
) -> None:
    assert shown(capsys, str(run.root), *argv) == lines
    assert shown(capsys, str(run.root / "attempt-000"), *argv) == lines


def test_around_the_first_failure(run: LogRun, capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys, str(run.root), "--around_failure", "--seconds", "3")
    assert lines[0] == "--- attempt 0, round 0, 3 s before and after the first failure ---"
    middle = next(number for number, line in enumerate(lines) if "rank 2 on n2 failed: ValueError: bad" in line)
    before = [f"[rank {rank}] step 18 of {rank}" for rank in range(4)]
    assert lines[1:middle] == [*before, ERROR, "[rank 0] step 20 of 0"]
    assert lines[middle + 2 :] == STEP_20
    # The agent may learn of the end before it has read the last line.
    run.say(2, "really last", at=20.05, stderr=True)
    lines = shown(capsys, str(run.root), "--around-failure", "--seconds", "1")
    middle = next(number for number, line in enumerate(lines) if "failed: ValueError" in line)
    assert lines[middle - 1] == "[rank 2] really last"
    run.paths.attempt(0).rank(0, 3).stdout.write_bytes(b"")
    assert shown(capsys, str(run.root), "--around-failure")[-1] == "--- nothing of rank 3 in that time ---"


def test_around_the_first_failure_at_most_so_many_lines(run: LogRun, capsys: pytest.CaptureFixture[str]) -> None:
    run.say(0, b"".join(b"burst %d\n" % number for number in range(100)), at=19.97)
    run.say(3, "", at=19.98)
    lines = shown(capsys, str(run.root), "--around-failure", "--lines", "2", "--rank", "0,2")
    assert lines[1:4] == ["[rank 2] step 16 of 2", "[rank 2] step 18 of 2", "[rank 2] ValueError: bad"]
    assert lines[4:6] == ["[rank 0] burst 98", "[rank 0] burst 99"]


def test_nothing_has_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    builder = LogRun(tmp_path / "r", nodes=1).begin()
    (line,) = shown(capsys, str(builder.root), "--around-failure", code=2)
    assert "nothing has failed in run r" in line


@pytest.mark.parametrize("lost", ["attempt.json", "events", "round-000", "run.json", "times-node-00000"])
def test_a_run_with_half_of_its_files(run: LogRun, capsys: pytest.CaptureFixture[str], lost: str) -> None:
    for path in [*run.root.rglob(lost)]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert main(["logs", str(run.root)]) == 0
    out, err = capsys.readouterr()
    assert sorted(out.splitlines()) == ["[rank 0] again 0", "[rank 1] again 1"]
    if lost.startswith("times"):
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


@pytest.fixture
def root(tmp_path: Path) -> Path:
    builder = RunBuilder(tmp_path / "run-1", nodes=2).begin()
    builder.fail(make_failure(1, at=9, exception="ValueError: bad\x1b[2J"))
    builder.stopped(0, 0, at=10)
    builder.end(0, at=11, outcome="failed", code=75, decision="requeue: requeue 1 of 3")
    builder.attempt(1, at=20)
    return builder.root


@pytest.mark.parametrize(
    ("argv", "column", "words"),
    [
        (["--attempt", "1"], 2, ["attempt_started"]),
        (["--node", "n2", "--event", "worker_failed,workers_stopped"], 1, ["n2", "n2"]),
        (["--node", "1", "--event", "worker_failed,workers_stopped"], 1, ["n2", "n2"]),
        (["--node", "batch", "--event", "verdict"], 1, ["batch"]),
        (["--event", "verdict,worker_failed"], 2, ["worker_failed", "verdict"]),
        (["--event", "verdict", "--event", "attempt_ended"], 2, ["verdict", "attempt_ended"]),
        (["--tail", "3"], 2, ["requeue_decision", "attempt_ended", "attempt_started"]),
    ],
)
def test_events_of_one_attempt_node_or_name(
    root: Path, capsys: pytest.CaptureFixture[str], argv: list[str], column: int, words: list[str]
) -> None:
    assert [line.split()[column] for line in shown(capsys, "--events", str(root), *argv)] == words


def test_json_is_what_was_written_as_far_as_it_can_be_read(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = {line for path in root.rglob("*.jsonl") for line in path.read_text().splitlines()}
    assert set(shown(capsys, "--events", str(root), "--json")) == written
    (line,) = shown(capsys, "--events", str(root), "--json", "--event", "worker_failed")
    assert json.loads(line)["rank"] == 1
    before = shown(capsys, "--events", str(root))
    for path in root.rglob("agent-00000-*.jsonl"):
        path.unlink()
    for path in root.rglob("agent-00001-*.jsonl"):
        raw = path.read_bytes()
        path.write_bytes(raw[: len(raw) - 10])
    lines = shown(capsys, "--events", str(root))
    assert lines == [line for line in before if line in lines]
    assert 0 < len(lines) < len(before)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--event", "worker_faild"], "--event worker_faild: no event has this name; did you mean worker_failed?"),
        (["--event", ""], "there are agent_ended, agent_failed"),
        (["--node", "n9"], "--node n9: its nodes are n[1-2]"),
        (["--node", "n[1"], "--node n[1: "),
        (["--attempt", "4"], "has no attempt 4; it has 0, 1"),
        (["--tail", "-2"], "--tail"),
        (["--rank", "1"], "--rank can't be used with --events"),
        (["--around-failure"], "--around-failure can't be used with --events"),
    ],
)
def test_what_is_wrong_with_events_is_said_in_a_line(
    root: Path, capsys: pytest.CaptureFixture[str], argv: list[str], says: str
) -> None:
    (line,) = shown(capsys, "--events", str(root), *argv, code=2)
    assert says in line


def event(name: str, second: float, node: int = 0, **fields: object) -> dict[str, object]:
    head = {"v": 1, "t": int(second * 1e9), "n": 0, "host": f"n{node}", "node": node, "role": "agent"}
    return {**head, "event": name, **fields}


@pytest.mark.parametrize(
    ("name", "fields", "line"),
    [
        (
            "worker_failed",
            {"round": 1, "rank": 3, "exitcode": -9, "failure_class": "root", "message": "killed"},
            "round 1: rank 3 failed, signal 9 (root): killed",
        ),
        (
            "round_frozen",
            {"round": 2, "nodes": [0, 1], "reason": "restart 1 of 3"},
            "round 2: 2 nodes: restart 1 of 3",
        ),
        ("requeue_decision", {"action": "end", "reason": "the run succeeded"}, "the job ends: the run succeeded"),
        (
            "node_lost",
            {"round": 1, "age": 8.25, "host": "n7", "node": 7},
            "n7 is taken out of round 1: no heartbeat for 8.2 s",
        ),
        (
            "closed",
            {"round": 4, "outcome": "too_few_nodes", "reason": "1 left"},
            "the run is closed in round 4: too few nodes: 1 left",
        ),
        ("verdict", {"outcome": "failed", "reason": "rank 1: x"}, "failed: rank 1: x"),
        (
            "note",
            {"subject": "nodes_waiting", "text": "round 1: nodes wait", "reason": "n7"},
            "round 1: nodes wait: n7",
        ),
        ("round_confirmed", {"round": 1, "restarts_used": 0, "reason": "all 2"}, "round=1 restarts_used=0: all 2"),
        ("of_the_future", {"colour": "blue", "reason": "why not"}, "colour=blue: why not"),
        ("worker_failed", {"round": 1}, "round=1"),
        ("agent_failed", {"error": "a\nb\x1b[2J\x07", "where": "f.py:1"}, "the agent itself failed: a b at f.py:1"),
    ],
)
def test_a_line_says_what_happened_and_why(name: str, fields: dict[str, object], line: str) -> None:
    assert describe_event(event_line({**event(name, 1), **fields})) == line


@given(
    st.sampled_from(sorted(EVENTS)),
    st.dictionaries(
        st.sampled_from(
            ["round", "ranks", "nodes", "reason", "exitcode", "age", "streams", "groups", "seconds", "pids"]
        ),
        st.one_of(st.none(), st.integers(), st.text(max_size=5), st.lists(st.integers(), max_size=2), st.floats()),
    ),
)
def test_whatever_a_file_holds_there_is_a_line(name: str, fields: dict[str, object]) -> None:
    line = describe_event(event_line({**event(name, 1), **fields}))
    assert "\n" not in line
    assert "\x1b" not in line


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_event_has_its_sentence(kind: type[RunEvent]) -> None:
    role = "supervisor" if issubclass(kind, SupervisorEvent) else "agent"
    line = describe_event(event_line({"role": role, "node": 7, "host": "n7", **to_json(sample(kind))}))
    assert line
    assert "=" not in line, "the fields of an event without a sentence"
