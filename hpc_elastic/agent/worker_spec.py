"""What a group of workers is to be: `WorkerSpec`, and what it needs of a rendezvous that is not necessarily ours.

Ranks where every agent says of itself what it brings: pure.

Our own agents know the members of a round from its record (`rendezvous.slots`). An agent behind a rendezvous that it
knows nothing of exchanges these few facts through the round's store instead.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from msgspec import Struct, to_builtins

from hpc_elastic.errors import UsageError
from hpc_elastic.run.spec import Entrypoint

MAX_RESTARTS = 100
MONITOR_INTERVAL = 5.0


class RoundStore(Protocol):
    """Keys and values of one round, shared by its nodes. `store.key_value.KeyValueStore` is one."""

    def set(self, key: str, value: bytes) -> None: ...

    def get(self, key: str) -> bytes | None: ...

    def add(self, key: str, amount: int) -> int: ...


class Round(Protocol):
    """What `next_rendezvous` returns. `rendezvous.seat.RoundResult` is one."""

    @property
    def store(self) -> RoundStore: ...

    @property
    def rank(self) -> int:
        """Group rank: of this node among the round's nodes."""
        ...

    @property
    def world_size(self) -> int:
        """Group world size: nodes in the round."""
        ...

    @property
    def version(self) -> int:
        """The round's number, the same on every node."""
        ...


class Rendezvous(Protocol):
    """What an agent needs of a rendezvous handler; `rendezvous.handler.FileRendezvousHandler` is one.

    It may have more. ``round_is_over() -> bool``: another node asked for a new round, or may come in; then nobody asks
    for `num_nodes_waiting`, since who waits although the round goes on is a spare. ``fileno()``: readable when there is
    news, and waited for instead of `monitor_interval`. ``report_done()`` is told that all workers of this node have
    ended well: it is not missed from then on. ``has_succeeded() -> bool``: those of all nodes have.
    ``give_up(reason)`` closes the run as one that failed, in place of `set_closed`.
    """

    def get_run_id(self) -> str: ...

    def next_rendezvous(self) -> Round: ...

    def num_nodes_waiting(self) -> int: ...

    def set_closed(self) -> None: ...

    def shutdown(self) -> bool: ...


class WorkerSpec(Struct):
    """What one node's workers run, and how often they may be started again.

    Raises:
        UsageError: a value that makes no sense; the message names it.
    """

    role: str
    local_world_size: int
    """Workers on this node; nodes may differ."""
    entrypoint: Callable[..., Any] | Entrypoint | str | None = None
    """A Python function, called in each worker with `args`; the path of a script, or a command's name; or an
    `Entrypoint`, which says which of script, module and command it is."""
    args: tuple[Any, ...] = ()
    rdzv_handler: Rendezvous | None = None
    max_restarts: int = MAX_RESTARTS
    """Rounds that may follow a worker's failure, in the whole run: n allows n + 1 starts."""
    monitor_interval: float = MONITOR_INTERVAL
    """Seconds; only the fallback's, where nothing tells of a change."""
    master_port: int | None = None
    """The same in every round; None: a free one in each."""
    master_addr: str | None = None
    """Given to the workers as it is; None: an address of group rank 0's node."""
    fn: Callable[..., Any] | None = None
    """The older name of a function as `entrypoint`."""

    def __post_init__(self) -> None:
        if self.entrypoint is not None and self.fn is not None:
            raise UsageError("WorkerSpec: give entrypoint or fn, its older name, and not both")
        self.entrypoint = self.entrypoint if self.fn is None else self.fn
        if self.entrypoint is None or self.entrypoint == "":
            raise UsageError("WorkerSpec: entrypoint is missing: give a function, a script, a module or a command")
        if not callable(self.entrypoint) and not isinstance(self.entrypoint, str | os.PathLike | Entrypoint):
            raise UsageError(f"WorkerSpec: entrypoint={self.entrypoint!r} is no function, command or Entrypoint")
        if not self.role:
            raise UsageError("WorkerSpec: role is empty: give a name, such as 'default'")
        if isinstance(self.local_world_size, bool) or self.local_world_size < 1:
            raise UsageError(f"WorkerSpec: local_world_size={self.local_world_size!r}: give at least one worker")
        if self.max_restarts < 0:
            raise UsageError(f"WorkerSpec: max_restarts={self.max_restarts}: give 0 or more")
        if not self.monitor_interval > 0:
            raise UsageError(f"WorkerSpec: monitor_interval={self.monitor_interval}: give seconds above 0")
        if self.master_port is not None and not 0 < self.master_port < 65536:
            raise UsageError(f"WorkerSpec: master_port={self.master_port}: give a port from 1 to 65535, or None")
        if self.rdzv_handler is None:
            raise UsageError("WorkerSpec: rdzv_handler is missing: give one, such as FileRendezvousHandler(…)")

    @property
    def handler(self) -> Rendezvous:
        """`rdzv_handler`, which is there."""
        assert self.rdzv_handler is not None
        return self.rdzv_handler

    def get_entrypoint_name(self) -> str:
        """For messages: the function's name, or the command."""
        if callable(self.entrypoint):
            return getattr(self.entrypoint, "__qualname__", repr(self.entrypoint))
        return str(self.entrypoint)


class GroupFacts(Struct, frozen=True, kw_only=True):
    """What one agent says of itself at the start of a round."""

    role: str
    local_world_size: int
    restarts_used: int
    """As it knew them in its last round; 0 for a newcomer."""
    failed: bool
    """Whether one of its workers' failures ended its last round."""

    def to_json(self) -> bytes:
        return json.dumps(to_builtins(self)).encode()

    @classmethod
    def from_json(cls, raw: bytes) -> GroupFacts:
        return cls(**json.loads(raw))


class WorkerPlace(Struct, frozen=True, kw_only=True):
    """One worker's ranks."""

    global_rank: int
    role_rank: int
    world_size: int
    role_world_size: int


def worker_places(groups: Sequence[GroupFacts], group_rank: int) -> list[WorkerPlace]:
    """The ranks of the workers of one group, by local rank.

    Args:
        groups: All of the round, in the order of group ranks.
        group_rank: Whose.

    Returns:
        Contiguous over all groups in both senses: global ranks over all workers, role ranks over those of one role.
    """
    mine = groups[group_rank]
    before = groups[:group_rank]
    first = sum(group.local_world_size for group in before)
    first_in_role = sum(group.local_world_size for group in before if group.role == mine.role)
    return [
        WorkerPlace(
            global_rank=first + local_rank,
            role_rank=first_in_role + local_rank,
            world_size=sum(group.local_world_size for group in groups),
            role_world_size=sum(group.local_world_size for group in groups if group.role == mine.role),
        )
        for local_rank in range(mine.local_world_size)
    ]


def restarts_after(groups: Sequence[GroupFacts]) -> int:
    """Restarts used when this round starts: one more than before where a worker's failure led to it, on any node."""
    return max(group.restarts_used for group in groups) + int(any(group.failed for group in groups))
