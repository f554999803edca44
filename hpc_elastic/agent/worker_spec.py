"""What a group of workers is to be: `WorkerSpec`, and what an agent needs of a rendezvous that may be another one."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Protocol

from msgspec import Struct

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
    """What `next_rendezvous` returns. `rendezvous.membership.RoundResult` is one."""

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

    It may have more. ``round_is_over() -> bool``: another node asked for a new round, or may come in; with it,
    `num_nodes_waiting` is not asked, since a node that waits although the round goes on is a spare. ``fileno()``:
    readable when there is news, and waited for instead of `monitor_interval`. ``report_done()``: all workers of this
    node have ended well, and it is not missed from now on. ``has_succeeded() -> bool``: those of all nodes have.
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
    `Entrypoint`, which names the kind: script, module or command."""
    args: tuple[Any, ...] = ()
    rdzv_handler: Rendezvous | None = None
    max_restarts: int = MAX_RESTARTS
    """Rounds that may follow a worker's failure, in the whole run: n allows n + 1 starts."""
    monitor_interval: float = MONITOR_INTERVAL
    """Seconds between two looks, where nothing signals a change."""
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
