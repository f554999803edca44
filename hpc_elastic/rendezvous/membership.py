"""One node's membership in one epoch of a run: from its arrival until it leaves, which ends its name for good."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence

from msgspec import Struct

from hpc_elastic.base.clock import Clock
from hpc_elastic.base.loop import wait_readable
from hpc_elastic.rendezvous.claims import read_claims
from hpc_elastic.rendezvous.coordination import open_session
from hpc_elastic.rendezvous.handler_config import HandlerConfig, participant_settings
from hpc_elastic.rendezvous.participant import Participant
from hpc_elastic.rendezvous.peers import NodeInfo
from hpc_elastic.rendezvous.restart import RestartDecision
from hpc_elastic.rendezvous.run_folder import RunFolder
from hpc_elastic.rendezvous.state import NodeFailure, RoundRecord, Status, host_of, new_uid, node_of
from hpc_elastic.store.file_store import FileStore
from hpc_elastic.store.key_value import KeyValueStore
from hpc_elastic.store.notifier import open_notifier

_UNORDERED = 10_000
"""First place of agents that follow another one on their node."""


class RoundResult(Struct, frozen=True, kw_only=True):
    """A final round, as one of its members sees it. It unpacks as older rendezvous' tuple (store, rank, world size)."""

    store: KeyValueStore
    """The round's own: nothing of another round is in it. It is `folder` of the store in `directory`."""
    rank: int
    world_size: int
    version: int
    """The round's number in the epoch."""
    master: str
    """The result of rank 0's `open_master`."""
    directory: str
    folder: str

    def __iter__(self) -> Iterator[object]:
        return iter((self.store, self.rank, self.world_size))


class WhoIsHere(Struct, frozen=True, kw_only=True):
    """Hosts, by name."""

    present: Sequence[str]
    missing: Sequence[str]
    """Members of the last round that did not come again."""


def _go_on(record: RoundRecord, failures: Sequence[NodeFailure]) -> RestartDecision:
    return RestartDecision(go_on=True, restarts_used=record.restarts_used, reason="", memory=record.memory)


class Membership:
    def __init__(
        self, config: HandlerConfig, folder: RunFolder, epoch: int, *, clock: Clock, rng: random.Random
    ) -> None:
        """Enter the epoch, under a name that is new each time. OSError is a passing fault."""
        self.store = folder.enter(epoch)
        self.round = -1
        """The last final round that this node was in."""
        self._directory = folder.epoch_path(epoch)
        self._clock = clock
        self._record: RoundRecord | None = None
        self._ended_by: Exception | None = None
        self._confirmed = -1
        self._asked_for = -1
        self._done = -1
        self.who_is_here: WhoIsHere | None = None
        self.place = node = _claim_place(self.store, config.node)
        uid = new_uid(node, config.host, clock)
        notifier = None
        if config.settings.doorbell and config.addresses:
            self.store.put_if_absent("epoch/secret", os.urandom(32).hex())
            if (secret := self.store.get("epoch/secret")) is None:
                raise OSError("the store's secret can't be read yet")
            notifier = open_notifier(
                secret=secret.encode(),
                run_uid=folder.epoch_name(epoch),
                uid=uid,
                host="0.0.0.0",
                addresses=config.addresses,
            )
        session = open_session(
            NodeInfo(uid=uid, node=node, host=config.host, local_world_size=1, addresses=config.addresses),
            notifier,
            run_id=config.run_id,
            open_store=lambda: self.store,
            settings=participant_settings(config),
            decide_restart=_go_on,
            clock=clock,
            rng=rng,
        )
        self._info, self._notifier, self._coordination = session.info, session.notifier, session.coordination

    def start(self) -> None:
        self._coordination.start()

    def look(self) -> RoundRecord | None:
        """The newest record that has come; None before the first. Raises what ended the thread."""
        for notice in self._coordination.take():
            if isinstance(notice, Exception):
                self._ended_by = notice
            if isinstance(notice, RoundRecord):
                self._record = notice
        if self._ended_by is not None:
            raise self._ended_by
        return self._record

    def fileno(self) -> int:
        return self._coordination.fileno()

    def wait(self, seconds: float) -> None:
        wait_readable([self], seconds)

    def ask_for_a_round(self) -> None:
        """Ask for the open or the next round: a round that this node is in ends."""
        self.who_is_here = None
        ended, info = self.round, self._info
        failure = NodeFailure(
            node=info.node, fingerprint="", failure_class="root", retryable=True, message="a new round was asked for"
        )

        def ask(participant: Participant) -> None:
            record = participant.record
            if ended >= 0 and record is not None and record.status is Status.FINAL and record.round == ended:
                participant.claims.report_failure(ended, failure)
            participant.join()

        self._coordination.ask(ask)

    def advance(self, record: RoundRecord, open_master: Callable[[], str]) -> bool:
        """Do this node's part in `record`. Returns whether it is a final round with this node in it."""
        if record.status is Status.JOINABLE and record.round > self._asked_for:
            # Again: a record of the former round that came meanwhile may have made the participant content.
            self._asked_for = record.round
            self._coordination.ask(lambda participant: participant.join())
        member = record.member(self._info.uid)
        if member is None or record.round <= self.round:
            return False
        rank = record.members.index(member)
        if record.status is Status.FROZEN and record.round > self._confirmed:
            master = open_master() if rank == 0 else ""
            self._confirmed = record.round
            self._coordination.ask(lambda participant: participant.claims.confirm(record.round, master))
        if record.status is not Status.FINAL:
            return False
        self.round = record.round
        return True

    def result(self, record: RoundRecord) -> RoundResult:
        rank = [member.uid for member in record.members].index(self._info.uid)
        folder = f"kv/{record.round:06d}"
        return RoundResult(
            store=KeyValueStore(self.store, folder, clock=self._clock),
            rank=rank,
            world_size=len(record.members),
            version=record.round,
            master=record.master,
            directory=self._directory,
            folder=folder,
        )

    def report_done(self) -> None:
        self._done = done = self.round
        self._coordination.ask(lambda participant: participant.claims.report_done(done))

    def ask_who_is_here(self) -> None:
        self._coordination.ask(self._find_who_is_here)

    def reached_addresses(self) -> list[str]:
        return list(self._notifier.reached) if self._notifier is not None else []

    def leave(self, *, within: float, workers_done: bool) -> bool:
        """Notify the others and end the thread. Returns whether the filesystem took it within so many seconds."""
        uid = self._info.uid
        workers_done |= self.round >= 0 and self._done == self.round

        def depart(participant: Participant) -> None:
            record = participant.record
            if record is not None and record.status is not Status.CLOSED:
                if record.member(uid) is None or record.status is Status.JOINABLE:
                    participant.leave(record.round, "its agent left")
                    participant.leave(record.round + 1, "its agent left")
                elif workers_done and record.status is Status.FINAL:
                    participant.claims.report_done(record.round)
                else:
                    participant.leave(record.round, "its agent left")
            participant.claims.deregister()

        self._coordination.ask(depart)
        ended = self._coordination.stop(within=within)
        if ended and self._notifier is not None:
            self._notifier.close()
        return ended

    def _find_who_is_here(self, participant: Participant) -> None:
        record = participant.record
        if record is None:
            self.who_is_here = WhoIsHere(present=(self._info.host,), missing=())
            return
        target = record.round if record.status is Status.JOINABLE else record.round + 1
        uids = set(read_claims(self.store, target).get("join", ()))
        uids = {uid for uid in uids if node_of(uid) not in record.lost} | {self._info.uid}
        absent = {m.uid for m in record.members} - uids
        present, missing = ([host_of(uid) for uid in sorted(found)] for found in (uids, absent))
        self.who_is_here = WhoIsHere(present=present, missing=missing)


def _claim_place(store: FileStore, wanted: int | None) -> int:
    mine = os.urandom(8).hex()
    while True:
        taken = {int(name) for name in store.list("place") if name.isdecimal()}
        place = wanted
        if place is None or place in taken:
            place = max({-1 if wanted is None else _UNORDERED, *taken}) + 1
        if store.put_if_absent(f"place/{place:05d}", mine):
            return place
        threading.Event().wait(random.uniform(0, 0.02))
