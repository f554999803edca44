"""The process that the user sees of a run on this machine: it touches no file, so that it can always end.

A thread that waits for a dead mount can keep its process in the kernel's table for as long as the mount is dead, and
the shell, which waits for that process, with it. So the supervisor runs in a child: the front hands it every signal,
and ends when the child reports how the run ended, or has ended but for what the kernel holds of it.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from types import FrameType

from hpc_elastic.base.waking import wait_readable
from hpc_elastic.workers import linux, tree
from hpc_elastic.workers.linux import leave_hung_threads, output_pipes

RELAYED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
UNREADY_SECONDS = 4.0
"""How long a child that does not watch over a run yet may take to end after a signal: it does nothing but read and make
files."""
LAST_SECONDS = 1.0
"""How long the child may take to be gone after it has said how the run ended."""
_LOOK_SECONDS = 2.0
"""Between two looks at the child, for what no event reports: that it has ended but for a thread that a mount holds."""
_LOOK_CLOSELY_SECONDS = 0.5
"""The same once it was asked to end."""
_READY = b"r"


def run_behind_front(work: Callable[[Callable[[], None]], int], *, what: str) -> int:
    """Have `work` done in a child of this process. Call it before the first thread.

    Args:
        work: Called in the child with what it is to call once it handles signals itself; returns the exit code. What it
            raises comes out of this call, in the child.
        what: The files that it begins with, for the message where they do not answer.

    Returns:
        The exit code, when it is over. The child does not come back.
    """
    pipes = output_pipes()
    read_end, write_end = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    front = os.getpid()
    signal.pthread_sigmask(signal.SIG_BLOCK, RELAYED)  # none is lost between the fork and the handlers
    child = os.fork()
    if child == 0:
        os.close(read_end)
        os.setpgid(0, 0)  # the terminal's Ctrl-C reaches the front alone, which hands it on
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        linux.set_parent_death_signal(signal.SIGHUP)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, RELAYED)
        if os.getppid() != front:
            return 128 + signal.SIGHUP
        code = work(lambda: _write(write_end, _READY))
        sys.stdout.flush()
        _write(write_end, b"%d\n" % code)
        leave_hung_threads(code, pipes)
    os.close(write_end)
    _let_go_of_files(pipes)
    return _Front(child, read_end, what).wait()


def _let_go_of_files(pipes: Sequence[int]) -> None:
    """Closing a file, which the kernel does at a process' end, asks its filesystem too: while it answers, then."""
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for fd in {0, 1, 2} - set(pipes):
        os.dup2(null, fd)
    os.close(null)


def _write(fd: int, message: bytes) -> None:
    try:
        os.write(fd, message)
    except OSError:
        pass  # the front was killed


class _Front:
    def __init__(self, child: int, pipe: int, what: str) -> None:
        self._child = child
        self._pipe = pipe
        self._what = what
        self._is_ready = False
        self._code: int | None = None
        self._asked: tuple[float, signal.Signals] | None = None
        self._interrupts = 0
        self._dead_since: float | None = None
        self._wake_read, wake_write = os.pipe()
        for fd in (self._wake_read, wake_write):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(wake_write)
        for number in RELAYED:
            signal.signal(number, self._relay)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)  # it is the number in the pipe that matters
        signal.pthread_sigmask(signal.SIG_UNBLOCK, RELAYED)

    def _relay(self, number: int, frame: FrameType | None) -> None:
        try:
            os.kill(self._child, number)
        except ProcessLookupError:
            return
        found = signal.Signals(number)
        if found in _ENDING and self._asked is None:
            self._asked = (time.monotonic(), found)
        self._interrupts += found is signal.SIGINT

    def wait(self) -> int:
        while True:
            status = self._status()
            if status is not None:
                return status
            watched = [self._wake_read] if self._pipe < 0 else [self._wake_read, self._pipe]
            ready = wait_readable(watched, self._patience())
            if self._wake_read in ready:
                os.read(self._wake_read, 4096)
            if self._pipe in ready:
                self._hear()

    def _patience(self) -> float:
        """Seconds until there is something to do though nothing comes."""
        found = _LOOK_SECONDS if self._asked is None else _LOOK_CLOSELY_SECONDS
        if self._dead_since is not None:
            found = min(found, self._dead_since + LAST_SECONDS - time.monotonic())
        if self._asked is not None and not self._is_ready:
            found = min(found, self._asked[0] + UNREADY_SECONDS - time.monotonic())
        return max(0.0, found)

    def _hear(self) -> None:
        message = os.read(self._pipe, 64)
        if not message:
            os.close(self._pipe)
            self._pipe = -1
            return
        self._is_ready = True
        code = message.removeprefix(_READY).strip()
        if code.isdigit():
            self._code = int(code)
            self._dead_since = time.monotonic()

    def _status(self) -> int | None:
        """The exit code, where it is over for the shell that waits."""
        pid, status = os.waitpid(self._child, os.WNOHANG)
        if pid == self._child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
        now = time.monotonic()
        if self._asked is not None and not self._is_ready and now - self._asked[0] >= UNREADY_SECONDS:
            self._print(f"{self._what} does not answer; nothing was started")
            os.kill(self._child, signal.SIGKILL)
            return 128 + self._asked[1]
        if self._interrupts > 2:
            self._print("third Ctrl-C: not waiting any longer; the agents end by themselves")
            os.kill(self._child, signal.SIGKILL)
            return 128 + signal.SIGINT
        if self._code is None:
            proc = tree.look_at(self._child)
            if proc is not None and not proc.is_dead:
                self._dead_since = None
                return None
        self._dead_since = self._dead_since or now
        if now - self._dead_since < LAST_SECONDS:
            return None
        return self._code if self._code is not None else 1

    def _print(self, text: str) -> None:
        os.write(2, f"hpc-elastic: {text}\n".encode("utf-8", "surrogateescape"))
