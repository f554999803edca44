"""Fields, lines, times and durations as the text report writes them.

ASCII only, so that no terminal and no log chokes on it; what workers printed is cleaned of control characters.
"""

from __future__ import annotations

import re
from datetime import datetime

from hpc_elastic.failures.traceback_text import clean_text


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


def unwrapped(text: str, width: int) -> list[str]:
    """A headline in at most three lines."""
    text, room = clean_line(text), width - 2
    return [f"  {text[at : at + room]}" for at in range(0, min(len(text), 3 * room), room)] or ["  (no message)"]


def clean_line(text: str) -> str:
    """One line without control characters."""
    return clean_text(text).replace("\n", " ").replace("\t", " ")


def clean_lines(text: str) -> list[str]:
    """Lines without control characters."""
    return [line.replace("\t", "    ") for line in clean_text(text).rstrip("\n").split("\n")]


_CPP_PLACE = re.compile(r"\[[^\]\s]*\.(?:cc|cpp|hpp|h|cu):\d+\] ")


def brief(text: str) -> str:
    """One line, without the place in some library's C++ source that stands before what is meant."""
    return _CPP_PLACE.sub("", clean_line(text))


def fit(line: str, width: int) -> str:
    """A line that is cut at `width`."""
    return line if len(line) <= width else line[: width - 3] + "..."


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


def clock_text(when: int) -> str:
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
