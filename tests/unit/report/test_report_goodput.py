"""Goodput: time of steps that were kept, and where the rest of the wall time went."""

from __future__ import annotations

import json
import random
import re
import shutil
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from hpc_elastic.base.files import write_json
from hpc_elastic.failures.ranking import FailureClass
from hpc_elastic.report.collect import collect_run
from hpc_elastic.report.document import Document
from hpc_elastic.report.goodput import ONE_STEP, STEPS_GO_BACK, Goodput, describe_goodput, describe_progress, goodput_of
from hpc_elastic.report.render_html import render_html
from hpc_elastic.report.render_text import render_text
from hpc_elastic.run.progress import ProgressSource
from tests.rigs.run_builder import START_NS, RunBuilder, make_failure
from tests.rigs.specs import store_result


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


def goodput_after(builder: RunBuilder, end: float, *, outcome: str = "succeeded", code: int = 0) -> Goodput:
    """The goodput of a run whose attempt ended then; its parts add up."""
    builder.end(0, at=end, outcome=outcome, code=code)
    goodput = goodput_of(collect_run(builder.root))
    assert adds_up(goodput)
    return goodput


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
    assert (goodput.kept, goodput.recomputed) == (pytest.approx(50 + 98, abs=0.1), pytest.approx(50 + 1, abs=0.1))
    assert (goodput.checkpointing, goodput.starting) == (pytest.approx(20), pytest.approx(10, abs=0.1))
    assert goodput.interrupted == pytest.approx(150 - 131, abs=0.1)
    assert goodput.share == pytest.approx(148 / 262, abs=0.001)
    (cost,) = goodput.costs
    assert (round(cost.seconds), round(cost.recomputed)) == (19 + 51, 51)
    text = " ".join(render_text(Document(collect_run(builder.root))).split())
    lost = "51.0 s in steps that were lost, 20.0 s in checkpoints, 10.0 s to start, "
    assert f"Goodput: 56.5 % of 4 min 22 s ({lost}" in text
    assert "to restart after 1 failure" in text
    page = render_html(Document(collect_run(builder.root)))
    assert "in steps that were kept: 2 min 28 s" in page
    assert 'aria-label="Goodput"' in page


def test_a_restart_further_back_takes_earlier_rounds_steps_too(builder: RunBuilder) -> None:
    """The checkpoint of the second round was broken: the third begins before the second did."""
    for index, (begin, first) in enumerate(((10, 0), (100, 51), (200, 1))):
        builder.round(0, index, at=begin)
        builder.fail(make_failure(1, at=begin + 80, exception="ValueError: bad", round_index=index))
        stopped(builder, index, begin + 81, progress(first, begin, first + 80, begin + 80))
    goodput = goodput_after(builder, 300, outcome="failed", code=1)
    assert goodput.kept == pytest.approx(80, abs=1.5), "of the last round alone"


def test_steps_beyond_the_last_report_at_which_a_later_round_goes_on_were_kept(builder: RunBuilder) -> None:
    """An agent was killed, and its workers' steps are known from its last summary, 60 s before."""
    builder.round(0, 0, at=10)
    for node in range(2):
        path = builder.paths.attempt(0).heartbeats(node)
        path.parent.mkdir(exist_ok=True)
        done = progress(0, 10, 100, 110)
        path = path.with_name(f"{path.stem}-round-00000.json")
        path.write_text(json.dumps({"version": 1, "node": node, "round": 0, "written_ns": START_NS, "progress": done}))
    builder.fail(make_failure(1, at=170, exitcode=-9))
    builder.stopped(0, 0, at=171)
    builder.round(0, 1, at=180, reason="restart 1 of 3")
    builder.succeeded(0, 1, at=300)
    stopped(builder, 1, 300, progress(151, 190, 250, 299))
    goodput = goodput_after(builder, 301)
    assert (goodput.kept, goodput.recomputed) == (pytest.approx(100 + 50 + 109, abs=0.1), pytest.approx(10, abs=0.1))


def test_impossible_numbers_of_a_summary_make_no_goodput_above_all_the_time(builder: RunBuilder) -> None:
    builder.round(0, 0, at=10)
    done = progress(0, 10, 100, 110, checkpoint_seconds=-1e300, checkpoints=-4, redone_seconds=-5.0)
    builder.succeeded(0, 0, at=120)
    stopped(builder, 0, 120, done)
    goodput = goodput_after(builder, 121)
    assert (goodput.checkpointing, goodput.checkpoints, goodput.recomputed) == (0, 0, 0)


def test_a_hang_that_was_only_observed_is_no_good_time_and_stands_in_the_report(builder: RunBuilder) -> None:
    """The job was cancelled in the morning."""
    builder.round(0, 0, at=10)
    reason = "no rank of 2 has made progress for 5 min 00 s; rank 1 on n1: it never entered all_reduce #6"
    builder.event(0, "agent", 0, 410, "hang_suspected", round=0, source="kernel", ranks=[1], reason=reason)
    builder.event(0, "agent", 0, 1000, "workers_stopping", round=0, reason="SIGTERM received")
    stopped(builder, 0, 1001, progress(0, 10, 100, 110))
    builder.end(0, at=1002, outcome="cancelled", code=130)
    history = collect_run(builder.root)
    goodput = goodput_of(history)
    assert (round(goodput.kept), round(goodput.hanging)) == (100, 890)
    text = " ".join(render_text(Document(history), width=100).split())
    assert f"round 0: {reason}" in text


def test_a_hang_is_found_when_the_workers_are_stopped(builder: RunBuilder) -> None:
    """As agents report one: the failure's time is that of the last heartbeat."""
    builder.round(0, 0, at=10)
    failure = make_failure(1, at=60, exitcode=-6, last_step=50)
    builder.fail(replace(failure, failure_class=FailureClass.HANG, fingerprint="hang:x"), told_at=161)
    for node in range(2):
        builder.event(0, "agent", node, 160, "workers_stopping", round=0, reason="rank 1 hangs")
    stopped(builder, 0, 161, progress(0, 10, 50, 60))
    builder.round(0, 1, at=165, reason="restart 1 of 3")
    builder.succeeded(0, 1, at=300)
    stopped(builder, 1, 300, progress(51, 170, 100, 299))
    goodput = goodput_after(builder, 301)
    assert (goodput.hanging, goodput.interrupted) == (pytest.approx(100, abs=0.1), pytest.approx(10, abs=0.1))
    (cost,) = goodput.costs
    assert cost.seconds == pytest.approx(110, abs=0.1)
    assert cost.parts[0].seconds == pytest.approx(1, abs=0.1), "to stop the workers, not to find the hang"


def test_counted_steps_show_when_training_was_back_and_not_what_was_done_again(builder: RunBuilder) -> None:
    def counted(steps: int, at: float, until: float) -> dict[str, Any]:
        return progress(0, at, -1, until, first_step=None, counted_steps=steps)

    builder.round(0, 0, at=10)
    builder.fail(make_failure(1, at=111, exception="ValueError: bad"))
    stopped(builder, 0, 112, counted(90, 20, 110))
    builder.round(0, 1, at=115, reason="restart 1 of 3")
    builder.succeeded(0, 1, at=300)
    stopped(builder, 1, 300, counted(160, 130, 299))
    builder.end(0, at=301, outcome="succeeded", code=0)
    history = collect_run(builder.root)
    goodput = goodput_of(history)
    assert adds_up(goodput)
    assert (goodput.steps_known, goodput.progress) == (True, "optimizer")
    (cost,) = goodput.costs
    assert cost.seconds == pytest.approx(20, abs=0.1), "from the last step before to the first step after"
    assert goodput.starting == pytest.approx(20, abs=0.1)
    assert "Progress: optimizer. Which steps were done again is not known" in render_text(Document(history))
    assert "Progress: optimizer. Which steps were done again is not known" in render_html(Document(history))


def test_collectives_show_when_training_was_back_where_no_step_of_the_run_is_known(builder: RunBuilder) -> None:
    def done(counts: ProgressSource, number: int, at: float, until: float) -> dict[str, Any]:
        return {**progress(0, at, -1, until, first_step=None, counted_steps=number), "counts": counts.value}

    for counts in (ProgressSource.OPTIMIZER, ProgressSource.COLLECTIVES):
        builder = RunBuilder(builder.root.parent / counts.value)
        builder.round(0, 0, at=10)
        builder.fail(make_failure(1, at=111, exception="ValueError: bad"))
        stopped(builder, 0, 112, done(counts, 90, 20, 110))
        builder.round(0, 1, at=115, reason="restart 1 of 3")
        builder.fail(make_failure(1, at=150, exception="ValueError: bad", round_index=1))
        stopped(builder, 1, 151, done(ProgressSource.COLLECTIVES, 9, 130, 149))
        builder.end(0, at=151, outcome="failed", code=1)
        goodput = goodput_of(collect_run(builder.root))
        assert (goodput.steps_known, goodput.progress) == (True, counts)
        cost = goodput.costs[0]
        if counts is ProgressSource.COLLECTIVES:
            assert (cost.recovered, cost.seconds) == (True, pytest.approx(20, abs=0.1))
        else:
            assert not cost.recovered, "a process group was made, and no step was done"


def test_without_steps_processes_that_are_up_are_no_recovery(builder: RunBuilder) -> None:
    builder.round(0, 0, at=10)
    builder.fail(make_failure(1, at=40, exception="ValueError: bad"))
    builder.stopped(0, 0, at=41)
    builder.round(0, 1, at=42, reason="restart 1 of 3")
    builder.succeeded(0, 1, at=110)
    builder.end(0, at=112, outcome="succeeded", code=0)
    history = collect_run(builder.root)
    text = " ".join(render_text(Document(history)).split())
    page = render_html(Document(history))
    assert "processes up after 2.0 s" in text
    assert "Progress: unknown, since no step was reported or counted: when training was back is not known;" in text
    assert "Progress: unknown" in page
    assert "processes up" in page
    assert not re.search(r"\bcost |\brunning\b", text + re.sub(r"<style>.*?</style>", "", page, flags=re.DOTALL))


def test_a_round_that_ends_before_its_first_step_is_no_recovery(builder: RunBuilder) -> None:
    """Training is back with the first step of the round after it."""
    builder.round(0, 0, at=10)
    builder.fail(make_failure(1, at=100, exception="ValueError: bad"))
    stopped(builder, 0, 101, progress(0, 20, 80, 100))
    builder.round(0, 1, at=102, reason="restart 1 of 3")
    builder.fail(make_failure(1, at=110, exception="ImportError: no x", round_index=1))
    builder.stopped(0, 1, at=111)
    builder.round(0, 2, at=112, reason="restart 2 of 3")
    builder.succeeded(0, 2, at=200)
    stopped(builder, 2, 200, progress(81, 130, 160, 200))
    builder.end(0, at=201, outcome="succeeded", code=0)
    history = collect_run(builder.root)
    first, second = goodput_of(history).costs
    assert (first.recovered, second.recovered) == (False, True)
    assert first.seconds + second.seconds == pytest.approx(30, abs=0.1)
    assert "s, no step after it: rank 1" in render_text(Document(history))


def test_steps_that_go_back_by_themselves_measure_nothing(builder: RunBuilder) -> None:
    """A script that counts the steps of each epoch from 0."""
    builder.round(0, 0, at=10)
    builder.succeeded(0, 0, at=110)
    stopped(builder, 0, 110, progress(0, 10, 50, 109, redone_seconds=40.0))
    goodput = goodput_after(builder, 112)
    assert (goodput.steps_known, goodput.why_unknown) == (False, STEPS_GO_BACK)


def test_of_one_step_it_is_uptime(builder: RunBuilder) -> None:
    """How long it took is not known: it was reported once."""
    builder.round(0, 0, at=10)
    builder.succeeded(0, 0, at=200)
    stopped(builder, 0, 200, progress(0, 199, 0, 199))
    goodput = goodput_after(builder, 201)
    assert (goodput.share, goodput.why_unknown) == (pytest.approx(189 / 201, abs=0.01), ONE_STEP)
    assert describe_progress(goodput).startswith("Progress: heartbeat, since no round reported more than one step: ")


def test_restarts_within_the_processes_are_taken_off(builder: RunBuilder) -> None:
    builder.round(0, 0, at=10)
    builder.event(
        0, "agent", 0, 60, "ring_restarted", round=0, iteration=1, seconds=7.0, interruptions=[[1, "TERMINATED"]]
    )
    builder.succeeded(0, 0, at=110)
    stopped(builder, 0, 110, progress(0, 10, 80, 110, redone_seconds=17.0))
    goodput = goodput_after(builder, 110)
    assert goodput.steps_known
    assert (goodput.interrupted, goodput.recomputed) == (pytest.approx(7), pytest.approx(10))
    (cost,) = goodput.costs
    assert (cost.seconds, cost.what) == (7.0, "iteration 1 after 7.00 s: TERMINATED on rank 1")


def test_a_section_that_was_never_entered_is_named(builder: RunBuilder) -> None:
    timeouts = {"seconds": {"stepp": 30.0, "step": 60.0, "setup": 900.0}, "learns_step": False}
    write_json(builder.paths.run_json, {"version": 1, "run_id": "run", "section_timeouts": timeouts})
    builder.round(0, 0, at=10)
    builder.succeeded(0, 0, at=20)
    unsure = render_text(Document(collect_run(builder.root)))
    assert "never entered" not in unsure, "it goes on"
    stopped(builder, 0, 20, progress(0, 10, 50, 19))
    builder.end(0, at=21, outcome="succeeded", code=0)
    for text in (
        render_text(Document(collect_run(builder.root))),
        unescape(render_html(Document(collect_run(builder.root)))),
    ):
        assert "section 'stepp' was never entered; its hang detection did nothing" in text
        assert text.count("was never entered") == 1


def test_a_round_that_begins_at_the_first_step_again_is_noted(builder: RunBuilder) -> None:
    builder.round(0, 0, at=10)
    stopped(builder, 0, 50, progress(0, 10, 152, 49))
    builder.round(0, 1, at=60)
    stopped(builder, 1, 70, progress(151, 60, 160, 69))
    builder.end(0, at=71, outcome="preempted", code=75)
    assert "not resumed" not in render_text(Document(collect_run(builder.root)))
    builder.attempt(1, at=80)
    builder.round(1, 0, at=90)
    stopped(builder, 0, 95, progress(0, 91, 7, 94), attempt=1)
    builder.end(1, at=96, outcome="succeeded", code=0)
    for text in (
        render_text(Document(collect_run(builder.root))),
        render_html(Document(collect_run(builder.root))),
    ):
        flat = " ".join(text.split())
        assert "attempt 1, round 0: training began at step 0 again, after step 160 of an earlier round" in flat


def test_a_run_without_events_has_the_end_that_its_result_states(builder: RunBuilder) -> None:
    """A missing part is named, and nothing is said to go on."""
    failed_once(builder)
    folder = builder.paths.attempt(0)
    store_result(folder, 1, reason="restarts exhausted", decision="0 of 0 requeues used")
    shutil.rmtree(folder.events)
    text = render_text(Document(collect_run(builder.root)))
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
    text = render_text(Document(collect_run(builder.root)))
    assert "given up" not in text
    assert "Recovery: none was needed: all workers ended with 0" in text


def random_run(root: Path, rng: random.Random) -> tuple[RunBuilder, float]:
    """A run of several attempts, as failures, hangs, lost nodes, changes and queues come; and the seconds it queued."""
    builder = RunBuilder(root, nodes=2)
    now, step, queued = 0.0, 0, 0.0
    for attempt in range(rng.randint(1, 4)):
        if attempt:
            queued += (gap := rng.choice((0.0, 1.0, 700.0)))
            now += gap
        builder.attempt(attempt, at=now, job_id=f"{4242 + attempt}")
        for index in range(rng.randint(1, 4)):
            now += rng.uniform(0.1, 30)
            builder.round(attempt, index, at=now, reason=f"restart {index} of 3" if index else "")
            begin, first = now, max(0, step - rng.choice((0, 5, 50, -30)))
            at = begin + rng.uniform(0, 20)
            step, last = first + rng.randint(0, 100), at + rng.uniform(0, 200)
            now = last + rng.uniform(0, 60)
            save, redone = (rng.choice((0.0, rng.uniform(0, 30), 500.0)) for _ in range(2))
            done = progress(first, at, step, last, checkpoint_seconds=save, redone_seconds=0.0, checkpoints=int(save))
            if rng.random() < 0.3:
                seconds = rng.choice((5.0, 100.0))
                builder.event(
                    attempt, "agent", 0, rng.uniform(begin, now), "ring_restarted", round=index, iteration=1,
                    seconds=seconds, interruptions=[[1, "TERMINATED"]],
                )  # fmt: skip
                done["redone_seconds"] = redone
            ending = rng.choice(("fails", "hangs", "changes", "succeeds", "unknown"))
            if ending in ("fails", "hangs"):
                failure = make_failure(1, at=now, attempt=attempt, round_index=index, exception="ValueError: bad")
                if ending == "hangs":
                    failure = replace(failure, failure_class=FailureClass.HANG, fingerprint="hang:x", reason="silent")
                builder.fail(failure)
            elif ending == "succeeds":
                builder.succeeded(attempt, index, at=now)
            now += rng.uniform(0, 5)
            if ending != "unknown":
                stopped(builder, index, now, done if rng.random() < 0.9 else {"sections": []}, attempt=attempt)
        now += rng.uniform(0, 10)
        builder.end(attempt, at=now, outcome="failed", code=75, decision="requeue: requeue 1 of 3 (2 left)")
    return builder, queued


@pytest.mark.parametrize("seed", range(60))
def test_the_parts_add_up_to_the_whole_whatever_happened(tmp_path: Path, seed: int) -> None:
    builder, queued = random_run(tmp_path / "run", random.Random(seed))
    goodput = goodput_of(collect_run(builder.root))
    assert adds_up(goodput)
    assert sum(seconds for _, _, seconds in describe_goodput(goodput)) == pytest.approx(goodput.wall)
    assert min(seconds for _, _, seconds in describe_goodput(goodput)) >= 0
    assert goodput.queued == pytest.approx(queued, abs=0.01)
    assert 0 <= (goodput.share or 0) <= 1
    lost = sum(cost.seconds for cost in goodput.costs)
    assert lost <= goodput.wall + 1e-6
    assert sum(cost.queued for cost in goodput.costs) <= queued + 0.01
