"""The log of numbered records: creating the next number is the compare-and-set and the fence."""

from __future__ import annotations

import json

import pytest

from hpc_elastic.rendezvous.membership import KEPT_RECORDS, LogRecord, RecordLog
from tests.rigs.memory_store import MemoryStore, SpyStore


def key(number: int) -> str:
    return f"log/{number:016d}"


def newest(log: RecordLog) -> LogRecord:
    found = log.latest()
    assert found is not None
    return found


def test_what_one_appends_the_others_read_and_names_sort_as_numbers_do() -> None:
    store = MemoryStore()
    writer, reader = RecordLog(store), RecordLog(store)
    assert reader.latest() is None
    for number in range(1, 13):
        assert writer.append(number, {"round": number - 1})
    assert (newest(reader).number, newest(reader).value["round"]) == (12, 11)


def test_only_one_record_gets_a_number_even_where_both_say_the_same() -> None:
    store = MemoryStore()
    first, second = RecordLog(store), RecordLog(store)
    assert first.append(1, {"same": True}) is True
    assert second.append(1, {"same": True}) is False, "the nonce tells two writers apart"
    assert second.latest() == first.latest()


def test_a_deposed_writer_loses_and_reads_what_the_others_did() -> None:
    store = MemoryStore()
    deposed, other = RecordLog(store), RecordLog(store)
    deposed.append(1, {"by": "deposed"})
    other.latest()
    other.append(2, {"by": "other"})
    assert deposed.append(2, {"by": "deposed"}) is False
    assert newest(deposed).value["by"] == "other"


def test_a_gap_does_not_hide_the_newest() -> None:
    """Old records are removed; and a listing may lack one for a while."""
    store = MemoryStore()
    for number in (3, 7):
        RecordLog(store).append(number, {"number": number})
    assert newest(RecordLog(store)).number == 7


def test_the_newest_that_can_be_read_holds_for_this_look() -> None:
    store = SpyStore()
    writer, reader = RecordLog(store), RecordLog(store)
    for number in (1, 2, 3):
        writer.append(number, {"number": number})
    store.hidden = {key(2), key(3)}
    assert newest(reader).number == 1
    store.hidden = {key(3)}
    assert newest(reader).number == 2
    store.hidden = set()
    assert newest(reader).number == 3


def test_the_latest_never_goes_back() -> None:
    store = MemoryStore()
    log = RecordLog(store)
    log.append(1, {})
    log.append(2, {})
    store.delete(key(2))  # a listing that lacks it
    assert newest(log).number == 2


def test_a_look_costs_one_listing_and_one_read_of_something_new() -> None:
    store = SpyStore()
    writer, reader = RecordLog(store), RecordLog(store)
    for number in range(1, 11):
        writer.append(number, {})
    store.reads.clear()
    store.listings.clear()
    reader.latest()
    assert (len(store.listings), len(store.reads)) == (1, 1)
    reader.latest()
    assert (len(store.listings), len(store.reads)) == (2, 1)


def test_foreign_names_are_left_out() -> None:
    store = MemoryStore()
    RecordLog(store).append(1, {})
    for name in ("README", "0000000000000002.tmp", "-3", "1e9"):
        store.put_if_absent(f"log/{name}", "{}")
    assert newest(RecordLog(store)).number == 1


@pytest.mark.parametrize("raw", ["no json", "[1]", "7", '"x"', "null", "{"])
def test_a_record_that_is_no_object_reads_as_an_empty_one(raw: str) -> None:
    store = MemoryStore()
    store.put_if_absent(key(1), raw)
    assert newest(RecordLog(store)).value == {}


def test_compacting_keeps_the_newest() -> None:
    store = MemoryStore()
    log = RecordLog(store)
    for number in range(1, 51):
        log.append(number, {})
        if number == 1:
            log.compact()
            assert len(store.list("log")) == 1, "a short log stays whole"
    log.compact()
    assert sorted(int(name) for name in store.list("log")) == list(range(51 - KEPT_RECORDS, 51))
    RecordLog(store).compact()
    assert len(store.list("log")) == KEPT_RECORDS


def test_a_writer_that_was_stopped_for_long_is_fenced_though_its_number_was_compacted_away() -> None:
    store = MemoryStore()
    stopped, other = RecordLog(store), RecordLog(store)
    stopped.append(1, {"by": "stopped"})
    for number in range(2, 60):
        other.append(number, {"by": "other"})
    other.compact()
    assert store.get(key(2)) is None
    assert stopped.append(2, {"by": "stopped"}) is False
    assert newest(stopped).number == 59
    assert json.loads(store.get(key(59)) or "")["by"] == "other"


def test_a_record_that_others_built_on_at_once_was_appended() -> None:
    """Before its writer had looked whether its number was too old."""

    class Eager(MemoryStore):
        def list(self, folder: str) -> list[str]:
            if self.get(key(2)) is not None:
                self.put_if_absent(key(3), '{"by": "other"}')
            return super().list(folder)

    store = Eager()
    log = RecordLog(store)
    assert log.append(1, {"by": "one"})
    assert log.append(2, {"by": "one"}) is True
    latest = newest(log)
    assert (latest.number, latest.value["by"]) == (3, "other")
