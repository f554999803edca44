"""The waits of a loop: for descriptors, for the first of several times, for what other threads put in, for filesystems.

A filesystem may hang or refuse: it is accessed in another thread, a `FileExecutor`, and waited for in bounded time.

A thread that asked a dead mount something can't be called back: not by a signal, and on some filesystems not by
SIGKILL. An action that was given up may still happen when the mount comes back.
"""

from __future__ import annotations

import _thread
import errno
import logging
import math
import resource
import select
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

from hpc_elastic.base.clock import Clock, SystemClock, pause
from hpc_elastic.errors import describe_error, where_raised

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

logger = logging.getLogger(__name__)

T = TypeVar("T")
K = TypeVar("K")

_LONGEST_MS = 2**31 - 1
"""Poll takes a C int: 24.8 days. The end of a job without a time limit is later."""


def wait_readable(watched: Iterable[FileDescriptorLike], seconds: float) -> set[int]:
    """Wait until a descriptor is readable, has ended or is broken, or the time (rounded up to milliseconds) has passed.

    Not `select.select`: it takes no descriptor beyond 1023, and an agent of 200 workers has more. One whose number is
    negative is never readable; infinite seconds have no end, others end after 24 days. Returns the ready descriptors'
    numbers.
    """
    poller = select.poll()
    for one in watched:
        if (fd := one if isinstance(one, int) else one.fileno()) >= 0:
            poller.register(fd, select.POLLIN)
    wait = None if seconds == math.inf else min(max(0, math.ceil(seconds * 1000)), _LONGEST_MS)
    return {fd for fd, _ in poller.poll(wait)}


def seconds_until(dues: Iterable[float | None], clock: Clock, *, most: float = math.inf) -> float:
    """Seconds until the first of some monotonic times; None is never."""
    return max(0.0, min([most, *(due - clock.monotonic() for due in dues if due is not None)]))


def start_thread(action: Callable[[], object]) -> None:
    """Start a daemon thread. Raises RuntimeError.

    Not threading's: its `start` waits for the thread, forever where memory is short (CPython 3.10 to 3.14).
    """
    _thread.start_new_thread(action, ())


class Waker:
    """Ends a loop's wait: the loop watches it and calls `drain` when it is readable; any thread calls `wake`.

    As the process' wake-up descriptor (`write_fd`, for `signal.set_wakeup_fd`) it collects the numbers of signals.
    Started programs inherit neither end.
    """

    def __init__(self) -> None:
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)

    def fileno(self) -> int:
        """Readable from `wake` to `drain`."""
        return self._read.fileno()

    @property
    def write_fd(self) -> int:
        return self._write.fileno()

    def wake(self) -> None:
        try:
            self._write.send(b"\0")
        except OSError:
            pass  # full: there is a reason to wake up already

    def drain(self) -> bytes:
        """Read the bytes since the last call, one for each wake or signal."""
        parts = []
        try:
            while part := self._read.recv(4096):
                parts.append(part)
        except BlockingIOError:
            pass
        return b"".join(parts)

    def peek(self) -> bytes:
        try:
            return self._read.recv(4096, socket.MSG_PEEK)
        except BlockingIOError:
            return b""

    def close(self) -> None:
        self._read.close()
        self._write.close()


class Inbox(Generic[T]):
    def __init__(self) -> None:
        self._waker = Waker()
        self._items: deque[T] = deque()

    def fileno(self) -> int:
        return self._waker.fileno()

    def put(self, item: T) -> None:
        self._items.append(item)
        self._waker.wake()

    def take(self) -> list[T]:
        self._waker.drain()
        return [self._items.popleft() for _ in range(len(self._items))]


_LOOK_SECONDS = 0.05
_LONGEST_PAUSE = 1.0
_REFUSALS = frozenset(
    getattr(errno, name)
    for name in (
        *("EACCES", "EPERM", "EIO", "ESTALE", "EROFS", "ENODEV", "ENXIO", "EREMOTEIO", "ENOTCONN", "ESHUTDOWN"),
        *("ETIMEDOUT", "ECONNREFUSED", "ECONNRESET", "EHOSTDOWN", "EHOSTUNREACH", "ENETDOWN", "ENETUNREACH"),
        *("ENOLINK", "EKEYEXPIRED", "EKEYREVOKED", "EKEYREJECTED", "ENOKEY"),
    )
)
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


def is_refusal(error: BaseException) -> bool:
    """Check for a filesystem that refuses as a whole for a while: an expired ticket, a withdrawn export, a dead server.
    A missing file, a full disk or a lack of descriptors is no refusal."""
    return isinstance(error, OSError) and error.errno in _REFUSALS


def describe_no_descriptor(error: BaseException | None) -> str:
    """The limit of open files that an error comes from, which is none of a filesystem; empty: another error."""
    number = error.errno if isinstance(error, OSError) else None
    if number == errno.EMFILE:
        return f"open files: an agent may have {resource.getrlimit(resource.RLIMIT_NOFILE)[0]} (ulimit -Hn)"
    return "the whole node has no open file left (fs.file-max)" if number == errno.ENFILE else ""


class FilesystemHangsError(TimeoutError):
    """The filesystem did not answer in time, or the caller gave up. Callers handle it like other OSErrors."""


def repeat(
    action: Callable[[], T],
    *,
    again: Callable[[BaseException], bool],
    within: float,
    clock: Clock,
    longer: Callable[[float], float] = lambda last: min(_LONGEST_PAUSE, 2 * last),
    unless: Callable[[], bool] | None = None,
) -> T:
    """Do `action`, which may run several times, until it works; its last exception is raised here.

    `again` decides by an exception whether to retry, as `is_refusal` does; no try begins later than `within` seconds.
    `longer` gives the seconds of a wait from those of the last one. `unless`, checked before a retry, gives up at once.
    """
    deadline, seconds = clock.monotonic() + within, _LOOK_SECONDS
    while True:
        try:
            return action()
        except Exception as error:
            has_time = clock.monotonic() + seconds < deadline and not (unless is not None and unless())
            if not again(error) or not has_time:
                raise
        pause(clock, seconds)
        seconds = longer(seconds)


def read_each(items: Sequence[K], read: Callable[[K], T], *, patience: float, goes_on: bool = True) -> dict[K, T]:
    """Call `read` in another thread for each of `items`, in order; one that does not answer is left to that thread.

    After `patience` seconds without any answer the current item counts as hanging; with `goes_on` those behind it are
    read all the same. Raises OSError, where `read` does.
    """
    found: dict[K, T] = {}
    left = list(items)
    while left:
        seen = _read_until_stuck(left, read, patience)
        found.update(seen)
        left = left[len(seen) + 1 :] if goes_on else []
    return found


def _read_until_stuck(items: Sequence[K], read: Callable[[K], T], patience: float) -> Sequence[tuple[K, T]]:
    seen: list[tuple[K, T]] = []
    errors: list[OSError] = []
    done = _thread.allocate_lock()
    done.acquire()

    def run() -> None:
        try:
            for item in items:
                seen.append((item, read(item)))
        except OSError as error:
            errors.append(error)
        finally:
            done.release()

    try:
        start_thread(run)
    except RuntimeError:
        run()
    before = -1
    while not done.acquire(timeout=patience) and before != len(seen):
        before = len(seen)
    if errors:
        raise errors[0]
    return tuple(seen)


class FileExecutor:
    def __init__(self, *, name: str = "files", clock: Clock | None = None) -> None:
        self._name = name
        self._clock = clock or SystemClock()
        self._queue: deque[Callable[[], object] | None] = deque()
        self._later: deque[tuple[float, Callable[[], object]]] = deque()
        self._changed = threading.Condition()
        self._since: float | None = None
        self._failed = ""
        self._thread: threading.Thread | None = None

    def post(self, action: Callable[[], object], *, after: float = 0.0) -> None:
        """Queue `action`, or have it queued `after` seconds; its exceptions are logged. Never blocks."""
        if not after:
            self._put(action)
            return
        with self._changed:
            self._later.append((self._clock.monotonic() + after, action))
            self._begin()

    def close(self, within: float) -> bool:
        """End the thread when everything posted is done; nothing may be posted any more. Returns whether it ended."""
        if self._thread is None:
            return True
        with self._changed:
            self._queue_later(math.inf)
        self._put(None)
        self._thread.join(max(0.0, within))
        return not self._thread.is_alive()

    def _put(self, action: Callable[[], object] | None) -> None:
        with self._changed:
            self._queue.append(action)
            self._begin()

    def _begin(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._changed.notify()

    def _queue_later(self, now: float) -> float | None:
        while self._later and self._later[0][0] <= now:
            self._queue.append(self._later.popleft()[1])
        return self._later[0][0] - now if self._later else None

    def do(
        self,
        action: Callable[[], T],
        *,
        within: float,
        unless: Callable[[], bool] | None = None,
        again: Callable[[BaseException], bool] | None = None,
        refused_within: float | None = None,
    ) -> T:
        """Queue `action`, and wait for it.

        Args:
            action: Its result is returned, its exception raised. If given up before it began, it does not run; if given
                up later, its result is lost.
            within: Seconds. Where the thread is stuck already, they count from when it got stuck: the next caller does
                not wait as long again.
            unless: Checked all the time: whether to give up at once.
            again: Decides by the exception of `action` whether to retry, as `is_refusal` does; None: never.
            refused_within: Limit of the retries in seconds; None: `within`.

        Raises FilesystemHangsError: not in time, or given up.
        """
        if again is None:
            return self._do(action, within, unless)
        return repeat(
            lambda: self._do(action, within, unless),
            again=lambda error: not isinstance(error, FilesystemHangsError) and again(error),
            within=within if refused_within is None else refused_within,
            clock=self._clock,
            unless=unless,
        )

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
            waited = max(self._clock.monotonic() - began, self.stuck_for())
            if waited >= within or (unless is not None and unless()):
                given_up.set()
                if not done.is_set():
                    raise FilesystemHangsError(errno.ETIMEDOUT, f"the filesystem has not answered for {waited:.1f} s")
        if errors:
            raise errors[0]
        return outcome[0]

    def stuck_for(self) -> float:
        since = self._since
        return 0.0 if since is None else self._clock.monotonic() - since

    def settle(self, within: float) -> bool:
        with self._changed:
            self._queue_later(math.inf)
        try:
            self.do(lambda: None, within=within)
        except FilesystemHangsError:
            return False
        return True

    def _run(self) -> None:
        while True:
            with self._changed:
                while True:
                    next_in = self._queue_later(self._clock.monotonic())
                    if self._queue:
                        break
                    self._changed.wait(next_in)
                action = self._queue.popleft()
            if action is None:
                return
            self._since = self._clock.monotonic()
            try:
                action()
            except Exception as error:  # posted, so not waited for
                failed = describe_error(error)
                if failed != self._failed:  # a full disk refuses a file that is written again and again
                    logger.error("a file operation failed: %s (%s)", failed, where_raised(error))
                self._failed = failed
            finally:
                self._since = None
