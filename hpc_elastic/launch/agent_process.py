"""An agent as a child of this process, started so that no filesystem can hold up who starts it.

`subprocess` waits until the child has closed what it inherited, and a file on a mount that hangs is never closed. So
this is `os.posix_spawn`, which waits for the program to be loaded, and no longer: descriptors are closed by the kernel
afterwards (all of Python's are close-on-exec).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence


class AgentProcess:
    """One agent. For the main thread: it ends when the thread that started it does (``--launcher-pid``)."""

    def __init__(self, argv: Sequence[str], *, env: Mapping[str, str], umask: int) -> None:
        """Start it, as the leader of a session of its own, with no input.

        Args:
            argv: Its command, with the program's whole path.
            env: Its whole environment.
            umask: Its own.

        Raises:
            OSError: it could not be started.
        """
        own = os.umask(umask)
        try:
            self.pid = os.posix_spawn(
                argv[0],
                list(argv),
                dict(env),
                file_actions=[(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0), *_closing()],
                setsid=True,
                setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],  # which Python ignores for itself
            )
        finally:
            os.umask(own)
        self._code: int | None = None

    def poll(self) -> int | None:
        """How it ended, as `subprocess` has it; None while it runs."""
        if self._code is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # somebody else waited for it: an unknown end never passes for success
                self._code = 255
                return self._code
            if pid == self.pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def send_signal(self, number: signal.Signals) -> None:
        """Nothing happens where it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


def _closing() -> list[tuple[int, int]]:
    """What this process was itself started with, beyond the standard streams, and would hand on."""
    actions = []
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        try:
            if fd > 2 and os.get_inheritable(fd):
                actions.append((os.POSIX_SPAWN_CLOSE, fd))
        except OSError:
            pass  # the listing's own
    return actions
