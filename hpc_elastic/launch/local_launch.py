"""``--cluster local``: the whole run on this machine, requeues included. The same agents, store and supervisor."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hpc_elastic.agent.main import node_key
from hpc_elastic.base.clock import RunClock
from hpc_elastic.base.self_command import own_command
from hpc_elastic.launch.local_launcher import LocalLauncher
from hpc_elastic.launch.requeue import RequeueAction
from hpc_elastic.launch.requeue_job import NextAttempt, Requeued
from hpc_elastic.launch.run_attempt import load_run, log_to_stdout, run_attempt
from hpc_elastic.launch.signals import JobCondition, SlurmAnswer
from hpc_elastic.launch.site import Allocation, SiteFacts
from hpc_elastic.run.attempt import AttemptInfo
from hpc_elastic.run.paths import RunPaths
from hpc_elastic.run.spec import RunSpec
from hpc_elastic.workers.linux import SignalQueue
from hpc_elastic.workers.tags import NODE_TAG_VARIABLE


class LocalSite:
    """This machine as a cluster: nodes are agents side by side, and a requeue is the next attempt at once."""

    def __init__(self, env: Mapping[str, str], *, umask: int) -> None:
        self._env = dict(env)
        self._umask = umask

    @property
    def cluster_name(self) -> str:
        return ""

    def facts(self, spec: RunSpec) -> SiteFacts:
        armed = spec.requeue and spec.max_requeues > 0
        return SiteFacts(
            cluster="local",
            nodes=tuple(f"node{index}" for index in range(spec.max_nodes + spec.spares)),
            requeue_armed=armed,
            requeue_reason="" if armed else "--no-requeue or --max-requeues 0 was given",
        )

    def launcher(self, spec: RunSpec, paths: RunPaths, attempt: AttemptInfo) -> LocalLauncher:
        def environment(node: int) -> dict[str, str]:
            return {**self._env, NODE_TAG_VARIABLE: f"{spec.uid}:{node_key('local', node)}"}

        def command(node: int) -> list[str]:
            place = ("--run-dir", str(paths.root), "--attempt", str(attempt.number), "--node", str(node))
            return own_command("agent", *place, "--launcher-pid", str(os.getpid()))

        return LocalLauncher(len(attempt.nodes), command, environment=environment, umask=self._umask)

    def ask(self, *, near: float) -> SlurmAnswer:
        return SlurmAnswer(JobCondition.NO_SLURM)

    def allocation(self) -> Allocation:
        return Allocation.HELD

    def nodes_up(self) -> frozenset[str]:
        return frozenset()  # agents here end with their launcher; an earlier one may still be at it

    def job_nodes(self) -> tuple[str, ...]:
        return ()

    def is_running(self, job_id: str) -> bool:
        return False

    def eligible_nodes(self) -> None:
        return None

    def why_not_without(self, paths: RunPaths, nodes: Sequence[str]) -> None:
        return None

    def requeue(self, plan: NextAttempt) -> Requeued:
        return Requeued(words="the next attempt starts at once")


def run_local(run_dir: Path, env: Mapping[str, str] | None = None, *, ready: Callable[[], None] = lambda: None) -> int:
    """Run to the end, through requeues.

    Args:
        run_dir: The run's.
        env: For the agents.
        ready: Called when no signal is lost on a filesystem that hangs any more.

    Returns:
        The run's exit code.

    Raises:
        UsageError: no run is at `run_dir`.
    """
    umask = os.umask(0o077)
    signals = SignalQueue([signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2, signal.SIGCHLD])
    output = log_to_stdout()
    paths, spec = load_run(run_dir)
    ready()
    site = LocalSite(os.environ if env is None else env, umask=umask)
    while True:
        decision = run_attempt(paths, spec, site, clock=RunClock(), signals=signals)
        if decision.action is not RequeueAction.REQUEUE:
            break
    output.close()
    return decision.exit_code
