"""Slurm's effects on this node's worker: a bound of its memory, and its notices. The probes, and their judges."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import ceil

from msgspec import Struct

from hpc_elastic.agent.health import memory_limits
from hpc_elastic.doctor.findings import DoctorFinding, fold, ok, problem, warn_unless
from hpc_elastic.doctor.probe_site import ProbeSite
from hpc_elastic.slurm.client import SlurmClient, SubprocessRunner
from hpc_elastic.slurm.commands import JobId
from hpc_elastic.slurm.errors import SlurmError
from hpc_elastic.slurm.job_environment import in_job
from hpc_elastic.worker_api.preemption import preemption_notice
from hpc_elastic.workers.linux import oom_kill_count

_NOTICE_SECONDS = 45.0
_SLOWEST_SECONDS = 720.0
"""The longest time of the slowest node for the probes before: a first import of torch, for example."""


class JobMemoryFacts(Struct, frozen=True, kw_only=True):
    limit: str = ""
    """The memory's limit, for a reader; empty: the node's alone."""
    counts_oom_kills: bool = False


class NoticeFacts(Struct, frozen=True, kw_only=True):
    seconds: float | None = None
    """Seconds from the request, or from the last wait for the others before it, to the worker's notice, if it came."""
    error: str = ""


def probe_memory(site: ProbeSite) -> JobMemoryFacts | None:
    if not in_job(site.env):
        return None
    limits = [each.limited_by for each in sorted(memory_limits(), key=lambda each: each.free)]
    return JobMemoryFacts(limit=next(iter(limits), ""), counts_oom_kills=oom_kill_count() is not None)


def probe_notice(site: ProbeSite) -> NoticeFacts | None:
    if not in_job(site.env):
        return None
    site.barrier("before-notice", seconds=_SLOWEST_SECONDS)
    began = site.clock.monotonic()
    error = ""
    if site.rank == 0:
        job = JobId(site.env.get("SLURM_JOB_ID") or site.env["SLURM_JOBID"])
        try:
            SlurmClient(SubprocessRunner(site.env), site.clock, timeout=20.0).notify(job)
        except SlurmError as refusal:
            error = str(refusal)
    error = json.loads(site.gather("notice", json.dumps(error), seconds=30.0).get(0, '""'))
    if error:
        return NoticeFacts(error=error)
    while (waited := site.clock.monotonic() - began) < _NOTICE_SECONDS:
        if preemption_notice() is not None:
            return NoticeFacts(seconds=waited)
        site.clock.wait(site.stop, 0.1)
    return NoticeFacts()


def judge_job(memories: Mapping[str, JobMemoryFacts], notices: Mapping[str, NoticeFacts]) -> list[DoctorFinding]:
    return [
        *fold([(node, _memory(each)) for node, each in memories.items()]),
        *fold([(node, _notice(each)) for node, each in notices.items()]),
    ]


def _memory(memory: JobMemoryFacts) -> DoctorFinding:
    lacks = "" if memory.counts_oom_kills else ", and OOM kills are not counted"
    return warn_unless(
        bool(memory.limit) and not lacks, "nodes.memory", (memory.limit or "no limit of the job's memory") + lacks,
        "a worker out of memory takes others of the node with it, or its end is not explained",
        "--mem with what the workers need; ask the site about cgroups (ConstrainRAMSpace)",
    )  # fmt: skip


def _notice(notice: NoticeFacts) -> DoctorFinding:
    if notice.seconds is not None:
        return ok("nodes.signals", f"a signal to the batch script reached the workers within {ceil(notice.seconds)} s")
    return problem(
        "nodes.signals", notice.error or "a signal to the batch script did not reach the workers",
        "before a time limit or a preemption there is no time for a last checkpoint",
        "save often; ask the site whether scancel --signal --batch works on nodes",
    )  # fmt: skip
