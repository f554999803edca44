"""Goodput: time of steps that were kept, and where the rest of the wall time went."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from hpc_elastic.base.files import write_json
from hpc_elastic.failures.ranking import FailureClass
from hpc_elastic.report.collect import collect_run
from hpc_elastic.report.goodput import STEPS_GO_BACK, STEPS_UNKNOWN, Goodput, goodput_of
from hpc_elastic.report.render_html import render_html
from hpc_elastic.report.render_text import render_text
from hpc_elastic.run.attempt import StoredResult
from tests.rigs.run_builder import START_NS, RunBuilder, make_failure


@pytest.fixture
def builder(tmp_path: Path) -> RunBuilder:
    found = RunBuilder(tmp_path / "run", nodes=2)
    found.attempt(0)
    return found


def progress(first: int, at: float, last: int, until: float, **more: Any) -> dict[str, Any]:
    """What an agent reports at a round's end; times in seconds after the run's start."""
    times = {"first_ns": START_NS + int(at * 1e9), "step_ns": START_NS + int(until * 1e9)}
    return {"sections": ["setup", "step"], "first_step": first, "step": last, **times, **more}


def stopped(builder: RunBuilder, round_index: int, at: float, done: dict[str, Any], attempt: int = 0) -> None:
    for node in range(builder.nodes):
        builder.event(attempt, "agent", node, at, "workers_stopped", round=round_index, seconds=0.1, progress=done)


def adds_up(goodput: Goodput) -> bool:
    whole = goodput.training + goodput.starting + goodput.interrupted + goodput.queued + goodput.ending
    parts = goodput.kept + goodput.recomputed + goodput.hanging + goodput.checkpointing
    training = goodput.training if goodput.steps_known else parts
    return whole == pytest.approx(goodput.wall) and parts == pytest.approx(training)


def failed_once(builder: RunBuilder) -> None:
    """Steps 0 to 100 in 100 s, with 20 s of checkpoints; a failure 1 s later; on from step 51 to 149."""
    builder.round(0, 0, at=10)
    builder.fail(make_failure(1, at=131, exception="ValueError: bad", last_step=100))
    stopped(builder, 0, 132, progress(0, 10, 100, 130, checkpoint_seconds=20.0))
    builder.round(0, 1, at=140, reason="restart 1 of 3")
    builder.event(0, "agent", 0, 260, "workers_succeeded", round=1)
    builder.event(0, "agent", 1, 260, "workers_succeeded", round=1)
    stopped(builder, 1, 260, progress(51, 150, 149, 248, checkpoint_seconds=0.0))
    builder.end(0, at=262, outcome="succeeded", code=0)


def test_steps_that_were_done_again_are_no_goodput(builder: RunBuilder) -> None:
    failed_once(builder)
    goodput = goodput_of(collect_run(builder.root))
    assert goodput.steps_known
    assert adds_up(goodput)
    # 100 steps took 100 s beside the checkpoints: of them those from 51 on were lost, and the one that broke off.
    assert goodput.kept == pytest.approx(50 + 98, abs=0.1)
    assert goodput.recomputed == pytest.approx(50 + 1, abs=0.1)
    assert goodput.checkpointing == pytest.approx(20)
    assert goodput.starting == pytest.approx(10, abs=0.1)
    assert goodput.interrupted == pytest.approx(150 - 131, abs=0.1)
    assert goodput.share == pytest.approx(148 / 262, abs=0.001)
    (cost,) = goodput.costs
    assert (round(cost.seconds), round(cost.recomputed)) == (19 + 51, 51)


def test_the_report_names_each_part(builder: RunBuilder) -> None:
    failed_once(builder)
    text = " ".join(render_text(collect_run(builder.root)).split())
    assert (
        "Goodput: 56.5 % of 4 min 22 s (51.0 s in steps that were lost, 20.0 s in checkpoints, 10.0 s to start, "
        in text
    )
    assert "to restart after 1 failure" in text
    page = render_html(collect_run(builder.root))
    assert "in steps that were kept: 2 min 28 s" in page
    assert 'aria-label="Goodput"' in page


def test_a_restart_further_back_takes_earlier_rounds_steps_too(builder: RunBuilder) -> None:
    """The checkpoint of the second round was broken: the third begins before the second did."""
    for index, (begin, first) in enumerate(((10, 0), (100, 51), (200, 1))):
        builder.round(0, index, at=begin)
        builder.fail(make_failure(1, at=begin + 80, exception="ValueError: bad", round_index=index))
        stopped(builder, index, begin + 81, progress(first, begin, first + 80, begin + 80))
    builder.end(0, at=300, outcome="failed", code=1)
    goodput = goodput_of(collect_run(builder.root))
    assert adds_up(goodput)
    assert goodput.kept == pytest.approx(80, abs=1.5), "of the last round alone"


def test_a_hang_counts_until_it_is_found(builder: RunBuilder) -> None:
    builder.round(0, 0, at=10)
    failure = make_failure(1, at=160, exitcode=-9, last_step=50)
    builder.fail(replace(failure, failure_class=FailureClass.HANG, fingerprint="hang:x", reason="no heartbeat"))
    stopped(builder, 0, 161, progress(0, 10, 50, 60))
    builder.end(0, at=170, outcome="failed", code=124)
    goodput = goodput_of(collect_run(builder.root))
    assert adds_up(goodput)
    assert goodput.hanging == pytest.approx(100, abs=0.1)


def test_without_steps_it_is_uptime(builder: RunBuilder) -> None:
    builder.round(0, 0, at=10)
    builder.succeeded(0, 0, at=110)
    builder.end(0, at=112, outcome="succeeded", code=0)
    history = collect_run(builder.root)
    goodput = goodput_of(history)
    assert (goodput.steps_known, goodput.why_unknown) == (False, STEPS_UNKNOWN)
    text = render_text(history)
    assert "Uptime: 89." in text
    assert "Goodput" not in text
    assert 'aria-label="Uptime"' in render_html(history)


def test_steps_that_go_back_by_themselves_measure_nothing(builder: RunBuilder) -> None:
    """A script that counts the steps of each epoch from 0."""
    builder.round(0, 0, at=10)
    builder.succeeded(0, 0, at=110)
    stopped(builder, 0, 110, progress(0, 10, 50, 109, redone_seconds=40.0))
    builder.end(0, at=112, outcome="succeeded", code=0)
    goodput = goodput_of(collect_run(builder.root))
    assert (goodput.steps_known, goodput.why_unknown) == (False, STEPS_GO_BACK)


def test_restarts_within_the_processes_are_taken_off(builder: RunBuilder) -> None:
    builder.round(0, 0, at=10)
    builder.event(
        0, "agent", 0, 60, "ring_restarted", round=0, iteration=1, seconds=7.0, interruptions=[[1, "TERMINATED"]]
    )
    builder.succeeded(0, 0, at=110)
    stopped(builder, 0, 110, progress(0, 10, 80, 110, redone_seconds=17.0))
    builder.end(0, at=110, outcome="succeeded", code=0)
    goodput = goodput_of(collect_run(builder.root))
    assert adds_up(goodput)
    assert goodput.steps_known
    assert goodput.interrupted == pytest.approx(7)
    assert goodput.recomputed == pytest.approx(10)
    (cost,) = goodput.costs
    assert (cost.seconds, cost.what) == (7.0, "iteration 1 after 7.00 s: TERMINATED on rank 1")


def test_a_section_that_was_never_entered_is_named(builder: RunBuilder) -> None:
    timeouts = {"seconds": {"stepp": 30.0, "step": 60.0, "setup": 900.0}, "learns_step": False}
    write_json(builder.paths.run_json, {"version": 1, "run_id": "run", "section_timeouts": timeouts})
    builder.round(0, 0, at=10)
    builder.succeeded(0, 0, at=20)
    unsure = render_text(collect_run(builder.root))
    assert "never entered" not in unsure, "it goes on"
    stopped(builder, 0, 20, progress(0, 10, 50, 19))
    builder.end(0, at=21, outcome="succeeded", code=0)
    for text in (render_text(collect_run(builder.root)), render_html(collect_run(builder.root)).replace("&#x27;", "'")):
        assert "section 'stepp' was never entered; its hang detection did nothing" in text
        assert text.count("was never entered") == 1


def test_a_run_without_events_has_the_end_that_its_result_states(builder: RunBuilder) -> None:
    """A missing part is named, and nothing is said to go on."""
    failed_once(builder)
    folder = builder.paths.attempt(0)
    StoredResult(
        outcome="failed", reason="restarts exhausted", exit_code=1, action="end", decision="0 of 0 requeues used"
    ).save(folder.result_json)
    shutil.rmtree(folder.events)
    text = render_text(collect_run(builder.root))
    assert "train.py FAILED (exit code 1) - attempt 0" in text
    assert "is running" not in text
    assert "incomplete   : the supervisor's events are missing (and 1 more)" in text
    assert "not requeued: 0 of 0 requeues used" in text


def test_a_run_that_succeeded_was_not_given_up(builder: RunBuilder) -> None:
    builder.round(0, 0, at=10)
    builder.event(0, "agent", 0, 100, "platform_failure", round=0, reason="the workers' TCPStore is gone")
    builder.event(0, "agent", 0, 110, "closed", round=0, outcome="succeeded", reason="all workers ended with 0")
    builder.succeeded(0, 0, at=110)
    builder.end(0, at=112, outcome="succeeded", code=0)
    text = render_text(collect_run(builder.root))
    assert "given up" not in text
    assert "Recovery: none was needed: all workers ended with 0" in text
