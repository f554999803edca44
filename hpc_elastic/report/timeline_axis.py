"""From wall-clock time to a place from left to right: attempts to scale, the waits between them cut short."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

_GAP_SHARE = 0.035
_LEAST_SHARE = 0.05
"""Of the axis, for the shortest attempt: one of two seconds beside one of ten hours can still be looked at."""
_STEPS: Sequence[int] = (
    1,
    2,
    5,
    10,
    15,
    30,
    60,
    120,
    300,
    600,
    900,
    1800,
    3600,
    7200,
    10800,
    21600,
    43200,
    86400,
    172800,
    604800,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A stretch of time to one scale."""

    start_ns: int
    end_ns: int
    left: float
    """From 0 to 1."""
    right: float
    attempt: int | None
    """None: the wait between two attempts."""


@dataclass(frozen=True, slots=True)
class Axis:
    """Pieces without holes, from 0 to 1."""

    pieces: tuple[Piece, ...]
    _starts: tuple[int, ...] = field(default=())

    def place(self, when_ns: int) -> float:
        """Where a time lies; what is outside lies at the edge."""
        if not self.pieces:
            return 0.0
        piece = self.pieces[max(0, bisect_right(self._starts, when_ns) - 1)]
        if piece.end_ns <= piece.start_ns:
            return piece.left
        share = (when_ns - piece.start_ns) / (piece.end_ns - piece.start_ns)
        return piece.left + min(1.0, max(0.0, share)) * (piece.right - piece.left)

    def ticks(self, *, spacing: float = 0.09) -> list[int]:
        """Round times, at least `spacing` of the axis apart, by UTC."""
        found: list[int] = []
        for piece in self.pieces:
            lasted, width = (piece.end_ns - piece.start_ns) / 1e9, piece.right - piece.left
            if piece.attempt is None or lasted <= 0 or width < spacing:
                continue
            least = lasted * spacing / width
            longest = int(least / _STEPS[-1] + 1) * _STEPS[-1]
            step = next((seconds for seconds in _STEPS if seconds >= least), longest)
            unit = step * 1_000_000_000
            first = -(-piece.start_ns // unit) * unit
            found += [when for when in range(first, piece.end_ns + 1, unit) if self.place(when) < 1 - spacing / 2]
        return found


def make_axis(attempts: Sequence[tuple[int, int, int]]) -> Axis:
    """Lay attempts out.

    Args:
        attempts: Number, start and end of each, ascending. One that starts before the end of the one before, by another
            host's clock, starts at that end.
    """
    if not attempts:
        return Axis(())
    spans: list[tuple[int | None, int, int]] = []
    for index, start, end in attempts:
        if spans:
            start = max(start, spans[-1][2])
            if start > spans[-1][2]:
                spans.append((None, spans[-1][2], start))
        spans.append((index, start, max(start + 1, end)))
    gaps = sum(1 for number, _, _ in spans if number is None)
    total = sum(end - start for number, start, end in spans if number is not None)
    gap_share = min(_GAP_SHARE, 0.3 / gaps) if gaps else 0.0
    least = min(_LEAST_SHARE, 0.5 / len(attempts)) * total
    weights = [max(float(end - start), least) for number, start, end in spans if number is not None]
    scale = (1 - gaps * gap_share) / sum(weights)
    pieces: list[Piece] = []
    left, each = 0.0, iter(weights)
    for number, start, end in spans:
        right = left + (gap_share if number is None else next(each) * scale)
        pieces.append(Piece(start_ns=start, end_ns=end, left=left, right=min(1.0, right), attempt=number))
        left = right
    return Axis(tuple(pieces), tuple(piece.start_ns for piece in pieces))
