"""How often a file that may grow is looked at. Pure.

Not by inotify: it tells nothing of what other hosts write. A file that grows is looked at four times a second; one that
does not, less and less often, down to every two seconds. All files together are looked at 200 times a second at most,
so that a person who watches a run of a thousand ranks costs a file server no more than one who watches eight.
"""

from __future__ import annotations

SHORTEST = 0.25
LONGEST = 2.0
LOOKS_PER_SECOND = 200
_SLOWER = 1.5


def next_interval(interval: float, *, has_grown: bool, files: int) -> float:
    """Seconds until a file is to be looked at again.

    Args:
        interval: How long it was this time; 0: it was the first.
        has_grown: Whether there was something new.
        files: How many are watched.
    """
    shortest = max(SHORTEST, files / LOOKS_PER_SECOND)
    if has_grown or not interval:
        return shortest
    return min(max(LONGEST, shortest), max(shortest, interval * _SLOWER))
