"""Heartbeats and their observers: ages on the observer's own clock, never a comparison of two clocks."""

from __future__ import annotations

import pytest

from hpc_elastic.rendezvous.failure_detector import INVALIDATE_SECONDS, Heartbeat, HeartbeatAges
from hpc_elastic.store.memory_store import MemoryStore


class FaultyStore(MemoryStore):
    """Refuses what a test names."""

    def __init__(self) -> None:
        super().__init__()
        self.refuses: set[str] = set()

    def version(self, key: str) -> str | None:
        if "version" in self.refuses:
            raise OSError(5, "Input/output error")
        return super().version(key)

    def overwrite(self, key: str, value: str) -> None:
        if "overwrite" in self.refuses:
            raise OSError(5, "Input/output error")
        super().overwrite(key, value)


def test_a_heartbeat_changes_its_cell_once_per_interval() -> None:
    store = MemoryStore()
    heartbeat = Heartbeat(store, "a", interval=4.0)
    seen = []
    for now in (100.0, 101.0, 103.9, 104.0, 107.9, 108.5):
        heartbeat.beat_if_due(now)
        seen.append(store.get("hb/a"))
    assert seen[0] == seen[1] == seen[2]
    assert seen[3] == seen[4]
    assert len(set(seen)) == 3


def test_it_says_when_it_is_due() -> None:
    heartbeat = Heartbeat(MemoryStore(), "a", interval=4.0)
    assert heartbeat.beat_if_due(100.0) == 4.0
    assert heartbeat.beat_if_due(101.5) == 2.5
    assert heartbeat.beat_if_due(104.0) == 4.0


def test_two_agents_with_one_name_never_write_the_same() -> None:
    store = MemoryStore()
    Heartbeat(store, "a", interval=1.0).beat_if_due(0.0)
    first = store.get("hb/a")
    Heartbeat(store, "a", interval=1.0).beat_if_due(0.0)
    assert store.get("hb/a") != first


def test_a_refused_beat_ages_the_lease_and_is_made_again_at_once() -> None:
    store = FaultyStore()
    heartbeat = Heartbeat(store, "a", interval=4.0)
    assert heartbeat.age(100.0) == float("inf")
    heartbeat.beat_if_due(100.0)
    store.refuses = {"overwrite"}
    with pytest.raises(OSError, match="Input/output"):
        heartbeat.beat_if_due(104.0)
    assert heartbeat.age(104.0) == 4.0
    store.refuses = set()
    before = store.get("hb/a")
    assert heartbeat.beat_if_due(104.1) == 4.0
    assert heartbeat.age(104.1) == 0.0
    assert store.get("hb/a") != before


def observed() -> tuple[FaultyStore, Heartbeat, HeartbeatAges]:
    store = FaultyStore()
    heartbeat = Heartbeat(store, "a", interval=1.0)
    heartbeat.beat_if_due(0.0)
    return store, heartbeat, HeartbeatAges(store)


def test_nobody_is_old_at_the_first_look() -> None:
    _, _, ages = observed()
    assert ages.age("a") == 0.0
    ages.look("a", 500.0)
    assert ages.age("a") == 0.0
    assert ages.age("nosuch") == 0.0


def test_who_does_not_change_ages_from_the_look_that_first_saw_it_so() -> None:
    _, heartbeat, ages = observed()
    ages.look("a", 500.0)
    ages.look("a", 507.0)
    assert ages.age("a") == 7.0, "up to the last look, not up to now"
    heartbeat.beat_if_due(1.0)
    ages.look("a", 511.0)
    assert ages.age("a") == 0.0
    ages.look("a", 512.0)
    assert ages.age("a") == 1.0


def test_a_cell_that_is_missing_ages_like_any_other_value() -> None:
    store, heartbeat, ages = observed()
    store.delete("hb/a")
    ages.look("a", 500.0)
    ages.look("a", 520.0)
    assert ages.age("a") == 20.0
    heartbeat.beat_if_due(1.0)
    ages.look("a", 521.0)
    assert ages.age("a") == 0.0


class ForgetfulStore(MemoryStore):
    """Goes on not to find what it once did not find, until the folder is invalidated: NFS, with times by the second."""

    def __init__(self) -> None:
        super().__init__()
        self.missing: set[str] = set()
        self.invalidations: list[str] = []

    def version(self, key: str) -> str | None:
        if key not in self.missing and super().version(key) is None:
            self.missing.add(key)
        return None if key in self.missing else super().version(key)

    def invalidate(self, folder: str) -> None:
        self.invalidations.append(folder)
        self.missing = {key for key in self.missing if not key.startswith(f"{folder}/")}


def test_a_first_beat_that_a_cache_hides_is_found() -> None:
    """Or a node that was looked for before its first beat would be taken for lost, however often it beats."""
    store = ForgetfulStore()
    heartbeat, ages = Heartbeat(store, "a", interval=1.0), HeartbeatAges(store)
    ages.look("a", 500.0)
    heartbeat.beat_now(0.0)
    for tenth in range(1, 31):
        heartbeat.beat_if_due(tenth / 10)
        ages.look("a", 500.0 + tenth / 10)
    assert ages.age("a") <= 1.0


def test_looking_for_those_that_are_not_there_costs_one_invalidation_a_second() -> None:
    store = ForgetfulStore()
    ages = HeartbeatAges(store)
    for tenth in range(50):
        for uid in "abc":
            ages.look(uid, 500.0 + tenth / 10)
    assert store.invalidations == ["hb"] * 5
    assert INVALIDATE_SECONDS == 1.0


def test_not_being_able_to_look_is_no_evidence() -> None:
    store, _, ages = observed()
    ages.look("a", 500.0)
    store.refuses = {"version"}
    ages.look("a", 519.0)
    assert ages.age("a") == 0.0
    store.refuses = set()
    ages.look("a", 530.0)
    ages.look("a", 533.0)
    assert ages.age("a") == 3.0, "from the first look that worked"


def test_an_observer_that_was_held_up_forgives_all() -> None:
    _, _, ages = observed()
    ages.look("a", 500.0)
    ages.look("b", 505.0)
    ages.paused_for(60.0, now=570.0)
    assert ages.age("a") == ages.age("b") == 0.0
    ages.look("a", 570.0)
    ages.look("b", 570.0)
    assert ages.age("a") == 10.0
    assert ages.age("b") == 5.0


def test_forgiving_makes_nobody_younger_than_new() -> None:
    """Or an observer that was held up for an hour would notice nobody's death for the hour after."""
    _, heartbeat, ages = observed()
    ages.look("a", 500.0)
    heartbeat.beat_if_due(1.0)
    ages.look("a", 4100.0)  # held up for an hour; the other went on
    ages.paused_for(3600.0, now=4100.0)
    assert ages.age("a") == 0.0
    ages.look("a", 4121.0)
    assert ages.age("a") == 21.0


def test_who_is_forgotten_starts_anew() -> None:
    _, _, ages = observed()
    ages.look("a", 500.0)
    ages.forget("a")
    ages.forget("a")
    assert ages.age("a") == 0.0


def test_whether_a_question_was_answered() -> None:
    store, heartbeat, ages = observed()
    ages.look("a", 500.0)
    assert not ages.changed_since("a", 501.0)
    assert ages.unchanged_from("a", 501.0) == 0.0, "not looked at since"
    ages.look("a", 504.0)
    assert ages.unchanged_from("a", 501.0) == 3.0
    heartbeat.beat_if_due(1.0)
    ages.look("a", 505.0)
    assert ages.changed_since("a", 501.0)
    assert ages.unchanged_from("a", 501.0) == 0.0
    ages.look("a", 530.0)
    assert ages.changed_since("a", 501.0), "however long ago"
    store.refuses = {"version"}
    ages.look("a", 531.0)
    assert ages.unchanged_from("a", 501.0) == 0.0, "not being able to look is no evidence here either"
    assert not ages.changed_since("nosuch", 0.0)
    assert ages.unchanged_from("nosuch", 0.0) == 0.0


def test_a_question_is_answered_before_the_beat_is_due() -> None:
    store = MemoryStore()
    heartbeat = Heartbeat(store, "a", interval=4.0)
    heartbeat.beat_if_due(100.0)
    before = store.get("hb/a")
    heartbeat.beat_now(101.0)
    assert store.get("hb/a") != before
    assert heartbeat.beat_if_due(104.0) == 1.0
