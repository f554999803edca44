"""The part of a failure's traceback, or of its output, that a report has room for. Pure.

The cause stands at the end of a traceback, but the line to look at is the innermost one of the user's own code: where
libraries' frames fill the end, that frame is shown above them. A dump of faulthandler has the innermost call first.
"""

from __future__ import annotations

import re
from itertools import groupby

from msgspec import Struct

from hpc_elastic.base.text import clean_lines
from hpc_elastic.failures.failure_text import CONNECTORS, HEADER, Frame, user_frames
from hpc_elastic.failures.worker_failure import WorkerFailure

_REPEATS = 3
_STACK_WANTED = 12
"""Lines of the stack that a message of many lines leaves room for, and so many of the message are shown in any case."""
_MESSAGE_LEAST = 3
_MOST_FRAME_LINES = 2
_FIRST_CALL_FIRST = "(most recent call first):"
_FRAME = re.compile(r'(?:\s*\| )*\s*File "([^"]+)", line (\d+)(?:,? in (.*))?')


class Excerpt(Struct, frozen=True, kw_only=True):
    name: str
    title: str
    """Python's own first line of a traceback, or why there is nothing; may be empty."""
    lines: tuple[str, ...]


def user_frame(failure: WorkerFailure) -> Frame | None:
    found = _user_line(failure, clean_lines(failure.traceback)) if failure.traceback else None
    return found[1] if found is not None else None


def make_excerpt(failure: WorkerFailure, *, lost: str = "", most: int | None = None) -> Excerpt | None:
    """Choose at most `most` lines, with the title; None where its signal says all. `lost`: why there are none."""
    if failure.traceback:
        body = clean_lines(failure.traceback)
        title = body.pop(0) if body and body[0] == HEADER else ""
        return Excerpt(name="traceback", title=title, lines=tuple(_shortened(failure, body, most)))
    if failure.stderr_tail:
        body = fold_repeats(clean_lines(failure.stderr_tail))
        room = len(body) if most is None else max(1, most - 2)
        return Excerpt(name="stderr", title="", lines=tuple(_end_of(body, room)))
    if lost:
        return Excerpt(name="stderr", title=lost, lines=())
    if failure.signal:
        return None
    hint = " (sys.exit(1) prints none; or the script closed or redirected it)" if failure.exitcode == 1 else ""
    return Excerpt(name="stderr", title=f"empty, so there is no traceback{hint}", lines=())


def _shortened(failure: WorkerFailure, body: list[str], most: int | None) -> list[str]:
    body = fold_repeats(body)
    if most is None or len(body) <= most - 1:
        return body
    room = max(1, most - 2)
    mine = _user_line(failure, body)
    at, frame = (mine[0], _frame_lines(body, mine[0])) if mine is not None else (None, [])
    if any(_FIRST_CALL_FIRST in line for line in body[:3]):
        return _beginning_of(body, room, at, frame)
    start, end = _block(failure, body)
    while end > start and not body[end - 1].strip():
        end -= 1
    if start == 0 and end < len(body):  # a chain whose first exception is the cause: what follows is cut first
        body = [*body[:end], *_left_out(len(body) - end, "lines below")]
    body = _without_long_message(failure, body, room)
    if start > 0 and (chain := _with_its_first(body, room)):
        return chain
    shown = _end_of(body, room)
    if at is None or at >= len(body) - room or room <= len(frame) + 2:
        return shown
    tail = body[-(room - len(frame) - 1) :]
    between = len(body) - len(tail) - at - len(frame)
    return [*_left_out(at, "lines above"), *frame, *_left_out(between, "lines of libraries"), *tail]


def _with_its_first(body: list[str], room: int) -> list[str]:
    """The end of a chain, and above it what it began with: the user's line, and the exception. Empty: no room."""
    end = next(at for at, line in enumerate(body) if line.strip() in CONNECTORS)
    while end > 1 and not body[end - 1].strip():
        end -= 1
    mine = _user_lines(body[:end])
    frame = _frame_lines(body, mine[-1][0]) if mine else []
    first = [*frame, body[end - 1]]
    tail = body[-(room - len(first) - 2) :] if room > len(first) + 6 else []
    if not tail or len(body) - len(tail) <= end:
        return []
    above = mine[-1][0] if mine else end - 1
    return [*_left_out(above, "lines above"), *first, *_left_out(len(body) - len(tail) - end, "lines"), *tail]


def _beginning_of(body: list[str], room: int, at: int | None, frame: list[str]) -> list[str]:
    if at is None or at < room:
        return [*body[:room], *_left_out(len(body) - room, "lines below")]
    kept, below = max(1, room - len(frame) - 1), len(body) - at - len(frame)
    return [*body[:kept], *_left_out(at - kept, "lines of libraries"), *frame, *_left_out(below, "lines below")]


def _end_of(body: list[str], room: int) -> list[str]:
    if len(body) <= room + 1:
        return body
    return [*_left_out(len(body) - room, "lines above"), *body[-room:]]


def _left_out(count: int, what: str) -> list[str]:
    return [f"... {count} {what} (--all shows them)"] if count else []


def _without_long_message(failure: WorkerFailure, body: list[str], room: int) -> list[str]:
    traceback, text, message = failure.traceback.rstrip("\n"), failure.message.rstrip("\n"), 0
    if traceback and text and HEADER not in text:  # else it quotes another's traceback
        first = traceback.split("\n")[-text.count("\n") - 1 :][0]
        is_at_end = first.rstrip().endswith(text.split("\n", 1)[0].rstrip()[-60:])
        message = text.count("\n") + 1 if is_at_end else 0
    kept = min(message, max(_MESSAGE_LEAST, room - _STACK_WANTED))
    if message - kept > 1 and room > _MESSAGE_LEAST:
        return [*body[: len(body) - message + kept], *_left_out(message - kept, "more lines")]
    return body


def _block(failure: WorkerFailure, body: list[str]) -> tuple[int, int]:
    """The lines of the exception that is the failure's, of several in a chain: `body` from the one to the other."""
    starts = [0, *(at + 1 for at, line in enumerate(body) if line.strip() in CONNECTORS)]
    ends = [*(at - 1 for at in starts[1:]), len(body)]
    name = failure.exception_type.rsplit(".", 1)[-1]
    words = failure.headline.partition(": ")[2][:40]
    for start, end in zip(starts, ends, strict=True):
        if any(name and name in line and words in line and line[:1].strip() for line in body[start:end]):
            return start, end
    return starts[-1], ends[-1]


def _user_line(failure: WorkerFailure, body: list[str]) -> tuple[int, Frame] | None:
    """The innermost frame of the user's code in the failure's own exception, else in any of the chain."""
    found = _user_lines(body)
    if not found:
        return None
    if any(_FIRST_CALL_FIRST in line for line in body[:3]):
        return found[0]
    start, end = _block(failure, body)
    return next((one for one in reversed(found) if start <= one[0] < end), found[-1])


def _user_lines(body: list[str]) -> list[tuple[int, Frame]]:
    found = []
    for at, line in enumerate(body):
        if match := _FRAME.match(line):
            frame = Frame(file=match[1], line=int(match[2]), function=match[3] or "")
            found += [(at, frame)] if user_frames([frame]) else []
    return found


def _frame_lines(body: list[str], at: int) -> list[str]:
    return [
        body[at],
        *(line for line in body[at + 1 : at + _MOST_FRAME_LINES] if not _FRAME.match(line) and line[:4].isspace()),
    ]


def fold_repeats(lines: list[str]) -> list[str]:
    folded: list[str] = []
    for line, alike in groupby(lines):
        count = len(list(alike))
        if count > _REPEATS + 1 and line.lstrip().startswith("File "):
            indent = line[: len(line) - len(line.lstrip())]
            folded += [*[line] * _REPEATS, f"{indent}[Previous line repeated {count - _REPEATS} more times]"]
        else:
            folded += [line] * count
    return folded
