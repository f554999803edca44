"""What a crash printed: faulthandler's dump at a fatal signal, and C++ terminations. Pure functions over text."""

from __future__ import annotations

import re

from hpc_elastic.base.text import clean_text, cut_end
from hpc_elastic.failures.failure_text import MESSAGE_LIMIT, TEXT_LIMIT, FailureText, Frame, TextKind

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


# faulthandler prints 100 frames and then "...".
_RECURSION = 10
_OVERFLOW = " (a stack overflow?)"


def find_fatal_error(text: str, *, cleaned: bool = False) -> FailureText | None:
    """faulthandler's dump of the stack at a fatal signal: from ``Fatal Python error: Segmentation fault`` on."""
    text = text if cleaned else clean_text(text)
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
            endless = line.strip() == "..." and len({frame.function for frame in frames}) <= _RECURSION
            break
    return FailureText(
        kind=TextKind.FATAL,
        text=cut_end(body.rstrip(), TEXT_LIMIT // 4),
        exception_type="",
        message=f"Fatal Python error: {last[1].strip()}" + (_OVERFLOW if endless else ""),
        frames=tuple(reversed(frames)),
        span=_to_the_end(text, last.start()),
    )


def find_cpp_terminate(text: str, *, cleaned: bool = False) -> FailureText | None:
    """``terminate called after throwing an instance of 'X'`` and its ``what()``; else a library's last FATAL line."""
    text = text if cleaned else clean_text(text)
    last = _last_match(_TERMINATE, "terminate called ", text)
    if last is None:
        logged = _last_match(_FATAL_LOG, "] ", text) if _FATAL_LOG.search(text) else None
        if logged is None:
            return None
        body = text[logged.start() :]
        return FailureText(
            kind=TextKind.CPP,
            text=cut_end(body.rstrip(), TEXT_LIMIT // 4),
            exception_type="",
            message=cut_end(logged[1], MESSAGE_LIMIT),
            span=_to_the_end(text, logged.start()),
        )
    body = text[last.start() :]
    what = _WHAT.search(body)
    before = text[: last.start()].rstrip("\n").rpartition("\n")[2]
    first = before if _VIRTUAL.match(before) else body.split("\n", 1)[0]
    return FailureText(
        kind=TextKind.CPP,
        text=cut_end(body.rstrip(), TEXT_LIMIT // 4),
        exception_type=(last[1] or "").strip("'"),
        message=cut_end(_AFTER_WHAT.split(what[1], 1)[0], MESSAGE_LIMIT) if what else first,
        span=_to_the_end(text, last.start()),
    )


def _to_the_end(text: str, start: int) -> tuple[int, int]:
    before = text.count("\n", 0, start)
    return before, before + text.count("\n", start) + 1


def _last_match(pattern: re.Pattern[str], words: str, text: str) -> re.Match[str] | None:
    """The last line that fits a pattern which has these words in it."""
    at = text.rfind(words)
    while at >= 0:
        start = text.rfind("\n", 0, at) + 1
        if match := pattern.match(text, start):
            return match
        at = text.rfind(words, 0, start)
    return None
