"""The record that the nodes agree on, and its form on disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from hpc_elastic.outcome import Outcome
from hpc_elastic.rendezvous.errors import RendezvousStateError

VERSION = 1

__all__ = ["FailureMemory", "Member", "NodeFailure", "NodeInfo", "Outcome", "RoundRecord", "Status"]


class Status(str, Enum):
    """Where a round stands."""

    JOINABLE = "joinable"
    """Nodes come."""
    FROZEN = "frozen"
    """The members are chosen and confirm."""
    FINAL = "final"
    """All members confirmed: ranks hold, workers run."""
    CLOSED = "closed"
    """The run's attempt is over, for good."""


@dataclass(frozen=True, slots=True)
class Member:
    """A node in a round. Position in the member list is the group rank."""

    uid: str
    node: int
    """Index in Slurm's node order."""
    local_world_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureMemory:
    """What one coordinator leaves to the next one about the failures so far."""

    fingerprint: str = ""
    """Of the last round's root cause; empty where it had none that counts."""
    times: int = 0
    """How often in a row, with no progress between."""
    step: int = -1
    """The furthest step that any worker had reported then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRecord:
    """One record of the log."""

    number: int
    """Position in the log, from 1."""
    epoch: str
    """Of the store; a record of another epoch means that the store was replaced."""
    term: int
    """Grows with each change of coordinator."""
    leader: str
    """Uid of the coordinator that wrote the record."""
    round: int
    """Index of the round in the attempt: ``TORCHELASTIC_RESTART_COUNT``."""
    status: Status
    members: tuple[Member, ...] = ()
    """While JOINABLE: the members of the last final round, in slot order; later: this round's."""
    restarts_used: int = 0
    """Rounds of this attempt that followed a worker's failure."""
    waiting: int = 0
    """Nodes that wait while the round is final."""
    lost: tuple[int, ...] = ()
    """Node indexes whose agent stopped its heartbeat, until a new agent comes from there."""
    suspects: tuple[str, ...] = ()
    """Uids that have fallen silent on the network: each rewrites its heartbeat on reading its name here, or is lost."""
    reason: str = ""
    """Why this round was opened, or the run closed."""
    master: str = ""
    """``host:port`` of the round's TCPStore; set when FINAL."""
    outcome: Outcome | None = None
    """Set when CLOSED."""
    retryable: bool = True
    """When CLOSED: whether another attempt could end otherwise."""
    memory: FailureMemory = FailureMemory()

    def to_json(self) -> dict[str, Any]:
        """The record without its number, which is its name."""
        return {
            "v": VERSION,
            "epoch": self.epoch,
            "term": self.term,
            "leader": self.leader,
            "round": self.round,
            "status": self.status.value,
            "members": [[m.uid, m.node, m.local_world_size] for m in self.members],
            "restarts": self.restarts_used,
            "waiting": self.waiting,
            "lost": list(self.lost),
            "suspects": list(self.suspects),
            "reason": self.reason,
            "master": self.master,
            "outcome": self.outcome.value if self.outcome else None,
            "retryable": self.retryable,
            "memory": [self.memory.fingerprint, self.memory.times, self.memory.step],
        }

    def member(self, uid: str) -> Member | None:
        return next((m for m in self.members if m.uid == uid), None)

    def successor(self, **changes: Any) -> RoundRecord:
        """This record with `changes` and the next number."""
        return replace(self, number=self.number + 1, **changes)


def decode_record(number: int, value: Mapping[str, Any], *, run_id: str) -> RoundRecord:
    """A record from the log.

    Raises:
        RendezvousStateError: foreign, newer, or damaged beyond the checksum.
    """
    try:
        if value["v"] != VERSION:
            raise RendezvousStateError(run_id=run_id, number=number, why=f"of format version {value['v']!r}")
        fingerprint, times, step = value["memory"]
        return RoundRecord(
            number=number,
            epoch=str(value["epoch"]),
            term=int(value["term"]),
            leader=str(value["leader"]),
            round=int(value["round"]),
            status=Status(value["status"]),
            members=tuple(Member(str(uid), int(node), int(size)) for uid, node, size in value["members"]),
            restarts_used=int(value["restarts"]),
            waiting=int(value["waiting"]),
            lost=tuple(int(node) for node in value["lost"]),
            suspects=tuple(str(uid) for uid in value["suspects"]),
            reason=str(value["reason"]),
            master=str(value["master"]),
            outcome=Outcome(value["outcome"]) if value["outcome"] else None,
            retryable=bool(value["retryable"]),
            memory=FailureMemory(fingerprint=str(fingerprint), times=int(times), step=int(step)),
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise RendezvousStateError(run_id=run_id, number=number, why=f"unreadable: {error!r}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeInfo:
    """What a node says about itself once, when its agent starts."""

    uid: str
    node: int
    host: str
    local_world_size: int
    addresses: tuple[str, ...]
    """Where its doorbell may be reached, the likeliest first."""
    port: int
    """The doorbell's."""
    spare: bool = False

    def to_json(self) -> dict[str, Any]:
        return {
            "v": VERSION,
            "node": self.node,
            "host": self.host,
            "lws": self.local_world_size,
            "addrs": list(self.addresses),
            "port": self.port,
            "spare": self.spare,
        }


def decode_node(uid: str, value: Mapping[str, Any]) -> NodeInfo | None:
    """A node's own words, or None where they make no sense."""
    try:
        return NodeInfo(
            uid=uid,
            node=int(value["node"]),
            host=str(value["host"]),
            local_world_size=int(value["lws"]),
            addresses=tuple(str(a) for a in value["addrs"]),
            port=int(value["port"]),
            spare=bool(value.get("spare", False)),
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFailure:
    """What one node says about the failures of its workers in a round: enough to decide, not the evidence."""

    node: int
    fingerprint: str
    """Of the node's own root candidate; empty where all of them are symptoms."""
    failure_class: str
    """``root``, ``symptom`` or ``infrastructure``: the strongest among the node's failures."""
    retryable: bool
    message: str
    step: int = -1
    """The furthest step that a worker of this node had reported, -1 for none."""
    seconds: float = 0.0
    """How long this node's workers had run."""

    def to_json(self) -> dict[str, Any]:
        return {
            "node": self.node,
            "fp": self.fingerprint,
            "class": self.failure_class,
            "retryable": self.retryable,
            "message": self.message[:300],
            "step": self.step,
            "seconds": round(self.seconds, 3),
        }


def decode_failure(value: Mapping[str, Any]) -> NodeFailure | None:
    try:
        return NodeFailure(
            node=int(value["node"]),
            fingerprint=str(value["fp"]),
            failure_class=str(value["class"]),
            retryable=bool(value["retryable"]),
            message=str(value["message"]),
            step=int(value["step"]),
            seconds=float(value["seconds"]),
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
