"""What follows an attempt by what is known of it and of the one before: whether one that ended the same way goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpc_elastic.base.outcome import Outcome
from hpc_elastic.launch.next_step import decide_next
from hpc_elastic.launch.requeue import RequeueAction, RequeueDecision
from hpc_elastic.launch.supervisor import AttemptResult
from hpc_elastic.run.attempt import AttemptInfo
from hpc_elastic.run.paths import RunPaths
from hpc_elastic.run.result import StoredResult, load_result
from hpc_elastic.run.spec import EntryKind, Entrypoint, RunSpec

SPEC = RunSpec(
    run_id="run",
    uid="0" * 32,
    name="x",
    created_ns=0,
    entrypoint=Entrypoint(kind=EntryKind.SCRIPT, target="train.py"),
    cwd="/",
    max_requeues=5,
    restart_window=600.0,
)


def decide(tmp_path: Path, *, number: int = 1, step: int = -1, seconds: float = 5.0, **facts: Any) -> RequeueDecision:
    attempt = AttemptInfo(
        number=number, cluster="slurm", nodes=("n1",), batch_host="n1", started_ns=0, requeue_armed=True
    )
    result = AttemptResult(
        **{
            "outcome": Outcome.FAILED,
            "reason": "restarts exhausted",
            "retryable": True,
            "signal_number": None,
            "fingerprint": "F",
            **facts,
        },
        step=step,
        seconds=seconds,
    )
    stored = load_result(RunPaths(tmp_path).attempt(number - 1).result_json) if number else None
    return decide_next(stored, SPEC, attempt, result)


def before(tmp_path: Path, *, number: int = 0, fingerprint: str = "F", step: int = -1) -> None:
    root = RunPaths(tmp_path).attempt(number).root
    root.mkdir()
    StoredResult(
        outcome="failed", reason="x", exit_code=75, action="requeue", decision="x", fingerprint=fingerprint, step=step
    ).save(RunPaths(tmp_path).attempt(number).result_json)


def test_the_first_attempt_is_like_no_other(tmp_path: Path) -> None:
    assert decide(tmp_path, number=0).action is RequeueAction.REQUEUE


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
    tmp_path: Path, was: dict[str, Any], now: dict[str, Any], again: bool
) -> None:
    before(tmp_path, **was)
    decision = decide(tmp_path, **now)
    assert (decision.action is RequeueAction.REQUEUE) is again
    assert again or "the same failure" in decision.reason


def test_only_the_attempt_just_before_counts(tmp_path: Path) -> None:
    before(tmp_path, number=0)
    before(tmp_path, number=1, fingerprint="G")
    assert decide(tmp_path, number=2).action is RequeueAction.REQUEUE


@pytest.mark.parametrize("text", ["", "{", '{"version": 1}'])
def test_a_result_that_can_not_be_read_is_none(tmp_path: Path, text: str) -> None:
    before(tmp_path)
    RunPaths(tmp_path).attempt(0).result_json.write_text(text)
    assert decide(tmp_path).action is RequeueAction.REQUEUE
