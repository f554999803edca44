"""Finds the part of a worker's output that explains its end: an exception, a crash's dump, or the lines printed last.

torch's hook puts ``[rank3]: `` before every line of what nothing caught: that is certain. Else the place decides: what
nothing caught begins at the script's ``<module>``, what a handler logs in the function that caught it, which ended the
process only where the output ends soon after it.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from hpc_elastic.base.text import cut_end
from hpc_elastic.failures.classify import signal_of
from hpc_elastic.failures.failure_text import MESSAGE_LIMIT, TEXT_LIMIT, FailureText, Frame, TextKind, read_json_line
from hpc_elastic.failures.origin import (
    LastLines,
    find_last_lines,
    goes_on,
    has_progress,
    is_in_collective,
    speaking_lines,
)
from hpc_elastic.failures.traceback_text import find_cut_off, find_python_traceback, find_tracebacks, is_top_frame
from hpc_elastic.failures.worker_failure import EvidenceSource, WorkerFailure

_CLOSE = 40
"""A traceback with more lines than this after it did not end a process that ended otherwise than by an exception."""
_RIGHT_BEFORE_NS = 500_000_000
"""A process prints so shortly before it sends itself a signal why it does."""
_SAID_BEFORE = 30


def find_explanation(
    facts: WorkerFailure,
    stderr: str,
    read_stdout: Callable[[], str],
    lived_ns: Callable[[FailureText], int | None] = lambda _: None,
) -> tuple[FailureText | None, EvidenceSource, str]:
    """Find what explains an end, where it was found, and the text that it stands in: stderr, or stdout (``| tee``).

    `lived_ns`: how long the worker lived after it had printed a traceback on stderr; None where that is not known.
    """
    lines = stderr.split("\n")
    found = _find_in_text(facts, stderr, lines, lived_ns)
    number = signal_of(facts.exitcode)
    if found is not None or number == signal.SIGKILL or (number == signal.SIGTERM and facts.stopped_by_agent):
        return found, EvidenceSource.STDERR, stderr
    said = find_last_lines(lines)
    if number == signal.SIGTERM:  # a thread of its own may have sent it, and then printed why
        found = _from_lines(facts, said, lines)
        if found is not None:
            lived = lived_ns(found)
            is_reason = lived <= _RIGHT_BEFORE_NS if lived is not None else found.kind is TextKind.LINES
            found = found if is_reason else None
        return found, EvidenceSource.STDERR, stderr
    if said is None or not said.is_telling:
        stdout = read_stdout()
        lines_there = stdout.split("\n")
        found = _find_in_text(facts, stdout, lines_there, lambda _: None)
        if found is not None:
            return found, EvidenceSource.STDOUT, stdout
        printed = find_last_lines(lines_there)
        if printed is not None and (printed.is_telling or said is None):
            return _from_lines(facts, printed, lines_there), EvidenceSource.STDOUT, stdout
    return _from_lines(facts, said, lines), EvidenceSource.STDERR, stderr


def _from_lines(facts: WorkerFailure, said: LastLines | None, lines: list[str]) -> FailureText | None:
    # A process that crashed has an explanation there only where they speak of an error.
    if said is None or (signal_of(facts.exitcode) not in (0, signal.SIGTERM) and not said.is_telling):
        return None
    traceback, logged = read_json_line(lines[said.at])
    span = (said.at, said.at + 1)
    if traceback and (found := find_python_traceback(traceback)) is not None:
        return replace(found, span=span, exception_at=said.at)
    return FailureText(
        kind=TextKind.LINES if said.is_telling else TextKind.LAST_LINE,
        text="",
        exception_type="",
        message=logged or said.text,
        span=span,
    )


def _find_in_text(
    facts: WorkerFailure, text: str, lines: Sequence[str], lived_ns: Callable[[FailureText], int | None]
) -> FailureText | None:
    number = signal_of(facts.exitcode)
    if not number:
        ending = find_uncaught(text, lines, exitcode=facts.exitcode, lived_ns=lived_ns)
        return ending or find_cpp_terminate(text)
    if number == signal.SIGINT and not facts.stopped_by_agent:
        return _interrupted(text, lines)
    python = find_python_traceback(text, cleaned=True)
    if number in (2, 9, 15):
        # It was hanging in its shutdown after the exception, and was ended: by its agent, or by a person.
        if not facts.stopped_by_agent:
            return None
        begun = find_cut_off(text)
        if begun is not None:  # a victim's would say so only in the lines that are missing
            return None if is_in_collective(begun) else begun
        if python is None or python.lines_after > _CLOSE:
            return None
        return None if went_on(python, lines) else python
    fatal, cpp = find_fatal_error(text), find_cpp_terminate(text)
    dumped = max((one.span[1] - one.span[0] for one in (fatal, cpp) if one is not None), default=0)
    lived = lived_ns(python) if python is not None else None
    is_close = python is not None and (python.lines_after <= _CLOSE + dumped or ended_soon(python, lived))
    if python is not None and is_close and not went_on(python, lines, lived):
        return python  # a crash while an exception unwinds: the exception is what one wants to know
    if cpp is not None:
        frames = fatal.frames if fatal is not None else cpp.frames
        start = min(cpp.span[0], fatal.span[0]) if fatal is not None else cpp.span[0]
        return replace(cpp, frames=frames, span=(start, cpp.span[1]))
    if fatal is None:
        return None
    said = find_last_lines(lines[max(0, fatal.span[0] - _SAID_BEFORE) : fatal.span[0]])
    # "free(): invalid pointer" stands before the dump of the fault handler.
    return replace(fatal, message=f"{said.text}\n{fatal.message}") if said is not None and said.is_telling else fatal


def _interrupted(text: str, lines: Sequence[str]) -> FailureText | None:
    """``_thread.interrupt_main()`` raises KeyboardInterrupt too: something led to that."""
    tracebacks = find_tracebacks(text)
    last = tracebacks[-1] if tracebacks else None
    if last is None or last.exception_type != "KeyboardInterrupt" or last.lines_after > _CLOSE:
        return None
    for earlier in reversed([*tracebacks[:-1], *find_tracebacks(text, threads=True)]):
        if earlier.lines_after <= last.lines_after + _CLOSE + last.span[1] - last.span[0]:
            return earlier
    said = find_last_lines(lines[max(0, last.span[0] - _SAID_BEFORE) : last.span[0]])
    return replace(last, message=said.text) if said is not None and said.is_telling else last


_SOON = 5
"""A process prints at most so many speaking lines after a logged traceback for which it ends."""
_LOOKED_AT = 100
_SHUTDOWN_NS = 2_000_000_000
"""A process ends so soon after what nothing caught; a table or C++ logs that it prints then are no progress."""
_LOGGER = re.compile(r".{0,80}?\b(?:ERROR|CRITICAL|WARNING|INFO|DEBUG|EXCEPTION)\b")


def find_uncaught(
    text: str, lines: Sequence[str], *, exitcode: int, lived_ns: Callable[[FailureText], int | None] = lambda _: None
) -> FailureText | None:
    tracebacks = find_tracebacks(text)
    found = find_ending(tracebacks, lines, exitcode=exitcode, lived_ns=lived_ns)
    if found is None:
        found = find_ending(find_tracebacks(text, threads=True), lines, exitcode=exitcode)
    if found is None and not tracebacks:
        found = find_python_traceback(text, cleaned=True)  # a script that can't be compiled
    return found


def find_ending(
    tracebacks: Sequence[FailureText],
    lines: Sequence[str],
    *,
    exitcode: int,
    lived_ns: Callable[[FailureText], int | None] = lambda _: None,
) -> FailureText | None:
    """Choose the traceback of the exception that ended a process; Python itself ends with 1 after one."""
    certain = [found for found in tracebacks if found.is_prefixed]
    if certain:
        return certain[-1]
    logged: FailureText | None = None
    for found in reversed(tracebacks):
        after = lines[found.exception_at + 1 : found.exception_at + 1 + _LOOKED_AT]
        if goes_on(lines[max(0, found.span[0] - _LOOKED_AT) : found.span[0]], after):
            break
        spoken = len(speaking_lines(after))
        if exitcode != 1 and has_progress(after) and not ended_soon(found, lived_ns(found)):
            break
        last = find_last_lines(lines[max(found.exception_at + 1, len(lines) - _LOOKED_AT) :])
        says_why = last is not None and last.is_telling
        is_logged = found.span[0] > 0 and _LOGGER.match(lines[found.span[0] - 1]) is not None
        if reaches_top(found) and not (is_logged and says_why and spoken > _SOON):
            return found
        if spoken > _SOON and (exitcode != 1 or says_why):
            break
        logged = logged or found
    return logged


def ended_soon(found: FailureText, lived_ns: int | None) -> bool:
    return found.is_prefixed or (reaches_top(found) and lived_ns is not None and lived_ns <= _SHUTDOWN_NS)


def went_on(found: FailureText, lines: Sequence[str], lived_ns: int | None = None) -> bool:
    if found.is_prefixed:
        return False
    after = lines[found.exception_at + 1 : found.exception_at + 1 + _LOOKED_AT]
    return (has_progress(after) and not ended_soon(found, lived_ns)) or goes_on(
        lines[max(0, found.span[0] - _LOOKED_AT) : found.span[0]], after
    )


def reaches_top(found: FailureText) -> bool:
    """It went all the way up: nothing in the script caught it."""
    return not found.frames or is_top_frame(found.frames[0])


_FATAL_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)\Z')
_FATAL = re.compile(r"^Fatal Python error: (.*)$", re.MULTILINE)
_TERMINATE = re.compile(
    r"^terminate called (?:after throwing an instance of '([^'\n]*)|without an active exception)", re.MULTILINE
)
_WHAT = re.compile(r"^\s*what\(\):\s*(.*(?:\n.+){0,8})$", re.MULTILINE)
# What follows c10's message: its C++ stack, advice that is the same each time, or another program's output.
_AFTER_WHAT = re.compile(
    r"\n(?:Exception raised from |frame #\d|CUDA kernel errors might |Fatal Python error: |terminate called|\[rank\d)"
)
_VIRTUAL = re.compile(r"(?:pure|deleted) virtual method called\s*\Z")
# "[rank3]:[F1206 18:44:12.7 ProcessGroupNCCL.cpp:1169] [PG 0 Rank 3] ...": glog's FATAL ends the process; so does
# "F20261123 04:37:58.570145  8096 sampler.cc:77] Check failed: n == 4 (3 vs. 4)", and absl's.
_FATAL_LOG = re.compile(
    r"^(?:\[rank\d+\]:)?(?:\[F\d* ?[\d:.]*|F(?:\d{4})?\d{4} [\d:.]+ +\d+) ?\S+:\d+\] (.+)$", re.MULTILINE
)
_RECURSION = 10
"""At most so many functions call each other where the stack overflows."""


def find_fatal_error(text: str) -> FailureText | None:
    """faulthandler's dump of the stack at a fatal signal: from ``Fatal Python error: Segmentation fault`` on."""
    last = _last_match(_FATAL, "Fatal Python error: ", text)
    if last is None:
        return None
    body = text[last.start() :]
    lines = body.split("\n")
    frames: list[Frame] = []
    inside = endless = False
    for line in lines[1:]:
        match = _FATAL_FRAME.match(line)
        if line.startswith("Current thread ") and "C stack" not in line:
            frames, inside = [], True
        elif match and inside:
            frames.append(Frame(file=match[1], line=int(match[2]), function=match[3]))
        elif frames:
            # faulthandler prints 100 frames and then "...".
            endless = line.strip() == "..." and len({frame.function for frame in frames}) <= _RECURSION
            break
    return FailureText(
        kind=TextKind.FATAL,
        text=cut_end(body.rstrip(), TEXT_LIMIT // 4),
        exception_type="",
        message=f"Fatal Python error: {last[1].strip()}" + (" (a stack overflow?)" if endless else ""),
        frames=tuple(reversed(frames)),
        span=_to_the_end(text, last.start()),
    )


def find_cpp_terminate(text: str) -> FailureText | None:
    """``terminate called after throwing an instance of 'X'`` and its ``what()``; else a library's last FATAL line."""
    exception_type = ""
    if (last := _last_match(_TERMINATE, "terminate called ", text)) is not None:
        body = text[last.start() :]
        exception_type = (last[1] or "").strip("'")
        before = text[: last.start()].rstrip("\n").rpartition("\n")[2]
        message = before if _VIRTUAL.match(before) else body.split("\n", 1)[0]
        if what := _WHAT.search(body):
            message = cut_end(_AFTER_WHAT.split(what[1], 1)[0], MESSAGE_LIMIT)
    elif "] " in text and _FATAL_LOG.search(text) and (last := _last_match(_FATAL_LOG, "] ", text)) is not None:
        body, message = text[last.start() :], cut_end(last[1], MESSAGE_LIMIT)
    else:
        return None
    return FailureText(
        kind=TextKind.CPP,
        text=cut_end(body.rstrip(), TEXT_LIMIT // 4),
        exception_type=exception_type,
        message=message,
        span=_to_the_end(text, last.start()),
    )


def _to_the_end(text: str, start: int) -> tuple[int, int]:
    before = text.count("\n", 0, start)
    return before, before + text.count("\n", start) + 1


def _last_match(pattern: re.Pattern[str], words: str, text: str) -> re.Match[str] | None:
    at = text.rfind(words)
    while at >= 0:
        start = text.rfind("\n", 0, at) + 1
        if match := pattern.match(text, start):
            return match
        at = text.rfind(words, 0, start)
    return None
