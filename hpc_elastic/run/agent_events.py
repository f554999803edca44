"""An agent's events, each about its own node. The supervisor writes some of them too."""

from __future__ import annotations

from msgspec import UNSET, Struct, UnsetType, field

from hpc_elastic.run.events import AgentEvent, Seconds
from hpc_elastic.run.progress import Activity, Progress, RankHeartbeat, RankSockets, RunPace, SlowRank


class AgentStarted(AgentEvent, frozen=True, kw_only=True):
    """An agent's first event."""

    at_once = True

    pid: int = 0
    version: str = ""


class StartRefused(AgentEvent, frozen=True, kw_only=True):
    """The agent can't do what the run's options ask for, and ends with 2."""

    reason: str = ""


class UserCommandEnded(AgentEvent, frozen=True, kw_only=True):
    """A command of the user's own has ended; of the supervisor too."""

    command: str
    """``setup``, ``after`` or ``notify``"""
    about: str = ""
    """the notice that `--notify` was run for"""
    reason: str = ""
    """why it has failed; empty: success"""
    code: int = 0
    """negative: a signal"""
    seconds: Seconds = 0.0
    output: tuple[str, ...] = ()
    """the last lines that it printed, if it has failed"""
    log: str = ""
    """the file that has the end of what it printed"""
    set: tuple[str, ...] = ()
    """variables that `--setup` has set"""
    unset: tuple[str, ...] = ()
    """variables that it has removed"""


class RoundFinal(AgentEvent, frozen=True, kw_only=True):
    """All members agree on the round; the workers are about to be started."""

    round: int
    group_rank: int = -1
    group_world_size: int = 0
    world_size: int | None = None
    local_world_size: int = 0
    ranks: tuple[int, ...] = ()
    """global ranks here"""
    master: str = ""
    restarts_used: int = 0
    max_restarts: int = 0


class HealthCheckFailed(AgentEvent, frozen=True, kw_only=True):
    """The node leaves the run."""

    round: int
    """the last one that this node was in"""
    checks: tuple[str, ...] = ()
    """those that failed"""
    reason: str = ""


class WorkersStarted(AgentEvent, frozen=True, kw_only=True):
    """The workers of this node run."""

    round: int
    pids: tuple[int, ...] = ()
    rendezvous_seconds: float | None = None
    """until the round was final"""
    start_seconds: float | None = None
    restart_seconds: float | None = None
    """from the old workers' stop until the new ones ran; null in a first round"""
    started_fresh: str = ""
    """why some of them are not forks"""
    cpus: tuple[str, ...] = ()
    """with `--numa-binding`: the CPUs of each worker, by local rank"""


class CheckpointChosen(AgentEvent, frozen=True, kw_only=True):
    """The checkpoint that the workers of a round continue from; by the node with group rank 0."""

    round: int
    step: int | None = None
    """None: no checkpoint is there"""
    is_local: bool = False
    """it is on the nodes alone"""


class CheckpointCommitted(AgentEvent, frozen=True, kw_only=True):
    """A checkpoint of `checkpoint_dir` is on the shared filesystem, whole."""

    at_once = True

    step: int
    size: int = 0
    """bytes"""
    seconds: Seconds | None = None
    """since it was whole on this node"""
    at_end: bool = False
    """the workers had ended, or were about to"""


class CheckpointNotCommitted(AgentEvent, frozen=True, kw_only=True):
    """A checkpoint of `checkpoint_dir` is not copied, or not to its end."""

    step: int | None = None
    last_step: int | None = None
    """the last one that is committed"""
    reason: str = ""


class WorkerFailed(AgentEvent, frozen=True, kw_only=True):
    """A worker ended badly, or was stopped; its evidence is written."""

    at_once = True

    round: int
    global_rank: int = field(name="rank")
    local_rank: int = -1
    pid: int = 0
    exitcode: int = 1
    """Negative for a signal, like subprocess."""
    failure_class: str = "root"
    fingerprint: str = ""
    error_file: str = ""
    last_step: int | None = None
    ended_ns: int = 0
    """The agent noticed the end then, nanoseconds since the epoch by its host's clock: compared with other hosts only
    within the clocks' bounds. The event is written when the evidence is."""
    ended_uptime_ns: int = 0
    """The same moment by the host's clock that nobody sets (`hpc_elastic.base.clock.uptime_ns`): what failures are
    ordered by. 0: no agent saw it."""
    printed_ns: int = 0
    """The first line of its traceback came from its pipe then, by the clock of `ended_ns`; 0: not known."""
    waited: float = 0.0
    """Seconds for which the other workers of the round were let go on, since it may be its node's (`contrast`)."""
    stopped_ns: int = 0
    """Its agent began to end it then, by the same clock; 0: it had ended before."""
    is_caught: bool = False
    """Something caught its exception and printed it: its traceback does not begin where the script does."""
    message: str = ""
    """``ValueError: bad batch``, or ``Signal 9 (SIGKILL) received by PID 4711``; in the event its headline."""
    signal: str = ""
    reason: str = ""
    """Why it is of its class."""
    category: str = "worker"
    retryable: bool = True
    node_suspect: bool = False
    is_shown: bool = False
    """The job log has its traceback."""


class WorkerReplaced(AgentEvent, frozen=True, kw_only=True):
    """A fresh process takes a failed one's place, with `--restart-policy in-process`."""

    round: int
    rank: int
    local_rank: int = -1
    exitcode: int | None = None
    """of the process that ended"""
    old_pid: int = 0
    pid: int = 0
    """of the fresh one in its place"""
    reason: str = ""


class InProcessRestarted(AgentEvent, frozen=True, kw_only=True, tag="ring_restarted"):
    """The wrapped function starts again in its processes: see [restart in process](../how-to/restart-in-process.md)."""

    round: int
    iteration: int = 0
    """that begins"""
    seconds: Seconds = 0.0
    """from the fault to the function's start"""
    world_size: int = 0
    active_world_size: int = 0
    interruptions: tuple[tuple[int, str], ...] = ()
    """a rank of the iteration before, and its interruption, for each"""
    joined: tuple[int, ...] = ()
    """ranks of the iteration before whose places fresh processes took"""
    reason: str = ""
    """the interruptions in words"""


class InProcessGaveUp(AgentEvent, frozen=True, kw_only=True, tag="ring_gave_up"):
    """No further restart within the processes."""

    round: int
    rank: int = -1
    iteration: int = 0
    reason: str = ""


class PlatformFailure(AgentEvent, frozen=True, kw_only=True):
    """Something of this package failed, such as the workers' TCPStore; of the supervisor too."""

    round: int
    node: int | UnsetType = UNSET
    """if the supervisor writes it"""
    host: str | UnsetType = UNSET
    """likewise"""
    reason: str = ""


class HangFound(AgentEvent, frozen=True, kw_only=True, tag="hang"):
    """A worker here sent no heartbeat for its section's timeout."""

    at_once = True

    round: int
    limit: float = 0.0
    """seconds"""
    reason: str = ""


class HangSuspected(AgentEvent, frozen=True, kw_only=True):
    """The run seems to hang; by the agent of group rank 0."""

    round: int
    source: str = ""
    """``kernel``, or ``nccl``: by NCCL's RAS"""
    ranks: tuple[int, ...] = ()
    """those that the others wait for, if they are known"""
    reason: str = ""


class SlowRankFound(AgentEvent, frozen=True, kw_only=True):
    """The other ranks wait for this one in their collectives; by the agent of group rank 0."""

    round: int
    slow: SlowRank
    """`rank`, `node`, `seconds` after the others, `call`, `calls` of which that is the median, `share` of the time that
    is lost, `step` in seconds, `since_ns`"""


class SlowRankEnded(AgentEvent, frozen=True, kw_only=True):
    """The ranks do not wait for it any more, or the round is over."""

    round: int
    slow: SlowRank
    """as it was last"""
    seconds: float = 0.0
    """for which it was slow"""
    recovered: bool = False
    """false: the round was over"""


class RunSlowed(AgentEvent, frozen=True, kw_only=True):
    """The run is slower than in its own best hour; by the agent of group rank 0."""

    round: int
    pace: RunPace
    """`step` and `best` in seconds a step, `since_ns`"""


class RunSlowEnded(AgentEvent, frozen=True, kw_only=True):
    """The run is as fast as before, or the round is over."""

    round: int
    pace: RunPace
    """as it was last"""
    seconds: float = 0.0
    """for which it was slow"""


class RankStack(Struct, frozen=True, kw_only=True):
    """Ranks whose main threads had the same stack."""

    ranks: tuple[int, ...] = ()
    stack: tuple[str, ...] = ()


class SharedThreadStack(Struct, frozen=True, kw_only=True):
    """Ranks that had a thread of this name with the same stack."""

    ranks: tuple[int, ...] = ()
    name: str = ""
    stack: tuple[str, ...] = ()


class RankState(Struct, frozen=True, kw_only=True):
    """The kernel's state of a rank without a stack."""

    rank: int
    state: str = ""


class StacksTaken(AgentEvent, frozen=True, kw_only=True):
    """The stacks of the workers here, after a hang or if only symptoms were known."""

    round: int
    groups: tuple[RankStack, ...] = ()
    """`ranks`, `stack` of their main thread, the most recent call last"""
    threads: tuple[SharedThreadStack, ...] = ()
    """`ranks`, `name`, `stack` of the others"""
    silent: tuple[int, ...] = ()
    """ranks without a stack"""
    states: tuple[RankState, ...] = ()
    """`rank`, `state`: the kernel's state of those"""
    beats: tuple[RankHeartbeat, ...] = ()
    """`rank`, `local_rank`, `step`, `section`, `age`, `count` of each worker's heartbeats"""


class RanksObserved(AgentEvent, frozen=True, kw_only=True):
    """The activity of each rank here when the round broke with symptoms alone, or a hang."""

    round: int
    ranks: tuple[Activity, ...] = ()
    """`rank`, `doing`, `call`, `at` (the innermost frame of the user's code), `line` (of the source), `failed`; of its
    collective, by its messages: `sequence`, `operation`, `peer_operation`, `names`, `key`, `clients`, `sizes`, `peer`
    (the lost rank's address); `flight`: the end of its flight recorder's dump"""
    network: str = ""
    """equal where the same loopback address means the same"""
    sockets: tuple[RankSockets, ...] = ()
    """`rank`, `ends` (the addresses of its TCP sockets, each with the ports)"""


class ClockCompared(AgentEvent, frozen=True, kw_only=True, tag="clock_offset"):
    """How far this node's clock is ahead of the coordinator's: see [clocks](#clocks)."""

    reference: int
    """node index of the coordinator"""
    offset_ns: int
    bound_ns: int
    uptime_ns: int
    wall_ns: int


class WorkersStopping(AgentEvent, frozen=True, kw_only=True):
    """The workers here are being stopped."""

    round: int
    reason: str = ""


class OwnEnd(Struct, frozen=True, kw_only=True):
    """The end of a worker that the agent's signal did not end."""

    rank: int
    exitcode: int
    ended_ns: int
    ended_uptime_ns: int = 0
    stopped: bool = False
    logged: str = ""


class WorkersStopped(AgentEvent, frozen=True, kw_only=True):
    """No worker of this node is left."""

    round: int
    seconds: Seconds = 0.0
    killed: int = 0
    """how many needed SIGKILL"""
    left: tuple[int, ...] = ()
    """pids that could not be ended"""
    orphans: tuple[str, ...] = ()
    """name and pid of processes that outlived a worker, and were ended"""
    ends: tuple[OwnEnd, ...] = ()
    """`rank`, `exitcode`, `ended_ns`, `ended_uptime_ns`, `stopped` (workers were being ended by then), `logged` (the
    exception that it had logged before it ended with 0) of each worker that the agent's signal did not end"""
    progress: Progress | None = None
    """`sections` (those that workers here were in), `first_step`, `first_ns`, `step`, `step_ns`, `checkpoint_seconds`,
    `checkpoints`, `longest_step`, `redone_seconds`: by the worker here that got furthest"""


class WorkersSucceeded(AgentEvent, frozen=True, kw_only=True):
    """All workers of this node ended with 0."""

    round: int


class AgentEnded(AgentEvent, frozen=True, kw_only=True):
    """An agent's last event."""

    reason: str = ""
    code: int | None = None


class AgentFailed(AgentEvent, frozen=True, kw_only=True):
    """The agent itself failed (out of memory or descriptors, a defect); its guardian ends its workers, and another
    agent is started."""

    error: str = ""
    where: str = ""


class StreamLoss(Struct, frozen=True, kw_only=True):
    """The loss of one stream in an episode, in bytes that the worker printed."""

    round: int | None = None
    rank: int
    stream: str = ""
    """``stdout`` or ``stderr``."""
    not_in_file: int = 0
    not_in_job_log: int = 0


class OutputLost(AgentEvent, frozen=True, kw_only=True):
    """Output of workers was lost; written 10 s after it, every 10 minutes, and at the end."""

    reason: str = ""
    not_in_files: int = 0
    """bytes"""
    not_in_job_log: int = 0
    """bytes"""
    streams: tuple[StreamLoss, ...] = ()
    """`round`, `rank`, `stream`, `not_in_file`, `not_in_job_log` of each, the largest first"""


class FilesystemRefused(AgentEvent, frozen=True, kw_only=True):
    """The shared filesystem refused this process, or was full, for more than a second."""

    error: str = ""
    path: str = ""
    """what was refused first"""
    since_ns: int | None = None
    seconds: Seconds = 0.0
    over: bool = True
    """false: it lasted to the end"""
