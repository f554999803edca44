"""Which caches are invalidated when, and which decisions wait for it."""

from __future__ import annotations

import pytest

from hpc_elastic.rendezvous.cluster_view import FIRST_SECONDS, LAST_SECONDS, CacheInvalidator, ClusterView
from hpc_elastic.rendezvous.coordinator import depends_on_missing_claims
from hpc_elastic.rendezvous.proposals import Proposal
from hpc_elastic.rendezvous.state import Member, NodeFailure, RoundEvent, RoundRecord, Status
from hpc_elastic.run.paths import Outcome
from tests.rigs.memory_store import SpyStore

RECORD = RoundRecord(number=7, epoch="e", term=1, leader="me", round=3, status=Status.FINAL)


def test_what_is_waited_for_is_invalidated_ever_more_rarely() -> None:
    store = SpyStore()
    invalidator = CacheInvalidator(store, "me", observes=False)
    times = []
    for tenth in range(1200):
        invalidator.while_waiting(RECORD, seen=4, now=tenth / 10)
        if store.invalidated:
            times.append(tenth / 10)
            store.invalidated.clear()
    gaps = [after - before for before, after in zip([0.0, *times], times, strict=False)]
    assert gaps == sorted(gaps)
    assert gaps[0] == pytest.approx(FIRST_SECONDS, abs=0.11)
    assert gaps[-1] == pytest.approx(LAST_SECONDS, abs=0.11)
    assert len(times) == 7


@pytest.mark.parametrize("change", ["a claim", "a record"])
def test_a_change_starts_it_anew(change: str) -> None:
    store = SpyStore()
    invalidator = CacheInvalidator(store, "me", observes=False)
    for second in range(60):
        invalidator.while_waiting(RECORD, seen=4, now=second)
    store.invalidated.clear()
    record, seen = (RECORD, 5) if change == "a claim" else (RECORD.successor(waiting=1), 4)
    invalidator.while_waiting(record, seen=seen, now=60.0)
    assert not store.invalidated, "only once the tick of the change is over"
    invalidator.while_waiting(record, seen=seen, now=60.0 + FIRST_SECONDS)
    assert store.invalidated


@pytest.mark.parametrize(
    ("record", "observes", "folders"),
    [
        (None, False, ["log"]),
        (RECORD, False, ["log", "gone", "round/000003", "round/000004"]),
        (RECORD.successor(status=Status.JOINABLE), False, ["log", "gone", "round/000003", "round/000002"]),
        (RECORD.successor(status=Status.JOINABLE, round=0), False, ["log", "gone", "round/000000"]),
        (RECORD.successor(leader="another"), False, []),
        (RECORD.successor(status=Status.CLOSED), False, []),
        (RECORD.successor(status=Status.CLOSED, leader="another"), True, ["node", "bye"]),
    ],
    ids=["before a record", "final", "joinable", "first round", "a member", "closed", "the supervisor at the end"],
)
def test_who_invalidates_what(record: RoundRecord | None, observes: bool, folders: list[str]) -> None:
    store = SpyStore()
    invalidator = CacheInvalidator(store, "me", observes=observes)
    invalidator.while_waiting(record, seen=0, now=0.0)
    invalidator.while_waiting(record, seen=0, now=FIRST_SECONDS)
    assert store.invalidated == folders


FAILURE = NodeFailure(node=0, fingerprint="f", failure_class="root", retryable=True, message="m")


@pytest.mark.parametrize(
    ("event", "changes", "failures", "waits"),
    [
        (RoundEvent.FREEZE, {"status": Status.FROZEN, "lost": ()}, {}, False),
        (RoundEvent.FREEZE, {"status": Status.FROZEN, "lost": (1,)}, {}, True),
        (RoundEvent.REOPEN, {"status": Status.JOINABLE, "lost": (1,)}, {}, True),
        (RoundEvent.REOPEN, {"status": Status.JOINABLE, "lost": (1,)}, {"a": FAILURE}, False),
        (RoundEvent.REOPEN, {"status": Status.JOINABLE, "lost": ()}, {}, False),
        (RoundEvent.ASK, {"status": Status.JOINABLE, "lost": (1,)}, {"a": FAILURE}, True),
        (RoundEvent.CLOSE, {"status": Status.CLOSED, "outcome": Outcome.TOO_FEW_NODES}, {}, True),
        (RoundEvent.CLOSE, {"status": Status.CLOSED, "outcome": Outcome.SUCCEEDED}, {}, False),
        (RoundEvent.CONFIRM, {}, {}, False),
    ],
)  # fmt: skip
def test_only_what_says_that_a_node_is_missing_waits(
    event: RoundEvent, changes: dict[str, object], failures: dict[str, NodeFailure], waits: bool
) -> None:
    record = RECORD.successor(members=(Member("me", 0, 1),))
    view = ClusterView(
        record=record, joined={}, acked={}, failures=failures, done=frozenset(), leaving={}, gone=frozenset(),
        dead=frozenset(), silent=frozenset(), answered=frozenset(), names={}, since_status=0.0, since_lost=0.0,
    )  # fmt: skip
    proposal = Proposal(event=event, record=record.successor(**changes), reason="")
    assert depends_on_missing_claims(view, proposal) is waits
