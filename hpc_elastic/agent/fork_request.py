"""One worker that the fork server is asked for: its pipes, and the gate at which it waits for the agent."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping

from msgspec import Struct

from hpc_elastic.base.clock import Clock
from hpc_elastic.workers import fork_server as program
from hpc_elastic.workers import linux
from hpc_elastic.workers.spawn import WorkerProcess, output_pipes


class ForkRequest(Struct, frozen=True, kw_only=True):
    """One worker that is to be forked."""

    env: Mapping[str, str]
    cpus: frozenset[int] = frozenset()
    """Those that it may use; empty: as the server."""
    learn: bool = False
    """Note what it imports."""


class PendingFork:
    """A request that is under way."""

    def __init__(self, request: ForkRequest, pipe_bytes: int, clock: Clock) -> None:
        self.request = request
        self.why = ""
        self.gate: socket.socket | None = None
        self.theirs: list[int] = []
        self._pipe_bytes = pipe_bytes
        self._clock = clock
        self._read_ends: list[int] = []
        self._pid = 0

    def open(self) -> None:
        """Make the descriptors.

        Raises:
            OSError: there are not enough.
        """
        opened: list[int] = []
        try:
            stdout_r, stdout_w, stderr_r, stderr_w = output_pipes(opened, self._pipe_bytes)
        except OSError:
            for fd in opened:
                os.close(fd)
            raise
        self._read_ends = [stdout_r, stderr_r]
        self.theirs = [stdout_w, stderr_w]
        self.gate, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.theirs.append(other.detach())

    def close_theirs(self) -> None:
        for fd in self.theirs:
            os.close(fd)
        self.theirs = []

    def hear(self) -> None:
        """Something has come through the gate, or its end."""
        assert self.gate is not None
        try:
            raw = self.gate.recv(program.MESSAGE_LIMIT)
        except OSError:
            raw = b""
        message = json.loads(raw) if raw else {}
        self._pid = int(message.get("pid", 0))
        self.why = str(message.get("why", "")) or ("" if self._pid else "the fork ended before it was a worker")

    def take(self) -> WorkerProcess | None:
        """Let the worker go. None where there is none."""
        if self.why or not self._pid or self.gate is None:
            return None
        try:
            # Raises where the process is not this agent's child.
            os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            pidfd = linux.pidfd_open(self._pid)
        except OSError as error:
            self.why = f"the fork can't be watched: {error.strerror}"
            return None
        try:
            if self.request.cpus:
                os.sched_setaffinity(self._pid, self.request.cpus)  # at its gate it has one thread
        except OSError as error:
            self.why = f"the fork can't be bound to its CPUs: {error.strerror}"
            if pidfd is not None:
                os.close(pidfd)
            return None
        try:
            self.gate.send(b"g")
        except OSError:
            pass  # it has ended already: a worker that failed at once
        stdout, stderr = self._read_ends
        self._read_ends = []
        return WorkerProcess(pid=self._pid, pidfd=pidfd, stdout_fd=stdout, stderr_fd=stderr, clock=self._clock)

    def close(self) -> None:
        """What is left. A worker that has not been let go ends."""
        self.close_theirs()
        for fd in self._read_ends:
            os.close(fd)
        if self.gate is not None:
            self.gate.close()
