"""The soak's catalogue of faults: what each is, and what it may do to the training; and from a seed to a plan.

Pure: the same seed gives the same endless list.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from enum import Enum

from msgspec import Struct


class Kind(str, Enum):
    """What is done to the run; the value is what ``--kinds`` takes."""

    WORKER_KILLED = "kill-worker"
    WORKER_SEGFAULT = "segfault"
    WORKER_EXCEPTION = "exception"
    WORKER_HANG = "hang"
    AGENT_KILLED = "kill-agent"
    SRUN_KILLED = "kill-srun"
    NODE_OFF = "node-off"
    BATCH_HOST_OFF = "batch-host-off"
    LINK_CUT = "link-cut"
    BLINK = "link-blink"
    FREEZE = "node-frozen"
    HICCUP = "node-hiccup"
    SLURMD_STOPPED = "slurmd-stopped"
    SLURMCTLD_STOPPED = "slurmctld-stopped"
    STEPD_KILLED = "slurmstepd-killed"
    TIME_LIMIT = "time-limit"
    PREEMPTION = "preemption"
    REQUEUE = "requeue"
    DISK_FULL = "disk-full"


class Effect(str, Enum):
    """What a fault may do to the training."""

    RESTART = "another round, or another attempt"
    NONE = "nothing: it trains on"
    EITHER = "trains on, or another round or attempt"


class Nature(Struct, frozen=True, kw_only=True):
    title: str
    """What happens, in words."""
    weight: int
    effect: Effect = Effect.RESTART
    seconds: tuple[float, float] = (0.0, 0.0)
    """How long it lasts: from, to."""
    gives_notice: bool = False
    """The script may save before the end."""


NATURES = {
    Kind.WORKER_KILLED: Nature(title="worker killed -9", weight=3),
    Kind.WORKER_SEGFAULT: Nature(title="worker's segfault", weight=2),
    Kind.WORKER_EXCEPTION: Nature(title="worker's exception", weight=2),
    Kind.WORKER_HANG: Nature(title="worker's hang", weight=2),
    Kind.AGENT_KILLED: Nature(title="agent killed -9", weight=3),
    Kind.SRUN_KILLED: Nature(title="srun killed", weight=1),
    Kind.NODE_OFF: Nature(title="power loss and reboot of a node", weight=4, effect=Effect.EITHER, seconds=(1.0, 30.0)),
    Kind.BATCH_HOST_OFF: Nature(
        title="the batch host's power loss", weight=2, effect=Effect.EITHER, seconds=(1.0, 30.0)
    ),
    Kind.LINK_CUT: Nature(title="network cut and healed", weight=3, effect=Effect.EITHER, seconds=(8.0, 35.0)),
    Kind.BLINK: Nature(title="network cut for a second", weight=1, effect=Effect.EITHER, seconds=(0.5, 1.0)),
    Kind.FREEZE: Nature(title="node frozen and thawed", weight=3, effect=Effect.EITHER, seconds=(8.0, 35.0)),
    Kind.HICCUP: Nature(title="node frozen for half a second", weight=1, effect=Effect.EITHER, seconds=(0.3, 0.6)),
    Kind.SLURMD_STOPPED: Nature(title="slurmd stopped and started", weight=2, effect=Effect.NONE, seconds=(1.0, 10.0)),
    Kind.SLURMCTLD_STOPPED: Nature(
        title="slurmctld stopped and started", weight=2, effect=Effect.NONE, seconds=(1.0, 15.0)
    ),
    Kind.STEPD_KILLED: Nature(title="slurmstepd killed", weight=2, effect=Effect.EITHER),
    Kind.TIME_LIMIT: Nature(title="time limit's notice (USR2), then the end", weight=2, gives_notice=True),
    Kind.PREEMPTION: Nature(title="preemption, with a notice", weight=2, seconds=(2.0, 6.0), gives_notice=True),
    Kind.REQUEUE: Nature(title="requeue from outside, without a notice", weight=2),
    Kind.DISK_FULL: Nature(title="disk of the runs directory full", weight=2, effect=Effect.EITHER, seconds=(2.0, 8.0)),
}
"""Each kind's nature: the whole catalogue."""


class Fault(Struct, frozen=True, kw_only=True):
    """One fault, as planned. What it hits depends on the members of the run by then."""

    number: int
    kind: Kind
    gap: float
    """How long the training goes on calmly before it: seconds."""
    pick: float
    """From 0 to 1: which of those that it can hit, in the order of their ranks."""
    seconds: float
    """How long it lasts, where it does."""

    @property
    def title(self) -> str:
        return NATURES[self.kind].title

    def __str__(self) -> str:
        lasts = f" for {self.seconds:.1f} s" if self.seconds else ""
        return f"#{self.number} {self.title}{lasts}"


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


def parse_kinds(text: str) -> tuple[Kind, ...]:
    """Read ``kill-worker,hang``; ``all``. Raises ValueError: a name that is none."""
    return tuple(Kind) if text == "all" else tuple(dict.fromkeys(Kind(name) for name in text.split(",")))
