from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from msgspec.structs import replace

from hpc_elastic.report.collect import collect_run
from hpc_elastic.report.goodput import goodput_of
from hpc_elastic.report.render_html_chart import MarkKind, Row, Timeline, build_timeline, make_axis
from hpc_elastic.report.timeline_attempt import NodeState, place_attempts
from tests.rigs.run_builder import GLOO, START_NS, UPTIME_NS, RunBuilder, make_failure

SECOND = 1_000_000_000


def tell_agents(builder: RunBuilder, attempt: int, *, at: float, end: float | None = None) -> None:
    for node in range(builder.nodes):
        builder.event(attempt, "agent", node, at, "agent_started", pid=1)
        if end is not None:
            builder.event(attempt, "agent", node, end, "agent_ended", reason="", code=0)


def picture(builder: RunBuilder) -> Timeline:
    return build_timeline(place_attempts(collect_run(builder.root)))


def row(timeline: Timeline, name: str) -> Row:
    return next(row for row in (*timeline.nodes, *timeline.ranks) if row.name == name)


def told(part: Row) -> list[tuple[str, float, float]]:
    """State, and seconds since the run's start."""
    return [
        (span.state.value, round((span.start_ns - START_NS) / 1e9, 2), round((span.end_ns - START_NS) / 1e9, 2))
        for span in part.spans
    ]


@pytest.fixture
def builder(tmp_path: Path) -> RunBuilder:
    return RunBuilder(tmp_path / "run-1", nodes=3, per_node=2)


def test_states_of_a_node_follow_upon_each_other(builder: RunBuilder) -> None:
    builder.attempt(0)
    tell_agents(builder, 0, at=2, end=60)
    builder.round(0, 0, at=5)
    builder.fail(make_failure(4, at=20, exception="ValueError: bad", per_node=2))
    builder.stopped(0, 0, at=21)
    builder.round(0, 1, at=25, reason="restart 1 of 3")
    builder.succeeded(0, 1, at=58)
    builder.end(0, at=61, outcome="succeeded", code=0)
    timeline = picture(builder)
    assert told(row(timeline, "n1")) == [
        ("agent being launched", 0, 2),
        ("rendezvous", 2, 5),
        ("starting", 5, 5.01),
        ("processes up", 5.01, 20.9),
        ("stopping workers", 20.9, 21),
        ("rendezvous", 21, 25),
        ("starting", 25, 25.01),
        ("processes up", 25.01, 58),
        ("done", 58, 60),
    ]
    assert row(timeline, "n1").detail == "ranks 0-1"
    # A rank is there in its rounds alone, and the one that failed ended before the others.
    assert told(row(timeline, "rank 4"))[:2] == [("starting", 5, 5.01), ("processes up", 5.01, 20)]
    assert told(row(timeline, "rank 5"))[:3] == [
        ("starting", 5, 5.01),
        ("processes up", 5.01, 20.9),
        ("stopping workers", 20.9, 21),
    ]
    assert row(timeline, "rank 4").detail == "n3"
    (mark,) = row(timeline, "n3").marks
    assert (mark.entry.kind, mark.at_ns, mark.ranks) == (MarkKind.CAUSE, START_NS + 20 * SECOND, (4,))
    (placed,) = place_attempts(collect_run(builder.root))
    assert [(d.part.index, d.start_ns - START_NS) for d in placed.rounds] == [(0, 5 * SECOND), (1, 25 * SECOND)]


def test_lost_node_is_lost_from_its_last_sign_until_it_comes_back(builder: RunBuilder) -> None:
    builder.attempt(0)
    tell_agents(builder, 0, at=1)
    builder.round(0, 0, at=5)
    builder.event(0, "agent", 2, 40, "node_lost", round=0, age=10.0)
    builder.stopped(0, 0, at=41, without=(2,))
    builder.round(0, 1, at=45, without=(2,))
    builder.event(0, "agent", 2, 70, "agent_started", pid=2)
    builder.stopped(0, 1, at=90, without=(2,))
    builder.round(0, 2, at=95)
    timeline = picture(builder)
    assert told(row(timeline, "n3"))[3:7] == [
        ("processes up", 5.01, 30),
        ("lost", 30, 70),
        ("waiting as a spare", 70, 90),
        ("rendezvous", 90, 95),
    ]
    (mark,) = row(timeline, "n3").marks
    assert (mark.entry.kind, mark.at_ns) == (MarkKind.CAUSE, START_NS + 30 * SECOND)


def test_node_that_never_joins_waits_as_a_spare(builder: RunBuilder) -> None:
    builder.attempt(0)
    tell_agents(builder, 0, at=1, end=50)
    builder.round(0, 0, at=5, without=(1,))
    builder.succeeded(0, 0, at=45, nodes=(0, 2))
    assert told(row(picture(builder), "n2")) == [
        ("agent being launched", 0, 1),
        ("rendezvous", 1, 5),
        ("waiting as a spare", 5, 45),
        ("rendezvous", 45, 50),
    ]
    silent = RunBuilder(builder.root / "other", nodes=3, per_node=2)
    silent.attempt(0)
    silent.round(0, 0, at=5, without=(1,))
    assert row(picture(silent), "n2").spans == [], "one without a word has an empty row"


def test_rank_of_a_lost_node_that_runs_elsewhere_is_lost_no_more(builder: RunBuilder) -> None:
    builder.attempt(0)
    tell_agents(builder, 0, at=1)
    builder.round(0, 0, at=5)
    builder.event(0, "agent", 0, 40, "node_lost", round=0, age=10.0)
    builder.stopped(0, 0, at=41, without=(0,))
    builder.round(0, 1, at=45, without=(0,))
    builder.stopped(0, 1, at=90, without=(0,))
    spans = row(picture(builder), "rank 0").spans
    assert [span.state for span in spans][:4] == [NodeState.STARTING, NodeState.UP, NodeState.LOST, NodeState.STARTING]
    assert all(before.end_ns <= after.start_ns for before, after in pairwise(spans))


def test_folded_failures_are_one_entry_with_a_mark_per_node(builder: RunBuilder) -> None:
    builder.begin(at=5)
    builder.fail(make_failure(0, at=20, exception="ValueError: bad", per_node=2))
    for rank in (2, 3, 4, 5):
        text = f"RuntimeError: {GLOO.format(rank=rank)}"
        builder.fail(make_failure(rank, at=20 + rank, exception=text, per_node=2))
    timeline = picture(builder)
    assert [(entry.kind, len(entry.fold.members)) for entry in timeline.entries if entry.fold] == [
        (MarkKind.CAUSE, 1),
        (MarkKind.SYMPTOM, 4),
    ]
    assert [(m.entry.number, m.ranks, m.at_ns - START_NS) for m in row(timeline, "n2").marks] == [
        (1, (2, 3), 22 * SECOND)
    ]
    assert [mark.entry.kind for mark in row(timeline, "rank 5").marks] == [MarkKind.SYMPTOM]


def test_only_so_many_ranks_and_those_that_failed_first(tmp_path: Path) -> None:
    builder = RunBuilder(tmp_path / "run", nodes=50, per_node=2).begin(at=5)
    builder.fail(make_failure(97, at=20, exception="ValueError: bad", per_node=2))
    timeline = build_timeline(place_attempts(collect_run(builder.root)), most_ranks=3)
    assert [part.name for part in timeline.ranks] == ["rank 0", "rank 1", "rank 97"]
    assert timeline.ranks_left_out == 97


def test_clock_that_is_an_hour_ahead_is_set_right(builder: RunBuilder) -> None:
    builder.attempt(0)
    for index, at in enumerate((5, 105)):
        for node in range(3):
            ahead = 3600.25 if node == 2 else 0.0
            fields = {"round": index, "group_rank": node, "ranks": [2 * node, 2 * node + 1], "world_size": 6}
            builder.event(0, "agent", node, at + ahead, "round_final", **fields)
            builder.event(0, "agent", node, at + 1 + ahead, "workers_started", round=index, pids=[])
            builder.event(0, "agent", node, at + 90 + ahead, "workers_stopped", round=index)
    timeline = picture(builder)
    (placed,) = place_attempts(collect_run(builder.root))
    offset = placed.offsets[2]
    assert abs(offset.offset_ns - 3600 * SECOND) <= offset.bound_ns
    assert list(placed.offsets) == [2]
    assert not offset.measured
    assert told(row(timeline, "n3"))[:3] == told(row(timeline, "n1"))[:3]
    assert placed.end_ns == START_NS + 195 * SECOND


def test_node_that_learns_late_once_keeps_its_clock(builder: RunBuilder) -> None:
    builder.attempt(0)
    for index, late in enumerate((300.0, 0.0)):
        for node in range(3):
            at = 400 * index + 5 + (late if node == 2 else 0.0)
            builder.event(0, "agent", node, at, "round_final", round=index, ranks=[node], world_size=3)
    (placed,) = place_attempts(collect_run(builder.root))
    assert placed.offsets == {}


def test_measured_offsets_are_used(builder: RunBuilder) -> None:
    """n2's wall clock is 2 s ahead; n3's was set 100 s back after it had started its workers."""
    builder.attempt(0)
    builder.round(0, 0, at=5, ahead={1: 2.0})
    late = make_failure(1, at=22.0, exception="ValueError: late")
    builder.fail(replace(late, ended_uptime_ns=late.ended_uptime_ns - 2 * SECOND))
    first = make_failure(2, at=-90.0, exception="KeyError: 'first'")
    builder.fail(replace(first, ended_uptime_ns=UPTIME_NS + 10 * SECOND))
    timeline = picture(builder)
    assert [told(row(timeline, name))[1][:3] for name in ("n1", "n2")] == [("starting", 5, 5.01)] * 2
    (placed,) = place_attempts(collect_run(builder.root))
    assert placed.attempt.clocks.host == "n1"
    assert placed.offsets[1].offset_ns == 2 * SECOND
    marks = {name: row(timeline, name).marks[0] for name in ("n2", "n3")}
    assert marks["n3"].entry.kind is MarkKind.CAUSE
    assert [(marks[name].at_ns - START_NS) / SECOND for name in ("n2", "n3")] == [20, 10]
    assert placed.end_ns - placed.start_ns < 30 * SECOND


@pytest.mark.parametrize("jump", [3600.0, -3600.0])
@pytest.mark.parametrize("node", [0, 2])
def test_an_agent_that_was_started_again_after_its_nodes_clock_was_set(
    builder: RunBuilder, node: int, jump: float
) -> None:
    """Of the coordinator's node or of another: the first round keeps its place beside the second."""
    builder.begin(at=5)
    for each in range(3):
        builder.clock_offset(0, each, at=5.01)
    builder.stopped(0, 0, at=20)
    builder.event(0, "agent", node, 22 + jump, "agent_started", pid=2)
    builder.round(0, 1, at=25, ahead={node: jump})
    for each in range(3):
        ahead = jump if each == node else 0.0
        builder.clock_offset(0, each, at=25.01, ahead=ahead)
        builder.event(0, "agent", each, 40 + ahead, "workers_succeeded", round=1)
    timeline = picture(builder)
    spans = [row(timeline, name).spans for name in ("n1", "n3")]
    for index, state in ((0, NodeState.UP), (1, NodeState.UP)):
        here, there = ([span for span in some if span.state is state][index] for some in spans)
        assert abs(here.start_ns - there.start_ns) < SECOND
        assert abs(here.end_ns - there.end_ns) < SECOND
    goodput = goodput_of(collect_run(builder.root))
    assert 29 < goodput.training < 31
    assert goodput.wall < 60


@pytest.mark.parametrize("jump", [3600.0, -3600.0])
@pytest.mark.parametrize("coordinator", [0, 2])
def test_a_clock_that_was_set_between_two_attempts(builder: RunBuilder, coordinator: int, jump: float) -> None:
    """Of the node by whose clock the second attempt is placed, which need not be the first one's."""
    for attempt, start, ahead in ((0, 0.0, 0.0), (1, 60.0, jump)):
        reference = coordinator if attempt else 0
        builder.compares_clocks = False
        mine = {node: ahead if node == reference else 0.0 for node in range(3)}
        builder.attempt(attempt, at=start + mine[0])
        builder.round(attempt, 0, at=start + 5, ahead=mine)
        for node in range(3):
            builder.clock_offset(attempt, node, at=start + 5.02, ahead=mine[node], reference=reference)
            builder.event(attempt, "agent", node, start + 30 + mine[node], "workers_succeeded", round=0)
    goodput = goodput_of(collect_run(builder.root))
    assert 29 < goodput.queued <= 36
    assert goodput.wall <= 91
    assert 49 < goodput.training < 51


def test_axis_shortens_waits_and_keeps_short_attempts_visible() -> None:
    axis = make_axis([(0, 0, 3600 * SECOND), (1, 90_000 * SECOND, 90_002 * SECOND)])
    first, gap, second = axis.pieces
    assert (first.attempt, gap.attempt, second.attempt) == (0, None, 1)
    assert gap.right - gap.left == pytest.approx(0.035)
    assert 0.04 < second.right - second.left < 0.06
    assert second.right == pytest.approx(1)
    assert axis.place(-5) == 0
    assert axis.place(10**18) == pytest.approx(1)
    places = [axis.place(when * SECOND) for when in (0, 1800, 3600, 50_000, 90_000, 90_001)]
    assert places == sorted(places)
    assert all(when % (60 * SECOND) == 0 for when in axis.ticks() if when < 3600 * SECOND)
    # An attempt that starts before the end of the one before: by another batch host's clock.
    axis = make_axis([(0, 0, 100 * SECOND), (1, 90 * SECOND, 200 * SECOND)])
    assert [piece.attempt for piece in axis.pieces] == [0, 1]
    assert axis.place(150 * SECOND) == pytest.approx(0.75)
    many = make_axis([(n, n * 1000 * SECOND, (n * 1000 + 10 + n) * SECOND) for n in range(100)])
    assert many.pieces[-1].right == pytest.approx(1)
    assert all(piece.right > piece.left for piece in many.pieces)


def test_imports_are_starting_until_the_first_step(builder: RunBuilder) -> None:
    """A round that ended before any step never ran; a node whose own workers report none runs when the others do."""
    builder.attempt(0)
    tell_agents(builder, 0, at=2, end=90)
    for index, (at, until) in enumerate(((5, 30), (35, 45), (50, 80))):
        builder.round(0, index, at=at, reason=f"restart {index} of 3" if index else "")
        builder.stopped(0, index, at=until)
        done = {"counted_steps": 9, "first_ns": START_NS + (at + 8) * SECOND, "step_ns": START_NS + until * SECOND}
        if index != 1:
            builder.event(0, "agent", 0, until, "workers_stopped", round=index, seconds=0.1, progress=done)
    builder.end(0, at=91, outcome="failed", code=1)
    spans = told(row(picture(builder), "n2"))
    shown = [span for span in spans if span[0] in ("starting", "running", "processes up")]
    assert [(state, start) for state, start, _ in shown] == [
        ("starting", 5), ("running", 13), ("starting", 35), ("starting", 50), ("running", 58)
    ]  # fmt: skip
    assert shown[2][2] >= 44.9
