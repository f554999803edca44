"""The states of a node's fork server, with the one table of what may follow, and an agent's part that has none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from types import MappingProxyType

from hpc_elastic.errors import IllegalTransitionError
from hpc_elastic.run.preload import Preload
from hpc_elastic.workers.spawn import WorkerProcess
from hpc_elastic.workers.user_command import NO_CHANGE, EnvironmentChange

MOST_STARTS = 8
"""Of servers in a row none of which forked a worker."""


class ServerState(str, Enum):
    """What the fork server is doing."""

    OFF = "off"
    """There is none."""
    IMPORTING = "importing"
    READY = "ready"
    """It waits for requests."""
    FAILED = "failed"
    """Given up: workers are started fresh."""


class ServerEvent(str, Enum):
    """What happens to it."""

    BEGIN = "begin"
    IMPORTED = "all is imported"
    IMPORTS = "it imports"
    UNFIT = "a module can't be shared"
    STALE = "a file has changed"
    HANGS = "it does not answer"
    ENDED = "it ended"
    GIVE_UP = "given up"


TRANSITIONS = MappingProxyType(
    {
        ServerState.OFF: MappingProxyType(
            {ServerEvent.BEGIN: ServerState.IMPORTING, ServerEvent.GIVE_UP: ServerState.FAILED}
        ),
        ServerState.IMPORTING: MappingProxyType(
            {
                ServerEvent.IMPORTED: ServerState.READY,
                ServerEvent.IMPORTS: ServerState.IMPORTING,
                ServerEvent.UNFIT: ServerState.OFF,
                ServerEvent.STALE: ServerState.OFF,
                ServerEvent.HANGS: ServerState.OFF,
                ServerEvent.ENDED: ServerState.OFF,
                ServerEvent.GIVE_UP: ServerState.FAILED,
            }
        ),
        ServerState.READY: MappingProxyType(
            {
                ServerEvent.IMPORTED: ServerState.READY,
                ServerEvent.IMPORTS: ServerState.IMPORTING,
                ServerEvent.STALE: ServerState.OFF,
                ServerEvent.HANGS: ServerState.OFF,
                ServerEvent.ENDED: ServerState.OFF,
                ServerEvent.GIVE_UP: ServerState.FAILED,
            }
        ),
        ServerState.FAILED: MappingProxyType({}),
    }
)
"""From OFF the next server is begun at once, without the module that was at fault, or it is given up."""


def next_state(state: ServerState, event: ServerEvent) -> ServerState:
    """The state that `event` leads to.

    Raises:
        IllegalTransitionError: the table has no such row.
    """
    try:
        return TRANSITIONS[state][event]
    except KeyError:
        raise IllegalTransitionError(state=state.value, event=event.value) from None


def why_given_up(preload: Preload, *, starts: int) -> str:
    """Why no other server is begun after one has ended; "" where one is.

    Args:
        preload: What the next one would import.
        starts: Servers so far since one has last forked a worker.
    """
    if not any(name in preload.wanted for name in preload.modules):
        left = "; ".join(f"{name}: {why}" for name, why in preload.left_out.items() if name in preload.modules)
        return f"nothing is left to preload: {left}"
    if starts >= MOST_STARTS:
        return f"{starts} fork servers in a row have ended"
    return ""


class NoForkServer:
    """What an agent has whose workers are fresh interpreters, and what it needs of one whose workers are forks."""

    why_fresh = ""
    """Why workers that were started last, or would be now, are not forked; "" where they are, or need not be."""

    @property
    def pid(self) -> int | None:
        """The process, which is no worker and no stray; None where there is none."""
        return None

    @property
    def due(self) -> float | None:
        """When the import that is under way counts as hung, monotonic; None: none is."""
        return None

    @property
    def is_awaited(self) -> bool:
        """Whether workers should wait for the import that is under way."""
        return False

    def fileno(self) -> int:
        """Readable when there is something to `handle`; -1: never."""
        return -1

    def begin(self, change: EnvironmentChange = NO_CHANGE) -> None:
        """Start it, with what ``--setup`` has made of the environment. A fault is found by `handle`."""

    def handle(self) -> None:
        """Take in the server's messages since the last call, its end included."""

    def fork_workers(
        self, environments: Sequence[Mapping[str, str]], cpus: Sequence[frozenset[int]] = ()
    ) -> Sequence[WorkerProcess | None]:
        """A worker with each of `environments`, on those CPUs; None where it is to be started fresh."""
        return [None] * len(environments)

    def close(self) -> None:
        """End it, and be done."""
