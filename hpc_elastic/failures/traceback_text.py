"""Finds Python tracebacks in what a dying process printed.

Pure functions over text: the end of a worker's stderr.log, or an error file's ``py_callstack``. Formats seen with
CPython 3.10-3.14, torch 2.13, whose excepthook puts ``[rank3]: `` before every line, and rich (`decorated`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from enum import Enum

from msgspec import Struct
from msgspec.structs import asdict

from hpc_elastic.base.text import clean_text, cut_end, cut_middle
from hpc_elastic.failures.failure_text import (
    CAUSE_LIMIT,
    CONNECTORS,
    HEADER,
    INSIDE,
    MESSAGE_LIMIT,
    QUOTED_HEADER,
    TEXT_LIMIT,
    TITLE,
    FailureText,
    Frame,
    RaisedException,
    TextKind,
    plain_tracebacks,
)

_MESSAGE_LINES = 40
_MOST_PREFIXED = 1000
_RANK_PREFIX = re.compile(r"\[rank\d+\]: ?(?!\[)")
_LAST = "(most recent call last):"
_GROUP_HEADER = "+ Exception Group Traceback (most recent call last):"
_FRAME = re.compile(r'  File "(.*)", line (\d+)(?:, in (.*))?\Z')
_EXCEPTION_LINE = re.compile(r"([A-Za-z_][\w.]*(?:\.<locals>[\w.]*)*)(?:: |:?\Z)")
"""Its message is what follows: it may be megabytes long."""
_CLASS_LINE = re.compile(r"(?:[a-z_]\w*\.)*[A-Z]\w*(?::|\Z)")
_MOST_BETWEEN = 20
_SYNTAX_ERROR = re.compile(r"(?:SyntaxError|IndentationError|TabError): ")
_TOP_FILES = ("<frozen runpy>", "/runpy.py", "/hpc_elastic/failures/error_handler.py")
# What stands before a traceback that did not end the process.
_NOT_THE_END = ("Exception ignored", "--- Logging error ---", "Exception in callback", "Error in ")
_OTHER_THREAD = ("Exception in thread ", "Task exception was never retrieved", "Future exception was never retrieved")
# What other programs print in a line of their own: c10d, glog, NCCL, logging, warnings, wandb, a progress bar, Slurm.
_LOG_LINE = (
    r"\[rank\d+\]:\[[A-Z]|\[[WEIF]\d* |\[[WEIF]\d{3,4} |\S+:\d+:\d+ \[\d+\] NCCL |wandb: |\S+\.py:\d+: \w*Warning: "
    r"|(?:DEBUG|INFO|WARNING|ERROR|CRITICAL):[\w.]+:|\[?\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d|.{0,80}?\b\d+%\|"
    r"|slurmstepd|srun: "
)
_SOMEBODY_ELSE = re.compile(_LOG_LINE)
# A line that can't belong to an exception's message: the same, and the next report of the same death.
_NOT_MESSAGE = re.compile(
    _LOG_LINE + r"|Exception ignored|Exception in thread|Fatal Python error: |terminate called|Extension modules: "
    r"|--- Logging error ---|Traceback \(most recent call last\):(?! \(RANK \d)|sys:1: "
    r"|Set the environment variable HYDRA_FULL_ERROR"
)


def find_python_traceback(text: str, *, cleaned: bool = False) -> FailureText | None:
    """Find the last uncaught exception in `text`, with what it was chained to; `cleaned`: by `clean_text`.

    What Python printed and went on after (a ``__del__``, atexit, another thread) is taken only where nothing else is.
    """
    text = text if cleaned else clean_text(text)
    if not _may_hold_traceback(text) and "Error: " not in text:
        return None
    lines, prefixed = _split(text)
    blocks = _blocks(lines, prefixed)
    for wanted in (_Rank.MAIN, _Rank.OTHER_THREAD):
        for index in range(len(blocks) - 1, -1, -1):
            if blocks[index].rank is wanted:
                return _from_block(lines, prefixed, blocks, index)
    return _syntax_error(lines)


def find_tracebacks(text: str, *, threads: bool = False) -> list[FailureText]:
    """Find those that may have ended a process; `threads`: those of threads and tasks, which end nothing, instead."""
    if not _may_hold_traceback(text):
        return []
    lines, prefixed = _split(text)
    blocks = _blocks(lines, prefixed)
    wanted = _Rank.OTHER_THREAD if threads else _Rank.MAIN
    last = [at for at in range(len(blocks)) if at + 1 == len(blocks) or not blocks[at + 1].chained]
    return [_from_block(lines, prefixed, blocks, at) for at in last if blocks[at].rank is wanted]


def _may_hold_traceback(text: str) -> bool:
    # A search costs little; to split the text copies lines of megabytes.
    return "(most recent call last)" in text


def find_cut_off(text: str) -> FailureText | None:
    """Find the traceback in which cleaned text ends, without its type: the process was ended while it printed it."""
    lines, prefixed = _split(text[: text.rfind("\n") + 1])  # the last line may be half a one
    starts = [at for at, line in enumerate(lines) if line.endswith(_LAST) and _begins_traceback(lines, at)]
    if not starts or any(line.strip() for line in lines[_stack_end(lines, starts[-1] + 1) :]):
        return None
    start = starts[-1]
    frames, source, caller = _frames(lines[start + 1 :])
    if not frames or _line_before(lines, start).startswith((*_NOT_THE_END, *_OTHER_THREAD, *CONNECTORS)):
        return None
    place = f"{os.path.basename(frames[-1].file)}:{frames[-1].line} {frames[-1].function}"
    return FailureText(
        kind=TextKind.PYTHON,
        text="\n".join(lines[start:]).rstrip(),
        exception_type="Exception",
        message=f"its type was not printed before the stop; {place}" + (f": {source}" if source else ""),
        frames=frames,
        source=source,
        caller=caller,
        is_prefixed=prefixed[start],
        span=(start, len(lines)),
        exception_at=len(lines),
    )


class _Rank(Enum):
    MAIN = 1
    OTHER_THREAD = 2
    IGNORED = 3


class _Block(Struct):
    start: int  # the header's line
    exception: int  # the line with the type
    end: int  # one past the message's last line
    group: bool
    chained: bool
    rank: _Rank


def _split(text: str) -> tuple[list[str], list[bool]]:
    lines = text.split("\n")
    prefixed = [False] * len(lines)
    if "[rank" in text:
        for index, line in enumerate(lines):
            if match := _RANK_PREFIX.match(line):
                lines[index] = line[match.end() :]
                prefixed[index] = True
    if TITLE in text:
        plain_tracebacks(lines)
    return lines, prefixed


def _begins_traceback(lines: list[str], at: int) -> bool:
    """Python began a traceback on this line, be it behind a progress bar that had not ended it."""
    line = lines[at]
    if line == HEADER:
        return True
    before = line[: -len(HEADER)]
    if not line.endswith(HEADER) or not before.strip() or before.endswith(("Original ", "Exception Group ")):
        return False
    return at + 1 < len(lines) and _FRAME.match(lines[at + 1]) is not None


def _blocks(lines: list[str], prefixed: list[bool]) -> list[_Block]:
    blocks: list[_Block] = []
    total = len(lines)
    index = 0
    for start in [at for at, line in enumerate(lines) if line.endswith(_LAST)]:
        if start < index:  # within the one before
            continue
        index, line, below = start, lines[start], "".join(lines[start + 1 : start + 2])
        if line.lstrip() == _GROUP_HEADER:
            group = not line.startswith("    ")
        else:
            group = line.endswith(f"  {_GROUP_HEADER}") and below.startswith('  |   File "')
        if not group and not _begins_traceback(lines, start):
            continue
        at = index + 1
        if group:
            while at < total and lines[at].startswith("  |   "):
                at += 1
            end = at
            while end < total and lines[end].startswith("  "):
                end += 1
        else:
            at = _stack_end(lines, at)
            end = _message_end(lines, prefixed, at, quotes=index + 1 < total and _is_top(lines[index + 1]))
        if not group and not _is_exception_line(lines, at):  # cut off, or something else was printed in between
            index = max(at, index + 1)
            continue
        previous = _line_before(lines, index)
        chained = bool(blocks) and previous in CONNECTORS
        if chained:
            rank = blocks[-1].rank
        elif previous.startswith(_NOT_THE_END):
            rank = _Rank.IGNORED
        elif previous.startswith(_OTHER_THREAD):
            rank = _Rank.OTHER_THREAD
        else:
            rank = _Rank.MAIN
        blocks.append(_Block(start=index, exception=at, end=end, group=group, chained=chained, rank=rank))
        index = max(end, index + 1)
    return blocks


def _stack_end(lines: list[str], at: int) -> int:
    """One past the stack that begins on line `at`: what processes of its own print in between is passed over."""
    end, others = at, 0
    while end < len(lines):
        if lines[end].startswith("  "):
            others = 0
        elif others < _MOST_BETWEEN and _SOMEBODY_ELSE.match(lines[end]):
            others += 1
        else:
            break
        end += 1
    if others and (end == len(lines) or not _CLASS_LINE.match(lines[end])):
        return end - others  # the traceback was cut off there
    return end


def _is_exception_line(lines: list[str], at: int) -> bool:
    # A class made at run time may have any name: accept what is followed by a colon and a space.
    return at < len(lines) and (_EXCEPTION_LINE.match(lines[at]) is not None or ": " in lines[at][:200])


def _line_before(lines: list[str], index: int) -> str:
    for at in range(index - 1, max(-1, index - 4), -1):
        if lines[at].strip() and not lines[at].startswith("future: <"):
            return lines[at].strip()
    return ""


def is_top_frame(frame: Frame) -> bool:
    """A process begins there: nothing in the script caught what went up to it."""
    return frame.function in ("<module>", "_run_module_as_main") or frame.file.endswith(_TOP_FILES)


def _is_top(line: str) -> bool:
    frames, _, _ = _frames([line])
    return bool(frames) and is_top_frame(frames[0])


def _quotes_on(lines: list[str], at: int, *, first: int, inside: bool) -> bool:
    """A message goes on with a traceback that it quotes: right below its line `first`, or below a colon."""
    before = _line_before(lines, at)
    if not inside and not before.endswith(":") and before != lines[first].strip():
        return False
    if lines[at] in CONNECTORS and inside:
        at = next((later for later in range(at + 1, len(lines)) if lines[later].strip()), at)
    if lines[at] != HEADER or at + 1 == len(lines) or not _FRAME.match(lines[at + 1]) or _is_top(lines[at + 1]):
        return False
    return not before.startswith(_NOT_THE_END + _OTHER_THREAD)


def _message_end(lines: list[str], prefixed: list[bool], at: int, *, quotes: bool = False) -> int:
    """One past the last line of the message that starts on line `at`; `quotes`: a traceback below belongs to it."""
    end = at + 1
    inside = False
    if at >= len(lines):
        return at
    last = min(len(lines), at + (_MOST_PREFIXED if prefixed[at] else _MESSAGE_LINES))
    while end < last:
        line = lines[end]
        if QUOTED_HEADER.match(line):
            last = min(len(lines), max(last, end + _MESSAGE_LINES))
        if prefixed[at] and not prefixed[end]:
            break
        if quotes and _quotes_on(lines, end, first=at, inside=inside):
            inside = True
            end += 1
            continue
        if line in CONNECTORS or _NOT_MESSAGE.match(line) or line.lstrip() == _GROUP_HEADER:
            break
        if line.endswith(_LAST) and _begins_traceback(lines, end):
            break
        end += 1
    while end > at + 1 and not lines[end - 1].strip():
        end -= 1
    return end


def _from_block(lines: list[str], prefixed: list[bool], blocks: list[_Block], index: int) -> FailureText:
    block = blocks[index]
    last = _raised(lines, block)
    earlier = list(_quoted_exceptions(lines, block, last))
    first = index
    while blocks[first].chained:
        while_handling = _line_before(lines, blocks[first].start) == CONNECTORS[0]
        first -= 1
        raised = _raised(lines, blocks[first], while_handling=while_handling)
        earlier += [raised, *_quoted_exceptions(lines, blocks[first], raised)]
    return FailureText(
        kind=TextKind.PYTHON,
        text=cut_middle(_as_printed(lines[blocks[first].start : block.exception]), TEXT_LIMIT - MESSAGE_LIMIT)
        + "\n"
        + cut_end("\n".join(lines[block.exception : block.end]), MESSAGE_LIMIT),
        earlier=tuple(earlier),
        is_prefixed=prefixed[block.exception],
        lines_after=sum(1 for line in lines[block.end :] if line.strip()),
        span=(blocks[first].start, block.end),
        exception_at=block.exception,
        **asdict(last),
    )


def _raised(lines: list[str], block: _Block, *, while_handling: bool = False) -> RaisedException:
    read = _group_message if block.group else _split_exception
    exception_type, message = read(lines[block.exception : block.end])
    frames, source, caller = _frames(lines[block.start + 1 : block.exception], shift=4 if block.group else 0)
    return RaisedException(
        exception_type=exception_type,
        message=message,
        frames=frames,
        source=source,
        caller=caller,
        while_handling=while_handling,
    )


def _frames(lines: list[str], *, shift: int = 0) -> tuple[tuple[Frame, ...], str, str]:
    """A stack's frames, the innermost one's line of code, and that of the one around it."""
    frames: list[Frame] = []
    source = caller = ""
    for line in lines:
        if match := _FRAME.match(line[shift:]):
            frames.append(Frame(file=match[1], line=int(match[2]), function=match[3] or "<module>"))
            source, caller = "", source
        elif not source and frames:
            source = line[shift:].strip()
    return tuple(frames), source, caller


def _quoted_exceptions(lines: list[str], block: _Block, raised: RaisedException) -> Iterator[RaisedException]:
    """The exceptions that a message quotes: those of a loader's worker, of a group, of a checkpoint's ranks."""
    if block.group:
        yield from _group_exceptions(lines[block.exception + 1 : block.end])
        return
    message = raised.message.split("\n")
    starts = [(at, match) for at, line in enumerate(message) if (match := QUOTED_HEADER.match(line))]
    found: list[RaisedException] = []
    first = 0
    for index, (at, match) in enumerate(starts):
        until = starts[index + 1][0] if index + 1 < len(starts) else len(message)
        body = message[at + 1 : until]
        end = next((end for end, line in enumerate(body) if line.strip() and not line.startswith("  ")), len(body))
        if end == len(body) or not _is_exception_line(body, end):
            continue
        until = next((later for later, line in enumerate(body) if line in CONNECTORS), len(body))
        exception_type, text = _split_exception(body[end:until])
        frames, source, _ = _frames(body[:end])
        quoted = RaisedException(
            exception_type=exception_type,
            message=text.rstrip(),
            frames=frames,
            source=source,
            rank=int(match[1]) if match[1] else None,
            is_quoted=True,
        )
        if _line_before(message, at) not in CONNECTORS:
            first = len(found)
        found.insert(first, quoted)
    yield from found


def _group_exceptions(lines: list[str]) -> Iterator[RaisedException]:
    start: int | None = None
    for at, line in enumerate(lines):
        text = line.lstrip()[2:] if line.lstrip().startswith("| ") else ""
        if text == HEADER:
            start = at
        elif text and not text.startswith(" ") and _EXCEPTION_LINE.match(text):
            body = [part.lstrip()[2:] for part in lines[start + 1 : at]] if start is not None else []
            frames, source, _ = _frames(body)
            exception_type, message = _split_exception([text])
            yield RaisedException(
                exception_type=exception_type, message=message, frames=frames, source=source, is_quoted=True
            )
            start = None


def _as_printed(lines: list[str]) -> str:
    """A traceback's lines, without a progress bar before them and what is left of a drawn box."""
    first = f"  {_GROUP_HEADER}" if lines[0].endswith(_GROUP_HEADER) else HEADER
    return "\n".join([first, *(line for line in lines[1:] if line != INSIDE)])


def _split_exception(lines: list[str]) -> tuple[str, str]:
    if not lines:
        return "", ""
    first = lines[0]
    if match := _EXCEPTION_LINE.match(first):
        exception_type, message = match[1], first[match.end() :]
    else:
        exception_type, _, message = first.partition(": ")
        exception_type = cut_end(exception_type, 200)
    return exception_type, cut_end("\n".join([message, *lines[1:]]), MESSAGE_LIMIT)


def _group_message(lines: list[str]) -> tuple[str, str]:
    stripped = [line.lstrip("| ") if line.startswith("  ") else line for line in lines]
    exception_type, message = _split_exception(stripped[:1])
    inner = [
        text
        for line, text in zip(lines[1:], stripped[1:], strict=True)
        if "|" in line[:40] and _EXCEPTION_LINE.match(text) and not text.startswith(("File ", "Traceback "))
    ]
    if inner:
        message += "; in it: " + "; ".join(cut_end(text, CAUSE_LIMIT) for text in inner[:4])
    return exception_type, cut_end(message, MESSAGE_LIMIT)


def _syntax_error(lines: list[str]) -> FailureText | None:
    """A script that can't be compiled: Python prints no header for it."""
    for at in range(len(lines) - 1, -1, -1):
        if "Error: " not in lines[at][:20] or not _SYNTAX_ERROR.match(lines[at]):
            continue
        start = at
        while start > 0 and lines[start - 1].startswith("  ") and at - start < 5:
            start -= 1
        match = _FRAME.match(lines[start])
        if not match:
            continue
        exception_type, message = _split_exception(lines[at : at + 1])
        return FailureText(
            kind=TextKind.PYTHON,
            text=cut_middle("\n".join(lines[start : at + 1]), TEXT_LIMIT),
            exception_type=exception_type,
            message=message,
            frames=(Frame(file=match[1], line=int(match[2]), function="<module>"),),
            lines_after=sum(1 for line in lines[at + 1 :] if line.strip()),
            span=(start, at + 1),
        )
    return None
