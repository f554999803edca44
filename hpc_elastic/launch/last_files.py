"""Files at an attempt's end: touched in bounded time, for the user waits, or Slurm's SIGKILL is near."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from hpc_elastic.file_thread import FULL, FilesystemHangsError, FileThread, is_refusal

REPORT_SECONDS = 120.0
"""For the report of an attempt: of a large run, on a slow filesystem."""
HUNG_SECONDS = 5.0
"""Without any answer: it is said so, and not waited for any more where somebody waits for us."""

T = TypeVar("T")


class LastFiles:
    """Has things done on the shared filesystem, and goes on without them where it does not answer."""

    def __init__(self, files: FileThread, *, is_hurried: Callable[[], bool], is_late: bool) -> None:
        """Args:
        files: What touches them.
        is_hurried: Whether the user has asked (again) for the end: a mount that hangs is not waited for then.
        is_late: Whether a signal has ended the attempt: there is little time then, and none of it for a mount that
            may never answer.
        """
        self._files = files
        self._is_hurried = is_hurried
        self._is_late = is_late
        self._has_refused = False
        """Whether it was waited for in vain: once is enough."""

    def do(self, action: Callable[[], T], otherwise: T, *, answers: bool = False) -> T:
        """Have `action` done.

        Args:
            action: Its result is returned, what it raises is raised here; where the filesystem refuses, or is full,
                it is done again for as long as one that hangs is waited for.
            otherwise: Returned where the filesystem hangs.
            answers: The filesystem has just answered, so what takes long is work.
        """
        is_stuck = self._files.stuck_for() > HUNG_SECONDS
        within = HUNG_SECONDS if is_stuck or (self._is_late and not answers) else REPORT_SECONDS
        began, refused_within = time.monotonic(), 0.0 if self._has_refused else within

        def is_waited_for(error: BaseException) -> bool:
            if not is_refusal(error) and not (isinstance(error, OSError) and error.errno in FULL):
                return False
            self._has_refused = True
            return not (self._is_hurried() and time.monotonic() - began > HUNG_SECONDS)

        try:
            done = self._files.do(
                action,
                within=within,
                unless=self._hangs_and_is_hurried,
                again=is_waited_for,
                refused_within=refused_within,
            )
        except FilesystemHangsError:
            return otherwise
        self._has_refused = False
        return done

    def _hangs_and_is_hurried(self) -> bool:
        return self._files.stuck_for() > HUNG_SECONDS and self._is_hurried()
