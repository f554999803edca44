"""The events of what decides: the coordinator, about rounds and nodes; the supervisor, about attempts and jobs."""

from __future__ import annotations

from hpc_elastic.run.events import CoordinatorEvent, Seconds, SupervisorEvent


class RoundOpened(CoordinatorEvent, frozen=True, kw_only=True):
    """Nodes may join the round."""

    reason: str = ""
    """why the one before ended"""
    restarts_used: int | None = None


class RoundFrozen(CoordinatorEvent, frozen=True, kw_only=True):
    """The members of the round are chosen."""

    reason: str = ""
    """the decision about the failures of the round before"""
    restarts_used: int | None = None
    nodes: tuple[int, ...] = ()
    explained: tuple[int, ...] = ()
    """nodes whose failures in the round before follow from the loss of a member"""


class NodeLost(CoordinatorEvent, frozen=True, kw_only=True):
    """A node is taken out of the round: it was silent for too long."""

    round: int
    """the one that it is taken out of"""
    node: int
    host: str = ""
    age: Seconds = 0.0
    """seconds without a heartbeat"""
    reason: str = ""


class NodeLeft(CoordinatorEvent, frozen=True, kw_only=True):
    """A node took itself out, because of a health check for instance."""

    node: int
    host: str = ""
    reason: str = ""


class SpareLost(CoordinatorEvent, frozen=True, kw_only=True):
    """A node that waited for a place had died when the run was closed."""

    node: int
    host: str = ""
    age: Seconds = 0.0
    """seconds without a heartbeat"""
    reason: str = ""


class NodeMissing(CoordinatorEvent, frozen=True, kw_only=True):
    """A node is not a member of the round."""

    round: int
    """the one that begins without it, or that waited for it until the time limit"""
    node: int
    host: str = ""
    """empty: unknown"""
    reason: str = ""


class NodeReplaced(CoordinatorEvent, frozen=True, kw_only=True):
    """A node takes the place of one that is not a member any more."""

    group_rank: int | None = None
    """the place"""
    node: int
    """the node that came"""
    host: str = ""
    reason: str = ""
    replaces_node: int = -1
    """the node whose place that was"""
    replaces_host: str = ""


class LinkLost(CoordinatorEvent, frozen=True, kw_only=True):
    """No packet of a node came through for a while, though it answered through the files; written when packets come
    through again."""

    node: int
    host: str = ""
    since_ns: int | None = None
    seconds: Seconds = 0.0
    over: bool = True
    """false: not again by the end"""
    reason: str = ""


class RunClosed(CoordinatorEvent, frozen=True, kw_only=True, tag="closed"):
    """No further round begins."""

    outcome: str
    reason: str = ""
    restarts_used: int | None = None
    explained: tuple[int, ...] = ()
    """same as in `round_frozen`"""


class AttemptStarted(SupervisorEvent, frozen=True, kw_only=True):
    """The supervisor of an attempt begins."""

    attempt: int = 0
    job_id: str | None = None
    nodes: tuple[str, ...] = ()
    """names in Slurm's order"""
    requeue_armed: bool = False
    requeue_reason: str = ""


class AgentProcessEnded(SupervisorEvent, frozen=True, kw_only=True, tag="agent_ended"):
    """The supervisor saw an agent end, or that none could be started."""

    node: int = -1
    name: str = ""
    code: int | None = None
    """as a shell sees it: 137 for SIGKILL"""
    detail: str = ""
    """the same in words, or why it never started"""
    started: bool = True
    """false: no agent could be started there"""


class AgentRelaunched(SupervisorEvent, frozen=True, kw_only=True):
    """Another agent is started on a node."""

    node: int = -1
    name: str = ""
    reason: str = ""
    """how it had ended"""


class NodeGivenUp(SupervisorEvent, frozen=True, kw_only=True):
    """No further agent is started there. Causes: `not_started` (Slurm could not start one), `could_not_run` (what was
    started ended before it was an agent, twice, or refused the options; the reason has its last line), `died` (its
    agents took part, and ended too often), `unhealthy`, `store_lost`, `refused`."""

    node: int
    name: str = ""
    cause: str = ""
    reason: str = ""


class SignalReceived(SupervisorEvent, frozen=True, kw_only=True, tag="notice"):
    """Preemption, the time limit or a person asks for the end."""

    signal: str
    sender: str = ""
    """`from pid 4021 (bash, user bob)`; empty: not known"""


class SignalDecided(SupervisorEvent, frozen=True, kw_only=True):
    """The meaning of a signal for the job: [the table](exit-codes.md#signals)."""

    call: str
    """the signal, or that the supervisor looked by itself"""
    heard_by: str = ""
    """`supervisor` or `agents alone`"""
    slurm: str = ""
    """its answer about the job"""
    meaning: str = ""
    saves: bool = False
    """whether workers may save first"""
    seconds: float = 0.0
    """until the job is ended from outside"""
    reason: str = ""


class VerdictReached(SupervisorEvent, frozen=True, kw_only=True, tag="verdict"):
    """How the attempt ended."""

    outcome: str
    reason: str = ""


class RequeueDecided(SupervisorEvent, frozen=True, kw_only=True, tag="requeue_decision"):
    """The decision whether the job continues after this attempt."""

    action: str
    """`requeue` or `end`"""
    reason: str = ""


class NodesCompared(SupervisorEvent, frozen=True, kw_only=True, tag="nodes_differ"):
    """Slurm and the run disagree about the job's nodes; empty lists: no longer."""

    taken: tuple[str, ...] = ()
    """used by the run, and not in the job any more"""
    kept: tuple[str, ...] = ()
    """lost to the run, and in the job"""
    reason: str = ""


class AttemptRequeued(SupervisorEvent, frozen=True, kw_only=True, tag="requeued"):
    """The next attempt is queued."""

    job_id: str | None = None
    """the id of the job that continues: this one, or a follow-on job"""
    reason: str = ""


class AttemptEnded(SupervisorEvent, frozen=True, kw_only=True):
    """The attempt's result is written."""

    outcome: str
    exit_code: int | None = None


class EndTakenOver(SupervisorEvent, frozen=True, kw_only=True):
    """Another node finishes the attempt for the supervisor."""

    by: str = ""
    """the agent's id"""
    reason: str = ""
