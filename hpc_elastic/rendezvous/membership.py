"""Who takes part: the log of round records, and the participants with the addresses of their notifiers.

To create record n + 1 of the log is the compare-and-set, and the number is the fencing token. A deposed coordinator
that still believes itself in office tries to create a number that is already there, loses, reads what the others did,
and steps down. Nothing else is needed to keep two of them apart. Each participant announces itself once, in a name: one
directory listing returns every participant's address.
"""

from __future__ import annotations

import errno
import json
import os
import socket
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct

from hpc_elastic.rendezvous.state import (
    OBSERVER_PLACE,
    RoundRecord,
    Status,
    decode_record,
    host_of,
    members_elsewhere,
    newest_by_node,
    node_of,
)
from hpc_elastic.store.file_store import Store, StoreFullError
from hpc_elastic.store.notifier import MOST_FORWARDED, Address, Notifier

KEPT_RECORDS = 32
RESERVE = "reserve"
"""Key of a file that keeps room free for a run's end."""
_RESERVE_BYTES = 256 << 10
_LOG = "log"


def record_name(number: int) -> str:
    """A record's name in notifications."""
    return f"{_LOG}/{number}"


def record_number(key: str) -> int:
    """The number of a record of that name; 0: it is no record's."""
    folder, _, name = key.rpartition("/")
    return int(name) if folder == _LOG and name.isdecimal() and len(name) < 20 else 0


class LogRecord(Struct, frozen=True):
    number: int
    value: Mapping[str, Any]


class RecordLog:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._newest: LogRecord | None = None
        self.went_back = False
        """The last listing had nothing as new as what was seen before: the store was wiped, or a listing is stale."""

    def latest(self, *, hint: int = 0) -> LogRecord | None:
        """The newest visible record: one listing, and one read when there is something new.

        `hint`: the number of a record that another says is there; a newer one is found at the next look.
        """
        known = self._newest.number if self._newest else 0
        if hint > known and (raw := self._store.get(_key(hint))) is not None:
            self._newest = LogRecord(hint, _decode(raw))
            return self._newest
        numbers = self._numbers()
        self.went_back = known > max(numbers, default=0)
        for number in sorted(numbers, reverse=True):
            if number <= known:
                break
            raw = self._store.get(_key(number))
            if raw is None:
                continue  # listed and not readable yet: the one before it still holds for this look
            self._newest = LogRecord(number, _decode(raw))
            break
        return self._newest

    def append(self, number: int, value: Mapping[str, Any]) -> bool:
        """Create record `number`, the successor of the newest one that the caller knows. Returns whether it did."""
        raw = json.dumps({**value, "nonce": os.urandom(8).hex()}, separators=(",", ":"))
        if not self._store.put_if_absent(_key(number), raw):
            self._store.invalidate(_LOG)  # so that the next look shows who was first, also where caches hid it
            return False
        if max(self._numbers(), default=number) >= number + KEPT_RECORDS:
            # This process was stopped for so long that its number was free again: compacted away. Fewer newer ones are
            # those of others who have already built on this record.
            return False
        self._newest = LogRecord(number, _decode(raw))
        return True

    def read(self, number: int) -> LogRecord | None:
        raw = self._store.get(_key(number))
        return LogRecord(number, _decode(raw)) if raw is not None else None

    def compact(self, *, keep: int = 0) -> None:
        """Remove all but the newest records, and record `keep`. For the coordinator alone."""
        for number in sorted(self._numbers())[:-KEPT_RECORDS]:
            if number != keep:
                self._store.delete(_key(number))

    def _numbers(self) -> list[int]:
        return [int(name) for name in self._store.list(_LOG) if name.isdecimal()]


def _key(number: int) -> str:
    return f"{_LOG}/{number:016d}"


def _decode(raw: str) -> dict[str, Any]:
    try:
        value = json.loads(raw)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def reserve_room(store: Store) -> None:
    """Keep room for the run's last record, in random bytes that no filesystem makes smaller."""
    store.put_if_absent(RESERVE, os.urandom(_RESERVE_BYTES // 2).hex())


class RoundLog:
    def __init__(self, store: Store, run_id: str) -> None:
        self._store = store
        self._log = RecordLog(store)
        self._run_id = run_id
        self._newest: RoundRecord | None = None

    @property
    def went_back(self) -> bool:
        return self._log.went_back

    def latest(self, *, hint: int = 0) -> RoundRecord | None:
        """The newest visible record, `hint` as in `RecordLog`; the same object while there is no newer one."""
        found = self._log.latest(hint=hint)
        if found is not None and (self._newest is None or found.number > self._newest.number):
            self._newest = self._decode(found.number, found.value)
        return self._newest

    def append(self, record: RoundRecord) -> bool:
        try:
            is_first = self._log.append(record.number, record.to_json())
        except StoreFullError:
            if record.status is not Status.CLOSED:
                raise
            self._store.delete(RESERVE)  # the last one takes what was kept free (`reserve_room`)
            is_first = self._log.append(record.number, record.to_json())
        if is_first:
            self._newest = record
        return is_first

    def compact(self) -> None:
        """Remove old records, but for the one whose member list still holds. For the coordinator alone."""
        self._log.compact(keep=self._newest.members_at if self._newest is not None else 0)

    def _decode(self, number: int, value: Mapping[str, Any]) -> RoundRecord:
        at = members_elsewhere(value)
        known = self._newest
        if at and (known is None or at != (known.members_at or known.number)):
            there = self._log.read(at)
            if there is None:
                raise OSError(errno.EIO, f"record {at} of the log, which has the members, can't be read yet")
            known = decode_record(there.number, there.value, run_id=self._run_id)
        return decode_record(number, value, run_id=self._run_id, known=known)


_FOLDER = "node"
DIRECT_NOTIFICATIONS = 48
"""Number of nodes that are notified directly; of more, some are notified, and notify the others."""
_MOST_ADDRESSES = 8
"""Addresses in a name. The value has them all."""
_MOST_READ = 256
"""Values that are read for addresses beyond those."""


class NodeInfo(Struct, frozen=True, kw_only=True):
    """A node's announcement, made once when its agent starts."""

    uid: str
    node: int
    host: str
    local_world_size: int
    addresses: tuple[str, ...]
    port: int = 0
    spare: bool = False
    """Submitted as a spare: it takes a lost node's place, and waits otherwise."""


class BeatPlan(Struct, frozen=True, kw_only=True):
    """The receivers of this participant's beats."""

    about: str = ""
    """The key of the newest record that it has seen."""
    heard: tuple[Address, ...] = ()
    unheard: tuple[Address, ...] = ()


class Peers:
    def __init__(self, store: Store, own: NodeInfo, notifier: Notifier | None) -> None:
        self._store = store
        self._own = own
        self._notifier = notifier
        self._known: dict[str, NodeInfo] = {own.uid: own}
        self._invalidated_for: set[str] = set()

    def announce(self) -> None:
        value = json.dumps({"v": 1, "addrs": self._own.addresses}, separators=(",", ":"))
        self._store.put_if_absent(f"{_FOLDER}/{announcement(self._own)}", value)

    def all_uids(self) -> list[str]:
        return [name.partition("+")[0] for name in self._store.list(_FOLDER)]

    def get(self, uid: str) -> NodeInfo | None:
        return self._known.get(uid)

    def observer(self) -> str | None:
        """The supervisor's newest uid; None where none is known to have announced itself."""
        return newest_by_node(self._known).get(OBSERVER_PLACE)

    def learn(self, uids: Iterable[str]) -> None:
        """Learn about those that are not known yet, and with them about everybody new: observers are notified too."""
        missing = {uid for uid in uids if uid not in self._known}
        if not missing and len(self._known) > 1:
            return
        self._read_names()
        hidden = missing - set(self._known) - self._invalidated_for
        if hidden:  # they announced themselves before they claimed anything: a cache still has the listing of before
            self._invalidated_for |= hidden
            self._store.invalidate(_FOLDER)
            self._read_names()

    def _read_names(self) -> None:
        for name in self._store.list(_FOLDER):
            uid, _, said = name.partition("+")
            if uid not in self._known and (node := _understood(uid, said)) is not None:
                self._known[uid] = node

    def all_addresses(self, uids: Collection[str]) -> frozenset[str] | None:
        """Every address of `uids`, not only of their notifiers; None where one is not known, or has none."""
        self.learn(uids)
        known = [self._known.get(uid) for uid in uids]
        cut = [node for node in known if node is not None and len(node.addresses) == _MOST_ADDRESSES]
        if len(cut) > _MOST_READ:
            return None
        found: set[str] = set()
        for node in known:
            addresses = () if node is None else self._addresses_in_full(node) if node in cut else node.addresses
            if not addresses:
                return None
            found.update(addresses)
        return frozenset(found)

    def _addresses_in_full(self, node: NodeInfo) -> Sequence[str]:
        """Addresses with those for which the name has no room; none where they can't be read."""
        try:
            value = json.loads(self._store.get(f"{_FOLDER}/{announcement(node)}") or "null")
            return [str(address) for address in value["addrs"]]
        except (ValueError, TypeError, KeyError):
            return ()

    def names(self) -> dict[int, str]:
        return {node.node: node.host for node in self._known.values()}

    def notify(self, where: Sequence[Address], about: str = "") -> None:
        if self._notifier is not None and where:
            self._notifier.notify(list(where), about)

    def notify_all(self, about: str = "", *, silent: Iterable[str] = ()) -> None:
        """Notify all that are known to look now, for the key `about`; members that are `silent` may not pass it on."""
        if self._notifier is None:
            return
        nodes = [_addresses(node) for uid, node in self._known.items() if uid != self._own.uid and node.port]
        if len(nodes) <= DIRECT_NOTIFICATIONS:
            self._notifier.notify([address for addresses in nodes for address in addresses], about)
            return
        muted = {self._known[uid].port and _addresses(self._known[uid])[0] for uid in silent if uid in self._known}
        while nodes:
            first = nodes.pop()
            forward: list[Address] = []
            while first[0] not in muted and nodes and len(forward) + len(nodes[-1]) <= MOST_FORWARDED:
                forward += nodes.pop()
            self._notifier.notify(first, about, forward)

    def beat_plan(self, record: RoundRecord, whom: Iterable[str], *, hears: Callable[[str], bool]) -> BeatPlan:
        """Say to `whom` that this one lives; the record has the coordinator's address."""
        # Thousands that have just claimed a place wait for the next record: the first would hold nothing for them.
        about = record_name(record.number) if record.number > 1 else ""
        found: dict[bool, list[Address]] = {True: [], False: []}
        for uid in whom:
            found[hears(uid)] += addresses_of(record.notifier) if uid == record.leader else self.addresses([uid])
        return BeatPlan(about=about, heard=tuple(found[True]), unheard=tuple(found[False]))

    def addresses(self, uids: Iterable[str]) -> list[Address]:
        """Known addresses of the notifiers of `uids`; never this one's own."""
        known = (self._known.get(uid) for uid in uids if uid != self._own.uid)
        return [address for node in known if node is not None for address in _addresses(node)]


def announcement(node: NodeInfo) -> str:
    """``<uid>+<local world size>.<port>.<spare>[.<address>…]``: a name that says all that others need to know."""
    addresses = []
    for address in node.addresses[:_MOST_ADDRESSES]:
        try:
            addresses.append(socket.inet_aton(address).hex())
        except OSError:
            continue  # no IPv4 address: the notifier could not be notified there
    return f"{node.uid}+{'.'.join([str(node.local_world_size), str(node.port), str(int(node.spare)), *addresses])}"


def _understood(uid: str, said: str) -> NodeInfo | None:
    """None for a senseless name: then it is as if the node had not come."""
    try:
        size, port, spare, *addresses = said.split(".")
        return NodeInfo(
            uid=uid,
            node=node_of(uid),
            host=host_of(uid),
            local_world_size=int(size),
            addresses=tuple(socket.inet_ntoa(bytes.fromhex(address)) for address in addresses),
            port=int(port),
            spare=bool(int(spare)),
        )
    except (ValueError, OSError):
        return None


def notifier_of(node: NodeInfo) -> tuple[str, ...]:
    return (str(node.port), *node.addresses) if node.port else ()


def addresses_of(notifier: Sequence[str]) -> list[Address]:
    """Addresses of a `notifier_of`; none where it makes no sense."""
    if not notifier or not notifier[0].isdecimal():
        return []
    return [(host, int(notifier[0])) for host in notifier[1:]]


def _addresses(node: NodeInfo) -> list[Address]:
    return [(host, node.port) for host in node.addresses] if node.port else []
