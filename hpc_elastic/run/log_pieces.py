"""The pieces of an output file that is rotated by size: their names, and reading back from their end.

``stdout.log``, the piece being written, becomes ``stdout.log.000`` when it is full, the next ``stdout.log.001``. None
is ever renamed again. The first, where a run's first error often stands, is always kept; so are the latest others.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from msgspec import Struct

from hpc_elastic.errors import UsageError

DEFAULT_PIECES = 5
_UNIT = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}
_NUMBER = re.compile(r"\.([0-9]{3,9})\Z")


class PieceLimit(Struct, frozen=True, kw_only=True):
    size: int
    count: int = DEFAULT_PIECES
    """Pieces that are kept, the one that is being written included; at least 2."""


def parse_bytes(text: str, option: str) -> int:
    """Read ``1G``, ``500M``, ``64K`` or bytes; powers of 1024, ``GB`` and ``GiB`` too."""
    match = re.match(r"([0-9]{1,15})(?:([KMGT])(?:i?B)?|B)?\Z", text.strip(), re.IGNORECASE)
    if match is None:
        raise UsageError(f"{option} {text!r}: give a size such as 500M or 1G (K, M, G, T: powers of 1024)")
    return int(match[1]) << _UNIT[(match[2] or "").upper()]


def parse_size(text: str, option: str) -> int:
    size = parse_bytes(text, option)
    if not 64 << 10 <= size <= 1 << 50:
        raise UsageError(f"{option} {text}: give from 64K to 1024T; without the option files grow without limit")
    return size


def piece_path(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number:03d}")


def find_pieces(path: Path, *, names: Callable[[Path], Iterable[str]] = os.listdir) -> list[int]:
    """The numbers of the full pieces of `path`, ascending. Raises what `names`, which lists its folder, raises."""
    found = []
    for name in names(path.parent):
        match = _NUMBER.search(name)
        if match is not None and name[: match.start()] == path.name:
            found.append(int(match[1]))
    return sorted(found)


def to_remove(numbers: Sequence[int], count: int) -> list[int]:
    """The full pieces of `numbers` (ascending) to remove, so that `count` are left with the one being written."""
    return list(numbers[1 : len(numbers) - (count - 2)]) if len(numbers) > count - 1 else []


class EndReader:
    """Reads an output file back from its end, over its pieces. As a context manager; positions count from the end."""

    def __init__(self, path: Path | str) -> None:
        self._path = Path(path)
        self._fds: list[int] = []
        self._sizes: list[int] = []
        self._left: list[int] | None = None
        try:
            self._open(self._path)
        except FileNotFoundError:
            # Between one piece and the next, or on a full disk, the last one is a full one.
            if not self._open_earlier():
                raise

    def read(self, count: int, *, before: int = 0) -> bytes:
        while sum(self._sizes) < before + count and self._open_earlier():
            pass
        parts = []
        end = before
        for fd, size in zip(self._fds, self._sizes, strict=True):
            if end < size and count > 0:
                take = min(count, size - end)
                parts.append(os.pread(fd, take, size - end - take))
                count -= take
                end = 0
            else:
                end -= size
        return b"".join(reversed(parts))

    def has(self, count: int) -> bool:
        while sum(self._sizes) <= count and self._open_earlier():
            pass
        return sum(self._sizes) > count

    def _open(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        self._fds.append(fd)
        self._sizes.append(os.fstat(fd).st_size)

    def _open_earlier(self) -> bool:
        if self._left is None:
            self._left = []
            try:
                if os.path.lexists(piece_path(self._path, 0)):  # the first one is always kept: one question, no listing
                    self._left = find_pieces(self._path)
            except OSError:
                pass
        if not self._left:
            return False
        number = self._left.pop()
        if self._left and self._left[-1] != number - 1:
            self._left.clear()  # what lay between is gone: what is older does not belong to this end
        try:
            self._open(piece_path(self._path, number))
        except OSError:
            return False
        return True

    def __enter__(self) -> EndReader:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self._fds:
            os.close(fd)


def holds_at_end(path: Path | str, words: bytes, *, within: int) -> bool:
    """Check for `words` in the last `within` bytes of an output file. Never raises."""
    try:
        with EndReader(path) as file:
            return words in file.read(within)
    except OSError:
        return False
