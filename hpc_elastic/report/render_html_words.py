"""Times, durations and names as the page writes them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from hpc_elastic.report.fold import rank_ranges
from hpc_elastic.slurm.hostlist import HostlistError, compress


def clock_time(when_ns: int | None, *, date: bool = False, fine: bool = False) -> str:
    """Local time of whoever makes the page."""
    moment = _local(when_ns)
    if moment is None:
        return "?"
    shown = moment.strftime("%Y-%m-%d %H:%M:%S" if date else "%H:%M:%S")
    return f"{shown}.{(when_ns or 0) // 1_000_000 % 1000:03d}" if fine else shown


def zone(when_ns: int | None) -> str:
    """``UTC+02:00``: what the page's times are to be read as."""
    moment = _local(when_ns)
    offset = moment.astimezone().strftime("%z") if moment is not None else ""
    return f"UTC{offset[:3]}:{offset[3:5]}" if offset else "local time"


def duration(seconds: float) -> str:
    """``61.2 s``, ``3 min 05 s``, ``7 h 02 min``, ``2 d 03 h``."""
    if seconds < 0.9995:
        return f"{max(0.0, seconds) * 1000:.0f} ms"
    if seconds < 99.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours:02d} h"
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def count(number: int, noun: str) -> str:
    """``1 node``, ``3 nodes``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def ranks(numbers: Sequence[int], *, limit: int = 60) -> str:
    """``rank 3``, ``ranks 0-7,12``."""
    shown = shorten(rank_ranges(numbers), limit)
    return f"rank{'' if len(set(numbers)) == 1 else 's'} {shown}"


def names(hosts: Sequence[str], *, limit: int = 60) -> str:
    """``n[1-4,6]``."""
    try:
        shown = compress(dict.fromkeys(hosts))
    except HostlistError:
        shown = ",".join(hosts)
    return shorten(shown, limit)


def shorten(value: str, limit: int) -> str:
    """At most so many characters."""
    return value if len(value) <= limit else f"{value[: limit - 1]}\u2026"


def _local(when_ns: int | None) -> datetime | None:
    if not when_ns:
        return None
    try:
        return datetime.fromtimestamp(when_ns // 1_000_000_000)
    except (OverflowError, OSError, ValueError):
        return None
