"""Python imports this at its start where PYTHONPATH has this folder: the wall clock is wrong, monotonic ones are not.

(libfaketime would do it for any program, but its 0.9.10 breaks ``time.sleep``, a clock_nanosleep to a monotonic time.)
"""

import os
import time

_OFFSET_NS = int(float(os.environ.get("CHAOS_CLOCK_OFFSET", "0")) * 1e9)

if _OFFSET_NS:
    _time_ns = time.time_ns

    def _wrong_time_ns() -> int:
        return _time_ns() + _OFFSET_NS

    def _wrong_time() -> float:
        return _wrong_time_ns() / 1e9

    time.time_ns = _wrong_time_ns
    time.time = _wrong_time
