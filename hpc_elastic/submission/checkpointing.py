"""submitit's checkpoints, for every rank: what a notice makes a worker do, and what the next attempt goes on from.

The decision is pure, and submitit's own (1.5): `decide`. What differs is that each rank writes down its own state, and
that a state counts only where all ranks of its attempt have written theirs.
"""

from __future__ import annotations

from enum import Enum
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from hpc_elastic.base.files import make_private_dir
from hpc_elastic.errors import HpcElasticError
from hpc_elastic.run.paths import AttemptPaths, RunPaths
from hpc_elastic.submission import places
from hpc_elastic.submission.call import Call, CallTerms, UnreadableObjectError, read_head, read_object, write_object

_SURE_SHARE = 0.8
_SURE_MINUTES = 10.0


class JobNotRequeuedError(HpcElasticError):
    """Notice was given, and the job is not to come back."""

    template = "Job not requeued because: {reason}."


class PreemptionAction(Enum):
    """What a worker does when it hears that its job is about to end."""

    GO_ON = "go on"
    """The function asks for notices itself, and saves at the step that is agreed on."""
    SAVE = "save"
    """Call checkpoint(), write what it gives, and leave: the job is requeued."""
    LEAVE = "leave"
    """The job is requeued, and the function begins anew."""
    END = "end"
    """The job is not to come back."""


class PreemptionFacts(Struct, frozen=True, kw_only=True):
    """What the decision rests on. Times in seconds."""

    ran: float
    """Since the attempt began."""
    limit: float
    """The attempt's time limit; 0: none is known."""
    timeouts_left: int
    has_checkpoint: bool
    asks_itself: bool
    """The function has called `should_checkpoint` or `preemption_notice`."""


class PreemptionDecision(Struct, frozen=True, kw_only=True):
    """What to do, and why not more."""

    action: PreemptionAction
    timed_out: bool
    timeouts_left: int
    """For the next attempt; below 0: there is to be none."""
    reason: str = ""


def decide(facts: PreemptionFacts) -> PreemptionDecision:
    """Decide about a notice, as submitit does.

    A job that ran for four fifths of its limit, or up to ten minutes before it, is taken to be timed out, any other to
    be preempted. (So one of ten minutes or less is always timed out.) Only timeouts count against `max_num_timeout`.
    """
    sure = min(facts.limit * _SURE_SHARE, facts.limit - _SURE_MINUTES * 60)
    timed_out = facts.limit > 0 and facts.ran >= sure
    left = facts.timeouts_left - timed_out
    if facts.asks_itself and not facts.has_checkpoint:
        return PreemptionDecision(action=PreemptionAction.GO_ON, timed_out=timed_out, timeouts_left=left)
    if facts.has_checkpoint:
        action, reason = PreemptionAction.SAVE, ""
    elif timed_out:
        action, reason = PreemptionAction.END, "timed-out and not checkpointable"
    else:
        action, reason = PreemptionAction.LEAVE, ""
    if left < 0:
        action, reason = PreemptionAction.END, "timed-out too many times"
    return PreemptionDecision(action=action, timed_out=timed_out, timeouts_left=left, reason=reason)


def next_call(call: Call) -> Call | None:
    """What the callable's `checkpoint` gives to go on with; None: it gives nothing.

    Raises:
        TypeError: it gives something else than submitit's DelayedSubmission.
    """
    assert call.checkpoint is not None
    delayed = call.checkpoint(*call.args, **call.kwargs)
    if delayed is None:
        return None
    try:
        return Call(delayed.function, tuple(delayed.args), dict(delayed.kwargs))
    except AttributeError:
        raise TypeError(
            f"checkpoint() returned a {type(delayed).__name__}; return a submitit.helpers.DelayedSubmission, or None"
        ) from None


def save_state(attempt: AttemptPaths, call: Call, *, rank: int, world_size: int, timeouts_left: int) -> None:
    """Write one rank's state.

    Raises:
        Exception: what a user's object raises when it is taken apart.
        OSError: it can't be written.
    """
    make_private_dir(places.checkpoint_dir(attempt))
    head = {"rank": rank, "world_size": world_size, "timeouts_left": timeouts_left}
    write_object(places.checkpoint_file(attempt, rank), head, (call.function, call.args, dict(call.kwargs)))


class SavedState(Struct, frozen=True, kw_only=True):
    """What one rank goes on from."""

    call: Call
    timeouts_left: int
    attempt: AttemptPaths
    path: Path


def find_state(paths: RunPaths, *, rank: int, before: int) -> SavedState | None:
    """The state of the newest attempt before `before` in which every rank wrote one.

    Args:
        paths: The run's.
        rank: Whose. One that there was none of then, since the world has grown, takes rank 0's.
        before: The running attempt.

    Raises:
        UnreadableObjectError: it can't be unpickled: what it needs is missing here.
    """
    for attempt in reversed(paths.begun_attempts()):
        if attempt.number >= before:
            continue
        # By name: a thousand ranks must not each open a thousand.
        written = places.ranks(places.checkpoint_dir(attempt))
        try:
            head = read_head(places.checkpoint_file(attempt, 0))
            world_size, left = int(head["world_size"]), int(head["timeouts_left"])
        except (UnreadableObjectError, KeyError):
            continue  # none was asked for
        if written != list(range(world_size)):
            continue  # some rank was not quick enough: the set before it counts
        path = places.checkpoint_file(attempt, rank if rank < world_size else 0)
        function, args, kwargs = read_object(path)
        return SavedState(call=Call(function, args, kwargs), timeouts_left=left, attempt=attempt, path=path)
    return None


def forget_states(paths: RunPaths, *, rank: int, before: AttemptPaths) -> None:
    """Remove what this rank wrote before the state that it goes on from: states may be large."""
    for attempt in paths.begun_attempts():
        if attempt.number < before.number:
            places.checkpoint_file(attempt, rank).unlink(missing_ok=True)


def with_state(call: Call, terms: CallTerms, state: SavedState | None) -> tuple[Call, CallTerms]:
    """What to call, and how often the job may still be out of time."""
    return (call, terms) if state is None else (state.call, replace(terms, timeouts_left=state.timeouts_left))
