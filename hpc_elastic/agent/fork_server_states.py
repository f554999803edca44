"""The states of a node's fork server, with the one table of what may follow."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from hpc_elastic.errors import IllegalTransitionError
from hpc_elastic.run.preload import Preload

MOST_STARTS = 8
"""Most servers in a row none of which forked a worker."""


class ServerState(str, Enum):
    OFF = "off"
    IMPORTING = "importing"
    READY = "ready"
    """It waits for requests."""
    FAILED = "failed"
    """Given up: workers are started fresh."""


class ServerEvent(str, Enum):
    BEGIN = "begin"
    IMPORTED = "all is imported"
    IMPORTS = "it imports"
    UNFIT = "a module can't be shared"
    STALE = "a file has changed"
    HANGS = "it does not answer"
    ENDED = "it ended"
    GIVE_UP = "given up"


_WHILE_IT_RUNS = (
    (ServerEvent.IMPORTED, ServerState.READY),
    (ServerEvent.IMPORTS, ServerState.IMPORTING),
    (ServerEvent.STALE, ServerState.OFF),
    (ServerEvent.HANGS, ServerState.OFF),
    (ServerEvent.ENDED, ServerState.OFF),
    (ServerEvent.GIVE_UP, ServerState.FAILED),
)
TRANSITIONS: Mapping[ServerState, Mapping[ServerEvent, ServerState]] = {
    ServerState.OFF: {ServerEvent.BEGIN: ServerState.IMPORTING, ServerEvent.GIVE_UP: ServerState.FAILED},
    ServerState.IMPORTING: {**dict(_WHILE_IT_RUNS), ServerEvent.UNFIT: ServerState.OFF},
    ServerState.READY: dict(_WHILE_IT_RUNS),
    ServerState.FAILED: {},
}
"""The next server is begun at once from OFF, without the module that was at fault, or it is given up."""


def next_state(state: ServerState, event: ServerEvent) -> ServerState:
    try:
        return TRANSITIONS[state][event]
    except KeyError:
        raise IllegalTransitionError(state=state.value, event=event.value) from None


def why_given_up(preload: Preload, *, starts: int) -> str:
    """Empty where another server is begun. `starts`: servers so far since one has last forked a worker."""
    if not any(name in preload.wanted for name in preload.modules):
        left = "; ".join(f"{name}: {why}" for name, why in preload.left_out.items() if name in preload.modules)
        return f"nothing is left to preload: {left}"
    if starts >= MOST_STARTS:
        return f"{starts} fork servers in a row have ended"
    return ""
