"""Text for people, in ASCII alone: durations, times, ranges of ranks, the first of many names; and foreign text made
safe to show."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime

from hpc_elastic.base import files

_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_SHORT = 2000
"""Characters up to which a text is first checked whether there is anything to clean."""
_ASCII_CONTROL = bytes({*range(0x20), 0x7F} - set(b"\t\n"))
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?\Z")
_DECEPTIVE = re.compile(f"[{files.DECEPTIVE}]")


def clean_text(text: str) -> str:
    """The text without colours, control characters and lone surrogates; line ends become ``\\n``."""
    if len(text) < _SHORT and text.isascii() and text.isprintable():
        return text
    if "\x1b" in text:
        text = _ANSI.sub("", text)
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    if text.isascii():  # in a tenth of the time
        return text.encode().translate(None, _ASCII_CONTROL).decode()
    return _CONTROL.sub("", text).encode("utf-8", "replace").decode("utf-8")


def safe_text(text: str) -> str:
    """The `clean_text` without characters that turn its direction, end a line, or are invisible."""
    return _DECEPTIVE.sub("\ufffd", clean_text(text))


def clean_line(text: str) -> str:
    return safe_text(text).replace("\n", " ").replace("\t", " ")


def clean_lines(text: str) -> list[str]:
    return [line.replace("\t", "    ") for line in safe_text(text).rstrip("\n").split("\n")]


def cut_middle(text: str, limit: int) -> str:
    """The first eighth and the end of `text`, where the cause stands: at most `limit` characters, and a note."""
    if len(text) <= limit:
        return text
    head = limit // 8
    return f"{text[:head]}\n... {len(text) - limit} characters cut ...\n{text[len(text) - (limit - head) :]}"


def cut_end(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text) - limit} characters cut)"


def fit(line: str, width: int) -> str:
    return line if len(line) <= width else line[: width - 3] + "..."


def plural(number: int, noun: str) -> str:
    """``1 node``, ``3 nodes``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def first_of(names: Sequence[str], most: int, *, noun: str = "") -> str:
    """``n1, n2, n3 and 4 more``; with a noun ``and 4 more nodes``."""
    left = len(names) - most
    if left <= 0:
        return ", ".join(names)
    return f"{', '.join(names[:most])} and {left} more{f' {noun}s' if noun else ''}"


class RangeReader:
    """Reads the texts of `ranges`, each once. A short text may stand for very many numbers: all have one limit."""

    def __init__(self, *, most: int) -> None:
        self._left = most
        self._known: dict[str, tuple[int, ...] | None] = {}

    def read(self, text: str) -> tuple[int, ...] | None:
        """The numbers; None: it is something else, or stands for more than may still be read."""
        if text not in self._known:
            bounds = range_bounds(text)
            count = sum(last - first + 1 for first, last in bounds or ())
            if bounds is None or count > self._left:
                self._known[text] = None
            else:
                self._left -= count
                self._known[text] = tuple(number for first, last in bounds for number in range(first, last + 1))
        return self._known[text]


def range_bounds(text: str) -> list[tuple[int, int]] | None:
    found = []
    for part in text.split(","):
        match = _RANGE.match(part)
        if match is None or int(match[1]) > int(match[2] or match[1]):
            return None
        found.append((int(match[1]), int(match[2] or match[1])))
    return found


def ranges(numbers: Sequence[int], *, limit: int | None = None) -> str:
    """``(12, 0, 1, 2)`` -> ``0-2,12``, cut between two numbers to `limit`."""
    bounds: list[list[int]] = []
    for number in sorted(set(numbers)):
        if bounds and number == bounds[-1][1] + 1:
            bounds[-1][1] = number
        else:
            bounds.append([number, number])
    text = ",".join(str(first) if first == last else f"{first}-{last}" for first, last in bounds)
    return text if limit is None or len(text) <= limit else text[: limit - 3].rpartition(",")[0] + ",..."


def ranks_text(numbers: Sequence[int], *, limit: int | None = None) -> str:
    """``rank 3``, ``ranks 0-7,12``."""
    return f"rank{'' if len(set(numbers)) == 1 else 's'} {ranges(numbers, limit=limit)}"


def size_text(count: float) -> str:
    """``36.4 TiB``."""
    value, unit = float(count), "B"
    for letter in "KMGTPE":
        if value < 1024:
            break
        value, unit = value / 1024, f"{letter}iB"
    return f"{value:.1f} {unit}" if unit != "B" else f"{count:.0f} B"


def duration(seconds: float, *, fine: bool = False) -> str:
    """``61.2 s``, ``3 min 05 s``, ``7 h 02 min``, ``2 d 03 h``; with `fine` less than a second as ``412 ms``."""
    if fine and seconds < 0.9995:
        return f"{max(0.0, seconds) * 1000:.0f} ms"
    if seconds < 99.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours:02d} h"
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def seconds_text(seconds: float) -> str:
    """A measured time: ``0.800 s``, ``3600.0 s``."""
    return f"{seconds:.3f} s" if seconds < 1 else f"{seconds:.1f} s"


def milliseconds_text(ns: int) -> str:
    """``0.4 ms``, rounded up."""
    tenths = -(-ns // 100_000)
    if tenths < 100:
        return f"{tenths / 10:g} ms"
    return f"{-(-ns // 1_000_000)} ms" if ns < 10_000_000_000 else f"{-(-ns // 1_000_000_000)} s"


def local_time(when_ns: int | None) -> datetime | None:
    """The local time, to the second; None for an invalid time."""
    try:
        return datetime.fromtimestamp(when_ns // 1_000_000_000) if when_ns else None
    except (OverflowError, OSError, ValueError):
        return None


def time_text(when_ns: int | None, *, date: bool = True, fine: bool = False, separator: str = "_") -> str:
    """``2026-11-21_05:30:00`` as torch prints it, local time; with `fine` to the millisecond. ``<N/A>`` for no time."""
    moment = local_time(when_ns)
    if moment is None:
        return "<N/A>" if date else "an unknown time"
    text = moment.isoformat(sep=separator) if date else moment.time().isoformat()
    return f"{text}.{(when_ns or 0) // 1_000_000 % 1000:03d}" if fine else text
