"""Whether the job goes back into the queue: the whole table, with reasons and exit codes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from msgspec.structs import replace

from hpc_elastic.launch.requeue import (
    AttemptResult,
    RequeueAction,
    RequeueDecision,
    back_off,
    decide_arming,
    decide_requeue,
)
from hpc_elastic.run.option_values import RequeueChoice
from hpc_elastic.run.paths import Outcome, StoredResult
from hpc_elastic.run.spec import RunSpec
from hpc_elastic.slurm.job_state import JobState
from tests.rigs.specs import make_attempt, make_spec

SPEC = make_spec(max_requeues=3, restart_window=600.0)
FAILED: dict[str, Any] = {"outcome": Outcome.FAILED, "reason": "restarts exhausted"}
BEFORE = StoredResult(
    outcome="failed", reason="x", exit_code=75, action="requeue", decision="x", fingerprint="F", step=-1
)
MADE_ROOM = (Outcome.PREEMPTED, Outcome.TIMED_OUT)
CHAIN = {"requeue_with": RequeueChoice.CHAIN}
SCONTROL = {"requeue_with": RequeueChoice.SCONTROL}


def decide(
    *,
    attempt: int = 0,
    max_requeues: int = 3,
    armed_reason: str | None = None,
    before: StoredResult | None = None,
    idle: int = 0,
    spec: RunSpec = SPEC,
    **result: Any,
) -> RequeueDecision:
    info = make_attempt(number=attempt, requeue_armed=armed_reason is None, requeue_reason=armed_reason or "")
    facts = {"retryable": True, "signal_number": None, "fingerprint": "F", "step": -1, "seconds": 5.0}
    ended = AttemptResult(**{**FAILED, **facts, **result})
    return decide_requeue(before, replace(spec, max_requeues=max_requeues), info, ended, idle=idle)


HANG = {"fingerprint": "hang:stack"}
CTRL_C = {"outcome": Outcome.CANCELLED, "reason": "SIGINT on n1", "signal_number": 2}
TIMED_OUT = {"outcome": Outcome.TIMED_OUT, "signal_number": 15}
PREEMPTED = {"outcome": Outcome.PREEMPTED, "signal_number": 15}
REQUEUED = {**PREEMPTED, "requeued": True, "attempt": 9, "armed_reason": "x"}
ROWS: list[tuple[str, dict[str, Any], str, int, str]] = [
    ("success", {"outcome": Outcome.SUCCEEDED}, "end", 0, "the run succeeded"),
    ("spent restarts", {}, "requeue", 75, "requeue 1 of 3 (2 left): restarts exhausted"),
    ("the last requeue", {"attempt": 2}, "requeue", 75, "requeue 3 of 3 (0 left): restarts exhausted"),
    ("no requeue left", {"attempt": 3}, "end", 1, "3 of 3 requeues used"),
    ("none allowed", {"max_requeues": 0}, "end", 1, "0 of 0 requeues used"),
    ("too few nodes", {"outcome": Outcome.TOO_FEW_NODES}, "requeue", 75, "requeue 1 of 3"),
    ("notice was given", {"outcome": Outcome.PREEMPTED}, "requeue", 75, "requeue 1 of 3"),
    ("notice was given, no requeue left", {"outcome": Outcome.PREEMPTED, "attempt": 3}, "end", 143, "3 of 3 requeues"),
    ("not retryable", {"retryable": False}, "end", 93, "another attempt would end the same way: restarts exhausted"),
    ("a hang, no requeue left", {**HANG, "attempt": 3}, "end", 124, "3 of 3 requeues used"),
    ("a hang again", {**HANG, "retryable": False}, "end", 124, "would end the same way"),
    ("a hang with requeues left", HANG, "requeue", 75, "requeue 1 of 3"),
    ("the same failure as before", {"before": BEFORE}, "end", 1, "by the same failure"),
    ("not armed", {"armed_reason": "the site has JobRequeue=0"}, "end", 1, "not enabled: the site has JobRequeue=0"),
    ("cancelled by the user", CTRL_C, "end", 130, "the run was cancelled (SIGINT on n1)"),
    ("cancelled in Slurm", {"outcome": Outcome.CANCELLED, "signal_number": 15}, "end", 143, "cancelled"),
    ("cancelled elsewhere", {"outcome": Outcome.CANCELLED}, "end", 143, "the run was cancelled"),
    ("cancelled while it ended", {**PREEMPTED, "cancelled": True, "requeued": True}, "end", 143, "cancelled meanwhile"),
    ("the time limit without a notice", TIMED_OUT, "requeue", 75, "requeue 1 of 3"),
    ("the time limit, not armed", {**TIMED_OUT, "armed_reason": "x"}, "end", 143, "requeue is not enabled: x"),
    ("Slurm preempts it without a grace time, and cancels it", PREEMPTED, "requeue", 75, "requeue 1 of 3"),
    ("Slurm has requeued it", REQUEUED, "requeue", 75, "Slurm itself has put the job back into the queue"),
]


@pytest.mark.parametrize(("facts", "action", "code", "reason"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
def test_rows(facts: dict[str, Any], action: str, code: int, reason: str) -> None:
    decision = decide(**facts)
    assert decision.action.value == action
    assert decision.exit_code == code
    assert reason in decision.reason


@pytest.mark.parametrize(
    ("was", "now", "again"),
    [
        ({}, {}, False),
        ({"fingerprint": "G"}, {}, True),
        ({"fingerprint": ""}, {"fingerprint": ""}, True),
        ({"step": 100}, {"step": 100}, False),
        ({"step": 100}, {"step": 90, "seconds": 9000.0}, False),
        ({"step": 100}, {"step": 101}, True),
        ({}, {"seconds": 600.0}, True),
        ({}, {"seconds": 599.0}, False),
        ({"step": 100}, {"seconds": 5.0}, False),
    ],
    ids=[
        "the same, at once",
        "another failure",
        "killed from outside both times",
        "the same step",
        "an earlier step, though it took hours",
        "a later step",
        "no steps, and it had run for long",
        "no steps, and it had not",
        "its steps were lost",
    ],
)
def test_the_same_failure_without_progress_is_not_tried_again(
    was: dict[str, Any], now: dict[str, Any], again: bool
) -> None:
    decision = decide(attempt=1, before=replace(BEFORE, **was), **now)
    assert (decision.action is RequeueAction.REQUEUE) is again
    assert again or "the same failure" in decision.reason
    assert ("600 s: --restart-window" in decision.reason) is (not again and "step" not in now)
    spec = replace(SPEC, max_same_failures=0)
    assert decide(attempt=1, before=replace(BEFORE, **was), spec=spec, **now).action is RequeueAction.REQUEUE


@pytest.mark.parametrize(
    ("idle", "seconds"), [(0, 0), (1, 0), (2, 60), (3, 120), (4, 240), (6, 960), (7, 1800), (1000, 1800)]
)
def test_attempts_without_progress_are_tried_again_ever_later(idle: int, seconds: float) -> None:
    assert back_off(idle) == seconds
    decision = decide(attempt=1, idle=idle)
    assert decision.delay == seconds
    assert (f"in {seconds} s since {idle} attempts in a row made no progress" in decision.reason) is (seconds > 0)


STATE = JobState(job_id="7", state="RUNNING", reason="", requeue=True)
REFUSED = replace(STATE, requeue=False)


@pytest.mark.parametrize(
    ("state", "options", "facts", "way", "reason"),
    [
        (STATE, {}, {}, "requeue", ""),
        (STATE, {"max_requeues": 0}, {}, "none", "--no-requeue or --max-requeues 0 was given"),
        (replace(STATE, is_batch=False), {}, {}, "none", "salloc"),
        (STATE, CHAIN, {}, "chain", "--requeue-with chain was given"),
        (STATE, CHAIN, {"can_chain": False}, "none", "not one that hpc-elastic submit made"),
        (None, {}, {"problem": "Slurm is down"}, "requeue", "not verified: Slurm is down"),
        (None, {}, {"missing": "scontrol is not on PATH"}, "none", "scontrol is not on PATH"),
        (None, {}, {}, "none", "does not know"),
        (REFUSED, {}, {}, "chain", "was submitted with --no-requeue"),
        (REFUSED, {}, {"site_allows": False}, "chain", "the site has JobRequeue=0"),
        (REFUSED, {}, {"site_allows": False, "can_chain": False}, "allow", "the site has JobRequeue=0"),
        (REFUSED, {}, {"can_chain": False}, "none", "was submitted with --no-requeue"),
        (REFUSED, SCONTROL, {}, "none", "--no-requeue"),
        (REFUSED, SCONTROL, {"site_allows": False}, "allow", "JobRequeue=0"),
        (STATE, {}, {"site_allows": False}, "requeue", ""),
    ],
)
def test_the_way_that_there_is(
    state: JobState | None, options: dict[str, Any], facts: dict[str, Any], way: str, reason: str
) -> None:
    arming = decide_arming(replace(SPEC, **options), state, **{"can_chain": True, **facts})
    assert arming.way.value == way
    assert reason in arming.reason
    assert bool(reason) is bool(arming.reason)


def test_every_combination_keeps_the_promises() -> None:
    for outcome, retryable, attempt, most, armed, same, number in itertools.product(
        Outcome, (True, False), (0, 1, 3, 9), (0, 1, 3), (True, False), (True, False), (None, 2, 15)
    ):
        decision = decide(
            outcome=outcome,
            retryable=retryable,
            attempt=attempt,
            max_requeues=most,
            armed_reason=None if armed else "because",
            before=BEFORE if same else None,
            signal_number=number,
        )
        assert decision.reason
        wanted = (
            outcome in (Outcome.FAILED, Outcome.TOO_FEW_NODES, *MADE_ROOM)
            and retryable
            and attempt < most
            and armed
            and not same
            and (number is None or outcome in MADE_ROOM)
        )
        assert (decision.action is RequeueAction.REQUEUE) is wanted, decision
        assert (decision.exit_code == 75) is wanted, "75 means that it was requeued, and nothing else does"
        assert (decision.exit_code == 0) is (outcome is Outcome.SUCCEEDED), "0 means success, and nothing else does"
