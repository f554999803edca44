"""The supervisor's events: its actions for an attempt, and its decisions about the job."""

from __future__ import annotations

from msgspec import Struct

from hpc_elastic.run.events import Seconds, SupervisorEvent


class AttemptStarted(SupervisorEvent, frozen=True, kw_only=True):
    """The supervisor of an attempt begins."""

    attempt: int = 0
    job_id: str | None = None
    nodes: tuple[str, ...] = ()
    """names in Slurm's order"""
    requeue_armed: bool = False
    requeue_reason: str = ""


class AttemptSuperseded(SupervisorEvent, frozen=True, kw_only=True):
    """An earlier attempt of this run was ended by this one.

    See [two attempts at once](../explanation/when-something-dies.md#two-attempts-at-once).
    """

    superseded: int
    """the earlier attempt's number"""
    ended: tuple[str, ...] = ()
    """its nodes whose agents have ended"""
    silent: tuple[str, ...] = ()
    """its other nodes"""
    seconds: Seconds = 0.0
    """waited for that"""
    reason: str = ""
    """the rule by which it was safe to continue"""


class AgentsLaunched(SupervisorEvent, frozen=True, kw_only=True):
    """srun starts the agents."""

    nodes: int
    """how many"""


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


class SparedNode(Struct, frozen=True, kw_only=True):
    node: str
    reason: str = ""


class NodesJudged(SupervisorEvent, frozen=True, kw_only=True):
    """The judgement of the attempt's nodes."""

    excluded: tuple[str, ...] = ()
    """nodes that the next attempt does without"""
    reason: str = ""
    """what they did"""
    spared: tuple[SparedNode, ...] = ()
    """`node`, `reason`: bad ones that stay"""


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
