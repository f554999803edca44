"""The last heartbeats of a node's workers: a file of each node, rewritten regularly, and part of some events."""

from __future__ import annotations

from enum import Enum

from msgspec import Struct


class ProgressSource(str, Enum):
    """How a worker's progress is measured."""

    HEARTBEAT = "heartbeat"
    """The script reports its steps."""
    OPTIMIZER = "optimizer"
    """The steps of its optimizer are counted, from 1 in each round."""
    COLLECTIVES = "collectives"
    """The collectives that torch's flight recorder shows as complete are counted, from 1 in each round."""
    KERNEL = "kernel"
    """The kernel's counts show whether its processes work or are idle, and no steps."""
    UNKNOWN = "unknown"

    @property
    def unit(self) -> str:
        return "collective" if self is ProgressSource.COLLECTIVES else "step"


STEPS = (ProgressSource.OPTIMIZER, ProgressSource.HEARTBEAT)
COUNTED = (ProgressSource.OPTIMIZER, ProgressSource.COLLECTIVES)
"""Sources that count from 1 in each round."""


class RankHeartbeat(Struct, frozen=True, kw_only=True):
    rank: int
    local_rank: int = -1
    step: int | None = None
    counted_steps: int | None = None
    """Steps of its optimizer, or its collectives, where the script reports none: from 1 in each round."""
    source: ProgressSource = ProgressSource.UNKNOWN
    """Unknown: there are no steps, or an older agent wrote this."""
    section: str = ""
    age: float = 0.0
    """Seconds since the heartbeat, when this was written."""
    count: int = 0
    saved_step: int | None = None
    saved_age: float | None = None
    """Seconds since its last checkpoint of this round was complete, when this was written."""


class Progress(Struct, frozen=True, kw_only=True):
    """The progress of a node's workers in a round, by the one that got furthest: for the goodput.

    The two times are those of `first_step` and `step` by the node's wall clock; where no step was reported, those of
    the first and last of `counted_steps`, which counts the kind in `counts`.
    """

    sections: tuple[str, ...] | None = None
    """All that any worker here has been in; null: unknown."""
    first_step: int | None = None
    first_ns: int = 0
    step: int = -1
    step_ns: int = 0
    counted_steps: int = 0
    counts: ProgressSource = ProgressSource.OPTIMIZER
    checkpoint_seconds: float = 0.0
    checkpoints: int = 0
    """Complete ones of the worker that has most."""
    longest_step: float = 0.0
    """Seconds: the longest time between two heartbeats in section ``step``, or in the sections that it judges alike."""
    redone_seconds: float = 0.0
    """Time at steps that had been reported before, as after an in-process restart."""
    resting: float | None = None
    """Seconds in which no worker did anything, by the kernel's counts; null: unknown."""

    @property
    def source(self) -> ProgressSource:
        if self.first_step is not None:
            return ProgressSource.HEARTBEAT
        if self.counted_steps:
            return self.counts
        return ProgressSource.UNKNOWN if self.resting is None else ProgressSource.KERNEL


class NodeHeartbeats(Struct, frozen=True, kw_only=True):
    """``heartbeats/node-<index>.json``: about the last round that the node took part in."""

    node: int
    host: str = ""
    round: int
    written_ns: int
    steps_per_second: float | None = None
    """Rate over the last minute of the round."""
    total: int | None = None
    loss: float | None = None
    """The last one of the first of its ranks that reports one; null also where that is no finite number."""
    progress: Progress | None = None
    ranks: tuple[RankHeartbeat, ...] = ()


def describe_begun_again(first: int, before: int) -> str:
    """The problem of a round that begins at step `first` after an earlier one came to `before`; empty: no problem.

    A script whose rounds each look for checkpoints in another folder trains the first steps again and again.
    """
    if first > 1 or before - first < 2:
        return ""
    return (
        f"training began at step {first} again, after step {before} of an earlier round: no checkpoint was loaded. "
        "Does each start have a folder of its own, as by hydra's job.chdir or a time in the path?"
    )
