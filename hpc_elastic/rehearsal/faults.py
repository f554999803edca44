"""The catalogue of a rehearsal's faults: their effects and needs. Pure."""

from __future__ import annotations

from enum import Enum

from msgspec import Struct

from hpc_elastic.errors import UsageError


class Need(str, Enum):
    """A precondition of a fault; the value is the reason not to inject it."""

    SECOND_NODE = "it needs two nodes or more (--nodes 2)"
    SAVES = "no checkpoint was seen in the undisturbed run (--watch DIR, for checkpoints in another folder)"
    HOOK = "it needs a worker in Python that was started by rehearse"
    SMALL_DISK = "it needs a runs directory on a filesystem with less than 1 GiB free (--runs-dir)"


class Kind(Struct, frozen=True, kw_only=True):
    name: str
    title: str
    need: Need | None = None
    restarts: bool = True
    """Another round or another attempt follows; False: it may train on."""
    gives_notice: bool = False
    """The script may save before the end."""


WORKER_KILLED = Kind(name="kill-worker", title="worker killed -9")
SAVING_KILLED = Kind(name="kill-saving", title="workers killed while one saves", need=Need.SAVES)
WORKER_EXCEPTION = Kind(name="exception", title="worker's exception", need=Need.HOOK)
NODE_KILLED = Kind(name="kill-node", title="all processes of a node killed", need=Need.SECOND_NODE)
NOTICE = Kind(name="notice", title="notice of the job's end, then the end", gives_notice=True)
DISK_FULL = Kind(name="disk-full", title="disk of the runs directory full", need=Need.SMALL_DISK, restarts=False)
KINDS = (WORKER_KILLED, SAVING_KILLED, NOTICE, WORKER_EXCEPTION, NODE_KILLED, DISK_FULL)
QUICK = (WORKER_KILLED, SAVING_KILLED, NOTICE)
"""Those that find most: state that is not restored, a checkpoint that a kill spoils, progress that a requeue loses."""


class PlannedFault(Struct, frozen=True, kw_only=True):
    number: int
    kind: Kind
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"#{self.number} {self.kind.title}"


def parse_kinds(text: str) -> tuple[Kind, ...]:
    if text.strip() in ("all", "quick"):
        return KINDS if text.strip() == "all" else QUICK
    names = [name for name in (word.strip() for word in text.split(",")) if name]
    known = {kind.name: kind for kind in KINDS}
    for name in names:
        if name not in known:
            raise UsageError(f"--faults {text}: no fault {name!r}; there are {', '.join(known)}, quick and all")
    if not names:
        raise UsageError(f"--faults {text!r} names no fault")
    return tuple(kind for kind in KINDS if kind.name in names)
