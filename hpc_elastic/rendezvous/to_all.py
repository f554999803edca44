"""What any participant may write into the log for all: an end, a notice, a signal that it heard."""

from __future__ import annotations

from signal import Signals

from hpc_elastic.rendezvous.coordinator import Proposal, closed_after, noticed_after
from hpc_elastic.rendezvous.preemption import PreemptionNotice
from hpc_elastic.rendezvous.state import Outcome, RoundEvent, RoundRecord, Status, next_status


class WordsToAll:
    """Those of one participant that the log has not taken yet.

    The first end holds, the notice that leaves the least time, and a SIGTERM before any other signal: it may mean that
    there is less time than was thought.
    """

    def __init__(self) -> None:
        self._closing: tuple[Outcome, str] | None = None
        self._notice: PreemptionNotice | None = None
        self._heard = ""

    def __bool__(self) -> bool:
        return self._closing is not None or self._notice is not None or bool(self._heard)

    def close(self, outcome: Outcome, reason: str) -> None:
        self._closing = self._closing or (outcome, reason)

    def give_notice(self, notice: PreemptionNotice) -> None:
        if self._notice is None or notice.seconds < self._notice.seconds:
            self._notice = notice

    def heard(self, what: str) -> None:
        if not self._heard or (_is_end(what) and not _is_end(self._heard)):
            self._heard = what

    def next(self, record: RoundRecord, *, noticed_for: float = 0.0) -> Proposal | None:
        """The next of them to append after `record`; None where it says all of it, and nothing waits any more.

        Args:
            record: The newest.
            noticed_for: Seconds since this participant read the record's notice, where it has one.
        """
        if record.status is not Status.CLOSED:
            if self._closing is not None:
                outcome, reason = self._closing
                closed = closed_after(record, outcome, reason)
                return Proposal(event=RoundEvent.CLOSE, record=closed, reason=reason)
            known = record.notice
            if self._notice is not None and (known is None or self._notice.leaves_less_than(known, since=noticed_for)):
                return noticed_after(record, self._notice)
            if self._heard and _is_news(self._heard, record):
                return heard_after(record, self._heard)
        self._closing = self._notice = None
        self._heard = ""
        return None


def _is_end(heard: str) -> bool:
    return heard.startswith(Signals.SIGTERM.name)


def _is_news(heard: str, record: RoundRecord) -> bool:
    """Who knows of a notice may still learn that a preemption begins, which leaves less time."""
    if _is_end(heard):
        return not _is_end(record.heard)
    return not record.heard and record.notice is None


def heard_after(record: RoundRecord, what: str) -> Proposal:
    """The record that tells all, and the supervisor above all, of a signal that may mean the end."""
    return Proposal(
        event=RoundEvent.HEARD,
        record=record.successor(status=next_status(record.status, RoundEvent.HEARD), heard=what),
        reason=what,
    )
