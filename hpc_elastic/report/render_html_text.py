"""Times, ranks and names as the page writes them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from hpc_elastic.base.text import duration as _duration
from hpc_elastic.base.text import local_time, ranks_text, time_text
from hpc_elastic.slurm.notation import HostlistError, compress

duration = partial(_duration, fine=True)
ranks = partial(ranks_text, limit=60)


def clock_time(when_ns: int | None, *, fine: bool = False) -> str:
    """``2026-11-21 05:30:00``, local time where the page is made."""
    return time_text(when_ns, fine=fine, separator=" ") if when_ns else "?"


def time_of_day(when_ns: int | None, *, fine: bool = False) -> str:
    """``05:30:00``."""
    return time_text(when_ns, date=False, fine=fine) if when_ns else "?"


def zone(when_ns: int | None) -> str:
    """``UTC+02:00``: what the page's times are to be read as."""
    moment = local_time(when_ns)
    offset = moment.astimezone().strftime("%z") if moment is not None else ""
    return f"UTC{offset[:3]}:{offset[3:5]}" if offset else "local time"


def names(hosts: Sequence[str], *, limit: int = 60) -> str:
    """``n[1-4,6]``."""
    try:
        shown = compress(dict.fromkeys(hosts))
    except HostlistError:
        shown = ",".join(hosts)
    return shorten(shown, limit)


def shorten(value: str, limit: int) -> str:
    return value if len(value) <= limit else f"{value[: limit - 1]}\u2026"
