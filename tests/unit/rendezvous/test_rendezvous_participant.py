"""One participant, stepped by hand: what it reads and writes, whom it notifies, and when it does not trust itself."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from hpc_elastic.rendezvous.claims import ClaimKind, claim_key
from hpc_elastic.rendezvous.membership import NodeInfo, announcement
from hpc_elastic.rendezvous.participant import OBSERVER_NODE, Participant
from hpc_elastic.rendezvous.proposals import RestartDecision
from hpc_elastic.rendezvous.state import FailureMemory, NodeFailure, RendezvousStateError, RoundRecord, Status, new_uid
from hpc_elastic.rendezvous.succession import close_run
from hpc_elastic.run.events import RunEvent
from hpc_elastic.run.paths import Outcome
from hpc_elastic.run.spec import RendezvousSettings
from hpc_elastic.store.file_store import StoreWipedError
from tests.rigs.event_pairs import pair_of
from tests.rigs.fake_clock import FakeClock
from tests.rigs.memory_store import MemoryStore, SpyStore

SETTINGS = RendezvousSettings(min_nodes=2, max_nodes=2, expected_nodes=2)


class Seat:
    """A participant with all that it told and sent a notification."""

    def __init__(
        self,
        store: MemoryStore,
        clock: FakeClock,
        node: int,
        *,
        settings: RendezvousSettings = SETTINGS,
        decide_restart: Callable[..., RestartDecision] | None = None,
        port: int = 0,
    ) -> None:
        clock.now += 0.001
        self.info = NodeInfo(
            uid=new_uid(max(node, 0) if node != OBSERVER_NODE else 99999, f"n{node}", clock),
            node=node,
            host=f"n{node}",
            local_world_size=1,
            addresses=(f"10.0.0.{node + 1}", f"10.1.0.{node + 1}"),
            port=port or 7000 + node,
        )
        self.records: list[RoundRecord] = []
        self.events: list[tuple[str, Mapping[str, Any]]] = []
        self.events_before: dict[Status, list[str]] = {}
        """Status → the events before the newest record with it."""
        self.notified: list[tuple[str, int]] = []
        self.participant = Participant(
            run_id="unit",
            store=store,
            info=self.info,
            settings=settings,
            decide_restart=decide_restart
            or (lambda *_: RestartDecision(go_on=True, reason="", memory=FailureMemory())),
            clock=clock,
            rng=random.Random(node),
            listener=self,
            notifier=self,
        )

    def on_record(self, record: RoundRecord) -> None:
        self.records.append(record)
        self.events_before[record.status] = [name for name, _ in self.events]

    def on_event(self, event: RunEvent) -> None:
        self.events.append(pair_of(event))

    def notify(self, addresses: list[tuple[str, int]], about: str = "") -> None:
        self.notified += addresses

    def settle_down(self) -> None:
        """Step until nothing more is to be done at once."""
        for _ in range(50):
            if self.participant.step() > 0:
                return
        raise AssertionError("it never comes to rest")

    @property
    def record(self) -> RoundRecord:
        record = self.participant.record
        assert record is not None
        return record


@pytest.fixture
def store() -> SpyStore:
    return SpyStore()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def frozen(store: SpyStore, clock: FakeClock, **more: Any) -> tuple[Seat, Seat]:
    """Two participants in a frozen round; the first one coordinates."""
    first, second = Seat(store, clock, 0, **more), Seat(store, clock, 1, **more)
    for seat in (first, second):
        seat.participant.join()
    first.settle_down()
    second.settle_down()
    first.settle_down()
    assert first.record.status is Status.FROZEN
    second.settle_down()
    return first, second


def running(store: SpyStore, clock: FakeClock, **more: Any) -> tuple[Seat, Seat]:
    """Two participants in a final round."""
    first, second = frozen(store, clock, **more)
    second.participant.claims.confirm(0, "")
    second.settle_down()
    first.participant.claims.confirm(0, "10.0.0.1 29500 1")
    first.settle_down()
    second.settle_down()
    assert second.record.status is Status.FINAL
    return first, second


def advance(clock: FakeClock, seconds: float, *seats: Seat, tick: float = 1.0) -> None:
    """Let time pass while these participants are stepped, and the others are not."""
    end = clock.now + seconds
    while clock.now < end:
        clock.now += tick
        for seat in seats:
            seat.settle_down()


def boom(node: int) -> NodeFailure:
    return NodeFailure(node=node, fingerprint="F", failure_class="root", retryable=True, message="boom")


# -- joining and confirming


def test_it_says_who_it_is_and_that_it_lives_before_it_claims_anything(store: SpyStore, clock: FakeClock) -> None:
    seat = Seat(store, clock, 0)
    seat.participant.join()
    seat.participant.claims.report_done(0)
    seat.settle_down()
    kinds = [key.partition("/")[0] for key in store.writes]
    assert kinds.index("node") < kinds.index("round")
    assert store.get(f"hb/{seat.info.uid}") is not None
    (name,) = store.list("node")
    assert name == f"{seat.info.uid}+1.7000.0.0a000001.0a010001", "one listing tells all about all"
    assert json.loads(store.get(f"node/{name}") or "")["addrs"] == list(seat.info.addresses)


def test_the_first_node_opens_the_log_and_the_others_give_it_time(store: SpyStore, clock: FakeClock) -> None:
    third = Seat(store, clock, 3)
    third.participant.join()
    third.settle_down()
    assert third.participant.record is None
    advance(clock, 0.5, third, tick=0.1)
    assert third.participant.record is None
    advance(clock, 0.5, third, tick=0.1)
    assert (third.record.leader, third.record.round) == (third.info.uid, 0)


def test_nobody_opens_a_round_that_it_does_not_want_to_be_in(store: SpyStore, clock: FakeClock) -> None:
    seat = Seat(store, clock, 0)
    advance(clock, 10, seat)
    assert seat.participant.record is None


class Policy:
    """Lets the run go on, and remembers the messages of the failures that it was asked about last."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __call__(self, _: RoundRecord, failures: Sequence[NodeFailure]) -> RestartDecision:
        self.asked = [failure.message for failure in failures]
        return RestartDecision(go_on=True, reason="", memory=FailureMemory())


def test_a_round_is_frozen_with_a_claim_whose_announcement_was_lost(store: SpyStore, clock: FakeClock) -> None:
    policy = Policy()
    first, second = running(store, clock, decide_restart=policy)
    second.participant.claims.report_failure(0, replace(boom(1), message="the fact"))
    second.participant.step()
    first.participant.notifications.add([claim_key(0, ClaimKind.FAIL, second.info.uid)])
    first.participant.step()
    second.participant.claims.sum_up_failures(0, replace(boom(1), message="the evidence"))
    second.participant.join()
    second.settle_down()
    first.participant.join()
    first.participant.notifications.add([claim_key(1, ClaimKind.JOIN, second.info.uid)])
    first.participant.step()
    assert first.record.status is Status.FROZEN
    assert policy.asked == ["the evidence"]


def test_a_claim_is_made_again_until_the_store_takes_it(store: SpyStore, clock: FakeClock) -> None:
    _first, second = running(store, clock)
    store.refuse = lambda key: "/done+" in key
    second.participant.claims.report_done(0)
    for _ in range(3):
        with pytest.raises(OSError, match="Input/output"):
            second.participant.step()
    store.refuse = lambda key: False
    second.settle_down()
    assert f"done+{second.info.uid}" in store.list("round/000000")


def test_what_is_said_first_is_written_first(store: SpyStore, clock: FakeClock) -> None:
    """A join says that this node's failures of the round before are all told."""
    first, second = running(store, clock)
    first.participant.claims.report_failure(0, boom(0))
    first.settle_down()
    assert first.record.status is Status.JOINABLE
    store.writes.clear()
    second.participant.claims.sum_up_failures(0, boom(1))
    second.participant.join()
    second.settle_down()
    told, joined = (key.rpartition("/")[2].partition("+")[0] for key in store.writes)
    assert (told, joined) == ("sum", "join")


def test_the_agents_word_is_not_forgotten_when_the_coordinator_changes(store: SpyStore, clock: FakeClock) -> None:
    """The coordinator's node died, and the workers here with it: they have ended before anybody else takes over."""
    _, second = running(store, clock)
    second.participant.claims.report_failure(0, boom(1))
    second.participant.join()
    advance(clock, 24, second)
    assert second.record.leader == second.info.uid
    assert second.record.round == 1
    assert store.list("round/000001") == [f"join+{second.info.uid}"]


def test_it_joins_a_round_once(store: SpyStore, clock: FakeClock) -> None:
    first, second = running(store, clock)
    third = Seat(store, clock, 2)
    third.participant.join()
    store.writes.clear()
    advance(clock, 10, first, second, third)
    assert [key for key in store.writes if "/join+" in key] == [f"round/000001/join+{third.info.uid}"]


def test_a_round_is_not_final_before_the_first_slots_word_can_be_read(store: SpyStore, clock: FakeClock) -> None:
    """Listed, and yet ENOENT: without the master's address nobody could start."""
    first, second = frozen(store, clock)
    second.participant.claims.confirm(0, "")
    second.settle_down()
    store.hidden = {f"round/000000/ack+{first.info.uid}"}
    first.participant.claims.confirm(0, "10.0.0.1 29500 1")
    advance(clock, 10, first, second)
    assert first.record.status is Status.FROZEN
    store.hidden = set()
    advance(clock, 1, first)
    assert first.record.status is Status.FINAL
    assert first.record.master == "10.0.0.1 29500 1"


def test_of_the_confirmations_only_the_first_slots_is_read(store: SpyStore, clock: FakeClock) -> None:
    first, second = frozen(store, clock)
    second.participant.claims.confirm(0, "")
    second.settle_down()
    store.reads.clear()
    first.settle_down()
    first.participant.claims.confirm(0, "10.0.0.1 29500 1")
    first.settle_down()
    assert first.record.status is Status.FINAL
    advance(clock, 5, first, second)
    assert {key for key in store.reads if "/ack+" in key} == {f"round/000000/ack+{first.info.uid}"}
    store.reads.clear()
    advance(clock, 5, first, second)
    assert not [key for key in store.reads if "/ack+" in key], "nothing is read again while workers run"


def test_an_unreadable_claim_of_a_failure_is_one_all_the_same(store: SpyStore, clock: FakeClock) -> None:
    first, second = running(store, clock)
    store.put_if_absent(f"round/000000/fail+{second.info.uid}", "{")
    first.settle_down()
    assert first.record.status is Status.JOINABLE
    assert "n1" in first.record.reason


@pytest.mark.parametrize(("hidden", "counts"), [(False, "sum"), (True, "first word")])
def test_the_sum_counts_and_the_first_word_where_it_can_not_be_read(
    store: SpyStore, clock: FakeClock, hidden: bool, counts: str
) -> None:
    policy = Policy()
    first, second = running(store, clock, decide_restart=policy)
    second.participant.claims.report_failure(0, replace(boom(1), message="first word", failure_class="unknown"))
    second.participant.claims.sum_up_failures(0, replace(boom(1), message="sum"))
    store.hidden = {f"round/000000/sum+{second.info.uid}"} if hidden else set()
    for seat in (first, second):
        seat.participant.join()
    advance(clock, 3, second, first)
    assert policy.asked == [counts]


# -- the store


def test_a_store_that_was_replaced_is_noticed_with_the_next_beat(store: SpyStore, clock: FakeClock) -> None:
    first, _ = running(store, clock)
    store.delete("epoch/id")
    store.put_if_absent("epoch/id", "another")
    for seat in (first, Seat(store, clock, 2)):
        with pytest.raises(StoreWipedError, match="was replaced"):
            advance(clock, 5, seat)


def test_a_store_that_is_gone_is_noticed_and_a_stale_look_is_not_taken_for_it(
    store: SpyStore, clock: FakeClock
) -> None:
    first, second = running(store, clock)
    store.hidden = {"epoch/id"}  # ENOENT or ESTALE for a moment: what some filesystems say of what is there
    clock.now += 4
    with pytest.raises(OSError, match="epoch"):
        first.participant.step()
    store.hidden = set()
    advance(clock, 30, first, second)
    assert first.record.status is Status.FINAL
    store.hidden = {"epoch/id"}
    clock.now += 4
    with pytest.raises(OSError, match="epoch"):
        first.participant.step()
    clock.now += 4
    with pytest.raises(StoreWipedError, match="has lost its epoch while"):
        first.participant.step()


@pytest.mark.parametrize("raw", ['{"v": 2}', "{}", "garbage"])
def test_a_record_that_can_not_be_understood_ends_the_participant(store: SpyStore, clock: FakeClock, raw: str) -> None:
    first, _ = running(store, clock)
    store.put_if_absent(f"log/{first.record.number + 1:016d}", raw)
    with pytest.raises(RendezvousStateError, match=rf"record {first.record.number + 1} is"):
        first.participant.step()


# -- coordinating


def test_a_coordinator_without_a_beat_of_its_own_decides_nothing(store: SpyStore, clock: FakeClock) -> None:
    """Others may be taking over. The beats fail, the rest of the store works."""
    first, second = running(store, clock)
    second.participant.claims.report_done(0)
    second.settle_down()
    first.participant.claims.report_done(0)
    number = first.record.number

    def late(key: str) -> bool:
        return key.startswith("hb/")

    store.refuse = late
    clock.now += 13  # past 0.6 of the heartbeat's life
    with pytest.raises(OSError, match="Input/output"):
        first.participant.step()
    assert first.record.number == number

    def slow_look(key: str) -> None:
        if key == "epoch/id":
            clock.now += 13  # the beat was made, and then the filesystem stood still

    store.refuse = lambda key: False
    store.on_read = slow_look
    clock.now += 4
    first.participant.step()
    assert first.record.number == number
    store.on_read = lambda key: None
    advance(clock, 1, first)
    assert first.record.status is Status.CLOSED


def test_who_stops_its_heartbeat_is_lost_and_has_the_last_call_to_come_back(store: SpyStore, clock: FakeClock) -> None:
    first, _second = running(store, clock)
    first.participant.join()
    advance(clock, 19, first)
    assert first.record.status is Status.FINAL
    advance(clock, 3, first)
    assert (first.record.status, first.record.lost) == (Status.JOINABLE, (1,))
    (lost,) = [fields for event, fields in first.events if event == "node_lost"]
    assert (lost["round"], lost["node"], lost["host"]) == (0, 1, "n1")
    assert 20 < lost["age"] < 23
    advance(clock, 27, first)
    assert first.record.status is Status.JOINABLE
    advance(clock, 4, first)
    assert first.record.outcome is Outcome.TOO_FEW_NODES


def test_the_age_of_who_was_in_touch_counts_from_when_it_was_heard_last(store: SpyStore, clock: FakeClock) -> None:
    """Its heartbeat has been the same for much longer: who is in touch rarely changes it."""
    first, second = running(store, clock)
    for _ in range(25):
        clock.now += 1
        first.participant.detector.heard([second.info.uid])
        first.settle_down()
    advance(clock, 12, first)
    assert first.record.lost == (1,)
    (lost,) = [fields for event, fields in first.events if event == "node_lost"]
    assert 7 <= lost["age"] < 12


def test_nobody_waits_for_the_goodbye_of_a_spare_that_has_died(store: SpyStore, clock: FakeClock) -> None:
    observer = Seat(store, clock, OBSERVER_NODE)
    observer.settle_down()
    first, second = running(store, clock)
    spare = Seat(store, clock, 2)
    spare.participant.join()
    spare.settle_down()
    first.settle_down()
    assert first.record.waiting == 1
    advance(clock, 25, first, second)
    assert (first.record.waiting, first.record.lost) == (0, ())
    for seat in (first, second):
        seat.participant.claims.report_done(0)
        seat.settle_down()
    first.settle_down()
    assert (first.record.status, first.record.outcome) == (Status.CLOSED, Outcome.SUCCEEDED)
    (lost,) = [fields for event, fields in first.events if event == "spare_lost"]
    assert (lost["round"], lost["node"], lost["host"]) == (0, 2, "n2")
    assert 20 < lost["age"] <= 25
    # An agent that reads that the run is closed is about to end, and takes in no more events.
    assert first.events_before[Status.CLOSED][-2:] == ["closed", "spare_lost"]
    for seat in (first, second):
        seat.participant.claims.deregister()
        seat.settle_down()
    observer.settle_down()
    assert "agents_departed" in [event for event, _ in observer.events]


def test_a_node_that_dies_on_its_way_to_the_next_round_has_it_too(store: SpyStore, clock: FakeClock) -> None:
    """However long the round before had lasted."""
    first, second = running(store, clock)
    advance(clock, 500, first, second)
    first.participant.claims.report_failure(0, boom(0))
    first.participant.join()
    advance(clock, 21, first)
    assert first.record.status is Status.JOINABLE
    advance(clock, 25, first)
    assert first.record.status is Status.JOINABLE, "its new agent may just be starting"
    advance(clock, 8, first)
    assert first.record.outcome is Outcome.TOO_FEW_NODES


def test_one_that_was_put_out_alive_has_it_as_well(store: SpyStore, clock: FakeClock) -> None:
    first, second = frozen(store, clock)
    first.participant.claims.confirm(0, "10.0.0.1 29500 1")
    first.participant.join()
    began = clock.now
    while first.record.round == 0:
        assert clock.now - began < 45
        advance(clock, 1, first, second)
    assert first.record.lost == (1,)
    assert "did not confirm" in first.record.reason
    advance(clock, 27, first, second)
    assert first.record.status is Status.JOINABLE
    second.participant.join()
    advance(clock, 2, second, first)
    assert first.record.status is Status.FROZEN


def test_a_question_to_one_node_does_not_start_the_last_call_anew(store: SpyStore, clock: FakeClock) -> None:
    settings = replace(SETTINGS, max_nodes=3, expected_nodes=3)
    first, second = Seat(store, clock, 0, settings=settings), Seat(store, clock, 1, settings=settings)
    began = clock.now
    for seat in (first, second):
        seat.participant.join()
        seat.settle_down()
    numbers = set()
    while first.record.status is Status.JOINABLE:
        assert clock.now - began < 32
        if int(clock.now - began) % 10 == 0:
            first.participant.detector.heard([second.info.uid])  # then silent again, and asked
        advance(clock, 1, first, second)
        numbers.add(first.record.number)
    assert clock.now - began > 29
    assert len(numbers) > 4, "it was asked several times"


def test_time_in_which_the_coordinator_stood_still_is_nobodys_fault(store: SpyStore, clock: FakeClock) -> None:
    first, second = running(store, clock)
    first.participant.join()
    advance(clock, 22, first)
    assert first.record.lost == (1,)
    clock.now += 3000  # SIGSTOP, or a frozen filesystem
    first.settle_down()
    assert first.record.status is Status.JOINABLE, "neither the last call nor the timeout ran on"
    second.participant.join()
    advance(clock, 4, first, second)
    assert first.record.status is Status.FROZEN


def test_the_next_member_takes_over_when_the_coordinator_is_silent(store: SpyStore, clock: FakeClock) -> None:
    first, second = running(store, clock)
    advance(clock, 20, second)
    assert second.record.leader == first.info.uid
    advance(clock, 2, second)
    assert second.record.leader == second.info.uid
    assert second.record.term == 2
    assert second.events[0][0] == "coordinator_changed"
    number = second.record.number
    first.participant.claims.report_failure(0, boom(0))
    first.settle_down()
    assert first.record.leader == second.info.uid, "it reads that it was deposed, and leaves the rest to the other"
    assert first.record.number == number


def test_who_only_waits_leaves_the_taking_over_to_the_members(store: SpyStore, clock: FakeClock) -> None:
    first, second = running(store, clock)
    waiting = Seat(store, clock, 2)
    waiting.participant.join()
    advance(clock, 2, first, second, waiting)
    advance(clock, 23, waiting)
    assert waiting.record.leader == first.info.uid
    advance(clock, 5, waiting)
    assert waiting.record.leader == waiting.info.uid, "but where they are all gone, it is not too shy"


def test_the_log_is_compacted_by_the_coordinator(store: SpyStore, clock: FakeClock) -> None:
    first, second = running(store, clock)
    while first.record.number < 100:
        number = first.record.round
        first.participant.claims.report_failure(number, boom(0))
        first.settle_down()
        for seat in (first, second):
            seat.participant.join()
            seat.settle_down()
        for seat in (first, second, first):
            seat.settle_down()
        for seat, master in ((second, ""), (first, "10.0.0.1 29500 1"), (second, "")):
            if seat is first or seat.record.status is Status.FROZEN:
                seat.participant.claims.confirm(seat.record.round, master)
            seat.settle_down()
        assert first.record.round == number + 1
    assert len(store.list("log")) < 64


# -- beats, and the question through the files


def three(store: SpyStore, clock: FakeClock, *, heard: bool = True) -> tuple[Seat, Seat, Seat]:
    """Three participants in a final round; the first coordinates, and has heard the others a moment ago."""
    settings = replace(SETTINGS, max_nodes=3, expected_nodes=3)
    seats = [Seat(store, clock, node, settings=settings) for node in range(3)]
    for seat in seats:
        seat.participant.join()
    for seat in (*seats, seats[0]):
        seat.settle_down()
    for seat, master in zip(seats, ("10.0.0.1 29500 1", "", ""), strict=True):
        seat.participant.claims.confirm(0, master)
    for seat in (*reversed(seats), *seats):
        seat.settle_down()
    first, second, third = seats
    assert third.record.status is Status.FINAL
    if heard:
        first.participant.detector.heard([second.info.uid, third.info.uid])
    return first, second, third


def asked(store: SpyStore, clock: FakeClock, *, heard: bool = True) -> tuple[Seat, Seat, Seat]:
    """Three participants in a final round. The second one has fallen silent, and the coordinator asks it."""
    first, second, third = three(store, clock, heard=heard)
    if not heard:
        first.participant.detector.heard([second.info.uid])
    for _ in range(4):
        if heard:
            first.participant.detector.heard([third.info.uid])
        advance(clock, 1, first, third)
    assert (first.record.suspects, first.record.status) == ((second.info.uid,), Status.FINAL)
    return first, second, third


def test_a_node_that_falls_silent_is_asked_through_the_files(store: SpyStore, clock: FakeClock) -> None:
    first, second, third = asked(store, clock)
    second.notified.clear()
    before = store.get(f"hb/{second.info.uid}")
    second.settle_down()
    assert store.get(f"hb/{second.info.uid}") != before, "it answers at once"
    assert ("10.0.0.1", 7000) in second.notified, "and notifies who asked"
    first.participant.detector.heard([third.info.uid])
    advance(clock, 1, first)
    assert first.record.suspects == ()
    for _ in range(10):
        first.participant.detector.heard([third.info.uid])
        advance(clock, 1, first, second, third)
    assert first.record.suspects == (), "no packet of its comes through, and that was said once"
    assert first.record.round == 0


def test_all_nodes_answer_at_once_where_a_later_attempt_supersedes_theirs(store: SpyStore, clock: FakeClock) -> None:
    """Its supervisor waits for those that answer."""
    nodes = three(store, clock, heard=False)
    before = [store.get(f"hb/{node.info.uid}") for node in nodes]
    close_run(store, "unit", Outcome.SUPERSEDED, "superseded by attempt 1 on n9")
    for node in nodes:
        node.settle_down()
        node.settle_down()
    after = [store.get(f"hb/{node.info.uid}") for node in nodes]
    assert all(old != new for old, new in zip(before, after, strict=True))
    for node in nodes:
        node.settle_down()
    assert [store.get(f"hb/{node.info.uid}") for node in nodes] == after, "once"


def restart_without_third(store: SpyStore, clock: FakeClock, *, seconds: int, third_steps: bool) -> Seat:
    """A worker fails, and two nodes join the next round; the third one is heard, and still ends its workers."""
    first, second, third = three(store, clock)
    third.participant.detector.heard([first.info.uid])
    first.participant.claims.report_failure(0, boom(0))
    for _ in range(seconds):
        for seat in (first, second):
            if seat.record.status is Status.FINAL or seat.record.round == 1:
                seat.participant.join()
        first.participant.detector.heard([second.info.uid, third.info.uid])
        third.participant.detector.heard([first.info.uid])
        advance(clock, 1, first, second, *([third] if third_steps else []))
    return first


def test_a_member_whose_files_hang_holds_the_others_up_for_the_lease_and_the_question() -> None:
    first = restart_without_third(SpyStore(), FakeClock(), seconds=27, third_steps=False)
    assert (first.record.status, len(first.record.suspects)) == (Status.JOINABLE, 1)
    first = restart_without_third(SpyStore(), FakeClock(), seconds=35, third_steps=False)
    assert (first.record.status, first.record.lost) == (Status.FROZEN, (2,))
    (reason,) = [facts["reason"] for name, facts in first.events if name == "node_lost"]
    assert reason.startswith("its files hang: its beats come, its heartbeat in the run directory has not changed for 3")


def test_a_member_that_ends_its_workers_slowly_answers_in_the_files_and_is_waited_for(
    store: SpyStore, clock: FakeClock
) -> None:
    first = restart_without_third(store, clock, seconds=100, third_steps=True)
    assert (first.record.round, first.record.status, first.record.lost) == (1, Status.JOINABLE, ())
    asked = [name for name, _ in first.events if name == "nodes_asked"]
    assert 2 <= len(asked) <= 8, "a question and its answer, at 10, 20, 40 and 80 s at most"


def test_a_read_that_blocks_makes_nobody_late_with_the_answer(store: SpyStore, clock: FakeClock) -> None:
    """What was read before the filesystem stood still says nothing about what came after."""
    first, second, third = asked(store, clock, heard=False)

    def stand_still(key: str) -> None:
        if key == f"hb/{third.info.uid}" and not store.hidden:
            store.hidden = {"once"}
            clock.now += 8  # second's cell was read just before this
            second.settle_down()

    store.on_read = stand_still
    clock.now += 1
    first.participant.step()
    assert store.hidden, "the read did block"
    store.on_read = lambda key: None
    first.settle_down()
    assert first.record.round == 0
    assert first.record.lost == ()


def test_a_member_looks_with_the_beat_that_comes_a_little_before_its_look_is_due(
    store: SpyStore, clock: FakeClock
) -> None:
    """A step right before it would find nothing due, and be followed by another one."""
    first, second = running(store, clock)
    advance(clock, 5, first)
    second.participant.detector.heard([first.info.uid])
    second.settle_down()
    for _ in range(8):
        clock.now += 0.9996
        second.participant.detector.heard([first.info.uid])
        assert second.participant.step(notified=False) > 0.5


def test_a_read_that_blocks_makes_no_coordinator_silent(store: SpyStore, clock: FakeClock) -> None:
    """Its beats were waiting in the socket meanwhile."""
    first, second, third = three(store, clock)
    advance(clock, 5, first, third)
    second.participant.detector.heard([first.info.uid])

    def stand_still(key: str) -> None:
        if key == f"hb/{first.info.uid}" and not store.hidden:
            store.hidden = {"once"}
            clock.now += 8

    store.on_read = stand_still
    clock.now += 1
    second.participant.step()
    assert store.hidden, "the read did block"
    second.participant.detector.heard([first.info.uid])
    second.settle_down()
    assert second.record.leader == first.info.uid


def test_a_coordinator_that_falls_silent_is_asked_and_stays_in_office_if_it_answers(
    store: SpyStore, clock: FakeClock
) -> None:
    """Packets are lost on the way to one node: who took over for that would take the others' beats away."""
    first, second, third = three(store, clock)
    for seat in (second, third):
        seat.participant.detector.heard([first.info.uid])
    for _ in range(4):
        first.participant.detector.heard([third.info.uid])
        third.participant.detector.heard([first.info.uid])
        advance(clock, 1, second)
    assert (second.record.leader, second.record.term) == (first.info.uid, 1)
    assert set(second.record.suspects) == {first.info.uid, third.info.uid}, "who died with it is to be missed"
    number = second.record.number
    for _ in range(15):
        first.participant.detector.heard([second.info.uid, third.info.uid])
        third.participant.detector.heard([first.info.uid])
        advance(clock, 1, first, third, second)
    assert second.record.suspects == ()
    assert (second.record.leader, second.record.status) == (first.info.uid, Status.FINAL)
    assert second.record.number == number + 1, "asked once, and that was the answer"


def test_of_all_that_do_not_hear_the_coordinator_the_first_that_lives_reports_it(
    store: SpyStore, clock: FakeClock
) -> None:
    """Its files answer, and Slurm may have given it up: one asks. The coordinator reports all it does not hear."""
    seats = first, _, third = three(store, clock)
    uids = [seat.info.uid for seat in seats]
    for seat in seats:
        seat.participant.detector.heard(set(uids) - {seat.info.uid})

    def reported(seat: Seat) -> set[tuple[int, ...]]:
        return {tuple(fields["nodes"]) for name, fields in seat.events if name == "nodes_cut_off"}

    advance(clock, 20, *seats)
    assert [reported(seat) for seat in seats] == [{(1, 2)}, {(0,)}, set()]
    advance(clock, 20, first, third)
    assert reported(third) == {(0,)}, "the second one does not live any more"
    third.participant.detector.heard(uids[:1])
    third.events.clear()
    advance(clock, 2, third)
    assert reported(third) == set()


def test_a_coordinator_that_does_not_answer_is_succeeded(store: SpyStore, clock: FakeClock) -> None:
    first, second, third = three(store, clock)
    for seat in (second, third):
        seat.participant.detector.heard([first.info.uid])
    began = clock.now
    while second.record.leader != second.info.uid:
        assert clock.now - began < 8.5
        advance(clock, 0.5, second, third, tick=0.5)
    assert clock.now - began > 6, "it had time to answer"
    second.settle_down()
    assert second.record.lost == (0,), "the third one has answered meanwhile"


@pytest.mark.parametrize("notified", [True, False])
def test_a_coordinator_that_says_goodbye_is_succeeded_at_once(
    store: SpyStore, clock: FakeClock, notified: bool
) -> None:
    first, second, _third = three(store, clock)
    second.participant.detector.heard([first.info.uid])
    first.notified.clear()
    first.participant.claims.deregister()
    first.settle_down()
    assert {"10.0.0.2", "10.0.0.3"} <= {host for host, _ in first.notified}, "all are told"
    began = clock.now
    if notified:
        second.participant.notifications.add([f"bye/{first.info.uid}"])
    while second.record.leader != second.info.uid:
        assert clock.now - began < (1.5 if notified else 4)
        advance(clock, 0.25, second, tick=0.25)


def test_who_is_notified_of_a_goodbye_wakes_when_its_turn_has_come(store: SpyStore, clock: FakeClock) -> None:
    """Not with the next poll: nodes wait for the round that it had opened."""
    first, second, _third = three(store, clock)
    second.participant.detector.heard([first.info.uid])
    first.participant.claims.deregister()
    first.settle_down()
    began = clock.now
    second.participant.notifications.add([f"bye/{first.info.uid}"])
    wait = second.participant.step()
    while second.record.leader != second.info.uid:
        clock.now += max(wait, 0.001)
        second.participant.detector.heard([first.info.uid])  # a late packet
        wait = second.participant.step(notified=False)
        assert clock.now - began < 0.5


def test_a_notification_about_a_goodbye_that_nobody_said_deposes_nobody(store: SpyStore, clock: FakeClock) -> None:
    first, second, _third = three(store, clock)
    for _ in range(5):
        second.participant.detector.heard([first.info.uid])
        second.participant.notifications.add([f"bye/{first.info.uid}"])
        advance(clock, 1, first, second)
    assert second.record.leader == first.info.uid


def test_who_was_asked_and_is_heard_again_stays_in_though_its_cell_stands_still(
    store: SpyStore, clock: FakeClock
) -> None:
    first, second, third = three(store, clock)
    for second_at in range(30):
        first.participant.detector.heard([third.info.uid, *([second.info.uid] if second_at > 5 else [])])
        advance(clock, 1, first, third)
        if second_at == 5:
            assert first.record.suspects == (second.info.uid,)
    assert first.record.round == 0
    assert first.record.suspects == ()


def test_who_answers_too_late_but_is_heard_is_not_put_out_for_it(store: SpyStore, clock: FakeClock) -> None:
    """Both looks of the coordinator fall into the same second: the deadline has passed, and its beat has come."""
    first, second, third = asked(store, clock)
    clock.now += 6
    first.participant.detector.heard([second.info.uid, third.info.uid])
    first.settle_down()
    assert first.record.round == 0


def test_a_coordinator_that_stood_still_asks_nobody_for_that(store: SpyStore, clock: FakeClock) -> None:
    first, second, third = three(store, clock)
    number = first.record.number
    clock.now += 60
    first.settle_down()
    assert first.record.number == number
    first.participant.detector.heard([second.info.uid, third.info.uid])
    advance(clock, 2, first, second, third)
    assert first.record.number == number


def beaten(seat: Seat) -> list[tuple[str, int]]:
    plan = seat.participant.beats()
    return [*plan.heard, *plan.unheard]


def test_beats_go_to_the_coordinator_and_from_it_to_all(store: SpyStore, clock: FakeClock) -> None:
    first, second, _third = three(store, clock)
    assert {port for _, port in beaten(second)} == {7000}
    assert {port for _, port in beaten(first)} == {7001, 7002}
    waiting = Seat(store, clock, 5)
    waiting.participant.join()
    waiting.settle_down()
    first.settle_down()
    assert {port for _, port in beaten(first)} == {7001, 7002, 7005}, "who waits hears it too"
    observer = Seat(store, clock, OBSERVER_NODE)
    observer.settle_down()
    assert beaten(observer) == []
    first.participant.to_all.close(Outcome.SUCCEEDED, "done")
    first.settle_down()
    assert beaten(first) == []


# -- the observer


def test_an_observer_looks_and_closes_and_never_coordinates(store: SpyStore, clock: FakeClock) -> None:
    observer = Seat(store, clock, OBSERVER_NODE)
    advance(clock, 5, observer)
    assert observer.participant.record is None
    first, second = running(store, clock)
    advance(clock, 60, observer)
    assert observer.record.leader == first.info.uid
    observer.participant.claims.give_up_node(1)
    observer.participant.to_all.close(Outcome.CANCELLED, "Ctrl-C")
    observer.participant.to_all.close(Outcome.FAILED, "said later")
    observer.settle_down()
    assert store.list("gone") == ["00001"]
    for seat in (observer, second):
        seat.settle_down()
        assert seat.record.status is Status.CLOSED
        assert (seat.record.outcome, seat.record.reason) == (Outcome.CANCELLED, "Ctrl-C")


def test_a_close_that_was_asked_for_too_early_is_done_when_there_is_something_to_close(
    store: SpyStore, clock: FakeClock
) -> None:
    observer = Seat(store, clock, OBSERVER_NODE)
    observer.participant.to_all.close(Outcome.CANCELLED, "Ctrl-C")
    observer.settle_down()
    first = Seat(store, clock, 0)
    first.participant.join()
    first.settle_down()
    observer.settle_down()
    assert observer.record.outcome is Outcome.CANCELLED


def test_the_first_one_to_close_wins(store: SpyStore, clock: FakeClock) -> None:
    first, second = running(store, clock)
    second.participant.to_all.close(Outcome.PREEMPTED, "notice")
    second.settle_down()
    first.participant.to_all.close(Outcome.CANCELLED, "later")
    first.settle_down()
    assert first.record == second.record
    assert first.record.outcome is Outcome.PREEMPTED


@pytest.mark.parametrize("crashes", [True, False])
def test_a_node_that_crashes_while_the_run_ends_is_not_waited_for(
    store: SpyStore, clock: FakeClock, crashes: bool
) -> None:
    """In the middle of a save, say. One whose workers take their time, and whose agent lives, is."""
    observer = Seat(store, clock, OBSERVER_NODE)
    observer.settle_down()
    first, second = running(store, clock)
    first.participant.to_all.close(Outcome.PREEMPTED, "the others have saved")
    first.settle_down()
    first.participant.claims.deregister()
    second.settle_down()
    first.settle_down()
    alive = (observer,) if crashes else (observer, second)
    advance(clock, 5, *alive)
    assert "agents_departed" not in [event for event, _ in observer.events]
    advance(clock, 7 if crashes else 60, *alive)
    assert ("agents_departed" in [event for event, _ in observer.events]) is crashes


# -- ringing


def test_a_claim_notifies_the_coordinator_and_a_record_notifies_everybody(store: SpyStore, clock: FakeClock) -> None:
    observer = Seat(store, clock, OBSERVER_NODE)
    observer.settle_down()
    info = replace(observer.info, uid="00005-n5-0000000000000001-abcd", node=5, port=0)
    store.put_if_absent(f"node/{announcement(info)}", "{}")
    first, second = frozen(store, clock)
    assert ("10.0.0.2", 7001) in first.notified, "of each node all addresses: one may not be reached"
    assert ("10.1.0.2", 7001) in first.notified
    assert (observer.info.addresses[0], observer.info.port) in first.notified
    assert not [port for _, port in first.notified if port in (0, first.info.port)], (
        "not itself, nor who has no notifier"
    )
    first.notified.clear()
    first.participant.claims.confirm(0, "10.0.0.1 29500 1")
    first.settle_down()
    assert first.notified == [], "its own claim"
    second.notified.clear()
    second.participant.claims.confirm(0, "")
    second.settle_down()
    assert set(second.notified) == {("10.0.0.1", 7000), ("10.1.0.1", 7000)}
    late = Seat(store, clock, 2)
    late.participant.join()
    late.settle_down()
    assert ("10.0.0.1", 7000) in late.notified


# -- how long it may be let alone


def test_it_asks_to_be_stepped_before_its_beat_is_due_and_soon_while_nodes_come(
    store: SpyStore, clock: FakeClock
) -> None:
    first, second = running(store, clock, settings=replace(SETTINGS, poll_interval=30.0))
    for seat in (first, second):
        assert 0 < seat.participant.step() <= SETTINGS.heartbeat_interval
    alone = Seat(SpyStore(), clock, 0)
    alone.participant.join()
    alone.settle_down()
    assert 0 < alone.participant.step() <= 0.25
    # Only the observer has something to wait for after the end; a thousand agents must not list folders then.
    first.participant.to_all.close(Outcome.SUCCEEDED, "done")
    first.settle_down()
    assert first.participant.step() >= 0.5
