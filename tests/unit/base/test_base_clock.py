"""Clocks: set while a run goes on, compared by packets, and how long something looked the same on the observer's."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hpc_elastic.base import clock as clock_module
from hpc_elastic.base.clock import DRIFT, Offset, PeerClock, RunClock, Staleness, SystemClock, drift_ns

HOUR_NS = 3600 * 10**9


@pytest.mark.parametrize("jump", [HOUR_NS, -HOUR_NS])
def test_a_wall_clock_that_is_set_does_not_reach_a_record(jump: int, monkeypatch: pytest.MonkeyPatch) -> None:
    boot, wall = 50 * 10**9, 1_700_000_000 * 10**9
    monkeypatch.setattr(clock_module.time, "time_ns", lambda: wall)
    monkeypatch.setattr(clock_module.time, "clock_gettime_ns", lambda _: boot)
    system, run = SystemClock(), RunClock()
    assert run.time_ns() == system.time_ns() == 1_700_000_000 * 10**9
    boot += 7 * 10**9
    wall += 7 * 10**9 + jump
    assert run.time_ns() == 1_700_000_007 * 10**9
    assert system.time_ns() == run.time_ns() + jump


def test_an_age_begins_with_the_observation_that_first_saw_the_value() -> None:
    seen: Staleness[str] = Staleness()
    assert seen.age("a") == 0.0
    assert seen.observe("a", "1", 500.0) == 0.0
    assert seen.observe("a", "1", 507.0) == seen.age("a") == 7.0, "up to the last observation, not up to now"
    assert seen.observe("a", "2", 511.0) == seen.age("a") == 0.0
    assert seen.observe("a", "2", 512.0) == 1.0
    assert [seen.observe("a", None, now) for now in (513.0, 533.0)] == [0.0, 20.0], "missing is a value like any other"
    seen.forget("a")
    seen.forget("a")
    assert seen.observe("a", None, 540.0) == 0.0


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
    assert (seen.observe("a", "1", 570.0), seen.observe("b", "1", 570.0)) == (10.0, 5.0)
    # A pause makes nothing younger than new, or an observer would notice nobody's death for as long after it.
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


MS = 1_000_000
SECOND = 1000 * MS


class Pair:
    """Two hosts' clocks, the first of which runs faster or slower, and what each knows of the other's."""

    def __init__(self, ahead_ns: int, rate: Fraction = Fraction(0)) -> None:
        self.time = 10**15
        self.ahead = Fraction(ahead_ns)
        self._rate = rate
        self.known = (PeerClock(), PeerClock())

    def pass_time(self, ns: int) -> None:
        self.time += ns
        self.ahead += ns * self._rate

    def clock(self, host: int) -> int:
        return self.time + int(self.ahead) if host == 0 else self.time

    def send(self, host: int, *, travels_ns: int, waits_ns: int = 0, is_lost: bool = False) -> None:
        """A packet from `host` to the other, which takes it in some time after it came."""
        sent, told = self.clock(host), self.known[host].bound_to_send(self.clock(host))
        self.pass_time(travels_ns + waits_ns)
        if not is_lost:
            self.known[1 - host].received(sent_ns=sent, received_ns=self.clock(1 - host), told_ns=told)

    def exchange(self, travels_ns: int = MS) -> None:
        self.send(0, travels_ns=travels_ns)
        self.send(1, travels_ns=travels_ns)

    def misses(self, host: int) -> Fraction | None:
        """By how much the truth lies outside the bound; None: nothing is known."""
        offset = self.known[host].offset(self.clock(host))
        if offset is None:
            return None
        truth = self.ahead if host == 0 else -self.ahead
        return abs(truth - offset.offset_ns) - offset.bound_ns


delays = st.integers(0, 5 * SECOND)
packets = st.tuples(st.sampled_from([0, 1]), delays, delays, st.booleans(), st.integers(0, 100 * SECOND))


@given(
    ahead=st.integers(-(10**18), 10**18),
    # To the limit, but for what whole nanoseconds may take away.
    rate=st.integers(-DRIFT, DRIFT).map(lambda part: Fraction(part, DRIFT * (DRIFT + 1))),
    sent=st.lists(packets, max_size=30),
)
@example(ahead=0, rate=Fraction(0), sent=[(0, 0, 0, False, 0), (1, 5 * SECOND, 0, False, 0)])
def test_the_truth_lies_within_the_bound(
    ahead: int, rate: Fraction, sent: list[tuple[int, int, int, bool, int]]
) -> None:
    pair = Pair(ahead, rate)
    for host, travels, waits, is_lost, pause in sent:
        pair.send(host, travels_ns=travels, waits_ns=waits, is_lost=is_lost)
        assert all((pair.misses(host) or 0) <= 1 for host in (0, 1))
        pair.pass_time(pause)
        assert all((pair.misses(host) or 0) <= 1 for host in (0, 1))


@given(st.integers(-(10**18), 10**18), st.integers(0, SECOND), st.integers(0, SECOND))
def test_the_bound_is_half_of_the_round_trip(ahead: int, there: int, back: int) -> None:
    pair = Pair(ahead)
    pair.send(0, travels_ns=there)
    pair.send(1, travels_ns=back)
    offset = pair.known[0].offset(pair.clock(0))
    assert offset is not None
    assert offset.bound_ns <= (there + back) / 2 + drift_ns(there + back) + 2


def test_how_long_an_answer_is_held_back_does_not_matter() -> None:
    """But for what the clocks may run apart meanwhile."""
    pair = Pair(7 * SECOND)
    pair.send(0, travels_ns=MS)
    pair.pass_time(10 * SECOND)
    pair.send(1, travels_ns=MS)
    offset = pair.known[0].offset(pair.clock(0))
    assert offset is not None
    assert offset.bound_ns <= MS + drift_ns(10 * SECOND) + 2


def test_the_quickest_of_several_packets_counts_until_it_is_old() -> None:
    pair = Pair(0)
    pair.exchange(MS)
    known = pair.known[0].offset(pair.clock(0))
    pair.exchange(100 * MS)
    later = pair.known[0].offset(pair.clock(0))
    assert known is not None
    assert later is not None
    assert known.bound_ns < later.bound_ns < 2 * MS
    pair.pass_time(3600 * SECOND)
    old = pair.known[0].offset(pair.clock(0))
    assert old is not None
    assert old.bound_ns >= 3600 * SECOND // DRIFT
    pair.exchange(100 * MS)
    new = pair.known[0].offset(pair.clock(0))
    assert new is not None
    assert new.bound_ns < 110 * MS


def test_packets_one_way_tell_nothing() -> None:
    pair = Pair(5 * SECOND)
    for _ in range(3):
        pair.send(0, travels_ns=MS)
        pair.send(1, travels_ns=MS, is_lost=True)
    assert pair.known[0].offset(pair.clock(0)) is None
    assert pair.known[1].offset(pair.clock(1)) is None
    assert PeerClock().bound_to_send(0) is None


@given(st.integers(-(10**15), 10**15), st.sampled_from([0, 1]))
def test_after_a_jump_it_is_measured_anew(jump: int, first: int) -> None:
    """Of a clock that nobody sets: a virtual machine that was paused, say. Never a wrong answer for long."""
    pair = Pair(0)
    pair.exchange()
    pair.ahead += jump
    for _ in range(3):
        pair.send(first, travels_ns=MS)
        pair.send(1 - first, travels_ns=MS)
        pair.pass_time(SECOND)
    assert all((misses := pair.misses(host)) is not None and misses <= 1 for host in (0, 1))


def test_ageing() -> None:
    offset = Offset(offset_ns=-3, bound_ns=10)
    assert offset.aged(-2 * SECOND) == Offset(offset_ns=-3, bound_ns=10 + 2 * SECOND // DRIFT)
    assert (drift_ns(0), drift_ns(1), drift_ns(-DRIFT)) == (0, 1, 1)
