"""Stalls and heartbeats as pure decisions; the counters."""

from __future__ import annotations

import time
from typing import Any

import pytest

from hpc_elastic.base.codec import dumps, loads
from hpc_elastic.inprocess.monitor_process import NeighbourWatch, RankPlace, StallWatch
from hpc_elastic.inprocess.progress_watchdog import ProgressPage, ProgressWatchdog, Reading

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


def test_the_page_holds_what_was_written() -> None:
    page = ProgressPage()
    reading = Reading(automatic=3, manual=4, armed=True, epoch=5, paused=True)
    page.write(reading)
    assert page.read() == reading
    page.close()


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


def test_a_place_is_read_back() -> None:
    place = RankPlace(iteration=3, rank=1, count=4, initial_rank=2, call="call0.1.0")
    assert loads(RankPlace, dumps(place)) == place
