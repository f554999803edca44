"""When the lines of an output were printed, as the agents wrote it down (`log_times`), on one clock for all nodes."""

from __future__ import annotations

import os
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hpc_elastic.log_times import HEADER, LARGEST, read_marks, times_node
from hpc_elastic.reading.output_reader import Chunk, Place

_ALL_IN_FULL = 64 << 20
"""Bytes of all nodes' files together from which on only the end of each is read."""
_END = 64 << 10


@dataclass(slots=True)
class StreamMarks:
    """One stream's entries, by place; times never go back."""

    _pieces: dict[int, tuple[array[int], array[int]]] = field(default_factory=dict)
    _newest: int = -1
    """The piece that was added to last."""
    _ends: tuple[array[int], array[int]] = field(default_factory=lambda: (array("q"), array("q")))
    """What is known of it."""
    _latest: int = 0
    first_us: int | None = None

    def add(self, piece: int, offset: int, time_us: int) -> None:
        """The next entry of the file, in its order."""
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
        """From where on everything was printed at `time_us` or later (what stands there may be a little older); None:
        all of it was."""
        for piece in sorted(self._pieces, reverse=True):
            offsets, times = self._pieces[piece]
            at = bisect_right(times, time_us) - 1
            if at >= 0:
                return Place(piece, offsets[at])
        return None

    @property
    def last_us(self) -> int:
        """When the last of it was printed."""
        return self._latest


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundMarks:
    """What all nodes wrote down in one round."""

    streams: Mapping[tuple[int, int], StreamMarks]
    """By rank and stream."""
    nodes: Mapping[int, int]
    """Rank → its node, where something was printed."""

    def of(self, rank: int, stream: int) -> StreamMarks:
        """One stream's; empty where there are none."""
        return self.streams.get((rank, stream)) or StreamMarks()


def read_round_marks(round_dir: Path, *, offsets_us: Mapping[int, int] | None = None) -> RoundMarks:
    """All nodes' entries. What is missing or torn is left out.

    Args:
        round_dir: The round's folder.
        offsets_us: Node → how far its clock is ahead, microseconds.
    """
    files: list[tuple[int, Path, int]] = []
    try:
        with os.scandir(round_dir) as entries:
            for entry in entries:
                node = times_node(entry.name)
                if node is not None:
                    files.append((node, Path(entry.path), min(entry.stat(follow_symlinks=False).st_size, 2 * LARGEST)))
    except OSError:
        pass
    in_full = sum(size for _, _, size in files) <= _ALL_IN_FULL
    streams: dict[tuple[int, int], StreamMarks] = {}
    nodes: dict[int, int] = {}
    for node, path, size in sorted(files):
        ahead = (offsets_us or {}).get(node, 0)
        for rank, stream, piece, offset, time_us in read_marks(_end_of(path, size if in_full else min(size, _END))):
            marks = streams.get((rank, stream))
            if marks is None:
                marks = streams[rank, stream] = StreamMarks()
                nodes[rank] = node
            marks.add(piece, offset, time_us - ahead)
    return RoundMarks(streams=streams, nodes=nodes)


def _end_of(path: Path, size: int) -> bytes:
    """The last `size` bytes of a file, as a file of their own."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
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


@dataclass(frozen=True, slots=True)
class Block:
    """Whole lines that were printed at one time."""

    time_us: int | None
    """None: it is not known when."""
    data: bytes
    after_gap: bool = False


def timed_blocks(chunk: Chunk, marks: StreamMarks) -> Iterator[Block]:
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
        yield Block(time_us, data[at:cut], gap)
        at, time_us, gap = cut, later, False
    yield Block(time_us, data[at:], gap)
