"""Notices and saved states: submitit's own decisions, and states that all ranks share."""

from __future__ import annotations

import itertools
import logging
import os
from pathlib import Path
from typing import Any

import pytest
from submitit.core import job_environment, utils
from submitit.helpers import Checkpointable, DelayedSubmission

from hpc_elastic.run.paths import RunPaths
from hpc_elastic.submission.call import Call
from hpc_elastic.submission.worker import (
    PreemptionAction,
    SavedState,
    decide,
    find_state,
    forget_states,
    next_call,
    save_state,
)


class Bare:
    def __call__(self) -> None: ...


class Resumable(Checkpointable):
    def __call__(self) -> None: ...


class Requeued(BaseException):
    pass


class TheirEnvironment(job_environment.JobEnvironment):
    _env = {"job_id": "NOT_SET", "global_rank": "NOT_SET"}  # noqa: RUF012

    def _requeue(self, countdown: int) -> None:
        raise Requeued(countdown)


def what_submitit_does(function: Any, *, ran: float, minutes: int, left: int, folder: Path) -> tuple[str, int]:
    """Its decision: requeued or not and why not, and the timeouts that are left then."""
    delayed = DelayedSubmission(function)
    delayed.set_timeout(minutes, left)
    paths = utils.JobPaths(folder, job_id="1", task_id=0)
    handler = job_environment.SignalHandler(TheirEnvironment(), paths, delayed)
    handler._start_time -= ran
    folder.mkdir(exist_ok=True)
    try:
        handler.checkpoint_and_try_requeue(10, None)
    except Requeued as requeued:
        return "", requeued.args[0]
    except utils.UncompletedJobError as error:
        return str(error), -1
    raise AssertionError("neither requeued nor refused")


def test_the_decision_is_submitits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    seen = set()
    cases = itertools.product((Bare(), Resumable()), (1.0, 200.0, 1700.0, 2400.0, 3500.0), (5, 30, 60), (0, 1, 3))
    for number, (function, ran, minutes, left) in enumerate(cases):
        theirs = what_submitit_does(function, ran=ran, minutes=minutes, left=left, folder=tmp_path / str(number))
        ours = decide(
            ran=ran,
            limit=minutes * 60,
            timeouts_left=left,
            has_checkpoint=isinstance(function, Resumable),
            asks_itself=False,
        )
        assert (f"Job not requeued because: {ours.reason}." if ours.reason else "") == theirs[0]
        assert (ours.action is PreemptionAction.END) == bool(theirs[0])
        if not theirs[0]:
            assert ours.timeouts_left == theirs[1]
        seen.add((ours.action, ours.timed_out))
    assert len(seen) == 4, "every way was met"


def test_a_function_that_asks_itself_is_left_alone_and_without_a_limit_nothing_is_a_timeout() -> None:
    decision = decide(ran=1e6, limit=60, timeouts_left=0, has_checkpoint=False, asks_itself=True)
    assert decision.action is PreemptionAction.GO_ON
    decision = decide(ran=1e9, limit=0, timeouts_left=0, has_checkpoint=True, asks_itself=False)
    assert (decision.action, decision.timed_out) == (PreemptionAction.SAVE, False)


def test_what_a_checkpoint_may_give() -> None:
    class Odd:
        def __init__(self, gives: Any) -> None:
            self.gives = gives

        def __call__(self) -> None: ...

        def checkpoint(self, *args: Any, **kwargs: Any) -> Any:
            return self.gives

    given = next_call(Call(Odd(DelayedSubmission(max, 1, 2, key=abs))))
    assert given is not None
    assert (given(), given.args) == (2, (1, 2))
    assert next_call(Call(Odd(None))) is None
    with pytest.raises(TypeError, match="returned a str; return a submitit"):
        next_call(Call(Odd("state")))


class TheirMarked:
    """Another name that submitit looks for, for classes that have a method `checkpoint` of their own."""

    def __submitit_checkpoint__(self, value: int) -> DelayedSubmission:
        return DelayedSubmission(self, value + 1)

    def __call__(self, value: int) -> int:
        return value


def test_submitits_other_name_for_the_method() -> None:
    found = next_call(Call(TheirMarked(), (1,)))
    assert found is not None
    assert found.args == (2,)


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    for number in range(4):
        (tmp_path / f"attempt-{number:03d}").mkdir(mode=0o700)
    return RunPaths(tmp_path)


def save(paths: RunPaths, attempt: int, ranks: int, *, of: int, left: int = 3) -> None:
    for rank in range(ranks):
        call = Call(max, (attempt, rank))
        save_state(paths.attempt(attempt), call, rank=rank, world_size=of, timeouts_left=left)


def state(paths: RunPaths, rank: int, before: int = 9) -> SavedState | None:
    return find_state(paths, rank=rank, before=before)


def test_each_rank_goes_on_from_its_own_state(paths: RunPaths) -> None:
    save(paths, 0, 2, of=2)
    save(paths, 1, 3, of=3, left=1)
    found = [state(paths, rank) for rank in range(4)]
    assert [item.call.args for item in found if item is not None] == [(1, 0), (1, 1), (1, 2), (1, 0)]
    assert found[2] is not None
    assert found[2].timeouts_left == 1


def test_a_state_that_some_rank_could_not_write_or_the_running_attempts_own_counts_for_none(paths: RunPaths) -> None:
    save(paths, 0, 2, of=2)
    save(paths, 1, 1, of=2)
    assert [state(paths, rank).call.args for rank in range(2)] == [(0, 0), (0, 1)]  # type: ignore[union-attr]
    save(paths, 2, 1, of=1)
    found = [state(paths, 0, before=before) for before in range(4)]
    assert [item and item.call.args for item in found] == [None, (0, 0), (0, 0), (2, 0)]


def test_what_is_older_than_the_state_in_use_is_removed(paths: RunPaths) -> None:
    for attempt in range(3):
        save(paths, attempt, 1, of=1)
    forget_states(paths, rank=0, before=paths.attempt(2))
    left = [attempt for attempt in range(3) if paths.attempt(attempt).rank_checkpoint(0).exists()]
    assert left == [2]
    mode = os.stat(paths.attempt(2).rank_checkpoint(0)).st_mode
    assert mode & 0o777 == 0o600
