"""Stalls and heartbeats as pure decisions; the counters."""

from __future__ import annotations

import time

import pytest

from hpc_elastic.base.codec import dumps, loads
from hpc_elastic.inprocess.monitor_process import NeighbourWatch, RankPlace
from hpc_elastic.inprocess.progress_watchdog import ProgressPage, ProgressWatchdog, Reading, StallWatch

pytestmark = pytest.mark.torch


def test_a_counter_that_stands_still_is_a_stall() -> None:
    watch = StallWatch(10)
    assert not watch.is_stalled(Reading(automatic=1), 100)
    assert not watch.is_stalled(Reading(automatic=1), 109)
    assert watch.is_stalled(Reading(automatic=1), 110)
    assert not watch.is_stalled(Reading(automatic=2), 111)
    assert not watch.is_stalled(Reading(automatic=2), 120)


def test_pings_count_from_the_first_on() -> None:
    watch = StallWatch(10)
    for now in range(0, 100, 5):
        assert not watch.is_stalled(Reading(automatic=now), now)
    assert not watch.is_stalled(Reading(automatic=100, manual=1, armed=True), 100)
    assert not watch.is_stalled(Reading(automatic=109, manual=1, armed=True), 109)
    assert watch.is_stalled(Reading(automatic=110, manual=1, armed=True), 110)


def test_a_new_iteration_disarms_and_starts_anew() -> None:
    watch = StallWatch(10)
    watch.is_stalled(Reading(manual=1, armed=True), 0)
    assert not watch.is_stalled(Reading(manual=1, epoch=1), 50)
    assert not watch.is_stalled(Reading(manual=1, epoch=1), 59)


def test_while_it_is_paused_nothing_is_a_stall_and_then_all_begins_anew() -> None:
    watch = StallWatch(10)
    watch.is_stalled(Reading(manual=1, armed=True), 0)
    assert not watch.is_stalled(Reading(manual=1, armed=True, paused=True), 500)
    assert not watch.is_stalled(Reading(manual=1, armed=True), 501)
    assert not watch.is_stalled(Reading(manual=1, armed=True), 510)
    assert watch.is_stalled(Reading(manual=1, armed=True), 511)


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
    assert watch.look({0: 5}, 0) == []
    assert watch.look({0: 6}, 4) == []
    assert watch.look({0: 6}, 9) == []
    assert watch.watched == [0, 1, 2]
    assert watch.look({0: 6, 1: 1, 2: 1}, 10) == []
    assert watch.look({0: 6, 1: 1, 2: 2}, 14) == [0]
    assert watch.look({1: 1, 2: 3}, 20) == [1]
    assert watch.look({2: 4}, 21) == []
    assert watch.watched == [2]


def test_one_rank_alone_watches_nobody() -> None:
    watch = NeighbourWatch(rank=0, count=1, timeout=10)
    assert watch.watched == []
    assert watch.look({}, 0) == []


def test_a_place_is_read_back() -> None:
    place = RankPlace(iteration=3, rank=1, count=4, initial_rank=2, call="call0.1.0")
    assert loads(RankPlace, dumps(place)) == place
