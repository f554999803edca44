"""The allocation that this process is in: as a site, which owns all calls to Slurm; and the nodes that a run takes.

A run takes nodes that are requested, and not held by another run of the allocation. A claim is a flock(2) on a file of
this host, one for each node, which the srun that runs the node's agent inherits (as filelock's can't be): it ends with
the last process that holds it. Other hosts do not see the claims.

A job that is being ended is COMPLETING (20.11 to 26.05): only the reason shows that it was its time limit, its time a
preemption, and the number of restarts a requeue. All of it tried on 22.05.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from msgspec import Struct, field
from msgspec.structs import replace

import hpc_elastic
from hpc_elastic.agent.worker_environment import pyxis_arguments
from hpc_elastic.base.clock import Clock
from hpc_elastic.base.files import make_private_dir
from hpc_elastic.errors import UnsafePathError, UsageError
from hpc_elastic.launch.agents import agent_command, node_mark
from hpc_elastic.launch.requeue import (
    Arming,
    EligibleNodes,
    JobRequeuer,
    NextAttempt,
    Requeued,
    RequeueWay,
    decide_arming,
    eligible_nodes,
)
from hpc_elastic.launch.site import Allocation, ControllerOutage, JobCondition, Site, SlurmAnswer, attempt_facts
from hpc_elastic.launch.slurm_launcher import SlurmLauncher
from hpc_elastic.run import index
from hpc_elastic.run.paths import AttemptInfo, RunPaths, task_index
from hpc_elastic.run.spec import RunSpec, Runtime
from hpc_elastic.slurm.client import SlurmClient, SubprocessRunner
from hpc_elastic.slurm.commands import (
    JobId,
    SlurmError,
    SlurmMissingError,
    SlurmUnavailableError,
    step_gpu_flags,
)
from hpc_elastic.slurm.job_environment import JobEnvironment, compress
from hpc_elastic.slurm.job_state import JobPhase, JobState, is_hold, seconds_until_end
from hpc_elastic.workers.tree import NODE_TAG_VARIABLE

logger = logging.getLogger(__name__)

_KEPT_SECONDS = 7 * 86400.0
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")


class NodeWish(Struct, frozen=True, kw_only=True):
    listed: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()
    """Names that the allocation does not have are no mistake: it was made without them."""
    least: int | None = None
    """MIN of ``--nodes``; None: not given, all free nodes are wanted."""
    most: int | None = None


def choose_nodes(allocated: Sequence[str], wish: NodeWish, taken: Mapping[str, str]) -> tuple[str, ...]:
    listed, excluded = set(wish.listed), set(wish.excluded)
    foreign = [node for node in wish.listed if node not in allocated]
    if foreign:
        raise UsageError(f"--nodelist: {compress(foreign)} not in this allocation, which has {compress(allocated)}")
    if both := listed & excluded:
        raise UsageError(f"--nodelist and --exclude both name {compress(sorted(both))}")
    allowed = [node for node in allocated if node not in excluded]
    if not allowed:
        raise UsageError(f"--exclude {compress(wish.excluded)}: this allocation has no other node")
    if busy := [node for node in allowed if node in listed and node in taken]:
        raise UsageError(f"--nodelist: {_in_use(busy, taken)}")
    if wish.most is not None and len(listed) > wish.most:
        raise UsageError(f"--nodelist names {len(listed)} nodes, and --nodes with the spares is {wish.most}")
    free = [node for node in allowed if node not in taken]
    if wish.most is None:
        busy = [node for node in allowed if node in taken]
        if busy and not listed:
            rest = f"give --nodelist {compress(free)} for the others" if free else "wait for its end"
            raise UsageError(f"{_in_use(busy, taken)}; {rest}")
        return tuple(node for node in allowed if not listed or node in listed)
    chosen = listed | set([node for node in free if node not in listed][: wish.most - len(listed)])
    if len(chosen) < (wish.least or 1) and taken:
        raise UsageError(
            f"--nodes {wish.least}: {len(chosen)} of this allocation's {len(allocated)} nodes are free: "
            f"{_in_use([node for node in allowed if node in taken], taken)}"
        )
    return tuple(node for node in allowed if node in chosen)


def _in_use(nodes: Sequence[str], taken: Mapping[str, str]) -> str:
    runs = ", ".join(dict.fromkeys(taken[node] or "another run" for node in nodes))
    return f"{compress(nodes)} of this allocation in use by {runs}"


@contextmanager
def host_lock(path: Path, *, seconds: float) -> Iterator[bool]:
    """Hold a lock file while the body runs; yields whether it is held, after waiting for `seconds` at most.

    The file is on a filesystem of this host, in a private folder. The kernel releases the lock when the process ends,
    however that ends. Programs that the body starts do not inherit it.
    """
    from filelock import UnixFileLock  # 40 ms: only where a lock is taken

    # No other argument: Debian 12 has 3.9, which knows none. The folder is private, and local filesystems have flock.
    lock = UnixFileLock(path, timeout=seconds)
    try:
        lock.acquire()
    except (OSError, NotImplementedError) as error:  # filelock's Timeout is an OSError
        logger.warning("going on without the lock %s: %s", path, error)
    try:
        yield lock.is_locked
    finally:
        lock.release()


class NodeClaims(Struct):
    folder: Path | None
    """None: no claims can be made here, and runs are not kept apart."""
    held: dict[str, int] = field(default_factory=dict)

    def claim(self, allocated: Sequence[str], wish: NodeWish) -> tuple[str, ...]:
        """Choose nodes and hold them until all that inherit the descriptors have ended."""
        if self.folder is None:
            return choose_nodes(allocated, wish, {})
        chosen: tuple[str, ...] = ()
        try:
            with host_lock(self.folder / "choosing", seconds=10.0):
                taken = self._lock_all(self.folder, allocated)
                try:
                    chosen = choose_nodes(allocated, wish, taken)
                finally:
                    for node in [node for node in self.held if node not in chosen]:
                        os.close(self.held.pop(node))
            self.sign("")
        except OSError as error:
            logger.warning("runs of this allocation are not kept apart: %s", error)  # a full /dev/shm, say
            return choose_nodes(allocated, wish, {})
        return chosen

    def sign(self, run: str) -> None:
        for fd in self.held.values():
            os.truncate(fd, 0)
            os.pwrite(fd, run.encode("utf-8", "surrogateescape"), 0)

    def _lock_all(self, folder: Path, allocated: Sequence[str]) -> dict[str, str]:
        taken = {}
        for node in allocated:
            fd = os.open(folder / _UNSAFE.sub("-", node), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self.held[node] = fd
            except BlockingIOError:
                taken[node] = os.pread(fd, 500, 0).decode("utf-8", "replace")
                os.close(fd)
        return taken


def open_claims(job_id: str, restart_count: int, bases: Iterator[Path], *, clock: Clock) -> NodeClaims:
    """The claims on an allocation's nodes, in the first of `bases` that can be written. Removes old ones."""
    for base in bases:
        try:
            top = base / f"hpc-elastic-nodes-{os.getuid()}"
            make_private_dir(top)
            folder = top / f"{_UNSAFE.sub('-', job_id)}-{restart_count}"
            make_private_dir(folder)
            for other in top.iterdir():
                if other != folder and clock.time_ns() / 1e9 - other.stat().st_mtime > _KEPT_SECONDS:
                    _remove_unused(other)
            return NodeClaims(folder)
        except (OSError, UnsafePathError):
            continue
    return NodeClaims(None)


def _remove_unused(folder: Path) -> None:
    paths = list(folder.iterdir())
    fds = [os.open(path, os.O_RDWR | os.O_NOFOLLOW) for path in paths]
    try:
        for fd in fds:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for path in paths:
            path.unlink()
        folder.rmdir()
    except OSError:
        pass  # a job that has lasted for a week
    finally:
        for fd in fds:
            os.close(fd)


_LIMITS = ("TIMEOUT", "DEADLINE")
_LIMIT_REASONS = ("TimeLimit", "DeadLine")


def slurm_answer(state: JobState | None, *, restarts: int, near: float, now_ns: int) -> SlurmAnswer:
    """`restarts` are the job's when this attempt began; no `state`: Slurm does not know the job (any more)."""
    if state is None:
        return SlurmAnswer(JobCondition.ENDED)
    if state.restarts > restarts or state.phase is JobPhase.PENDING:
        return SlurmAnswer(JobCondition.REQUEUED, held=state.reason if is_hold(state.reason) else "")
    left = seconds_until_end(state, now_ns=now_ns)
    if state.phase in (JobPhase.COMPLETING, JobPhase.FINISHED):
        if state.state in _LIMITS or state.reason in _LIMIT_REASONS:
            return SlurmAnswer(JobCondition.TIME_LIMIT)
        preempted = state.state == "PREEMPTED" or state.preempt_time is not None
        return SlurmAnswer(JobCondition.PREEMPTED if preempted else JobCondition.ENDED)
    if state.preempt_time is not None:
        return SlurmAnswer(JobCondition.PREEMPTING, left)
    is_near = left is not None and left <= near
    limit = None if state.time_limit is None else float(state.time_limit)
    return SlurmAnswer(JobCondition.NEAR_LIMIT if is_near else JobCondition.RUNNING, left, limit)


def allocation_of(state: JobState | None, *, restarts: int, node: str) -> Allocation:
    """An empty `node` is none of the job's nodes (a login node's salloc)."""
    if state is None or state.phase is JobPhase.FINISHED:
        return Allocation.HELD  # nothing else can have the job
    if state.restarts > restarts or state.phase is JobPhase.PENDING:
        return Allocation.LOST
    return Allocation.LOST if node and state.nodes and node not in state.nodes else Allocation.HELD


HURRIED_SECONDS = 2.0
CONFIRM_SECONDS = 15.0
"""A slow controller may need this long; without munge a command would try for a minute."""


class SlurmSite(Site):
    def __init__(
        self,
        env: Mapping[str, str],
        *,
        clock: Clock,
        umask: int,
        client: SlurmClient | None = None,
        script: Path | None = None,
        nodes: Sequence[str] | None = None,
        keep: Sequence[int] = (),
    ) -> None:
        """`keep`: descriptors that each srun inherits (`NodeClaims`). Raises JobEnvironmentError."""
        runner = SubprocessRunner(env)
        self._env = dict(env)
        self._client = client or SlurmClient(runner, clock, on_answer=ControllerOutage(clock).on_answer)
        self._clock = clock
        self._hurried = client or SlurmClient(runner, clock, timeout=HURRIED_SECONDS)
        self._confirming = client or SlurmClient(runner, clock, timeout=CONFIRM_SECONDS)
        self.umask = umask
        self._job = JobEnvironment.from_env(env)
        self._nodes = self._job.nodes if nodes is None else tuple(nodes)
        self._keep = tuple(keep)
        self._id = JobId(self._job.requeue_id)
        self._script = script
        self._placement = placement(script, self._job.cluster, env)
        self._state: JobState | None = None
        self._gpu_flags: tuple[str, ...] = ()
        self._requeuer = JobRequeuer(
            self._client, clock, job=self._id, restart_count=self._job.restart_count, array_task=self._job.array_task_id
        )

    def facts(self, spec: RunSpec) -> AttemptInfo:
        kill_wait, versions, site_allows = None, {}, True
        try:
            config = self._client.config()
            kill_wait, versions = float(config.kill_wait), {"slurm": ".".join(map(str, config.version))}
            site_allows, self._requeuer.has_epilog = config.job_requeue, config.has_epilog
        except SlurmError as error:
            logger.warning("Slurm's settings can't be read: %s", error)
        arming = self._arm(spec, site_allows=site_allows)
        self._gpu_flags = step_gpu_flags(self._env, self._state)  # says what can't work before anything is made
        return attempt_facts(
            cluster="slurm",
            nodes=self._nodes,
            job_id=self._job.requeue_id,
            slurm_cluster=self._job.cluster or "",
            slurm_job_ids=(self._job.job_id,),
            restart_count=self._job.restart_count,
            requeue_armed=arming.way is not RequeueWay.NONE,
            requeue_reason=arming.reason,
            requeue_way=arming.way.value,
            kill_wait=kill_wait,
            versions=versions,
        )

    def _arm(self, spec: RunSpec, *, site_allows: bool) -> Arming:
        state, problem, missing = None, "", ""
        try:
            self._state = state = self._client.job_state(self._id)
        except SlurmMissingError as error:
            missing = str(error.facts["why"])
        except SlurmError as error:
            problem = f"Slurm does not answer: {error}"
        can_chain = self._script is not None
        arming = decide_arming(
            spec, state, can_chain=can_chain, site_allows=site_allows, problem=problem, missing=missing
        )
        try:
            if arming.way is RequeueWay.ALLOW:
                self._client.allow_requeue(self._id)
                return Arming(RequeueWay.REQUEUE, f"{arming.reason}; it was set for this job")
            if arming.way is RequeueWay.CHAIN:
                why = self._client.would_run(str(self._script), extra=self._placement)
                if why is not None and "violates accounting/QOS policy" in why:  # a limit of the account or the QOS
                    # Slurm took this very script: what is over its limit now is the number of jobs, which changes.
                    reason = (
                        f"{arming.reason}; a job more would be refused now, so it is tried at this one's end: {why}"
                    )
                    return Arming(arming.way, reason)
                if why is not None:
                    return Arming(RequeueWay.NONE, f"no job can be submitted from here: {why}")
        except SlurmUnavailableError as error:
            return Arming(arming.way, f"{arming.reason}; not verified: {error}")
        except SlurmError as error:
            return Arming(RequeueWay.NONE, f"{arming.reason}, and nothing else is possible: {error}")
        return arming

    def launcher(self, spec: RunSpec, paths: RunPaths, attempt: AttemptInfo) -> SlurmLauncher:
        # The mark goes into the task's environment, not into srun's: a new agent on this host would take srun for a
        # stranger's leftover. By a shell: env takes an interpreter's path with "=" in it for another variable.
        export = f'export {NODE_TAG_VARIABLE}="$1"; shift; exec "$@"'
        marked = ["/bin/sh", "-c", export, "hpc-elastic", node_mark(spec, "slurm")]  # its name stands before messages
        return SlurmLauncher(
            attempt.nodes,
            [*marked, *agent_command(paths, attempt.number)],
            environment=self._env,
            min_nodes=spec.min_nodes,
            allocated=self._job.nodes,
            keep=self._keep,
            extra=(*self._gpu_flags, *_container_arguments(spec, paths), *spec.srun_args),
            umask=self.umask,
        )

    def ask(self, *, near: float) -> SlurmAnswer:
        try:
            state = self._hurried.job_state(self._id)
        except SlurmError:
            return SlurmAnswer(JobCondition.SILENT)
        return slurm_answer(state, restarts=self._job.restart_count, near=near, now_ns=self._clock.time_ns())

    def allocation(self) -> Allocation:
        try:
            state = self._confirming.job_state(self._id)
        except SlurmMissingError:
            return Allocation.HELD  # nodes without Slurm's commands: no other of them could ask either
        except SlurmError:
            return Allocation.UNKNOWN
        return allocation_of(state, restarts=self._job.restart_count, node=self._env.get("SLURMD_NODENAME", ""))

    def nodes_up(self) -> frozenset[str]:
        try:
            return frozenset().union(*(part.usable_names for part in self._hurried.partitions()))
        except SlurmError:
            return frozenset()

    def how_script_ended(self) -> str | None:
        try:
            state = self._hurried.job_state(self._id)
        except SlurmError:
            return None
        ended = state is not None and state.phase in (JobPhase.COMPLETING, JobPhase.FINISHED)
        return state.how_it_ended if state is not None and ended and (state.reason or state.exit_signal) else None

    def job_nodes(self) -> tuple[str, ...]:
        states = self._client.queue_states([self._id])
        return tuple(node for state in states if state.phase is JobPhase.RUNNING for node in state.nodes)

    def is_running(self, job_id: str) -> bool:
        try:
            states = self._hurried.queue_states([JobId(job_id)])
        except SlurmError:
            return False
        return any(state.phase is JobPhase.RUNNING for state in states)

    def eligible_nodes(self) -> EligibleNodes | None:
        return eligible_nodes(self._hurried, self._id)

    def why_not_without(self, paths: RunPaths, nodes: Sequence[str]) -> str | None:
        if self._script is None:
            return None
        try:
            script, extra = str(self._script), self._placement
            why = self._hurried.would_run(script, extra=[*extra, f"--exclude={compress(nodes)}"])
            # A refusal that the script gets in any case (its user has as many jobs as may be submitted, or a rule of
            # the site's keeps it out) says nothing of the nodes.
            return None if why is None or self._hurried.would_run(script, extra=extra) == why else why
        except SlurmError:
            return None  # not known; Slurm refuses a list that makes no sense

    def requeue(self, plan: NextAttempt) -> Requeued:
        done = self._requeuer.carry_out(replace(plan, script=self._script, placement=self._placement))
        if done.next_job and self._script is not None:  # the run is to be found by the follow-on job's id too
            problem = index.record(
                cluster=self._job.cluster or "",
                job_id=done.next_job,
                submitted_ns=self._clock.time_ns(),
                run_dir=self._script.parent,
                env=self._env,
            )
            if problem is not None:
                logger.warning("the run can't be found by job %s: %s", done.next_job, problem)
        return done

    def end_job(self) -> None:
        if self.allocation() is Allocation.LOST:
            logger.warning("job %s is no longer this attempt's; leaving it alone", self._id)
            return
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self._client.cancel(self._id)


def _container_arguments(spec: RunSpec, paths: RunPaths) -> list[str]:
    container = spec.container
    if container is None or container.image.runtime is not Runtime.PYXIS:
        return []
    folders = {sys.prefix, sys.base_prefix, str(Path(hpc_elastic.__file__).resolve().parent.parent)}
    packages = [path for path in sorted(folders) if not any(path.startswith(f"{other}/") for other in folders)]
    return pyxis_arguments(container, cwd=spec.cwd, run_dir=str(paths.root), packages=packages)


def own_script(paths: RunPaths) -> Path | None:
    """The script that `submit` made for this run or its array; None: the job's script is the user's own."""
    if task_index(paths.root.name) is not None:
        paths = RunPaths(paths.root.parent)
    return paths.script if paths.script.is_file() else None


_NAMES_CLUSTERS = re.compile(rb"^#SBATCH[ \t](?:.*[ \t])?(?:-M|--clusters?\b)", re.MULTILINE)


def placement(script: Path | None, cluster: str | None, env: Mapping[str, str]) -> tuple[str, ...]:
    """sbatch's arguments that keep a further job of a run on the cluster of the one before.

    A script, or a variable of sbatch's, may name several clusters; sbatch would choose again. Empty where none is
    named: ``--clusters`` takes an accounting that answers, and not every site has one.
    """
    try:
        named = bool(script and _NAMES_CLUSTERS.search(script.read_bytes()))
    except OSError:
        named = False
    named = named or any(env.get(name) for name in ("SBATCH_CLUSTERS", "SLURM_CLUSTERS"))
    return (f"--clusters={cluster}",) if named and cluster else ()
