"""The outputs of many ranks as one, in the order in which they were printed. Bounded memory, whatever their size."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from hpc_elastic.reading.log_streams import LogStream
from hpc_elastic.reading.output_reader import OutputReader, Place, chunk_for, last_lines_place
from hpc_elastic.reading.stream_marks import Block, RoundMarks, StreamMarks, timed_blocks


@dataclass(frozen=True, slots=True)
class Piece:
    """Whole lines of one stream that were printed at one time."""

    stream: LogStream
    block: Block


def merged(
    readers: Mapping[LogStream, OutputReader],
    marks: RoundMarks,
    *,
    is_over: bool = True,
    window: tuple[int, int] | None = None,
) -> Iterator[Piece]:
    """Everything that the outputs hold from where their readers stand, in time order.

    Args:
        readers: Of one round. Streams without any time come last, one after the other.
        marks: That round's.
        is_over: Nothing more will come: a line without its end is one too.
        window: Only what was printed from then to then, microseconds; what has no time is there too.
    """
    parts = [
        _pieces(reader, one, marks.of(one.rank, one.stream), is_over, window)
        for one, reader in sorted(readers.items(), key=lambda item: (item[0].rank, item[0].stream))
    ]
    # By time; equal times by rank, for heapq.merge is stable.
    yield from heapq.merge(*parts, key=lambda piece: math.inf if piece.block.time_us is None else piece.block.time_us)


def _pieces(
    reader: OutputReader, stream: LogStream, marks: StreamMarks, is_over: bool, window: tuple[int, int] | None
) -> Iterator[Piece]:
    while True:
        chunk = reader.read() or (reader.rest() if is_over else None)
        if chunk is None:
            return
        for block in timed_blocks(chunk, marks):
            if window is not None and block.time_us is not None:
                if block.time_us > window[1]:
                    return
                if block.time_us < window[0]:
                    continue
            yield Piece(stream, block)


def readers_of(streams: Sequence[LogStream]) -> dict[LogStream, OutputReader]:
    """Readers that begin at the beginning."""
    return {one: OutputReader(one.path, chunk=chunk_for(len(streams))) for one in streams}


def readers_of_last(streams: Sequence[LogStream], count: int) -> dict[LogStream, OutputReader]:
    """Readers that begin with the last `count` lines of each; at the beginning where nothing can be read yet."""
    readers = readers_of(streams)
    for one in streams:
        try:
            place = last_lines_place(one.path, count)
        except OSError:
            continue
        readers[one] = OutputReader(one.path, at=place, chunk=chunk_for(len(streams)))
    return readers


def readers_around(
    streams: Sequence[LogStream], marks: RoundMarks, *, since_us: int, without_times: int
) -> dict[LogStream, OutputReader]:
    """Readers that begin shortly before a moment, found by the times that were kept.

    Args:
        streams: Of one round.
        marks: That round's.
        since_us: The moment.
        without_times: Lines at the end of an output that has no times: a failure is near a round's end.
    """
    readers = readers_of(streams)
    for one in streams:
        times = marks.of(one.rank, one.stream)
        try:
            if times.first_us is None:
                place: Place | None = last_lines_place(one.path, without_times)
            else:
                place = times.place_at(since_us)
        except OSError:
            continue
        readers[one] = OutputReader(one.path, at=place, chunk=chunk_for(len(streams)))
    return readers


def last_of(pieces: Iterable[Piece], count: int) -> list[Piece]:
    """The pieces with the last `count` lines."""
    kept: deque[Piece] = deque()
    lines = 0
    for piece in pieces:
        kept.append(piece)
        lines += piece.block.data.count(b"\n")
        while kept and lines - (first := kept[0].block.data.count(b"\n")) >= count:
            lines -= first
            kept.popleft()
    if kept and lines > count:
        first_piece = kept.popleft()
        data = first_piece.block.data
        at = 0
        for _ in range(lines - count):
            at = data.find(b"\n", at) + 1
        kept.appendleft(Piece(first_piece.stream, Block(first_piece.block.time_us, data[at:])))
    return list(kept)


def first_lines(piece: Piece, count: int) -> Piece:
    """The piece with its first `count` lines alone."""
    data, at = piece.block.data, 0
    for _ in range(count):
        at = data.find(b"\n", at) + 1
        if at in (0, len(data)):
            return piece
    return Piece(piece.stream, Block(piece.block.time_us, data[:at], piece.block.after_gap))
