"""A worker's error file, read whatever it holds and written whole or not at all.

The shapes that are understood, with ``E`` = ``TORCHELASTIC_ERROR_FILE``'s contents::

    {"message": {"message": str, "extraInfo": {"py_callstack": str, "timestamp": "1700000000"}, "errorCode": 3}}
    {"message": str, "timestamp": 1700000000}

and beside ``message`` our own object under ``hpc_elastic`` (docs/reference/json.md). A file that is missing,
empty, torn, foreign, unreadable or huge gives an `ErrorFile` that says so: never an exception.
"""

from __future__ import annotations

import json
import os
import re
import stat
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from hpc_elastic.base.files import parse_json, write_private
from hpc_elastic.base.text import clean_text, cut_end, cut_middle
from hpc_elastic.errors import describe_error
from hpc_elastic.failures.failure_text import MESSAGE_LIMIT, TEXT_LIMIT
from hpc_elastic.failures.ranking import Category

OWN_KEY = "hpc_elastic"
_WHOLE = 2 << 20
"""A file up to this size is parsed as JSON; of a larger one the parts that matter are picked out."""
_HEAD = 128 << 10
_TAIL = 64 << 10
_STEP = 256 << 10
_FEW = 64
_SCAN = 32 << 20

_SALVAGE_STACK = re.compile(r'"py_callstack"\s*:\s*"')
_SALVAGE_MESSAGE = re.compile(r'"message"\s*:\s*"')
_SALVAGE_TIME = re.compile(r'"timestamp"\s*:\s*"?(\d+)')


class ErrorFile(Struct, frozen=True, kw_only=True):
    problem: str = "missing"
    """Empty where the file was understood; else one clause: ``missing``, ``empty``, ``torn: …``, ``unreadable: …``,
    ``foreign: …``, ``cut: …``. What could be saved is in the other fields all the same."""
    data: dict[str, Any] = field(default_factory=dict)
    message: str = ""
    """At most 16 Ki characters; with the exception's type in front, as the writer put it."""
    traceback: str = ""
    timestamp_ns: int | None = None
    """The writer's wall clock: to the nanosecond from our own writer, else to the second."""
    own: dict[str, Any] = field(default_factory=dict)

    @property
    def found(self) -> bool:
        return bool(self.message or self.traceback)


def _open(path: str) -> int:
    return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)


def read_error_file(
    path: Path | str, *, seek_traceback: bool = True, opener: Callable[[str], int] = _open
) -> ErrorFile:
    """Read an error file of any origin and state. Never raises; reads at most 32 MiB and holds far less.

    `seek_traceback`: in a file of more than 2 MiB, too: some milliseconds.
    """
    try:
        return _read(opener(os.fspath(path)), seek_traceback=seek_traceback)
    except FileNotFoundError:
        return ErrorFile()
    except Exception as error:  # whatever it is, it must not hide the failure that is being looked at
        return ErrorFile(problem=f"unreadable: {error}")


def error_data(
    *,
    message: str,
    traceback: str,
    timestamp_ns: int,
    error_code: int | None = None,
    own: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """torch's readers show the stack in place of the message, so the message stands for a missing one."""
    inner: dict[str, Any] = {
        "message": message,
        "extraInfo": {"py_callstack": traceback or message, "timestamp": str(timestamp_ns // 1_000_000_000)},
    }
    if error_code is not None:
        inner["errorCode"] = error_code
    return {"message": inner, OWN_KEY: {"version": 1, "timestamp_ns": timestamp_ns, **(own or {})}}


def write_error_data(path: Path | str, data: Mapping[str, Any]) -> None:
    # ASCII only: a message may hold lone surrogates, which no encoding of the file could store.
    write_private(Path(path), json.dumps(data, default=str))


def _read(fd: int, *, seek_traceback: bool) -> ErrorFile:
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            return ErrorFile(problem="unreadable: not a regular file")
        if info.st_size > _WHOLE:
            head = _pread(fd, _HEAD, 0).decode("utf-8", "replace")
            tail = _pread(fd, _TAIL, info.st_size - _TAIL).decode("utf-8", "replace")
            at = _find(fd, b'"py_callstack"', min(info.st_size, _SCAN)) if seek_traceback else -1
            stack = _pread(fd, _HEAD, at).decode("utf-8", "replace") if at >= 0 else ""
            return _salvaged(head, stack, tail, f"cut: {info.st_size} bytes long, only its parts were read")
        raw = _pread(fd, _WHOLE, 0)
    finally:
        os.close(fd)
    if not raw.strip(b"\0 \t\r\n"):
        return ErrorFile(problem="empty")
    text = raw.decode("utf-8", "replace")
    try:
        value = parse_json(raw)
    except (ValueError, RecursionError) as error:
        return _salvaged(text, text, text, f"torn: {error}")
    if not isinstance(value, dict):
        return ErrorFile(
            problem=f"foreign: holds a JSON {type(value).__name__}, not an object", message=_clip(str(value))
        )
    return _understand(value)


def _understand(data: dict[str, Any]) -> ErrorFile:
    own = data.get(OWN_KEY)
    own = own if isinstance(own, dict) else {}
    message = data.get("message")
    problem = ""
    stack: object = ""
    if isinstance(message, dict):
        extra = message.get("extraInfo")
        extra = extra if isinstance(extra, dict) else {}
        text, stack, when = message.get("message"), extra.get("py_callstack"), extra.get("timestamp")
    else:
        text, when = message, data.get("timestamp")
    if "message" not in data:
        problem = "foreign: has no 'message'"
        text = json.dumps(data, default=str)
    elif text is None or not isinstance(text, str):
        text = "" if text is None else json.dumps(text, default=str)
    return ErrorFile(
        problem=problem,
        data=data,
        message="" if text == "<NONE>" else _clip(text),
        traceback=cut_middle(clean_text(stack), TEXT_LIMIT) if isinstance(stack, str) else "",
        timestamp_ns=_nanoseconds(own.get("timestamp_ns"), when),
        own=own,
    )


def _nanoseconds(fine: object, seconds: object) -> int | None:
    if isinstance(fine, int) and not isinstance(fine, bool) and fine > 0:
        return fine
    try:
        value = float(seconds)  # type: ignore[arg-type]
        return int(value) * 1_000_000_000 + int(value % 1 * 1e9)
    except (TypeError, ValueError, OverflowError):
        return None


def _clip(text: str) -> str:
    return cut_end(clean_text(text[: 2 * MESSAGE_LIMIT]), MESSAGE_LIMIT)


def _find(fd: int, marker: bytes, end: int) -> int:
    """Its place in the file, -1: not before `end`. One buffer for all of it, which stays in the cache."""
    buffer, offset = bytearray(_STEP), 0
    while offset < end:
        count = os.preadv(fd, [buffer], offset)
        at = _index(buffer, marker, count)
        if at >= 0:
            return offset + at
        if count <= len(marker):
            return -1
        offset += count - len(marker)
    return -1


def _index(buffer: bytearray, marker: bytes, count: int) -> int:
    """`find`, by the first byte: 25 times as fast where there are few of it, as in a long message."""
    at = -1
    for _ in range(_FEW):
        at = buffer.find(marker[:1], at + 1, count)
        if at < 0 or buffer.startswith(marker, at, count):
            return at
    return buffer.find(marker, at, count)


def _pread(fd: int, count: int, offset: int) -> bytes:
    chunks: list[bytes] = []
    while count > 0:
        chunk = os.pread(fd, count, offset)
        if not chunk:
            break
        chunks.append(chunk)
        count -= len(chunk)
        offset += len(chunk)
    return b"".join(chunks)


def _salvaged(head: str, stack: str, tail: str, problem: str) -> ErrorFile:
    text, callstack = _string_after(_SALVAGE_MESSAGE, head[: _HEAD // 2]), _string_after(_SALVAGE_STACK, stack)
    times = _SALVAGE_TIME.findall(tail)
    return ErrorFile(
        problem=problem,
        message=_clip(text),
        traceback=cut_middle(clean_text(callstack), TEXT_LIMIT),
        timestamp_ns=_nanoseconds(None, times[-1]) if times else None,
    )


def _is_escaped(text: str, at: int) -> bool:
    before = at
    while text[before - 1] == "\\":
        before -= 1
    return (at - before) % 2 == 1


def _string_after(key: re.Pattern[str], text: str) -> str:
    """The JSON string after `key`, which may have been cut; empty where there is none."""
    found = key.search(text)
    if found is None:
        return ""
    start = found.end()
    end = text.find('"', start)  # a regular expression goes through a long message character by character
    while end >= 0 and _is_escaped(text, end):
        end = text.find('"', end + 1)
    if end < 0:
        end = len(text) - _is_escaped(text, len(text))
    body = text[start:end]
    for cut in range(7):  # an escape that was cut through is at most \uXXXX long
        try:
            return str(json.loads(f'"{body[: len(body) - cut]}"', strict=False))
        except ValueError:
            continue
    return body


def write_own_failure(path: Path | str, error: BaseException, *, role: str, host: str, now_ns: int) -> None:
    text = clean_text("".join(traceback.format_exception(error)))
    own = {"host": host, "role": role, "pid": os.getpid(), "category": Category.PLATFORM.value}
    write_summary(path, describe_error(error), traceback_text=cut_middle(text, TEXT_LIMIT), now_ns=now_ns, own=own)


def write_summary(
    path: Path | str,
    message: str,
    *,
    now_ns: int,
    traceback_text: str = "",
    error_code: int | None = None,
    own: dict[str, object] | None = None,
) -> None:
    text = cut_end(clean_text(message), MESSAGE_LIMIT)
    data = error_data(message=text, traceback=traceback_text, timestamp_ns=now_ns, error_code=error_code, own=own)
    write_error_data(path, data)
