"""The features of an agent beside its loop, its workers and its policy: parts behind one interface, in one list.

A new feature is a module with a `Part`, and a line in `PARTS`. The module of a part is imported where its run needs it:
at the agent's start, so that a mount that hangs later keeps nothing from working.
"""

from __future__ import annotations

import json
import logging
import socket
import subprocess
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from hpc_elastic.base import codec
from hpc_elastic.base.files import make_private_dir
from hpc_elastic.failures.ranking import FailureClass
from hpc_elastic.run.option_values import StartMethod
from hpc_elastic.run.paths import AttemptPaths, RankPaths
from hpc_elastic.run.progress import OnSlowRank
from hpc_elastic.workers.spawn import EnvironmentChange

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

    from hpc_elastic.agent.heartbeat_watch import HeartbeatWatch
    from hpc_elastic.agent.identity import AgentIdentity
    from hpc_elastic.agent.local_workers import LocalWorkers
    from hpc_elastic.agent.node_agent import NodeAgent
    from hpc_elastic.agent.store_server import StoreServer
    from hpc_elastic.base.clock import Clock
    from hpc_elastic.base.loop import FileExecutor
    from hpc_elastic.output.pump import LogPump
    from hpc_elastic.rendezvous.coordination import Coordination
    from hpc_elastic.rendezvous.membership import NodeInfo
    from hpc_elastic.rendezvous.proposals import RankLayout
    from hpc_elastic.rendezvous.state import RoundRecord
    from hpc_elastic.rendezvous.succession import NodesCutOff
    from hpc_elastic.run.events import EventLog
    from hpc_elastic.store.notifier import Notifier
    from hpc_elastic.workers.spawn import WorkerProcess

logger = logging.getLogger(__name__)

MESSAGE_LIMIT = 200_000
"""Bytes; as in `workers.fork_server`."""
END_SECONDS = 1.0


class Condemned(Struct, frozen=True, kw_only=True):
    """Workers to end as failures, though none has ended by itself; the round ends with them."""

    reason: str
    failure_class: FailureClass
    """`HANG`: the stacks of all workers are taken first."""
    ranks: Mapping[int, str] = {}
    """Local rank → why; empty: no worker of this node is at fault, but this package or a worker elsewhere."""


class HealthVerdict(Struct, frozen=True, kw_only=True):
    reason: str = ""
    """``health check failed: …``; empty: the node is fit."""
    checks: tuple[str, ...] = ()
    warnings: Mapping[str, str] = {}
    notes: tuple[str, ...] = ()
    is_refusal: bool = False
    """Nothing else is wrong than that the run directory's filesystem refuses, or does not answer."""
    is_usage: bool = False
    """Nothing else is wrong than that the user's own check can't be started as it was given."""

    @property
    def is_healthy(self) -> bool:
        return not self.reason


class AgentSite(Struct, frozen=True, kw_only=True):
    me: AgentIdentity
    info: NodeInfo
    environ: Mapping[str, str]
    """The workers', before ``--setup`` and without their ranks."""
    clock: Clock
    files: FileExecutor
    """Does what the loop needs done with files: the loop itself touches none."""
    events: EventLog
    pump: LogPump
    coordination: Coordination
    notifier: Notifier | None
    watch: HeartbeatWatch
    store_server: StoreServer
    cpus: Sequence[frozenset[int]] = ()
    """Each worker's, by local rank; empty: all have those of the agent."""


class GroupSite(Struct, frozen=True, kw_only=True):
    attempt: AttemptPaths
    host: str
    node: int
    round: int
    layout: RankLayout
    clock: Clock
    files: FileExecutor
    pump: LogPump
    watch: HeartbeatWatch
    is_ending: Callable[[], bool] = lambda: False
    """Nothing is waited for any more."""

    def paths_of(self, local_rank: int) -> RankPaths:
        return self.attempt.rank(self.round, self.layout.first_rank + local_rank)


class Part:
    """One feature of an agent. The loop calls all of this from the main thread, and nothing here waits."""

    is_ready = True
    """The agent asks to be in its first round once all parts are; one that was not calls `NodeAgent.begin_joining`
    later."""
    why_fresh = ""
    """Why the workers that were started last are no forks, though they might be."""

    @property
    def due(self) -> float | None:
        """When `look` is to be called next, monotonic; it is called whenever the loop wakes, too. A part that sets it
        has ``due: float | None = None`` in its class."""
        return None

    @property
    def pids(self) -> Collection[int]:
        """The part's own processes, which are no workers."""
        return ()

    @property
    def is_stuck(self) -> bool:
        """A thread still waits for something that does not answer."""
        return False

    @property
    def holds_start(self) -> bool:
        """The workers of a final round are not to be started yet."""
        return False

    def watched(self) -> Collection[FileDescriptorLike]:
        """Each is readable when there is something to `look` at; a negative number is never."""
        return ()

    def begin(self) -> None:
        """The agent has started."""

    def on_setup(self, change: EnvironmentChange) -> None:
        """The workers' environment is known."""

    def on_join(self, last_round: int) -> None:
        """The node is about to ask for a round; `last_round` is -1 before the first."""

    def holds_join(self, agent: NodeAgent) -> bool:
        """The node is not to ask for a round yet."""
        return False

    def on_record(self, record: RoundRecord, workers: LocalWorkers | None) -> None:
        """The rendezvous has a newer record."""

    def on_cut_off(self, found: NodesCutOff, record: RoundRecord) -> None:
        """Nodes live, and no packet of theirs comes through."""

    def fork_workers(
        self, environments: Sequence[Mapping[str, str]], cpus: Sequence[frozenset[int]] = ()
    ) -> Sequence[WorkerProcess | None] | None:
        """A worker with each of `environments`, on those CPUs; None where it, or all, are to be started fresh."""
        return None

    def environment(self, given: Mapping[str, str]) -> Mapping[str, str]:
        """Return variables that every worker's environment is to hold beside `given`."""
        return {}

    def on_start(self, workers: LocalWorkers) -> None:
        """The workers of a round run."""

    def look(self, agent: NodeAgent) -> Condemned | None:
        """Take in what has come, in any phase. Returns which workers are to be ended as failures."""
        return None

    def replace_dead(self, workers: LocalWorkers) -> bool:
        """Put fresh processes in the places of workers that ended badly. Returns whether the round goes on."""
        return False

    def before_stop(self) -> None:
        """The workers are about to be ended."""

    def on_success(self) -> None:
        """All workers of this node have ended with 0."""

    def close(self) -> None:
        """The agent ends. May wait for what it ends, in bounded time."""


class ProcessPart(Part):
    """A part with one process at a time, which answers over a socket with messages in JSON."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    @property
    def pids(self) -> Collection[int]:
        return () if self.pid is None else (self.pid,)

    def watched(self) -> Collection[FileDescriptorLike]:
        return () if self._control is None else (self._control,)

    def _receive(self) -> None:
        while self._control is not None:
            try:
                raw = self._control.recv(MESSAGE_LIMIT)
            except BlockingIOError:
                break
            except OSError:
                raw = b""
            if raw:
                self._heard(json.loads(raw))
            else:
                self._lost()

    def _heard(self, message: dict[str, Any]) -> None:
        raise NotImplementedError

    def _lost(self) -> None:
        raise NotImplementedError

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        process.kill()  # it holds nothing that would want to be saved

    def _end(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is None:
            return
        self._kill(self._process)
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            pass  # in the kernel's hands; it dies when they open, or with the agent
        self._process = None


def save_if_possible(path: Path, value: Struct) -> None:
    """Write what others only look at: a filesystem that refuses it ends nothing."""
    try:
        make_private_dir(path.parent)
        codec.save(path, value)
    except OSError as error:
        logger.debug("%s could not be written: %s", path, error)


PARTS: tuple[tuple[str, str, Callable[[AgentIdentity], bool]], ...] = (
    ("hang_detector", "HangDetector.for_agent", lambda me: True),
    ("slow_rank_watch", "SlowRankWatch", lambda me: me.spec.slow_ranks is not OnSlowRank.OFF),
    ("worker_reports", "CheckpointWatch", lambda me: True),
    ("worker_reports", "PreemptionWatch", lambda me: True),
    ("checkpoint_copies", "CheckpointCopies", lambda me: bool(me.spec.checkpoint_dir)),
    ("worker_environment", "Setup", lambda me: bool(me.spec.setup)),
    ("worker_reports", "RestartGroupWatch", lambda me: True),
    ("ending", "JobNodes", lambda me: me.attempt.cluster == "slurm"),
    ("health_checks", "HealthChecks.for_agent", lambda me: bool(me.spec.health_checks or me.spec.health_check)),
    ("fork_server", "ForkServer.for_agent", lambda me: me.spec.start_method is StartMethod.FORKSERVER),
)
"""Module here, what makes the part of a site, and which runs need it; in the order in which the loop calls them."""


def make_parts(site: AgentSite) -> list[Part]:
    needed = [(import_module(f"hpc_elastic.agent.{module}"), name) for module, name, needs in PARTS if needs(site.me)]
    return [*(attrgetter(name)(module)(site) for module, name in needed), site.store_server]


def watched(parts: Iterable[Part]) -> list[FileDescriptorLike]:
    return [one for part in parts for one in part.watched()]


def fork_workers(
    parts: Sequence[Part], environments: Sequence[Mapping[str, str]], cpus: Sequence[frozenset[int]]
) -> Sequence[WorkerProcess | None]:
    forked = (part.fork_workers(environments, cpus) for part in parts)
    return next((found for found in forked if found is not None), [None] * len(environments))
