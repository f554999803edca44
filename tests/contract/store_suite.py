"""What every `Store` must hold, whatever is below it: one suite, mixed into a test class for each kind of subject.

A test module has a fixture `subject` and classes that inherit: `StoreSuite` for any store, `ProcessSuite` too for one
that several processes can open.

The issue's six operations, and where each is tested: versioned read and wait-for-change (`RecordLog.latest`, `version`,
`KeyValueStore.get_waiting`), put-if-absent, compare-and-set (`RecordLog.append`), the coordinator's list, leases
(`Heartbeat` and `HeartbeatAges`).
"""

from __future__ import annotations

import itertools
import multiprocessing
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from hpc_elastic.base.clock import SystemClock
from hpc_elastic.rendezvous.failure_detector import Heartbeat, HeartbeatAges
from hpc_elastic.rendezvous.membership import RecordLog
from hpc_elastic.store.file_store import Store
from hpc_elastic.store.key_value import KeyValueStore

SLACK = 15.0
"""Seconds that a busy machine may add to a bound that is not 0."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """One store under test."""

    open: Callable[[], Store]
    """Opens the same, new store for one participant after another, each on another client where there are several."""
    listing_delay: float = 0.0
    """Seconds after which a listing on another client shows what was created; 0: at once."""
    delay: float = 0.0
    """Seconds after which a look by name on another client shows what it had not found, or a cell's new value."""
    tick: Callable[[], None] = lambda: None
    """Waits until the server's clock tells another time: what changes within one tick may go unnoticed."""

    def lists(self, store: Store, folder: str, names: list[str]) -> None:
        """Check a listing, within its bound."""
        self._within(self.listing_delay, lambda: sorted(store.list(folder)), sorted(names))

    def shows(self, look: Callable[[], Any], expected: Any) -> None:
        """Check what is read by name, within its bound."""
        self._within(self.delay, look, expected)

    @staticmethod
    def _within(seconds: float, look: Callable[[], Any], expected: Any) -> None:
        deadline = time.monotonic() + (seconds + SLACK if seconds else 0)
        while (found := look()) != expected and time.monotonic() < deadline:
            time.sleep(0.02)
        assert found == expected, f"not within {seconds:g} s"


VALUES = [
    "x",
    "two words",
    "ends with a space ",
    "grüße 東京 🎉",
    "a/b/../c",
    "nothing\0at all",
    "line\nbreak\ttab",
    '{"json": [1, 2, "\\u0000"]}',
    "not UTF-8: \udcff",
    "s" * 880,
    "m" * 1000,
    "ü" * 450,
    "l" * 200_000,
]


class StoreSuite:
    """For any store."""

    # -- values that are written once

    def test_a_key_has_no_value_before_it_is_put(self, subject: Subject) -> None:
        store = subject.open()
        assert store.get("log/1") is None
        assert store.list("log") == []
        assert store.list("round/000001") == []

    def test_the_first_value_holds_for_ever(self, subject: Subject) -> None:
        first, second = subject.open(), subject.open()
        assert first.put_if_absent("log/1", "mine") is True
        assert second.put_if_absent("log/1", "yours") is False
        assert first.get("log/1") == second.get("log/1") == "mine"
        assert first.put_if_absent("log/1", "mine") is True, "the same caller's second try"
        assert first.put_if_absent("log/1", "other") is False

    def test_values_come_back_as_they_were(self, subject: Subject) -> None:
        writer, reader = subject.open(), subject.open()
        for number, value in enumerate(VALUES):
            assert writer.put_if_absent(f"kv/{number}", value)
            assert reader.get(f"kv/{number}") == value, f"{len(value)}: {value[:20]!r}"
            assert not reader.put_if_absent(f"kv/{number}", value + "!")

    def test_what_somebody_puts_shows_also_where_a_look_had_found_nothing(self, subject: Subject) -> None:
        """NFS clients remember what was not there, folders too, up to a minute."""
        writer, reader = subject.open(), subject.open()
        for number in range(2):
            folder = f"round/{number}"
            assert reader.list(folder) == []
            assert reader.get(f"{folder}/a") is None
            subject.tick()
            writer.put_if_absent(f"{folder}/a", "v")
            subject.lists(reader, folder, ["a"])
            subject.shows(lambda folder=folder: reader.get(f"{folder}/a"), "v")  # type: ignore[misc]
        for number in range(2):
            assert reader.get(f"kv/{number}") is None
            assert reader.version(f"hb/{number}") is None
            subject.tick()
            writer.put_if_absent(f"kv/{number}", "v")
            writer.overwrite(f"hb/{number}", "v")
            subject.shows(lambda number=number: reader.get(f"kv/{number}"), "v")  # type: ignore[misc]
            subject.shows(lambda number=number: reader.version(f"hb/{number}") is None, False)  # type: ignore[misc]

    def test_a_listing_after_an_invalidation_misses_nothing(self, subject: Subject) -> None:
        """Although a server's times may tick so slowly that a folder looks unchanged, and caches hold for long."""
        writer, reader = subject.open(), subject.open()
        for number in range(10):
            reader.list("log")
            writer.put_if_absent(f"log/{number}", "v")
            reader.invalidate("log")
            assert len(reader.list("log")) == number + 1
        assert sorted(reader.list("log")) == [str(number) for number in range(10)], "and leaves nothing"

    def test_a_listing_holds_the_names_of_one_folder(self, subject: Subject) -> None:
        store = subject.open()
        for key in ("round/000001/join+a", "round/000001/join+b", "round/000002/ack+a", "node/a"):
            store.put_if_absent(key, "v")
        store.overwrite("hb/a", "1")
        assert sorted(store.list("round/000001")) == ["join+a", "join+b"]
        assert sorted(store.list("round/000002")) == ["ack+a"]
        assert sorted(store.list("round")) == ["000001", "000002"]
        assert store.list("hb") == ["a"]

    def test_deleted_keys_are_gone_and_may_be_deleted_again(self, subject: Subject) -> None:
        store = subject.open()
        store.put_if_absent("log/1", "v")
        store.put_if_absent("log/2", "v")
        store.delete("log/1")
        store.delete("log/1")
        store.delete("nosuch/1")
        assert store.get("log/1") is None
        assert store.list("log") == ["2"]

    # -- cells

    def test_cells_hold_what_was_written_last(self, subject: Subject) -> None:
        owner, reader = subject.open(), subject.open()
        for value in ("0 abcd", "1 abcd", "10 abcd", "a longer text than before", "short"):
            subject.tick()
            owner.overwrite("hb/a", value)
            assert owner.get("hb/a") == value
            subject.shows(lambda: reader.get("hb/a"), value)

    def test_a_cell_changes_with_each_write_and_with_nothing_else(self, subject: Subject) -> None:
        owner, reader = subject.open(), subject.open()
        assert reader.version("hb/a") is None
        seen: set[str | None] = {None}
        for count in range(3):
            subject.tick()
            owner.overwrite("hb/a", f"{count} abcd")
            subject.shows(lambda: reader.version("hb/a") in seen, False)
            subject.shows(lambda count=count: reader.get("hb/a"), f"{count} abcd")  # type: ignore[misc]
            now = reader.version("hb/a")
            assert now == reader.version("hb/a")
            seen.add(now)
        assert len(seen) >= 4
        before = reader.version("hb/a")
        owner.overwrite("hb/b", "0 abcd")
        owner.put_if_absent("hb/c", "x")
        assert reader.version("hb/a") == before

    # -- races

    def test_exactly_one_of_eight_threads_wins(self, subject: Subject) -> None:
        rounds, threads = 50, 8
        stores = [subject.open() for _ in range(threads)]
        barrier = threading.Barrier(threads)

        def race(me: int) -> tuple[list[bool], list[str | None]]:
            return run_race(stores[me], me, rounds, barrier)

        with ThreadPoolExecutor(threads) as pool:
            results = list(pool.map(race, range(threads)))
        check_one_winner(results, rounds)
        stores[0].invalidate("log")
        assert len(stores[0].list("log")) == rounds

    # -- what is made of it: compare-and-set, wait-for-change, leases

    def test_a_record_follows_only_the_one_that_its_writer_knew(self, subject: Subject) -> None:
        one, other = RecordLog(subject.open()), RecordLog(subject.open())
        assert one.latest() is None
        assert other.latest() is None
        assert one.append(1, {"by": "one"}) is True
        assert other.append(1, {"by": "other"}) is False, "it had not seen record 1"
        seen = other.latest()
        assert seen is not None
        assert (seen.number, seen.value["by"]) == (1, "one"), "who lost can read who won, at once"
        assert other.append(2, {"by": "other"}) is True
        assert one.append(2, {"by": "one"}) is False, "deposed: it believes record 1 to be the newest"
        seen = one.latest()
        assert seen is not None
        assert (seen.number, seen.value["by"]) == (2, "other")

    def test_concurrent_compare_and_set_loses_no_change(self, subject: Subject) -> None:
        """Each adds 1 to what it read, again where somebody else was first."""
        writers, each = 4, 5
        logs = [RecordLog(subject.open()) for _ in range(writers)]

        def work(log: RecordLog) -> None:
            done = 0
            while done < each:
                newest = log.latest()
                number, count = (newest.number, newest.value["count"]) if newest else (0, 0)
                done += log.append(number + 1, {"count": count + 1})

        with ThreadPoolExecutor(writers) as pool:
            list(pool.map(work, logs))
        reader = subject.open()
        reader.invalidate("log")
        newest = RecordLog(reader).latest()
        assert newest is not None
        assert newest.number == newest.value["count"] == writers * each

    def test_a_waiter_sees_each_change(self, subject: Subject) -> None:
        """Also one that began to look before there was anything."""
        writer = KeyValueStore(subject.open(), "kv", clock=SystemClock())
        reader = KeyValueStore(subject.open(), "kv", clock=SystemClock())
        patience = 10 * (subject.delay + subject.listing_delay) + 10
        with ThreadPoolExecutor(1) as pool:
            for number in range(3):
                waiting = pool.submit(reader.get_waiting, f"step {number}", patience)
                writer.set(f"step {number}", b"%d" % number)
                assert waiting.result(patience + 30) == b"%d" % number

    def test_counters_lose_nothing(self, subject: Subject) -> None:
        writers, each = 4, 5
        stores = [KeyValueStore(subject.open(), "kv", clock=SystemClock()) for _ in range(writers)]

        def work(kv: KeyValueStore) -> list[int]:
            return [kv.add("count", 1) for _ in range(each)]

        with ThreadPoolExecutor(writers) as pool:
            sums = [number for found in pool.map(work, stores) for number in found]
        assert sorted(sums) == list(range(1, writers * each + 1))
        assert stores[1].compare_set("count", b"%d" % (writers * each), b"done") == b"done"

    def test_a_lease_lasts_as_long_as_it_is_renewed(self, subject: Subject) -> None:
        """The observer's own clock here is a number, so that only what it sees can decide."""
        owner, observer = subject.open(), subject.open()
        heartbeat, ages = Heartbeat(owner, "node"), HeartbeatAges(observer)
        ages.look("node", 0.0)
        ages.look("node", 5.0)
        assert ages.age("node") == 5.0, "nobody has seen it yet"
        for now in (10.0, 20.0, 30.0):
            subject.tick()
            heartbeat.beat(now)

            def looked(now: float = now) -> bool:
                ages.look("node", now)
                return ages.changed_since("node", now - 1)

            subject.shows(looked, True)

        later = itertools.count(31)

        def aged() -> bool:
            # Again: a client may show the new time some moments before the new counter.
            now = 100.0 * next(later)
            for seconds in (0.0, 4.0, 10.0):
                ages.look("node", now + seconds)
            return ages.age("node") >= 10.0

        subject.shows(aged, True)


class ProcessSuite:
    """For a store that every process can open for itself."""

    def test_exactly_one_of_eight_processes_wins(self, subject: Subject) -> None:
        rounds, processes = 50, 8
        context = multiprocessing.get_context("fork")  # what a test has replaced goes with it
        barrier, results = context.Barrier(processes), context.Queue()
        stores = [subject.open() for _ in range(processes)]
        racers = [
            context.Process(target=_race_in_a_process, args=(stores[me], me, rounds, barrier, results), daemon=True)
            for me in range(processes)
        ]
        for racer in racers:
            racer.start()
        try:
            found = dict(results.get(timeout=60) for _ in racers)
        finally:
            for racer in racers:
                racer.join(1)
                racer.kill()
        check_one_winner([found[me] for me in range(processes)], rounds)


def _race_in_a_process(store: Store, me: int, rounds: int, barrier: Any, results: Any) -> None:
    results.put((me, run_race(store, me, rounds, barrier)))


def run_race(store: Store, me: int, rounds: int, barrier: Any) -> tuple[list[bool], list[str | None]]:
    """Try to be the first for each of some keys. Returns which were won, and what each then held."""
    won, read = [], []
    for number in range(rounds):
        barrier.wait(30)
        won.append(store.put_if_absent(f"log/{number:04d}", f"of {me}"))
        read.append(store.get(f"log/{number:04d}"))
    return won, read


def check_one_winner(results: list[tuple[list[bool], list[str | None]]], rounds: int) -> None:
    for number in range(rounds):
        winners = [me for me, (won, _) in enumerate(results) if won[number]]
        assert len(winners) == 1, f"round {number}: {winners}"
        assert {read[number] for _, read in results} == {f"of {winners[0]}"}, f"round {number}"


def wait_for_second() -> None:
    """Until the next whole second of this machine's clock has begun: a server's that ticks in seconds has too."""
    time.sleep(1.01 - time.time() % 1)
