"""Slurm's packed strings: hostlists ``rack[1-2]n[01-10],login1``, counts ``4(x2),1``, GRES and device lists.

Hostlists are expanded here, since a container has no scontrol. The order is Slurm's (topology), and duplicates stay, as
in ``scontrol show hostnames``. Suffixes (``n[1-2].cluster.local``) are read as Slurm 24.11 reads them; 20.11 and 22.05
call them invalid, with rc 0.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable

from hpc_elastic.errors import HpcElasticError, UsageError

MAX_HOSTS = 1 << 17
_MAX_NAME = 255
_MAX_DIGITS = 18
_NAME = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.-]*\Z")
_ITEM = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")
_LIST = re.compile(rf"{_ITEM.pattern}(?:,{_ITEM.pattern})*")
_LITERAL = re.compile(r"[A-Za-z0-9_.-]*\Z")
_TRAILING_NUMBER = re.compile(rf"(.*?)([0-9]{{1,{_MAX_DIGITS}}})\Z", re.DOTALL)


class HostlistError(UsageError):
    template = "invalid hostlist {text!r}: {why}"

    def __init__(self, **facts: str) -> None:
        HpcElasticError.__init__(self, **facts)


def expand(text: str) -> tuple[str, ...]:
    """Raises HostlistError, also for ``(null)`` and ``None assigned``, and for more than `MAX_HOSTS` hosts."""
    if text and not _LIST.fullmatch(text):
        raise HostlistError(
            text=_shown(text), why="brackets don't match or are not closed, or a host name is missing at a comma"
        )
    hosts: list[str] = []
    try:
        for item in _ITEM.findall(text):
            hosts += _hosts(item, most=MAX_HOSTS - len(hosts))
    except ValueError as error:
        raise HostlistError(text=_shown(text), why=str(error)) from None
    return tuple(hosts)


def _hosts(item: str, *, most: int) -> list[str]:
    """``r[1-2]n`` → ``["r1n", "r2n"]``. Raises ValueError."""
    names = [""]
    for index, part in enumerate(re.split(r"[\[\]]", item)):
        if index % 2 == 0 and not _LITERAL.match(part):
            raise ValueError(f"{_shown(part)!r} can't be part of a host name")
        choices = _numbers(part, most=most) if index % 2 else [part]
        if len(names) * len(choices) > most:
            raise ValueError(f"names more than {MAX_HOSTS} hosts")
        names = [name + choice for name in names for choice in choices]
    for name in names:
        if not _NAME.match(name) or len(name) > _MAX_NAME:
            raise ValueError(f"{_shown(name)!r} can't be a host name")
    return names


def _numbers(ranges: str, *, most: int) -> list[str]:
    """``01-03,7`` → ``["01", "02", "03", "7"]``. Raises ValueError."""
    numbers: list[str] = []
    for part in ranges.split(","):
        first, dash, last = part.partition("-")
        last = last if dash else first
        if not (_is_number(first) and _is_number(last)):
            raise ValueError(f"{_shown(part)!r} is not a number or a range of numbers")
        low, high = int(first), int(last)
        if high < low:
            raise ValueError(f"the range {part} goes down")
        if len(numbers) + high - low + 1 > most:
            raise ValueError(f"names more than {MAX_HOSTS} hosts")
        numbers += [str(number).zfill(len(first)) for number in range(low, high + 1)]
    return numbers


def compress(hosts: Iterable[str]) -> str:
    """The shortest hostlist that Slurm itself would print: neighbours with the same prefix share brackets.

    The order of `hosts` is kept, so ``expand(compress(hosts)) == tuple(hosts)``.

    Raises:
        HostlistError: a name that can't be a host's: it must never reach a command line as part of ``--exclude``.
    """
    groups: list[tuple[str, list[list[str]]]] = []  # prefix, ranges of [first digits, last digits]; [] for no number
    for host in hosts:
        if not _NAME.match(host) or len(host) > _MAX_NAME:
            raise HostlistError(text=_shown(host), why="not a host name")
        match = _TRAILING_NUMBER.match(host)
        if match is None:
            groups.append((host, []))
            continue
        prefix, digits = match.groups()
        if not groups or groups[-1][0] != prefix or not groups[-1][1]:
            groups.append((prefix, [[digits, digits]]))
            continue
        ranges = groups[-1][1]
        first, last = ranges[-1]
        if int(digits) == int(last) + 1 and digits == str(int(digits)).zfill(len(first)):
            ranges[-1][1] = digits
        else:
            ranges.append([digits, digits])
    texts = []
    for prefix, ranges in groups:
        numbers = ",".join(first if first == last else f"{first}-{last}" for first, last in ranges)
        texts.append(prefix + (numbers if numbers.isdigit() or not numbers else f"[{numbers}]"))
    return ",".join(texts)


def names_text(hosts: Iterable[str]) -> str:
    """Hosts for people: as `compress`, or with commas where a name can't be a host's."""
    names = tuple(hosts)
    try:
        return compress(names)
    except HostlistError:
        return ", ".join(names)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS


def local_time(text: str | None) -> float | None:
    """``2026-11-21T02:15:51`` in this host's time zone → seconds since the epoch; None: Slurm names no time."""
    try:
        return time.mktime(time.strptime(text or "", "%Y-%m-%dT%H:%M:%S"))
    except (ValueError, OverflowError):
        return None


def _shown(text: str) -> str:
    return text if len(text) <= 120 else text[:117] + "..."


_COUNTED = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?\Z")
_PARENTHESES = re.compile(r"\([^()]*\)")


def expand_counts(text: str) -> tuple[int, ...]:
    """``4(x2),1`` → ``(4, 4, 1)``: one number per node, in node order. Raises ValueError, without the text."""
    counts: list[int] = []
    for part in text.split(","):
        match = _COUNTED.match(part)
        if match is None:
            raise ValueError("is not of the form 4(x2),1")
        repeat = int(match.group(2) or 1)
        if repeat < 1 or len(counts) + repeat > MAX_HOSTS:
            raise ValueError(f"counts no node, or more than {MAX_HOSTS}")
        counts += [int(match.group(1))] * repeat
    return tuple(counts)


def gpu_count(text: str) -> int:
    """Names are GPU types; but where an entry is named ``gpu``, others (``nic:1``) don't count. Raises ValueError."""
    entries: list[tuple[list[str], int]] = []
    for raw in _PARENTHESES.sub("", text).split(","):
        entry = raw.strip()
        for prefix in ("gres/", "gres:"):
            entry = entry.removeprefix(prefix)
        if not entry:
            raise ValueError("has an empty entry")
        names = re.split(r"[:=]", entry)
        count = 1
        if names[-1].isascii() and names[-1].isdigit():
            count = int(names.pop()[:9])
        if not all(re.match(r"[A-Za-z0-9_.-]+\Z", name) for name in names):
            raise ValueError("is not a count or a GRES string such as gpu:a100:4")
        entries.append((names, count))
    gpus = [count for names, count in entries if names and names[0].lower() == "gpu"]
    return sum(gpus) if gpus else sum(count for _, count in entries)


def device_count(text: str) -> int:
    """CUDA stops at the first entry that it can't use, such as ``-1``; ``NoDevFiles`` was Slurm's name for none."""
    count = 0
    for part in text.split(","):
        entry = part.strip()
        if not entry or entry == "NoDevFiles" or entry.startswith("-"):
            break
        first, dash, last = entry.partition("-")
        if dash and first.isdigit() and last.isdigit():  # SLURM_JOB_GPUS=0-3 in some versions
            count += max(0, int(last[:9]) - int(first[:9]) + 1)
        else:
            count += 1
    return count
