"""``hpc-elastic logs --around-failure``: what all ranks printed when the first failure happened."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from msgspec import Struct

from hpc_elastic.errors import UsageError
from hpc_elastic.output.log_streams import LogStream, Piece, first_lines, last_of
from hpc_elastic.report.event_text import describe_time
from hpc_elastic.report.history import RunHistory
from hpc_elastic.report.subject import choose_subject
from hpc_elastic.report.verdict import Cause

SECONDS = 10
LINES = 40


class Moment(Struct, frozen=True, kw_only=True):
    """The first failure, as the report's verdict has it."""

    attempt: int
    round: int
    node: int
    """By whose clock; -1: not known."""
    time_ns: int
    rank: int | None
    """Who failed; None: a node did."""
    caption: str
    evidence: str


def first_failure(history: RunHistory, *, attempt: int | None) -> Moment:
    """When it was.

    Raises:
        UsageError: nothing has failed.
    """
    subject = choose_subject(history, attempt=attempt)
    verdict = subject.verdict
    if verdict.cause is Cause.NONE or subject.round is None or subject.attempt is None:
        where = f"attempt {attempt} of run {history.run_id}" if attempt is not None else f"run {history.run_id}"
        raise UsageError(f"--around-failure: nothing has failed in {where}; hpc-elastic logs --tail 100 shows its end")
    if verdict.lost_node is not None:
        loss = verdict.lost_node
        node, rank, when = -1, None, loss.gone_ns
        caption = loss.summary if loss.left or loss.broke else f"{loss.summary} (last sign of it)"
    elif verdict.failure is not None:
        failure = verdict.failure
        node, rank, when = failure.node, failure.global_rank, failure.ended_ns
        caption = f"rank {failure.global_rank} on {failure.host} failed: {failure.headline}"
    else:
        raise UsageError(f"--around-failure: the report of run {history.run_id} names no failure")
    return Moment(
        attempt=subject.attempt.number,
        round=subject.round.index,
        node=node,
        time_ns=when,
        rank=rank,
        caption=f"{describe_time(when)} {caption}",
        evidence=verdict.evidence,
    )


def nearest_lines(
    pieces: Iterable[Piece], *, at_us: int, count: int, ended: int | None = None
) -> tuple[list[Piece], list[Piece]]:
    """The last `count` lines of each output before a moment, and the first `count` after it, each in time order.

    Args:
        pieces: In time order.
        at_us: The moment.
        count: Lines of each output, before and after.
        ended: The rank that ended at that moment: what it printed was before it, also where its agent read it later.
    """
    before: dict[LogStream, deque[tuple[int, Piece]]] = {}
    lines: dict[LogStream, int] = {}
    after: list[Piece] = []
    left: dict[LogStream, int] = {}
    for order, piece in enumerate(pieces):
        if piece.block.time_us is not None and piece.block.time_us > at_us and piece.stream.rank != ended:
            room = left.get(piece.stream, count)
            first = first_lines(piece, room)
            left[piece.stream] = room - first.block.data.count(b"\n")
            if first.block.data:
                after.append(first)
            continue
        kept = before.setdefault(piece.stream, deque())
        kept.append((order, piece))
        lines[piece.stream] = lines.get(piece.stream, 0) + piece.block.data.count(b"\n")
        while kept and lines[piece.stream] - (number := kept[0][1].block.data.count(b"\n")) >= count:
            lines[piece.stream] -= number
            kept.popleft()
    found = sorted(
        ((kept[at][0], piece) for kept in before.values() for at, piece in enumerate(_cut(kept, count))),
        key=lambda item: item[0],
    )
    return [piece for _, piece in found], after


def _cut(kept: deque[tuple[int, Piece]], count: int) -> list[Piece]:
    """The pieces, the first one without its lines beyond the last `count` of all."""
    return last_of((piece for _, piece in kept), count)
