"""What the process was started with by a node's agent: where to report, and whether dead processes are replaced."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hpc_elastic.ring_record import REPLACES, REPORTS, WAIT, RingEvent, RingLine

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """Nothing of it is there under torchrun or srun."""

    reports: str = ""
    """The agent's named pipe; empty: none."""
    wait: float | None = None
    """Seconds for a fresh process to come in a dead one's place; None: none will."""
    replaces: int = 0
    """This process is the n-th in a dead one's place; 0: it is none."""

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Surroundings:
        """What cannot be read counts as not there."""
        try:
            wait = float(env[WAIT]) if env.get(WAIT) else None
            replaces = int(env.get(REPLACES) or 0)
        except ValueError:
            logger.warning("%s=%r, %s=%r: not numbers", WAIT, env.get(WAIT), REPLACES, env.get(REPLACES))
            wait, replaces = None, 0
        return cls(reports=env.get(REPORTS, ""), wait=wait, replaces=replaces)

    def report(self, word: RingEvent, *, rank: int, **facts: Any) -> None:
        """Report to the agent, if there is one. This never waits, and a failure of it does not fail the group."""
        if not self.reports:
            return
        try:
            fd = os.open(self.reports, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                os.write(fd, RingLine(word=word, pid=os.getpid(), rank=rank, **facts).encode())
            finally:
                os.close(fd)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENXIO):
                logger.warning("the agent is not told of the ring: %s", error)
