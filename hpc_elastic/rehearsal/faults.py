"""The catalogue of faults that a rehearsal does: what each is, and what it needs. Pure."""

from __future__ import annotations

from msgspec import Struct

from hpc_elastic.errors import UsageError


class Kind(Struct, frozen=True, kw_only=True):
    """What is done to the run."""

    name: str
    """As ``--faults`` takes it."""
    title: str
    """What happens, in words."""
    need: str = ""
    """What must be there for it, as the reason where it is not."""
    restarts: bool = True
    """Another round or another attempt follows; False: it may train on."""
    gives_notice: bool = False
    """The script may save before the end."""


WORKER_KILLED = Kind(name="kill-worker", title="worker killed -9")
SAVING_KILLED = Kind(
    name="kill-saving",
    title="workers killed while one saves",
    need="it needs a checkpoint in the working directory (--watch DIR, for one in another folder)",
)
WORKER_EXCEPTION = Kind(
    name="exception", title="worker's exception", need="it needs a worker in Python that was started by rehearse"
)
NODE_KILLED = Kind(
    name="kill-node", title="all processes of a node killed", need="it needs two nodes or more (--nodes 2)"
)
NOTICE = Kind(name="notice", title="notice of the job's end, then the end", gives_notice=True)
KINDS = (WORKER_KILLED, SAVING_KILLED, NOTICE, WORKER_EXCEPTION, NODE_KILLED)
"""In the order in which they are done."""
QUICK = (WORKER_KILLED, SAVING_KILLED, NOTICE)
"""Those that find most: what is not restored, a checkpoint that a kill spoils, progress that a requeue loses."""


class Fault(Struct, frozen=True, kw_only=True):
    """One fault of a rehearsal."""

    number: int
    """From 1."""
    kind: Kind
    seconds: float = 0.0
    """How long it lasts, where it does."""

    def __str__(self) -> str:
        return f"#{self.number} {self.kind.title}"


def parse_kinds(text: str) -> tuple[Kind, ...]:
    """Read ``kill-worker,notice``; ``all``; ``quick``.

    Raises:
        UsageError: a name that is none.
    """
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
