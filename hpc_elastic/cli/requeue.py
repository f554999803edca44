"""``hpc-elastic requeue RUN``: have the workers save and the job requeued; or start a run that has ended again."""

from __future__ import annotations

import argparse
import os
import sys

from hpc_elastic.base.clock import SystemClock
from hpc_elastic.cli.run_job import RunJob, add_arguments, find_run_job, slurm_client
from hpc_elastic.errors import UsageError
from hpc_elastic.launch.run_status import RunState
from hpc_elastic.launch.slurm_site import own_script
from hpc_elastic.output.terminal import one_line
from hpc_elastic.run import index
from hpc_elastic.run.paths import task_index
from hpc_elastic.slurm.client import SlurmClient
from hpc_elastic.slurm.commands import JobId
from hpc_elastic.slurm.errors import RequeueDisabledError, SlurmPermissionError, UnknownJobError
from hpc_elastic.slurm.job_state import JobPhase

__all__ = ["add_arguments", "requeue", "run"]


def run(args: argparse.Namespace) -> int:
    """Requeue.

    Raises:
        UsageError: it is not to be requeued now.
        SlurmError: Slurm did not do it.
    """
    sys.stdout.write(one_line(requeue(find_run_job(args), slurm_client())) + "\n")
    return 0


def requeue(asked: RunJob, client: SlurmClient) -> str:
    """Requeue, and say what happens. Raises as `run`."""
    status, job = asked.status, asked.job
    if status.state is RunState.REQUEUED and _has_ended(job, client):
        # Whoever had decided it was killed before Slurm heard of it.
        return _again(
            asked, client, f"job {job} had ended without the requeue that was decided; it is in the queue again now"
        )
    if status.state is RunState.SUBMITTED and _has_ended(job, client):
        return _again(asked, client, f"job {job} had ended before it began; it is in the queue again now")
    if status.state in (RunState.SUBMITTED, RunState.REQUEUED):
        raise UsageError(f"job {job} waits in the queue already; hpc-elastic status {job} says for what")
    if status.state is RunState.ENDED:
        return _again(asked, client, f"job {job} is in the queue again; it goes on from the last checkpoint")
    if _has_ended(job, client):
        said = "had ended without a verdict; it is in the queue again, and goes on from the last checkpoint"
        return _again(asked, client, f"job {job} {said}")
    if status.requeues_used >= status.max_requeues:
        raise UsageError(
            f"run {status.run_id} has used its {status.max_requeues} requeues: a notice would end it for good; "
            f"end it with hpc-elastic cancel {job}"
        )
    if status.state in (RunState.SAVING, RunState.ENDING):
        return f"job {job} is about to end already; hpc-elastic status {job} shows how far it is"
    client.notify(job)
    return (
        f"the workers of job {job} are asked to save; it is requeued when they have (hpc-elastic status {job} --watch)"
    )


def _again(asked: RunJob, client: SlurmClient, done: str) -> str:
    """Requeue a job that has ended; where Slurm does not do that, submit the run's script once more.

    Returns:
        `done`, or what was done instead.

    Raises:
        SlurmError: neither can be done.
    """
    try:
        client.requeue(asked.job)
        return done
    except (RequeueDisabledError, UnknownJobError, SlurmPermissionError) as error:
        script, task = own_script(asked.paths), task_index(asked.paths.root.name)
        if script is None or script.stat().st_uid != os.getuid():
            raise
        number = client.submit(str(script), extra=[] if task is None else [f"--array={task}"])
        job = str(number) if task is None else f"{number}_{task}"
        index.record(
            cluster=number.cluster or os.environ.get("SLURM_CLUSTER_NAME", ""),
            job_id=job,
            submitted_ns=SystemClock().time_ns(),
            run_dir=script.parent,
        )
        return f"job {job} goes on from the last checkpoint; job {asked.job} can't run again: {error.facts['why']}"


def _has_ended(job: JobId, client: SlurmClient) -> bool:
    states = client.queue_states([job])
    return bool(states) and all(state.phase is JobPhase.FINISHED for state in states)
