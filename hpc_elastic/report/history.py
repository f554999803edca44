"""A run's history as the report needs it: attempts of rounds of failures. Values only; `collect` fills them from disk.

Times are nanoseconds since the epoch by the wall clock of the host that the docstring names, and are shown, not
subtracted across hosts; durations were measured on one host. Incidents did not end an attempt: outages, lost output,
failed commands, restarts within the processes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import Enum
from typing import Any, NamedTuple, TypeVar

from msgspec import Struct, field
from msgspec.structs import replace

from hpc_elastic.base.text import plural
from hpc_elastic.failures.worker_failure import WorkerFailure
from hpc_elastic.report.clocks import NO_CLOCKS, SUPERVISOR, Clocks
from hpc_elastic.run.agent_events import (
    CheckpointCommitted,
    CheckpointNotCommitted,
    FilesystemRefused,
    RanksObserved,
    RunSlowEnded,
    SlowRankEnded,
    StreamLoss,
)
from hpc_elastic.run.control_events import LinkLost
from hpc_elastic.run.event_reader import EventLine
from hpc_elastic.run.events import RunEvent
from hpc_elastic.run.node_score import NodeScore
from hpc_elastic.run.paths import REFUSED_CODE
from hpc_elastic.run.progress import STEPS, Activity, Progress, ProgressSource

_SAME_MOMENT_NS = 2_000_000_000
_SLACK_NS = 10_000_000_000
"""So far may two hosts' clocks be apart, and so long may it take until an agent's end is seen."""
_WORDS = 300
_Incident = TypeVar("_Incident", bound=Struct)


class OutageKind(str, Enum):
    FILESYSTEM = "filesystem"
    LINK = "link"
    """No packet of a node came through; the node answered through the files."""


class Outage(Struct, frozen=True, kw_only=True):
    kind: OutageKind
    node: int
    host: str
    seconds: float
    since_ns: int
    """The clock of `observer`'s host."""
    observer: int
    over: bool = True
    error: str = ""
    path: str = ""


def read_outage(line: EventLine, event: FilesystemRefused | LinkLost) -> Outage:
    kind = OutageKind.LINK if isinstance(event, LinkLost) else OutageKind.FILESYSTEM
    since = line.written_ns - int(event.seconds * 1e9) if event.since_ns is None else event.since_ns
    texts = {name: getattr(event, name, "")[:_WORDS] for name in ("error", "path")}
    found = read_incident(Outage, line, event, kind=kind, since_ns=since, observer=SUPERVISOR, **texts)
    return replace(found, observer=found.node if line.by is None else line.by)


def attributed(outages: Sequence[Outage], nodes: Sequence[str]) -> tuple[Outage, ...]:
    """The outages in order, with each link's put down to the node whose link it was.

    A node that hears none of its peers any more has lost its own link: they have not all lost theirs at one moment.
    """
    links = [one for one in outages if one.kind is OutageKind.LINK]
    found = [one for one in outages if one.kind is not OutageKind.LINK]
    while links:
        first = links[0]
        near = (one for one in links if abs(one.since_ns - first.since_ns) <= _SAME_MOMENT_NS)
        same = [one for one in near if one.observer == first.observer]
        links = [one for one in links if one not in same]
        silent = {one.node for one in same}
        if len(silent) > 1 and silent >= set(range(len(nodes))) - {first.observer} and 0 <= first.observer < len(nodes):
            longest = max(same, key=lambda one: one.seconds)
            same = [replace(longest, node=first.observer, host=nodes[first.observer])]
        found += same
    return tuple(sorted(found, key=lambda one: (one.since_ns, one.node)))


def refused_hosts(outages: Collection[Outage], *, at_ns: int | None = None) -> tuple[str, ...]:
    """The hosts, by their short names, that the filesystem refused; `at_ns`: at about that time, as the clocks are."""
    refused = [one for one in outages if one.kind is OutageKind.FILESYSTEM and one.host]
    if at_ns is not None:
        refused = [one for one in refused if -_SLACK_NS <= at_ns - one.since_ns <= round(one.seconds * 1e9) + _SLACK_NS]
    return tuple(dict.fromkeys(one.host.partition(".")[0] for one in refused))


class OutputLoss(Struct, frozen=True, kw_only=True):
    host: str = ""
    node: int = 0
    reason: str = ""
    not_in_files: int = 0
    not_in_job_log: int = 0
    reported_ns: int = field(default=0, name="told_ns")
    streams: tuple[StreamLoss, ...] = ()


class CommandFailure(Struct, frozen=True, kw_only=True):
    command: str
    host: str
    node: int
    reason: str
    code: int
    seconds: float
    reported_ns: int = field(name="told_ns")
    about: str = ""
    output: tuple[str, ...] = ()
    log: str = ""


class InProcessRestart(Struct, frozen=True, kw_only=True):
    reported_ns: int = field(name="told_ns")
    node: int
    iteration: int = 0
    """The one that began; where a process gave up, the one that it was in."""
    seconds: float = 0.0
    world_size: int = 0
    interruptions: tuple[tuple[int, str], ...] = ()
    """Rank in the iteration before, and what happened there."""
    joined: tuple[int, ...] = ()
    """Ranks in the iteration before whose places fresh processes took."""
    gave_up: str = ""
    """Why no further restart was tried; empty: one was."""


def read_incident(record: type[_Incident], line: EventLine, event: RunEvent, **known: Any) -> _Incident:
    """The record of an event, whose fields of the same name it takes; `known` are those that differ."""
    node = SUPERVISOR if line.node is None or line.role == "supervisor" else line.node
    found = {"host": line.host, "node": node, "reported_ns": line.written_ns}
    names = record.__struct_fields__
    found |= {name: getattr(event, name) for name in names if hasattr(event, name)}
    return record(**{name: value for name, value in {**found, **known}.items() if name in names})


START_REFUSED = "start_refused"
"""`NodeLoss.cause` of a node whose agent could not do what the run's options ask for."""
_UNABLE = {
    "could_not_run": "could not run the agent: {reason}",
    START_REFUSED: "refused to start: {reason}",
    "not_started": "got no agent: {reason}",
    "never_joined": "never joined the run: {reason}",
}


class NodeLoss(Struct, frozen=True, kw_only=True):
    """A node that was taken out of a round because nothing was heard from it any more."""

    node: int
    host: str
    round: int = -1
    seen_ns: int
    """When the coordinator took it out, by the coordinator's clock."""
    age: float = 0.0
    detail: str = ""
    agent_only: bool = False
    left: str = ""
    """Why its agent took it out; then `seen_ns` is by that node's own clock. Empty: it did not."""
    broke: str = ""
    """The failure of this package's own there, by that node's own clock: the node went on. Empty: there was none."""
    cause: str = ""
    """Why no further agent was started there: a value of `outcome.GivenUp`; ``never_joined`` where nothing was heard of
    the one that was; or `START_REFUSED`. Then `round` is -1, and `seen_ns` by the supervisor's clock."""
    reason: str = ""
    """The `cause` in detail: ``exit code 127``, or the option that the agent could not follow."""
    observer: int | None = None
    """The node by whose clock `seen_ns` is, or `clocks.SUPERVISOR`; None: not known."""

    @property
    def unable(self) -> str:
        """``could not run the agent: exit code 127``; empty: an agent of the node took part, and a round has it."""
        return _UNABLE.get(self.cause, "").format(reason=self.reason)

    @property
    def refusal(self) -> str:
        return self.reason if self.cause == START_REFUSED else ""

    @property
    def summary(self) -> str:
        if self.broke:
            return f"{self.broke} (on {self.host})"
        if self.left:
            return f"{self.host} left: {self.left}"
        if self.unable:
            return f"node {self.host} {self.unable}"
        return f"the agent on {self.host} died" if self.agent_only else f"node {self.host} was lost"

    @property
    def whose_clock(self) -> str:
        if self.left or self.broke:
            return f"{self.host}'s clock"
        return "the supervisor's clock" if self.unable else "last heartbeat, by its observer's clock"

    @property
    def gone_ns(self) -> int:
        return self.seen_ns - int(self.age * 1e9)


class RoundNode(NamedTuple):
    """One node's part in a round. A tuple, because a long run of a thousand nodes has hundreds of thousands."""

    node: int
    host: str
    ranks: tuple[int, ...] = ()
    group_rank: int = -1


class Replacement(Struct, frozen=True, kw_only=True):
    node: int
    host: str
    replaces_node: int
    replaces_host: str
    group_rank: int


class NodeTimes(Struct, gc=False):
    """One node's part in a round, as its agent reported it by its own wall clock; None: it did not."""

    round: int
    node: int
    final_ns: int | None = None
    """The round was agreed upon, and its workers were about to be started."""
    started_ns: int | None = None
    stopping_ns: int | None = None
    ended_ns: int | None = None
    succeeded: bool = False


class AgentTimes(Struct):
    node: int
    host: str
    started_ns: list[int] = field(default_factory=list)
    ended_ns: list[int] = field(default_factory=list)


class WorkerEnd(NamedTuple):
    """The end of a worker that the agent's own signal did not end: its exit code 0 is a fact, too."""

    rank: int
    node: int
    exitcode: int
    """Negative for a signal, like subprocess."""
    ended_ns: int
    """When its agent saw it, by the node's wall clock."""
    ended_uptime_ns: int
    """The same moment by the node's clock since its boot."""
    stopped: bool = False
    """The agent had begun to end the group before; the worker ended by itself all the same, with 0 say."""
    logged: str = ""
    """The exception that it had logged just before it ended with 0."""


class RankStatus(Struct, frozen=True, kw_only=True):
    rank: int
    node: int
    step: int | None
    section: str
    age: float
    reported_ns: int = field(name="told_ns")
    counted_steps: int | None = None
    """Steps of its optimizer in this round, where the script reports none."""

    @property
    def at(self) -> str:
        """``step 12``, or ``12 steps of this round`` where they were counted."""
        if self.step is not None:
            return f"step {self.step}"
        return "no step" if self.counted_steps is None else f"{plural(self.counted_steps, 'step')} of this round"


class StackGroup(Struct, frozen=True, kw_only=True):
    """Ranks whose main thread stood at the same place when the round was ended because of a hang."""

    ranks: tuple[int, ...]
    stack: tuple[str, ...]
    """``/path/train.py:44 step``, the most recent call last; empty: none could be had."""
    name: str = ""
    state: str = ""
    """The kernel's view where there is no stack: ``D (disk sleep) in rpc_wait_bit_killable``."""


class RestartRecord(Struct, frozen=True, kw_only=True):
    action: str
    """``restart``, ``continue`` (free of charge: the membership changed) or ``close``."""
    reason: str
    restarts_used: int | None = None
    max_restarts: int | None = None


class RoundHistory(Struct, kw_only=True, dict=True):
    """One round: its nodes, what failed, what was decided. Its `__dict__` keeps what was concluded from it."""

    index: int
    reason: str = ""
    started_ns: int | None = None
    """First ``round_final`` of its nodes, by that node's clock."""
    seconds: float | None = None
    world_size: int | None = None
    nodes: tuple[RoundNode, ...] = ()
    replaced: tuple[Replacement, ...] = ()
    in_process: tuple[InProcessRestart, ...] = ()
    """Restarts within its processes, by time; nothing of the round ended by them."""
    fresh_starts: tuple[tuple[str, str], ...] = ()
    """(host whose workers were started fresh though there is a fork server, why)."""
    failures: tuple[WorkerFailure, ...] = ()
    ends: tuple[WorkerEnd, ...] = ()
    """Those of a broken round that ended otherwise than by the agent's signal, by rank."""
    lost_nodes: tuple[NodeLoss, ...] = ()
    own_failures: tuple[NodeLoss, ...] = ()
    """Failures of this package's own (`NodeLoss.broke`); no node was lost by them."""
    times: tuple[NodeTimes, ...] = ()
    stopping_reasons: tuple[str, ...] = ()
    decision: RestartRecord | None = None
    progress: dict[int, Progress] = field(default_factory=dict)
    """Node → its agent's last report of what its workers have done."""
    rank_statuses: tuple[RankStatus, ...] = ()
    activities: tuple[Activity, ...] = ()
    """Each rank's, by rank, where the nodes knew nothing but symptoms, or a hang."""
    sockets: tuple[RanksObserved, ...] = ()
    """Each node's, where the round broke by symptoms alone."""
    stacks: tuple[StackGroup, ...] = ()
    threads: tuple[StackGroup, ...] = ()
    suspicion: str = ""
    suspected_ns: int = 0
    """When, by the clock of the node of group rank 0."""
    slow_ranks: tuple[SlowRankEnded, ...] = ()
    slow_run: tuple[RunSlowEnded, ...] = ()
    """Ranks that the others waited for, each time that one was; by when that began."""
    orphans: tuple[str, ...] = ()
    """Processes that outlived their worker, and were ended by its agent: ``n1: sh (pid 4711)``."""
    clocks: Clocks = NO_CLOCKS
    """The attempt's: what the times of different nodes are worth."""

    @property
    def broken(self) -> bool:
        return bool(self.failures or self.lost_nodes or self.own_failures)

    @property
    def succeeded(self) -> bool:
        succeeded = {one.node for one in self.times if one.succeeded}
        return bool(self.nodes) and all(node.node in succeeded for node in self.nodes)


class FailedAgent(Struct, kw_only=True):
    """An agent that ended otherwise than well, as the supervisor saw it."""

    node: int
    name: str
    code: int | None
    """None: its step ended, and its own exit code is not known."""
    seen_ns: int
    detail: str = ""
    why: str = ""
    """Its own report of a failure: ``MemoryError (node_agent.py:12 in run)``."""


class AttemptHistory(Struct, kw_only=True):
    number: int
    job_id: str = ""
    nodes: tuple[str, ...] = ()
    started_ns: int | None = None
    """The batch host's clock."""
    ended_ns: int | None = None
    outcome: str = ""
    """A value of `hpc_elastic.run.paths.Outcome`; empty where no end was recorded."""
    reason: str = ""
    exit_code: int | None = None
    decision: str = ""
    """``requeue: …``, ``end: …``."""
    rounds: tuple[RoundHistory, ...] = ()
    agent_ends: tuple[FailedAgent, ...] = ()
    relaunched: tuple[str, ...] = ()
    """Names of the nodes on which another agent ran, once for each time that one was started there."""
    unstarted: tuple[tuple[str, str], ...] = ()
    given_up: tuple[NodeLoss, ...] = ()
    versions: tuple[tuple[str, str], ...] = ()
    notices: tuple[str, ...] = ()
    meaning: str = ""
    """The last signal's: a value of `launch.site.JobCondition`; empty: none came."""
    outages: tuple[Outage, ...] = ()
    output_lost: tuple[OutputLoss, ...] = ()
    commands: tuple[CommandFailure, ...] = ()
    committed: CheckpointCommitted | None = None
    not_committed: CheckpointNotCommitted | None = None
    """The last one that is not there, where it is a later one, or none could be written."""
    problems: tuple[str, ...] = ()
    agents: tuple[AgentTimes, ...] = ()
    clocks: Clocks = NO_CLOCKS

    @property
    def seconds(self) -> float | None:
        return (self.ended_ns - self.started_ns) / 1e9 if self.started_ns and self.ended_ns else None

    @property
    def unable(self) -> tuple[NodeLoss, ...]:
        return tuple(loss for loss in self.given_up if loss.unable)

    @property
    def without_files(self) -> frozenset[int]:
        """The nodes whose agent gave up since the run directory's filesystem refused it, or did not answer."""
        return frozenset(end.node for end in self.agent_ends if end.code == REFUSED_CODE)

    @property
    def filesystem_failed(self) -> bool:
        """The filesystem refused several nodes, or all: the nodes were well."""
        ends = [end for end in self.agent_ends if end.code == REFUSED_CODE]
        names = {end.name.partition(".")[0] for end in ends}
        for end in ends:
            names |= set(refused_hosts(self.outages, at_ns=end.seen_ns))
        return len(names) > 1 or (bool(names) and len(self.nodes) == 1)


class RunHistory(Struct, frozen=True, kw_only=True):
    run_id: str
    run_dir: str
    name: str
    """torchrun would call it so: the script."""
    max_requeues: int | None = None
    command: str = ""
    section_timeouts: tuple[str, ...] = ()
    step_timeout: float | None = None
    """Seconds without a heartbeat in section ``step`` that make a hang; None: none are given, or they are learned."""
    could_fork: bool = False
    """``--start-method forkserver`` was possible, and not given."""
    attempts: tuple[AttemptHistory, ...] = ()
    never_began: str = ""
    """Why Slurm ended the job before the first attempt."""
    bad_nodes: tuple[NodeScore, ...] = ()
    """They are as known when an attempt ended last; the worst first."""
    excluded: tuple[str, ...] = ()
    """Those of them that the next attempt does without, or the one that was begun since."""
    problems: tuple[str, ...] = ()

    @property
    def progress(self) -> ProgressSource:
        """The source of the run's progress. Collectives before a first step are nothing where steps are known."""
        rounds = (item for attempt in self.attempts for item in attempt.rounds)
        found = {one.source for item in rounds for one in item.progress.values()}
        order = (*STEPS, ProgressSource.COLLECTIVES, ProgressSource.KERNEL)
        return next((source for source in order if source in found), ProgressSource.UNKNOWN)
