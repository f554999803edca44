"""A command of the user's own, in bounded time: health checks, ``--setup``, hooks and notifications are run by this.

It is started in the main thread, as a worker is (a session of its own, killed when this process dies), and attended by
another thread: nothing waits for it that has anything else to do. When it has ended, or its time is over, all that it
has started is ended too. The end of what it printed is kept.
"""

from __future__ import annotations

import _thread
import os
import re
import select
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct

from hpc_elastic.base.clock import Clock
from hpc_elastic.workers import tree
from hpc_elastic.workers.spawn import Inherited, WorkerProcess, start_worker
from hpc_elastic.workers.tree import JOB_VARIABLE

TOKEN_VARIABLE = "HPC_ELASTIC_COMMAND_TOKEN"
"""Marks a command's process and all that it starts; another value each time."""
EXEC_SECONDS = 0.5
END_SECONDS = 2.0
"""How long what was sent SIGKILL is waited for."""
KEPT_OUTPUT = 65536
_LOOK_SECONDS = 0.05
_PIPE = 65536
_BASH = "/bin/bash"
_SHELL_NAME = "hpc-elastic"
_OWN_PLACE = re.compile(rf"^{_SHELL_NAME}: (?:eval: )?line \d+: ")
"""In front of bash's own messages: where in the text that it was given, which is not the user's."""


class CommandEnd(Struct, frozen=True, kw_only=True):
    """How a command ended, and what it printed last."""

    exitcode: int
    """As `subprocess` has it; -9 where its time was over."""
    stdout: bytes = b""
    stderr: bytes = b""
    seconds: float = 0.0
    is_late: bool = False
    """It was ended since its time was over."""


class UserCommand:
    """One command, and whatever it starts."""

    def __init__(
        self, process: WorkerProcess, env: Mapping[str, str], *, cancelled: threading.Event, kept: int = KEPT_OUTPUT
    ) -> None:
        self._process = process
        self._marks = {name: env.get(name) for name in (TOKEN_VARIABLE, JOB_VARIABLE)}
        self._cancelled = cancelled
        self._kept = kept
        self.is_gone = False

    @classmethod
    def start(
        cls,
        argv: Sequence[str],
        *,
        environ: Mapping[str, str],
        cwd: str,
        inherited: Inherited,
        clock: Clock,
        stdin: bytes | None = None,
        cancelled: threading.Event | None = None,
        kept: int = KEPT_OUTPUT,
    ) -> UserCommand:
        """Start it. For the main thread alone.

        Args:
            argv: The command and its arguments, or what `shell_command` makes of a line.
            environ, cwd, inherited, clock: As `start_worker` takes them.
            stdin: What it can read as its input, and need not.
            cancelled: Set when no one wants its end any more; None: `kill` does the same.
            kept: Bytes of each stream that are kept, the last ones.

        Raises:
            WorkerStartError: it can't be started.
        """
        env = {**environ, TOKEN_VARIABLE: os.urandom(8).hex()}
        fd = _as_file(stdin) if stdin is not None else None
        try:
            process = start_worker(
                argv=argv, env=env, cwd=cwd, inherited=inherited, clock=clock, pipe_bytes=0, exec_wait=EXEC_SECONDS,
                stdin=fd,
            )  # fmt: skip
        finally:
            if fd is not None:
                os.close(fd)
        return cls(process, env, cancelled=cancelled or threading.Event(), kept=kept)

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        """SIGKILL to its process group; `run` sees to the rest."""
        self._process.signal_group(signal.SIGKILL)

    def attend(self, seconds: float, on_end: Callable[[CommandEnd], None]) -> None:
        """Have a thread `run` it, which then calls `on_end`."""
        # Not Thread.start: it would wait for ever for a thread that has no memory to begin (CPython 3.10 to 3.14).
        _thread.start_new_thread(lambda: on_end(self.run(seconds)), ())

    def run(self, seconds: float) -> CommandEnd:
        """Attend it to its end, or end it with all that it started. Never longer than `seconds` and a little."""
        process = self._process
        stdout_fd, stderr_fd = process.take_output()
        kept = {stdout_fd: bytearray(), stderr_fd: bytearray()}
        open_fds = set(kept)
        began = time.monotonic()
        while process.poll() is None and time.monotonic() < began + seconds and not self._cancelled.is_set():
            self._read_some(kept, open_fds, process.pidfd, _LOOK_SECONDS)
        status = process.poll()
        ended = time.monotonic()
        self._end_all()
        self._read_some(kept, open_fds, None, 0.0)
        process.release()
        self.is_gone = True
        for fd in (stdout_fd, stderr_fd):
            os.close(fd)
        return CommandEnd(
            exitcode=status.exitcode if status else -int(signal.SIGKILL),
            stdout=bytes(kept[stdout_fd]),
            stderr=bytes(kept[stderr_fd]),
            seconds=ended - began,
            is_late=status is None,
        )

    def _end_all(self) -> None:
        """Until nothing of this job that carries its token lives; what sits in D state is left after a while."""
        deadline = time.monotonic() + END_SECONDS
        self.kill()
        while time.monotonic() < deadline:
            # The token alone is not enough: a job that the command submits inherits it.
            left = tree.own_processes_where(
                lambda _, environ: all(environ.get(name) == value for name, value in self._marks.items())
            )
            if not left and self._process.poll() is not None:
                return
            for proc in left:
                tree.kill_safely(proc, signal.SIGKILL)
            time.sleep(_LOOK_SECONDS / 5)

    def _read_some(self, kept: Mapping[int, bytearray], open_fds: set[int], pidfd: int | None, seconds: float) -> None:
        """Wait for output or the end, and read what is there; of endless output the end is kept."""
        poll = select.poll()
        for fd in (*open_fds, *([pidfd] if pidfd is not None else [])):
            poll.register(fd, select.POLLIN)
        for fd in open_fds & {fd for fd, _ in poll.poll(seconds * 1000)}:
            try:
                data = os.read(fd, _PIPE)
            except OSError:
                data = b""
            if not data:
                open_fds.discard(fd)
            kept[fd].extend(data)
            del kept[fd][: -self._kept]


def shell_command(line: str, *arguments: str) -> list[str]:
    """The argument list by which bash runs a line."""
    return [_BASH if os.path.exists(_BASH) else "bash", "-c", line, _SHELL_NAME, *arguments]


def describe_end(end: CommandEnd) -> str:
    """Why a command has failed: ``exit code 3``; empty where it has not. Pure."""
    if end.is_late:
        return f"it had not ended after {end.seconds:.0f} s"
    if end.exitcode == 0:
        return ""
    if end.exitcode > 0:
        return f"exit code {end.exitcode}"
    try:
        return signal.Signals(-end.exitcode).name
    except ValueError:
        return f"signal {-end.exitcode}"


def last_lines(output: bytes, most: int) -> list[str]:
    """The last lines that are not empty, without what a terminal would act on. Pure."""
    lines = [
        _OWN_PLACE.sub("", line.rstrip()) for line in output.decode("utf-8", "replace").splitlines() if line.strip()
    ]
    return [
        "".join(char if char.isprintable() or char == "\t" else "?" for char in line)[:300] for line in lines[-most:]
    ]


def _as_file(data: bytes) -> int:
    """A descriptor from which `data` can be read: a file, so that no one has to write while it is read."""
    fd = os.memfd_create("hpc-elastic-input", os.MFD_CLOEXEC)
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    os.lseek(fd, 0, os.SEEK_SET)
    return fd
