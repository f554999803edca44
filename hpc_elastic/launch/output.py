"""What the supervisor writes beside the run's state, in bounded time: any file may lie on a mount that hangs.

`JobOutput` hands messages and the report to the job log through a queue, `LastFiles` has the files of an attempt's end
written: the user waits for that end, or Slurm's SIGKILL is near.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from hpc_elastic.base.file_executor import FULL, FileExecutor, FilesystemHangsError, is_refusal
from hpc_elastic.output.job_log import JobLog
from hpc_elastic.workers.linux import output_pipes

_MOST_BYTES = 16 << 20
"""That wait: a report of a large run, and the messages before it."""
_JOB_LOG_SECONDS = 2.0
"""How long a file is waited for in the end: it may lie on a mount that hangs."""
_READ_SECONDS = 1e6
"""A terminal, or a reader at a pipe's other end, takes the time that it wants."""
_PLAIN = "hpc_elastic_job_log"


class _Handler(logging.Handler):
    def __init__(self, job_log: JobLog) -> None:
        super().__init__()
        self._job_log = job_log

    def emit(self, record: logging.LogRecord) -> None:
        self._job_log.write_line(self.format(record))


class JobOutput:
    """This process' stdout, from now on. `say` and the package's loggers write to it."""

    def __init__(self) -> None:
        self._job_log = JobLog(1, total_bytes=_MOST_BYTES, source_bytes=_MOST_BYTES)
        messages, plain = _Handler(self._job_log), _Handler(self._job_log)
        messages.setFormatter(logging.Formatter("[hpc-elastic] %(message)s"))
        for name, handler in (("hpc_elastic", messages), (_PLAIN, plain)):
            logger = logging.getLogger(name)
            logger.setLevel(logging.INFO)
            logger.addHandler(handler)
            logger.propagate = False
        self._close_seconds = _READ_SECONDS if 1 in output_pipes() else _JOB_LOG_SECONDS
        self._handlers = (("hpc_elastic", messages), (_PLAIN, plain))

    def close(self) -> bool:
        """Write what waits. Returns whether stdout took it all, in bounded time."""
        for name, handler in self._handlers:
            logging.getLogger(name).removeHandler(handler)
        return self._job_log.close(self._close_seconds)


def log_plain(text: str) -> None:
    """Text for the job log as it is: the head, the report."""
    logging.getLogger(_PLAIN).info("%s", text)


REPORT_SECONDS = 120.0
"""For the report of an attempt: of a large run, on a slow filesystem."""
HUNG_SECONDS = 5.0
"""Without any answer: it is logged, and no more waited for where the user waits for this process."""

T = TypeVar("T")


class LastFiles:
    """Has things done on the shared filesystem, and goes on without them where it does not answer."""

    def __init__(self, files: FileExecutor, *, is_hurried: Callable[[], bool], is_late: bool) -> None:
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
