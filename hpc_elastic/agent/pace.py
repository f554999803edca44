"""The pace of a run against its own best hour: a run whose ranks are all slow has no slow rank. Pure.

The pace is a median of minutes, so that a save or an evaluation, which makes one of them long, is no loss of pace.
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from hpc_elastic.agent.lateness import median

WINDOW_SECONDS, WINDOW_STEPS = 60.0, 8
"""A window is at least so long, and has so many steps."""
RECENT = 5
"""The pace now is that of so many windows."""
HOUR_SECONDS = 3600.0
LEAST_SECONDS = 1800.0
"""An hour of which less is known is not compared with."""
SLOWER, AS_FAST = 1.1, 1.05
"""How many times the seconds of a step in the best hour make the run slow, and slow no more."""
SPREADS = 3.0
"""How many times the windows' own deviation in that hour: steps of some scripts are uneven."""


class Pace(Struct, frozen=True, kw_only=True):
    steps: int = -1
    at: float = 0.0
    """When step `steps` was done: the window begins there."""
    windows: tuple[tuple[float, float], ...] = ()
    """Those of the last hour: when each ended, and its seconds a step."""
    now: float = 0.0
    """Seconds a step now; 0: not known yet."""
    best: float = 0.0
    """The same in the best hour; 0: there is none yet."""
    spread: float = 0.0
    is_slow: bool = False


def next_pace(before: Pace, *, steps: int, at: float) -> Pace:
    """Take one more look in: the round's workers had done `steps` steps, the last one at `at`, monotonic."""
    done, seconds = steps - before.steps, at - before.at
    if before.steps < 0 or done < 0:
        return replace(before, steps=steps, at=at)
    if done < WINDOW_STEPS or seconds < WINDOW_SECONDS:
        return before
    windows = (*(one for one in before.windows if one[0] > at - HOUR_SECONDS), (at, seconds / done))
    after = replace(before, steps=steps, at=at, windows=windows)
    if len(windows) < RECENT:
        return after
    now = median(one for _, one in windows[-RECENT:])
    best, spread = before.best, before.spread
    if at - windows[0][0] >= LEAST_SECONDS:
        hour = median(one for _, one in windows)
        if not best or hour < best:
            best, spread = hour, median(abs(one - hour) for _, one in windows)
    limit = AS_FAST * best if before.is_slow else max(SLOWER * best, best + SPREADS * spread)
    return replace(after, now=now, best=best, spread=spread, is_slow=0 < limit < now)
