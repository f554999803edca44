"""The workers' ``TCPStore``, seen from the agent: it binds the port and has another process serve it.

In a round, on the node of group rank 0: `bind` before the port is published, `serve` when the workers are spawned
(those that connect early wait in the backlog), `handle` when one of `watched` is readable, and `release`. The process
(`hpc_elastic.pytorch.store_host`) lives across rounds; the agent never imports torch. Without torch rank 0 serves it.

`Guard` filters the addresses that the port serves: the kernel decides as a connection begins.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import itertools
import json
import logging
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_elastic.agent.part import MESSAGE_LIMIT, Condemned, ProcessPart
from hpc_elastic.agent.supervision import Phase
from hpc_elastic.base.host_facts import LOOPBACK
from hpc_elastic.base.loop import FileExecutor
from hpc_elastic.errors import HpcElasticError
from hpc_elastic.failures.ranking import FailureClass
from hpc_elastic.workers.spawn import EnvironmentChange, find_program

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

    from hpc_elastic.agent.node_agent import NodeAgent

logger = logging.getLogger(__name__)

MOST_RANGES = 200
"""Most ranges in one program, for which the kernel may allow 20 KiB (net.core.optmem_max)."""
MOST_REFUSALS = 256
"""Connections that are logged and closed at once; later ones are left to wait."""
Range = tuple[int, int]
_LOOPBACK = (127 << 24, (128 << 24) - 1)
_SO_ATTACH_REUSEPORT_CBPF = 51
_LOAD, _EQUAL, _GREATER, _AT_LEAST, _RETURN = 0x20, 0x15, 0x25, 0x35, 0x06
_PROTOCOL = 0xFFFFF000  # SKF_AD_OFF + SKF_AD_PROTOCOL
_SOURCE = 0xFFF00000 + 12  # SKF_NET_OFF, and where an IPv4 header has the source
_IPV4 = 0x0800
_REFUSED, _SERVED = 0, 1  # which of the two sockets, in the order in which they listen
Instruction = tuple[int, int, int, int]
"""A BPF instruction, linux/filter.h's ``sock_filter``: code, jump if true, jump if false, constant."""


def ranges_of(addresses: Iterable[str], *, most: int = MOST_RANGES) -> list[Range]:
    """`most` ranges at most that hold the loopback and `addresses`, and as few others as that allows. IPv4 alone."""
    found: set[Range] = {_LOOPBACK}
    for address in addresses:
        try:
            number = int.from_bytes(socket.inet_pton(socket.AF_INET, address), "big")
        except OSError:
            continue
        if not _LOOPBACK[0] <= number <= _LOOPBACK[1]:
            found.add((number, number))
    ordered = sorted(found)
    gaps = sorted((after[0] - before[1], index) for index, (before, after) in enumerate(itertools.pairwise(ordered), 1))
    kept = sorted(index for gap, index in gaps[max(0, len(gaps) - (most - 1)) :] if gap > 1)
    starts = [0, *kept]
    return [(ordered[start][0], ordered[end - 1][1]) for start, end in zip(starts, [*kept, len(ordered)], strict=True)]


def program(ranges: Sequence[Range]) -> list[Instruction]:
    """Serve IPv4 sources in one of `ranges` (in order, apart), and all that is not IPv4."""
    found = [(_LOAD, 0, 0, _PROTOCOL), (_EQUAL, 1, 0, _IPV4), (_RETURN, 0, 0, _SERVED), (_LOAD, 0, 0, _SOURCE)]
    for first, last in ranges:
        found += [
            (_AT_LEAST, 1, 0, first),
            (_RETURN, 0, 0, _REFUSED),
            (_GREATER, 1, 0, last),
            (_RETURN, 0, 0, _SERVED),
        ]
    return [*found, (_RETURN, 0, 0, _REFUSED)]


class Guard:
    """Two sockets listen at one port (SO_REUSEPORT), and a classic BPF program decides which of them gets a connection
    (socket(7), SO_ATTACH_REUSEPORT_CBPF, since Linux 4.5). A filter on the socket itself (SO_ATTACH_FILTER) asks for
    CAP_NET_ADMIN since June 2026 (Linux commit 5d39580f68e6). Nodes do not publish their IPv6 addresses: all are
    served."""

    def __init__(self, first: socket.socket, bind_beside: Callable[[int], socket.socket]) -> None:
        """Takes over `first`, which is bound. Raises `OSError` where the kernel can't do that (a sandbox)."""
        self._refusing = first
        try:
            self._refusing.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            self._refusing.setblocking(False)
            self._refusing.listen(1)
            self._choose([(_RETURN, 0, 0, _REFUSED)])
            self.listener = bind_beside(self._refusing.getsockname()[1])
        except BaseException:
            self._refusing.close()
            raise
        self._strangers: set[str] = set()
        self._refusals = 0

    def fileno(self) -> int:
        return self._refusing.fileno()

    @property
    def has_refused_enough(self) -> bool:
        """A flood of connections must not keep the agent busy: `refuse` does nothing then."""
        return self._refusals >= MOST_REFUSALS

    def admit(self, addresses: Iterable[str] | None) -> None:
        """Serve these addresses and this host itself alone; None: all. For any thread; once closed, it does nothing."""
        try:
            if addresses is None:
                logger.info("the workers' TCPStore serves every address: the addresses of some nodes are not known")
                self._choose([(_RETURN, 0, 0, _SERVED)])
            else:
                own = self.listener.getsockname()[0]
                self._choose(program(ranges_of([*addresses, own])))
        except OSError:
            pass  # closed: this round is over

    def refuse(self) -> list[str]:
        found = []
        while not self.has_refused_enough:
            try:
                connection, address = self._refusing.accept()
            except OSError:
                break
            connection.close()
            self._refusals += 1
            if address[0] not in self._strangers:
                self._strangers.add(address[0])
                found.append(str(address[0]))
        return found

    def close(self) -> None:
        """After the listening socket: alone, that one would serve everybody."""
        self._refusing.close()

    def _choose(self, instructions: Sequence[Instruction]) -> None:
        raw = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *each) for each in instructions))
        program_of = struct.pack("@HP", len(instructions), ctypes.addressof(raw))
        self._refusing.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_REUSEPORT_CBPF, program_of)


_BACKLOG = 65535  # the kernel caps it at net.core.somaxconn
_RELEASE_SECONDS = 1.0
_LOG_TAIL_BYTES = 2000
_LOG_BYTES = 1 << 20
_LOG_SECONDS = 2.0
_SPAWN_SECONDS = 10.0
_HOST_PROGRAM = Path(__file__).resolve().parent.parent / "pytorch" / "store_host.py"
_FIND_TORCH = "import importlib.util as u; s = u.find_spec('torch'); sys.exit(0 if s and s.origin else 3)"


class StoreBindError(HpcElasticError):
    template = (
        "cannot listen on port {port} of {address} for the workers' TCPStore: {reason}; "
        "look at --master-addr and --master-port, or leave them out to have both found"
    )


class MasterPortTakenError(StoreBindError):
    template = (
        "port {port} of {address} is in use by another program, so the workers' TCPStore can't have it; "
        "give another --master-port, or leave it out for a free one in each round"
    )


class StoreState(str, Enum):
    IDLE = "idle"  # no port is bound
    BOUND = "bound"  # connections wait in the backlog; nothing serves them yet
    STARTING = "starting"  # handed over, not confirmed yet: connections still wait
    SERVING = "serving"
    FAILED = "failed"  # why: `StoreServer.failure`; connections are refused


class StoreServer(ProcessPart):
    def __init__(
        self, python: str, *, log_path: Path, environ: Mapping[str, str], files: FileExecutor | None = None
    ) -> None:
        super().__init__()
        self._python = python
        self._log_path = log_path
        # The log is in memory, and another thread forks: on a mount that hangs the new process can't even close the
        # descriptors that it inherits. The kernel ends the process when this thread ends: it never does.
        self._spawner = FileExecutor(name="store-host")
        self._log = os.fdopen(os.memfd_create("store-host.log"), "rb", buffering=0)
        self._files = files
        self._environ = {
            **environ,
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",  # no accelerator is needed here
            "OMP_NUM_THREADS": "1",
        }
        self._listener: socket.socket | None = None
        self.guard: Guard | None = None
        self._target: tuple[str, int] = ("", 0)
        self._serial = 0
        self.state = StoreState.IDLE
        self._full_import = False
        self._was_ready = False
        self.failure = ""
        self._is_reported = False

    def on_setup(self, change: EnvironmentChange) -> None:
        self._python, self._environ = change.command([self._python])[0], change.apply(self._environ)

    def bind(self, address: str, port: int | None, *, guarded: bool = False) -> tuple[str, int]:
        """`port`: the user's own, in every round the same. `guarded`: serve no address before `Guard.admit`."""
        self.release()
        family, bind_to, connect_to = _listen_address(address)
        try:
            self.guard = _guard(family, bind_to, port) if guarded and not bind_to.startswith("127.") else None
            listener = self.guard.listener if self.guard is not None else _bound(family, bind_to, port)
            try:
                listener.listen(_BACKLOG)
            except BaseException:
                listener.close()
                if self.guard is not None:
                    self.guard.close()
                raise
        except OSError as error:
            if port is not None and error.errno == errno.EADDRINUSE:
                raise MasterPortTakenError(address=address, port=port, reason=str(error)) from None
            raise StoreBindError(address=address, port=port or "(any)", reason=str(error)) from None
        self._listener = listener
        self._serial += 1
        self._target = (connect_to, listener.getsockname()[1])
        self.state = StoreState.BOUND
        self.failure, self._is_reported = "", False
        return address, self._target[1]

    def serve(self) -> None:
        """Hand the bound port to the process, when the workers have been spawned: they need seconds to import torch."""
        if self._listener is None:
            raise RuntimeError("bind() comes before serve()")
        self.handle()
        if self._process is None and not self._start():
            return
        self.state = StoreState.STARTING
        self._hand_over()

    def watched(self) -> Collection[FileDescriptorLike]:
        refuses = self.guard is not None and not self.guard.has_refused_enough
        return (*super().watched(), *([self.guard] if self.guard is not None and refuses else []))

    def look(self, agent: NodeAgent) -> Condemned | None:
        """A worker that connects to a store that is gone would retry for five minutes before it fails."""
        has_workers = agent.phase in (Phase.RUNNING, Phase.STOPPING)
        if self.handle() is not StoreState.FAILED or self._is_reported or not has_workers:
            return None
        self._is_reported = True
        reason = f"the workers' TCPStore is gone: {self.failure}"
        return Condemned(reason=reason, failure_class=FailureClass.INFRASTRUCTURE)

    def handle(self) -> StoreState:
        if self.guard is not None:
            for stranger in self.guard.refuse():
                logger.warning(
                    "the workers' TCPStore refused %s: not an address of a node of this round; "
                    "if it is, give --rdzv-conf member_filter=off",
                    stranger,
                )
        self._receive()
        return self.state

    def release(self) -> None:
        """Returns within about a second. Workers that still talk to the process see their connection end."""
        state = self.handle()
        dropped = state is StoreState.SERVING and self._dropped()
        self._shut_port()
        self.state = StoreState.IDLE
        # A process that has not confirmed yet might be just about to listen again on a socket that is shut already:
        # it is ended, and so is one that does not answer.
        if state is StoreState.STARTING or (state is StoreState.SERVING and not dropped):
            self._end()

    def close(self) -> None:
        """Nothing is left, unless the process hangs in the kernel."""
        self.handle()
        self._shut_port()
        self.state = StoreState.IDLE
        self._end()
        if not self._log.closed:
            self._save_log()
            self._log.close()

    def _save_log(self) -> None:
        printed = os.pread(self._log.fileno(), _LOG_BYTES, 0)

        def save() -> None:
            with open(os.open(self._log_path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600), "ab") as log:
                log.write(printed)

        try:
            if printed and self._files is not None:
                self._files.do(save, within=_LOG_SECONDS)
            elif printed:
                save()
        except OSError:
            pass  # such a disk has other worries

    def _start(self) -> bool:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        argv = [self._python, str(_HOST_PROGRAM), "--fd", str(theirs.fileno()), "--parent", str(os.getpid())]

        def spawn() -> subprocess.Popen[bytes]:
            with theirs:
                # Neither the agent's pipes (srun waits for their end) nor its terminal, session or signals.
                return subprocess.Popen(
                    argv + ["--full"] * self._full_import,
                    stdin=subprocess.DEVNULL,
                    stdout=self._log,
                    stderr=self._log,
                    pass_fds=(theirs.fileno(),),
                    env=self._environ,
                    start_new_session=True,
                )

        try:
            self._process = self._spawner.do(spawn, within=_SPAWN_SECONDS)
        except OSError as error:
            ours.close()  # which also ends a process that comes later
            self._fail(f"{self._python} can't be started: {error}")
            return False
        ours.setblocking(False)
        self._control = ours
        self._was_ready = False
        return True

    def _hand_over(self) -> None:
        assert self._control is not None
        assert self._listener is not None
        host, port = self._target
        message = {"do": "serve", "serial": self._serial, "host": host, "port": port}
        try:
            socket.send_fds(self._control, [json.dumps(message).encode()], [self._listener.fileno()])
        except OSError:
            self._lost()

    def _heard(self, message: dict[str, Any]) -> None:
        what = message.get("is")
        if what == "ready":
            self._was_ready = True
        elif message.get("serial") == self._serial and self.state is StoreState.STARTING:
            if what == "serving":
                self.state = StoreState.SERVING
            elif what == "failed":
                self._fail(str(message.get("why")))

    def _lost(self) -> None:
        was_ready = self._was_ready
        self._end()
        if self.state is StoreState.STARTING and not self._full_import and not was_ready:
            # The lean import crashed, which no exception handler in the process can catch. No worker was served yet.
            self._full_import = True
            if self._start():
                self._hand_over()
        elif self.state in (StoreState.STARTING, StoreState.SERVING):
            log = self._log.fileno()
            start = max(0, os.fstat(log).st_size - _LOG_TAIL_BYTES)
            text = os.pread(log, _LOG_TAIL_BYTES, start).decode("utf-8", "replace").strip()
            self._fail(f"the process that serves it ended{f': {text.splitlines()[-1]}' if text else ''}")

    def _fail(self, why: str) -> None:
        self.state = StoreState.FAILED
        self.failure = why
        # Kept as FAILED and not IDLE; but workers that connect must fail at once.
        self._shut_port()

    def _dropped(self) -> bool:
        assert self._control is not None
        deadline = time.monotonic() + _RELEASE_SECONDS
        try:
            self._control.send(json.dumps({"do": "drop", "serial": self._serial}).encode())
            while (left := deadline - time.monotonic()) > 0:
                self._control.settimeout(left)
                raw = self._control.recv(MESSAGE_LIMIT)
                if not raw:
                    return False
                message = json.loads(raw)
                if message.get("is") == "dropped" and message.get("serial") == self._serial:
                    return True
        except OSError:
            pass  # gone, or too slow
        finally:
            self._control.setblocking(False)
        return False

    def _shut_port(self) -> None:
        if self._listener is None:
            return
        try:
            # Ends the process' copy of the socket too, whatever that is busy with, and resets the backlog.
            self._listener.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it was shut before
        self._listener.close()
        self._listener = None
        if self.guard is not None:
            self.guard.close()
            self.guard = None


def listen_for(address: str) -> tuple[socket.socket, str]:
    """A socket on `address`, or on all where it is not this node's; and where this node itself connects."""
    family, bind_to, connect_to = _listen_address(address)
    try:
        listener = _bound(family, bind_to, None)
    except OSError:
        listener, connect_to = _bound(socket.AF_INET, "0.0.0.0", None), LOOPBACK
    listener.listen(_BACKLOG)
    return listener, connect_to


def _listen_address(address: str) -> tuple[socket.AddressFamily, str, str]:
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, address)
        except OSError:
            continue
        return family, address, address
    if socket.has_dualstack_ipv6():
        return socket.AF_INET6, "::", "127.0.0.1"
    return socket.AF_INET, "0.0.0.0", "127.0.0.1"


def _bound(family: socket.AddressFamily, address: str, port: int | None, *, shared: bool = False) -> socket.socket:
    """The port may be another one's of ours; the descriptor is closed on exec. Raises `OSError`."""
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family is socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1 if address != "::" else 0)
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if port is not None:
            # The former round's connections linger on the same port for a minute. Linux still refuses it while
            # anybody listens there.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port or 0))
    except BaseException:
        listener.close()
        raise
    return listener


def _guard(family: socket.AddressFamily, address: str, port: int | None) -> Guard | None:
    first = _bound(family, address, port)
    try:
        return Guard(first, lambda same: _bound(family, address, same, shared=True))
    except OSError:
        return None


@functools.cache
def torch_available(python: str) -> bool:
    found = find_program(python)
    if found is None:
        return False
    if os.path.abspath(found) == os.path.abspath(sys.executable or ""):
        import importlib.util

        spec = importlib.util.find_spec("torch")
        return spec is not None and spec.origin is not None
    from hpc_elastic.base.host_facts import source_command, source_environment

    try:
        done = subprocess.run(
            source_command(found, _FIND_TORCH),
            env=source_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=60,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
