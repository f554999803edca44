"""What a participant sees: caches, what notifications say of files, and signs that nodes may come in."""

from __future__ import annotations

import pytest

from hpc_elastic.rendezvous.claims import ClaimKind, claim_key, read_claims
from hpc_elastic.rendezvous.cluster_view import (
    FIRST_SECONDS,
    LAST_SECONDS,
    MOST_PENDING,
    CacheInvalidator,
    ClusterView,
    GrowthSigns,
    PendingNotifications,
)
from hpc_elastic.rendezvous.coordinator import depends_on_missing_claims
from hpc_elastic.rendezvous.membership import record_name
from hpc_elastic.rendezvous.proposals import Proposal
from hpc_elastic.rendezvous.state import Member, NodeFailure, RoundEvent, RoundRecord, Status
from hpc_elastic.run.paths import Outcome
from tests.rigs.memory_store import MemoryStore, SpyStore

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


# -- what a notification said was written, and no listing shows: its folder is invalidated, once


JOIN = claim_key(4, ClaimKind.JOIN, "00001-n1-aa")
FAIL = claim_key(3, ClaimKind.FAIL, "00001-n1-aa")


@pytest.mark.parametrize(
    ("keys", "claims", "found"),
    [
        pytest.param([record_name(7)], None, set(), id="a record that was seen"),
        pytest.param([record_name(1)], None, set(), id="an old record"),
        pytest.param([record_name(8)], None, {"log"}, id="a record that no listing showed"),
        pytest.param(
            [JOIN, FAIL],
            {3: {"fail": ["00002-n2-bb"]}, 4: {}},
            {"round/000003", "round/000004"},
            id="claims of rounds that were listed, and did not show them",
        ),
        pytest.param(
            [JOIN, FAIL],
            {3: {"fail": ["00001-n1-aa"]}, 4: {"join": ["00001-n1-aa"]}},
            set(),
            id="claims that were seen",
        ),
        pytest.param([JOIN, FAIL], {5: {}, 6: {}}, set(), id="claims of a round that is over"),
        pytest.param([JOIN, record_name(9)], None, {"log"}, id="who lists no claims looks for none"),
        pytest.param(
            ["", "log/", "log/x", "log/-1", "log/²", "log/" + "9" * 30, "../../etc", "/", "a/b/c", "round/000004"],
            {3: {}, 4: {}},
            set(),
            id="nonsense",
        ),
    ],
)
def test_which_folders_are_invalidated(
    keys: list[str], claims: dict[int, dict[str, list[str]]] | None, found: set[str]
) -> None:
    about = PendingNotifications()
    about.add(keys)
    assert about.take_hidden(newest=7, claims=claims or {}) == found
    assert about.take_hidden(newest=7, claims=claims or {}) == set(), "once"


def test_the_list_has_an_end() -> None:
    about = PendingNotifications()
    about.add(record_name(number) for number in range(10 * MOST_PENDING))
    assert len(about.keys) == MOST_PENDING


# -- what members say about checkpoints while nodes wait


NEVER_SAVED = float("inf")
ROUND = 3


class Signs:
    """A coordinator's look at what others say."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.signs = GrowthSigns(self.store)

    def says(self, uid: str, kind: ClaimKind, serial: int, value: str = "{}") -> None:
        assert self.store.put_if_absent(claim_key(ROUND, kind, uid, serial=str(serial)), value)

    def look(self, now: float, *, waiting: bool = True, round_index: int = ROUND) -> tuple[float, float, bool]:
        self.signs.look(round_index, read_claims(self.store, round_index), waiting=waiting, now=now)
        return self.signs.since_waiting, self.signs.since_saved, self.signs.is_saving


def test_times_run_from_the_first_look_that_saw_somebody_wait() -> None:
    signs = Signs()
    assert signs.look(100.0, waiting=False) == (0.0, NEVER_SAVED, False)
    assert signs.look(110.0) == (0.0, NEVER_SAVED, False)
    assert signs.look(115.0) == (5.0, NEVER_SAVED, False)
    assert signs.look(116.0, waiting=False)[0] == 0.0
    assert signs.look(120.0)[0] == 0.0


def test_a_checkpoint_is_as_old_as_its_node_says_and_grows_older_here() -> None:
    signs = Signs()
    signs.look(100.0)
    signs.says("a", ClaimKind.SAVED, 0, '{"age":40.0}')
    assert signs.look(101.0)[1] == 40.0
    signs.says("b", ClaimKind.SAVED, 0, '{"age":0.5}')
    signs.says("c", ClaimKind.SAVED, 0, '{"age":90}')
    assert signs.look(110.0)[1] == 0.5
    assert signs.look(113.0)[1] == 3.5
    signs.signs.paused_for(10.0)
    assert signs.look(123.0)[1] == 3.5, "time for which this process was held up counts for nobody"
    assert signs.look(123.0)[0] == 13.0


def test_a_node_that_writes_a_checkpoint_is_waited_for_until_it_is_complete() -> None:
    signs = Signs()
    signs.look(100.0)
    signs.says("a", ClaimKind.SAVING, 0)
    signs.says("b", ClaimKind.SAVED, 0, '{"age":0}')
    assert signs.look(101.0)[2]
    signs.says("a", ClaimKind.SAVED, 0, '{"age":0}')
    assert not signs.look(102.0)[2]
    signs.says("a", ClaimKind.SAVING, 1)
    assert signs.look(103.0)[2]


def test_another_round_begins_with_nothing() -> None:
    signs = Signs()
    signs.says("a", ClaimKind.SAVING, 0)
    signs.says("b", ClaimKind.SAVED, 0, "damaged")
    assert signs.look(100.0) == (0.0, 0.0, True)
    assert signs.look(150.0, round_index=ROUND + 1) == (0.0, NEVER_SAVED, False)
