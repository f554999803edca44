"""One worker's heartbeat as bytes: what the worker writes into a small mapped file, and its agent reads there; and the
notice that its job is going to be ended, the other way.

The file holds two copies of the record. The worker writes them in turn, each with a checksum, so that a reader always
finds one that is whole: also while the other is being written, and where the writer was stopped or killed meanwhile.
"""

from __future__ import annotations

import struct
from binascii import crc32
from typing import Any

try:
    from msgspec import Struct as Struct
except ImportError:  # a worker's Python may have the folder of this package alone

    class Struct:  # type: ignore[no-redef]
        """As much of msgspec's as the records here need."""

        def __init_subclass__(cls, **_: bool) -> None:
            pass

        def __init__(self, **values: object) -> None:
            vars(self).update(values)


VARIABLE = "HPC_ELASTIC_HEARTBEAT"
"""In a worker's environment: the path of its file, on the node itself."""
SETUP = "setup"
"""The section from the start to the first heartbeat."""
STEP = "step"
"""The section of a heartbeat that names none."""
CHECKPOINT = "checkpoint"
"""The section whose end is a checkpoint that is complete."""
NAME_LIMIT = 32
"""Characters of a section's name."""
FILE_BYTES = 1024
MAGIC = b"hpc-elastic heartbeat 5\n"
NO_STEP = -1
LAST_STEP = (1 << 63) - 1
"""The largest step. As a checkpoint's: this worker does no step after it."""

_BODY = struct.Struct("<Qqqqqqqqqqqqqqq32s")
_CHECKSUM = struct.Struct("<Q")
_AT = (128, 288)
_LENGTH = _CHECKSUM.size + _BODY.size
_TOTAL = struct.Struct("<Qq")
_TOTAL_AT = 64
_LOSS = struct.Struct("<Qd")
_LOSS_AT = 80
LEASE = 4
"""The word of 8 bytes in which the agent writes until when its lease on the round holds (0: it keeps none). The next
word is when its last look at the newest record began that was past all caches (negative: the round is over).
CLOCK_BOOTTIME, nanoseconds."""
QUESTIONS = "questions"
"""The pipe beside the file: a byte in it asks the agent for such a look."""
_NOTICE = struct.Struct("<Qqq")
_NOTICE_AT = 448
_NOTICE_END = _NOTICE_AT + _CHECKSUM.size + _NOTICE.size
_SECTIONS_AT, _MOST_SECTIONS = 512, 15
ASKS, HAS_NOTICE, IS_COUNTED = 1, 2, 4

STEP_PENDING = -2
"""A notice's step while it is being agreed on; `NO_STEP` where there is none to agree on."""


class HeartbeatRecord(Struct, frozen=True, kw_only=True):
    """The last heartbeat of a worker."""

    count: int
    """Heartbeats so far; from 1."""
    at_ns: int
    """CLOCK_BOOTTIME of this host, as in `hpc_elastic.base.clock`."""
    step: int | None
    """The last step that it reported, or how many steps of its optimizer were counted (`is_counted`)."""
    pid: int
    section: str
    intervals: int
    """How many times between two heartbeats in section ``step`` were measured."""
    longest_ns: int
    """The longest of them."""
    checkpoints: int = 0
    """How many were completed."""
    saved_ns: int = 0
    """When the last of them was, by the same clock."""
    saved_step: int | None = None
    """The furthest step that one of them holds; None where no step of any is known."""
    first_step: int | None = None
    """The first step that it reported, and `first_ns`, when."""
    first_ns: int = 0
    stepped_ns: int = 0
    """When it reported a step last."""
    checkpoint_ns: int = 0
    """How long it was in section ``checkpoint`` in all."""
    redone_ns: int = 0
    """For how long it was at steps no further than one that it had reported before: they were done again."""
    asks_for_notices: bool = False
    """Whether it has ever asked if there is a notice."""
    has_notice: bool = False
    """Whether the script has got one."""
    is_counted: bool = False
    """Whether the script reports no steps itself: those of its optimizer are counted, from 1 in each process."""


class NoticeRecord(Struct, frozen=True, kw_only=True):
    """The preemption notice that an agent writes for a worker."""

    serial: int
    """From 1; grows when the notice changes."""
    deadline_ns: int
    """CLOCK_BOOTTIME of this host: until then a checkpoint is waited for."""
    step: int
    """All workers save after this step; or `STEP_PENDING`, or `NO_STEP`."""


def is_section_name(name: str) -> bool:
    """Whether `name` can be a section's: 1 to 32 ASCII letters, digits, ``_``, ``-`` and ``.``."""
    plain = name.replace("_", "a").replace("-", "a").replace(".", "a")
    return name.isascii() and plain.isalnum() and len(name) <= NAME_LIMIT


def write_record(
    buffer: bytearray | memoryview | object,
    *,
    count: int,
    at_ns: int,
    step: int,
    pid: int,
    section: bytes,
    intervals: int,
    longest_ns: int,
    checkpoints: int = 0,
    saved_ns: int = 0,
    saved_step: int = NO_STEP,
    first_step: int = NO_STEP,
    first_ns: int = 0,
    stepped_ns: int = 0,
    checkpoint_ns: int = 0,
    redone_ns: int = 0,
    asks_for_notices: bool = False,
    has_notice: bool = False,
    is_counted: bool = False,
) -> None:
    """Write a record, over the older copy: `count` goes up by one with each call.

    Args:
        buffer: The mapped file.
        count: As in `HeartbeatRecord`; the rest too, but a step is `NO_STEP` where there is none, and `section` ASCII.
    """
    flags = asks_for_notices * ASKS | has_notice * HAS_NOTICE | is_counted * IS_COUNTED
    put_record(
        buffer, count, at_ns, step, pid, intervals, longest_ns, checkpoints, saved_ns, saved_step,
        first_step, first_ns, stepped_ns, checkpoint_ns, redone_ns, flags, section,
    )  # fmt: skip


def put_record(buffer: bytearray | memoryview | object, count: int, *values: int | bytes) -> None:
    """`write_record` with its values in the order of the bytes, which saves a microsecond."""
    body = _BODY.pack(count, *values)
    start = _AT[count & 1]
    # One store of the whole: no other thread of this process gets in between.
    buffer[start : start + _LENGTH] = _CHECKSUM.pack(crc32(body)) + body  # type: ignore[index]


def read_record(raw: bytes) -> HeartbeatRecord | None:
    """The newest whole record in the file's contents; None where there is none (yet)."""
    newest: tuple[Any, ...] | None = None
    for start in _AT:
        body = raw[start + _CHECKSUM.size : start + _LENGTH]
        if len(body) != _BODY.size:
            continue
        (checksum,) = _CHECKSUM.unpack_from(raw, start)
        found = _BODY.unpack(body)
        if checksum == crc32(body) and found[0] > 0 and (newest is None or found[0] > newest[0]):
            newest = found
    if newest is None:
        return None
    count, at_ns, step, pid, intervals, longest_ns, checkpoints, saved_ns, saved_step, *times, flags, section = newest
    first_step, first_ns, stepped_ns, checkpoint_ns, redone_ns = times
    return HeartbeatRecord(
        count=count,
        at_ns=at_ns,
        step=None if step < 0 else step,
        pid=pid,
        section=section.rstrip(b"\0").decode("ascii", "replace"),
        intervals=intervals,
        longest_ns=longest_ns,
        checkpoints=checkpoints,
        saved_ns=saved_ns,
        saved_step=None if saved_step < 0 else saved_step,
        first_step=None if first_step < 0 else first_step,
        first_ns=first_ns,
        stepped_ns=stepped_ns,
        checkpoint_ns=checkpoint_ns,
        redone_ns=redone_ns,
        asks_for_notices=bool(flags & ASKS),
        has_notice=bool(flags & HAS_NOTICE),
        is_counted=bool(flags & IS_COUNTED),
    )


def write_total(buffer: bytearray | memoryview | object, total: int) -> None:
    """Write how many steps the training has, which rarely changes: beside the records."""
    body = _TOTAL.pack(0, total)[_CHECKSUM.size :]
    buffer[_TOTAL_AT : _TOTAL_AT + _TOTAL.size] = _CHECKSUM.pack(crc32(body)) + body  # type: ignore[index]


def read_total(raw: bytes) -> int | None:
    """How many steps the training has; None where the worker has not reported it."""
    if len(raw) < _TOTAL_AT + _TOTAL.size:
        return None
    checksum, total = _TOTAL.unpack_from(raw, _TOTAL_AT)
    body = raw[_TOTAL_AT + _CHECKSUM.size : _TOTAL_AT + _TOTAL.size]
    return int(total) if checksum == crc32(body) and total > 0 else None


def write_loss(buffer: bytearray | memoryview | object, loss: float) -> None:
    """Write the training's loss, as it was reported last: beside the records."""
    body = _LOSS.pack(0, loss)[_CHECKSUM.size :]
    buffer[_LOSS_AT : _LOSS_AT + _LOSS.size] = _CHECKSUM.pack(crc32(body)) + body  # type: ignore[index]


def read_loss(raw: bytes) -> float | None:
    """The loss; None where the worker has reported none, or it is just being written."""
    checksum, loss = _LOSS.unpack_from(raw, _LOSS_AT)
    body = raw[_LOSS_AT + _CHECKSUM.size : _LOSS_AT + _LOSS.size]
    return float(loss) if checksum == crc32(body) else None


def write_section(buffer: bytearray | memoryview | object, number: int, section: bytes) -> None:
    """Note the `number`-th section that the worker enters for the first time; of very many the first ones."""
    if number <= _MOST_SECTIONS:
        start = _SECTIONS_AT + NAME_LIMIT * number
        name = section if number < _MOST_SECTIONS else b"*"
        buffer[start : start + NAME_LIMIT] = name.ljust(NAME_LIMIT, b"\0")  # type: ignore[index]


def read_sections(raw: bytes) -> tuple[str, ...] | None:
    """The sections that the worker has ever been in; None where they are too many to know."""
    ends = range(_SECTIONS_AT, _SECTIONS_AT + NAME_LIMIT * (_MOST_SECTIONS + 1), NAME_LIMIT)
    names = [raw[at : at + NAME_LIMIT].rstrip(b"\0").decode("ascii", "replace") for at in ends]
    return None if names[-1] else tuple(filter(None, names))


def pack_lease(until_ns: int, looked_ns: int) -> tuple[int, bytes]:
    """Where in the file a lease is written, and what."""
    return LEASE * 8, struct.pack("=qq", until_ns, looked_ns)


def pack_notice(notice: NoticeRecord) -> tuple[int, bytes]:
    """Where in the file a notice is written, and what."""
    body = _NOTICE.pack(notice.serial, notice.deadline_ns, notice.step)
    return _NOTICE_AT, _CHECKSUM.pack(crc32(body)) + body


def read_notice(buffer: bytes | memoryview | object) -> NoticeRecord | None:
    """The notice in the file's contents; None where there is none, or it is just being written."""
    raw = bytes(buffer[_NOTICE_AT:_NOTICE_END])  # type: ignore[index]
    if len(raw) != _NOTICE_END - _NOTICE_AT:
        return None
    (checksum,) = _CHECKSUM.unpack_from(raw)
    body = raw[_CHECKSUM.size :]
    serial, deadline_ns, step = _NOTICE.unpack(body)
    if serial < 1 or checksum != crc32(body):
        return None
    return NoticeRecord(serial=serial, deadline_ns=deadline_ns, step=step)


def empty_file() -> bytes:
    """What the agent puts there before the worker starts: all of it, so that no page of it is missing later."""
    return MAGIC.ljust(FILE_BYTES, b"\0")
