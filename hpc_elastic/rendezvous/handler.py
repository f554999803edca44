"""The rendezvous as a handler: a blocking call that ends with this node in a round, and a few questions beside it.

It is for agents that are not ours (torch's own, or anybody's). Behind it stands a `Membership` in one epoch of the run,
from the node's arrival until it leaves, which ends its name for good. It drives the same `Participant` as our own
agent.
"""

from __future__ import annotations

import json
import logging
import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

from msgspec import Struct

from hpc_elastic.base.clock import Clock, SystemClock
from hpc_elastic.base.loop import FileExecutor, FilesystemHangsError, wait_readable
from hpc_elastic.errors import HpcElasticError
from hpc_elastic.rendezvous.claims import read_claims
from hpc_elastic.rendezvous.coordination import open_session
from hpc_elastic.rendezvous.handler_config import EpochSweep, HandlerConfig, RunFolder, participant_settings
from hpc_elastic.rendezvous.membership import NodeInfo
from hpc_elastic.rendezvous.participant import Participant
from hpc_elastic.rendezvous.proposals import RestartDecision
from hpc_elastic.rendezvous.state import (
    ClosedRunIdError,
    ExtraDataTimeoutError,
    FilesystemTimeoutError,
    NodeFailure,
    NoPlaceError,
    RendezvousClosedError,
    RendezvousError,
    RendezvousTimeoutError,
    RoundRecord,
    Status,
    host_of,
    new_uid,
    node_of,
)
from hpc_elastic.rendezvous.succession import close_if_last, close_run
from hpc_elastic.run.paths import Outcome
from hpc_elastic.store.file_store import FileStore, StoreFullError
from hpc_elastic.store.key_value import KeyValueStore, KeyValueTimeoutError
from hpc_elastic.store.notifier import open_notifier

logger = logging.getLogger(__name__)

_GRACE = 0.4
_FIRST_LOOK_SECONDS = 5.0
_SHUTDOWN_SECONDS = 10.0
_LONGEST_REASON = 300
_UNORDERED = 10_000
"""First place of agents that follow another one on their node."""

T = TypeVar("T")


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
            decide_restart=lambda record, _: RestartDecision(
                go_on=True, restarts_used=record.restarts_used, reason="", memory=record.memory
            ),
            clock=clock,
            rng=rng,
        )
        self._info, self._notifier, self.coordination = session.info, session.notifier, session.coordination

    def look(self) -> RoundRecord | None:
        """The newest record that has come; None before the first. Raises what ended the thread."""
        for notice in self.coordination.take():
            if isinstance(notice, Exception):
                self._ended_by = notice
            if isinstance(notice, RoundRecord):
                self._record = notice
        if self._ended_by is not None:
            raise self._ended_by
        return self._record

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

        self.coordination.ask(ask)

    def advance(self, record: RoundRecord, open_master: Callable[[], str]) -> bool:
        """Do this node's part in `record`. Returns whether it is a final round with this node in it."""
        if record.status is Status.JOINABLE and record.round > self._asked_for:
            # Again: a record of the former round that came meanwhile may have made the participant content.
            self._asked_for = record.round
            self.coordination.ask(lambda participant: participant.join())
        rank = record.rank(self._info.uid)
        if rank is None or record.round <= self.round:
            return False
        if record.status is Status.FROZEN and record.round > self._confirmed:
            master = open_master() if rank == 0 else ""
            self._confirmed = record.round
            self.coordination.ask(lambda participant: participant.claims.confirm(record.round, master))
        if record.status is not Status.FINAL:
            return False
        self.round = record.round
        return True

    def result(self, record: RoundRecord) -> RoundResult:
        rank = record.rank(self._info.uid)
        assert rank is not None
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
        self.coordination.ask(lambda participant: participant.claims.report_done(done))

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

        self.coordination.ask(depart)
        ended = self.coordination.stop(within=within)
        if ended and self._notifier is not None:
            self._notifier.close()
        return ended

    def find_who_is_here(self, participant: Participant) -> None:
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


class FileRendezvousHandler:
    """One node's handler over a shared directory. Used from one thread."""

    def __init__(
        self, config: HandlerConfig, *, clock: Clock | None = None, open_master: Callable[[], str] | None = None
    ) -> None:
        """Find the run's epoch, and change nothing yet.

        `open_master` is called where this node gets rank 0, before the round is final: it opens the store that all
        workers connect to, and returns its address, ``host:port``.
        """
        self._config = config
        self._clock = clock or SystemClock()
        self._open_master = open_master or (lambda: "")
        self._folder = RunFolder(config, self._clock)
        self._epoch_found: int | None = None
        self._membership: Membership | None = None
        self._sweeper: threading.Thread | None = None
        self._stop_sweep = threading.Event()
        self._rng = random.Random()
        self._files = FileExecutor(name="rendezvous files", clock=self._clock)
        try:
            self._epoch_found = self._steadily(self._folder.current_epoch, _FIRST_LOOK_SECONDS)
        except RendezvousTimeoutError as error:
            logger.warning("%s; trying again when it is needed", error)

    def get_backend(self) -> str:
        return "hpcfs"

    def get_run_id(self) -> str:
        return self._config.run_id

    def next_rendezvous(self) -> RoundResult:
        """Block until this node is in a final round.

        A call while the node's round is still going on ends that round for all.

        Raises:
            RendezvousClosedError: the run is closed, or was closed meanwhile.
            RendezvousTimeoutError: not within the timeout, which begins with each call; it names the missing nodes.
            RendezvousError: the store was wiped, can't be written, or holds what can't be understood.
        """
        deadline = self._clock.monotonic() + self._config.settings.timeout
        if self._membership is None:
            record = self._steadily(lambda: self._folder.latest(self._epoch()), deadline - self._clock.monotonic())
            if record is not None and record.status is Status.CLOSED:
                raise self._closed_error(record, ClosedRunIdError)
            self._membership = self._steadily(
                lambda: Membership(self._config, self._folder, self._epoch(), clock=self._clock, rng=self._rng),
                deadline - self._clock.monotonic(),
            )
            self._membership.coordination.start()
            if self._membership.place == 0 and self._sweeper is None:
                sweep = EpochSweep(self._folder, self._clock)
                self._sweeper = threading.Thread(target=sweep.run, args=(self._stop_sweep,), name="sweep", daemon=True)
                self._sweeper.start()
        membership = self._membership
        try:
            membership.ask_for_a_round()
            while True:
                record = self._look(membership)
                if record is not None:
                    if record.status is Status.CLOSED:
                        raise self._closed_error(record)
                    if membership.advance(record, self._opened_master):
                        # In a round that has become final at the last moment: it is worth a moment more.
                        return self._steadily(
                            partial(membership.result, record), max(_GRACE, deadline - self._clock.monotonic())
                        )
                left = deadline - self._clock.monotonic()
                if left <= 0:
                    raise self._timeout_error(membership)
                early = min(1.0, self._config.settings.timeout / 4)
                if left <= early:  # just before the time is over
                    membership.coordination.ask(membership.find_who_is_here)
                wait_readable([membership.coordination], left if left <= early else left - early)
        except RendezvousError:
            self._drop_membership(_GRACE)
            raise
        except OSError as error:
            self._drop_membership(_GRACE)
            raise RendezvousError(message=f"rendezvous of run {self._config.run_id!r}: {error}") from error

    def num_nodes_waiting(self) -> int:
        """Nodes that wait while the round is final; 0 in every other state.

        Where there is room for them the round ends by itself: `round_is_over`.
        """
        record = self._look(self._membership) if self._membership is not None else None
        return record.waiting if record is not None and record.status is Status.FINAL else 0

    def round_is_over(self) -> bool:
        """Return whether the round of `next_rendezvous` has ended, or the run was closed: its workers are to be
        stopped, and `next_rendezvous` called again."""
        if self._membership is None:
            return False
        record = self._look(self._membership)
        if record is None or self._membership.round < 0:
            return False
        return record.status is Status.CLOSED or record.round > self._membership.round

    def report_done(self) -> None:
        """Report that all workers of this node have ended well: it stays in the round, and is not missed if it is lost
        now.

        When all nodes have said so the run is closed, as one that succeeded.
        """
        if self._membership is not None:
            self._membership.report_done()

    def has_succeeded(self) -> bool:
        """Return whether the run is closed because the workers of all nodes have ended well."""
        record = self._look(self._membership) if self._membership is not None else None
        return record is not None and record.status is Status.CLOSED and record.outcome is Outcome.SUCCEEDED

    def fileno(self) -> int:
        """Readable when there is news of the rounds, until the caller asks; -1 before `next_rendezvous`, and after."""
        return self._membership.coordination.fileno() if self._membership is not None else -1

    def is_closed(self) -> bool:
        """Return whether the run is closed for good; False while nothing exists yet."""
        timeout = self._config.settings.timeout
        record = self._steadily(lambda: self._folder.latest(self._epoch()), timeout)
        return record is not None and record.status is Status.CLOSED

    def set_closed(self) -> None:
        """Close the run for all nodes, for good. Closing twice is fine."""
        self._close(Outcome.CANCELLED, "closed by a node")

    def give_up(self, reason: str) -> None:
        """Close the run as failed: the others learn why."""
        self._close(Outcome.FAILED, reason[:_LONGEST_REASON])

    def store_extra_data(self, version: int, key: str, value: Any) -> None:
        """Keep a JSON value with the round `version` (`RoundResult.version`): the last write of a key holds."""
        raw = json.dumps(value).encode()
        self._steadily(lambda: self._extra().set(f"{version}/{key}", raw), self._config.settings.timeout)

    def load_extra_data(self, version: int, key: str, timeout: float | None = None) -> Any:
        """The value that was stored; waited for up to `timeout` seconds, by default the handler's own."""
        seconds = self._config.settings.timeout if timeout is None else timeout
        try:
            name = f"{version}/{key}"
            return json.loads(self._steadily(lambda: self._extra().get_waiting(name, seconds), seconds + _GRACE))
        except KeyValueTimeoutError:
            raise ExtraDataTimeoutError(run_id=self._config.run_id, key=key, version=version, timeout=seconds) from None

    def _extra(self) -> KeyValueStore:
        return KeyValueStore(self._folder.enter(self._epoch()), "extra", clock=self._clock)

    def shutdown(self, *, workers_done: bool = False) -> bool:
        """Withdraw this node. The last one of the job to do so closes the run.

        Args:
            workers_done: All its workers ended well: the others need no new round without it. It is so after
                `report_done`.

        Returns:
            Whether the others could be notified.
        """
        self._stop_sweep.set()
        membership, self._membership = self._membership, None
        if membership is None:
            return True
        try:
            if not membership.leave(within=_SHUTDOWN_SECONDS, workers_done=workers_done):
                logger.warning("run %r: %s does not answer; not waited for", self._config.run_id, self._folder.path)
                return False
            self._steadily(lambda: close_if_last(membership.store, self._config.run_id), _SHUTDOWN_SECONDS)
        except Exception as error:
            logger.warning("run %r: the rendezvous could not be left in good order: %s", self._config.run_id, error)
            return False
        return True

    def withdraw(self) -> None:
        """Take this node out without closing anything: for an agent that was asked to end while others go on."""
        self._drop_membership(_SHUTDOWN_SECONDS)

    def reached_addresses(self) -> list[str]:
        """This node's own addresses at which another node's packet has arrived, the first one first."""
        return self._membership.reached_addresses() if self._membership is not None else []

    def _close(self, outcome: Outcome, reason: str) -> None:
        self._steadily(
            lambda: close_run(self._folder.enter(self._epoch()), self._config.run_id, outcome, reason),
            self._config.settings.timeout,
        )

    def _epoch(self) -> int:
        if self._epoch_found is None:
            self._epoch_found = self._folder.current_epoch()
        return self._epoch_found

    def _opened_master(self) -> str:
        try:
            return self._open_master()
        except (OSError, RuntimeError) as error:  # no free port, no such address; torch's errors are RuntimeErrors
            why = f"the store for the workers could not be opened: {error}"
            raise RendezvousError(message=f"rendezvous of run {self._config.run_id!r}: {why}") from error

    def _look(self, membership: Membership) -> RoundRecord | None:
        try:
            return membership.look()
        except RendezvousError:
            raise
        except Exception as error:
            raise RendezvousError(message=f"rendezvous of run {self._config.run_id!r}: {error}") from error

    def _drop_membership(self, within: float) -> None:
        membership, self._membership = self._membership, None
        if membership is not None:
            membership.leave(within=within, workers_done=False)

    def _closed_error(
        self, record: RoundRecord, error_type: type[RendezvousClosedError] = RendezvousClosedError
    ) -> RendezvousClosedError:
        outcome = record.outcome.value if record.outcome else "unknown"
        return error_type(run_id=self._config.run_id, outcome=outcome, reason=record.reason)

    def _timeout_error(self, membership: Membership) -> RendezvousTimeoutError:
        places, timeout = self._config.max_nodes, self._config.settings.timeout
        record = self._look(membership)
        if record is not None and record.status is Status.FINAL and len(record.members) >= places:
            return NoPlaceError(run_id=self._config.run_id, places=places, timeout=timeout)
        here = membership.who_is_here
        if here is None:
            path, why = self._folder.path, "no answer to the last question"
            return FilesystemTimeoutError(run_id=self._config.run_id, path=path, timeout=timeout, why=why)
        least = self._config.min_nodes
        missing = ", ".join(here.missing) or "never seen"
        return RendezvousTimeoutError(
            run_id=self._config.run_id,
            missing_count=max(1, least - len(here.present)),
            expected=least,
            timeout=timeout,
            missing=f"here: {', '.join(here.present) or 'none'}; missing: {missing}",
            fewer=max(1, len(here.present)),
        )

    def _steadily(self, action: Callable[[], T], seconds: float) -> T:
        """Do something with files, which may be repeated, in the thread for them: a dead mount never answers."""
        run_id = self._config.run_id
        try:
            return self._files.do(
                action, within=seconds, again=lambda error: isinstance(error, (OSError, StoreFullError))
            )
        except (OSError, StoreFullError) as error:
            why = "no answer" if isinstance(error, FilesystemHangsError) else str(error)
            path = self._folder.path
            raise FilesystemTimeoutError(run_id=run_id, path=path, timeout=seconds, why=why) from error
        except (RendezvousError, KeyValueTimeoutError):
            raise
        except HpcElasticError as error:
            raise RendezvousError(message=f"rendezvous of run {run_id!r}: {error}") from error
