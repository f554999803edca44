"""Who hangs, by heartbeats alone: each decision with its reason, and what may never be decided."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from hpc_elastic.agent.heartbeat_watch import (
    LEARNED_INTERVALS,
    Hang,
    judge,
    learned_timeout,
    limit_of,
    next_look,
)
from hpc_elastic.agent.heartbeats import RankBeat
from hpc_elastic.run.option_values import SectionTimeouts

TIMEOUTS = SectionTimeouts(seconds={"setup": 900.0, "step": 60.0, "checkpoint": 300.0})
NOW = 10_000.0


def beat(rank: int = 0, *, age: float, step: int | None = 5, section: str = "step", count: int = 9) -> RankBeat:
    return RankBeat(rank=rank, local_rank=rank, section=section, at=NOW - age, step=step, count=count)


def verdict(*beats: RankBeat, timeouts: SectionTimeouts = TIMEOUTS, learned: float | None = None) -> Hang | None:
    return judge(beats, timeouts, now=NOW, learned=learned)


# -- the learned timeout


def test_five_times_the_longest_step_after_twenty_of_them() -> None:
    assert learned_timeout(LEARNED_INTERVALS - 1, 100.0) is None
    assert learned_timeout(LEARNED_INTERVALS, 100.0) == 500.0
    assert learned_timeout(LEARNED_INTERVALS, 0.2) == 60.0


# -- whether somebody hangs


def test_the_reason_names_rank_section_step_age_and_timeout() -> None:
    assert (
        verdict(beat(3, age=92.04, step=1200)).reason
        == "rank 3 hangs: no heartbeat for 92.0 s in section 'step' at step 1200 (timeout 60 s)"
    )
    silent = RankBeat(rank=1, local_rank=0, section="setup", at=NOW - 901)
    assert verdict(silent).reason == "rank 1 hangs: no heartbeat for 901.0 s in section 'setup' (timeout 900 s)"


def test_step_auto_judges_nobody_before_it_has_learned() -> None:
    auto = SectionTimeouts(learns_step=True)
    assert judge([beat(age=1e5)], auto, now=NOW, learned=None) is None
    assert judge([beat(age=99)], auto, now=NOW, learned=100.0) is None
    assert verdict(beat(age=100), timeouts=auto, learned=100.0).seconds == 100.0
    assert limit_of(beat(age=0, section="checkpoint"), auto, learned=100.0) is None


_BEATS = st.lists(
    st.builds(
        RankBeat,
        rank=st.integers(0, 7),
        local_rank=st.integers(0, 7),
        section=st.sampled_from(["setup", "step", "checkpoint", "evaluate"]),
        at=st.floats(NOW - 2000, NOW),
        step=st.none() | st.integers(0, 5),
        count=st.integers(0, 3),
    ),
    max_size=8,
    unique_by=(lambda found: found.local_rank, lambda found: found.rank),
)


@given(beats=_BEATS)
def test_a_verdict_rests_on_a_time_that_is_over(beats: list[RankBeat]) -> None:
    found = judge(beats, TIMEOUTS, now=NOW)
    over = [b for b in beats if b.section in TIMEOUTS.seconds and b.age(NOW) >= TIMEOUTS.seconds[b.section]]
    assert (found is not None) == bool(over)
    if found is not None:
        (culprit,) = (b for b in beats if b.rank == found.ranks[0] and b.local_rank in found.hung)
        steps = [-1 if b.step is None else b.step for b in over]
        assert (-1 if culprit.step is None else culprit.step) <= min(steps)


@given(beats=_BEATS, later=st.floats(0, 3000))
def test_no_hang_is_missed_between_two_looks(beats: list[RankBeat], later: float) -> None:
    """Whatever the workers say meanwhile: before the next look nobody's time can be over who was not judged now."""
    if judge(beats, TIMEOUTS, now=NOW) is not None:
        return
    due = next_look(beats, TIMEOUTS, now=NOW)
    assert due is not None
    assert NOW < due <= NOW + 60.0
    moment = NOW + later
    if moment < due:
        assert judge(beats, TIMEOUTS, now=moment) is None
        moved = [replace(b, section="step", at=NOW) for b in beats]
        assert judge(moved, TIMEOUTS, now=moment) is None


# -- who is behind it


WAITS, QUIET = beat(0, age=60, step=6), {"section": "evaluate"}


@pytest.mark.parametrize(
    ("beats", "named", "hung"),
    [
        # Behind, not waiting.
        ([beat(0, age=70, step=6), beat(1, age=71, step=6), beat(2, age=72, step=5), beat(3, age=70, step=6)], 2, {2}),
        # A section without a timeout: those that wait show it.
        ([WAITS, beat(1, age=80.0, step=5, **QUIET)], 1, {1}),
        # Before any step is behind every step.
        ([beat(0, age=61, step=3), beat(1, age=1000, step=None, section="setup", count=0)], 1, {1}),
        # At the same step the first to fall silent is named, and all are shown.
        ([beat(0, age=61), beat(1, age=63), beat(2, age=62)], 1, {0, 1, 2}),
        # Not waited for: it got on meanwhile, is as far, further, tells no steps, tells nothing.
        ([WAITS, beat(1, age=40, step=5, **QUIET)], 0, {0}),
        ([WAITS, beat(1, age=100, step=6, **QUIET)], 0, {0}),
        ([WAITS, beat(1, age=100, step=7, **QUIET)], 0, {0}),
        ([WAITS, beat(1, age=100, step=None, **QUIET)], 0, {0}),
        ([WAITS, beat(1, age=100, step=None, count=0, **QUIET)], 0, {0}),
    ],
)
def test_who_is_named_and_who_is_shown(beats: list[RankBeat], named: int, hung: set[int]) -> None:
    found = verdict(*beats)
    assert (found.ranks, set(found.hung)) == ((named,), hung)


def test_who_waits_may_be_overdue_by_milliseconds_sooner() -> None:
    found = verdict(beat(0, age=60.0, step=6), beat(1, age=59.9, step=5))
    assert found.ranks == (1,)
    assert found.reason == (
        "rank 1 hangs: no heartbeat for 59.9 s in section 'step' at step 5, while others are at step 6 and wait"
    )
