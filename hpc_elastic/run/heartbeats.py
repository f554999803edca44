"""The last heartbeats of a node's workers: a file of each node, rewritten now and then, and part of some events."""

from __future__ import annotations

from enum import Enum

from msgspec import Struct


class ProgressSource(str, Enum):
    """What a worker's progress is known by."""

    HEARTBEAT = "heartbeat"
    """The script reports its steps."""
    OPTIMIZER = "optimizer"
    """The steps of its optimizer are counted, from 1 in each round."""
    COLLECTIVES = "collectives"
    """The collectives that torch's flight recorder shows as complete are counted, from 1 in each round."""
    KERNEL = "kernel"
    """The kernel's counts show whether its processes work or rest, and no steps."""
    UNKNOWN = "unknown"

    @property
    def unit(self) -> str:
        """What is counted."""
        return "collective" if self is ProgressSource.COLLECTIVES else "step"


STEPS = (ProgressSource.OPTIMIZER, ProgressSource.HEARTBEAT)
COUNTED = (ProgressSource.OPTIMIZER, ProgressSource.COLLECTIVES)
"""Those that begin with 1 in each round."""


class RankHeartbeat(Struct, frozen=True, kw_only=True):
    """A worker's last heartbeat."""

    rank: int
    """Global rank."""
    local_rank: int = -1
    step: int | None = None
    counted_steps: int | None = None
    """Steps of its optimizer in this round, or its collectives, where the script reports none: from 1 in each."""
    source: ProgressSource = ProgressSource.UNKNOWN
    """What the steps are known by; unknown: there are none, or an older agent wrote this."""
    section: str = ""
    age: float = 0.0
    """Seconds since the heartbeat, when this was written."""
    count: int = 0
    """Heartbeats in this round so far."""
    saved_step: int | None = None
    """The furthest step that a checkpoint of this round holds."""
    saved_age: float | None = None
    """Seconds since its last checkpoint was complete, when this was written; None: none was in this round."""


class Progress(Struct, frozen=True, kw_only=True):
    """What a node's workers have done in a round, by the one of them that got furthest: for the goodput."""

    sections: tuple[str, ...] | None = None
    """All that any worker here has been in; null: they can't be known."""
    first_step: int | None = None
    """The first step that was reported in the round; null: none was."""
    first_ns: int = 0
    """When, by the node's wall clock."""
    step: int = -1
    """The last one."""
    step_ns: int = 0
    """When."""
    counted_steps: int = 0
    """How many of what `counts` names were done, where no step was reported; the two times are theirs then."""
    counts: ProgressSource = ProgressSource.OPTIMIZER
    checkpoint_seconds: float = 0.0
    """In section ``checkpoint``."""
    checkpoints: int = 0
    """How many are complete, of the worker that has most."""
    longest_step: float = 0.0
    """Seconds: the longest time between two heartbeats in section ``step``, or in the sections that it judges alike."""
    redone_seconds: float = 0.0
    """At steps no further than one that had been reported before, as after an in-process restart."""
    resting: float | None = None
    """Seconds for which no worker did anything, by the kernel's counts; 0: one did; null: they are not known."""

    @property
    def source(self) -> ProgressSource:
        """What progress is known by."""
        if self.first_step is not None:
            return ProgressSource.HEARTBEAT
        if self.counted_steps:
            return self.counts
        return ProgressSource.UNKNOWN if self.resting is None else ProgressSource.KERNEL


class NodeHeartbeats(Struct, frozen=True, kw_only=True):
    """``heartbeats/node-<index>.json``: of the round that the node took part in last."""

    node: int
    host: str = ""
    round: int
    written_ns: int
    """By the node's wall clock."""
    steps_per_second: float | None = None
    """Over the last minute of the round; None: not known yet."""
    total: int | None = None
    """How many steps the training has, where the script reports that."""
    loss: float | None = None
    """Of the first of its ranks that reports one, as it did last; null also where that is no finite number."""
    progress: Progress | None = None
    """Of the round so far."""
    ranks: tuple[RankHeartbeat, ...] = ()


_BEGINNING, _LEAST_LOST = 1, 2


def describe_begun_again(first: int, before: int) -> str:
    """What is wrong where a round begins at step `first`, and an earlier one had come to `before`; empty for nothing.

    A script whose rounds each look for checkpoints in another folder trains the first steps again and again.
    """
    if first > _BEGINNING or before - first < _LEAST_LOST:
        return ""
    return (
        f"training began at step {first} again, after step {before} of an earlier round: no checkpoint was loaded. "
        "Does each start have a folder of its own, as by hydra's job.chdir or a time in the path?"
    )
