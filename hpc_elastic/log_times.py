"""When what was printed: the lines of a file that stands beside the output files of one node's ranks. Pure.

A worker's output is kept byte for byte, with no time in it. So its agent writes down now and then, at most every 10 ms
of each stream, how much it had of it and when: ``RANK STREAM PIECE OFFSET MICROSECONDS``, one line each, after a first
line with the version. What stands at OFFSET of that piece, and after it up to the next such place, was printed at that
time of the node's wall clock, or after it. The file stays below 512 KiB: when it is full, its older three quarters lose
every second entry of each stream, so that the end of a round, where failures are, is known best.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from hpc_elastic.lazy_pattern import pattern
from hpc_elastic.light_dataclasses import dataclass

HEADER = b"log times 1\n"
LARGEST = 512 << 10
"""Bytes from which on it is thinned out."""
FINEST_US = 10_000
STDOUT, STDERR = 1, 2
_LINE = pattern(rb"(\d{1,9}) ([12]) (\d{1,9}) (\d{1,15}) (\d{1,18})")
_LONGEST_NUMBER = 18
_WHOLE_SHARE = 4
"""One part of so many, the newest, stays whole."""


@dataclass(frozen=True, slots=True)
class TimeMark:
    """One entry."""

    rank: int
    stream: int
    """`STDOUT` or `STDERR`."""
    piece: int
    """Of a rotated file: its number, from 0; the one that is being written has the next free one."""
    offset: int
    """Bytes from the piece's beginning."""
    time_us: int
    """Since the epoch, by the node's wall clock."""


def times_path(round_dir: Path, node: int) -> Path:
    """Where a node's entries for a round are."""
    return round_dir / f"times-node-{node:05d}"


def times_node(name: str) -> int | None:
    """``times-node-00012`` → 12; None for any other name."""
    match = re.fullmatch(r"times-node-(\d{5,})", name)
    return int(match[1]) if match else None


def mark_line(mark: TimeMark) -> bytes:
    """One entry's line."""
    return b"%d %d %d %d %d\n" % (mark.rank, mark.stream, mark.piece, mark.offset, mark.time_us)


def read_marks(raw: bytes) -> Iterator[tuple[int, int, int, int, int]]:
    """The entries of a file, in its order, as the fields of `TimeMark`: a large run has millions.

    Torn and foreign lines are left out, and all of another version.
    """
    if not raw.startswith(HEADER):
        return
    body = raw[len(HEADER) : raw.rfind(b"\n") + 1]
    words = body.split()
    is_plain = len(words) == 5 * body.count(b"\n") and max(map(len, words), default=0) <= _LONGEST_NUMBER
    if is_plain and body.count(b" ") == 4 * body.count(b"\n") and b"".join(words).isdigit():
        numbers = map(int, words)
        yield from zip(numbers, numbers, numbers, numbers, numbers, strict=True)
        return
    for line in body.split(b"\n"):
        match = _LINE.fullmatch(line)
        if match is not None:
            rank, stream, piece, offset, time_us = map(int, match.groups())
            yield rank, stream, piece, offset, time_us


def thinned(raw: bytes) -> bytes:
    """A file's bytes without every second entry of each stream in its older part, but for the first of each piece."""
    whole_from = raw.find(b"\n", len(raw) - len(raw) // _WHOLE_SHARE) + 1 or len(raw)
    kept = [HEADER]
    seen: dict[bytes, int] = {}
    for line in raw[: min(whole_from, len(raw))].split(b"\n"):
        if _LINE.fullmatch(line) is None:
            continue
        key = b" ".join(line.split(b" ", 3)[:3])
        count = seen.get(key, 0)
        seen[key] = count + 1
        if count % 2 == 0:
            kept.append(line + b"\n")
    kept.append(raw[whole_from:])
    return b"".join(kept)
