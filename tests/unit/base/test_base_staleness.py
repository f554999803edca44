"""How long something has looked the same, on the observer's clock alone."""

from __future__ import annotations

from hpc_elastic.base.clock import Staleness


def test_an_age_begins_with_the_observation_that_first_saw_the_value() -> None:
    seen: Staleness[str] = Staleness()
    assert seen.age("a") == 0.0
    assert seen.observe("a", "1", 500.0) == 0.0
    assert seen.observe("a", "1", 507.0) == seen.age("a") == 7.0, "up to the last observation, not up to now"
    assert seen.observe("a", "2", 511.0) == seen.age("a") == 0.0
    assert seen.observe("a", "2", 512.0) == 1.0


def test_a_missing_value_ages_like_any_other() -> None:
    seen: Staleness[str] = Staleness()
    seen.observe("a", None, 500.0)
    assert seen.observe("a", None, 520.0) == 20.0
    assert seen.observe("a", "1", 521.0) == 0.0


def test_whether_it_changed_since_a_moment() -> None:
    seen: Staleness[str] = Staleness()
    seen.observe("a", "1", 500.0)
    assert not seen.changed_since("a", 501.0)
    assert seen.unchanged_from("a", 501.0) == 0.0, "not observed since"
    seen.observe("a", "1", 504.0)
    assert seen.unchanged_from("a", 501.0) == 3.0
    seen.observe("a", "2", 505.0)
    assert seen.changed_since("a", 501.0)
    assert seen.unchanged_from("a", 501.0) == 0.0
    seen.observe("a", "2", 530.0)
    assert seen.changed_since("a", 501.0), "however long ago"
    assert not seen.changed_since("nosuch", 0.0)
    assert seen.unchanged_from("nosuch", 0.0) == 0.0


def test_nothing_ages_while_the_observer_is_paused() -> None:
    seen: Staleness[str] = Staleness()
    seen.observe("a", "1", 500.0)
    seen.observe("b", "1", 505.0)
    seen.paused_for(60.0, now=570.0)
    assert seen.age("a") == seen.age("b") == 0.0
    assert seen.observe("a", "1", 570.0) == 10.0
    assert seen.observe("b", "1", 570.0) == 5.0


def test_a_pause_makes_nothing_younger_than_new() -> None:
    """Or an observer that was paused for an hour would notice nobody's death for the hour after."""
    seen: Staleness[str] = Staleness()
    seen.observe("a", "1", 500.0)
    seen.observe("a", "2", 4100.0)
    seen.paused_for(3600.0, now=4100.0)
    assert seen.age("a") == 0.0
    assert seen.observe("a", "2", 4121.0) == 21.0


def test_a_long_gap_between_two_observations_was_a_pause() -> None:
    seen: Staleness[str] = Staleness(longest_gap=10.0)
    assert seen.observe_all({"a": 1, "b": 1}, 0.0) == {"a": 0.0, "b": 0.0}
    assert seen.observe_all({"a": 1, "b": 2}, 10.0) == {"a": 10.0, "b": 0.0}
    assert seen.observe_all({"a": 1, "b": 2}, 1000.0) == {"a": 10.0, "b": 0.0}
    assert seen.observe_all({"a": 1}, 1001.0) == {"a": 11.0}
    assert seen.observe_all({"a": 1, "b": 2}, 1002.0) == {"a": 12.0, "b": 0.0}, "what was away is new"


def test_what_is_forgotten_starts_anew() -> None:
    seen: Staleness[str] = Staleness()
    seen.observe("a", "1", 500.0)
    seen.forget("a")
    seen.forget("a")
    assert seen.observe("a", "1", 530.0) == 0.0
