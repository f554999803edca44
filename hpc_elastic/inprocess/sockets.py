"""Finds and cuts a process group's sockets, those that appear while the group is made; and opens that of the own store.

A socket is known by its inode: a number that was closed and given to another file meanwhile is left alone.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import torch.distributed as dist

logger = logging.getLogger(__name__)

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


def listen_at(host: str, port: int, environ: Mapping[str, str]) -> dict[str, int]:
    """Arguments by which torch's ``TCPStore`` listens at `host` alone, where all ranks resolve it alike.

    At all addresses for a name on several hosts, which its owner often calls 127.0.1.1, and for an address that is not
    this host's own. OSError: the port is in use.
    """
    everywhere = {"port": port}
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except OSError:
        if environ.get("WORLD_SIZE", "1") != environ.get("LOCAL_WORLD_SIZE", "") and host != "localhost":
            return everywhere
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError:
            return everywhere
    family, kind, protocol, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(65535)  # the kernel caps it at net.core.somaxconn
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRNOTAVAIL:
            return everywhere
        raise
    return {"port": int(listener.getsockname()[1]), "master_listen_fd": listener.detach()}


def serve_at(host: str, port: int, environ: Mapping[str, str], *, use_libuv: bool) -> dist.TCPStore:
    """A server, and a first client of it. Raises as `listen_at`, and torch.distributed.DistNetworkError."""
    listening = listen_at(host, port, environ)
    return dist.TCPStore(host, is_master=True, wait_for_workers=False, use_libuv=use_libuv, **listening)


def detect_silence(port: int, seconds: float) -> None:
    """Let connections to `port` fail when the other end's node has not answered for `seconds`, unlike TCP."""
    step = max(1, round(seconds / 3))
    for fd in open_sockets():
        if ports(fd)[1] != port:
            continue
        with socket.socket(fileno=os.dup(fd)) as found:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in (
                (socket.TCP_KEEPIDLE, step),
                (socket.TCP_KEEPINTVL, step),
                (socket.TCP_KEEPCNT, 3),
                (socket.TCP_USER_TIMEOUT, round(seconds * 1000)),
            ):
                found.setsockopt(socket.IPPROTO_TCP, option, value)


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
