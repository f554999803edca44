"""What an agent tells about its clock: rarely, and enough."""

from __future__ import annotations

from hpc_elastic.agent.rounds import MOST_REFERENCES, ClockOffsetLog, is_news
from hpc_elastic.base.clock import Offset
from hpc_elastic.run.agent_events import ClockCompared
from tests.rigs.fake_clock import FakeClock

MS = 1_000_000
SECOND = 1000 * MS
A, B, C = "00000-n0-0001000000000000-aaaa", "00001-n1-0001000000000000-bbbb", "00002-n2-0001000000000000-cccc"


class Log:
    def __init__(self) -> None:
        self.lines: list[tuple[int, int, int]] = []

    def write(self, event: ClockCompared) -> None:
        self.lines.append((event.reference, event.offset_ns, event.bound_ns))


class Ruler:
    def __init__(self) -> None:
        self.known: dict[str, Offset] = {}

    def offset_to(self, uid: str) -> Offset | None:
        return self.known.get(uid)


class Wall(FakeClock):
    """With a wall clock that can be set."""

    ahead = 0

    def time_ns(self) -> int:
        return super().time_ns() + self.ahead


def make() -> tuple[ClockOffsetLog, Log, Ruler, Wall]:
    log, ruler, clock = Log(), Ruler(), Wall()
    return ClockOffsetLog(log, ruler, uid=A, clock=clock), log, ruler, clock  # type: ignore[arg-type]


def test_what_is_not_known_is_not_told() -> None:
    offsets, log, _, clock = make()
    offsets.log_changes()
    offsets.on_leader(B)
    offsets.log_changes()
    assert log.lines == []
    none = ClockOffsetLog(log, None, uid=A, clock=clock)  # type: ignore[arg-type]
    none.on_leader(A)
    none.log_changes()
    assert log.lines == [], "without a notifier"


def test_the_offset_to_the_coordinator_is_told_once_until_it_is_old() -> None:
    offsets, log, ruler, clock = make()
    offsets.on_leader(B)
    ruler.known[B] = Offset(offset_ns=7 * SECOND, bound_ns=MS)
    for _ in range(3):
        offsets.log_first()
    assert log.lines == [(1, 7 * SECOND, MS)]
    clock.now += 0.5  # it is worth 1.5 ms by now
    offsets.log_changes()
    assert len(log.lines) == 1
    clock.now += 60
    offsets.log_first()
    assert len(log.lines) == 1, "as long as nothing has happened here"
    offsets.log_changes()
    assert len(log.lines) == 2


def test_the_coordinator_tells_of_its_own_clock() -> None:
    offsets, log, _, clock = make()
    offsets.on_leader(A)
    offsets.log_changes()
    clock.now += 3600
    offsets.log_changes()
    assert log.lines == [(0, 0, 0)]
    clock.ahead = 2 * SECOND  # somebody set it
    offsets.log_changes()
    assert log.lines == [(0, 0, 0)] * 2


def test_after_a_change_of_the_coordinator_both_are_told() -> None:
    """So that what others measured against the one can be compared with what was measured against the other."""
    offsets, log, ruler, _ = make()
    offsets.on_leader(B)
    ruler.known[B] = Offset(offset_ns=1, bound_ns=5)
    offsets.on_leader(C)
    ruler.known[C] = Offset(offset_ns=2, bound_ns=6)
    offsets.on_leader(C)
    offsets.log_changes()
    assert log.lines == [(1, 1, 5), (2, 2, 6)]


def test_of_many_coordinators_the_last_ones_are_told() -> None:
    offsets, log, ruler, _ = make()
    for node in range(20):
        uid = f"{node:05d}{B[5:]}"
        offsets.on_leader(uid)
        ruler.known[uid] = Offset(offset_ns=node, bound_ns=1)
    offsets.log_changes()
    assert [line[0] for line in log.lines] == list(range(20 - MOST_REFERENCES, 20))


def sample(offset: int, bound: int, *, at: int = 0, wall: int | None = None) -> ClockCompared:
    wall_ns = 10**18 + (at if wall is None else wall)
    return ClockCompared(reference=0, offset_ns=offset, bound_ns=bound, uptime_ns=at, wall_ns=wall_ns)


def test_news() -> None:
    old = sample(0, 10 * MS)
    assert is_news(old, None)
    assert not is_news(sample(MS, 9 * MS), old)
    assert is_news(sample(MS, 4 * MS), old), "much better"
    assert is_news(sample(25 * MS, 10 * MS), old), "one of the clocks has jumped"
    assert is_news(sample(0, 10 * MS, at=SECOND, wall=3 * SECOND), old), "the wall clock was set"
    assert not is_news(sample(0, 10 * MS + MS, at=SECOND), old), "the same, grown old"
