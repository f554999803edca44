"""Member lists are written once: what refers to them is read back whole, also by who comes late."""

from __future__ import annotations

import json

import pytest

from hpc_elastic.rendezvous.membership import KEPT_RECORDS, RoundLog
from hpc_elastic.rendezvous.state import MOST_PLAIN, MOST_REPEATED, Member, RoundRecord, Status, decode_record
from hpc_elastic.store.file_store import LONGEST_SYMLINK
from tests.rigs.memory_store import MemoryStore, SpyStore


def members(count: int) -> tuple[Member, ...]:
    return tuple(Member(f"{n:05d}-node{n:04d}-{n:016x}-{n * 7 % 65536:04x}", n, 8) for n in range(count))


def first(count: int) -> RoundRecord:
    return RoundRecord(
        number=1, epoch="e", term=1, leader="a", round=0, status=Status.FROZEN, members=members(count), reason="start"
    )


def raw(store: MemoryStore, number: int) -> dict[str, object]:
    found: dict[str, object] = json.loads(store.get(f"log/{number:016d}") or "")
    return found


@pytest.mark.parametrize("count", [MOST_REPEATED, MOST_REPEATED + 1, MOST_PLAIN, MOST_PLAIN + 1, 3000])
def test_a_list_comes_back_whole_from_the_record_that_refers_to_it(count: int) -> None:
    store = MemoryStore()
    log = RoundLog(store, "r")
    record = first(count)
    assert log.append(record)
    for status in (Status.FINAL, Status.JOINABLE):
        record = record.successor(status=status)
        assert log.append(record)
    refers = isinstance(raw(store, 3)["members"], int)
    assert refers is (count > MOST_REPEATED)
    if refers:
        assert raw(store, 3)["members"] == 1
        assert len(json.dumps(raw(store, 3))) < LONGEST_SYMLINK, "however many nodes there are"
    for reader in (log, RoundLog(store, "r")):
        found = reader.latest()
        assert found is not None
        assert found == record
        assert found.members == members(count)
        assert found.rank(members(count)[-1].uid) == count - 1


def test_the_same_members_are_not_written_again_for_the_next_round() -> None:
    store = MemoryStore()
    log = RoundLog(store, "r")
    opened = first(20).successor(status=Status.JOINABLE, round=1)
    again = opened.successor(status=Status.FROZEN, members=members(20))
    fewer = again.successor(status=Status.JOINABLE).successor(status=Status.FROZEN, members=members(19))
    assert (opened.members_at, again.members_at, fewer.members_at) == (1, 1, 0)
    assert log.append(first(20))
    assert log.append(opened)


def test_thousands_of_nodes_take_a_hundred_kilobytes() -> None:
    assert len(json.dumps(first(8192).to_json())) < 150_000


def test_compacting_keeps_the_record_with_the_list() -> None:
    store = MemoryStore()
    log = RoundLog(store, "r")
    record = first(30)
    log.append(record)
    while record.number < 3 * KEPT_RECORDS:
        record = record.successor(waiting=record.number)
        log.append(record)
    log.compact()
    assert store.get(f"log/{1:016d}") is not None
    assert store.get(f"log/{2:016d}") is None
    found = RoundLog(store, "r").latest()
    assert found is not None
    assert found.members == members(30)


def test_a_list_that_can_not_be_read_yet_is_a_passing_fault() -> None:
    store = MemoryStore()
    log = RoundLog(store, "r")
    log.append(first(30))
    log.append(first(30).successor(waiting=1))
    late = RoundLog(store, "r")
    kept = store.get(f"log/{1:016d}") or ""
    store.delete(f"log/{1:016d}")
    with pytest.raises(OSError, match="record 1 "):
        late.latest()
    store.put_if_absent(f"log/{1:016d}", kept)
    found = late.latest()
    assert found is not None
    assert found.number == 2


def test_what_was_told_is_read_without_a_listing() -> None:
    store = SpyStore()
    log, reader = RoundLog(store, "r"), RoundLog(store, "r")
    log.append(first(3))
    store.listings.clear()
    found = reader.latest(hint=1)
    assert found == first(3)
    assert not store.listings
    assert reader.latest(hint=7) is found, "what is not there is looked for as ever"
    assert len(store.listings) == 1


def test_a_log_that_shows_less_than_before_is_noticed() -> None:
    store = MemoryStore()
    log = RoundLog(store, "r")
    log.append(first(3))
    log.append(first(3).successor(waiting=1))
    log.latest()
    assert not log.went_back
    store.delete(f"log/{2:016d}")
    assert log.latest() is not None
    assert log.went_back


def test_a_reference_to_another_list_is_refused() -> None:
    value = first(30).successor(waiting=1).to_json()
    with pytest.raises(Exception, match="members are those of record 1"):
        decode_record(2, value, run_id="r")
