"""What any participant may write into the log for all: an end, a notice, a signal that it heard."""

from __future__ import annotations

from hpc_elastic.rendezvous.coordinator import Proposal, closed_after, noticed_after
from hpc_elastic.rendezvous.notice import Notice
from hpc_elastic.rendezvous.state import Outcome, RoundRecord, Status
from hpc_elastic.rendezvous.transitions import RoundEvent, next_status


class WordsToAll:
    """Those of one participant that the log has not taken yet. Of each kind the first one holds."""

    def __init__(self) -> None:
        self._closing: tuple[Outcome, str] | None = None
        self._notice: Notice | None = None
        self._heard = ""

    def __bool__(self) -> bool:
        return self._closing is not None or self._notice is not None or bool(self._heard)

    def close(self, outcome: Outcome, reason: str) -> None:
        self._closing = self._closing or (outcome, reason)

    def give_notice(self, notice: Notice) -> None:
        self._notice = self._notice or notice

    def heard(self, what: str) -> None:
        self._heard = self._heard or what

    def next(self, record: RoundRecord) -> Proposal | None:
        """The next of them to append after `record`; None where it says all of it, and nothing waits any more."""
        if record.status is not Status.CLOSED:
            if self._closing is not None:
                outcome, reason = self._closing
                closed = closed_after(record, outcome, reason)
                return Proposal(event=RoundEvent.CLOSE, record=closed, reason=reason)
            if self._notice is not None and record.notice is None:
                return noticed_after(record, self._notice)
            if self._heard and not record.heard and record.notice is None:
                return heard_after(record, self._heard)
        self._closing = self._notice = None
        self._heard = ""
        return None


def heard_after(record: RoundRecord, what: str) -> Proposal:
    """The record that tells all, and the supervisor above all, of a signal that may mean the end."""
    return Proposal(
        event=RoundEvent.HEARD,
        record=record.successor(status=next_status(record.status, RoundEvent.HEARD), heard=what),
        reason=what,
    )
