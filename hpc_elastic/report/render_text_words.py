"""Fields, lines, times and durations as the text report writes them.

ASCII only, so that no terminal and no log chokes on it; what workers printed is cleaned of control characters.
"""

from __future__ import annotations

import re
from datetime import datetime

from hpc_elastic.base import files
from hpc_elastic.failures.traceback_text import clean_text

DECEPTIVE = re.compile(f"[{files.DECEPTIVE}]")
"""What turns the direction of the text around it, ends a line, or is invisible: a message could show something that is
not there."""
_REPEATS = 3


def text_field(name: str, value: str) -> str:
    """A field as torch prints it."""
    return f"  {name:<10}: {value}"


def wrapped(name: str, text: str, width: int) -> list[str]:
    """A field whose text goes on in as many lines as it needs."""
    words, lines, room = clean_line(text).split(" "), [""], width - 14
    for word in words:
        if lines[-1] and len(lines[-1]) + 1 + len(word) > room:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}" if lines[-1] else word
    first = text_field(name, lines[0]) if name else f"{'':14}{lines[0]}"
    return [first, *(f"{'':14}{line}" for line in lines[1:4])]


def split_words(text: str, width: int) -> list[str]:
    """An entry in at most three lines, indented from the second on."""
    words = text.lstrip(" ")
    lines = [text[: len(text) - len(words)]]
    for word in words.split(" "):
        if len(lines[-1]) + len(word) + 1 > width and lines[-1].strip():
            lines.append("     ")
        lines[-1] += f" {word}" if lines[-1].strip() or len(lines) > 1 else word
    return [*lines[:2], fit(" ".join([lines[2], *lines[3:]]), width)] if len(lines) > 2 else lines


def headline(text: str, width: int) -> list[str]:
    """What happened, in at most three lines, broken between words where there are any."""
    lines: list[str] = []
    text, room = brief(text).strip(), width - 2
    while text and len(lines) < 3:
        line = text[:room]
        if len(text) > room and (blank := text.rfind(" ", room // 2, room + 1)) > 0:
            line = text[:blank]
        lines.append(line)
        text = text[len(line) :].lstrip()
    if text:
        lines[-1] = f"{lines[-1][: room - 4].rstrip()} ..."
    return [f"  {line}" for line in lines] or ["  (no message)"]


def clean_line(text: str) -> str:
    """One line without control characters."""
    return _shown(text).replace("\n", " ").replace("\t", " ")


def clean_lines(text: str) -> list[str]:
    """Lines without control characters."""
    return [line.replace("\t", "    ") for line in _shown(text).rstrip("\n").split("\n")]


def _shown(text: str) -> str:
    return DECEPTIVE.sub("\ufffd", clean_text(text))


_CPP_PLACE = re.compile(r"\[[^\]\s]*\.(?:cc|cpp|hpp|h|cu):\d+\] ")


def brief(text: str) -> str:
    """One line, without the place in some library's C++ source that stands before what is meant."""
    return _CPP_PLACE.sub("", clean_line(text))


def fit(line: str, width: int) -> str:
    """A line that is cut at `width`."""
    return line if len(line) <= width else line[: width - 3] + "..."


_FRAME = re.compile(r'(\s*(?:\| )*\s*File ")([^"]+)(", line \d+.*)')


def fit_traceback(line: str, width: int) -> str:
    """A line of a traceback that is cut at `width`: of a frame, the beginning of the path, not the function."""
    match = _FRAME.fullmatch(line) if len(line) > width else None
    if match is None:
        return fit(line, width)
    room = width - len(match[1]) - len(match[3]) - 3
    cut = match[2][-room:] if room > 0 else ""
    start = cut.find("/")
    return f"{match[1]}...{cut[start:]}{match[3]}" if start >= 0 else fit(line, width)


def fold_repeats(lines: list[str]) -> list[str]:
    """Runs of the same line in a stack, as Python's own tracebacks fold them."""
    folded: list[str] = []
    at = 0
    while at < len(lines):
        end = at + 1
        while end < len(lines) and lines[end] == lines[at]:
            end += 1
        if end - at > _REPEATS + 1 and lines[at].lstrip().startswith("File "):
            indent = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
            folded += [*lines[at : at + _REPEATS], f"{indent}[Previous line repeated {end - at - _REPEATS} more times]"]
        else:
            folded += lines[at:end]
        at = end
    return folded


def shorten(text: str, limit: int) -> str:
    """A list of ranks that is cut between two of them."""
    return text if len(text) <= limit else text[: limit - 3].rpartition(",")[0] + ",..."


def time_text(when: int | None, *, fine: bool = False) -> str:
    """Local time, as torch prints it; milliseconds where asked for."""
    if not when:
        return "<N/A>"
    try:
        text = datetime.fromtimestamp(when // 1_000_000_000).isoformat(sep="_")
    except (OverflowError, OSError, ValueError):
        return "<N/A>"
    return f"{text}.{when // 1_000_000 % 1000:03d}" if fine else text


def clock_text(when: int | None) -> str:
    """The time of day, with milliseconds."""
    return time_text(when, fine=True).partition("_")[2] or "an unknown time"


def duration_text(seconds: float) -> str:
    """``61.2 s``, ``3 min 05 s``, ``7 h 02 min``."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def plural(number: int, noun: str) -> str:
    """``1 node``, ``3 nodes``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
