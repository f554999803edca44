"""Many files that grow, followed together: each looked at as often as is worth while.

Not by inotify: it shows nothing of what other hosts write. A file that grows is looked at four times a second; one that
does not, less and less often, down to every two seconds. All files together are looked at 200 times a second at most,
so that a person who watches a run of a thousand ranks costs a file server no more than one who watches eight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, Protocol, TypeVar

from hpc_elastic.base.clock import Clock

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
"""Between two looks for files that are new."""
_AT_ONCE = 64
"""Reads of one file before the next one has its turn."""


class Reader(Protocol[T_co]):
    """What a file is read with, from where the reader stands: `log_reader.OutputReader`, `event_reader.EventFile`."""

    def read(self) -> T_co | None: ...

    def rest(self) -> T_co | None: ...

    @property
    def has_begun_line(self) -> bool: ...


class _Followed(Generic[T]):
    __slots__ = ("begun_at", "due", "interval", "reader")

    def __init__(self, reader: Reader[T]) -> None:
        self.reader = reader
        self.interval = 0.0
        self.due = -math.inf
        self.begun_at: float | None = None
        """When the line was seen that has no end yet."""


class FollowedFiles(Generic[K, T]):
    """What is new in files, and which files are new."""

    def __init__(self, find: Callable[[], None], *, clock: Clock, partial: bool = True) -> None:
        """Args:
        find: Is called now and then to `add` the files that are there.
        clock: For when a file is due.
        partial: Lines without an end are shown too, after a while.
        """
        self._find = find
        self._clock = clock
        self._partial = partial
        self._files: dict[K, _Followed[T]] = {}
        self._find_at = -math.inf

    def __contains__(self, key: K) -> bool:
        return key in self._files

    def add(self, key: K, reader: Reader[T]) -> None:
        """Follow a file from where its reader stands."""
        self._files[key] = _Followed(reader)

    def drop(self, key: K) -> None:
        """Follow it no more."""
        self._files.pop(key, None)

    def followed(self) -> list[K]:
        """All files, in the order in which they were added."""
        return list(self._files)

    def find(self) -> None:
        """Look for files that are new."""
        self._find()
        self._find_at = self._clock.monotonic() + max(_FIND_S, len(self._files) / LOOKS_PER_SECOND)

    def look(self, *, everything: bool = False) -> Iterator[tuple[K, T]]:
        """What the files that are due have that was not seen yet.

        Args:
            everything: All files, due or not.
        """
        now = self._clock.monotonic()
        if everything or now >= self._find_at:
            self.find()
        for key, file in list(self._files.items()):
            if everything or file.due <= now:
                for part in self._read(file, now):
                    yield key, part

    def rests(self) -> Iterator[tuple[K, T]]:
        """Lines that have begun, at the end of it all."""
        for key, file in self._files.items():
            rest = file.reader.rest()
            if rest is not None:
                yield key, rest

    def seconds_until_due(self) -> float:
        """How long nothing need be looked at."""
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
    """Seconds until a file is to be looked at again.

    Args:
        interval: How long it was this time; 0: it was the first.
        has_grown: Whether there was something new.
        files: How many are followed.
    """
    shortest = max(SHORTEST_S, files / LOOKS_PER_SECOND)
    if has_grown or not interval:
        return shortest
    return min(max(LONGEST_S, shortest), max(shortest, interval * _SLOWER))
