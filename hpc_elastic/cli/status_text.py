"""A run's status in lines for people, and as JSON."""

from __future__ import annotations

from typing import Any

from msgspec import to_builtins

from hpc_elastic.launch.job_watch import NodesDiffer, nodes_differ
from hpc_elastic.launch.run_status import RunState, RunStatus, StepStatus
from hpc_elastic.output.terminal import one_line
from hpc_elastic.report.fold import rank_ranges
from hpc_elastic.slurm.job_state import JobPhase, JobState
from hpc_elastic.slurm.notation import HostlistError, compress

JSON_VERSION = 1
_MOST_BEHIND = 8


def status_lines(status: RunStatus, job: JobState | None, *, seconds_left: float | None) -> list[str]:
    """The lines, the headline first.

    Args:
        status: From the files.
        job: What Slurm says; None: it was not asked, or knows nothing.
        seconds_left: Until the job's time limit.
    """
    where = f", attempt {status.attempt}" if status.attempt is not None else ""
    job_id = status.job_id or (job.job_id if job is not None else None)
    where += f", job {job_id}" if job_id else ""
    lines = [f"run {status.run_id}: {status.state.value}{where}"]

    def put(name: str, text: str) -> None:
        lines.append(f"  {name:<9}: {one_line(text)}")

    if job is not None:
        put("slurm", _slurm(job, seconds_left))
    if status.state is RunState.ENDED:
        put("ended", f"{status.outcome.replace('_', ' ')} (exit code {status.exit_code}){_because(status.reason)}")
    elif status.state is RunState.REQUEUED:
        put("requeued", f"{status.outcome.replace('_', ' ')}{_because(status.reason)}")
        if job is not None and job.phase is JobPhase.FINISHED:
            put("but", f"the job has ended: the requeue never came about; hpc-elastic requeue {job_id} makes up for it")
    elif status.state is RunState.ENDING:
        put("ending", status.reason)
    if status.round is not None and status.members:
        put("round", f"{status.round}: {len(status.members)} nodes, {status.workers} workers: {_names(status.members)}")
    elif status.round is not None and status.state is RunState.MEETING:
        put("round", f"{status.round}: nodes are meeting")
    if status.lost:
        put("lost", _names(status.lost))
    if status.bad_nodes:
        put("left out", _names(status.bad_nodes))
    if differ := _differ(status, job):
        put("differs", str(differ))
    if status.waiting:
        put("waiting", f"{status.waiting} nodes for a place")
    if status.opened_because:
        put("because", status.opened_because)
    if status.steps is not None:
        put("steps", _steps(status.steps))
    put("used", f"{status.restarts_used} of {status.max_restarts} restarts in this attempt, "
        f"{status.requeues_used} of {status.max_requeues} requeues")  # fmt: skip
    put("directory", status.run_dir)
    if status.problem:
        put("problem", status.problem)
    return lines


def status_json(status: RunStatus, job: JobState | None, *, seconds_left: float | None) -> dict[str, Any]:
    """The same as an object: docs/reference/status-json.md."""
    slurm: dict[str, Any] | None = None
    if job is not None:
        slurm = {
            "state": job.state,
            "reason": job.reason,
            "nodes": list(job.nodes),
            "seconds_left": seconds_left,
        }
        if differ := _differ(status, job):
            slurm["differs"] = str(differ)
    return {"version": JSON_VERSION, **to_builtins(status), "state": status.state.value, "slurm": slurm}


def _differ(status: RunStatus, job: JobState | None) -> NodesDiffer:
    """Where Slurm and the run disagree about the job's nodes."""
    if job is None or job.phase is not JobPhase.RUNNING or status.state is RunState.ENDED:
        return NodesDiffer()
    return nodes_differ(used=status.members, lost=status.lost, job=job.nodes)


def duration(seconds: float) -> str:
    """``3:41:20``, ``2-03:00:00``."""
    whole = int(max(0.0, seconds))
    days, rest = divmod(whole, 86400)
    clock = f"{rest // 3600}:{rest % 3600 // 60:02d}:{rest % 60:02d}"
    return f"{days}-{clock:0>8}" if days else clock


def _slurm(job: JobState, seconds_left: float | None) -> str:
    text = job.state + (f" ({job.reason})" if job.reason else "")
    if job.phase is JobPhase.RUNNING and seconds_left is not None:
        text += f", {duration(seconds_left)} left"
    elif job.way_out:
        text += f", {job.way_out}"
    elif job.phase is JobPhase.PENDING and job.start_time:
        text += f", expected to start {job.start_time.replace('T', ' ')}"
    return text


def _steps(steps: StepStatus) -> str:
    text = f"{steps.least}" if steps.least == steps.most else f"{steps.least} to {steps.most}"
    if steps.behind:
        more = ", …" if len(steps.behind) > _MOST_BEHIND else ""
        text += f" (behind: rank {rank_ranges(steps.behind[:_MOST_BEHIND])}{more})"
    return f"{text}; told {duration(steps.told_seconds)} ago by {steps.ranks} workers"


def _because(reason: str) -> str:
    return f": {reason}" if reason else ""


def _names(names: tuple[str, ...]) -> str:
    try:
        return compress(names)
    except HostlistError:
        return ", ".join(names)
