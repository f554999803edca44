"""Advice on what would make failures cost less: each from numbers, and only where there are enough."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from hpc_elastic.base.files import write_json
from hpc_elastic.cli.main import main
from hpc_elastic.report.blocks import MeasuredCosts, advise, interval_cost, measure_costs
from hpc_elastic.report.collect import collect_run
from hpc_elastic.report.document import Document
from hpc_elastic.report.goodput import Goodput, RestartPart, goodput_of
from hpc_elastic.report.render_text import render_text
from hpc_elastic.run.spec import RendezvousSettings
from tests.rigs.run_builder import START_NS, RunBuilder, make_failure

COSTS = MeasuredCosts(
    nodes=16,
    failures=6,
    began_on=(("n3", 2), ("n7", 2), ("n9", 2)),
    time_to_failure=6 * 3600.0,
    checkpoints=40,
    checkpoint_seconds=40.0,
    checkpoint_every=1300.0,
    restarts=6,
    restart_seconds=20.0,
    restart_parts=(RestartPart(name="stop", seconds=2.0), RestartPart(name="first step", seconds=15.0)),
)
GOODPUT = Goodput(
    wall=130_000.0, training=120_000.0, starting=100.0, interrupted=120.0, queued=0.0, ending=0.0, steps_known=True,
    kept=118_000.0, recomputed=2000.0, costs=(),
)  # fmt: skip


def said(costs: MeasuredCosts, goodput: Goodput = GOODPUT, **more: Any) -> dict[str, str]:
    return {one.about: one.text for one in advise(replace(costs, **more), goodput)}


def test_a_run_that_does_well_gets_no_advice() -> None:
    assert said(COSTS) == {}
    bad = replace(COSTS, checkpoint_every=120.0, began_on=(("n7", 6),))
    assert set(said(bad)) == {"checkpoint_interval", "nodes"}
    assert said(bad, replace(GOODPUT, wall=900.0)) == {}


def test_the_interval_between_checkpoints_is_advised_with_its_numbers() -> None:
    often = replace(COSTS, checkpoint_every=120.0)
    assert said(often)["checkpoint_interval"] == (
        "save every 21 min 55 s of steps, not every 2 min 00 s: by √(2·T_fail·T_save) with a failure every 6 h 00 min "
        "(6 seen) and 40.0 s for a checkpoint (40 seen); checkpoints and lost steps would cost 6.0 % of the time, "
        "now 25.3 %"
    )
    seldom = replace(COSTS, checkpoint_every=4 * 3600.0)
    assert "not every 4 h 00 min" in said(seldom)["checkpoint_interval"]
    for unknown in ("time_to_failure", "checkpoint_seconds", "checkpoint_every"):
        assert said(replace(often, **{unknown: None})) == {}
    assert said(replace(often, checkpoints=2)) == {}


def test_checkpoints_and_lost_steps_never_cost_more_than_all_the_time() -> None:
    seldom = replace(COSTS, time_to_failure=1200.0, checkpoint_every=4 * 3600.0)
    text = said(seldom)["checkpoint_interval"]
    assert text.startswith("save every 5 min 10 s of steps, not every 4 h 00 min")
    assert text.endswith("would cost 23.7 % of the time, now 100.0 %")
    assert interval_cost(1e9, 40.0, 1.0) == 1.0
    best = (2 * 21600.0 * 40.0) ** 0.5
    for factor in (0.5, 0.8, 1.3, 2.0):
        assert interval_cost(best, 40.0, 21600.0) <= interval_cost(best * factor, 40.0, 21600.0) + 0.0005


def test_of_a_script_that_does_not_resume_the_interval_is_not_to_blame() -> None:
    text = said(replace(COSTS, checkpoint_every=120.0, lost_seconds=7200.0))["checkpoint_interval"]
    assert text == (
        "a failure took back 2 h 00 min of steps (mean of 6), while a checkpoint was complete every 2 min 00 s: "
        "does the script load the newest one?"
    )


def test_the_longest_part_of_a_restart_is_named_with_what_shortens_it() -> None:
    slow = replace(COSTS, restart_seconds=300.0, restart_parts=(RestartPart(name="first step", seconds=280.0),))
    assert said(slow)["restart"].startswith(
        "from the workers' start to their first step took 4 min 40 s of the 5 min 00 s of a restart (mean of 6); "
        "shorter by --start-method forkserver"
    )
    stops = replace(slow, restart_parts=(*slow.restart_parts, RestartPart(name="stop", seconds=281.0)))
    assert "--grace" in said(stops)["restart"]
    assert said(replace(slow, restarts=1)) == {}
    assert said(slow, could_fork=False)["restart"].endswith(
        "shorter by a checkpoint that is read sooner, and a compiler's cache that is kept between starts"
    ), "what it has already is not advised"


def test_a_time_limit_that_costs_more_than_failures_is_named() -> None:
    queued = replace(GOODPUT, queued=20_000.0)
    limited = replace(COSTS, queued=4, time_limits=4, time_limit_seconds=21_000.0)
    assert said(limited, queued) == {
        "time_limit": "the time limit ended 4 jobs, which cost 5 h 50 min with queue, start and lost steps, more than "
        "all failures (18 min 40 s): a longer --time"
    }
    assert set(said(replace(limited, queued=5), queued)) == {"queue", "time_limit"}
    assert "time_limit" not in said(limited, replace(queued, recomputed=30_000.0))


def test_a_node_that_began_most_failures_and_a_queue_that_costs_more_than_them() -> None:
    assert said(replace(COSTS, began_on=(("n7", 4), ("n3", 1))))["nodes"] == (
        "4 of 6 failures began on n7, one of 16 nodes: --exclude n7"
    )
    assert said(replace(COSTS, began_on=(("n7", 4), ("n3", 2)))) == {}
    queued = replace(GOODPUT, queued=20_000.0)
    assert said(replace(COSTS, queued=4), queued)["queue"].startswith(
        "the queue took 5 h 33 min in 4 requeues, more than"
    )
    assert said(replace(COSTS, queued=4), replace(queued, recomputed=30_000.0)) == {}


def test_a_hangs_timeout_is_compared_with_the_longest_step() -> None:
    steps = replace(COSTS, longest_step=50.0)
    assert "ends none that works" in said(steps, step_timeout=60.0)["hang_timeout"]
    assert said(steps, step_timeout=600.0) == {}
    hung = replace(GOODPUT, hanging=7200.0)
    assert said(steps, hung, step_timeout=3600.0)["hang_timeout"] == (
        "hangs were found after 1 h 00 min each and cost 2 h 00 min, while no step has taken more than 50.0 s: "
        "step:250 in --section-timeouts, or step:auto"
    )
    assert said(steps, hung) == {}
    assert said(replace(COSTS, longest_step=0.1), hung, step_timeout=30.0) == {}, "no longer one than there is"


def test_each_option_that_is_advised_exists(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", "--help-all"]) == 0
    known = {*re.findall(r"--[a-z][a-z-]*", capsys.readouterr().out), *RendezvousSettings.__struct_fields__}
    slow = [replace(COSTS, restart_seconds=300.0, restart_parts=(RestartPart(name=name, seconds=280.0),))
            for name in ("stop", "meet", "start", "first step")]  # fmt: skip
    other = replace(
        COSTS, began_on=(("n7", 6),), queued=4, time_limits=4, time_limit_seconds=90_000.0, longest_step=50.0,
    )  # fmt: skip
    queued = replace(GOODPUT, queued=20_000.0, hanging=7200.0)
    texts = [text for costs in slow for could in (True, False) for text in said(costs, could_fork=could).values()]
    texts += [*said(other, queued, step_timeout=3600.0).values(), *said(replace(other, time_limits=0), queued).values()]
    named = {found for text in texts for found in re.findall(r"--[a-z][a-z-]*|\w+(?= in --rdzv-conf)", text)}
    assert {"--exclude", "--time", "--start-method", "--shutdown-timeout", "--section-timeouts"} < named
    assert named <= known


def failing_run(root: Path) -> RunBuilder:
    """4 rounds over 2 attempts, in each 1,000 s of steps with 10 checkpoints of 20 s; rank 1 fails in the first 3."""
    builder = RunBuilder(root, nodes=2)
    at = 0.0
    for number, (attempt, index) in enumerate([(0, 0), (0, 1), (0, 2), (1, 0)]):
        if index == 0:
            builder.attempt(attempt, at=at, **({"job_id": "4243"} if attempt else {}))
        builder.round(attempt, index, at=at + 10, reason=f"restart {index} of 3" if index else "")
        first, last = at + 70, at + 1070
        done = {
            "sections": ["setup", "step", "checkpoint"], "first_step": 100 * number, "step": 100 * number + 100,
            "first_ns": START_NS + int(first * 1e9), "step_ns": START_NS + int(last * 1e9),
            "checkpoint_seconds": 200.0, "checkpoints": 10, "longest_step": 31.5,
        }  # fmt: skip
        if number < 3:
            failure = make_failure(
                1, at=last + 1, attempt=attempt, round_index=index, exception="ValueError: x", last_step=1
            )
            builder.fail(failure)
        for node in range(2):
            if number == 3:
                builder.event(attempt, "agent", node, last, "workers_succeeded", round=index)
            builder.event(attempt, "agent", node, last + 2, "workers_stopped", round=index, seconds=0.1, progress=done)
        at += 1075.0
        if number == 2:
            builder.end(0, at=at, outcome="failed", code=75, decision="requeue: requeue 1 of 3 (2 left)")
            at += 500.0
    builder.end(1, at=at, outcome="succeeded", code=0)
    return builder


def test_a_runs_costs_are_measured_and_add_up_over_its_attempts(tmp_path: Path) -> None:
    history = collect_run(failing_run(tmp_path / "run").root)
    goodput = goodput_of(history)
    parts = (goodput.kept, goodput.recomputed, goodput.hanging, goodput.checkpointing, goodput.starting,
             goodput.interrupted, goodput.queued, goodput.ending)  # fmt: skip
    assert sum(parts) == pytest.approx(goodput.wall)
    costs = measure_costs(history, goodput)
    assert (costs.failures, costs.checkpoints, costs.restarts, costs.queued) == (3, 40, 2, 1)
    assert (costs.checkpoint_seconds, costs.checkpoint_every) == (pytest.approx(20.0), pytest.approx(80.0, rel=0.02))
    assert costs.time_to_failure == pytest.approx((goodput.wall - goodput.queued) / 3)
    assert costs.restart_seconds == pytest.approx(sum(part.seconds for part in costs.restart_parts), rel=0.1)
    assert (costs.longest_step, costs.began_on) == (31.5, (("n2", 3),))
    found = {one.about: one.text for one in advise(measure_costs(history, goodput), goodput)}
    assert "3 of 3 failures began on n2" in found["nodes"]
    assert f"Advice: {found['nodes']}"[:60] in render_text(Document(history))
    # Checkpoints that are reported outside of their section have no known time.
    unknown = measure_costs(history, replace(goodput, checkpointing=0.0))
    assert (unknown.checkpoints, unknown.checkpoint_seconds) == (40, None)


def limited_run(root: Path) -> RunBuilder:
    """3 jobs of 1,000 s, each ended by its time limit after a last checkpoint; 700 s in the queue before the next."""
    builder = RunBuilder(root, nodes=2)
    for number in range(3):
        at = 1800.0 * number
        builder.attempt(number, at=at, job_id=f"{4243 + number}")
        builder.round(number, 0, at=at + 10)
        times = {"first_ns": START_NS + int((at + 210) * 1e9), "step_ns": START_NS + int((at + 1000) * 1e9)}
        done = {"sections": ["setup", "step"], "first_step": 101 * number, "step": 101 * number + 100, **times}
        builder.event(
            number, "supervisor", -1, at + 1000, "signal_decided", call="USR2", meaning="time limit", saves=True
        )
        builder.stopped(number, 0, at=at + 1001, reason="SIGUSR2 on n1 (time limit)")
        for node in range(2):
            builder.event(number, "agent", node, at + 1002, "workers_stopped", round=0, seconds=0.1, progress=done)
        decision = "requeue: requeue 1 of 3 (2 left)" if number < 2 else "end: the training is done"
        builder.end(number, at=at + 1100, outcome="preempted", code=75, decision=decision)
    return builder


def test_what_time_limits_cost_is_measured(tmp_path: Path) -> None:
    history = collect_run(limited_run(tmp_path / "run").root)
    costs = measure_costs(history, goodput_of(history))
    assert (costs.failures, costs.queued, costs.time_limits) == (0, 2, 2)
    # To the next step: the end of the old job, the queue, the start of the new one.
    assert costs.time_limit_seconds == pytest.approx(2 * (100 + 700 + 210), abs=5)
    goodput = goodput_of(history)
    (found,) = advise(measure_costs(history, goodput), goodput)
    assert found.about == "time_limit"


def test_what_a_run_could_have_had_is_read_from_its_options(tmp_path: Path) -> None:
    builder = failing_run(tmp_path / "run")
    spec = json.loads(builder.paths.run_json.read_text())
    script = spec["entrypoint"]
    for more, could in (
        ({}, True),
        ({"start_method": "forkserver"}, False),
        ({"container_image": {"runtime": "apptainer", "image": "x.sif"}}, False),
        ({"entrypoint": {**script, "kind": "command"}}, False),
    ):
        write_json(builder.paths.run_json, {**spec, **more})
        assert collect_run(builder.root).could_fork is could
