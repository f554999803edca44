"""What Slurm gave this node's worker: CPUs, memory, and whether a notice reaches it: probes and their judges."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from math import ceil

from msgspec import Struct

from hpc_elastic.agent.health import measure_memory
from hpc_elastic.base.self_command import source_command
from hpc_elastic.doctor.findings import Finding, fold, ok, problem, warn_unless, warning
from hpc_elastic.doctor.probe_site import ProbeSite
from hpc_elastic.slurm.client import CommandSlurmClient, SubprocessRunner
from hpc_elastic.slurm.commands import JobId
from hpc_elastic.slurm.errors import SlurmError
from hpc_elastic.slurm.job_environment import in_job
from hpc_elastic.slurm.notation import HostlistError, expand, expand_counts
from hpc_elastic.worker_api.preemption import preemption_notice
from hpc_elastic.workers.linux import memory_folders, oom_kill_count

_MOST_TAKEN = 4 << 30
"""Bytes that a probe takes to see an OOM kill."""
_TAKING_SECONDS = 40.0
_TAKE = """
try:
    open("/proc/self/oom_score_adj", "w").write("1000")
except OSError:
    pass
taken = []
for _ in range(int(sys.argv[1]) >> 24):
    taken.append(b"x" * (1 << 24))
"""
_NOTICE_SECONDS = 45.0
_ASK_SECONDS = 30.0
_SLOWEST_SECONDS = 720.0
"""How long the slowest node may take for the probes before: a first import of torch, say."""


class JobFacts(Struct, frozen=True, kw_only=True):
    """Measured within the job, without changing it."""

    cpus: int
    """That the worker may use."""
    job_cpus: int | None = None
    """Of the job on this node, as Slurm says."""
    host_cpus: int = 0
    limit: str = ""
    """What limits the memory, for a reader; empty: the node's alone."""
    counts_oom_kills: bool = False
    oom_kill_seen: bool | None = None
    """A process that took more than the limit was killed, and that was counted; None: not tried."""


class NoticeFacts(Struct, frozen=True, kw_only=True):
    """Whether a signal to the batch script is seen by the workers."""

    seconds: float | None = None
    """From the request, or from the last wait for the others before it, to the worker's notice; None: it did not
    come."""
    error: str = ""
    """Why it could not be asked for."""


def probe_job(site: ProbeSite) -> JobFacts | None:
    """CPUs and memory; None where there is no Slurm job."""
    if not in_job(site.env):
        return None
    memory, counted = measure_memory(), oom_kill_count() is not None
    limit = memory.limited_by if memory is not None else ""
    seen = None
    if memory is not None and limit and counted and memory.free < _MOST_TAKEN and not _is_killed_as_a_group():
        seen = _sees_oom_kill(memory.free)
    return JobFacts(
        cpus=len(os.sched_getaffinity(0)),
        job_cpus=_job_cpus(site),
        host_cpus=os.cpu_count() or 0,
        limit=limit,
        counts_oom_kills=counted,
        oom_kill_seen=seen,
    )


def _job_cpus(site: ProbeSite) -> int | None:
    """As the job got them: the step may have fewer (Slurm 22.05 does not hand --cpus-per-task on to srun)."""
    try:
        counts = expand_counts(site.env.get("SLURM_JOB_CPUS_PER_NODE", ""))
        return counts[expand(site.env.get("SLURM_JOB_NODELIST", "")).index(site.node)]
    except (HostlistError, ValueError, IndexError):
        return None


def _is_killed_as_a_group() -> bool:
    """Whether the kernel would kill the agent too (Slurm 24.05 and later, OOMKillStep)."""
    for folder, _ in memory_folders():
        try:
            with open(os.path.join(folder, "memory.oom.group")) as file:
                if file.read().strip() == "1":
                    return True
        except OSError:
            continue
    return False


def _sees_oom_kill(free: int) -> bool:
    before = oom_kill_count() or 0
    try:
        done = subprocess.run(
            [*source_command(sys.executable, _TAKE), str(free + (1 << 30))],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=_TAKING_SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == -9 and (oom_kill_count() or 0) > before


def probe_notice(site: ProbeSite) -> NoticeFacts | None:
    """Have Slurm signal the batch script, as at the time limit, and wait for the notice; None without a Slurm job."""
    if not in_job(site.env):
        return None
    site.barrier("before-notice", seconds=_SLOWEST_SECONDS)
    began = site.clock.monotonic()
    error = _ask_for_notice(site) if site.rank == 0 else ""
    error = json.loads(site.gather("notice", json.dumps(error), seconds=_ASK_SECONDS).get(0, '""'))
    if error:
        return NoticeFacts(error=error)
    while (waited := site.clock.monotonic() - began) < _NOTICE_SECONDS:
        if preemption_notice() is not None:
            return NoticeFacts(seconds=waited)
        site.clock.wait(site.stop, 0.1)
    return NoticeFacts()


def _ask_for_notice(site: ProbeSite) -> str:
    """Returns why Slurm refused; empty: it did not."""
    job = JobId(site.env.get("SLURM_JOB_ID") or site.env["SLURM_JOBID"])
    try:
        CommandSlurmClient(SubprocessRunner(site.env), site.clock, timeout=20.0).notify(job)
    except SlurmError as error:
        return str(error)
    return ""


# -- judged --------------------------------------------------------------------------------------------------------


def judge_job(
    jobs: Mapping[str, JobFacts], notices: Mapping[str, NoticeFacts], *, kill_wait: float | None
) -> list[Finding]:
    """Judge the nodes' facts; `kill_wait`: Slurm's, in seconds."""
    return [
        *fold([(node, finding) for node, each in jobs.items() for finding in _job(each)]),
        *fold([(node, _notice(each, kill_wait)) for node, each in notices.items()]),
    ]


def _job(job: JobFacts) -> Iterator[Finding]:
    given = job.job_cpus or job.cpus
    if job.cpus < given:
        yield problem(
            "nodes.cpus", f"workers may use {job.cpus} of the job's {given} CPUs",
            "data loaders and compilers share them: training is slow",
            "--cpus-per-task with the number for the node; ask the site about TaskPlugin",
        )  # fmt: skip
    else:
        yield warn_unless(
            job.cpus > 1 or job.host_cpus == 1, "nodes.cpus",
            f"workers may use {job.cpus} of the node's {job.host_cpus} CPUs", "all workers of a node share it",
            "--cpus-per-task N, or --exclusive",
        )  # fmt: skip
    if job.oom_kill_seen is False:
        yield warning(
            "nodes.memory", f"a process that took more than {job.limit} was not killed, or that was not counted",
            "a worker out of memory may slow the node down, or look as if a person had killed it",
            "--health-checks memory=SIZE; ask the site about ConstrainRAMSpace and ConstrainSwapSpace",
        )  # fmt: skip
    elif not job.limit or not job.counts_oom_kills:
        yield warning(
            "nodes.memory", "no limit of the job's memory" if not job.limit else "OOM kills are not counted",
            "a worker out of memory takes others of the node with it, or its end is not explained",
            "--mem with what the workers need; ask the site about cgroups (ConstrainRAMSpace)",
        )  # fmt: skip
    else:
        tried = "; a process beyond it was killed, and counted" if job.oom_kill_seen else ""
        yield ok("nodes.memory", f"{job.limit}{tried}")


def _notice(notice: NoticeFacts, kill_wait: float | None) -> Finding:
    if notice.seconds is not None:
        return ok("nodes.signals", f"a signal to the batch script reached the workers within {ceil(notice.seconds)} s")
    left = f" but the {kill_wait:g} s of KillWait" if kill_wait is not None else ""
    return problem(
        "nodes.signals", notice.error or "a signal to the batch script did not reach the workers",
        f"before a time limit or a preemption there is no time for a last checkpoint{left}",
        "save often; ask the site whether scancel --signal --batch works on nodes",
    )  # fmt: skip
