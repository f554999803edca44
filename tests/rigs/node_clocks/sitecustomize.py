"""Python imports this at its start where PYTHONPATH has this folder: every process of a local run's node has clocks of
that node's own, its agent and workers alike. `tests.rigs.wrong_clocks` sets it up.

The wall clock and the time since the boot are shifted, each by a time of its own: as on two machines. Where
TEST_CLOCK_JUMPS names a folder, the wall clock is ahead by as many seconds more as the node's file there says now.
TEST_CLOCK_OFFSET shifts the wall clock of each process that has it, whatever its node.

(libfaketime would do it for any program, but its 0.9.10 breaks ``time.sleep``, a clock_nanosleep to a monotonic time.)
"""

import json
import os
import time

_NODE = os.environ.get("HPC_ELASTIC_NODE_TAG", "").rpartition(":")[2]
_WALL, _UPTIME = json.loads(os.environ.get("TEST_NODE_CLOCKS", "{}")).get(_NODE, (0, 0))
_WALL += float(os.environ.get("TEST_CLOCK_OFFSET", "0"))

_JUMPS = os.environ.get("TEST_CLOCK_JUMPS", "")


def _jumped_ns():
    try:
        with open(f"{_JUMPS}/{_NODE}") as file:
            return int(float(file.read()) * 1e9)
    except (OSError, ValueError):
        return 0


if _WALL or _UPTIME or (_JUMPS and _NODE):
    _WALL_NS, _UPTIME_NS = int(_WALL * 1e9), int(_UPTIME * 1e9)
    _time_ns, _clock_gettime_ns = time.time_ns, time.clock_gettime_ns

    def _wrong_time_ns():
        return _time_ns() + _WALL_NS + (_jumped_ns() if _JUMPS else 0)

    def _wrong_clock_gettime_ns(clock):
        return _clock_gettime_ns(clock) + (_UPTIME_NS if clock == time.CLOCK_BOOTTIME else 0)

    time.time_ns = _wrong_time_ns
    time.time = lambda: _wrong_time_ns() / 1e9
    time.clock_gettime_ns = _wrong_clock_gettime_ns
    time.clock_gettime = lambda clock: _wrong_clock_gettime_ns(clock) / 1e9
