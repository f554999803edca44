"""Reads a run's events: the one reader of what `events.EventLog` writes, for `report` and `logs`.

Each writer has a file of its own, in which its lines stand in their order. `EventFile` reads one file, also while it
grows; `merged_events` reads all files of an attempt in time order; a line's event is one of `EVENTS`. Torn and foreign
lines are left out, and bounds hold for what no writer of ours leaves: a file of gigabytes, or a line of them.
"""

from __future__ import annotations

import heapq
import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from hpc_elastic.base.codec import NOT_DECODED, UnreadableRecordError, decoder, from_json, readable_fields
from hpc_elastic.base.files import Owner, ask_about, has_long_number, open_checked, parse_json
from hpc_elastic.errors import UnsafePathError
from hpc_elastic.run import agent_events, coordinator_events, supervisor_events
from hpc_elastic.run.attempt import is_job_id
from hpc_elastic.run.event_types import RunEvent, name_of
from hpc_elastic.run.paths import AttemptPaths

LONGEST_EVENT = 4 << 20
"""Bytes of one line; a line of 64 MiB takes two gigabytes when it is decoded."""
LARGEST_FILE = 64 << 20
"""Bytes of one writer's file that are read: of a larger one the first half of these, and the last."""
_CHUNK = 1 << 20
_TEXT_LIMIT = 4000
_SMALLEST_CHUNK = 4096
_CHUNKS_TOGETHER = 32 << 20
"""Bytes that all files which are merged may hold at once."""
_TOO_LARGE = f"it is larger than {LARGEST_FILE} bytes"
_TOO_LONG = f"a line is longer than {LONGEST_EVENT} bytes"
_WRITER = re.compile(r"[a-z]+-(-?\d+)-")


def _defined_in(module: ModuleType) -> dict[str, type[RunEvent]]:
    kinds = [kind for kind in vars(module).values() if isinstance(kind, type) and kind.__module__ == module.__name__]
    return {name_of(kind): kind for kind in kinds if issubclass(kind, RunEvent)}


SUPERVISOR_EVENTS = _defined_in(supervisor_events)
EVENTS = {
    **SUPERVISOR_EVENTS,
    **_defined_in(agent_events),
    **_defined_in(coordinator_events),
}
"""The type of each event, by its name in the file. Of ``agent_ended``, which two write, the agent's."""


def read_event(value: Mapping[str, Any]) -> RunEvent | None:
    """The event of a line; None: this version does not know it, or it lacks what makes it worth reading.

    A field of another type takes its default; of a list the readable items stay.
    """
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


class _Head(Struct, kw_only=True):
    """What every line has."""

    event: str
    t: int | None = None
    n: int | None = None
    role: str = ""
    node: int | None = None
    host: str = ""
    by: int | None = None


class EventLine(Struct, frozen=True, kw_only=True):
    """One line of an event log."""

    name: str
    event: RunEvent | None = None
    """None: this version does not know it, or can't read it."""
    raw: bytes = b""
    """As it was written, without its line feed."""
    attempt: int = 0
    writer: int = -1
    """The node of its file; negative: the batch host. An event may be about another node."""
    time_ns: int = 0
    """On one clock for all nodes, as far as their offsets are known; never before an earlier line of its file."""
    written_ns: int = 0
    """By the writer's wall clock."""
    number: int | None = None
    """Its place in its file."""
    role: str = ""
    """``supervisor``, ``agent`` or ``operator``."""
    node: int | None = None
    """That the event is about: of an agent's own that node, of a coordinator's the one that it names."""
    host: str = ""
    """That node's."""
    by: int | None = None
    """The node of the writer, where the event is about a node."""

    @property
    def value(self) -> dict[str, Any]:
        """All its fields, the common ones included."""
        value: dict[str, Any] = _decode(self.raw)
        return value


def event_line(value: Mapping[str, Any]) -> EventLine:
    """A line from its JSON value."""
    return _line(_head_of(value), json.dumps(value).encode(), read_event(value))


def _head_of(value: Mapping[str, Any]) -> _Head:
    """Another program may have given each of them another type."""
    return _Head(
        event=value["event"],
        t=_integer(value.get("t")),
        n=_integer(value.get("n")),
        role=value["role"] if isinstance(value.get("role"), str) else "",
        node=_integer(value.get("node")),
        host=value["host"] if isinstance(value.get("host"), str) else "",
        by=_integer(value.get("by")),
    )


def _line(
    head: _Head, raw: bytes, event: RunEvent | None, *, attempt: int = 0, writer: int = -1, time_ns: int = 0
) -> EventLine:
    if event is not None and len(raw) > _TEXT_LIMIT:
        event = _with_bounded_texts(event)
    return EventLine(
        name=head.event,
        event=event,
        raw=raw,
        attempt=attempt,
        writer=writer,
        time_ns=time_ns,
        written_ns=head.t or 0,
        number=head.n,
        role=head.role,
        node=head.node,
        host=head.host if len(head.host) <= _TEXT_LIMIT else head.host[:_TEXT_LIMIT],
        by=head.by,
    )


def _with_bounded_texts(event: RunEvent) -> RunEvent:
    texts = {name: getattr(event, name) for name in event.__struct_fields__}
    return replace(event, **{name: text[:_TEXT_LIMIT] for name, text in texts.items() if isinstance(text, str)})


class EventFile:
    """One writer's events, in their order; what is not there yet comes with a later call.

    No descriptor stays open between two reads: a large run has more files than a process may open.
    """

    def __init__(
        self,
        path: Path,
        *,
        attempt: int = 0,
        offsets_ns: Mapping[int, int] | None = None,
        names: Collection[str] | None = None,
        chunk: int = _CHUNK,
    ) -> None:
        """Args:
        path: Its name says which node's clock it is.
        attempt: Whose events they are.
        offsets_ns: Node → how far its clock is ahead.
        names: Only these events; None: all.
        chunk: Bytes to read at once.
        """
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
        """A line without its end so far."""
        self._skipping = ""
        """Why nothing is taken up to the next line feed; empty: all is taken."""
        self._left_out: dict[str, int] = {}
        """Why → bytes."""
        self._latest = 0

    def read(self) -> list[EventLine] | None:
        """The events in the next whole lines; None: there are no more now, or the file can't be read."""
        while data := self._pread():
            lines = self._whole_lines(data)
            if lines:
                return self._parse(lines)
        return None

    def rest(self) -> list[EventLine] | None:
        """The event whose line has no end; None: there is none."""
        raw, self._begun = bytes(self._begun), bytearray()
        return self._parse(raw) or None

    @property
    def has_begun_line(self) -> bool:
        return bool(self._begun)

    def events(self) -> Iterator[EventLine]:
        """All that follow, to the end that the file has now."""
        while (found := self.read() or self.rest()) is not None:
            yield from found

    def left_out(self) -> list[str]:
        """A sentence for each bound that has left out something of what was read so far."""
        name = f"{self._path.parent.name}/{self._path.name}"
        return [f"{name}: {count} bytes were left out: {why}" for why, count in self._left_out.items()]

    def _pread(self) -> bytes:
        try:
            fd = open_checked(self._path, owner=Owner.ANY)  # a planted FIFO or link is not waited for
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
        """The lines that end in `data`."""
        if self._skipping:
            end = data.find(b"\n") + 1
            self._leave_out(end or len(data), self._skipping)
            if not end:
                return b""
            self._skipping, data = "", data[end:]
        end = data.rfind(b"\n") + 1
        lines = bytes(self._begun) + data[:end] if end else b""
        if end:
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
        found = []
        for raw in data.split(b"\n"):
            if not raw or (wanted is not None and not wanted.search(raw)):
                continue
            read = _read(raw)
            if read is None or (names is not None and read[0].event not in names):
                continue
            head, event = read
            if head.t is not None:
                self._latest = max(self._latest, head.t - self._ahead)
            found.append(_line(head, raw, event, attempt=self._attempt, writer=self._writer, time_ns=self._latest))
        return found


def _read(raw: bytes) -> tuple[_Head, RunEvent | None] | None:
    """What a line says; None: it is torn or foreign. Its other values are decoded when they are asked for."""
    if not has_long_number(raw):
        try:
            head = decoder(_Head).decode(raw)
            kind = _kind_of(head.event, head.role)
            return head, None if kind is None else decoder(kind).decode(raw)
        except NOT_DECODED:
            pass
    value = _decode(raw)
    if not isinstance(value, dict) or not isinstance(value.get("event"), str):
        return None
    return _head_of(value), read_event(value)


def _decode(raw: bytes) -> Any:
    try:
        return parse_json(raw)
    except (ValueError, RecursionError):
        return None


def event_files(folder: Path) -> list[Path]:
    """The files that hold an attempt's events, by name; none where the folder is missing or can't be read."""
    try:
        try:
            names = os.listdir(folder)
        except FileNotFoundError:
            if not ask_about(folder):
                return []
            names = os.listdir(folder)
    except OSError:
        return []
    return [folder / name for name in sorted(names) if name.endswith(".jsonl") and not name.startswith(".")]


def read_events(folder: Path, *, names: Collection[str] | None = None) -> Iterator[EventLine]:
    """An attempt's events, or those of some names: file by file, each file in its own order.

    Args:
        folder: `AttemptPaths.events`.
        names: Only these; None: all.
    """
    for path in event_files(folder):
        yield from EventFile(path, names=names).events()


def merged_events(
    attempt: AttemptPaths,
    offsets_ns: Mapping[int, int],
    *,
    names: Collection[str] | None = None,
    on_left_out: Callable[[str], None] = lambda sentence: None,
) -> Iterator[EventLine]:
    """An attempt's events, or those of some names, in time order and in bounded memory.

    Args:
        attempt: Whose.
        offsets_ns: Node → how far its clock is ahead.
        names: Only these; None: all.
        on_left_out: Is given a sentence for each bound that has left out something, after the last event.
    """
    paths = event_files(attempt.events)
    chunk = min(_CHUNK, max(_SMALLEST_CHUNK, _CHUNKS_TOGETHER // max(1, len(paths))))
    files = [EventFile(path, attempt=attempt.number, offsets_ns=offsets_ns, names=names, chunk=chunk) for path in paths]
    yield from heapq.merge(*(file.events() for file in files), key=lambda event: event.time_ns)
    for file in files:
        for sentence in file.left_out():
            on_left_out(sentence)


def _integer(value: object) -> int | None:
    """The whole number that `value` is; None: it is none."""
    return value if type(value) is int else None


def job_id_of(value: object) -> str:
    """A Slurm job's id; what is none is an empty one."""
    return value if isinstance(value, str) and is_job_id(value) else ""
