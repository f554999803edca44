"""The entry points within a Slurm job: ``hpc-elastic batch RUN_DIR``, which the generated script exec's, and a step.

A step is the user's own, ``srun … hpc-elastic agent SCRIPT``, one task on each node. Task 0 supervises and runs its
node's agent. It publishes the run in a folder that only this step's tasks look for; then the other tasks become agents.

``hpc-elastic batch --finish N RUN_DIR`` is the last step of an attempt by an agent: under ``--no-kill`` Slurm keeps a
job running whose batch host has died, and its tasks go on (seen on 20.11 to 26.05); no process would write the verdict,
requeue the job, or ever give the allocation back.
"""

from __future__ import annotations

import logging
import os
import signal
import stat
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from hpc_elastic.base import codec
from hpc_elastic.base.clock import Clock, RunClock, pause
from hpc_elastic.base.files import make_private_dir
from hpc_elastic.base.loop import FileExecutor
from hpc_elastic.errors import UsageError
from hpc_elastic.launch.agents import agent_command, node_mark
from hpc_elastic.launch.conclude import conclude
from hpc_elastic.launch.hooks import BatchCommands, end_with_commands
from hpc_elastic.launch.local import LocalLauncher
from hpc_elastic.launch.requeue import RequeueAction, closed_result
from hpc_elastic.launch.run_attempt import load_run, log_to_stdout, run_attempt
from hpc_elastic.launch.run_directory import make_runs_dir
from hpc_elastic.launch.site import Allocation, AttemptContext, supervisor_events
from hpc_elastic.launch.slurm_site import SlurmSite, own_script
from hpc_elastic.rendezvous.membership import RoundLog
from hpc_elastic.rendezvous.state import OBSERVER_PLACE, Status, new_uid
from hpc_elastic.rendezvous.succession import claim_end
from hpc_elastic.run.control_events import EndTakenOver
from hpc_elastic.run.paths import (
    UNCONFIRMED_CODE,
    AttemptInfo,
    ExitCode,
    RunPaths,
    UnreadableAttemptError,
    load_attempt,
    load_result,
)
from hpc_elastic.run.spec import RunSpec, Runtime
from hpc_elastic.slurm.commands import SlurmError
from hpc_elastic.slurm.job_environment import JobEnvironment, TaskFacts
from hpc_elastic.store.file_store import FileStore, StoreError
from hpc_elastic.workers.linux import SignalQueue, not_ignored
from hpc_elastic.workers.tree import NODE_TAG_VARIABLE

logger = logging.getLogger(__name__)

FOLDER = ".steps"
RENDEZVOUS_SECONDS = 120.0
SILENT_SECONDS = 120.0
"""Agents elsewhere whose files stay unchanged this long are gone: they write each half minute at least."""
_LOOK_SECONDS = 1.0
_RUN = "step/run"


class StepRun(Struct, frozen=True, kw_only=True):
    run_dir: str = ""
    attempt: int = 0
    refused: bool = False
    """There is no run; task 0 has printed why."""


class StepRendezvous:
    def __init__(self, runs_dir: Path, job: JobEnvironment, env: Mapping[str, str], clock: Clock) -> None:
        """`runs_dir` is the same on each node; `env` has srun's port, which no other step of this job's id has."""
        assert job.task is not None
        port = env.get("SLURM_STEP_LAUNCHER_PORT") or env.get("SLURM_SRUN_COMM_PORT") or "0"
        name = f"{job.job_id}.{job.task.step_id}.{job.restart_count}.{port}"
        self._folder = runs_dir / FOLDER
        make_runs_dir(runs_dir)
        make_private_dir(self._folder)
        self._store = FileStore(self._folder / name, clock=clock)
        self._clock = clock

    def publish(self, run: StepRun) -> None:
        self._store.put_if_absent(_RUN, codec.dumps(run))

    def wait(self) -> StepRun:
        deadline = self._clock.monotonic() + RENDEZVOUS_SECONDS
        while self._clock.monotonic() < deadline:
            try:
                text = self._store.get(_RUN)
            except (OSError, StoreError):
                text = None
            if text is not None:
                return codec.loads(StepRun, text)
            pause(self._clock, 0.1)
        raise UsageError(
            f"{os.uname().nodename}: the step's first task has not begun the run in {RENDEZVOUS_SECONDS:.0f} s, or "
            f"{self._folder} is not the same folder on all nodes (--runs-dir)"
        )

    def clean(self) -> None:
        import shutil

        now = time.time()
        for path in self._folder.iterdir():
            with suppress(OSError):
                if now - path.stat().st_mtime > 86400.0:
                    shutil.rmtree(path)


class StepLauncher(LocalLauncher):
    def __init__(self, site: StepSite, spec: RunSpec, paths: RunPaths, attempt: AttemptInfo) -> None:
        env = {**site.environment, NODE_TAG_VARIABLE: node_mark(spec, "slurm")}
        command = agent_command(paths, attempt.number, "--launcher-pid", str(os.getpid()))
        super().__init__([(command, env)] * len(attempt.nodes), umask=site.umask)
        self._here = attempt.nodes.index(site.host)
        self._others = len(attempt.nodes) - 1
        self._rendezvous = site.rendezvous
        self._run = StepRun(run_dir=str(paths.root), attempt=attempt.number)
        self._signs_of = paths.attempt(attempt.number).store / "node"
        self._signs: frozenset[tuple[str, int]] = frozenset()
        self._changed_at = self._signs_at = time.monotonic()

    def launch(self) -> None:
        self._rendezvous.publish(self._run)
        self.relaunch(self._here)

    def running(self) -> bool:
        return super().running() or (self._others > 0 and self._others_live())

    def due(self) -> float | None:
        found = super().due()
        if found is None and self._others > 0:
            return self._signs_at + _LOOK_SECONDS
        return found

    def _others_live(self) -> bool:
        """The other agents are no children of this process: only their files show their ends."""
        now = time.monotonic()
        if now - self._signs_at >= _LOOK_SECONDS:
            self._signs_at = now
            try:
                with os.scandir(self._signs_of) as entries:
                    signs = frozenset((entry.name, entry.stat(follow_symlinks=False).st_mtime_ns) for entry in entries)
            except OSError:
                signs = self._signs
            if signs != self._signs:
                self._signs, self._changed_at = signs, now
        return now - self._changed_at < SILENT_SECONDS


class StepSite(SlurmSite):
    def __init__(self, env: Mapping[str, str], *, rendezvous: StepRendezvous, clock: Clock, umask: int) -> None:
        super().__init__(env, clock=clock, umask=umask)
        self.environment = dict(env)
        self.rendezvous = rendezvous
        job = JobEnvironment.from_env(env)
        assert job.task is not None
        self.nodes = step_nodes(job)
        self.host = job.node or job.task.step_nodes[0]

    def facts(self, spec: RunSpec) -> AttemptInfo:
        if spec.container_image is not None and spec.container_image.runtime is Runtime.PYXIS:
            raise UsageError(
                f"--container-image {spec.container_image}: this step of srun's runs already; "
                "give srun itself --container-image, or use hpc-elastic submit"
            )
        return replace(super().facts(spec), nodes=self.nodes)

    def launcher(self, spec: RunSpec, paths: RunPaths, attempt: AttemptInfo) -> StepLauncher:  # type: ignore[override]
        return StepLauncher(self, spec, paths, attempt)


def step_nodes(job: JobEnvironment) -> tuple[str, ...]:
    assert job.task is not None
    return tuple(node for node in job.nodes if node in job.task.step_nodes)


def check_one_task_per_node(task: TaskFacts) -> None:
    nodes = len(task.step_nodes)
    if task.num_tasks == nodes:
        return
    most = max(task.tasks_per_node, default=-(-task.num_tasks // nodes))
    raise UsageError(
        f"srun started {most} tasks on a node: one agent has the whole node and starts its workers itself; give srun "
        f"-n{nodes} --ntasks-per-node=1, and --nproc-per-node {most} to hpc-elastic agent"
    )


def become_agent(run: StepRun, env: Mapping[str, str]) -> int:
    paths, spec = load_run(Path(run.run_dir))
    argv = agent_command(paths, run.attempt)
    sys.stdout.flush()
    os.execve(argv[0], argv, {**env, NODE_TAG_VARIABLE: node_mark(spec, "slurm")})


def run_batch(
    run_dir: Path,
    env: Mapping[str, str],
    *,
    nodes: Sequence[str] | None = None,
    keep: Sequence[int] = (),
    rendezvous: StepRendezvous | None = None,
) -> int:
    """Supervise one attempt in this job: as its batch script, or as the first task of a user's own step."""
    ending = not_ignored([signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
    signals = SignalQueue([signal.SIGUSR2, signal.SIGCHLD, *ending])
    umask = os.umask(0o077)
    log_to_stdout()
    clock = RunClock()
    write_back(1, clock)
    paths, spec = load_run(run_dir)
    site: SlurmSite
    if rendezvous is not None:
        site = StepSite(env, rendezvous=rendezvous, clock=clock, umask=umask)
    else:
        site = SlurmSite(env, clock=clock, umask=umask, script=own_script(paths), nodes=nodes, keep=keep)
    return run_attempt(paths, spec, site, clock=clock, signals=signals).exit_code


def run_of_this_job(run_dir: Path, env: Mapping[str, str]) -> Path:
    """The run directory of this job: `run_dir`, or that of this array task in it. Raises UsageError."""
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


def finish_attempt(run_dir: Path, number: int, env: Mapping[str, str], *, agent: str, confirmed: bool) -> int:
    """Write the verdict and the report, append it to the job log, and requeue the job or end it.

    Args:
        agent: The uid of the agent that asks.
        confirmed: Act only if Slurm confirms that this node belongs to the job; else return `UNCONFIRMED_CODE`.

    Raises:
        UsageError: there is no such attempt, or it has not ended.
    """
    # Slurm may send it more than once; its SIGKILL is the end of the time.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    umask = os.umask(0o077)
    clock = RunClock()
    paths, spec = load_run(run_dir)
    attempt_paths = paths.attempt(number)
    try:
        attempt = load_attempt(attempt_paths.attempt_json)
    except UnreadableAttemptError as error:
        raise UsageError(str(error)) from None
    store = FileStore(attempt_paths.store, clock=clock)
    record = RoundLog(store, spec.run_id).latest()
    if record is None or record.status is not Status.CLOSED or record.outcome is None:
        raise UsageError(f"attempt {number} of {paths.root} has not ended")
    site = SlurmSite(env, clock=clock, umask=umask, script=own_script(paths))
    if confirmed and site.allocation() is not Allocation.HELD:
        return UNCONFIRMED_CODE
    if not claim_end(store, agent):
        return ExitCode.OK
    _append_to_job_log(paths.job_log)
    log_to_stdout()
    host = os.uname().nodename
    why = f"the supervisor on {attempt.batch_host} did not finish the attempt"
    logger.warning("%s; this is %s", why, host)
    uid = new_uid(OBSERVER_PLACE, f"finisher-{host}", clock)
    events = supervisor_events(attempt_paths, host=host, uid=uid, clock=clock)
    events.write(EndTakenOver(by=agent, reason=why))
    result = closed_result(record, record.outcome)
    if (how := site.how_script_ended()) is not None:
        logger.warning("%s", how)
        result = replace(result, reason=f"{result.reason}; {how}")
    context = AttemptContext(paths=paths, spec=spec, site=site, attempt=attempt, events=events, clock=clock)
    decision = conclude(context, result)
    end_with_commands(BatchCommands(context), result, decision, files=FileExecutor(clock=clock))
    stored = load_result(attempt_paths.result_json)
    if decision.action is RequeueAction.END or (stored is not None and stored.next_job):
        logger.info("ending job %s, whose batch script is gone", attempt.job_id)
        events.close()
        site.end_job()
    events.close()
    return decision.exit_code


def print_job_nodes(run_dir: Path, env: Mapping[str, str]) -> int:
    paths, _ = load_run(run_dir)
    try:
        print(*SlurmSite(env, clock=RunClock(), umask=0o077, script=own_script(paths)).job_nodes())
    except SlurmError as error:
        print(f"hpc-elastic: {error}", file=sys.stderr)
        return 1
    return 0


def _append_to_job_log(path: Path) -> None:
    """Our own stdout ends in an srun that died with its host. The job log's other writer died there too."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except OSError as error:
        logger.warning("the job log can't be written: %s", error)
        return
    sys.stdout.flush()
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)


def write_back(fd: int, clock: Clock, *, interval: float = 1.0) -> bool:
    """Let other hosts read the job log while the job runs: a thread asks for the open file's times again and again.

    An NFS client keeps what is written to an open file until it is half a minute old, but writes it out before it
    answers a stat (nfs_getattr, read in 6.x). Where nothing is kept back, a stat costs next to nothing, unlike an
    fsync. Only the thread waits where the mount hangs.
    """
    try:
        is_file = stat.S_ISREG(os.fstat(fd).st_mode)
    except OSError:
        return False

    def run() -> None:
        while not clock.wait(never, interval):
            with suppress(OSError):  # the next write fails too
                os.fstat(fd)

    never = threading.Event()
    if is_file:
        threading.Thread(target=run, name="write-back", daemon=True).start()
    return is_file
