"""What a node's agent is made of: `agent.main` puts it together, `node_agent.NodeAgent` works with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet

from msgspec import Struct, field

from hpc_elastic.agent.ending import CrashGuard
from hpc_elastic.agent.fork_server_states import NoForkServer
from hpc_elastic.agent.hang_detector import HangDetector, no_detector
from hpc_elastic.agent.health_checks import HealthChecks, no_health_checks
from hpc_elastic.agent.heartbeat_watch import HeartbeatWatch, silent_watch
from hpc_elastic.agent.metrics import RoundFigures
from hpc_elastic.agent.restart_group import NoRestartGroup, RestartGroupWatch
from hpc_elastic.agent.setup import NoSetup
from hpc_elastic.agent.store_server import StoreServer
from hpc_elastic.agent.worker_evidence import Place
from hpc_elastic.base.clock import Clock
from hpc_elastic.base.file_executor import FileExecutor
from hpc_elastic.output.pump import LogPump
from hpc_elastic.rendezvous.coordination import Coordination
from hpc_elastic.rendezvous.peers import NodeInfo
from hpc_elastic.run.attempt import AttemptInfo
from hpc_elastic.run.events import EventLog
from hpc_elastic.run.option_values import Std
from hpc_elastic.run.spec import RunSpec
from hpc_elastic.store.notifier import Notifier
from hpc_elastic.workers.linux import SignalQueue
from hpc_elastic.workers.spawn import Inherited


class AgentContext(Struct, frozen=True, kw_only=True):
    """The parts of an agent, put together by `agent.main`."""

    spec: RunSpec
    attempt: AttemptInfo
    place: Place
    info: NodeInfo
    tag: str
    run_dir: str
    environ: Mapping[str, str]
    inherited: Inherited
    clock: Clock
    coordination: Coordination
    notifier: Notifier | None
    pump: LogPump
    store_server: StoreServer
    torch_available: Callable[[], bool]
    events: EventLog
    signals: SignalQueue
    shown: Callable[[int, int], Std]
    """Local and global rank → what of its output goes to the job log."""
    helpers: Callable[[], AbstractSet[int]]
    """Pids of the agent's own helpers, which are no workers."""
    were_workers_ended: Callable[[], bool] = lambda: False
    """Whether the guardian has ended the workers, since this agent was stopped, after the last such call."""
    files: FileExecutor = field(default_factory=FileExecutor)
    """Does what the loop needs done with files: the loop itself touches none."""
    cpus: Sequence[frozenset[int]] = ()
    """Of each worker, by local rank; none: all have those of the agent."""
    watch: HeartbeatWatch = field(default_factory=silent_watch)
    """Reads the workers' heartbeats."""
    hangs: HangDetector = field(default_factory=no_detector)
    """Whether the workers stand still."""
    health: HealthChecks = field(default_factory=no_health_checks)
    """Checks whether this node may join a round."""
    setup: NoSetup = field(default_factory=NoSetup)
    """The user's own, before the first workers and after the last ones."""
    restart_group: RestartGroupWatch = field(default_factory=NoRestartGroup)
    """Follows in-process restarts, and replaces single workers."""
    fork_server: NoForkServer = field(default_factory=NoForkServer)
    """What the workers are forks of, where they are."""
    crash: CrashGuard = field(default_factory=CrashGuard)
    """Notices a thread of the agent's that fails."""
    figures: RoundFigures | None = None
    """Measures rounds; None: to no sink."""
