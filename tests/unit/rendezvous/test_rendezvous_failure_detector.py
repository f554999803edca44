"""One participant's failure detector: packets, questions, and heartbeats that are read on one clock."""

from __future__ import annotations

import pytest

from hpc_elastic.rendezvous.failure_detector import INVALIDATE_SECONDS, FailureDetector, Heartbeat, HeartbeatAges
from hpc_elastic.rendezvous.schedule import poll_intervals
from hpc_elastic.run.spec import RendezvousSettings
from tests.rigs.fake_clock import FakeClock
from tests.rigs.memory_store import MemoryStore

SETTINGS = RendezvousSettings(min_nodes=1, max_nodes=4, expected_nodes=4)
INTERVALS = poll_intervals(SETTINGS)


class FaultyStore(MemoryStore):
    """Refuses what a test names; does not find again what it once did not find, until its folder is invalidated."""

    def __init__(self) -> None:
        super().__init__()
        self.refuses: set[str] = set()
        self.missing: set[str] = set()
        self.invalidations: list[str] = []

    def version(self, key: str) -> str | None:
        if "version" in self.refuses:
            raise OSError(5, "Input/output error")
        if key not in self.missing and super().version(key) is None:
            self.missing.add(key)
        return None if key in self.missing else super().version(key)

    def overwrite(self, key: str, value: str) -> None:
        if "overwrite" in self.refuses:
            raise OSError(5, "Input/output error")
        super().overwrite(key, value)

    def invalidate(self, folder: str) -> None:
        self.invalidations.append(folder)
        self.missing.clear()


class Observer:
    """A detector on a clock that a test moves, with one step at each moment."""

    def __init__(self) -> None:
        self.store = FaultyStore()
        self.clock = FakeClock()
        self.detector = FailureDetector(self.store, SETTINGS, INTERVALS, self.clock)

    def after(self, seconds: float, *, closely: str = "") -> FailureDetector:
        self.clock.now += seconds
        self.detector.begin_step()
        self.detector.look_at([closely] if closely else [], closely=bool(closely))
        return self.detector

    def hear(self, *uids: str, hears_us: bool | None = True) -> None:
        self.detector.heard(uids, hears_us=hears_us)
        self.detector.begin_step()


@pytest.fixture
def observer() -> Observer:
    return Observer()


def test_a_node_that_was_never_heard_is_not_silent(observer: Observer) -> None:
    assert observer.after(100.0).silence("a") is None
    observer.hear("a")
    assert observer.after(1.0).silence("a") == 1.0
    assert observer.detector.hears("a")
    assert observer.after(INTERVALS.silence).is_silent("a")
    observer.detector.forget("a")
    assert not observer.after(1.0).is_silent("a")
    observer.detector.expect(["a"])
    assert observer.after(INTERVALS.silence + 0.1).is_silent("a"), "its beats were expected"


def test_connected_are_those_that_hear_each_other(observer: Observer) -> None:
    assert not observer.detector.is_connected("a")
    observer.hear("a", hears_us=None)
    assert not observer.detector.is_connected("a")
    observer.hear("a", hears_us=True)
    assert observer.detector.is_connected("a")
    observer.hear("a", hears_us=None)
    assert observer.detector.is_connected("a"), "a notification says nothing about it"
    observer.hear("a", hears_us=False)
    assert not observer.detector.is_connected("a")


def test_packets_that_this_host_dropped_make_nobody_silent(observer: Observer) -> None:
    observer.hear("a")
    observer.after(INTERVALS.silence + 1)
    observer.detector.packets_dropped_for(2.0)
    assert observer.detector.silence("a") == INTERVALS.silence - 1
    observer.detector.packets_dropped_for(1000.0)
    assert observer.detector.silence("a") == 0.0, "never in the future"


def suspected(observer: Observer) -> Heartbeat:
    """Node a was heard, fell silent, and is asked; returns its heartbeat."""
    heartbeat = Heartbeat(observer.store, "a")
    heartbeat.beat(0.0)
    observer.hear("a")
    observer.after(INTERVALS.silence + 0.1, closely="a")
    observer.detector.asked(["a"], observer.clock.now)
    return heartbeat


def test_a_suspect_that_does_not_answer_is_dead(observer: Observer) -> None:
    suspected(observer)
    observer.after(INTERVALS.answer, closely="a")
    observer.detector.asked(["a", "b"], observer.clock.now)  # the question to `a` counts from when it was first asked
    assert not observer.detector.is_dead("a")
    assert observer.after(0.1, closely="a").is_dead("a")
    assert not observer.detector.is_dead("a", patience=1.0)
    observer.detector.asked([], observer.clock.now)
    assert not observer.detector.is_dead("a"), "not asked any more"


def test_a_suspect_that_answers_had_lost_its_link(observer: Observer) -> None:
    heard_at = observer.clock.now
    heartbeat = suspected(observer)
    assert observer.detector.answered(["a"]) == frozenset()
    heartbeat.beat(1.0)
    assert observer.after(1.0, closely="a").answered(["a"]) == {"a"}
    assert observer.detector.silence("a") is None, "it has to be heard again first"
    assert not observer.after(100.0, closely="a").links_lost(to_the_end=False)
    observer.hear("a")
    (link,) = observer.detector.links_lost(to_the_end=False)
    assert (link.uid, link.over) == ("a", True)
    assert link.since == pytest.approx(heard_at, abs=INTERVALS.silence + 102), "pauses are left out"
    assert observer.detector.links_lost(to_the_end=True) == []


def test_a_suspect_that_is_heard_has_answered_and_was_only_slow(observer: Observer) -> None:
    observer.hear("a")
    observer.after(INTERVALS.silence + 0.1)
    observer.detector.asked(["a"], observer.clock.now)
    observer.hear("a")
    assert observer.detector.answered(["a"]) == {"a"}
    assert observer.detector.links_lost(to_the_end=True) == []


@pytest.mark.parametrize("is_lost", [False, True], ids=["once", "unless its node is lost, too"])
def test_a_link_that_is_still_lost_is_reported_at_the_end(observer: Observer, is_lost: bool) -> None:
    suspected(observer).beat(1.0)
    observer.after(1.0, closely="a").answered(["a"])
    if is_lost:
        observer.detector.lost(["a"])
        observer.hear("a")
    found = observer.detector.links_lost(to_the_end=True)
    assert [(link.uid, link.over) for link in found] == ([] if is_lost else [("a", False)])
    assert observer.detector.links_lost(to_the_end=True) == []


def test_a_pause_of_this_process_counts_for_nobody(observer: Observer) -> None:
    suspected(observer)
    observer.clock.now += 1000.0
    observer.detector.begin_step()
    assert observer.detector.look_at(["a"], closely=True) == pytest.approx(1000.0)
    assert not observer.detector.is_dead("a")
    assert not observer.after(INTERVALS.answer - 1, closely="a").is_dead("a")
    assert observer.after(1.1, closely="a").is_dead("a")


def test_a_first_beat_that_a_cache_hides_is_found_at_one_invalidation_a_second() -> None:
    """Or a node that was looked for before its first beat would be taken for lost, however often it beats."""
    store = FaultyStore()
    ages = HeartbeatAges(store)
    for tenth in range(50):
        for uid in "abc":
            ages.look(uid, 500.0 + tenth / 10)
    assert store.invalidations == ["hb"] * 5
    heartbeat = Heartbeat(store, "a")
    for tenth in range(50, 81):
        heartbeat.beat(tenth / 10)
        ages.look("a", 500.0 + tenth / 10)
    assert ages.age("a") <= INVALIDATE_SECONDS


def test_not_being_able_to_look_is_no_evidence() -> None:
    store = FaultyStore()
    Heartbeat(store, "a").beat(0.0)
    ages = HeartbeatAges(store)
    ages.look("a", 500.0)
    store.refuses = {"version"}
    ages.look("a", 519.0)
    assert ages.age("a") == ages.unchanged_from("a", 501.0) == 0.0
    store.refuses = set()
    ages.look("a", 530.0)
    ages.look("a", 533.0)
    assert ages.age("a") == 3.0, "from the first look that worked"


def test_a_refused_beat_ages_the_lease() -> None:
    store = FaultyStore()
    heartbeat = Heartbeat(store, "a")
    assert heartbeat.age(100.0) == float("inf")
    heartbeat.beat(100.0)
    store.refuses = {"overwrite"}
    with pytest.raises(OSError, match="Input/output"):
        heartbeat.beat(104.0)
    assert heartbeat.age(104.0) == 4.0


def test_two_agents_with_one_name_never_write_the_same() -> None:
    store = MemoryStore()
    Heartbeat(store, "a").beat(0.0)
    first = store.get("hb/a")
    Heartbeat(store, "a").beat(0.0)
    assert store.get("hb/a") != first


def test_an_awaited_node_answers_in_the_files_alone_and_is_dead_after_the_lease(observer: Observer) -> None:
    """Its beats come from a thread that no hung mount stops."""
    heartbeat = Heartbeat(observer.store, "a")
    heartbeat.beat(0.0)
    observer.detector.wait_for(["a"], waited=INTERVALS.lease)

    def pass_by(seconds: int) -> FailureDetector:
        for _ in range(seconds):
            observer.hear("a")
            observer.clock.now += 1.0
            observer.detector.begin_step()
            observer.detector.look_at(["a"])
        return observer.detector

    assert pass_by(11).unchanged("a") == 10.0, "its heartbeat is read though it is heard"
    asked_at = observer.clock.now
    observer.detector.asked(["a"], asked_at)
    assert pass_by(20).answered(["a"]) == frozenset(), "to be heard is no answer"
    assert not observer.detector.is_dead("a")
    assert pass_by(1).is_dead("a")
    observer.detector.wait_for([], waited=0.0)
    assert not observer.detector.is_dead("a"), "nothing waits for it: it is heard, and lives"
    observer.detector.wait_for(["a"], waited=INTERVALS.lease)
    heartbeat.beat(1.0)
    assert pass_by(1).answered(["a"]) == {"a"}
    assert not observer.detector.is_dead("a")
    assert observer.detector.hears("a")
    assert observer.detector.links_lost(to_the_end=True) == []
