"""``--array``: which tasks a job array has."""

from __future__ import annotations

import re

from hpc_elastic.errors import UsageError

MAX_TASKS = 1 << 17
_LIMIT = re.compile(r"%\d{1,9}\Z", re.ASCII)
_PART = re.compile(r"(\d{1,9})(?:-(\d{1,9})(?::(\d{1,9}))?)?\Z", re.ASCII)


def parse_array(text: str, *, option: str = "--array") -> tuple[int, ...]:
    """``0-7%2``, ``1,3,5``, ``0-15:4`` → the tasks' numbers, ascending.

    Raises:
        UsageError: with one line that names the value and what would be right.
    """
    tasks: set[int] = set()
    for part in _LIMIT.sub("", text).split(","):
        match = _PART.match(part)
        if match is None:
            raise UsageError(f"{option} {text}: not a list of tasks; give one as in 0-7, 1,3,5 or 0-15:4%2")
        first = int(match.group(1))
        last = int(match.group(2) or first)
        step = int(match.group(3) or 1)
        if last < first or step < 1:
            raise UsageError(f"{option} {text}: {part} has no task; the lower number comes first")
        if len(tasks) + (last - first) // step >= MAX_TASKS:
            raise UsageError(f"{option} {text}: more than {MAX_TASKS} tasks")
        tasks.update(range(first, last + 1, step))
    return tuple(sorted(tasks))
