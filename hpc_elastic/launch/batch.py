"""The batch side of a Slurm job: ``exec``'d by the generated script. It owns all calls to Slurm."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Mapping
from pathlib import Path

from hpc_elastic.agent.main import node_key
from hpc_elastic.agent.signals import SignalQueue
from hpc_elastic.attempt import AttemptInfo
from hpc_elastic.clock import Clock, SystemClock
from hpc_elastic.errors import UsageError
from hpc_elastic.launch.job_word import slurm_answer
from hpc_elastic.launch.run_attempt import load_run, log_to_stdout, run_attempt
from hpc_elastic.launch.signal_table import SlurmAnswer, SlurmWord
from hpc_elastic.launch.site import SiteFacts
from hpc_elastic.launch.slurm_launcher import SlurmLauncher
from hpc_elastic.launch.write_back import WriteBack
from hpc_elastic.processes.tags import NODE_TAG_VARIABLE
from hpc_elastic.run_paths import RunPaths
from hpc_elastic.run_spec import RunSpec
from hpc_elastic.self_command import own_command
from hpc_elastic.slurm.client import CommandSlurmClient, SlurmClient, SubprocessRunner
from hpc_elastic.slurm.commands import JobId
from hpc_elastic.slurm.errors import SlurmError, SlurmUnavailableError
from hpc_elastic.slurm.job_environment import JobEnvironment
from hpc_elastic.slurm.step_gpus import step_gpu_flags

logger = logging.getLogger(__name__)

HURRIED_SECONDS = 2.0
CONTROLLER_PATIENCE = 600.0
"""How long a requeue waits for a controller that does not answer."""
CONTROLLER_RETRY = 10.0


class SlurmSite:
    """The allocation that this process is in."""

    def __init__(
        self, env: Mapping[str, str], *, client: SlurmClient, hurried: SlurmClient, clock: Clock, umask: int
    ) -> None:
        """Args:
        env: The batch script's environment.
        client: For what has time.
        hurried: The same with a short timeout: for questions while Slurm's SIGKILL is KillWait away.
        clock: For the patience with a controller that does not answer.
        umask: The user's, for the workers.
        """
        self._env = dict(env)
        self._client = client
        self._clock = clock
        self._hurried = hurried
        self._umask = umask
        self._job = JobEnvironment.from_env(env)
        self._id = JobId(self._job.requeue_id)

    def facts(self, spec: RunSpec) -> SiteFacts:
        armed, reason = self._armed(spec)
        kill_wait, version = None, ""
        try:
            config = self._client.config()
            kill_wait, version = float(config.kill_wait), ".".join(str(part) for part in config.version)
        except SlurmError as error:
            logger.warning("Slurm's settings can't be read: %s", error)
        return SiteFacts(
            cluster="slurm",
            nodes=self._job.nodes,
            job_id=self._job.requeue_id,
            restart_count=self._job.restart_count,
            requeue_armed=armed,
            requeue_reason=reason,
            kill_wait=kill_wait,
            version=version,
        )

    def _armed(self, spec: RunSpec) -> tuple[bool, str]:
        if not spec.requeue or spec.max_requeues == 0:
            return False, "--no-requeue or --max-requeues 0 was given"
        try:
            state = self._client.job_state(self._id)
        except SlurmError as error:
            return False, f"Slurm can't be asked: {error}"
        if state is None:
            return False, f"Slurm does not know job {self._id}"
        if not state.is_batch:
            return False, "this is an allocation of salloc's, and Slurm requeues batch jobs only"
        if not state.requeue:
            return False, "this job was submitted with --no-requeue, or the site has JobRequeue=0"
        return True, ""

    def launcher(self, spec: RunSpec, paths: RunPaths, attempt: AttemptInfo) -> SlurmLauncher:
        # The mark goes into the task's environment, not into srun's: a new agent on this host would take srun for a
        # stranger's leftover.
        mark = f"{NODE_TAG_VARIABLE}={spec.uid}:{node_key('slurm', 0)}"
        agent = own_command("agent", "--run-dir", str(paths.root), "--attempt", str(attempt.number))
        return SlurmLauncher(
            attempt.nodes,
            ["env", mark, *agent],
            environment=self._env,
            min_nodes=spec.min_nodes,
            components=self._job.components,
            extra=(*step_gpu_flags(self._env), *spec.srun_args),
            umask=self._umask,
        )

    def ask(self, *, near: float) -> SlurmAnswer:
        try:
            state = self._hurried.job_state(self._id)
        except SlurmError:
            return SlurmAnswer(SlurmWord.SILENT)
        return slurm_answer(state, restarts=self._job.restart_count, near=near, now_ns=self._clock.time_ns())

    def requeue(self) -> str:
        # Slurm's SIGTERM comes milliseconds after it took the requeue, and reaches the command that asked for it too:
        # what is ignored here is ignored there. (Seen on 22.05: scontrol died of it, and the requeue held.)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        deadline = self._clock.monotonic() + CONTROLLER_PATIENCE
        while True:
            try:
                self._client.requeue(self._id)
                break
            except SlurmUnavailableError as error:
                # The controller restarts, or is overrun: the job would be lost for what passes in minutes.
                if self._clock.monotonic() >= deadline:
                    raise
                logger.warning("%s; trying again for up to %.0f s", error, deadline - self._clock.monotonic())
                self._clock.wait(threading.Event(), CONTROLLER_RETRY)
            except SlurmError:
                if not self._is_requeued():
                    raise
                break
        return f"job {self._id} is requeued"

    def end_job(self) -> None:
        """Give the allocation back, where no batch script is left that could end by itself.

        Raises:
            SlurmError: Slurm did not take it.
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self._client.cancel(self._id)

    def _is_requeued(self) -> bool:
        try:
            state = self._client.job_state(self._id)
        except SlurmError:
            return False
        return state is not None and state.restarts > self._job.restart_count


def run_batch(run_dir: Path, env: Mapping[str, str] | None = None, *, clock: Clock | None = None) -> int:
    """Supervise one attempt in this job.

    Returns:
        The attempt's exit code; 75 where the job was requeued.

    Raises:
        UsageError: no run can be read at `run_dir` from here, or this is no Slurm job.
    """
    signals = SignalQueue([signal.SIGUSR2, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD])
    umask = os.umask(0o077)
    log_to_stdout()
    env = os.environ if env is None else env
    clock = clock or SystemClock()
    WriteBack(1, clock).start()
    paths, spec = load_run(run_dir)
    site = slurm_site(env, clock, umask=umask)
    return run_attempt(paths, spec, site, clock=clock, signals=signals).exit_code


def run_of_this_job(run_dir: Path, env: Mapping[str, str]) -> Path:
    """The run directory of this job: `run_dir`, or in it that of this task of an array.

    Raises:
        UsageError: `run_dir` can't be read from here; or the array and the job don't fit.
    """
    paths, spec = load_run(run_dir)
    task = env.get("SLURM_ARRAY_TASK_ID")
    if spec.array and (task is None or not task.isdecimal()):
        raise UsageError(f"{paths.root} is an array of runs ({spec.array}), and this job is no task of one")
    if not spec.array and task is not None:
        raise UsageError(
            f"{paths.root} is one run, and this job is task {task} of an array: all tasks would write to it; "
            "submit with hpc-elastic submit --array"
        )
    return paths.task(int(task)).root if spec.array and task is not None else run_dir


def slurm_site(env: Mapping[str, str], clock: Clock, *, umask: int) -> SlurmSite:
    """The site of the job that `env` belongs to.

    Raises:
        JobEnvironmentError: it belongs to none.
    """
    runner = SubprocessRunner(env)
    hurried = CommandSlurmClient(runner, clock, timeout=HURRIED_SECONDS)
    return SlurmSite(env, client=CommandSlurmClient(runner, clock), hurried=hurried, clock=clock, umask=umask)
