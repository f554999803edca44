"""An attempt's events, all writers' together in time order; also while they are written."""

from __future__ import annotations

import heapq
import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from hpc_elastic.output.log_reader import OutputReader, chunk_for
from hpc_elastic.run.events import LARGEST_FILE, LONGEST_EVENT, describe_left_out
from hpc_elastic.run.paths import AttemptPaths

_WRITER = re.compile(r"[a-z]+-(-?\d+)-")


class ReadEvent(Struct, frozen=True, kw_only=True):
    """One line of an event log."""

    attempt: int
    writer: int
    """The node of its file; negative: the batch host."""
    raw: bytes
    """As it was written, without its line feed."""
    value: dict[str, Any]
    time_ns: int
    """On one clock for all nodes, as far as their offsets are known; never before an earlier line of its file."""


class EventParser:
    """Lines of one writer's file as events. Torn and foreign lines are left out."""

    def __init__(
        self, attempt: int, path: Path, offsets_ns: Mapping[int, int], *, names: Collection[str] | None = None
    ) -> None:
        """Args:
        attempt: Whose.
        path: The file: its name says which node's clock it is; an event may be about another node.
        offsets_ns: Node → how far its clock is ahead.
        names: Only these events; None: all.
        """
        self._names = names
        self._wanted = _lines_with(names) if names is not None else None
        match = _WRITER.match(path.name)
        self._attempt = attempt
        self._writer = int(match[1]) if match is not None else -1
        self._ahead = offsets_ns.get(self._writer, 0)
        self._path = path
        self._too_long = 0
        self._latest = 0

    def events(self, data: bytes) -> Iterator[ReadEvent]:
        """Of whole lines."""
        wanted = self._wanted
        if wanted is not None and len(data) < LONGEST_EVENT and not wanted.search(data):
            return
        for raw in data.split(b"\n"):
            if len(raw) >= LONGEST_EVENT:
                self._too_long += len(raw)
                continue
            if not raw or (wanted is not None and not wanted.search(raw)):
                continue  # not even parsed
            try:
                value = json.loads(raw)
            except (ValueError, RecursionError):
                continue
            if not isinstance(value, dict) or not isinstance(value.get("event"), str):
                continue
            if self._names is not None and value["event"] not in self._names:
                continue
            when = value.get("t")
            if isinstance(when, int) and not isinstance(when, bool):
                self._latest = max(self._latest, when - self._ahead)
            yield ReadEvent(attempt=self._attempt, writer=self._writer, raw=raw, value=value, time_ns=self._latest)

    def left_out(self, reader: OutputReader) -> list[str]:
        """A sentence for each bound that has left out something of what `reader` has read so far."""
        found = []
        if reader.left_out:
            found.append(describe_left_out(self._path, reader.left_out, f"it is larger than {LARGEST_FILE}"))
        if self._too_long:
            found.append(describe_left_out(self._path, self._too_long, f"a line is longer than {LONGEST_EVENT}"))
        return found


def event_files(attempt: AttemptPaths) -> list[Path]:
    """The writers' files, by name."""
    try:
        names = os.listdir(attempt.events)
    except OSError:
        return []
    return [attempt.events / name for name in sorted(names) if name.endswith(".jsonl") and not name.startswith(".")]


def event_reader(path: Path, *, chunk: int = chunk_for(1)) -> OutputReader:
    """Of one writer's file. The stacks of a node's workers may make a long line."""
    return OutputReader(path, chunk=chunk, longest=LONGEST_EVENT, largest=LARGEST_FILE)


def events_named(attempt: AttemptPaths, names: Collection[str]) -> Iterator[dict[str, Any]]:
    """The events of some names, file by file."""
    for path in event_files(attempt):
        parser = EventParser(attempt.number, path, {}, names=names)
        for event in _events(path, parser, chunk_for(1)):
            yield event.value


def _lines_with(names: Collection[str]) -> re.Pattern[bytes]:
    return re.compile(b"|".join(re.escape(f'"{name}"'.encode()) for name in sorted(names)))


def merged_events(
    attempt: AttemptPaths,
    offsets_ns: Mapping[int, int],
    *,
    names: Collection[str] | None = None,
    tell: Callable[[str], None] = lambda sentence: None,
) -> Iterator[ReadEvent]:
    """All that are there now, or those of some names, in time order, in bounded memory; `tell` is given what a bound
    leaves out."""
    files = event_files(attempt)
    parts = [
        _events(path, EventParser(attempt.number, path, offsets_ns, names=names), chunk_for(len(files)), tell)
        for path in files
    ]
    yield from heapq.merge(*parts, key=lambda event: event.time_ns)


def _events(
    path: Path, parser: EventParser, chunk: int, tell: Callable[[str], None] = lambda sentence: None
) -> Iterator[ReadEvent]:
    reader = event_reader(path, chunk=chunk)
    while (found := reader.read() or reader.rest()) is not None:
        yield from parser.events(found.data)
    for sentence in parser.left_out(reader):
        tell(sentence)
