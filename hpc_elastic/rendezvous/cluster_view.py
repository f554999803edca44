"""What a coordinator sees when it decides."""

from __future__ import annotations

from collections.abc import Mapping

from hpc_elastic.light_dataclasses import dataclass, field
from hpc_elastic.rendezvous.notice import NoticeStatus
from hpc_elastic.rendezvous.state import NodeFailure, NodeInfo, RoundRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterView:
    """What the coordinator sees at one moment."""

    record: RoundRecord
    joined: Mapping[str, NodeInfo]
    """Claims on this round while it is joinable, on the next one while it is frozen or final."""
    acked: Mapping[str, str]
    """Confirmations of this round; the value is the TCPStore's ``host:port`` from the first slot, else empty."""
    failures: Mapping[str, NodeFailure]
    """Of the round before while this one is joinable, else of this one."""
    done: frozenset[str]
    """Members whose workers have all ended with 0."""
    leaving: Mapping[str, str]
    """Members that take themselves out, with the reason."""
    gone: frozenset[int]
    """Nodes for which the launcher will bring no further agent."""
    dead: frozenset[str]
    """Those whose heartbeat has stopped."""
    silent: frozenset[str]
    """Those that were heard on the network before, and are not any more: to be asked through the files."""
    answered: frozenset[str]
    """Suspects that have rewritten their heartbeat since, or were heard again."""
    names: Mapping[int, str]
    """Node index → name, of the nodes that have said who they are."""
    since_status: float
    """Seconds since this coordinator first saw this round in this status."""
    since_lost: float
    """Seconds since this coordinator last found a node missing; `since_status` where none was."""
    is_unsupervised: bool = False
    """Whether the supervisor's heartbeat has stopped too: nobody starts an agent on a lost node any more. Looked for
    where a node is lost and the round is joinable."""
    since_waiting: float = 0.0
    """Seconds for which nodes have waited while the round is final."""
    since_saved: float = float("inf")
    """Seconds since a checkpoint was complete; infinite where no member has told of one."""
    is_saving: bool = False
    """Whether a member is writing one."""
    noted: Mapping[str, NoticeStatus] = field(default_factory=dict)
    """Where there is a notice: where members' workers stand."""
    kept: frozenset[str] = frozenset()
    """Members whose workers have saved because of it, or do not follow it."""
    since_notice: float = 0.0
    """Seconds since this coordinator first saw it. Time in which this process was held up counts: the job's goes on."""
