"""Reads a run's events: the one reader of the files of `events.EventLog`, for `report` and `logs`.

Torn and foreign lines are skipped, and bounds hold against a file or a line of gigabytes, which no writer of ours
leaves.
"""

from __future__ import annotations

import heapq
import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Union

from msgspec import Struct, field
from msgspec.structs import replace

from hpc_elastic.base.codec import NOT_DECODED, UnreadableRecordError, decoder, from_json, readable_fields
from hpc_elastic.base.files import Owner, has_long_number, names_in, open_file, parse_json, read_again
from hpc_elastic.errors import UnsafePathError
from hpc_elastic.run import agent_events, control_events
from hpc_elastic.run.events import Note, RunEvent, SupervisorEvent, name_of
from hpc_elastic.run.paths import AttemptPaths

LONGEST_EVENT = 4 << 20
"""Bytes of one line; a line of 64 MiB takes two gigabytes when it is decoded."""
LARGEST_FILE = 64 << 20
"""Bytes that are read of one writer's file: the first half and the last half of a larger one."""
_CHUNK = 1 << 20
_TEXT_LIMIT = 4000
_SMALLEST_CHUNK = 4096
_CHUNKS_TOGETHER = 32 << 20
_TOO_LARGE = f"it is larger than {LARGEST_FILE} bytes"
_TOO_LONG = f"a line is longer than {LONGEST_EVENT} bytes"
_WRITER = re.compile(r"[a-z]+-(-?\d+)-")


def _defined_in(module: ModuleType, base: type[RunEvent]) -> dict[str, type[RunEvent]]:
    kinds = [kind for kind in vars(module).values() if isinstance(kind, type) and kind.__module__ == module.__name__]
    return {name_of(kind): kind for kind in kinds if issubclass(kind, base)}


SUPERVISOR_EVENTS = _defined_in(control_events, SupervisorEvent)
EVENTS: Mapping[str, type[RunEvent]] = {
    **_defined_in(control_events, RunEvent),
    **_defined_in(agent_events, RunEvent),
    name_of(Note): Note,
}
"""The type of each event, by its name in the file. ``agent_ended``, which two write, is the agent's here."""
_ANY_EVENT: Any = Union[tuple(EVENTS.values())]  # noqa: UP007 (made at run time)


def read_event(value: Mapping[str, Any]) -> RunEvent | None:
    """A field of another type takes its default; the readable items of a list stay."""
    name = value.get("event")
    kind = _kind_of(name, value.get("role")) if isinstance(name, str) else None
    if kind is None:
        return None
    try:
        return from_json(kind, value)
    except UnreadableRecordError:
        pass
    try:
        return kind(**readable_fields(kind, value))
    except TypeError:
        return None


def _kind_of(name: str, role: object) -> type[RunEvent] | None:
    return (SUPERVISOR_EVENTS.get(name) if role == "supervisor" else None) or EVENTS.get(name)


class _Head(Struct, kw_only=True, gc=False):
    """The fields that every line has. Another program may have written another type: then the default."""

    # In their order in a line: the decoder is quicker so.
    written_ns: int = field(default=0, name="t")
    """The writer's wall clock; 0: unknown."""
    number: int | None = field(default=None, name="n")
    host: str = ""
    node: int | None = None
    """The node that the event is about: an agent's own, or the one that a coordinator names."""
    role: str = ""
    """``supervisor``, ``agent`` or ``operator``."""
    name: str = field(name="event")
    by: int | None = None
    """The node of the writer, where the event is about a node."""


class EventLine(_Head, kw_only=True, gc=False):
    event: RunEvent | None = field(default=None, name="known_event")
    """None: this version does not know it, or can't read it."""
    raw: bytes = b""
    attempt: int = 0
    writer: int = -1
    """The node of its file; negative: the batch host. An event may be about another node."""
    time_ns: int = 0
    """Time on one clock for all nodes, as far as their offsets are known; never before an earlier line of its file."""

    @property
    def value(self) -> dict[str, Any]:
        value: dict[str, Any] = _decode(self.raw)
        return value


def event_line(value: Mapping[str, Any]) -> EventLine:
    return _with_event(EventLine(**readable_fields(_Head, value)), read_event(value), json.dumps(value).encode())


def _with_event(line: EventLine, event: RunEvent | None, raw: bytes) -> EventLine:
    if len(raw) > _TEXT_LIMIT:
        line.host = line.host[:_TEXT_LIMIT]
        if event is not None:
            texts = {name: getattr(event, name) for name in event.__struct_fields__}
            event = replace(event, **{name: it[:_TEXT_LIMIT] for name, it in texts.items() if isinstance(it, str)})
    if type(event) is Note:
        line.name = event.subject
    line.event, line.raw = event, raw
    return line


class EventFile:
    """No descriptor stays open between two reads: a large run has more files than a process may open."""

    def __init__(
        self,
        path: Path,
        *,
        attempt: int = 0,
        offsets_ns: Mapping[int, int] | None = None,
        names: Collection[str] | None = None,
        chunk: int = _CHUNK,
    ) -> None:
        match = _WRITER.match(path.name)
        self._path = path
        self._attempt = attempt
        self._writer = int(match[1]) if match is not None else -1
        self._ahead = (offsets_ns or {}).get(self._writer, 0)
        self._names = names
        self._wanted = None
        if names is not None:
            self._wanted = re.compile(b"|".join(re.escape(f'"{name}"'.encode()) for name in sorted(names)))
        self._chunk = chunk
        self._at = 0
        self._begun = bytearray()
        self._skipping = ""
        """Reason to skip everything up to the next line feed."""
        self._left_out: dict[str, int] = {}
        self._latest = 0

    def read(self) -> list[EventLine] | None:
        """The events in the next whole lines; None: there are none now, or the file is unreadable."""
        while data := self._pread():
            lines = self._whole_lines(data)
            if lines:
                return self._parse(lines)
        return None

    def rest(self) -> list[EventLine] | None:
        raw, self._begun = bytes(self._begun), bytearray()
        return self._parse(raw) or None

    @property
    def has_begun_line(self) -> bool:
        return bool(self._begun)

    def events(self) -> Iterator[EventLine]:
        while (found := self.read()) is not None:
            yield from found
        yield from self.rest() or ()

    def left_out(self) -> list[str]:
        name = f"{self._path.parent.name}/{self._path.name}"
        return [f"{name}: {count} bytes were left out: {why}" for why, count in self._left_out.items()]

    def _pread(self) -> bytes:
        try:
            fd = open_file(self._path, owner=Owner.ANY)  # a planted FIFO or link is not waited for
        except (OSError, UnsafePathError):
            return b""
        half = LARGEST_FILE // 2
        try:
            if self._at >= half and _TOO_LARGE not in self._left_out:
                unread = os.fstat(fd).st_size - half - self._at
                if unread > 0:
                    self._leave_out(unread + len(self._begun), _TOO_LARGE)
                    self._at += unread
                    self._skipping = _TOO_LARGE
                    self._begun.clear()
            data = os.pread(fd, self._chunk, self._at)
        except OSError:
            return b""
        finally:
            os.close(fd)
        self._at += len(data)
        return data

    def _whole_lines(self, data: bytes) -> bytes:
        if self._skipping:
            end = data.find(b"\n") + 1
            self._leave_out(end or len(data), self._skipping)
            if not end:
                return b""
            self._skipping, data = "", data[end:]
        end = data.rfind(b"\n") + 1
        lines = b""
        if end:
            lines = bytes(self._begun) + data[:end]
            self._begun.clear()
        self._begun += data[end:]
        if len(self._begun) >= LONGEST_EVENT:
            self._leave_out(len(self._begun), _TOO_LONG)
            self._skipping = _TOO_LONG
            self._begun.clear()
        return lines

    def _leave_out(self, count: int, why: str) -> None:
        self._left_out[why] = self._left_out.get(why, 0) + count

    def _parse(self, data: bytes) -> list[EventLine]:
        wanted, names = self._wanted, self._names
        if wanted is not None and not wanted.search(data):
            return []  # not even decoded
        found = _read([raw for raw in data.split(b"\n") if raw and (wanted is None or wanted.search(raw))])
        if names is not None:
            found = [line for line in found if line.name in names]
        attempt, writer, ahead, latest = self._attempt, self._writer, self._ahead, self._latest
        for line in found:
            if line.written_ns and line.written_ns - ahead > latest:
                latest = line.written_ns - ahead
            line.attempt, line.writer, line.time_ns = attempt, writer, latest
        self._latest = latest
        return found


def _read(lines: list[bytes]) -> list[EventLine]:
    """All at once, in half the time; one by one where something in them is foreign or torn."""
    text = b"\n".join(lines)
    if b'"supervisor"' not in text and not has_long_number(text):
        try:
            found, events = decoder(EventLine).decode_lines(text), decoder(_ANY_EVENT).decode_lines(text)
        except NOT_DECODED:
            pass
        else:
            if len(found) == len(events) == len(lines):
                return list(map(_with_event, found, events, lines))
    return [line for line in map(_read_one, lines) if line is not None]


def _read_one(raw: bytes) -> EventLine | None:
    if not has_long_number(raw):
        try:
            line = decoder(EventLine).decode(raw)
            kind = _kind_of(line.name, line.role)
            return _with_event(line, None if kind is None else decoder(kind).decode(raw), raw)
        except NOT_DECODED:
            pass
    value = _decode(raw)
    if not isinstance(value, dict) or not isinstance(value.get("event"), str):
        return None
    return _with_event(EventLine(**readable_fields(_Head, value)), read_event(value), raw)


def _decode(raw: bytes) -> Any:
    try:
        return parse_json(raw)
    except (ValueError, RecursionError):
        return None


def event_files(folder: Path) -> list[Path]:
    try:
        names = read_again(lambda: names_in(folder), folder)
    except OSError:
        return []
    return [folder / name for name in sorted(names) if name.endswith(".jsonl") and not name.startswith(".")]


def read_events(folder: Path, *, names: Collection[str] | None = None) -> Iterator[EventLine]:
    """The events in `folder` (`AttemptPaths.events`), or those with `names`: file by file, each in its own order."""
    for path in event_files(folder):
        yield from EventFile(path, names=names).events()


def merged_events(
    attempt: AttemptPaths,
    offsets_ns: Mapping[int, int],
    *,
    names: Collection[str] | None = None,
    on_left_out: Callable[[str], None] = lambda sentence: None,
) -> Iterator[EventLine]:
    """An attempt's events, or those with `names`, in time order and in bounded memory.

    `offsets_ns` maps a node to how far its clock is ahead. `on_left_out` gets, after the last event, one sentence for
    each bound that has left out something.
    """
    paths = event_files(attempt.events)
    chunk = min(_CHUNK, max(_SMALLEST_CHUNK, _CHUNKS_TOGETHER // max(1, len(paths))))
    files = [EventFile(path, attempt=attempt.number, offsets_ns=offsets_ns, names=names, chunk=chunk) for path in paths]
    yield from heapq.merge(*(file.events() for file in files), key=lambda event: event.time_ns)
    for file in files:
        for sentence in file.left_out():
            on_left_out(sentence)
