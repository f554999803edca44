"""What the supervisor says, on its way to the job log: through a queue, since stdout may be a file on a
mount that hangs."""

from __future__ import annotations

import logging

from hpc_elastic.processes.hung_exit import output_pipes
from hpc_elastic.processes.job_log import JobLog

_MOST_BYTES = 16 << 20
"""That wait: a report of a large run and whatever was said before it."""
_HUNG_SECONDS = 2.0
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
        self._close_seconds = _READ_SECONDS if 1 in output_pipes() else _HUNG_SECONDS
        self._handlers = (("hpc_elastic", messages), (_PLAIN, plain))

    def close(self) -> bool:
        """Write what waits. Returns whether stdout took it all, in bounded time."""
        for name, handler in self._handlers:
            logging.getLogger(name).removeHandler(handler)
        return self._job_log.close(self._close_seconds)


def log_plain(text: str) -> None:
    """Text for the job log as it is: the head, the report."""
    logging.getLogger(_PLAIN).info("%s", text)
