"""What is read in the log of records and what is read in the events is the same."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from hpc_elastic.rendezvous.proposals import EVENTS, consequences, propose, propose_close, to_event
from hpc_elastic.rendezvous.state import Member, RoundEvent, RoundRecord, RunNotice, Status
from hpc_elastic.run import event_reader
from hpc_elastic.run.control_events import NodeLost, NoticeGiven, RoundFrozen, RunClosed
from hpc_elastic.run.events import name_of
from hpc_elastic.run.paths import Outcome

RECORD = RoundRecord(
    number=7,
    epoch="e",
    term=1,
    leader="00000-n0-0001000000000000-aaaa",
    notifier="",
    round=3,
    status=Status.JOINABLE,
    reason="worker failure on node 1",
    restarts_used=2,
)


@pytest.mark.parametrize("event", RoundEvent)
def test_an_event_says_of_a_record_what_the_record_says(event: RoundEvent) -> None:
    """`status` reads the newest record, and `report` the events."""
    found = to_event(event, RECORD, RECORD.reason)
    assert (found.round, found.reason, found.restarts_used) == (3, RECORD.reason, 2)  # type: ignore[attr-defined]
    assert event_reader.EVENTS[name_of(found)] is EVENTS[event]


def test_what_some_records_have_beside_that_is_in_their_events() -> None:
    closed = propose_close(RECORD, Outcome.FAILED, "no restart is left")
    found = to_event(closed.event, closed.record, closed.reason)
    assert isinstance(found, RunClosed)
    assert (found.outcome, found.reason) == ("failed", closed.record.reason)
    members = tuple(Member(f"0000{n}-n{n}-0001000000000000-aaaa", n, 2) for n in (0, 2))
    frozen = to_event(RoundEvent.FREEZE, RECORD.successor(members=members), "2 nodes are here")
    assert isinstance(frozen, RoundFrozen)
    assert frozen.nodes == (0, 2)
    notice = RunNotice(reason="SIGUSR2 on n1", seconds=60.0)
    given = to_event(RoundEvent.NOTICE, RECORD.successor(notice=notice), "notice")
    assert isinstance(given, NoticeGiven)
    assert (given.seconds, given.step) == (60.0, None)


def test_a_loss_belongs_to_the_round_that_had_its_workers() -> None:
    """It is certain only while the nodes come for the next round."""
    members = tuple(Member(f"0000{n}-n{n}-0001000000000000-aaaa", n, 2) for n in (0, 2))
    joinable = RECORD.successor(members=members)
    frozen = propose(joinable, RoundEvent.FREEZE, "without n2", members=members[:1], lost=(2,))
    closed = propose_close(joinable, Outcome.TOO_FEW_NODES, "1 of at least 2 nodes is left", lost=(2,))
    running = replace(joinable, status=Status.FINAL)
    reopened = propose(running, RoundEvent.REOPEN, "n2 stopped its heartbeat", lost=(2,), round=4)
    for before, proposal, index in ((joinable, frozen, 2), (joinable, closed, 2), (running, reopened, 3)):
        (event,) = consequences(before, proposal, lambda uid: 7.0)
        assert isinstance(event, NodeLost)
        assert (event.round, event.host, event.age) == (index, "n2", 7.0)


def test_a_node_that_was_given_up_was_not_lost_because_of_its_silence() -> None:
    members = tuple(Member(f"0000{n}-n{n}-0001000000000000-aaaa", n, 2) for n in (0, 2))
    running = RECORD.successor(members=members)
    reopened = propose(replace(running, status=Status.FINAL), RoundEvent.REOPEN, "n2 has no agent", lost=(2,), round=4)
    (event,) = consequences(running, replace(reopened, gone=(2,)), lambda uid: 0.8)
    assert isinstance(event, NodeLost)
    assert event.reason == "no agent is started there any more"
