"""Participants and the addresses of their notifiers. Each announces itself once, in a name: one directory listing
returns every participant's address."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Collection, Iterable, Sequence

from msgspec import Struct

from hpc_elastic.rendezvous.round_log import record_name
from hpc_elastic.rendezvous.state import OBSERVER_PLACE, RoundRecord, host_of, newest_by_node, node_of
from hpc_elastic.store.file_store import Store
from hpc_elastic.store.notifier import MOST_FORWARDED, Address, Notifier

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
