"""What a node was doing from moment to moment of an attempt: a pure reading of its agents' times."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from operator import itemgetter
from typing import NamedTuple

from hpc_elastic.report.history import NodeLoss
from hpc_elastic.report.timeline_times import NodeTimes


class State(str, Enum):
    """Of a node or a rank."""

    LAUNCHING = "launching"
    """The attempt goes on, and its agent has not said a word yet."""
    RENDEZVOUS = "rendezvous"
    """Between rounds: agents agree on the next one."""
    STARTING = "starting"
    """The round is agreed upon, its workers are being started."""
    RUNNING = "running"
    STOPPING = "stopping"
    SPARE = "waiting as a spare"
    """Others run a round without it."""
    DONE = "done"
    """Its workers ended with 0."""
    LOST = "lost"
    """Nothing was heard from it."""


class Span(NamedTuple):
    """A stretch of one state. A tuple, because a long run of a thousand nodes has hundreds of thousands."""

    state: State
    start_ns: int
    end_ns: int
    round: int
    """-1: of none."""


class Stay(NamedTuple):
    """A node's part in a round, with every end known: told, or concluded. A tuple for the same reason."""

    round: int
    start_ns: int
    running_ns: int
    """When its workers ran; the stay's end where they never did."""
    stopping_ns: int
    end_ns: int
    lost_ns: int | None = None
    """When it was lost; its stay ends then."""
    back_ns: int | None = None
    """When it was heard of again."""
    succeeded: bool = False

    def spans(self) -> list[Span]:
        """Starting, running, stopping."""
        marks = (self.start_ns, self.running_ns, self.stopping_ns, self.end_ns)
        states = (State.STARTING, State.RUNNING, State.STOPPING)
        return [
            Span(state, start, end, self.round)
            for state, start, end in zip(states, marks, marks[1:], strict=False)
            if end > start
        ]


def make_stays(
    times: Sequence[NodeTimes], *, agent_starts: Sequence[int], losses: Mapping[int, NodeLoss], end_ns: int
) -> list[Stay]:
    """A node's parts in an attempt's rounds, ascending and without overlap.

    Args:
        times: Of one node, on the common axis.
        agent_starts: When its agents began.
        losses: By round, of this node.
        end_ns: Of the attempt, or the last that is known of it.
    """
    known = sorted([(when, item) for item in times if (when := _first(item)) is not None], key=itemgetter(0))
    stays: list[Stay] = []
    before = 0
    for number, (first, item) in enumerate(known):
        start = max(first, before)
        later = [when for when in agent_starts if when > start][:1]
        if number + 1 < len(known):
            later.append(known[number + 1][0])
        limit = min([*later, max(start, end_ns)])
        _, _, _, began, stopped, ended, succeeded = item
        loss = losses.get(item.round)
        lost = back = None
        if loss is not None and not loss.left:
            lost = limit = min(max(start, loss.gone_ns), max(limit, start))
            later += [when for when in (stopped, ended) if when is not None]
            back = min([when for when in later if when > lost], default=end_ns)
        end = limit if ended is None or lost is not None else max(start, min(ended, limit))
        stopping = end if stopped is None else min(end, max(start, stopped))
        running = end if began is None else min(max(start, began), stopping)
        stays.append(Stay(item.round, start, running, stopping, end, lost, back, succeeded))
        before = end
    return stays


def node_spans(
    stays: Sequence[Stay],
    *,
    agent_starts: Sequence[int],
    agent_ends: Sequence[int],
    rounds: Mapping[int, tuple[int, int]],
    start_ns: int,
    end_ns: int,
) -> list[Span]:
    """All that a node did in an attempt, ascending and without overlap; where nothing is known, there is no span.

    Args:
        stays: Its parts in rounds.
        agent_starts: When its agents began.
        agent_ends: When they ended.
        rounds: Every round's beginning and end, whoever was in it.
        start_ns: Of the attempt.
        end_ns: Of the attempt.
    """
    if not stays and not agent_starts:
        return []
    spans: list[Span] = []
    cursor, early_failure = start_ns, agent_starts[0] if agent_starts else None
    if early_failure is not None and early_failure > cursor:
        spans.append(Span(State.LAUNCHING, cursor, early_failure, -1))
        cursor = early_failure
    was_in = -1
    for stay in stays:
        spans += _between(cursor, stay.start_ns, rounds, was_in=was_in, then_in=stay.round)
        spans += stay.spans()
        cursor, was_in = stay.end_ns, stay.round
        if stay.lost_ns is not None:
            back = max(stay.back_ns or end_ns, cursor)
            if back > cursor:
                spans.append(Span(State.LOST, cursor, back, stay.round))
            cursor = back
    last_end = max((when for when in agent_ends if when >= cursor), default=None)
    until = min(end_ns, last_end) if last_end is not None else end_ns
    last = stays[-1] if stays else None
    if last is None or last.back_ns is None or last.back_ns < end_ns:
        if last is not None and last.succeeded:
            if until > cursor:
                spans.append(Span(State.DONE, cursor, until, last.round))
        else:
            spans += _between(cursor, until, rounds, was_in=was_in, then_in=None)
    return spans


def round_extents(stays: Iterable[Stay]) -> dict[int, tuple[int, int]]:
    """From when to when somebody was in each round."""
    found: dict[int, tuple[int, int]] = {}
    for stay in stays:
        start, end = found.get(stay.round, (stay.start_ns, stay.end_ns))
        found[stay.round] = (min(start, stay.start_ns), max(end, stay.end_ns))
    return found


def _between(
    start: int, end: int, rounds: Mapping[int, tuple[int, int]], *, was_in: int, then_in: int | None
) -> list[Span]:
    """Not in a round: a spare while others run one, else in rendezvous."""
    spans: list[Span] = []
    last = max(rounds, default=-1) + 1 if then_in is None else then_in
    for index in range(was_in + 1, last):
        if index not in rounds:
            continue
        others_start, others_end = max(start, rounds[index][0]), min(end, rounds[index][1])
        if others_end <= others_start:
            continue
        if others_start > start:
            spans.append(Span(State.RENDEZVOUS, start, others_start, -1))
        spans.append(Span(State.SPARE, others_start, others_end, index))
        start = others_end
    if end > start:
        spans.append(Span(State.RENDEZVOUS, start, end, -1))
    return spans


def _first(times: NodeTimes) -> int | None:
    """When it joined; who tells of an end alone had not."""
    return times.final_ns if times.final_ns is not None else times.started_ns
