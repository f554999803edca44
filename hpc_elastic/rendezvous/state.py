"""The record that the nodes agree on, what may follow what, the names of participants, and a rendezvous' errors.

A record may carry a preemption notice. The process that learns of the end (the supervisor or an agent, by a signal)
writes it into the log; each member reports where its workers stand, the coordinator names the step after which all save
(`agreed_step`), and members report when all is saved.

docs/reference/exit-codes.md is generated from `TRANSITIONS`.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Collection, Iterable, Mapping
from enum import Enum
from functools import cached_property
from types import MappingProxyType
from typing import Any

from msgspec import Struct
from msgspec.structs import force_setattr, replace

from hpc_elastic.base import codec
from hpc_elastic.base.clock import Clock
from hpc_elastic.errors import HpcElasticError, IllegalTransitionError
from hpc_elastic.run.paths import Outcome
from hpc_elastic.worker_api.records import NO_STEP, STEP_PENDING

MEASURE_SECONDS = 1.0
"""Seconds for which a node measures how fast its workers step before it says where they stand."""
NEWS_SECONDS = 1.0
"""Seconds by which a later notice must leave less time than the one that holds, to be sent on."""


class RunNotice(Struct, frozen=True, array_like=True):
    """Part of every record from when it was given. A later one that leaves less time takes its place."""

    reason: str
    """``SIGUSR2 on n1``."""
    seconds: float
    """Seconds for which a checkpoint is waited for, from when it was given."""
    step: int = STEP_PENDING
    """All workers save after this step; `NO_STEP`: no worker reports steps."""
    left: float | None = None
    """Seconds until the job is ended from outside, from when it was given; None where nobody knows."""

    @property
    def is_agreed(self) -> bool:
        return self.step != STEP_PENDING

    def is_given_as(self, other: RunNotice | None) -> bool:
        return other is not None and replace(self, step=other.step) == other

    def leaves_less_than(self, other: RunNotice, *, since: float) -> bool:
        """Return whether it is news to those who know of another one, given `since` seconds ago."""
        return self.seconds < other.seconds - since - NEWS_SECONDS


class PreemptionStatus(Struct, frozen=True, kw_only=True):
    """One node's workers, when there is a preemption notice."""

    heeds: bool
    """One of them has asked for notices, or is sent a signal."""
    step: int = NO_STEP
    """The furthest step that one of them has reported."""
    rate: float = 0.0
    """Steps per second of the fastest."""


def seconds_to_save(given: float, *, shutdown_timeout: float) -> float:
    """Seconds for which a checkpoint is waited for, of those `given` until the job is ended from outside."""
    return max(1.0, given - min(shutdown_timeout, given / 3) - min(5.0, given / 10))


def agreed_step(statuses: Collection[PreemptionStatus], *, spread: float) -> int:
    """One that no worker has passed by the time that it hears of it, `spread` seconds after the members' `statuses`."""
    known = [status for status in statuses if status.step >= 0]
    if not known:
        return NO_STEP
    furthest = max(status.step for status in known)
    ahead = math.ceil(min(1e9, max(0.0, *(status.rate for status in known))) * spread)
    # One more: a step is reported when it is complete. Ranks that wait for each other are no further apart.
    return min(1 << 62, furthest + ahead + 1)


class RendezvousError(HpcElasticError):
    """The base of all below; nothing else comes out of a rendezvous."""


class RendezvousClosedError(RendezvousError):
    template = "rendezvous of run {run_id!r} is closed: {outcome} ({reason})"


class ClosedRunIdError(RendezvousClosedError):
    template = RendezvousClosedError.template + "; give a new run id, or reopen=on for a new run of this one"


class RendezvousTimeoutError(RendezvousError):
    template = (
        "rendezvous of run {run_id!r}: {missing_count} of {expected} nodes had not joined after {timeout:g} s "
        "({missing}); look for their agent logs, or allow fewer nodes, {fewer}-{expected}"
    )


class NoPlaceError(RendezvousTimeoutError):
    template = (
        "rendezvous of run {run_id!r}: all {places} places were taken for {timeout:g} s, and this node, a spare, "
        "was not needed; allow more nodes, or a longer timeout"
    )


class FilesystemTimeoutError(RendezvousTimeoutError):
    template = "rendezvous of run {run_id!r}: {path} could not be used for {timeout:g} s: {why}"


class ExtraDataTimeoutError(RendezvousTimeoutError):
    template = "rendezvous of run {run_id!r}: nothing stored under {key!r} of version {version} after {timeout:g} s"


class RendezvousStateError(RendezvousError):
    template = "rendezvous of run {run_id!r}: record {number} is {why}"


OBSERVER_PLACE = 99999
"""The node index in the uid of a supervisor, which is no node."""


def new_uid(node: int, host: str, clock: Clock, *, start: int = 0) -> str:
    """``00003-nid003-0001f87ab3c4d5e6-9f3c``: node index, host, start, four random digits.

    The start is the ordinal of this agent on its node, where agents are counted, then this host's time in 65.5 µs.
    """
    started = min(start, 0xFFFF) << 48 | clock.time_ns() >> 16 & (1 << 48) - 1
    readable = "".join(c if c.isascii() and (c.isalnum() or c in "-.") else "_" for c in host)[:64]
    return f"{node:05d}-{readable}-{started:016x}-{os.urandom(2).hex()}"


def node_of(uid: str) -> int:
    """The node index in a uid; -1 for a senseless one."""
    head = uid.partition("-")[0]
    return int(head) if head.isdecimal() else -1


def host_of(uid: str) -> str:
    """The host name in a uid, as readable as it was made there; a senseless uid itself."""
    parts = uid.split("-")
    return "-".join(parts[1:-2]) if len(parts) > 3 else uid


def supersedes(newer: str, older: str) -> bool:
    """`newer` is a later agent of the node that `older` ran on: two starts, or two times, of the same host."""
    if node_of(newer) != node_of(older) or newer == older:
        return False
    return newer.rsplit("-", 2)[-2:] > older.rsplit("-", 2)[-2:]


def newest_by_node(uids: Iterable[str]) -> dict[int, str]:
    newest: dict[int, str] = {}
    for uid in uids:
        if (node := node_of(uid)) not in newest or supersedes(uid, newest[node]):
            newest[node] = uid
    return newest


_MOST_PACKED = 16 << 20
"""Bytes of a member list; eight thousand nodes take half a megabyte."""
MOST_REPEATED = 6
"""Members of a list that each record repeats, so that it stays within a symbolic link; of a longer one only the record
that chose them has the list."""
MOST_PLAIN = 64
"""Members of a list that is written as it is; a longer one is compressed."""


class Status(str, Enum):
    JOINABLE = "joinable"
    FROZEN = "frozen"
    """The members are chosen and confirm."""
    FINAL = "final"
    """All members confirmed: ranks hold, workers run."""
    CLOSED = "closed"
    """The run's attempt is over, for good."""


class Member(Struct, frozen=True, array_like=True):
    """A node in a round. Position in the member list is the group rank."""

    uid: str
    node: int
    local_world_size: int


class Members(tuple[Member, ...]):
    """A member list that finds a node by its uid without going through thousands of others."""

    @cached_property
    def ranks(self) -> dict[str, int]:
        return {member.uid: rank for rank, member in enumerate(self)}


class FailureMemory(Struct, frozen=True, kw_only=True, array_like=True):
    """The memory about failures that one coordinator leaves to the next one."""

    fingerprint: str = ""
    """The last round's root cause; empty where it had none that counts."""
    times: int = 0
    """Number in a row, with no progress between."""
    step: int = -1
    """The furthest step that any worker had reported then."""
    counted_steps: int = -1
    """Steps that the workers had done in that round, where they report none themselves; -1: not known."""


class HangMark(Struct, frozen=True, array_like=True):
    """Place of a worker that gave no sign of life any more. No times: clocks of two hosts are not compared."""

    step: int
    age: float
    """Seconds for which it had been silent."""
    ranks: tuple[int, ...] = ()
    """The ranks that the others wait for, where not a heartbeat has shown that."""

    @property
    def lag(self) -> tuple[int, float]:
        """Sorts the one first that is furthest behind: by step, then whose heartbeat stopped first."""
        return self.step, -self.age


class RoundRecord(Struct, frozen=True, kw_only=True, rename={"notifier": "bell", "restarts_used": "restarts"}):
    number: int
    epoch: str
    """The store's id; a record of another epoch means that the store was replaced."""
    term: int
    """Grows with each change of coordinator."""
    leader: str
    """Uid of the coordinator that wrote the record."""
    round: int
    """Index of the round in the attempt: ``TORCHELASTIC_RESTART_COUNT``."""
    status: Status
    members: tuple[Member, ...] = ()
    """While JOINABLE: the members of the last final round, in slot order; later: this round's."""
    members_at: int = 0
    """The number of the record that has the member list in full, where this one only refers to it; else 0."""
    notifier: tuple[str, ...] = ()
    """The coordinator's port, then its addresses. Empty: it has no notifier."""
    restarts_used: int = 0
    """Rounds of this attempt that followed a worker's failure."""
    waiting: int = 0
    vacant: int = 0
    """Places of lost members that nobody has taken since."""
    lost: tuple[int, ...] = ()
    """Node indexes whose agent stopped its heartbeat, until a new agent comes from there."""
    suspects: tuple[str, ...] = ()
    """Uids that have fallen silent on the network: each rewrites its heartbeat on reading its name here, or is lost."""
    unfit: tuple[int, ...] = ()
    """Node indexes that are in no further round, since all workers there failed alike, and none elsewhere: their
    agents leave on reading it."""
    reason: str = ""
    master: str = ""
    """``host:port`` of the round's TCPStore; set when FINAL."""
    outcome: Outcome | None = None
    retryable: bool = True
    """Another attempt could end otherwise; set when CLOSED."""
    memory: FailureMemory = FailureMemory()
    hang: HangMark | None = None
    """The round before was ended because of this worker: its members take the stacks of all before they end them."""
    failed: bool = False
    """The round before was ended because a worker had failed: failures that appear later in any other stop follow from
    that."""
    symptoms: bool = False
    """The round before was ended by failures that only show that another rank is gone: its members give their ranks a
    moment to fail by themselves, and look where the silent ones stand before they end them."""
    notice: RunNotice | None = None
    heard: str = ""
    """A signal that an agent heard, ``SIGTERM on n2 from pid 812 (slurmstepd)``: its meaning is the supervisor's to
    find out."""

    def __post_init__(self) -> None:
        if not isinstance(self.members, Members):
            force_setattr(self, "members", Members(self.members))

    def to_json(self) -> dict[str, Any]:
        """The record without its number, which is its name, and short: that of a few nodes fits into a symlink."""
        value = {"v": codec.VERSION, **codec.to_json(self, without=("number", "members_at"))}
        value["members"] = members = self.members_at or value["members"]
        if isinstance(members, list | tuple) and len(members) > MOST_PLAIN:
            # Thousands of nodes read it at once: what they have in common is most of it.
            from base64 import b85encode

            packed = zlib.compress(json.dumps(members, separators=(",", ":")).encode(), 6)
            value["members"] = b85encode(packed).decode()
        for name in ("vacant", "unfit", "hang", "failed", "symptoms", "notice", "heard"):
            if not value[name]:
                del value[name]
        if self.notice is not None and self.notice.left is None:
            value["notice"] = value["notice"][:-1]
        return value

    def rank(self, uid: str) -> int | None:
        assert isinstance(self.members, Members)
        return self.members.ranks.get(uid)

    def member(self, uid: str) -> Member | None:
        rank = self.rank(uid)
        return None if rank is None else self.members[rank]

    def successor(self, **changes: Any) -> RoundRecord:
        """This record with `changes` and the next number; a long member list that stays is referred to."""
        members_at = 0
        if changes.get("members", self.members) == self.members and len(self.members) > MOST_REPEATED:
            changes["members"] = self.members
            members_at = self.members_at or self.number
        return replace(self, number=self.number + 1, members_at=members_at, **changes)


def _unpack_members(text: str) -> Any:
    from base64 import b85decode

    unpacker = zlib.decompressobj()
    unpacked = unpacker.decompress(b85decode(text[:_MOST_PACKED]), _MOST_PACKED)
    if unpacker.unconsumed_tail or not unpacker.eof:
        raise ValueError(f"its members are cut off, or take more than {_MOST_PACKED} bytes")
    return json.loads(unpacked)


def members_elsewhere(value: Mapping[str, Any]) -> int:
    """The number of the record that has the member list of the one whose JSON this is; 0: it has its own."""
    found = value.get("members")
    return found if isinstance(found, int) and not isinstance(found, bool) else 0


def decode_record(
    number: int, value: Mapping[str, Any], *, run_id: str, known: RoundRecord | None = None
) -> RoundRecord:
    """A record from the log; `known` has the same member list, where it refers to another (`members_elsewhere`)."""

    try:
        if value["v"] != codec.VERSION:
            raise RendezvousStateError(run_id=run_id, number=number, why=f"of format version {value['v']!r}")
        members, at = value["members"], members_elsewhere(value)
        if at and (known is None or at != (known.members_at or known.number)):
            raise ValueError(f"its members are those of record {at}")
        plain = () if at else _unpack_members(members) if isinstance(members, str) else members
        record = codec.from_json(RoundRecord, value, number=number, members=plain, members_at=at)
        return record if known is None or not at else replace(record, members=known.members)
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError, zlib.error) as error:
        raise RendezvousStateError(run_id=run_id, number=number, why=f"unreadable: {error!r}") from None


KILLED = "killed:"
"""How the fingerprint of a kill from outside begins."""


class NodeFailure(Struct, frozen=True, kw_only=True, rename={"fingerprint": "fp", "failure_class": "class"}):
    """One node's failures in a round: enough to decide, not the evidence."""

    node: int
    fingerprint: str
    """The node's own root candidate; empty where all of them are symptoms."""
    failure_class: str
    """``root``, ``hang``, ``symptom`` or ``infrastructure``: the strongest among the node's failures."""
    retryable: bool
    message: str
    step: int = -1
    """The furthest step that a worker of this node had reported, -1 for none."""
    counted_steps: int = -1
    """How many steps of the optimizer a worker here had done in the round, where they report none; -1: not known."""
    seconds: float = 0.0
    hang: HangMark | None = None
    """The worker here that is furthest behind of those that hang."""
    alike: int = 0
    """How many workers here failed in the way of `fingerprint`, where that may be the node's."""
    waited: float = 0.0
    """Seconds for which the workers of the other nodes were let go on after that."""
    clock: int = -1
    """The coordinator's node, by whose clock since its boot the times below are; -1: not known."""
    ended_ns: int = 0
    """When the end of the one that `message` names was seen."""
    printed_ns: int = 0
    """When its exception was printed; 0: not known, or it has none."""
    raised: bool = False
    lost_connection: bool = False

    @property
    def is_kill(self) -> bool:
        """A signal from outside ended the worker, as far as is known."""
        return not self.fingerprint or self.fingerprint.startswith(KILLED)


class RoundEvent(str, Enum):
    TAKE_OVER = "take over"
    """A new coordinator; nothing else changes."""
    FREEZE = "freeze"
    CONFIRM = "confirm"
    REOPEN = "reopen"
    """A member failed, was lost, or a node may come in: the next round."""
    ANNOUNCE = "announce"
    """Another number of nodes waits, or a node that never came is given up."""
    ASK = "ask"
    """A node has fallen silent on the network and is asked through the files, or has answered."""
    HEARD = "heard"
    """An agent heard a signal that may mean the job's end: the supervisor asks Slurm what it stands for."""
    NOTICE = "notice"
    """The job is going to be ended: the first participant that learns of it writes that."""
    AGREE = "agree"
    """The step after which all workers save, where there is a notice."""
    CLOSE = "close"


_KEEP_STATUS = (RoundEvent.TAKE_OVER, RoundEvent.ASK, RoundEvent.HEARD, RoundEvent.NOTICE)
_TABLE: dict[Status, dict[RoundEvent, Status]] = {
    Status.JOINABLE: {
        **dict.fromkeys((*_KEEP_STATUS, RoundEvent.ANNOUNCE), Status.JOINABLE),
        RoundEvent.FREEZE: Status.FROZEN,
        RoundEvent.CLOSE: Status.CLOSED,
    },
    Status.FROZEN: {
        **dict.fromkeys(_KEEP_STATUS, Status.FROZEN),
        RoundEvent.CONFIRM: Status.FINAL,
        RoundEvent.REOPEN: Status.JOINABLE,
        RoundEvent.CLOSE: Status.CLOSED,
    },
    Status.FINAL: {
        **dict.fromkeys((*_KEEP_STATUS, RoundEvent.ANNOUNCE, RoundEvent.AGREE), Status.FINAL),
        RoundEvent.REOPEN: Status.JOINABLE,
        RoundEvent.CLOSE: Status.CLOSED,
    },
    Status.CLOSED: {},
}
TRANSITIONS = MappingProxyType({status: MappingProxyType(row) for status, row in _TABLE.items()})


def next_status(status: Status, event: RoundEvent) -> Status:
    try:
        return TRANSITIONS[status][event]
    except KeyError:
        raise IllegalTransitionError(state=status.value, event=event.value) from None
