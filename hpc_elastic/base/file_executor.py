"""The thread that touches the shared filesystem on behalf of a loop that must never wait for it, and what a refusal is.

A dead mount answers never, and a thread that asked it something can't be called back: not by a signal, and on some
filesystems not by SIGKILL. So whoever has workers to end leaves files to this thread: `post` for what may take
its time, `do` for what is waited for, with a bound. What was given up may still be done when the mount comes back.
"""

from __future__ import annotations

import errno
import threading
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from hpc_elastic.base.clock import Clock, SystemClock

T = TypeVar("T")

_LOOK_SECONDS = 0.05
_LONGEST_PAUSE = 1.0
"""Seconds between two tries on a filesystem that refuses."""
_REFUSALS = frozenset(
    getattr(errno, name)
    for name in [
        "EACCES",
        "EPERM",
        "EIO",
        "ESTALE",
        "EROFS",
        "ENODEV",
        "ENXIO",
        "EREMOTEIO",
        "ENOTCONN",
        "ESHUTDOWN",
        "ETIMEDOUT",
        "ECONNREFUSED",
        "ECONNRESET",
        "EHOSTDOWN",
        "EHOSTUNREACH",
        "ENETDOWN",
        "ENETUNREACH",
        "ENOLINK",
        "EKEYEXPIRED",
        "EKEYREVOKED",
        "EKEYREJECTED",
        "ENOKEY",
    ]
)
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


def is_refusal(error: BaseException) -> bool:
    """Whether the filesystem as a whole may refuse for a while: an expired ticket, a withdrawn export, a dead server.

    A missing file, a full disk or a lack of descriptors is none.
    """
    return isinstance(error, OSError) and error.errno in _REFUSALS


class FilesystemHangsError(TimeoutError):
    """The filesystem did not answer in time, or is not waited for any more. An OSError: with the same way out."""


class FileExecutor:
    """One daemon thread, which does one thing after another in the order in which they came."""

    def __init__(self, *, name: str = "files", clock: Clock | None = None) -> None:
        """Args:
        name: Of the thread.
        clock: For the bounds.
        """
        self._name = name
        self._clock = clock or SystemClock()
        self._queue: deque[Callable[[], object]] = deque()
        self._changed = threading.Condition()
        self._since: float | None = None
        self._thread: threading.Thread | None = None

    def post(self, action: Callable[[], object]) -> None:
        """Have `action` done some day; what it raises is lost. Never blocks."""
        with self._changed:
            self._queue.append(action)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify()

    def do(
        self,
        action: Callable[[], T],
        *,
        within: float,
        unless: Callable[[], bool] | None = None,
        again: Callable[[BaseException], bool] | None = None,
        refused_within: float | None = None,
    ) -> T:
        """Have `action` done, and wait for it.

        Args:
            action: Its result is returned, what it raises is raised here. Given up before it began, it is not done;
                given up later, nobody learns what became of it.
            within: Seconds. They count from when the thread got stuck, where it is stuck already: who comes after one
                that was given up does not wait as long again.
            unless: Asked all the time: whether to give up at once.
            again: Of what `action` raised: whether it is to be done again, as `is_refusal` says; None: never.
            refused_within: Seconds after which it is not; None: `within`.

        Raises:
            FilesystemHangsError: not in time, or given up.
        """
        began, pause = self._clock.monotonic(), _LOOK_SECONDS
        deadline = began + (within if refused_within is None else refused_within)
        while True:
            try:
                return self._do(action, within, unless)
            except FilesystemHangsError:
                raise
            except Exception as error:
                has_time = self._clock.monotonic() + pause < deadline and not (unless is not None and unless())
                if again is None or not again(error) or not has_time:
                    raise
            self._clock.wait(threading.Event(), pause)
            pause = min(_LONGEST_PAUSE, 2 * pause)

    def _do(self, action: Callable[[], T], within: float, unless: Callable[[], bool] | None) -> T:
        done, given_up = threading.Event(), threading.Event()
        outcome: list[T] = []
        errors: list[BaseException] = []

        def act() -> None:
            if given_up.is_set():
                return
            try:
                outcome.append(action())
            except BaseException as error:
                errors.append(error)
            finally:
                done.set()

        self.post(act)
        began = self._clock.monotonic()
        while not self._clock.wait(done, _LOOK_SECONDS):
            stuck = self.stuck_for()
            waited = max(self._clock.monotonic() - began, stuck)
            if waited >= within or (unless is not None and unless()):
                given_up.set()
                if not done.is_set():
                    raise FilesystemHangsError(errno.ETIMEDOUT, f"the filesystem has not answered for {waited:.1f} s")
        if errors:
            raise errors[0]
        return outcome[0]

    def stuck_for(self) -> float:
        """Seconds since which the thread has been busy with one thing; 0 while it is idle."""
        since = self._since
        return 0.0 if since is None else self._clock.monotonic() - since

    def settle(self, within: float) -> bool:
        """Wait until all that was posted is done. Returns whether it is."""
        try:
            self.do(lambda: None, within=within)
        except FilesystemHangsError:
            return False
        return True

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._queue:
                    self._changed.wait()
                action = self._queue.popleft()
            self._since = self._clock.monotonic()
            try:
                action()
            except Exception:
                pass  # nobody waits for it
            finally:
                self._since = None
