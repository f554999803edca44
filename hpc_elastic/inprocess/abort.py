"""Frees a main thread which waits for ranks that won't come: hooks, and the process groups' sockets that they cut.

A socket is known by its inode: a number that was closed and given to another file meanwhile is left alone.
"""

from __future__ import annotations

import abc
import contextlib
import logging
import os
import socket
import sys
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from hpc_elastic.inprocess import progress_watchdog
from hpc_elastic.inprocess.state import State

Sockets = dict[int, str]
"""Inodes (``socket:[123]``) by descriptor."""


def open_sockets() -> Sockets:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if target.startswith("socket:"):
            found[int(name)] = target
    return found


def new_sockets(before: Sockets, after: Sockets) -> Sockets:
    """The sockets of `after` that were not there `before`, by number and inode."""
    return {fd: inode for fd, inode in after.items() if before.get(fd) != inode}


def ports(fd: int) -> tuple[int | None, int | None]:
    """A TCP socket's own port and its peer's; None where there is none."""
    try:
        with socket.socket(fileno=os.dup(fd)) as found:
            if found.family not in (socket.AF_INET, socket.AF_INET6) or found.type != socket.SOCK_STREAM:
                return None, None
            own = found.getsockname()[1]
            try:
                return own, found.getpeername()[1]
            except OSError:
                return own, None
    except OSError:
        return None, None


def cut(fd: int, inode: str) -> bool:
    """Shut a socket down in both directions, if its inode is still `inode`. Its owner closes it."""
    try:
        copy = os.dup(fd)
    except OSError:
        return False
    with socket.socket(fileno=copy) as found:
        if os.readlink(f"/proc/self/fd/{copy}") != inode:
            return False
        try:
            if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                return False  # no thread waits in it
            found.shutdown(socket.SHUT_RDWR)
        except OSError:
            return False  # not connected
    return True


class SocketLedger:
    """The sockets that appeared while groups were made, and while a call lasted."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._original: Any = None
        self._groups: Sockets = {}
        self._making: list[Sockets] = []
        self._store_ports: set[int] = set()
        self._at_start: list[Sockets] = []
        """The sockets that were open as each call began, the restart group's own connections included."""

    @contextlib.contextmanager
    def kept(self, module: ModuleType) -> Iterator[None]:
        """Note what ``_new_process_group_helper`` of `module` opens. Nests; afterwards the module is as it was."""
        if not self._at_start:
            self._original = module._new_process_group_helper
            module._new_process_group_helper = self._noting(self._original)  # type: ignore[attr-defined]
        self._at_start.append(open_sockets())
        try:
            yield
        finally:
            self._at_start.pop()
            if not self._at_start:
                module._new_process_group_helper = self._original  # type: ignore[attr-defined]
                self._original = None
                with self._lock:
                    self._groups.clear()
                    self._store_ports.clear()

    def cut_groups(self) -> int:
        """Cut the sockets of all groups, one that is being made included; returns how many."""
        with self._lock:
            meant = dict(self._groups)
            for before in self._making:
                meant |= new_sockets(before, open_sockets())
            spared = set(self._store_ports)
        if meant:
            spared |= _environment_port()
        return sum(cut(fd, inode) for fd, inode in meant.items() if not spared & set(ports(fd)))

    def cut_stores(self) -> int:
        """Cut the connections to the function's stores: those to their ports that were opened since the call began."""
        with self._lock:
            meant = new_sockets(self._at_start[-1], open_sockets()) if self._at_start else {}
            targets = self._store_ports | _environment_port() | _ports_in_main_thread()
        found = {fd: inode for fd, inode in meant.items() if ports(fd)[1] in targets}
        logger.debug("stores at %s: cut %s", targets, found)
        return sum(cut(fd, inode) for fd, inode in found.items())

    def _noting(self, original: Any) -> Any:
        def noting_process_group_helper(*args: Any, **kwargs: Any) -> Any:
            before = open_sockets()
            port = _store_port(kwargs.get("store", args[4] if len(args) > 4 else None))
            with self._lock:
                self._making.append(before)
                if port is not None:
                    self._store_ports.add(port)
            try:
                return original(*args, **kwargs)
            finally:
                with self._lock:
                    self._making.remove(before)
                    self._groups |= new_sockets(before, open_sockets())

        return noting_process_group_helper


def _store_port(store: Any) -> int | None:
    for _ in range(16):
        if store is None:
            return None
        port = getattr(store, "port", None)
        if isinstance(port, int):
            return port
        store = getattr(store, "underlying_store", None)
    return None


def _ports_in_main_thread() -> set[int]:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    found = set()
    while frame is not None:
        if not str(frame.f_globals.get("__name__")).startswith("hpc_elastic.inprocess"):
            found |= {_store_port(value) for value in frame.f_locals.values() if hasattr(value, "compare_set")}
        frame = frame.f_back
    return {port for port in found if port is not None}


def _environment_port() -> set[int]:
    value = os.environ.get("MASTER_PORT", "")
    return {int(value)} if value.isdigit() else set()


logger = logging.getLogger(__name__)

BEFORE_CUT = 0.03
"""Seconds between the exception and the cut. An operation that begins in the very moment of the cut waits out its whole
timeout (torch 2.13, gloo: 1 in 50); 30 ms later the main thread can't begin another one."""
BEFORE_STORE_CUT = 0.3
"""Further seconds before the connection to the function's own store is cut."""

ledger = SocketLedger()
"""The sockets of this process' groups, kept while a wrapped call lasts."""


class Abort(abc.ABC):
    """Runs in the monitor thread, on every rank, after a fault, while the main thread may be anywhere."""

    @abc.abstractmethod
    def __call__(self, state: State) -> State:
        """Make whatever the main thread waits in return or raise."""


class AbortTorchDistributed(Abort):
    """Aborts what torch.distributed is doing, and destroys all process groups.

    NCCL's communicators are aborted. Gloo has nothing of the kind: the sockets of its groups are shut down, after the
    main thread was interrupted; what waits in a collective fails at once, instead of at gloo's timeout.
    """

    def __call__(self, state: State) -> State:
        part = progress_watchdog.aborted()
        _abort_nccl()
        if part is not None:
            part.interrupt("torch.distributed is aborted")
        if part is None or not part.wait_until_left(BEFORE_CUT):
            # A thread that has left waits in nothing; a cut while its last operation ends can hold up the group's end.
            ledger.cut_groups()
            if part is not None and not part.wait_until_left(BEFORE_STORE_CUT):
                ledger.cut_stores()
        if dist.is_initialized():
            dist.destroy_process_group()
        return state


def _abort_nccl() -> None:
    # All at once where torch can, so that no communicator waits for another.
    # After torch 2.13 ``nccl`` is a class of its own, and the older one ``nccl-legacy``.
    names = ("ProcessGroupNCCL", "ProcessGroupNCCL2")
    kinds = tuple(kind for name in names for place in (distributed_c10d, dist) if (kind := getattr(place, name, None)))
    if not kinds or not dist.is_initialized():
        return
    for group in list(distributed_c10d._world.pg_map):
        try:
            backend = group._get_backend(torch.device("cuda"))
        except RuntimeError:
            continue  # a group without GPUs
        if isinstance(backend, kinds):
            (getattr(backend, "abort", None) or backend._shutdown)()


def forget_half_made_groups() -> None:
    """Let the next default group have the name that it has on a rank that had not begun to make one.

    torch counts groups in each process, and names them by that count; only destroying a default group sets it back.
    """
    if not dist.is_initialized() and hasattr(distributed_c10d._world, "group_count"):
        distributed_c10d._world.group_count = 0
