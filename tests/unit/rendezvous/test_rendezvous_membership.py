"""Who takes part, told in names; and the log of records."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from hpc_elastic.rendezvous.membership import (
    DIRECT_NOTIFICATIONS,
    KEPT_RECORDS,
    LogRecord,
    NodeInfo,
    Peers,
    RecordLog,
    RoundLog,
    addresses_of,
    announcement,
    notifier_of,
)
from hpc_elastic.rendezvous.state import MOST_PLAIN, MOST_REPEATED, Member, RoundRecord, Status, decode_record
from hpc_elastic.store.file_store import LONGEST_SYMLINK
from hpc_elastic.store.notifier import MOST_FORWARDED, Address
from tests.rigs.memory_store import MemoryStore, SpyStore, fits_key


def info(node: int, *, port: int = 7000, addresses: tuple[str, ...] | None = None, host: str = "") -> NodeInfo:
    return NodeInfo(
        uid=f"{node:05d}-{host or f'n{node}'}-{node:016x}-0000",
        node=node,
        host=host or f"n{node}",
        local_world_size=8,
        addresses=(f"10.0.{node // 250}.{node % 250 + 1}",) if addresses is None else addresses,
        port=port,
    )


class RecordingNotifier:
    def __init__(self) -> None:
        self.notifications: list[tuple[list[Address], str, list[Address]]] = []

    def notify(self, addresses: list[Address], about: str = "", forward: Sequence[Address] = ()) -> None:
        self.notifications.append((addresses, about, list(forward)))


def test_one_listing_tells_all_about_all() -> None:
    class NoReads(MemoryStore):
        def get(self, key: str) -> str | None:
            raise AssertionError(f"{key} is read")

    store = NoReads()
    others = [info(n, host=f"rack-{n}.example") for n in range(1, 6)]
    for other in others:
        Peers(store, other, None).announce()
    peers = Peers(store, info(0), None)
    peers.learn([other.uid for other in others])
    assert [peers.get(other.uid) for other in others] == others
    assert sorted(peers.all_uids()) == sorted(other.uid for other in others)
    assert peers.names()[3] == "rack-3.example"


def test_every_address_of_the_members_is_found_or_nothing_is_said() -> None:
    store = MemoryStore()
    many = info(2, addresses=tuple(f"10.1.0.{n}" for n in range(12)))  # more than its name has room for
    for node in (info(1), many, info(3, addresses=())):
        Peers(store, node, None).announce()
    own = info(0, addresses=tuple(f"10.2.0.{n}" for n in range(9)))
    peers = Peers(store, own, None)
    uids = [own.uid, info(1).uid, many.uid]
    assert peers.all_addresses(uids) == {*own.addresses, "10.0.0.2", *many.addresses}
    assert peers.all_addresses([*uids, info(3).uid]) is None, "one has said none"
    assert peers.all_addresses([*uids, info(4).uid]) is None, "one is not known"
    crowd = [info(n, addresses=tuple(f"10.{n // 200}.{n % 200}.{k}" for k in range(9))) for n in range(10, 300)]
    for node in crowd:
        Peers(store, node, None).announce()
    assert peers.all_addresses([node.uid for node in crowd]) is None, "so many files are not read"


@pytest.mark.parametrize("addresses", [0, 1, 8, 30])
def test_a_name_fits(addresses: int) -> None:
    node = info(99999, host="h" * 64, port=65535, addresses=tuple(f"10.0.0.{n}" for n in range(addresses)))
    assert fits_key(announcement(node))


@pytest.mark.parametrize("said", ["", "8", "8.7000", "8.x.0", "8.7000.0.zz", "8.7000.0.0a0000", "x.7000.0"])
def test_nonsense_is_as_if_nobody_had_come(said: str) -> None:
    store = MemoryStore()
    uid = info(1).uid
    store.put_if_absent(f"node/{uid}+{said}", "x")
    peers = Peers(store, info(0), None)
    peers.learn([uid])
    assert peers.get(uid) is None


def test_where_a_notifier_is_comes_back_from_a_record() -> None:
    assert addresses_of(notifier_of(info(1))) == [("10.0.0.2", 7000)]
    assert addresses_of(notifier_of(info(1, port=0))) == []
    assert addresses_of(["x", "10.0.0.2"]) == []


@pytest.mark.parametrize("count", [1, DIRECT_NOTIFICATIONS, DIRECT_NOTIFICATIONS + 1, 1000])
def test_everybody_is_notified_once(count: int) -> None:
    store, notifier = MemoryStore(), RecordingNotifier()
    for n in range(1, count + 1):
        Peers(store, info(n), None).announce()
    peers = Peers(store, info(0), notifier)
    peers.learn([info(1).uid])
    peers.notify_all("log/7")
    direct = [address for addresses, _, _ in notifier.notifications for address in addresses]
    forwarded = [address for _, _, forward in notifier.notifications for address in forward]
    assert sorted(direct + forwarded) == sorted((info(n).addresses[0], 7000) for n in range(1, count + 1))
    assert {about for _, about, _ in notifier.notifications} == {"log/7"}
    assert all(len(forward) <= MOST_FORWARDED for _, _, forward in notifier.notifications)
    assert len(direct) <= max(DIRECT_NOTIFICATIONS, count // 20 + 1)


def test_who_is_silent_is_notified_and_nobody_through_it() -> None:
    store, notifier = MemoryStore(), RecordingNotifier()
    for n in range(1, 101):
        Peers(store, info(n), None).announce()
    peers = Peers(store, info(0), notifier)
    peers.learn([info(1).uid])
    silent = {info(n).uid for n in range(50, 101)}
    peers.notify_all("log/7", silent=silent)
    for addresses, _, forward in notifier.notifications:
        if forward:
            assert addresses[0][0] not in {info(n).addresses[0] for n in range(50, 101)}
    notified = {a for addresses, _, forward in notifier.notifications for a in (*addresses, *forward)}
    assert len(notified) == 100


# -- the log of numbered records: creating the next number is the compare-and-set and the fence


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
    second.append(2, {"by": "second"})
    assert first.append(2, {"by": "first"}) is False
    assert newest(first).value["by"] == "second", "a deposed writer reads what the others did"


def test_neither_a_gap_nor_a_foreign_name_hides_the_newest() -> None:
    """Old records are removed; and a listing may lack one for a while."""
    store = MemoryStore()
    for number in (3, 7):
        RecordLog(store).append(number, {"number": number})
    for name in ("README", "0000000000000008.tmp", "-9", "1e9"):
        store.put_if_absent(f"log/{name}", "{}")
    assert newest(RecordLog(store)).number == 7


def test_the_newest_that_can_be_read_holds_for_this_look() -> None:
    store = SpyStore()
    writer, reader = RecordLog(store), RecordLog(store)
    for number in (1, 2, 3):
        writer.append(number, {"number": number})
    for hidden, number in (({key(2), key(3)}, 1), ({key(3)}, 2), (set[str](), 3)):
        store.hidden = hidden
        assert newest(reader).number == number
    store.delete(key(3))  # a listing that lacks it
    assert newest(reader).number == 3, "the latest never goes back"


def test_a_look_costs_one_listing_and_one_read_of_something_new() -> None:
    store = SpyStore()
    writer, reader = RecordLog(store), RecordLog(store)
    for number in range(1, 11):
        writer.append(number, {})
    store.reads.clear()
    store.listings.clear()
    for listings in (1, 2):
        reader.latest()
        assert (len(store.listings), len(store.reads)) == (listings, 1)


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


# -- member lists are written once: what refers to them is read back whole, also by who comes late


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
