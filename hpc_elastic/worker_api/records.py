"""The records that a worker and its agent write for each other. Pure.

A worker's heartbeat is bytes in a small mapped file, where its agent reads them; the notice that the job is going to be
ended lies there, too. The file holds two copies of the heartbeat. The worker writes them in turn, each with a checksum,
so that a reader always finds one that is whole: also while the other is being written, and where the writer was stopped
or killed meanwhile. A rank of the in-process restart group reports in a named pipe, one line of JSON at a time, short
enough to be written whole beside those of other ranks.
"""

from __future__ import annotations

import os
import struct
from binascii import crc32
from enum import Enum
from typing import Any

try:
    from msgspec import Struct as Struct
except ImportError:  # a worker's Python may have the folder of this package alone

    class Struct:  # type: ignore[no-redef]
        """The part of msgspec's that the records here need."""

        def __init_subclass__(cls, **_: bool) -> None:
            pass

        def __init__(self, **values: object) -> None:
            vars(self).update(values)


VARIABLE = "HPC_ELASTIC_HEARTBEAT"
"""The path of a worker's file, on the node itself."""
SETUP = "setup"
"""The section from the start to the first heartbeat."""
STEP = "step"
"""The section of a heartbeat that names none."""
CHECKPOINT = "checkpoint"
"""The section whose end is a checkpoint that is complete."""
NAME_LIMIT = 32
FILE_BYTES = 2048
MAGIC = b"hpc-elastic heartbeat 7\n"
NO_STEP = -1
LAST_STEP = (1 << 63) - 1
"""The largest step. As a checkpoint's: this worker does no step after it."""

_BODY = struct.Struct("<Qqqqqqqqqqqqqqq32s")
_CHECKSUM = struct.Struct("<Q")
_AT = (128, 288)
_LENGTH = _CHECKSUM.size + _BODY.size
LEASE = 4
"""The word of 8 bytes in the lease's file in which the agent writes until when its lease on the round holds (0: it
keeps none). The next word is when its last look at the newest record began that was past all caches (negative: the
round is over). CLOCK_BOOTTIME, nanoseconds."""
QUESTIONS = "questions"
"""A byte in this pipe beside the file asks the agent for such a look."""
_SECTIONS_AT, MOST_SECTIONS = 512, 15
SPENT = 128
"""The word from which on the nanoseconds in each section stand, in the order of their names."""
ASKS, HAS_NOTICE, IS_COUNTED = 1, 2, 4

FIELDS = (
    "count", "at_ns", "step", "pid", "intervals", "longest_ns", "checkpoints", "saved_ns", "saved_step", "first_step",
    "first_ns", "stepped_ns", "checkpoint_ns", "redone_ns",
)  # fmt: skip
"""The fields of `HeartbeatRecord`, in the order of the bytes; the flags and the section follow."""
_STEPS = frozenset({"step", "saved_step", "first_step"})

STEP_PENDING = -2
"""A notice's step while it is being agreed on; `NO_STEP` where there is none to agree on."""


class HeartbeatRecord(Struct, frozen=True, kw_only=True):
    count: int
    """Heartbeats so far; from 1."""
    at_ns: int
    """CLOCK_BOOTTIME of this host, as in `hpc_elastic.base.clock`."""
    step: int | None
    """The last step that it reported, or how many steps of its optimizer were counted (`is_counted`)."""
    pid: int
    section: str
    intervals: int
    longest_ns: int
    checkpoints: int = 0
    saved_ns: int = 0
    saved_step: int | None = None
    """The furthest step that one of them holds; None where no step of any is known."""
    first_step: int | None = None
    """The first step that it reported, and `first_ns`, when."""
    first_ns: int = 0
    stepped_ns: int = 0
    checkpoint_ns: int = 0
    redone_ns: int = 0
    """Time at steps no further than one that it had reported before: they were done again."""
    asks_for_notices: bool = False
    has_notice: bool = False
    is_counted: bool = False
    """The script reports no steps itself: those of its optimizer are counted, from 1 in each process."""


class NoticeRecord(Struct, frozen=True, kw_only=True):
    serial: int
    deadline_ns: int
    """CLOCK_BOOTTIME of this host: until then a checkpoint is waited for."""
    step: int
    """All workers save after this step; or `STEP_PENDING`, or `NO_STEP`."""


def is_section_name(name: str) -> bool:
    plain = name.replace("_", "a").replace("-", "a").replace(".", "a")
    return name.isascii() and plain.isalnum() and len(name) <= NAME_LIMIT


def put_record(buffer: bytearray | memoryview | object, *values: int | bytes) -> None:
    """Write over the older copy: the values of `FIELDS` (`NO_STEP`: not known), the flags, the section."""
    body = _BODY.pack(*values)
    start = _AT[values[0] & 1]  # type: ignore[operator]
    # One store of the whole: no other thread of this process gets in between.
    buffer[start : start + _LENGTH] = _CHECKSUM.pack(crc32(body)) + body  # type: ignore[index]


def read_record(raw: bytes) -> HeartbeatRecord | None:
    newest: tuple[Any, ...] = (0,)
    for start in _AT:
        body = raw[start + _CHECKSUM.size : start + _LENGTH]
        if len(body) != _BODY.size:
            continue
        (checksum,) = _CHECKSUM.unpack_from(raw, start)
        newest = max(newest, _BODY.unpack(body)) if checksum == crc32(body) else newest
    *numbers, flags, section = newest if len(newest) > 1 else (0, b"")
    if not numbers:
        return None
    known: dict[str, Any] = {
        name: None if name in _STEPS and number < 0 else number for name, number in zip(FIELDS, numbers, strict=True)
    }
    return HeartbeatRecord(
        section=section.rstrip(b"\0").decode("ascii", "replace"),
        asks_for_notices=bool(flags & ASKS),
        has_notice=bool(flags & HAS_NOTICE),
        is_counted=bool(flags & IS_COUNTED),
        **known,
    )


class Cell:
    def __init__(self, at: int, numbers: str) -> None:
        self._at, self._numbers = at, struct.Struct(f"<{numbers}")
        self._end = at + _CHECKSUM.size + self._numbers.size

    def pack(self, *values: float) -> tuple[int, bytes]:
        body = self._numbers.pack(*values)
        return self._at, _CHECKSUM.pack(crc32(body)) + body

    def write(self, buffer: bytearray | memoryview | object, *values: float) -> None:
        buffer[self._at : self._end] = self.pack(*values)[1]  # type: ignore[index]

    def read(self, buffer: bytes | memoryview | object) -> tuple[Any, ...] | None:
        """None where none were written, or they are just being written."""
        raw = bytes(buffer[self._at : self._end])  # type: ignore[index]
        body = raw[_CHECKSUM.size :]
        if len(body) != self._numbers.size or _CHECKSUM.unpack_from(raw) != (crc32(body),):
            return None
        return self._numbers.unpack(body)


TOTAL = Cell(64, "q")
LOSS = Cell(80, "d")
COLLECTIVES = Cell(96, "Iqq?")
"""How many collectives the worker has completed, for a script whose steps are not known; when the first and the last of
them were seen, by the clock of `HeartbeatRecord`; and whether that was at the process' end, so that they are all."""
_NOTICE = Cell(448, "qqq")


def write_section(buffer: bytearray | memoryview | object, number: int, section: bytes) -> None:
    """Note the `number`-th section that the worker enters for the first time; of very many the first ones."""
    if number <= MOST_SECTIONS:
        start = _SECTIONS_AT + NAME_LIMIT * number
        name = section if number < MOST_SECTIONS else b"*"
        buffer[start : start + NAME_LIMIT] = name.ljust(NAME_LIMIT, b"\0")  # type: ignore[index]


def read_sections(raw: bytes) -> tuple[str, ...] | None:
    """`None`: too many to know."""
    ends = range(_SECTIONS_AT, _SECTIONS_AT + NAME_LIMIT * (MOST_SECTIONS + 1), NAME_LIMIT)
    names = [raw[at : at + NAME_LIMIT].rstrip(b"\0").decode("ascii", "replace") for at in ends]
    return None if names[-1] else tuple(filter(None, names))


def read_spent(raw: bytes) -> dict[str, float]:
    """The seconds in each section that the worker has left; empty: too many to know."""
    nanoseconds = struct.unpack_from(f"={MOST_SECTIONS}q", raw, SPENT * 8) if len(raw) == FILE_BYTES else ()
    return {name: spent / 1e9 for name, spent in zip(read_sections(raw) or (), nanoseconds, strict=False)}


def lease_beside(path: str) -> str:
    """The lease's file of the same round: one for all workers of the node, of the same length as theirs."""
    folder, name = os.path.split(path)
    return os.path.join(folder, f"{name.partition('-')[0]}-lease")


def pack_lease(until_ns: int, looked_ns: int) -> tuple[int, bytes]:
    return LEASE * 8, struct.pack("=qq", until_ns, looked_ns)


def pack_notice(notice: NoticeRecord) -> tuple[int, bytes]:
    return _NOTICE.pack(notice.serial, notice.deadline_ns, notice.step)


def read_notice(buffer: bytes | memoryview | object) -> NoticeRecord | None:
    found = _NOTICE.read(buffer)
    return NoticeRecord(serial=found[0], deadline_ns=found[1], step=found[2]) if found and found[0] > 0 else None


def empty_file() -> bytes:
    """The agent puts all of it there before the worker starts, so that no page of it is missing later."""
    return MAGIC.ljust(FILE_BYTES, b"\0")


RESTART_REPORTS = "HPC_ELASTIC_RING_REPORTS"
"""The path of the agent's named pipe, for reports. Unset: no agent reads."""
RESTART_WAIT = "HPC_ELASTIC_RING_WAIT"
"""Seconds for which the ranks that are left wait for a fresh process in a dead one's place. Unset: none will come."""
RESTART_REPLACES = "HPC_ELASTIC_RING_REPLACES"
"""1 for the first process that is started in a dead one's place, and so on. Unset: it is no such process."""
LINE_LIMIT = 4000
"""Bytes; a pipe takes 4096 (PIPE_BUF) at once or not at all."""
_LONGEST_TEXT = 1000


class RestartGroupEvent(str, Enum):
    BEGUN = "begun"
    """The process is in a wrapped call: the restart group can replace it."""
    ENDED = "ended"
    LEFT = "left"
    """It ends alone; the others go on without it."""
    GAVE_UP = "gave_up"
    """The restart group can't go on: no process is to be put in this one's place."""
    RESTARTED = "restarted"
    """The function starts again; one rank reports it for all."""


class RestartGroupReport(Struct, frozen=True, kw_only=True):
    """One line. Ranks are those that the process was started with, where nothing else is said."""

    event: RestartGroupEvent
    pid: int
    rank: int
    reason: str = ""
    iteration: int = 0
    seconds: float = 0.0
    world_size: int = 0
    active_world_size: int = 0
    interruptions: tuple[tuple[int, str], ...] = ()
    """Rank in the iteration that was interrupted, and the name of its `Interruption`."""
    joined: tuple[int, ...] = ()
    """Ranks in that iteration whose places fresh processes took."""

    def encode(self) -> bytes:
        import json  # a heartbeat needs none of it

        from hpc_elastic.base.codec import to_json

        value = to_json(self)
        value["reason"] = self.reason[:_LONGEST_TEXT]
        for short in (64, 8, 0):
            line = json.dumps(value).encode() + b"\n"
            if len(line) <= LINE_LIMIT:
                return line
            value["interruptions"], value["joined"] = value["interruptions"][:short], value["joined"][:short]
            value["reason"] = value["reason"][:short]
        return line


def read_report(line: bytes) -> RestartGroupReport | None:
    from hpc_elastic.base.codec import UnreadableRecordError, loads

    try:
        return loads(RestartGroupReport, line)
    except UnreadableRecordError:
        return None
