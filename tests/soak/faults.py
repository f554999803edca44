"""From a seed to the faults, one after the other. Pure: the same seed gives the same endless list."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum


class Kind(str, Enum):
    """What is done to the run."""

    WORKER_KILLED = "worker killed -9"
    WORKER_SEGFAULT = "worker's segfault"
    WORKER_EXCEPTION = "worker's exception"
    WORKER_HANG = "worker's hang"
    AGENT_KILLED = "agent killed -9"
    SRUN_KILLED = "srun killed"
    NODE_OFF = "power loss and reboot of a node"
    BATCH_HOST_OFF = "the batch host's power loss"
    LINK_CUT = "network cut and healed"
    BLINK = "network cut for a second"
    FREEZE = "node frozen and thawed"
    HICCUP = "node frozen for half a second"
    SLURMD_STOPPED = "slurmd stopped and started"
    SLURMCTLD_STOPPED = "slurmctld stopped and started"
    STEPD_KILLED = "slurmstepd killed"
    NOTICE = "time limit's notice (USR2)"
    REQUEUE = "scontrol requeue from outside"
    PREEMPTION = "preempted by a higher partition"
    DISK_FULL = "disk full"


class Effect(str, Enum):
    """What a fault may do to the training."""

    RESTART = "another round, or another attempt"
    NONE = "nothing: it trains on"
    EITHER = "trains on, or another round or attempt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Nature:
    """What is fixed about a kind."""

    weight: int
    effect: Effect
    seconds: tuple[float, float] = (0.0, 0.0)
    """How long it lasts: from, to."""


NATURES = {
    Kind.WORKER_KILLED: Nature(weight=3, effect=Effect.RESTART),
    Kind.WORKER_SEGFAULT: Nature(weight=2, effect=Effect.RESTART),
    Kind.WORKER_EXCEPTION: Nature(weight=2, effect=Effect.RESTART),
    Kind.WORKER_HANG: Nature(weight=2, effect=Effect.RESTART),
    Kind.AGENT_KILLED: Nature(weight=3, effect=Effect.RESTART),
    Kind.SRUN_KILLED: Nature(weight=1, effect=Effect.RESTART),
    Kind.NODE_OFF: Nature(weight=4, effect=Effect.EITHER, seconds=(1.0, 30.0)),
    Kind.BATCH_HOST_OFF: Nature(weight=2, effect=Effect.EITHER, seconds=(1.0, 30.0)),
    Kind.LINK_CUT: Nature(weight=3, effect=Effect.EITHER, seconds=(8.0, 35.0)),
    Kind.BLINK: Nature(weight=1, effect=Effect.EITHER, seconds=(0.5, 1.0)),
    Kind.FREEZE: Nature(weight=3, effect=Effect.EITHER, seconds=(8.0, 35.0)),
    Kind.HICCUP: Nature(weight=1, effect=Effect.EITHER, seconds=(0.3, 0.6)),
    Kind.SLURMD_STOPPED: Nature(weight=2, effect=Effect.NONE, seconds=(1.0, 10.0)),
    Kind.SLURMCTLD_STOPPED: Nature(weight=2, effect=Effect.NONE, seconds=(1.0, 15.0)),
    Kind.STEPD_KILLED: Nature(weight=2, effect=Effect.EITHER),
    Kind.NOTICE: Nature(weight=2, effect=Effect.RESTART),
    Kind.REQUEUE: Nature(weight=2, effect=Effect.RESTART),
    Kind.PREEMPTION: Nature(weight=2, effect=Effect.RESTART, seconds=(2.0, 6.0)),
    Kind.DISK_FULL: Nature(weight=2, effect=Effect.EITHER, seconds=(2.0, 8.0)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault, as planned. Whom it hits depends on who is in the run by then."""

    number: int
    kind: Kind
    gap: float
    """Seconds of calm training before it."""
    pick: float
    """From 0 to 1: whom of those that it can hit, in the order of their ranks."""
    seconds: float
    """How long it lasts, where it does."""

    def __str__(self) -> str:
        lasts = f" for {self.seconds:.1f} s" if self.seconds else ""
        return f"#{self.number} {self.kind.value}{lasts}"


def plan(seed: int, kinds: Sequence[Kind] = tuple(Kind)) -> Iterator[Fault]:
    """The faults of a seed, without an end. Each kind comes once before any comes again as chance has it."""
    rng = random.Random(seed)
    first = rng.sample(list(kinds), len(kinds))
    number = 0
    while True:
        number += 1
        kind = first.pop() if first else rng.choices(kinds, [NATURES[kind].weight for kind in kinds])[0]
        yield Fault(
            number=number,
            kind=kind,
            gap=rng.uniform(0.5, 3.0),
            pick=rng.random(),
            seconds=round(rng.uniform(*NATURES[kind].seconds), 1),
        )
