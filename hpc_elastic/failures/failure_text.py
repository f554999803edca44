"""The failure of a dying process as it printed it: exceptions, their chain, their frames, their form; its fingerprint.

The fingerprint is equal across ranks, rounds, hosts and restarts: it leaves out addresses, numbers, pids, ports, ranks,
line numbers and the folders of paths. ``ValueError:3f2a90c1d4e5``, ``signal:SIGSEGV``, ``exit:3``.

Tracebacks that a logger, a wrapper or a notebook printed in a form of its own are turned into Python's own form::

    [04:37:58 rank2] Traceback (most recent call last):    a prefix before every line: ``| sed``, ``srun -l``
    > File "train.py", line 7, in <module>                 loguru 0.7: empty lines, an arrow, the variables' values
    ValueError             Traceback (most recent call last)    IPython 9, papermill; below it: Cell In[1], line 3
    {"event": "failed", "exception": "Traceback (most recent call last):\\n  File ..."}    structlog and other JSON

The first three are rewritten in place, so that every line keeps its number.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

from msgspec import Struct

from hpc_elastic.base.codec import sha1
from hpc_elastic.base.text import cut_end

TEXT_LIMIT = 64 << 10
"""Characters of a traceback that are kept: its first eighth and its end."""
MESSAGE_LIMIT = 16 << 10
CAUSE_LIMIT = 400


class TextKind(str, Enum):
    PYTHON = "python"
    FATAL = "faulthandler"
    CPP = "c++"
    LINES = "lines"
    LAST_LINE = "last line"


class Frame(Struct, frozen=True, kw_only=True):
    file: str
    line: int
    function: str


class RaisedException(Struct, frozen=True, kw_only=True):
    exception_type: str
    """Printed so, ``torch.distributed.DistNetworkError``; empty for a line that stands for one, or a fatal error."""
    message: str = ""
    frames: tuple[Frame, ...] = ()
    """Outermost call first; of an exception that another one followed, from the function that caught it on."""
    source: str = ""
    """The innermost frame's line of code; empty where it was not printed."""
    caller: str = ""
    while_handling: bool = False
    """The next exception of the chain was raised while this one was handled, and not from it."""
    rank: int | None = None
    """The global rank that raised it, where another rank reports it."""
    is_quoted: bool = False
    """It stands in the next one's message, as that of a loader's worker does."""

    @property
    def headline(self) -> str:
        text = ": ".join(part for part in (self.exception_type, self.message) if part)
        return cut_end(text.split("\n", 1)[0], CAUSE_LIMIT)


class FailureText(RaisedException, frozen=True, kw_only=True):
    kind: TextKind
    text: str
    """The print without colours and rank prefixes; at most `TEXT_LIMIT` characters."""
    earlier: tuple[RaisedException, ...] = ()
    """The exceptions that it was raised from or while handling, nearest first; those that its message quotes too."""
    is_prefixed: bool = False
    """torch's hook printed it, which does so for what nothing caught."""
    lines_after: int = 0
    span: tuple[int, int] = (0, 0)
    """Its first line and one past its last in `clean_text` of what it was found in; (0, 0) where it is not known."""

    exception_at: int = 0
    """The line with the exception's type, counted as `span`: others' output may have been taken for its message."""

    @property
    def causes(self) -> tuple[str, ...]:
        """``KeyError: 'x'``: `earlier`, in short; without what the message quotes."""
        return tuple(raised.headline for raised in self.earlier if not raised.is_quoted)

    @property
    def chain(self) -> tuple[RaisedException, ...]:
        return (self, *self.earlier) if self.exception_type else ()

    @property
    def summary(self) -> str:
        if not self.exception_type:
            return summary_line(self.message)
        return summary_line(f"{self.exception_type}: {self.message}") if self.message.strip() else self.exception_type


HEADER = "Traceback (most recent call last):"
CONNECTORS = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
_LIMIT = 1000
_CONTINUES = re.compile(r"Traceback \(most recent call last\):|\A: |^  File \".*\", line \d+, in ", re.MULTILINE)
"""A message whose cause stands below its first line: a traceback, with or without its header, or Py4J's exception."""
# In a message: torch's loader ("Original "), torch.distributed.checkpoint ("(RANK 1)").
QUOTED_HEADER = re.compile(r"\s*(?:Original )?Traceback \(most recent call last\):(?: \(RANK (\d+)\))?\s*\Z")


def summary_line(message: str, *, limit: int = _LIMIT) -> str:
    first, more, rest = message.partition("\n")
    if not more or (first.strip() and not first.rstrip().endswith(":") and not _CONTINUES.search(rest)):
        return cut_end(first, limit)
    return cut_end(_joined(message.split("\n")), limit)


def _joined(lines: list[str]) -> str:
    said = [line.strip() for line in lines if line.strip()]
    if not said:
        return ""
    words = said[0]
    for line in said[1:4]:
        if line.startswith(": "):
            words = words.rstrip(".") + line
        elif words.endswith(":") and not line.endswith(HEADER):
            words += f" {line}"
        else:
            break
    quoted = _quoted(lines)
    if not quoted:
        return words
    return f"{words} {quoted}" if words.endswith(":") else f"{words} ({quoted})"


def _quoted(lines: list[str]) -> str:
    """The last line of a traceback in it: ``ValueError: bad batch 17``. Of several ranks' ones the first counts."""
    starts = [at for at, line in enumerate(lines) if at and QUOTED_HEADER.match(line)]
    if not starts:  # Ray's have no header
        starts = [at for at, line in enumerate(lines) if at and line.startswith('  File "')]
    if not starts:
        return ""
    start = starts[0] if lines[starts[0]].endswith(")") else starts[-1]
    return next((line.strip() for line in lines[start + 1 :] if line.strip() and not line[0].isspace()), "")


_FRAMES = 3
_MESSAGE_LIMIT = 500
_RULES: tuple[tuple[re.Pattern[str], str], ...] = (
    # Order matters: a path before its digits, hexadecimal before decimal. A file that an error of the system names may
    # be each rank's own; where it is tried is in the frames.
    (re.compile(r"(\[Errno \d+\][^:']{0,80}: )'[^'\n]{1,300}'"), r"\1'#'"),
    (re.compile(r"(?<![\w.])(?:/[^\s/'\":,;()\[\]]+)+/([^\s/'\":,;()\[\]]*)"), r"\1"),
    (re.compile(r"\b0[xX][0-9a-fA-F]+\b"), "#"),
    (re.compile(r"\b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b"), "#"),
    (re.compile(r"\b(?=[0-9a-fA-F]*\d)[0-9a-fA-F]{8,}\b"), "#"),
    (re.compile(r"\btmp[a-z0-9_]{6,}\b"), "tmp#"),
    (re.compile(r"[-+]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"), "#"),
    (re.compile(r"#(?:[\s.,:x-]*#)+"), "#"),
    (re.compile(r"\s+"), " "),
)
# `record` itself is in the stack of a recorded failure only: without this, the same failure would get two names.
_LIBRARY = re.compile(
    r"(?:site|dist)-packages/|/lib(?:64)?/python\d|\A<frozen |\A<string>\Z"
    r"|/hpc_elastic/(?:failures|inprocess|submission|worker_api)/\w+\.py\Z"
    # A torch that was built in place has no site-packages in its paths.
    r"|/torch/(?:_\w+|autograd|cuda|distributed|fx|jit|nn|optim|utils)/|/torch/(?:_\w+|functional|serialization)\.py\Z"
)


def normalise_message(message: str) -> str:
    text = message[: 4 * _MESSAGE_LIMIT]
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    return text.strip()[:_MESSAGE_LIMIT]


def user_frames(frames: Sequence[Frame]) -> tuple[Frame, ...]:
    return tuple(frame for frame in frames if not _LIBRARY.search(frame.file))


def fingerprint(
    *,
    exception_type: str = "",
    message: str = "",
    frames: Sequence[Frame] = (),
    exitcode: int = 1,
    signal: str = "",
    is_said: bool = False,
) -> str:
    """Name a failure, without blanks; `is_said`: `message` is why the process ended, without an exception."""
    if not exception_type:
        end = f"signal:{signal}" if signal else f"exit:{exitcode}"
        if not is_said:
            return end
        return f"{end}:{sha1(normalise_message(summary_line(message)).encode('utf-8', 'replace')).hex()[:12]}"
    name = exception_type.rsplit(".", 1)[-1].rsplit("::", 1)[-1]
    mine = user_frames(frames)
    # A recorded traceback starts below the module's own frame.
    inner = tuple(frame for frame in mine if frame.function != "<module>")
    chosen = (inner or mine or tuple(frames))[-_FRAMES:]
    where = "|".join(f"{frame.file.rsplit('/', 1)[-1]}:{frame.function}" for frame in chosen)
    # What follows that line may be what another part of the program printed after the exception: a run's name, a time.
    digest = sha1(f"{name}\n{normalise_message(summary_line(message))}\n{where}".encode("utf-8", "replace"))
    return f"{re.sub(r'[^A-Za-z0-9_]', '_', name)[:60]}:{digest.hex()[:12]}"


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
