"""Reading outputs that may grow, be rotated (`log_pieces`), be missing, or hold a gigabyte without a line end."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from msgspec import Struct

from hpc_elastic.base.clock import Clock
from hpc_elastic.base.files import ask_about, names_in, open_file, size_of
from hpc_elastic.run.log_pieces import find_pieces, piece_path

CHUNK = 64 << 10
LONGEST_LINE = 64 << 10
_TRIES = 10
_SMALLEST_CHUNK = 4096
_MEMORY = 32 << 20
"""Bytes that all files together may hold of their content at once."""
_ASK_EACH = 4
"""One look of so many that find nothing new asks the file server for the folder, too."""


class Place(Struct, frozen=True):
    piece: int
    """The number of a full piece; the one that is being written has the next free number."""
    offset: int


class Chunk(Struct, frozen=True, kw_only=True):
    data: bytes
    """Ends with a line feed."""
    head: Place
    tail: Place
    """The place of `joint`: another piece's beginning where a line goes on in it, else `head`."""
    joint: int = 0
    after_gap: bool = False
    """Pieces before it were removed before they were read."""


class OutputReader:
    """The lines of one output, in order; what is not there yet comes with a later call."""

    def __init__(self, path: Path, *, at: Place | None = None, chunk: int = CHUNK) -> None:
        """It begins at `at`; None: with the first piece that is there. `chunk`: bytes to read at once."""
        self.path = path
        self._chunk = max(_SMALLEST_CHUNK, chunk)
        self._number: int | None = at.piece if at is not None else None
        self._offset = at.offset if at is not None else 0
        self._inode: int | None = None
        self._begun = bytearray()
        self._begun_at = Place(0, 0)
        self._gap = False
        self._empty_looks = 0

    def read(self) -> Chunk | None:
        """The next whole lines; None: there are no more now, or the file can't be read."""
        while True:
            try:
                data, is_last = self._pread()
            except OSError:
                return None
            if not data:
                if is_last:
                    self._empty_looks += 1
                    if self._empty_looks % _ASK_EACH == 0:
                        ask_about(self.path.parent)  # else an NFS client would hide for a minute that it was rotated
                    return None
                self._number, self._offset, self._inode = (self._number or 0) + 1, 0, None
                continue
            here = Place(self._number or 0, self._offset)
            self._offset = here.offset + len(data)
            chunk = self._take(data, here)
            if chunk is not None:
                return chunk

    def rest(self) -> Chunk | None:
        """The line that has begun, as a line; None: none has."""
        if not self._begun:
            return None
        data, self._begun = bytes(self._begun) + b"\n", bytearray()
        return Chunk(data=data, head=self._begun_at, tail=self._begun_at, after_gap=self._take_gap())

    @property
    def has_begun_line(self) -> bool:
        return bool(self._begun)

    def _take(self, data: bytes, here: Place) -> Chunk | None:
        joint = len(self._begun)
        head = self._begun_at if joint else here
        cut = data.rfind(b"\n") + 1
        if not cut and joint + len(data) < LONGEST_LINE:
            self._begun += data  # in place: a line of megabytes comes in many pieces
            self._begun_at = head
            return None
        text = bytes(self._begun) + (data[:cut] if cut else data + b"\n")
        self._begun = bytearray(data[cut:] if cut else b"")
        self._begun_at = Place(here.piece, here.offset + cut)
        is_one = here.piece == head.piece
        return Chunk(
            data=text,
            head=head,
            tail=head if is_one else here,
            joint=0 if is_one else joint,
            after_gap=self._take_gap(),
        )

    def _take_gap(self) -> bool:
        gap, self._gap = self._gap, False
        return gap

    def _pread(self) -> tuple[bytes, bool]:
        fd, is_last = self._open()
        try:
            data = os.pread(fd, self._chunk, self._offset)
            if not data and is_last and os.fstat(fd).st_size < self._offset:
                self._offset, self._gap, self._begun = 0, True, bytearray()  # it was emptied
                data = os.pread(fd, self._chunk, 0)
            return data, is_last
        finally:
            os.close(fd)

    def _open(self) -> tuple[int, bool]:
        if self._number is None:
            numbers = _pieces(self.path)
            self._number = numbers[0] if numbers else 0
        has_asked = False
        for _ in range(_TRIES):
            fd = _open_or_none(self.path)
            if fd is not None and self._inode is not None:
                info = os.fstat(fd)
                if info.st_ino == self._inode or info.st_nlink == 0:  # folded meanwhile: the same bytes
                    return fd, True
            full = _open_or_none(piece_path(self.path, self._number))
            if full is not None:
                if fd is not None:
                    os.close(fd)
                self._inode = None
                return full, False
            if fd is None:
                if has_asked or not ask_about(self.path.parent):
                    raise FileNotFoundError(str(self.path))
                has_asked = True  # an NFS client remembers for a minute what it did not find
                continue
            numbers = _pieces(self.path)
            if self._inode is None and self._number == (numbers[-1] + 1 if numbers else 0):
                self._inode = os.fstat(fd).st_ino
                return fd, True
            os.close(fd)
            if self._number in numbers:
                continue  # it has become a full one just now
            # Ours was removed, or the whole file replaced.
            later = [number for number in numbers if number > self._number]
            self._gap = self._gap or bool(self._begun) or self._offset > 0 or bool(later)
            self._number = later[0] if later else numbers[-1] + 1 if numbers else 0
            self._offset, self._inode, self._begun = 0, None, bytearray()
        raise FileNotFoundError(str(self.path))


def chunk_for(files: int) -> int:
    return min(CHUNK, max(_SMALLEST_CHUNK, _MEMORY // max(1, files)))


def last_lines_place(path: Path, count: int) -> Place:
    """A line without an end is one, too. Raises OSError: nothing is there that can be read."""
    numbers = _pieces(path)
    current = numbers[-1] + 1 if numbers else 0
    # Pieces that lie before a gap do not belong to its end.
    reach = [number for at, number in enumerate(reversed(numbers)) if number == current - 1 - at]
    needed, is_end = count, True
    place = Place(current, 0)
    for number in (current, *reach):
        file = path if number == current else piece_path(path, number)
        try:
            fd = open_file(file)
        except FileNotFoundError:
            if number == current and reach:
                continue
            raise
        try:
            end = os.fstat(fd).st_size
            place = Place(number, 0)
            while end > 0:
                start = max(0, end - CHUNK)
                data = os.pread(fd, end - start, start)
                if is_end and not count:
                    return Place(number, end)
                if is_end and data.endswith(b"\n"):
                    needed += 1  # the last line's own end
                is_end = is_end and not data
                found = data.count(b"\n")
                if found >= needed:
                    at = len(data)
                    for _ in range(needed):
                        at = data.rfind(b"\n", 0, at)
                    return Place(number, start + at + 1)
                needed -= found
                end = start
        finally:
            os.close(fd)
    return place


def _open_or_none(path: Path) -> int | None:
    try:
        return open_file(path)
    except FileNotFoundError:
        return None


def _pieces(path: Path) -> list[int]:
    """The full pieces of an output; one question where it is not rotated."""
    try:
        return find_pieces(path, names=names_in) if size_of(piece_path(path, 0)) is not None else []
    except OSError:
        return []


K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

PARTIAL_S = 2.0
"""After so long a line without an end is shown: a prompt, or a progress bar, which never ends its line."""
SHORTEST_S = 0.25
LONGEST_S = 2.0
LOOKS_PER_SECOND = 200
_SLOWER = 1.5
_FIND_S = 1.0
_AT_ONCE = 64


class Reader(Protocol[T_co]):
    """A reader of one file from where it stands: `log_reader.OutputReader`, `event_reader.EventFile`."""

    def read(self) -> T_co | None: ...

    def rest(self) -> T_co | None: ...

    @property
    def has_begun_line(self) -> bool: ...


class _Followed(Generic[T]):
    def __init__(self, reader: Reader[T]) -> None:
        self.reader = reader
        self.interval = 0.0
        self.due = -math.inf
        self.begun_at: float | None = None


class FollowedFiles(Generic[K, T]):
    def __init__(self, find: Callable[[], None], *, clock: Clock, partial: bool = True) -> None:
        """`find` is called now and then to `add` the files that are there."""
        self._find = find
        self._clock = clock
        self._partial = partial
        self._files: dict[K, _Followed[T]] = {}
        self._find_at = -math.inf

    def add(self, key: K, reader: Reader[T]) -> None:
        self._files[key] = _Followed(reader)

    def drop(self, key: K) -> None:
        self._files.pop(key, None)

    def followed(self) -> list[K]:
        return list(self._files)

    def find(self) -> None:
        self._find()
        self._find_at = self._clock.monotonic() + max(_FIND_S, len(self._files) / LOOKS_PER_SECOND)

    def look(self, *, everything: bool = False) -> Iterator[tuple[K, T]]:
        now = self._clock.monotonic()
        if everything or now >= self._find_at:
            self.find()
        for key, file in list(self._files.items()):
            if everything or file.due <= now:
                for part in self._read(file, now):
                    yield key, part

    def rests(self) -> Iterator[tuple[K, T]]:
        for key, file in self._files.items():
            rest = file.reader.rest()
            if rest is not None:
                yield key, rest

    def seconds_until_due(self) -> float:
        return max(0.0, min([self._find_at, *(file.due for file in self._files.values())]) - self._clock.monotonic())

    def _read(self, file: _Followed[T], now: float) -> Iterator[T]:
        has_grown = False
        for _ in range(_AT_ONCE):
            part = file.reader.read()
            if part is None:
                break
            has_grown, file.begun_at = True, None
            yield part
        else:
            file.due = now  # there is more: at the next look
            return
        if self._partial and file.reader.has_begun_line:
            file.begun_at = now if file.begun_at is None else file.begun_at
            if now - file.begun_at >= PARTIAL_S:
                file.begun_at = None
                rest = file.reader.rest()
                if rest is not None:
                    yield rest
        file.interval = next_interval(file.interval, has_grown=has_grown, files=len(self._files))
        file.due = now + file.interval


def next_interval(interval: float, *, has_grown: bool, files: int) -> float:
    """Seconds until one of so many files is to be looked at again. `interval`: this time's; 0: it was the first."""
    shortest = max(SHORTEST_S, files / LOOKS_PER_SECOND)
    if has_grown or not interval:
        return shortest
    return min(max(LONGEST_S, shortest), max(shortest, interval * _SLOWER))
