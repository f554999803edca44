"""A run in an srun step of the user's own: ``srun … hpc-elastic agent SCRIPT``, one task on each node.

Task 0 supervises and runs its node's agent. It publishes the run in a folder that only this step's tasks look for; then
the other tasks become agents.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from hpc_elastic.base import codec
from hpc_elastic.base.clock import Clock, pause
from hpc_elastic.base.files import make_private_dir
from hpc_elastic.errors import UsageError
from hpc_elastic.launch.local import LocalLauncher
from hpc_elastic.launch.run_attempt import load_run
from hpc_elastic.launch.run_directory import make_runs_dir
from hpc_elastic.launch.site import agent_command, node_mark
from hpc_elastic.launch.slurm_site import SlurmSite
from hpc_elastic.run.paths import AttemptInfo, RunPaths
from hpc_elastic.run.spec import RunSpec, Runtime
from hpc_elastic.slurm.job_environment import JobEnvironment, TaskFacts
from hpc_elastic.store.file_store import FileStore, StoreError
from hpc_elastic.workers.tree import NODE_TAG_VARIABLE

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
            try:
                if now - path.stat().st_mtime > 86400.0:
                    shutil.rmtree(path)
            except OSError:
                pass


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
