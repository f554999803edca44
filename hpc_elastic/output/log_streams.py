"""The outputs of a run's ranks: which there are, when each line was printed, and many of them as one in that order."""

from __future__ import annotations

import heapq
import math
import os
import re
from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from msgspec import Struct, field
from msgspec.structs import replace

from hpc_elastic.base.files import names_in, open_file, size_of
from hpc_elastic.output.log_files import HEADER, LARGEST, MARK, STDERR, STDOUT
from hpc_elastic.output.log_reader import Chunk, OutputReader, Place, chunk_for, last_lines_place
from hpc_elastic.run.agent_events import RoundFinal
from hpc_elastic.run.event_reader import read_events
from hpc_elastic.run.events import name_of
from hpc_elastic.run.paths import AttemptPaths, rank_index, round_index

_LONGEST_NUMBER = 18


class LogStream(Struct, frozen=True):
    attempt: int
    round: int
    rank: int
    stream: int
    path: Path


class RoundLayout(Struct, frozen=True, kw_only=True):
    nodes: Mapping[int, int]
    hosts: Mapping[int, str]
    world_size: int
    """0: no event names it."""


def round_numbers(attempt: AttemptPaths) -> list[int]:
    return sorted(index for name in _names(attempt.root) if (index := round_index(name)) is not None)


def rank_numbers(attempt: AttemptPaths, round_number: int) -> list[int]:
    return sorted(rank for name in _names(attempt.round_dir(round_number)) if (rank := rank_index(name)) is not None)


def streams_of(
    attempt: AttemptPaths,
    round_number: int,
    *,
    wanted: Callable[[int], bool] = lambda rank: True,
    streams: tuple[int, ...] = (STDOUT, STDERR),
) -> list[LogStream]:
    """The outputs of a round, by rank, stdout first. Their files need not be there yet."""
    found = []
    for rank in rank_numbers(attempt, round_number):
        if wanted(rank):
            paths = attempt.rank(round_number, rank)
            for stream in streams:
                path = paths.stdout if stream == STDOUT else paths.stderr
                found.append(LogStream(attempt.number, round_number, rank, stream, path))
    return found


def read_layouts(attempt: AttemptPaths) -> dict[int, RoundLayout]:
    nodes: dict[int, dict[int, int]] = {}
    sizes: dict[int, int] = {}
    hosts: dict[int, str] = {}
    for line in read_events(attempt.events, names={name_of(RoundFinal)}):
        node, event = line.node, line.event
        if node is None or node < 0 or not isinstance(event, RoundFinal) or event.round < 0:
            continue
        hosts[node] = line.host
        nodes.setdefault(event.round, {}).update((rank, node) for rank in event.ranks if rank >= 0)
        sizes[event.round] = max(sizes.get(event.round, 0), event.world_size or 0)
    return {
        index: RoundLayout(nodes=nodes.get(index, {}), hosts=hosts, world_size=sizes[index]) for index in sorted(sizes)
    }


def _names(folder: Path) -> list[str]:
    try:
        return names_in(folder)
    except OSError:
        return []


_ALL_IN_FULL = 64 << 20
"""Bytes of all nodes' files together from which on only the end of each is read."""
_END = 64 << 10


class StreamMarks(Struct):
    _pieces: dict[int, tuple[array[int], array[int]]] = field(default_factory=dict)
    _newest: int = -1
    _ends: tuple[array[int], array[int]] = field(default_factory=lambda: (array("q"), array("q")))
    _latest: int = 0
    first_us: int | None = None

    def add(self, piece: int, offset: int, time_us: int) -> None:
        if piece == self._newest:
            offsets, times = self._ends
        else:
            offsets, times = self._ends = self._pieces.setdefault(piece, (array("q"), array("q")))
            self._newest = piece
        if offsets and offset <= offsets[-1]:
            return  # foreign: what is printed stands behind what was
        # A wall clock that was set back must not turn the stream's own order around.
        if time_us > self._latest:
            self._latest = time_us
        if self.first_us is None:
            self.first_us = self._latest
        offsets.append(offset)
        times.append(self._latest)

    def time_at(self, place: Place) -> int | None:
        """When what stands at `place` was printed, at the earliest; None where there is no entry at all."""
        offsets, times = self._pieces.get(place.piece, (array("q"), array("q")))
        at = bisect_right(offsets, place.offset) - 1
        if at >= 0:
            return times[at]
        earlier = [piece for piece in self._pieces if piece < place.piece]
        return self._pieces[max(earlier)][1][-1] if earlier else self.first_us

    def cuts(self, piece: int, start: int, end: int) -> Iterator[tuple[int, int]]:
        """The entries of `piece` after `start` and before `end`: (offset, time)."""
        offsets, times = self._pieces.get(piece, (array("q"), array("q")))
        for at in range(bisect_right(offsets, start), bisect_left(offsets, end)):
            yield offsets[at], times[at]

    def place_at(self, time_us: int) -> Place | None:
        """The place from which on everything was printed at `time_us` or later."""
        for piece in sorted(self._pieces, reverse=True):
            offsets, times = self._pieces[piece]
            at = bisect_right(times, time_us) - 1
            if at >= 0:
                return Place(piece, offsets[at])
        return None


class RoundMarks(Struct, frozen=True, kw_only=True):
    streams: Mapping[tuple[int, int], StreamMarks]
    nodes: Mapping[int, int]

    def of(self, rank: int, stream: int) -> StreamMarks:
        return self.streams.get((rank, stream)) or StreamMarks()


def times_node(name: str) -> int | None:
    """``times-node-00012`` → 12; None for any other name."""
    match = re.fullmatch(r"times-node-(\d{5,})", name)
    return int(match[1]) if match else None


def read_marks(raw: bytes) -> Iterator[tuple[int, int, int, int, int]]:
    """Rank, stream, piece, offset, microseconds. Torn and foreign lines are left out, and all of another version."""
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
        match = MARK.fullmatch(line)
        if match is not None:
            rank, stream, piece, offset, time_us = map(int, match.groups())
            yield rank, stream, piece, offset, time_us


def read_round_marks(round_dir: Path, *, offsets_ns: Mapping[int, int] | None = None) -> RoundMarks:
    """All nodes' entries, less how far each node's clock is ahead. Missing or torn ones are left out."""
    files: list[tuple[int, Path, int]] = []
    try:
        for name in names_in(round_dir):
            node = times_node(name)
            if node is not None:
                path = round_dir / name
                files.append((node, path, min(size_of(path) or 0, 2 * LARGEST)))
    except OSError:
        pass
    in_full = sum(size for _, _, size in files) <= _ALL_IN_FULL
    streams: dict[tuple[int, int], StreamMarks] = {}
    nodes: dict[int, int] = {}
    for node, path, size in sorted(files):
        ahead = (offsets_ns or {}).get(node, 0) // 1000
        for rank, stream, piece, offset, time_us in read_marks(_end_of(path, size if in_full else min(size, _END))):
            marks = streams.get((rank, stream))
            if marks is None:
                marks = streams[rank, stream] = StreamMarks()
                nodes[rank] = node
            marks.add(piece, offset, time_us - ahead)
    return RoundMarks(streams=streams, nodes=nodes)


def _end_of(path: Path, size: int) -> bytes:
    try:
        fd = open_file(path)
    except OSError:
        return b""
    try:
        start = max(0, os.fstat(fd).st_size - size)
        raw = os.pread(fd, size, start)
        return HEADER + raw[raw.find(b"\n") + 1 :] if start else raw
    except OSError:
        return b""
    finally:
        os.close(fd)


class StreamPiece(Struct, frozen=True):
    """Whole lines of one stream that were printed at one time."""

    stream: LogStream
    time_us: int | None
    data: bytes
    after_gap: bool = False

    @property
    def lines(self) -> int:
        return self.data.count(b"\n")


def _by_time(piece: StreamPiece) -> float:
    return math.inf if piece.time_us is None else piece.time_us


def timed_pieces(stream: LogStream, chunk: Chunk, marks: StreamMarks) -> Iterator[StreamPiece]:
    """Cut a chunk where another time begins; a line's time is that of its first byte."""
    data, at = chunk.data, 0
    time_us = marks.time_at(chunk.head)
    gap = chunk.after_gap
    base = chunk.tail.offset - chunk.joint
    for offset, later in marks.cuts(chunk.tail.piece, base + chunk.joint, base + len(data)):
        cut = offset - base
        if cut > 0 and data[cut - 1 : cut] != b"\n":
            cut = data.find(b"\n", cut) + 1
        if not at < cut < len(data):
            if cut == at > 0:
                time_us = later  # several within one line: the next one begins after the last of them
            continue
        yield StreamPiece(stream, time_us, data[at:cut], gap)
        at, time_us, gap = cut, later, False
    yield StreamPiece(stream, time_us, data[at:], gap)


def merged(
    readers: Mapping[LogStream, OutputReader],
    marks: RoundMarks,
    *,
    is_over: bool = True,
    window: tuple[int, int] | None = None,
) -> Iterator[StreamPiece]:
    """Streams without any time come last. `is_over`: a line without its end is one too. `window`: microseconds."""

    def pieces(stream: LogStream) -> Iterator[StreamPiece]:
        reader, times = readers[stream], marks.of(stream.rank, stream.stream)
        while (chunk := reader.read() or (reader.rest() if is_over else None)) is not None:
            for piece in timed_pieces(stream, chunk, times):
                if window is not None and piece.time_us is not None:
                    if piece.time_us > window[1]:
                        return
                    if piece.time_us < window[0]:
                        continue
                yield piece

    # Equal times by rank, for heapq.merge is stable.
    yield from heapq.merge(*map(pieces, sorted(readers, key=_place)), key=_by_time)


def _place(stream: LogStream) -> tuple[int, int]:
    return stream.rank, stream.stream


def readers_of(
    streams: Sequence[LogStream], begin: Callable[[LogStream], Place | None] = lambda stream: None
) -> dict[LogStream, OutputReader]:
    readers = {}
    for one in streams:
        try:
            place = begin(one)
        except OSError:
            place = None  # nothing can be read yet
        readers[one] = OutputReader(one.path, at=place, chunk=chunk_for(len(streams)))
    return readers


def readers_of_last(streams: Sequence[LogStream], count: int | None) -> dict[LogStream, OutputReader]:
    return readers_of(streams, lambda one: None if count is None else last_lines_place(one.path, count))


def readers_around(
    streams: Sequence[LogStream], marks: RoundMarks, *, since_us: int, without_times: int
) -> dict[LogStream, OutputReader]:
    """`without_times`: lines at the end of an output that has no times: a failure is near a round's end."""

    def begin(one: LogStream) -> Place | None:
        times = marks.of(one.rank, one.stream)
        return last_lines_place(one.path, without_times) if times.first_us is None else times.place_at(since_us)

    return readers_of(streams, begin)


class _LastLines:
    def __init__(self, count: int) -> None:
        self._count = count
        self._pieces: deque[StreamPiece] = deque()
        self._lines = 0

    def add(self, piece: StreamPiece) -> None:
        self._pieces.append(piece)
        self._lines += piece.lines
        while self._pieces and self._lines - (first := self._pieces[0].lines) >= self._count:
            self._lines -= first
            self._pieces.popleft()

    def pieces(self) -> list[StreamPiece]:
        surplus = self._lines - self._count
        if surplus <= 0 or not self._pieces:
            return list(self._pieces)
        first, *rest = self._pieces
        return [replace(first, data=first.data[_end_of_lines(first.data, surplus) :], after_gap=False), *rest]


def _end_of_lines(data: bytes, count: int) -> int:
    at = 0
    for _ in range(count):
        at = data.find(b"\n", at) + 1
        if at in (0, len(data)):
            return len(data)
    return at


def last_of(pieces: Iterable[StreamPiece], count: int | None) -> Iterable[StreamPiece]:
    if count is None:
        return pieces
    last = _LastLines(count)
    for piece in pieces:
        last.add(piece)
    return last.pieces()


def nearest_lines(
    pieces: Iterable[StreamPiece], *, at_us: int, count: int, ended: int | None = None
) -> tuple[list[StreamPiece], list[StreamPiece]]:
    """`ended`: the rank that ended at that moment: what it printed was before it."""
    before: dict[LogStream, _LastLines] = {}
    after: list[StreamPiece] = []
    left: dict[LogStream, int] = {}
    for piece in pieces:
        stream = piece.stream
        if piece.time_us is None or piece.time_us <= at_us or stream.rank == ended:
            before.setdefault(stream, _LastLines(count)).add(piece)
            continue
        first = replace(piece, data=piece.data[: _end_of_lines(piece.data, left.setdefault(stream, count))])
        left[stream] -= first.lines
        if first.data:
            after.append(first)
    parts = [before[stream].pieces() for stream in sorted(before, key=_place)]
    return list(heapq.merge(*parts, key=_by_time)), after
