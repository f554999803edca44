"""`Site`: a Slurm job, a step of the user's own, or this machine; and the `Launcher` of its agents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, Protocol

from msgspec import Struct

from hpc_elastic.base.clock import Clock
from hpc_elastic.base.loop import FileExecutor
from hpc_elastic.base.self_command import own_command
from hpc_elastic.failures.classify import signal_name
from hpc_elastic.launch.requeue import EligibleNodes, NextAttempt, Requeued
from hpc_elastic.launch.signals import JobCondition, SlurmAnswer
from hpc_elastic.rendezvous.participant import OBSERVER_NODE
from hpc_elastic.run.events import EventLog
from hpc_elastic.run.paths import AttemptInfo, AttemptPaths, RunPaths
from hpc_elastic.run.spec import RunSpec
from hpc_elastic.workers.tree import node_key


class AgentEnd(Struct, frozen=True, kw_only=True):
    node: int
    code: int | None
    """The code as `subprocess` has it; None: unknown."""
    detail: str
    started: bool = True
    lasts: bool = False
    """`detail` is a refusal that would come back, and blames no node."""
    gone: bool = False
    """The site has given the node up: it never comes back into this job."""


def describe_code(code: int | None) -> str:
    if code is None:
        return "unknown"
    return signal_name(-code) if code < 0 else f"exit code {code}"


def agent_command(paths: RunPaths, attempt: int, *arguments: str) -> list[str]:
    return own_command("agent", "--run-dir", str(paths.root), "--attempt", str(attempt), *arguments)


def node_mark(spec: RunSpec, cluster: str, node: int = 0) -> str:
    return f"{spec.uid}:{node_key(cluster, node)}"


class Launcher(Protocol):
    @property
    def unlaunched(self) -> Mapping[int, str]: ...

    @property
    def hears_all_ends(self) -> bool: ...

    def launch(self) -> None: ...

    def relaunch(self, node: int) -> None: ...

    def filenos(self) -> list[int]: ...

    def due(self) -> float | None:
        """When `take` may have something that no descriptor announces, on the monotonic clock; None: never."""
        ...

    def take(self) -> list[AgentEnd]: ...

    def last_message(self, node: int) -> str:
        """The newest start's last error line on a node, which may come a moment after the end; empty: unknown."""
        ...

    def running(self) -> bool: ...

    def terminate(self) -> None:
        """SIGTERM to all agents; a repeated call does it again."""
        ...

    def end(self, *, within: float) -> None:
        """Leave nothing of ours behind: SIGTERM, and SIGKILL after `within` seconds."""
        ...


class AttemptContext(Struct, frozen=True, kw_only=True):
    paths: RunPaths
    spec: RunSpec
    site: Site
    attempt: AttemptInfo
    events: EventLog
    clock: Clock

    @property
    def folder(self) -> AttemptPaths:
        return self.paths.attempt(self.attempt.number)


def supervisor_events(
    folder: AttemptPaths, *, host: str, uid: str, clock: Clock, files: FileExecutor | None = None
) -> EventLog:
    return EventLog(
        folder.events, role="supervisor", host=host, node=OBSERVER_NODE, uid=uid[-21:], clock=clock, files=files
    )


def attempt_facts(**facts: Any) -> AttemptInfo:
    return AttemptInfo(number=-1, batch_host="", started_ns=0, **facts)


class Allocation(Enum):
    HELD = "held"
    """The job runs, or has ended, and Slurm has not taken this node from it."""
    LOST = "lost"
    """Slurm has given this node up, or requeued the job: actions here no longer affect the job."""
    UNKNOWN = "unknown"


class Site:
    """The place where an attempt runs. Defaults are those of a machine without Slurm."""

    umask = 0o077

    def facts(self, spec: RunSpec) -> AttemptInfo:
        raise NotImplementedError

    def launcher(self, spec: RunSpec, paths: RunPaths, attempt: AttemptInfo) -> Launcher:
        raise NotImplementedError

    def ask(self, *, near: float) -> SlurmAnswer:
        """Ask Slurm about the job; within seconds. The time limit is near when `near` seconds are left."""
        return SlurmAnswer(JobCondition.NO_SLURM)

    def allocation(self) -> Allocation:
        """Ask whether this node still belongs to the job; may take a minute."""
        return Allocation.HELD

    def nodes_up(self) -> frozenset[str]:
        """Nodes that are up; within seconds. Empty: Slurm can't be asked.

        Slurm ends all of a job's processes on a node that it reaches before it starts the job again.
        """
        return frozenset()

    def job_nodes(self) -> Sequence[str]:
        """The job's nodes now; may take a minute. None: no job, or it does not run. Raises SlurmError."""
        return ()

    def is_running(self, job_id: str) -> bool:
        """Ask whether a job runs; within seconds. False if Slurm can't be asked."""
        return False

    def eligible_nodes(self) -> EligibleNodes | None:
        """Nodes that the next attempt may get; within seconds. None: unknown, or there is no choice."""
        return None

    def why_not_without(self, paths: RunPaths, nodes: Sequence[str]) -> str | None:
        """Slurm's reason why the run could never begin without these nodes; within seconds. None: it could."""
        return None

    def requeue(self, plan: NextAttempt) -> Requeued:
        raise NotImplementedError
