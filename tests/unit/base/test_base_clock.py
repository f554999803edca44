"""The clock of an agent or a supervisor, whose host's wall clock is set while it runs."""

from __future__ import annotations

import pytest

from hpc_elastic.base import clock as clock_module
from hpc_elastic.base.clock import RunClock, SystemClock

HOUR_NS = 3600 * 10**9


@pytest.mark.parametrize("jump", [HOUR_NS, -HOUR_NS])
def test_a_wall_clock_that_is_set_does_not_reach_a_record(jump: int, monkeypatch: pytest.MonkeyPatch) -> None:
    boot, wall = 50 * 10**9, 1_700_000_000 * 10**9
    monkeypatch.setattr(clock_module.time, "time_ns", lambda: wall)
    monkeypatch.setattr(clock_module.time, "clock_gettime_ns", lambda _: boot)
    system, run = SystemClock(), RunClock()
    assert run.time_ns() == system.time_ns() == 1_700_000_000 * 10**9
    boot += 7 * 10**9
    wall += 7 * 10**9 + jump
    assert run.time_ns() == 1_700_000_007 * 10**9
    assert system.time_ns() == run.time_ns() + jump
