"""What is read in the log of records and what is read in the events is the same; who gets which ranks."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from hpc_elastic.rendezvous.proposals import (
    assign_ranks,
    consequences,
    propose,
    propose_close,
    rank_layout,
    replacements,
    to_event,
    whole_segments,
)
from hpc_elastic.rendezvous.state import Member, RoundEvent, RoundRecord, RunNotice, Status
from hpc_elastic.run.control_events import NodeLost, RoundFrozen, RunClosed
from hpc_elastic.run.events import Note
from hpc_elastic.run.paths import Outcome

RECORD = RoundRecord(
    number=7,
    epoch="e",
    term=1,
    leader="00000-n0-0001000000000000-aaaa",
    notifier="",
    round=3,
    status=Status.JOINABLE,
    reason="worker failure on node 1",
    restarts_used=2,
)


@pytest.mark.parametrize("event", RoundEvent)
def test_an_event_says_of_a_record_what_the_record_says(event: RoundEvent) -> None:
    """`status` reads the newest record, and `report` the events."""
    found = to_event(event, RECORD, RECORD.reason)
    assert (found.round, found.reason) == (3, RECORD.reason)
    assert getattr(found, "restarts_used", 2) == 2


def test_what_some_records_have_beside_that_is_in_their_events() -> None:
    closed = propose_close(RECORD, Outcome.FAILED, "no restart is left")
    found = to_event(closed.event, closed.record, closed.reason)
    assert isinstance(found, RunClosed)
    assert (found.outcome, found.reason) == ("failed", closed.record.reason)
    members = tuple(Member(f"0000{n}-n{n}-0001000000000000-aaaa", n, 2) for n in (0, 2))
    frozen = to_event(RoundEvent.FREEZE, RECORD.successor(members=members), "2 nodes are here")
    assert isinstance(frozen, RoundFrozen)
    assert frozen.nodes == (0, 2)
    notice = RunNotice(reason="SIGUSR2 on n1", seconds=60.0)
    given = to_event(RoundEvent.NOTICE, RECORD.successor(notice=notice), "notice")
    text = "round 3: the job is about to end; workers have 60 s to save"
    assert given == Note(subject="notice_given", text=text, reason="notice", round=3)


def test_a_loss_belongs_to_the_round_that_had_its_workers() -> None:
    """It is certain only while the nodes come for the next round."""
    members = tuple(Member(f"0000{n}-n{n}-0001000000000000-aaaa", n, 2) for n in (0, 2))
    joinable = RECORD.successor(members=members)
    frozen = propose(joinable, RoundEvent.FREEZE, "without n2", members=members[:1], lost=(2,))
    closed = propose_close(joinable, Outcome.TOO_FEW_NODES, "1 of at least 2 nodes is left", lost=(2,))
    running = replace(joinable, status=Status.FINAL)
    reopened = propose(running, RoundEvent.REOPEN, "n2 stopped its heartbeat", lost=(2,), round=4)
    for before, proposal, index in ((joinable, frozen, 2), (joinable, closed, 2), (running, reopened, 3)):
        (event,) = consequences(before, proposal, lambda uid: 7.0)
        assert isinstance(event, NodeLost)
        assert (event.round, event.host, event.age) == (index, "n2", 7.0)


def test_a_node_that_was_given_up_was_not_lost_because_of_its_silence() -> None:
    members = tuple(Member(f"0000{n}-n{n}-0001000000000000-aaaa", n, 2) for n in (0, 2))
    running = RECORD.successor(members=members)
    reopened = propose(replace(running, status=Status.FINAL), RoundEvent.REOPEN, "n2 has no agent", lost=(2,), round=4)
    (event,) = consequences(running, replace(reopened, gone=(2,)), lambda uid: 0.8)
    assert isinstance(event, NodeLost)
    assert event.reason == "no agent is started there any more"


# -- who sits where, with which ranks: living members keep their slots, holes are filled, a shrink closes up


def member(node: int, agent: str = "a") -> Member:
    return Member(f"{node:05d}-{agent}", node, 1)


def slots(previous: list[int], present: list[int], max_nodes: int) -> list[int]:
    found = assign_ranks([member(n) for n in previous], [member(n) for n in present], max_nodes=max_nodes)
    return [m.node for m in found]


@pytest.mark.parametrize(
    ("previous", "present", "max_nodes", "expected"),
    [
        ([], [2, 0, 1], 3, [0, 1, 2]),
        ([], [3, 1, 2, 0], 2, [0, 1]),
        ([], [], 4, []),
        ([0, 1, 2], [2, 1, 0], 3, [0, 1, 2]),
        ([0, 1, 2], [0, 2], 3, [0, 2]),
        ([0, 1, 2], [0, 2, 3], 3, [0, 3, 2]),
        ([0, 1, 2], [0, 2, 4, 3], 3, [0, 3, 2]),
        ([0, 1, 2], [0, 2, 4, 3], 4, [0, 3, 2, 4]),
        ([0, 3, 2], [0, 1, 2, 3], 3, [0, 3, 2]),
        ([0, 3, 2], [0, 1, 2, 3], 4, [0, 3, 2, 1]),
        ([2, 3], [0, 1], 2, [0, 1]),
        ([2, 3], [3, 0], 2, [0, 3]),
        ([0, 1, 2, 3], [0, 1, 2, 3], 2, [0, 1]),
    ],
)
def test_examples(previous: list[int], present: list[int], max_nodes: int, expected: list[int]) -> None:
    assert slots(previous, present, max_nodes) == expected


def test_a_new_agent_of_a_member_node_gets_its_slot() -> None:
    found = assign_ranks([member(0), member(1)], [member(1), member(0, "b")], max_nodes=2)
    assert found == (member(0, "b"), member(1))


NODES = st.lists(st.integers(0, 12), unique=True, max_size=10)


@given(previous=NODES, present=NODES, max_nodes=st.integers(1, 12))
def test_properties(previous: list[int], present: list[int], max_nodes: int) -> None:
    previous = previous[:max_nodes]
    found = slots(previous, present, max_nodes)
    assert len(found) == min(len(present), max_nodes), "as many as there are, up to max"
    assert len(set(found)) == len(found)
    assert set(found) <= set(present)
    stayed = [node for node in previous if node in present]
    assert set(stayed) <= set(found), "no living member is evicted"
    assert [node for node in found if node in stayed] == stayed, "nor overtaken"
    if len(present) >= len(previous):
        for index, node in enumerate(previous):
            if node in present:
                assert found[index] == node, "where all holes can be filled, it keeps its very slot"
    newcomers = [node for node in found if node not in previous]
    if stayed:
        assert newcomers == sorted(newcomers), "the lowest node index fills the first hole"
    else:
        assert found == sorted(found), "topology decides where nobody has a slot"
    left_out = set(present) - set(found)
    assert not left_out or not newcomers or max(newcomers) < min(left_out), "a higher index does not jump the queue"
    assert slots(previous, present[::-1], max_nodes) == found, "the order of arrival does not matter"
    assert slots(found, present, max_nodes) == found, "the same nodes sit the same way again"


def sized(node: int, size: int) -> Member:
    return Member(f"{node:05d}-a", node, size)


def blocks(members: tuple[Member, ...]) -> dict[int, list[int]]:
    """Node → its global ranks."""
    return {m.node: list(rank_layout(members, m.uid).global_ranks) for m in members}


def test_a_spare_takes_the_very_rank_block() -> None:
    before = assign_ranks([], [sized(0, 2), sized(1, 4), sized(2, 1)], max_nodes=3)
    after = assign_ranks(before, [sized(0, 2), sized(2, 1), sized(3, 4)], max_nodes=3)
    assert blocks(before) == {0: [0, 1], 1: [2, 3, 4, 5], 2: [6]}
    assert blocks(after) == {0: [0, 1], 3: [2, 3, 4, 5], 2: [6]}


def test_of_several_spares_the_one_that_brings_as_many_workers() -> None:
    before = assign_ranks([], [sized(0, 4), sized(1, 4), sized(2, 1)], max_nodes=3)
    spares = [sized(3, 1), sized(4, 4), sized(5, 4)]
    after = assign_ranks(before, [sized(0, 4), sized(2, 1), *spares], max_nodes=3)
    assert [m.node for m in after] == [0, 4, 2]
    assert [m.node for m in assign_ranks(before, [sized(0, 4), *spares], max_nodes=3)] == [0, 4, 3]
    assert [m.node for m in assign_ranks(before, [sized(0, 4), sized(2, 1), sized(3, 2)], max_nodes=3)] == [0, 3, 2]


def test_who_took_whose_place() -> None:
    def told(previous: list[int], present: list[int], max_nodes: int) -> list[tuple[int, int]]:
        before = [member(node) for node in previous]
        after = assign_ranks(before, [member(node) for node in present], max_nodes=max_nodes)
        return [(gone.node, come.node) for gone, come in replacements(before, after)]

    assert told([0, 1, 2], [0, 2, 3], 3) == [(1, 3)]
    assert told([0, 1, 2], [2, 3, 4], 3) == [(0, 3), (1, 4)]
    assert told([0, 1, 2], [0, 2], 3) == []  # a shrink
    assert told([0, 1], [0, 1, 2], 3) == []  # growth
    assert told([0, 1, 2], [1, 3, 4, 5], 4) == [(0, 3), (2, 4)]  # both: 5 came in addition
    assert told([], [0, 1], 2) == []
    assert told([0, 1], [2, 3], 2) == []  # nobody is left to be told


SIZED = st.lists(st.tuples(st.integers(0, 12), st.integers(1, 4)), unique_by=lambda pair: pair[0], max_size=10)


@given(previous=SIZED, present=SIZED, max_nodes=st.integers(1, 12))
def test_properties_with_any_numbers_of_workers(
    previous: list[tuple[int, int]], present: list[tuple[int, int]], max_nodes: int
) -> None:
    before = tuple(sized(*pair) for pair in previous[:max_nodes])
    live = [sized(*pair) for pair in present]
    after = assign_ranks(before, live, max_nodes=max_nodes)
    assert len(after) == min(len(live), max_nodes)
    assert set(after) <= set(live), "what a node brings now counts, not what it brought"
    here = {m.node for m in live}
    stayed = [m.node for m in before if m.node in here]
    assert [m.node for m in after if m.node in stayed] == stayed, "no living member is evicted or overtaken"
    ranks = [rank for m in after for rank in rank_layout(after, m.uid).global_ranks]
    assert ranks == list(range(sum(m.local_world_size for m in after))), "contiguous in slot order"
    if len(live) >= len(before) and stayed:
        for gone, come in replacements(before, after):
            assert after.index(come) == before.index(gone), "a hole is filled where it is"
            kept = [m for m in before if m.node in here]
            if all(m in live for m in kept) and all(
                g.local_world_size == c.local_world_size for g, c in replacements(before, after)
            ):
                assert blocks(after)[come.node] == blocks(before)[gone.node], "and with it the rank block"
    unseated = [m for m in live if m.node not in {seated.node for seated in after} | {m.node for m in before}]
    for gone, come in replacements(before, after) if stayed else []:
        if come.local_world_size != gone.local_world_size:
            assert gone.local_world_size not in {m.local_world_size for m in unseated}, "one that fits was left out"
    assert assign_ranks(after, live, max_nodes=max_nodes) == after, "the same nodes sit the same way again"
    assert assign_ranks(before, live[::-1], max_nodes=max_nodes) == after, "the order of arrival does not matter"


# -- ranks


@given(sizes=st.lists(st.integers(1, 16), min_size=1, max_size=40))
@example(sizes=[4, 1, 8])
def test_the_ranks_of_all_nodes_are_the_numbers_below_the_world_size(sizes: list[int]) -> None:
    members = [sized(100 - slot, size) for slot, size in enumerate(sizes)]
    layouts = [rank_layout(members, member.uid) for member in members]
    assert [rank for layout in layouts for rank in layout.global_ranks] == list(range(sum(sizes)))
    assert {layout.world_size for layout in layouts} == {sum(sizes)}
    assert [layout.group_rank for layout in layouts] == list(range(len(sizes)))
    assert {layout.group_world_size for layout in layouts} == {len(sizes)}
    assert [layout.local_world_size for layout in layouts] == sizes
    assert [layout.first_rank for layout in layouts] == [layout.global_ranks[0] for layout in layouts]


def test_who_is_no_member_has_no_rank() -> None:
    with pytest.raises(StopIteration):
        rank_layout([member(0), member(1)], "stranger")


# -- segments


def by_segments(previous: list[int], present: list[int], max_nodes: int, segment: int) -> list[int]:
    before, live = ([member(n) for n in nodes] for nodes in (previous, present))
    return [m.node for m in assign_ranks(before, live, max_nodes=max_nodes, segment=segment)]


@pytest.mark.parametrize(
    ("previous", "present", "max_nodes", "expected"),
    [
        ([], [5, 0, 1, 3, 2, 4], 4, [0, 1, 2, 3]),
        ([], [0, 2, 3, 4, 5], 4, [2, 3, 4, 5]),
        ([0, 1, 2, 3], [0, 2, 3, 4, 5], 4, [4, 5, 2, 3]),
        ([0, 1, 2, 3], [0, 2, 3, 4], 4, [2, 3]),
        ([0, 1, 2, 3], [0, 1, 2], 4, [0, 1]),
        ([4, 5, 2, 3], [0, 1, 2, 3, 4, 5], 4, [4, 5, 2, 3]),
        ([2, 3], [0, 1, 2, 3], 4, [2, 3, 0, 1]),
        ([0, 1], [0, 2], 4, []),
    ],
)
def test_segments_of_two(previous: list[int], present: list[int], max_nodes: int, expected: list[int]) -> None:
    assert by_segments(previous, present, max_nodes, 2) == expected


@given(previous=NODES, present=NODES, segment=st.integers(1, 4), most=st.integers(1, 4), data=st.data())
def test_segments_are_in_whole_or_out(
    previous: list[int], present: list[int], segment: int, most: int, data: st.DataObject
) -> None:
    before = by_segments([], sorted(previous), most * segment, segment)
    assert len(before) % segment == 0
    found = by_segments(before, data.draw(st.permutations(present)), most * segment, segment)
    blocks = [found[start : start + segment] for start in range(0, len(found), segment)]
    for block in blocks:
        first = block[0]
        assert first % segment == 0
        assert block == list(range(first, first + segment)), "a segment is one block of ranks, in Slurm's order"
    whole = {n // segment for n in present if all(n // segment * segment + i in present for i in range(segment))}
    assert len(blocks) == min(len(whole), most), "as many whole ones as there are, up to max"
    # One level up, segments go by the rules for nodes.
    before_segments, present_segments = [n // segment for n in before[::segment]], sorted(whole)
    assert [block[0] // segment for block in blocks] == slots(before_segments, present_segments, most)
    assert {m.node // segment for m in whole_segments([member(n) for n in present], segment)} == whole


def test_a_segment_is_filled_by_one_with_as_many_workers_in_the_same_order() -> None:
    before = [sized(0, 4), sized(1, 2), sized(2, 4), sized(3, 4)]
    spares = [sized(4, 4), sized(5, 4), sized(6, 4), sized(7, 2)]
    after = assign_ranks(before, [sized(1, 2), *before[2:], *spares], max_nodes=4, segment=2)
    assert [m.node for m in after] == [6, 7, 2, 3]
    assert [(gone.node, come.node) for gone, come in replacements(before, after)] == [(0, 6), (1, 7)]
