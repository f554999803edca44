from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from hpc_elastic.failures.ranking import FailureClass
from hpc_elastic.failures.worker_failure import fold_repeats
from hpc_elastic.report.collect import collect_run
from hpc_elastic.report.document import Document
from hpc_elastic.report.render_text import _traceback, fit_traceback, headline_lines, render_job_log, render_text
from hpc_elastic.report.write import json_report, render_json, write_report
from tests.rigs.run_builder import GLOO, RunBuilder, make_failure


@pytest.fixture
def builder(tmp_path: Path) -> RunBuilder:
    return RunBuilder(tmp_path / "run-1")


def big_run(root: Path) -> RunBuilder:
    """512 ranks; rank 37 raised, its node's others were stopped, all the rest lost their peer. It recovered."""
    builder = RunBuilder(root, nodes=64, per_node=8).begin()
    for rank in range(512):
        if rank == 37:
            failure = make_failure(rank, at=61.2, exception="ValueError: bad batch 17", per_node=8, last_step=4711)
        elif rank // 8 == 4:
            failure = make_failure(rank, at=61.25, exitcode=-15, stopped_by_agent=True, per_node=8)
        else:
            failure = make_failure(
                rank, at=61.4 + rank / 1000, exception=f"RuntimeError: {GLOO.format(rank=rank % 250)}", per_node=8
            )
        builder.fail(failure)
    builder.stopped(0, 0, at=63)
    builder.round(0, 1, at=65, reason="restart 1 of 3 (2 left) after: ValueError: bad batch 17")
    return builder


def exhausted_run(builder: RunBuilder) -> None:
    """The same failure four times, then given up and requeued; the second attempt runs."""
    builder.attempt(0)
    for index in range(4):
        reason = f"restart {index} of 3 ({3 - index} left) after: ValueError: bad" if index else ""
        builder.round(0, index, at=1 + 20 * index, reason=reason)
        builder.fail(make_failure(2, at=15 + 20 * index, exception="ValueError: bad", round_index=index))
        for rank in (0, 1, 3):
            text = f"RuntimeError: {GLOO.format(rank=rank)}"
            builder.fail(make_failure(rank, at=15.05 + 20 * index, exception=text, round_index=index))
        builder.stopped(0, index, at=16 + 20 * index)
    builder.event(0, "agent", 0, 81, "closed", round=4, outcome="failed", reason="restarts exhausted (3 of 3)")
    builder.end(0, at=83, outcome="failed", code=75, decision="requeue: requeue 1 of 3 (2 left): restarts exhausted")


def past_of(lines: list[str]) -> list[str]:
    """The history's lines."""
    (end,) = (number for number, line in enumerate(lines) if line.startswith("Uptime: "))
    return lines[lines.index("Attempts and rounds:") + 1 : end]


def test_all_cuts_nothing(builder: RunBuilder) -> None:
    words = " ".join(f"word{number}" for number in range(60))
    builder.attempt(0)
    for index in range(2):
        builder.round(0, index, at=1 + 20 * index, reason=f"restart 1 of 3 (2 left) after: {words} {index}")
        text = f"ValueError: {words} {index}"
        builder.fail(make_failure(0, at=15 + 20 * index, exception=text, round_index=index))
        for rank in range(1, 60, 2):
            builder.fail(make_failure(rank, at=16 + 20 * index, exception="KeyError: 'lr'", round_index=index))
        builder.stopped(0, index, at=18 + 20 * index)
    text = render_text(Document(collect_run(builder.root)), max_lines=None, width=70)
    assert "..." not in text
    assert text.count("word59") > text.count("Traceback")
    assert f"ranks {','.join(map(str, range(1, 60, 2)))} on" in text
    long = RunBuilder(builder.root.with_name("long")).begin()
    long.fail(make_failure(0, at=10, exception=f"ValueError: {'x' * 3000}"))
    assert f"\n  ValueError: {'x' * 3000}\n" in render_text(Document(collect_run(long.root)), max_lines=None)


def test_512_ranks_on_one_screen(tmp_path: Path) -> None:
    text = render_text(Document(collect_run(big_run(tmp_path / "big").root)))
    lines = text.splitlines()
    assert len(lines) <= 40
    assert text.endswith("=\n")
    assert text.isascii()
    assert "  rank 37 (local_rank 5) on n5 (node 4), in train_step (train.py:61), round 0 of attempt 0" in lines
    assert any(line.startswith("  ranks 0-31,40-511 on 63 hosts, from ") and "[consequence]" in line for line in lines)
    assert any(line.startswith("  ranks 32-36,38-39 on n5, from ") and "[ended by this job]" in line for line in lines)
    assert all(len(line) <= 120 for line in lines if "error_file" not in line and "directory" not in line)


@pytest.mark.parametrize("kinds", [1, 10])
def test_at_most_40_lines_whatever_happened(tmp_path: Path, kinds: int) -> None:
    builder = RunBuilder(tmp_path / "run", nodes=10)
    for number in range(5):
        builder.attempt(number, at=1000 * number)
        for index in range(6):
            builder.round(number, index, at=1000 * number + 20 * index, reason=f"restart {index}" if index else "")
            for rank in range(10):
                name = f"Kind{'abcdefghij'[(rank + index) % 10]}Error" if kinds > 1 else "ValueError"
                at = 1000 * number + 20 * index + rank
                text = f"{name}: odd\n" + "more words " * 1000
                builder.fail(make_failure(rank, at=at, exception=text, round_index=index, attempt=number))
        builder.end(number, at=1000 * number + 900, outcome="failed", code=75, decision="requeue: requeue 1 of 3")
    history = collect_run(builder.root)
    text = render_text(Document(history))
    assert len(text.splitlines()) <= 40
    assert ("more kinds (--all shows them)" in text) == (kinds > 1)
    whole = render_text(Document(history), max_lines=None)
    assert "--all shows" not in whole
    assert len(whole.splitlines()) >= len(text.splitlines()) + (25 if kinds > 1 else 0)
    assert len(render_text(Document(history), width=10).splitlines()) <= 40


def test_history_spans_attempts_and_folds_rounds_that_went_alike(builder: RunBuilder) -> None:
    exhausted_run(builder)
    builder.attempt(1, at=200)
    builder.round(1, 0, at=201)
    lines = render_text(Document(collect_run(builder.root))).splitlines()
    assert lines[1] == "train.py is running: round 0 since 11:10:01 (no end is recorded) - attempt 1, job 4242"
    assert "Recovery: given up: restarts exhausted (3 of 3); requeue 1 of 3 (2 left): restarts exhausted" in lines
    past = lines[lines.index("Attempts and rounds:") + 1 :]
    assert past[0].endswith("4 nodes, 83.0 s: failed, exit code 75")
    assert past[1] == (
        "    rounds 0-3, alike: 4 nodes, 4 workers, 15.0 s, processes down for 2 min 24 s in all (1 min 57 s queued): "
        "rank 2 o..."
    )
    assert past[3].startswith("    round 0: 4 nodes, 4 workers: no end yet, since ")
    (line,) = (line for line in lines if line.startswith("Uptime: "))
    assert " until " in line
    assert "the last that is known" in line


def test_an_attempt_can_be_asked_for(builder: RunBuilder) -> None:
    exhausted_run(builder)
    builder.attempt(1, at=200)
    builder.round(1, 0, at=201)
    builder.succeeded(1, 0, at=301)
    builder.end(1, at=302, outcome="succeeded", code=0)
    history = collect_run(builder.root)
    text = render_text(Document(history, attempt=1))
    assert "train.py SUCCEEDED (exit code 0) - attempt 1, job 4242" in text
    assert "No failures." in text
    assert "Root Cause" not in text
    assert "train.py REQUEUED as attempt 1 (exit code 75) - attempt 0, job 4242" in render_text(
        Document(history, attempt=0)
    )
    # Asked for none, the failure that was survived is told.
    text = render_text(Document(history))
    assert "  4 failures were survived, of which the last is described here; the run succeeded.\n" in text
    assert "Root Cause (first observed failure):\n  ValueError: bad\n" in text


def test_nothing_known_yet(builder: RunBuilder) -> None:
    text = render_text(Document(collect_run(builder.root)))
    assert "train.py has no attempt yet" in text
    assert "No failures." in text
    ended = replace(collect_run(builder.root), never_began="ended before it began (Slurm: FAILED, JobLaunchFailure)")
    text = render_text(Document(ended))
    assert "No failures" not in text
    assert "The job never began.\n  reason    : ended before it began (Slurm: FAILED, JobLaunchFailure)" in text


def test_an_attempt_that_failed_without_a_worker(builder: RunBuilder) -> None:
    builder.attempt(0)
    builder.event(0, "supervisor", -1, 600, "agent_ended", node=2, name="n3", code=1)
    builder.end(0, at=602, outcome="too_few_nodes", code=1, reason="2 of 3 nodes had not joined after 600 s")
    lines = render_text(Document(collect_run(builder.root))).splitlines()
    assert "train.py TOO FEW NODES (exit code 1) - attempt 0, job 4242" in lines
    assert "Too few nodes." in lines
    assert "  reason    : 2 of 3 nodes had not joined after 600 s" in lines
    assert "  the agent on n3 ended with code 1" in lines


def test_write_report(builder: RunBuilder) -> None:
    exhausted_run(builder)
    result = write_report(builder.root, attempt=0, outcome="failed", exit_code=1, decision="end: 3 of 3 requeues used")
    paths = builder.paths.attempt(0)
    assert result.problems == ()
    assert paths.report_text.read_text().startswith(result.text[:400])
    assert "FAILED (exit code 1)" in result.text
    assert "; not requeued: 3 of 3 requeues used\n" in result.text
    assert result.verdict.summary == "rank 2 on n3: ValueError: bad"
    value = json.loads(paths.report_json.read_text())
    assert (value["attempt"], value["exit_code"], value["decision"]) == (0, 1, "end: 3 of 3 requeues used")
    assert oct(paths.report_json.stat().st_mode & 0o777) == "0o600"
    assert paths.report_html.read_text().startswith("<!doctype html>")
    assert oct(paths.report_html.stat().st_mode & 0o777) == "0o600"


def test_write_report_never_raises(tmp_path: Path, builder: RunBuilder) -> None:
    result = write_report(tmp_path / "none", attempt=0, outcome="failed", exit_code=1)
    assert "could not be made" in result.text
    assert result.problems
    builder.attempt(0)
    result = write_report(builder.root, attempt=7, outcome="failed", exit_code=1)
    assert len(result.problems) == 3
    assert all("could not write" in problem for problem in result.problems)
    assert result.text


def test_a_long_history_keeps_every_attempt_and_its_last_failure(builder: RunBuilder) -> None:
    """Which failure happened in which attempt is to be seen, however many rounds there were."""
    for number in range(3):
        start = 1000 * number
        builder.attempt(number, at=start, job_id=f"424{number}")
        for index in range(8):
            builder.round(number, index, at=start + 1 + 20 * index)
            error = f"Kind{'abcdefgh'[index]}Error: attempt {number}"
            builder.fail(
                make_failure(2, at=start + 15 + 20 * index, exception=error, round_index=index, attempt=number)
            )
            builder.stopped(number, index, at=start + 16 + 20 * index)
        builder.end(number, at=start + 200, outcome="failed", code=75, decision="requeue: again")
    lines = render_text(Document(collect_run(builder.root))).splitlines()
    past = past_of(lines)
    assert len(past) == 9
    for number in (0, 1):
        assert f"attempt {number} (job 424{number})" in past[number]
        assert ": failed, at last in round 7: rank 2 on n3: Kin" in past[number]
    assert past[2].startswith("  attempt 2 (job 4242)")
    assert "at last" not in past[2]
    assert past[3] == "    ... 3 lines (--all shows them)"
    assert [line.split(":")[0] for line in past[4:]] == [f"    round {index}" for index in range(3, 8)]


def test_a_history_of_many_attempts_keeps_the_last(builder: RunBuilder) -> None:
    for number in range(30):
        builder.attempt(number, at=100 * number)
        builder.round(number, 0, at=100 * number + 1)
        builder.fail(make_failure(1, at=100 * number + 9, exception=f"Kind{number % 2}Error: odd", attempt=number))
        builder.end(number, at=100 * number + 20, outcome="failed", code=75, decision="requeue: again")
    lines = render_text(Document(collect_run(builder.root))).splitlines()
    past = past_of(lines)
    assert past[0] == "  ... 25 earlier attempts (--all shows them)"
    assert [line.split("(")[0].strip() for line in past if line.startswith("  attempt")] == [
        f"attempt {number}" for number in range(25, 30)
    ]
    assert len(past) <= 9


def test_json_text_is_the_json_value(tmp_path: Path, builder: RunBuilder) -> None:
    exhausted_run(builder)
    for root in (builder.root, big_run(tmp_path / "big").root, RunBuilder(tmp_path / "empty").root):
        history = collect_run(root)
        text = json_report(Document(history))
        assert json.loads(text) == json.loads(json.dumps(render_json(Document(history))))
        assert text.endswith("]}\n")
        assert max(map(len, text.splitlines())) < 1_000_000


def test_a_headline_breaks_between_words_and_says_that_it_was_cut() -> None:
    text = "RuntimeError: " + "word " * 100
    lines = headline_lines(text, 60)
    assert len(lines) == 5
    assert all(len(line) <= 60 and line == line.rstrip() for line in lines)
    assert all(line.endswith("word") for line in lines[:4])
    assert lines[4].endswith(" ...")
    assert headline_lines("x" * 70, 60) == ["  " + "x" * 58, "  " + "x" * 12]
    assert headline_lines("", 60) == ["  (no message)"]
    place = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] "
    assert headline_lines(f"RuntimeError: {place}Connection closed", 120) == ["  RuntimeError: Connection closed"]


def test_a_long_path_in_a_traceback_loses_its_beginning_not_the_function() -> None:
    line = f'      File "/shared{"/folder" * 20}/lib/python3.11/site-packages/torch/optim.py", line 83, in wrapper'
    shown = fit_traceback(line, 80)
    assert len(shown) <= 80
    assert shown.startswith('      File "...')
    assert shown.endswith('/torch/optim.py", line 83, in wrapper')
    assert fit_traceback(line, 300) == line
    assert fit_traceback("    x = " + "1" * 100, 60).endswith("...")


def test_the_same_frame_again_and_again_is_folded() -> None:
    frame = '  File "/u/train.py", line 5 in deep'
    assert fold_repeats(["a", *[frame] * 100, "b"]) == [
        "a",
        *[frame] * 3,
        "  [Previous line repeated 97 more times]",
        "b",
    ]
    assert fold_repeats([frame] * 4 + ["x"] * 9) == [frame] * 4 + ["x"] * 9


def test_of_64_ranks_the_job_log_names_one_and_counts_the_others(tmp_path: Path) -> None:
    builder = RunBuilder(tmp_path / "run", nodes=8, per_node=8).begin()
    builder.fail(make_failure(0, at=9, per_node=8, exception="ValueError: bad"))
    for rank in range(1, 64):
        text = "RuntimeError: Connection closed by peer [10.0.0.2]:3216" if rank % 2 else "DistBackendError: NCCL error"
        builder.fail(replace(make_failure(rank, at=10, per_node=8, exception=text), failure_class=FailureClass.SYMPTOM))
    builder.end(0, at=12, outcome="failed", code=1)
    text = render_job_log(Document(collect_run(builder.root)))
    assert "  63 other ranks ended with it: RuntimeError x32, DistBackendError x31\n" in text
    assert text.count("\n") <= 25


FRAMES = [
    line
    for depth in range(20)
    for line in (f'  File "/home/ann/train.py", line {depth}, in f{depth}', f"    f{depth + 1}()")
]


def shown(message: str, *, lines: int | None = 15, frames: list[str] = FRAMES) -> list[str]:
    text = "\n".join(["Traceback (most recent call last):", *frames, message])
    failure = replace(make_failure(0, at=1, exception="ValueError: x"), message=message, traceback=text)
    return [line.strip() for line in _traceback(failure, 200, lines, lost="")]


def test_a_long_message_leaves_room_for_the_frames() -> None:
    """As where something that runs at the exit has printed 38 lines after the exception."""
    long = "ValueError: bad batch\n" + "\n".join(f"bye {n}" for n in range(38))
    told = shown(long)
    assert len(told) <= 15
    assert told[1].endswith("lines above (--all shows them)")
    assert told[-6].endswith("in f19")
    assert told[-5:-1] == ["f20()", "ValueError: bad batch", "bye 0", "bye 1"]
    assert told[-1] == "... 36 more lines (--all shows them)"
    short = shown("ValueError: bad batch\n" + "\n".join(f"field {n}" for n in range(6)), frames=FRAMES[-2:])
    assert (short[1][-6:], short[-1]) == ("in f19", "field 5"), "a short stack leaves its room to the message"
    whole = shown(long, lines=None)
    assert (whole[-1], len(whole)) == ("bye 37", 1 + len(FRAMES) + 39)


@pytest.mark.parametrize("lines", [4, 6, 15, 20])
def test_never_more_than_asked_for_and_the_exception_is_there(lines: int) -> None:
    for more in (0, 1, 2, 5, 60):
        told = shown("\n".join(["ValueError: bad batch", *(f"bye {n}" for n in range(more))]), lines=lines)
        assert len(told) <= lines, (more, told)
        assert "ValueError: bad batch" in told or lines == 4, (more, told)


def test_what_a_message_quotes_stands_at_its_end() -> None:
    quoted = "\n".join(["Original Traceback (most recent call last):", *FRAMES, "KeyError: 'label'"])
    told = shown(f"KeyError: Caught KeyError in DataLoader worker process 0.\n{quoted}")
    assert told[-1] == "KeyError: 'label'"
    assert told[-3].endswith("in f19")


_CAUSE = "rank 2: ValueError: bad batch"


@pytest.mark.parametrize(
    ("reason", "shown"),
    [
        (f"restart 1 of 3 (2 left) after: {_CAUSE}", "Recovery: restart 1 of 3 (2 left) -> round 1\n"),
        (
            "restart 1 of 3 (2 left) after: rank 2: ValueError: bad ba...",
            "Recovery: restart 1 of 3 (2 left) -> round 1\n",
        ),
        (f"restart 1 of 3: {_CAUSE} and more", f"Recovery: restart 1 of 3: {_CAUSE} and more -> round 1\n"),
        ("restart 1 of 3: rank 1: gloo/a.cc", "Recovery: restart 1 of 3: rank 1: gloo/a.cc -> round 1\n"),
        ("restart 1 of 3: [/x/pair.cc:538] closed", "Recovery: restart 1 of 3: closed -> round 1\n"),
    ],
)
def test_the_reason_without_the_cause_that_stands_above(tmp_path: Path, reason: str, shown: str) -> None:
    builder = RunBuilder(tmp_path / "run").begin()
    builder.fail(make_failure(2, at=15, exception="ValueError: bad batch"))
    builder.round(0, 1, at=20, reason=reason)
    assert shown in render_text(Document(collect_run(builder.root)))


@pytest.mark.parametrize(
    ("without", "told"),
    [
        ((2, 4, 5), "round 1: shrunk to 3 nodes from 4, without n3"),
        ((2,), "round 1: grown to 5 nodes from 4, without n3; with n5, n6"),
        ((2, 5), "spare n5 took over from n3"),
    ],
)
def test_how_many_nodes_there_are_now(tmp_path: Path, without: tuple[int, ...], told: str) -> None:
    builder = RunBuilder(tmp_path / "run", nodes=6)
    builder.attempt(0)
    builder.round(0, 0, at=1, without=(4, 5))
    builder.event(0, "agent", 0, 33, "node_lost", round=0, node=2, host="n3", age=3.1)
    if without == (2, 5):
        place = {"group_rank": 2, "replaces_node": 2, "replaces_host": "n3"}
        builder.event(0, "agent", 0, 34, "node_replaced", round=1, node=4, host="n5", **place)
    builder.round(0, 1, at=34, without=without, reason="n3 stopped its heartbeat")
    document = Document(collect_run(builder.root))
    assert document.done == ("a new round, which costs no restart: n3 stopped its heartbeat -> round 1", told)
    assert all(line in render_text(document) for line in document.done)
