"""Why an iteration was interrupted, and on which rank."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable

from msgspec import Struct

_TEXT = re.compile(r"rank=(\d+).*Interruption\.(\w+)")


class Interruption(enum.Enum):
    """What happened to a rank."""

    EXCEPTION = enum.auto()
    """The function, `initialize` or the health check before it raised an ``Exception``."""
    BASE_EXCEPTION = enum.auto()
    """The rank leaves: ``RestartAbort``, ``KeyboardInterrupt``, a hook after a fault that failed."""
    SOFT_TIMEOUT = enum.auto()
    HARD_TIMEOUT = enum.auto()
    """Its monitor process killed it."""
    TERMINATED = enum.auto()
    """The process ended, by a signal for instance."""
    UNRESPONSIVE = enum.auto()
    """No heartbeat: process and monitor are gone, or their node."""
    MONITOR_PROCESS_EXCEPTION = enum.auto()


class InterruptionRecord(Struct, frozen=True):
    """One line of the store's list.

    Args:
        rank: In the iteration that was interrupted.
        interruption: What happened there.
    """

    rank: int
    interruption: Interruption

    def __str__(self) -> str:
        return f"InterruptionRecord(rank={self.rank}, interruption=Interruption.{self.interruption.name})"

    @classmethod
    def from_str(cls, string: str) -> InterruptionRecord:
        """Read what ``str`` wrote.

        Raises:
            ValueError: it is no such text.
        """
        found = _TEXT.search(string)
        if found is None or found[2] not in Interruption.__members__:
            raise ValueError(f"not an interruption's record: {string!r}")
        return cls(rank=int(found[1]), interruption=Interruption[found[2]])


def format_interruption_records(records: Iterable[InterruptionRecord]) -> str:
    """For people: ``SOFT_TIMEOUT on ranks 0, 2; EXCEPTION on rank 1``."""
    ranks: dict[Interruption, dict[int, None]] = {}
    for record in records:
        ranks.setdefault(record.interruption, {})[record.rank] = None
    return "; ".join(
        f"{interruption.name} on rank{'s' * (len(found) > 1)} {', '.join(map(str, sorted(found)))}"
        for interruption, found in ranks.items()
    )
