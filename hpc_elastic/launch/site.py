"""What differs between a Slurm job, a step of the user's own and this machine: `Site`, and its `Launcher` of agents."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, Protocol

from msgspec import Struct

from hpc_elastic.base.self_command import own_command
from hpc_elastic.launch.requeue_job import NextAttempt, Requeued
from hpc_elastic.launch.signals import JobCondition, SlurmAnswer
from hpc_elastic.run.attempt import AttemptInfo
from hpc_elastic.run.paths import RunPaths
from hpc_elastic.run.spec import RunSpec
from hpc_elastic.workers.tree import node_key


class AgentEnded(Struct, frozen=True, kw_only=True):
    """An agent is not there any more, or never came to be."""

    node: int
    """Node index."""
    code: int | None
    """As `subprocess` has it; None where it is not known."""
    detail: str
    started: bool = True
    """False: it could not be started; the node may be dead."""
    lasts: bool = False
    """Whether `detail` is a refusal that would come back the same way, and is no node's."""
    gone: bool = False
    """Whether the site has given the node up: it never comes back into this job."""


def describe_code(code: int | None) -> str:
    """``exit code 3``, ``SIGKILL``, or ``unknown``."""
    if code is None:
        return "unknown"
    if code < 0:
        try:
            return signal.Signals(-code).name
        except ValueError:
            return f"signal {-code}"
    return f"exit code {code}"


def agent_command(paths: RunPaths, attempt: int, *arguments: str) -> list[str]:
    """The agent of whichever node it is started on."""
    return own_command("agent", "--run-dir", str(paths.root), "--attempt", str(attempt), *arguments)


def node_mark(spec: RunSpec, cluster: str, node: int = 0) -> str:
    """By which a later agent of this node knows the processes that an earlier one left."""
    return f"{spec.uid}:{node_key(cluster, node)}"


class Launcher(Protocol):
    """Starts and ends agents. No method blocks for longer than it says."""

    @property
    def unlaunched(self) -> Mapping[int, str]:
        """The nodes on which a launch failed, with the reason."""
        ...

    @property
    def hears_all_ends(self) -> bool:
        """Whether `take` reports every agent's end, however its node was lost."""
        ...

    def launch(self) -> None:
        """Start an agent on every node.

        Raises:
            HpcElasticError: nothing could be started at all.
        """
        ...

    def relaunch(self, node: int) -> None:
        """Start an agent on one node again, without disturbing the others; `arguments`: further ones of its command."""
        ...

    def filenos(self) -> list[int]:
        """Descriptors that become readable when `take` may have something."""
        ...

    def due(self) -> float | None:
        """When `take` may have something that no descriptor announces, on the monotonic clock; None: never."""
        ...

    def take(self) -> list[AgentEnded]:
        """What has ended since the last call."""
        ...

    def last_message(self, node: int) -> str:
        """The last line that the newest start on a node printed as an error; empty where that is not known.

        It may come a moment after the end that it explains.
        """
        ...

    def running(self) -> bool:
        """Whether some agent may still run."""
        ...

    def terminate(self) -> None:
        """SIGTERM to all agents; a repeated call does it again."""
        ...

    def end(self, *, within: float) -> None:
        """Leave nothing of ours behind: SIGTERM, and SIGKILL after `within` seconds."""
        ...


class EligibleNodes(Struct, frozen=True, kw_only=True):
    """The nodes that the job may get, by Slurm's names."""

    known: frozenset[str]
    usable: frozenset[str]
    """Neither down nor drained; busy ones count."""
    required: frozenset[str] = frozenset()
    """Those that the job asks for by name."""
    excluded: tuple[str, ...] = ()
    """Those that it does without now, for whatever reason."""


def attempt_facts(**facts: Any) -> AttemptInfo:
    """An attempt as far as its site knows it: `run_attempt` fills in the rest."""
    return AttemptInfo(number=-1, batch_host="", started_ns=0, **facts)


class Allocation(Enum):
    """Whether the job and this node still belong together."""

    HELD = "held"
    """The job runs, or has ended, and Slurm has not taken this node from it."""
    LOST = "lost"
    """Slurm has given this node up, or has requeued the job: what is done here would not be done for the job."""
    UNKNOWN = "unknown"
    """Slurm can't be asked from here."""


class Site:
    """Where an attempt runs. What is not overridden is the answer of a machine without Slurm."""

    umask = 0o077
    """The user's, for what is started for them."""

    def facts(self, spec: RunSpec) -> AttemptInfo:
        """Ask what an attempt's start needs to know: its facts, but for what only `run_attempt` knows."""
        raise NotImplementedError

    def launcher(self, spec: RunSpec, paths: RunPaths, attempt: AttemptInfo) -> Launcher:
        """What starts the agents."""
        raise NotImplementedError

    def ask(self, *, near: float) -> SlurmAnswer:
        """Ask Slurm about the job; within seconds. The time limit is near when it is `near` seconds away."""
        return SlurmAnswer(JobCondition.NO_SLURM)

    def allocation(self) -> Allocation:
        """Ask whether this node still belongs to the job; it may take a minute."""
        return Allocation.HELD

    def nodes_up(self) -> frozenset[str]:
        """Ask which nodes are up; within seconds. Empty where Slurm can't be asked.

        Slurm ends all of a job's processes on a node that it reaches before it starts the job again.
        """
        return frozenset()

    def job_nodes(self) -> Sequence[str]:
        """Ask which nodes the job has now; it may take a minute. None: it does not run, or there is no job.

        Raises:
            SlurmError: it could not be asked.
        """
        return ()

    def is_running(self, job_id: str) -> bool:
        """Ask whether a job runs; within seconds. False too where Slurm can't be asked."""
        return False

    def eligible_nodes(self) -> EligibleNodes | None:
        """Ask which nodes the next attempt may get; within seconds. None: not known, or there is no choice."""
        return None

    def why_not_without(self, paths: RunPaths, nodes: Sequence[str]) -> str | None:
        """Ask why the run could never begin without these nodes; within seconds. None: nothing speaks against it."""
        return None

    def requeue(self, plan: NextAttempt) -> Requeued:
        """Have the next attempt queued. Returns what was done.

        Raises:
            HpcElasticError: it could not be; the message says why.
        """
        raise NotImplementedError
