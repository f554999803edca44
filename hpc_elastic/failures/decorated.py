"""Tracebacks that a logger, a wrapper or a notebook printed in a form of its own, turned into Python's own form.

::

    [04:37:58 rank2] Traceback (most recent call last):    a prefix before every line: ``| sed``, ``srun -l``
    > File "train.py", line 7, in <module>                 loguru 0.7: empty lines, an arrow, the variables' values
    ValueError             Traceback (most recent call last)    IPython 9, papermill; below it: Cell In[1], line 3
    {"event": "failed", "exception": "Traceback (most recent call last):\\n  File ..."}    structlog and other JSON

The first three are rewritten in place, so that every line keeps its number.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from hpc_elastic.failures.failure_text import HEADER

_TITLE = "Traceback (most recent call last)"
_FRAME = '  File "'
_NO_PREFIX = re.compile(r"\[rank\d+\]: |Original |Exception Group |\s*[|+] ")
"""torch's hook, torch's loader and Python itself put it before the title."""
_CLOCK = re.compile(r"\d{4}-\d\d-\d\d|\d\d:\d\d:\d\d(?:[.,]\d+)?|\d+\.\d{2,}")
_MOST_BETWEEN = 5
_LOGURU_FRAME = re.compile(r'[> ] File "')
_IPYTHON = re.compile(r"([A-Za-z_][\w.]*) {2,}Traceback \(most recent call last\)\s*\Z")
_IPYTHON_PLACE = re.compile(r"(?:File )?(.+?)(?:, line |:)(\d+)(?:, in ([\w.<>]+)\b.*)?\Z")
_IPYTHON_SOURCE = re.compile(r"-+> +\d+ (.*)\Z")
_MOST_LINES = 4000
_JSON_LIMIT = 256 << 10
_TITLES = ("event", "message", "msg", "text")
_REASONS = ("error", "err", "exception", "exc", "exc_info", "reason", "detail")
_CHAINED = "\n\nDuring handling of the above exception, another exception occurred:\n\n"


def undecorate(text: str) -> str:
    if _TITLE not in text:
        return text
    lines = text.split("\n")
    for at, line in enumerate(lines):
        if _TITLE not in line:
            continue
        if line.endswith(HEADER):
            before = line[: -len(HEADER)]
            if before.strip() and not _NO_PREFIX.match(before):
                _strip_prefix(lines, at, before)
            elif not before and lines[at + 1 : at + 2] == [""]:
                _plain_loguru(lines, at + 1)
        elif match := _IPYTHON.match(line):
            _plain_ipython(lines, at, match[1])
    return "\n".join(lines)


def _strip_prefix(lines: list[str], at: int, before: str) -> None:
    prefix = re.compile(r"[\d:.,-]+".join(re.escape(part) for part in _CLOCK.split(before)))
    if at + 1 >= len(lines) or not (match := prefix.match(lines[at + 1])):
        return
    if not lines[at + 1][match.end() :].startswith((_FRAME, "  + Exception Group")):
        return
    others = 0
    for index in range(at, min(len(lines), at + _MOST_LINES)):
        if match := prefix.match(lines[index]):
            lines[index] = lines[index][match.end() :]
            others = 0
        elif prefix.match(f"{lines[index]} "):  # a line end without spaces before it
            lines[index] = ""
        elif (others := others + 1) > _MOST_BETWEEN:
            break


def _plain_loguru(lines: list[str], first: int) -> None:
    if not any(_LOGURU_FRAME.match(line) for line in lines[first : first + 3]):
        return
    for at in range(first, min(len(lines), first + _MOST_LINES)):
        if not lines[at]:
            lines[at] = INSIDE
        elif _LOGURU_FRAME.match(lines[at]):
            lines[at] = f"  {lines[at][2:]}"
        elif not lines[at].startswith("  "):
            break


def _plain_ipython(lines: list[str], at: int, name: str) -> None:
    ends = range(at + 1, min(len(lines), at + _MOST_LINES))
    end = next((n for n in ends if lines[n] == name or lines[n].startswith(f"{name}: ")), None)
    if end is None:
        return
    lines[at] = HEADER
    for index in range(at + 1, end):
        if source := _IPYTHON_SOURCE.match(lines[index]):
            lines[index] = f"    {source[1].strip()}"
        elif not lines[index][:1].isspace() and (place := _IPYTHON_PLACE.match(lines[index])):
            lines[index] = f'{_FRAME}{place[1]}", line {place[2]}, in {place[3] or "<module>"}'
        else:
            lines[index] = INSIDE


def read_json_line(line: str) -> tuple[str, str]:
    """Find the traceback, and the message with its reason, in a logger's JSON line; each may be empty."""
    start = line.find("{")
    if start < 0 or not line.endswith("}") or len(line) > _JSON_LIMIT:
        return "", ""
    try:
        values = json.loads(line[start:])
    except (ValueError, RecursionError):
        return "", ""
    traceback = next(_tracebacks(values), "")
    said = [_first_text(values, _TITLES), "" if traceback else _first_text(values, _REASONS)]
    return traceback, ": ".join(text for text in said if text)


def _tracebacks(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        if HEADER in value:
            yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tracebacks(part)
    elif isinstance(value, list):
        stacks = [stack for stack in value if isinstance(stack, dict) and stack.get("exc_type")]
        if stacks:  # structlog's dict_tracebacks: the last exception first
            yield _CHAINED.join(_as_printed(stack) for stack in reversed(stacks))
        else:
            for part in value:
                yield from _tracebacks(part)


def _as_printed(stack: Mapping[str, Any]) -> str:
    frames = stack.get("frames")
    places = [frame for frame in frames if isinstance(frame, dict)] if isinstance(frames, list) else []
    lines = [f'{_FRAME}{p.get("filename")}", line {p.get("lineno") or 0}, in {p.get("name")}' for p in places]
    value = stack.get("exc_value")
    return "\n".join([HEADER, *lines, f"{stack['exc_type']}: {value}" if value else str(stack["exc_type"])])


def _first_text(values: Mapping[str, Any], keys: tuple[str, ...]) -> str:
    return next((text for key in keys if isinstance(text := values.get(key), str) and text.strip()), "")


TITLE = " Traceback (most recent call last) "
INSIDE = "  "
"""Stands for a line of a box that says nothing: as long as any line of a traceback, and dropped from its text."""

# Texts, which `re` compiles at the first use: few agents ever see such a box.
_TOP = r"[╭┌+][─-]+ Traceback \(most recent call last\) [─-]+[╮┐+]\s*\Z"
_BOTTOM = r"[╰└+][─-]+[╯┘+]\s*\Z"
_SIDES = r"[│|] (.*?)\s*[│|]?\s*\Z"
_PLACE = r"(.+):(\d+) in (\S+)\Z"
_SOURCE = r"(?:❱|\\u2771|>) +\d+ (.*)\Z"
_GUIDES = r"[│|] ?"
_PATH_LINES = 6


def plain_tracebacks(lines: list[str]) -> None:
    for top, line in enumerate(lines):
        if TITLE not in line or not re.match(_TOP, line):
            continue
        first, end = top + 1, min(len(lines), top + _MOST_LINES)
        bottom = next((at for at in range(first, end) if re.match(_BOTTOM, lines[at])), None)
        if bottom is None:
            continue
        inside = [match[1] if (match := re.match(_SIDES, line)) else "" for line in lines[first:bottom]]
        lines[top : bottom + 1] = [HEADER] + [INSIDE] * (bottom - top)
        at = 0
        while at < len(inside):
            taken, place = _place(inside, at)
            if place is not None:
                lines[first + at] = f'{_FRAME}{place[1]}", line {place[2]}, in {place[3]}'
            elif source := re.match(_SOURCE, inside[at]):
                lines[first + at] = f"    {re.sub(_GUIDES, '', source[1]).strip()}"
            at += taken


def _place(inside: list[str], at: int) -> tuple[int, re.Match[str] | None]:
    """``path:13 in main``, which may be long enough for several lines, and how many it takes."""
    if not inside[at] or inside[at][0].isspace() or (at and inside[at - 1]):
        return 1, None
    text = ""
    for count, piece in enumerate(inside[at : at + _PATH_LINES], 1):
        if not piece:
            break
        text += piece if not text or text[-1] in "-/" else f" {piece}"
        if match := re.match(_PLACE, text):
            return count, match
    return 1, None
