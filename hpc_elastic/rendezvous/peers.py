"""Who takes part and where their bells are: what each participant says of itself once, read once by the others."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Protocol

from hpc_elastic.rendezvous.claims import decode_object
from hpc_elastic.rendezvous.state import NodeInfo, decode_node
from hpc_elastic.store.base import Store
from hpc_elastic.store.doorbell import Address

_FOLDER = "node"


class Bell(Protocol):
    """What a participant needs of `store.doorbell.Doorbell`."""

    def ring(self, addresses: list[Address], about: str = "") -> None: ...


class Peers:
    """The participants that this one knows."""

    def __init__(self, store: Store, own: NodeInfo, bell: Bell | None) -> None:
        self._store = store
        self._own = own
        self._bell = bell
        self._known: dict[str, NodeInfo] = {own.uid: own}

    def announce(self) -> None:
        """Say who this is. Before any claim."""
        value = json.dumps(self._own.to_json(), separators=(",", ":"))
        self._store.put_if_absent(f"{_FOLDER}/{self._own.uid}", value)

    def all_uids(self) -> list[str]:
        """Every participant that ever announced itself, observers too."""
        return self._store.list(_FOLDER)

    def get(self, uid: str) -> NodeInfo | None:
        return self._known.get(uid)

    def learn(self, uids: Iterable[str]) -> None:
        """Read about those that are not known yet, and with them about everybody new: observers want to be rung too."""
        uids = set(uids)
        if all(uid in self._known for uid in uids) and len(self._known) > 1:
            return
        for uid in sorted({*uids, *self.all_uids()}):  # a listing may still miss one whose claim was seen
            if uid not in self._known:
                self._read(uid)

    def names(self) -> dict[int, str]:
        """Node index → host name."""
        return {node.node: node.host for node in self._known.values()}

    def ring(self, uid: str, about: str = "") -> None:
        """Tell one of them to look now, for the key `about`."""
        if self._bell is None or uid == self._own.uid:
            return
        node = self._known.get(uid) or self._read(uid)
        if node is not None:
            self._bell.ring(_addresses(node), about)

    def ring_all(self, about: str = "") -> None:
        """Tell all that are known to look now, for the key `about`."""
        if self._bell is not None:
            self._bell.ring(self.addresses(self._known), about)

    def addresses(self, uids: Iterable[str]) -> list[Address]:
        """Where the bells of those of `uids` are that are known; never this one's own."""
        known = (self._known.get(uid) for uid in uids if uid != self._own.uid)
        return [address for node in known if node is not None for address in _addresses(node)]

    def _read(self, uid: str) -> NodeInfo | None:
        value = decode_object(self._store.get(f"{_FOLDER}/{uid}"))
        node = decode_node(uid, value) if value is not None else None
        if node is not None:
            self._known[uid] = node
        return node


def _addresses(node: NodeInfo) -> list[Address]:
    return [(host, node.port) for host in node.addresses] if node.port else []
