"""Many files that may grow, each looked at as often as is worth while (`pace`)."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from hpc_elastic.reading.output_reader import Chunk, OutputReader
from hpc_elastic.reading.pace import next_interval

K = TypeVar("K", bound=Hashable)

PARTIAL_S = 2.0
"""After so long a line without an end is shown: a prompt, or a progress bar, which never ends its line."""
_AT_ONCE = 64
"""Chunks of one file before the next one has its turn."""


@dataclass(slots=True)
class _Watched:
    reader: OutputReader
    interval: float = 0.0
    due: float = -math.inf
    begun_at: float | None = None


class FollowedFiles(Generic[K]):
    """What is new in files. `now` is seconds on a monotonic clock throughout."""

    def __init__(self) -> None:
        self._files: dict[K, _Watched] = {}

    def __contains__(self, key: K) -> bool:
        return key in self._files

    def __len__(self) -> int:
        return len(self._files)

    def add(self, key: K, reader: OutputReader | Path) -> None:
        """Watch a file too, from where its reader stands."""
        self._files[key] = _Watched(OutputReader(reader) if isinstance(reader, Path) else reader)

    def drop(self, key: K) -> None:
        """Watch it no more."""
        self._files.pop(key, None)

    def watched(self) -> list[K]:
        """All that are watched, in the order in which they were added."""
        return list(self._files)

    def look(self, now: float, *, everything: bool = False, partial: bool = True) -> Iterator[tuple[K, Chunk]]:
        """What the files that are due have that was not seen yet.

        Args:
            now: The time.
            everything: All files, due or not.
            partial: Lines without an end too, after a while.
        """
        for key, file in list(self._files.items()):
            if not everything and file.due > now:
                continue
            grown = False
            for _ in range(_AT_ONCE):
                chunk = file.reader.read()
                if chunk is None:
                    break
                grown, file.begun_at = True, None
                yield key, chunk
            else:
                file.due = now  # there is more: at the next look
                continue
            if file.reader.has_begun_line:
                file.begun_at = now if file.begun_at is None else file.begun_at
                if partial and now - file.begun_at >= PARTIAL_S:
                    rest = file.reader.rest()
                    file.begun_at = None
                    if rest is not None:
                        yield key, rest
            file.interval = next_interval(file.interval, has_grown=grown, files=len(self._files))
            file.due = now + file.interval

    def rests(self) -> Iterator[tuple[K, Chunk]]:
        """Lines that have begun, at the end of it all."""
        for key, file in self._files.items():
            rest = file.reader.rest()
            if rest is not None:
                yield key, rest

    def seconds_until_due(self, now: float, *, most: float) -> float:
        """How long nothing need be looked at."""
        return max(0.0, min([most, *(file.due - now for file in self._files.values())]))
