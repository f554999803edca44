"""Slurm's time limits: ``30``, ``90:00``, ``2:00:00``, ``1-12``, ``1-12:30``, ``1-12:30:00``, ``UNLIMITED``."""

from __future__ import annotations

import re

from hpc_elastic.errors import UsageError

_CLOCK = re.compile(r"(?:(\d{1,6})-)?(\d{1,9})(?::(\d{1,9}))?(?::(\d{1,9}))?\Z", re.ASCII)
_UNLIMITED = ("unlimited", "infinite", "-1", "partition_limit")
# torchrun's --tee and --redirects: LOCAL_RANK:{0,1,2,3}, comma-separated.
_TEE = re.compile(r"\d+:[0-3](?:,\d+:[0-3])*\Z|\d+:\d+,.*\Z", re.ASCII)


def parse_time_limit(text: str) -> int | None:
    """Seconds; None where there is no limit.

    Raises:
        ValueError: not one of Slurm's forms.
    """
    if text.lower() in _UNLIMITED:
        return None
    match = _CLOCK.match(text)
    if match is None:
        raise ValueError(f"{text!r} is not a time")
    days, first, second, third = (None if part is None else int(part) for part in match.groups())
    assert first is not None
    if days is not None:  # D-H, D-H:M, D-H:M:S
        return ((days * 24 + first) * 60 + (second or 0)) * 60 + (third or 0)
    if third is not None:  # H:M:S
        return (first * 60 + (second or 0)) * 60 + third
    return first * 60 + (second or 0)  # M, M:S


def check_time_option(text: str, *, option: str = "-t") -> int | None:
    """`parse_time_limit` of a user's ``-t``/``--time``.

    Raises:
        UsageError: it is no time, it is zero, or it looks like torchrun's ``-t`` (tee).
    """
    if _TEE.match(text):
        raise UsageError(
            f"{option} {text}: here {option} is the time limit, as in sbatch; torchrun's -t is --tee {text} "
            "(for a time write the seconds with two digits, as in 10:00)"
        )
    try:
        seconds = parse_time_limit(text)
    except ValueError:
        raise UsageError(
            f"{option} {text}: not a time; give minutes, minutes:seconds, hours:minutes:seconds, days-hours, "
            "days-hours:minutes, days-hours:minutes:seconds or UNLIMITED"
        ) from None
    if seconds == 0:
        raise UsageError(
            f"{option} {text}: a time limit of zero; leave {option} out for the partition's own, or UNLIMITED"
        )
    return seconds
