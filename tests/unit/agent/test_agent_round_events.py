"""What an agent tells about its clock: rarely, and enough."""

from __future__ import annotations

from types import SimpleNamespace

from hpc_elastic.agent.rounds import MOST_REFERENCES, ClockOffsetLog, is_news
from hpc_elastic.base.clock import Offset
from hpc_elastic.run.agent_events import ClockCompared
from tests.rigs.fake_clock import FakeClock

MS = 1_000_000
SECOND = 1000 * MS
A, B, C = "00000-n0-0001000000000000-aaaa", "00001-n1-0001000000000000-bbbb", "00002-n2-0001000000000000-cccc"


class Wall(FakeClock):
    """With a wall clock that can be set."""

    ahead = 0

    def time_ns(self) -> int:
        return super().time_ns() + self.ahead


def make() -> tuple[ClockOffsetLog, list[tuple[int, int, int]], dict[str, Offset], Wall]:
    """With what it wrote, the offsets that are known, and its clock."""
    lines, known, clock = list[tuple[int, int, int]](), dict[str, Offset](), Wall()

    def write(event: ClockCompared) -> None:
        lines.append((event.reference, event.offset_ns, event.bound_ns))

    log, ruler = SimpleNamespace(write=write), SimpleNamespace(offset_to=known.get)
    return ClockOffsetLog(log, ruler, uid=A, clock=clock), lines, known, clock  # type: ignore[arg-type]


def test_what_is_not_known_is_not_told() -> None:
    offsets, lines, _, clock = make()
    without_notifier = ClockOffsetLog(SimpleNamespace(write=lines.append), None, uid=A, clock=clock)  # type: ignore[arg-type]
    for one, leader in ((offsets, B), (without_notifier, A)):
        one.log_changes()
        one.on_leader(leader)
        one.log_changes()
    assert lines == []


def test_the_offset_to_the_coordinator_is_told_once_until_it_is_old() -> None:
    offsets, lines, known, clock = make()
    offsets.on_leader(B)
    known[B] = Offset(offset_ns=7 * SECOND, bound_ns=MS)
    for _ in range(3):
        offsets.log_first()
    assert lines == [(1, 7 * SECOND, MS)]
    clock.now += 0.5  # it is worth 1.5 ms by now
    offsets.log_changes()
    assert len(lines) == 1
    clock.now += 60
    offsets.log_first()
    assert len(lines) == 1, "as long as nothing has happened here"
    offsets.log_changes()
    assert len(lines) == 2


def test_the_coordinator_tells_of_its_own_clock() -> None:
    offsets, lines, _, clock = make()
    offsets.on_leader(A)
    offsets.log_changes()
    clock.now += 3600
    offsets.log_changes()
    assert lines == [(0, 0, 0)]
    clock.ahead = 2 * SECOND  # somebody set it
    offsets.log_changes()
    assert lines == [(0, 0, 0)] * 2


def test_after_a_change_of_the_coordinator_both_are_told() -> None:
    """So that what others measured against the one can be compared with what was measured against the other."""
    offsets, lines, known, _ = make()
    offsets.on_leader(B)
    known[B] = Offset(offset_ns=1, bound_ns=5)
    offsets.on_leader(C)
    known[C] = Offset(offset_ns=2, bound_ns=6)
    offsets.on_leader(C)
    offsets.log_changes()
    assert lines == [(1, 1, 5), (2, 2, 6)]


def test_of_many_coordinators_the_last_ones_are_told() -> None:
    offsets, lines, known, _ = make()
    for node in range(20):
        uid = f"{node:05d}{B[5:]}"
        offsets.on_leader(uid)
        known[uid] = Offset(offset_ns=node, bound_ns=1)
    offsets.log_changes()
    assert [line[0] for line in lines] == list(range(20 - MOST_REFERENCES, 20))


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
