"""An agent that fails itself: out of memory or descriptors, or by a defect of ours.

Its workers must not outlive it, the other nodes must go on without it, and a person must be able to see why. A thread
that fails takes the agent out of the run as an unusable store does, in an orderly way; where the main thread fails,
nothing orderly is left to be done: it tells what it can and ends at once, and the guardian ends the workers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import NoReturn

from hpc_elastic.base.outcome import ExitCode
from hpc_elastic.errors import HpcElasticError, describe_error, where_raised
from hpc_elastic.run.events import EventLog
from hpc_elastic.workers.linux import leave_hung_threads

_RESERVE_BYTES = 4 << 20
LAST_WORDS_SECONDS = 1.0
_MOST_LINES = 40
_NEVER_END = frozenset({"coordination", "beats", "files", "log-pump", "log-files", "job-log"})
"""Threads without which an agent is of no use."""


class ThreadFailedError(HpcElasticError):
    """One of the agent's own threads has ended where it never should."""

    template = "the agent's thread {thread!r} failed: {error}"


class CrashGuard:
    """One agent's. It holds back some memory, in order to have it when there is none."""

    def __init__(self) -> None:
        self._reserve: bytearray | None = bytearray(_RESERVE_BYTES)  # never touched, and so not resident
        self._threads: set[threading.Thread] = set()

    def watch_threads(self, tell: Callable[[ThreadFailedError], None]) -> None:
        """From now on, tell of a thread that an exception ends.

        Args:
            tell: Called in that thread; must not wait.
        """

        def failed(args: threading.ExceptHookArgs) -> None:
            self._reserve = None
            if args.exc_type is not SystemExit:
                name = args.thread.name if args.thread is not None else "?"
                tell(ThreadFailedError(thread=name, error=describe_error(args.exc_value or args.exc_type())))

        threading.excepthook = failed

    def check(self) -> None:
        """Look whether a thread has ended unheard: without memory, it may not even be told of. For the agent's loop.

        Raises:
            ThreadFailedError: one has.
        """
        for thread in self._threads:
            if not thread.is_alive():
                raise ThreadFailedError(thread=thread.name, error="it ended without a word (out of memory?)")
        self._threads.update(thread for thread in threading.enumerate() if thread.name in _NEVER_END)

    def end(
        self,
        error: BaseException,
        *,
        events: EventLog,
        say: Callable[[str], object],
        flush: Callable[[], object],
        keep: Callable[[], object],
        pipes: Sequence[int],
    ) -> NoReturn:
        """The main thread has failed: leave evidence, and end this process at once.

        Args:
            error: What it failed with.
            events: Gets an ``agent_failed``.
            say: Writes a line to the job log.
            flush: Waits until the job log has it, for a moment.
            keep: Writes the error file, in bounded time.
            pipes: As `processes.hung_exit.output_pipes` found them.
        """
        self._reserve = None
        steps: list[Callable[[], object]] = [
            lambda: events.write("agent_failed", error=describe_error(error), where=where_raised(error)),
            lambda: say(f"error: the agent itself failed: {describe_error(error)}; its workers are ended"),
            lambda: [say(line) for line in _traceback(error)],
            flush,
            lambda: events.close(within=LAST_WORDS_SECONDS),
            keep,
        ]
        try:
            for step in steps:
                try:
                    step()
                except Exception:
                    continue  # one that fails for the same reason; the next may be smaller
        finally:
            leave_hung_threads(ExitCode.WORKERS_FAILED, pipes)


def _traceback(error: BaseException) -> list[str]:
    import traceback

    return "".join(traceback.format_exception(error)).splitlines()[-_MOST_LINES:]
