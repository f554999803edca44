"""Times of all nodes on one clock: over any chain of measurements the truth lies within the bound."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st

from hpc_elastic.base.clock import DRIFT
from hpc_elastic.report.clocks import SUPERVISOR, Clocks, ClocksBuilder, HostOffset, read_offsets_ns
from hpc_elastic.run.event_reader import event_line
from hpc_elastic.run.paths import AttemptPaths

MS = 1_000_000
SECOND = 1000 * MS
START = 1_795_000_000 * SECOND


class Hosts:
    """Clocks of some hosts, and what their agents tell of each other."""

    def __init__(self, *ahead: int, rates: tuple[Fraction, ...] = ()) -> None:
        """`ahead`: nanoseconds since each host's boot, at the true time 0."""
        self._ahead = ahead
        self._rates = rates or (Fraction(0),) * len(ahead)
        self.wall = [START] * len(ahead)
        """Each host's wall clock at the true time 0."""
        self.builder = ClocksBuilder()

    def uptime(self, node: int, true_ns: int) -> int:
        return self._ahead[node] + true_ns + int(true_ns * self._rates[node])

    def wall_of(self, node: int, true_ns: int) -> int:
        return self.wall[node] + self.uptime(node, true_ns) - self._ahead[node]

    def tell(self, node: int, reference: int, *, at: int, bound: int = MS, wrong: int = 0) -> None:
        self.event(
            node,
            "clock_offset",
            at=at,
            reference=reference,
            offset_ns=self.uptime(node, at) - self.uptime(reference, at) + wrong,
            bound_ns=bound,
            uptime_ns=self.uptime(node, at),
            wall_ns=self.wall_of(node, at),
        )

    def event(self, node: int, name: str, *, at: int = 0, role: str = "agent", **fields: Any) -> None:
        host = f"n{max(node, 0)}"
        line = {"event": name, "role": role, "node": node, "host": host, "t": self.wall_of(max(node, 0), at), **fields}
        self.builder.take(event_line(line))

    def build(self) -> Clocks:
        return self.builder.build()


def test_nothing_measured_is_nothing_known() -> None:
    clocks = ClocksBuilder().build()
    assert clocks.reference is None
    moment = clocks.moment(1, 77, uptime_ns=5)
    assert (moment.at_ns, moment.bound_ns, moment.own_ns) == (77, None, 5)
    assert clocks.moment(None, 77).bound_ns is None
    assert clocks.moment(SUPERVISOR, 77).bound_ns is None


def test_one_coordinator() -> None:
    hosts = Hosts(5 * SECOND, 9000 * SECOND, 0)
    hosts.wall[1] += 3600 * SECOND
    for node in range(3):
        hosts.tell(node, 0, at=SECOND)
    clocks = hosts.build()
    assert (clocks.reference, clocks.host) == (0, "n0")
    assert clocks.offsets == {
        1: HostOffset(offset_ns=3600 * SECOND, bound_ns=MS),
        2: HostOffset(offset_ns=0, bound_ns=MS),
    }
    for uptime in (hosts.uptime(1, 3 * SECOND), 0):
        moment = clocks.moment(1, hosts.wall_of(1, 3 * SECOND), uptime_ns=uptime)
        assert moment.at_ns == START + 3 * SECOND
        assert moment.bound_ns == MS + 2 * MS, "2 s later, the clocks may have run apart"
    own = clocks.moment(0, hosts.wall_of(0, 3 * SECOND), uptime_ns=hosts.uptime(0, 3 * SECOND))
    assert (own.at_ns, own.bound_ns) == (START + 3 * SECOND, 0)
    assert clocks.moment(7, START).bound_ns is None, "it told nothing"


def test_after_the_coordinators_death_offsets_chain() -> None:
    """n0 coordinated and died; n1 took over, and n3 came later and never met n0."""
    hosts = Hosts(0, 100, 20_000, 3_000_000)
    hosts.tell(1, 0, at=SECOND, bound=2 * MS)
    hosts.tell(2, 0, at=SECOND, bound=4 * MS)
    hosts.tell(1, 1, at=10 * SECOND, bound=0)
    hosts.tell(3, 1, at=10 * SECOND, bound=8 * MS)
    clocks = hosts.build()
    moments = [clocks.moment(node, 0, uptime_ns=hosts.uptime(node, 10 * SECOND)) for node in range(4)]
    assert {moment.at_ns for moment in moments} == {START + 10 * SECOND}
    assert clocks.reference == 1
    assert moments[1].bound_ns == 0
    assert moments[3].bound_ns == 8 * MS
    assert moments[2].bound_ns is not None
    assert 2 * MS + 4 * MS + 18 * MS <= moments[2].bound_ns < 25 * MS, "over n0, 9 s after both measured"


def test_a_round_is_seen_from_its_own_coordinator() -> None:
    """n0 coordinated first, and then n1: what was measured against n0 is an hour old by then."""
    hosts = Hosts(0, 100, 20_000, 3_000_000)
    hour = 3600 * SECOND
    for reference, at in ((0, SECOND), (1, hour)):
        for node in range(4):
            hosts.tell(node, reference, at=at, bound=0 if node == reference else MS)
    clocks = hosts.build()
    assert clocks.reference == 0
    late = [(node, hosts.uptime(node, hour)) for node in (2, 3)]
    early = [(node, hosts.uptime(node, 2 * SECOND)) for node in (2, 3)]
    for moments, reference in ((late, 1), (early, 0), ([], 0)):
        seen = clocks.around(moments)
        assert seen.reference == reference
        for node, uptime in moments:
            bound = seen.moment(node, 0, uptime_ns=uptime).bound_ns
            assert bound is not None
            assert bound <= 2 * MS


def test_what_contradicts_itself_is_not_used() -> None:
    hosts = Hosts(0, 5, 7)
    for node in (1, 2):
        hosts.tell(node, node, at=0, bound=0)
        hosts.tell(node, 0, at=SECOND)
    hosts.tell(0, 0, at=0, bound=0)
    hosts.tell(2, 0, at=2 * SECOND, wrong=50 * MS)
    clocks = hosts.build()
    assert clocks.contradicted == (2,)
    assert clocks.moment(2, START, uptime_ns=9).bound_ns is None
    assert clocks.moment(1, START, uptime_ns=9).bound_ns is not None


def test_wall_clock_that_was_set_between_two_words() -> None:
    """Who saw a moment told it by the clock that nobody sets; of others only the wall clock is known."""
    hosts = Hosts(0, 10 * SECOND)
    hosts.tell(0, 0, at=0, bound=0)
    hosts.tell(1, 0, at=0)
    hosts.wall[1] -= 60 * SECOND
    hosts.tell(1, 0, at=100 * SECOND)
    clocks = hosts.build()
    seen = clocks.moment(1, 0, uptime_ns=hosts.uptime(1, 50 * SECOND))
    assert seen.at_ns == START + 50 * SECOND
    assert seen.bound_ns is not None
    assert seen.bound_ns < 60 * MS
    for wall in (START + 20 * SECOND, START - 10 * SECOND):
        guessed = clocks.moment(1, wall)
        assert guessed.bound_ns is not None
        truths = [at for at in (wall - START, wall - START + 60 * SECOND) if 0 <= at <= 100 * SECOND]
        assert all(abs(guessed.at_ns - START - truth) <= guessed.bound_ns for truth in truths)
    assert clocks.offsets[1].offset_ns == -60 * SECOND, "as it was at last"


def test_the_supervisor_reads_the_clock_of_its_host() -> None:
    hosts = Hosts(0, 10 * SECOND)
    hosts.wall[1] += 7 * SECOND
    hosts.tell(0, 0, at=0, bound=0)
    hosts.tell(1, 0, at=0)
    assert hosts.build().moment(SUPERVISOR, START).bound_ns is None
    hosts.event(-1, "attempt_started", role="supervisor", host="n1")
    moment = hosts.build().moment(SUPERVISOR, START + 7 * SECOND)
    assert (moment.at_ns, moment.node) == (START, 1)


def test_foreign_words_say_nothing() -> None:
    builder = ClocksBuilder()
    for fields in ({}, {"reference": "0"}, {"reference": 0, "offset_ns": 1.5}, {"reference": -1, "bound_ns": -5}):
        whole = {"offset_ns": 1, "bound_ns": 1, "uptime_ns": 1, "wall_ns": 1, **fields}
        builder.take(event_line({"event": "clock_offset", "role": "agent", "node": 1, "host": "n1", **whole}))
    builder.take(event_line({"event": "clock_offset", "role": "agent", "node": None}))
    assert builder.build() == Clocks()


@st.composite
def told(draw: st.DrawFn) -> tuple[Hosts, int]:
    """Some hosts, and words of theirs that are true."""
    count = draw(st.integers(1, 6))
    ahead = draw(st.lists(st.integers(0, 10**17), min_size=count, max_size=count))
    rate = st.integers(-DRIFT, DRIFT).map(lambda part: Fraction(part, 2 * DRIFT * (DRIFT + 1)))
    hosts = Hosts(*ahead, rates=tuple(draw(st.lists(rate, min_size=count, max_size=count))))
    node = st.integers(0, count - 1)
    for _ in range(draw(st.integers(0, 15))):
        bound = draw(st.integers(2, SECOND))
        near, far = draw(node), draw(node)
        wrong = 0 if near == far else draw(st.integers(-bound + 2, bound - 2))
        at = draw(st.integers(0, 10_000 * SECOND))
        hosts.tell(near, far, at=at, bound=0 if near == far else bound, wrong=wrong)
    return hosts, count


@given(told(), st.integers(0, 10_000 * SECOND))
def test_the_truth_lies_within_the_bound(told: tuple[Hosts, int], true_ns: int) -> None:
    hosts, count = told
    clocks = hosts.build()
    assert clocks.contradicted == ()
    assume(clocks.reference is not None)
    assert clocks.reference is not None
    truth = hosts.wall_of(clocks.reference, true_ns)
    for node in range(count):
        for uptime in (hosts.uptime(node, true_ns), 0):
            moment = clocks.moment(node, hosts.wall_of(node, true_ns), uptime_ns=uptime)
            assert moment.bound_ns is None or abs(moment.at_ns - truth) <= moment.bound_ns + 10


HOUR = 3600 * 10**9


def write(attempt: AttemptPaths, *events: dict[str, Any]) -> None:
    attempt.events.mkdir(parents=True, exist_ok=True)
    for node in {event["node"] for event in events}:
        lines = [json.dumps({"role": "agent", **event}) + "\n" for event in events if event["node"] == node]
        (attempt.events / f"agent-{node:05d}-u.jsonl").write_text("".join(lines))


def offset(node: int, ahead: int, uptime: int, measured: int) -> dict[str, Any]:
    fields = {"reference": 0, "uptime_ns": uptime, "offset_ns": measured, "bound_ns": 10}
    return {"event": "clock_offset", "node": node, "wall_ns": 10**18 + ahead, **fields}


def test_by_what_the_agents_measured_else_by_what_the_rounds_show(tmp_path: Path) -> None:
    attempt = AttemptPaths(tmp_path / "attempt-000")
    final = [
        {"event": "round_final", "round": index, "node": node, "t": 10**18 + index + (node == 2) * HOUR}
        for index in range(2)
        for node in range(3)
    ]
    write(attempt, *final)
    assert read_offsets_ns(attempt) == {2: HOUR}
    # Node 1 was booted 300 ns before node 0; its wall clock is an hour ahead.
    write(attempt, offset(0, 0, 500, 0), offset(1, HOUR, 800, 300))
    assert abs(read_offsets_ns(attempt)[1] - HOUR) < 10
    other = AttemptPaths(tmp_path / "attempt-001")
    write(other, offset(0, 0, 500, 0), offset(1, 8, 800, 300), offset(2, -50, 800, 300))
    assert read_offsets_ns(other) == {2: -50}, "a clock that may as well be right is trusted"
    torn = AttemptPaths(tmp_path / "attempt-002")
    write(torn, {"event": "clock_offset", "node": 2, "t": "x"}, {"event": "round_final", "node": 1, "round": None})
    assert read_offsets_ns(torn) == read_offsets_ns(AttemptPaths(tmp_path / "nowhere")) == {}
