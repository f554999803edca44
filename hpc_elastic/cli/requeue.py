"""``hpc-elastic requeue RUN``: have the workers save and the job requeued; or start a run that has ended again."""

from __future__ import annotations

import argparse
import sys

from hpc_elastic.cli.run_job import RunJob, add_arguments, find_run_job, slurm_client
from hpc_elastic.errors import UsageError
from hpc_elastic.reading.run_status import RunState
from hpc_elastic.slurm.client import SlurmClient
from hpc_elastic.slurm.commands import JobId
from hpc_elastic.slurm.job_state import JobPhase

__all__ = ["add_arguments", "requeue", "run"]


def run(args: argparse.Namespace) -> int:
    """Requeue.

    Raises:
        UsageError: it is not to be requeued now.
        SlurmError: Slurm did not do it.
    """
    sys.stdout.write(requeue(find_run_job(args), slurm_client()) + "\n")
    return 0


def requeue(asked: RunJob, client: SlurmClient) -> str:
    """Requeue, and say what happens. Raises as `run`."""
    status, job = asked.status, asked.job
    if status.state is RunState.REQUEUED and _has_ended(job, client):
        # Whoever had decided it was killed before Slurm heard of it.
        client.requeue(job)
        return f"job {job} had ended without the requeue that was decided; it is in the queue again now"
    if status.state is RunState.SUBMITTED and _has_ended(job, client):
        client.requeue(job)
        return f"job {job} had ended before it began; it is in the queue again now"
    if status.state in (RunState.SUBMITTED, RunState.REQUEUED):
        raise UsageError(f"job {job} waits in the queue already; hpc-elastic status {job} says for what")
    if status.state is RunState.ENDED:
        client.requeue(job)
        return f"job {job} is in the queue again; it goes on from the last checkpoint"
    if _has_ended(job, client):
        client.requeue(job)
        return f"job {job} had ended without a verdict; it is in the queue again, and goes on from the last checkpoint"
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


def _has_ended(job: JobId, client: SlurmClient) -> bool:
    states = client.queue_states([job])
    return bool(states) and all(state.phase is JobPhase.FINISHED for state in states)
