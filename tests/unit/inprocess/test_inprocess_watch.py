"""Stalls and heartbeats as pure decisions; the counters; the monitor process, with stand-ins for its pipe and rank."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from hpc_elastic.base.codec import dumps, loads
from hpc_elastic.inprocess import monitor_process
from hpc_elastic.inprocess.monitor_process import NeighbourWatch, RankPlace, StallWatch
from hpc_elastic.inprocess.progress_watchdog import ProgressPage, ProgressWatchdog, Reading
from hpc_elastic.inprocess.state import Interruption

pytestmark = pytest.mark.torch


PINGED = {"manual": 1, "armed": True}


@pytest.mark.parametrize(
    "looks",
    [
        # A counter that stands still.
        [
            *((now, now == 110, {"automatic": 1}) for now in (100, 109, 110)),
            *((now, False, {"automatic": 2}) for now in (111, 120)),
        ],
        # Pings count from the first on.
        [
            *((now, False, {"automatic": now}) for now in range(0, 100, 5)),
            *((now, now == 110, {"automatic": now, **PINGED}) for now in (100, 109, 110)),
        ],
        # A new iteration disarms and starts anew.
        [(0, False, PINGED), *((now, False, {"manual": 1, "epoch": 1}) for now in (50, 59))],
        # While it is paused nothing is a stall; then all begins anew.
        [
            *((0, False, PINGED), (500, False, {**PINGED, "paused": True})),
            *((now, now == 511, PINGED) for now in (501, 510, 511)),
        ],
    ],
)
def test_when_a_rank_stalls(looks: list[tuple[float, bool, dict[str, Any]]]) -> None:
    watch = StallWatch(10)
    assert [watch.is_stalled(Reading(**facts), now) for now, _, facts in looks] == [stalled for _, stalled, _ in looks]


def test_pauses_nest_and_end_for_a_main_thread_that_is_to_leave() -> None:
    page = ProgressPage()
    watchdog = ProgressWatchdog(page, interval=1.0)
    seen = [page.read().paused]
    for change in (watchdog.pause, watchdog.pause, watchdog.resume, watchdog.hold, watchdog.reset, watchdog.resume):
        change()
        seen.append(page.read().paused)
    assert seen == [False, True, True, True, False, True, False]
    page.close()


def test_what_is_written_is_read_back() -> None:
    page = ProgressPage()
    reading = Reading(automatic=3, manual=4, armed=True, epoch=5, paused=True)
    page.write(reading)
    assert page.read() == reading
    page.close()
    place = RankPlace(iteration=3, rank=1, count=4, initial_rank=2, call="call0.1.0")
    assert loads(RankPlace, dumps(place)) == place


def test_the_watchdog_sees_bytecode_and_pings() -> None:
    page = ProgressPage()
    seen: list[Reading] = []
    watchdog = ProgressWatchdog(page, interval=0.001)
    watchdog.show(seen.append)
    watchdog.start()
    deadline = time.monotonic() + 30
    while (not seen or seen[-1].automatic < 3) and time.monotonic() < deadline:
        pass
    assert page.read().automatic >= 3
    watchdog.hold()
    time.sleep(0)
    watchdog.ping()
    assert page.read().armed
    held = page.read().automatic
    mark = len(seen)
    while len(seen) < mark + 5 and time.monotonic() < deadline:
        pass
    assert page.read().automatic <= held + 1  # at most the look that was under way
    watchdog.reset()
    assert not page.read().armed
    watchdog.shutdown()
    page.close()


def test_the_next_rank_is_watched_and_all_others_when_it_is_silent() -> None:
    watch = NeighbourWatch(rank=3, count=4, timeout=10)
    assert watch.watched == [0]
    assert [watch.look({0: beats}, now) for beats, now in ((5, 0), (6, 4), (6, 9))] == [[], [], []]
    assert watch.watched == [0, 1, 2]
    assert watch.look({0: 6, 1: 1, 2: 1}, 10) == []
    assert watch.look({0: 6, 1: 1, 2: 2}, 14) == [0]
    assert watch.look({1: 1, 2: 3}, 20) == [1]
    assert watch.look({2: 4}, 21) == []
    assert watch.watched == [2]
    alone = NeighbourWatch(rank=0, count=1, timeout=10)
    assert (alone.watched, alone.look({}, 0)) == ([], [])


READER, PIDFD = 101, 102


def test_a_pipe_that_is_closed_while_the_rank_lives_is_looked_at_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program in the rank's process, say."""
    looks: list[list[int]] = []

    def wait(fds: list[int], seconds: float) -> set[int]:
        """It lives on, and is dead at the third look after that."""
        looks.append(fds)
        assert len(looks) < 20, "it looks again and again at a pipe that is closed"
        return {READER} if READER in fds else {PIDFD} if len(looks) > 3 else set()

    monkeypatch.setattr(monitor_process, "wait_readable", wait)
    monkeypatch.setattr(monitor_process, "os", SimpleNamespace(read=lambda fd, size: b"", getpid=os.getpid))
    times = "monitor_process_interval hard_timeout heartbeat_timeout barrier_timeout termination_grace_time"
    settings = SimpleNamespace(**dict.fromkeys(times.split(), timedelta(seconds=60)))
    rank: Any = SimpleNamespace(page=None, unplaced=SimpleNamespace(call="call0"), settings=settings)
    monitor = monitor_process._Monitor(rank, 1, READER, PIDFD, False)
    assert monitor._watch() is Interruption.TERMINATED
    assert looks[-1] == [PIDFD, -1]
