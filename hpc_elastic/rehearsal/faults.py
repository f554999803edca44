"""The catalogue of faults: what each is, what it needs, and what it may do to the training; and from a seed to a plan.

`hpc-elastic rehearse` and the soak of this project's tests do the same faults; which of them each
can do follows from the needs. Pure: the same seed gives the same endless list.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from enum import Enum

from msgspec import Struct

from hpc_elastic.errors import UsageError


class Kind(str, Enum):
    """What is done to the run; the value is what ``--faults`` takes."""

    WORKER_KILLED = "kill-worker"
    SAVING_KILLED = "kill-saving"
    LATE_RANK = "kill-late-rank"
    WORKER_SEGFAULT = "segfault"
    WORKER_EXCEPTION = "exception"
    WORKER_HANG = "hang"
    AGENT_KILLED = "kill-agent"
    NODE_KILLED = "kill-node"
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


class Need(str, Enum):
    """What must be there for a fault to be done; the value is the reason where it is not."""

    SECOND_NODE = "it needs two nodes or more (--nodes 2)"
    SECOND_RANK = "it needs two workers or more (--nodes 2, or --nproc-per-node 2)"
    SAVES = "no file was written that it could interrupt (--watch DIR, for checkpoints in another folder)"
    HOOK = "it needs a worker in Python that was started by rehearse"
    STARTED_HERE = "it needs a run that was started by rehearse, which can start it again"
    SMALL_DISK = "it needs a runs directory on a filesystem with less than 1 GiB free (--runs-dir)"
    CLUSTER_ROOT = "it needs power over the cluster's machines; only this project's tests do it"


class Effect(str, Enum):
    """What a fault may do to the training."""

    RESTART = "another round, or another attempt"
    NONE = "nothing: it trains on"
    EITHER = "trains on, or another round or attempt"


class Nature(Struct, frozen=True, kw_only=True):
    """What is fixed about a kind."""

    title: str
    """What happens, in words."""
    weight: int
    effect: Effect
    needs: tuple[Need, ...] = ()
    seconds: tuple[float, float] = (0.0, 0.0)
    """How long it lasts: from, to."""
    gives_notice: bool = False
    """The script may save before the end."""


_ROOT = (Need.CLUSTER_ROOT,)
NATURES = {
    Kind.WORKER_KILLED: Nature(title="worker killed -9", weight=3, effect=Effect.RESTART),
    Kind.SAVING_KILLED: Nature(
        title="workers killed while one saves", weight=3, effect=Effect.RESTART, needs=(Need.SAVES,)
    ),
    Kind.LATE_RANK: Nature(
        title="workers killed when one has not saved yet", weight=2, effect=Effect.RESTART, needs=(Need.SECOND_RANK,)
    ),
    Kind.WORKER_SEGFAULT: Nature(title="worker's segfault", weight=2, effect=Effect.RESTART),
    Kind.WORKER_EXCEPTION: Nature(title="worker's exception", weight=2, effect=Effect.RESTART, needs=(Need.HOOK,)),
    Kind.WORKER_HANG: Nature(title="worker's hang", weight=2, effect=Effect.RESTART),
    Kind.AGENT_KILLED: Nature(title="agent killed -9", weight=3, effect=Effect.RESTART),
    Kind.NODE_KILLED: Nature(
        title="all processes of a node killed", weight=3, effect=Effect.RESTART, needs=(Need.SECOND_NODE,)
    ),
    Kind.SRUN_KILLED: Nature(title="srun killed", weight=1, effect=Effect.RESTART, needs=_ROOT),
    Kind.NODE_OFF: Nature(
        title="power loss and reboot of a node", weight=4, effect=Effect.EITHER, seconds=(1.0, 30.0), needs=_ROOT
    ),
    Kind.BATCH_HOST_OFF: Nature(
        title="the batch host's power loss", weight=2, effect=Effect.EITHER, seconds=(1.0, 30.0), needs=_ROOT
    ),
    Kind.LINK_CUT: Nature(
        title="network cut and healed", weight=3, effect=Effect.EITHER, seconds=(8.0, 35.0), needs=_ROOT
    ),
    Kind.BLINK: Nature(
        title="network cut for a second", weight=1, effect=Effect.EITHER, seconds=(0.5, 1.0), needs=_ROOT
    ),
    Kind.FREEZE: Nature(
        title="node frozen and thawed", weight=3, effect=Effect.EITHER, seconds=(8.0, 35.0), needs=_ROOT
    ),
    Kind.HICCUP: Nature(
        title="node frozen for half a second", weight=1, effect=Effect.EITHER, seconds=(0.3, 0.6), needs=_ROOT
    ),
    Kind.SLURMD_STOPPED: Nature(
        title="slurmd stopped and started", weight=2, effect=Effect.NONE, seconds=(1.0, 10.0), needs=_ROOT
    ),
    Kind.SLURMCTLD_STOPPED: Nature(
        title="slurmctld stopped and started", weight=2, effect=Effect.NONE, seconds=(1.0, 15.0), needs=_ROOT
    ),
    Kind.STEPD_KILLED: Nature(title="slurmstepd killed", weight=2, effect=Effect.EITHER, needs=_ROOT),
    Kind.TIME_LIMIT: Nature(
        title="time limit's notice (USR2), then the end", weight=2, effect=Effect.RESTART, gives_notice=True,
        needs=(Need.STARTED_HERE,),
    ),
    Kind.PREEMPTION: Nature(
        title="preemption, with a notice", weight=2, effect=Effect.RESTART, seconds=(2.0, 6.0), gives_notice=True
    ),
    Kind.REQUEUE: Nature(
        title="requeue from outside, without a notice", weight=2, effect=Effect.RESTART, needs=(Need.STARTED_HERE,)
    ),
    Kind.DISK_FULL: Nature(
        title="disk of the runs directory full", weight=2, effect=Effect.EITHER, seconds=(2.0, 8.0),
        needs=(Need.SMALL_DISK,),
    ),
}  # fmt: skip
"""Each kind's nature: the whole catalogue."""

REHEARSED = tuple(kind for kind in Kind if Need.CLUSTER_ROOT not in NATURES[kind].needs)
"""What a user can do to a run of their own."""


class Fault(Struct, frozen=True, kw_only=True):
    """One fault, as planned. What it hits depends on the members of the run by then."""

    number: int
    kind: Kind
    gap: float
    """How long the training goes on calmly before it: seconds for a soak; a share of 3 for a rehearsal's steps."""
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


def parse_kinds(text: str, option: str = "--faults", *, known: Sequence[Kind] = REHEARSED) -> tuple[Kind, ...]:
    """Read ``kill-worker,hang``; ``all``.

    Raises:
        UsageError: a name that is none of `known`.
    """
    if text.strip() == "all":
        return tuple(known)
    found = []
    for name in filter(None, (word.strip() for word in text.split(","))):
        kind = next((kind for kind in known if kind.value == name), None)
        if kind is None:
            raise UsageError(f"{option} {text}: no fault {name!r}; there are {', '.join(kind.value for kind in known)}")
        found.append(kind)
    if not found:
        raise UsageError(f"{option} {text!r} names no fault")
    return tuple(dict.fromkeys(found))
