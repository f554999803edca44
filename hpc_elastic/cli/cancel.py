"""``hpc-elastic cancel RUN``: end its job in order."""

from __future__ import annotations

import argparse
import sys

from hpc_elastic.cli.run_job import RunJob, add_arguments, find_run_job, slurm_client
from hpc_elastic.errors import UsageError
from hpc_elastic.launch.run_status import RunState
from hpc_elastic.output.terminal import one_line
from hpc_elastic.run.index import array_tasks
from hpc_elastic.slurm.client import SlurmClient

__all__ = ["add_arguments", "cancel", "run"]


def run(args: argparse.Namespace) -> int:
    """Cancel.

    Raises:
        UsageError: there is nothing to cancel.
        SlurmError: Slurm did not do it.
    """
    sys.stdout.write(one_line(cancel(find_run_job(args, arrays=True), slurm_client())) + "\n")
    return 0


def _where_the_report_is(asked: RunJob) -> str:
    if asked.paths.job_log.is_file():
        return f"the report will stand in {asked.paths.job_log}"
    return f"then see hpc-elastic report {asked.job}"  # a batch script of the user's own has its own log


def cancel(asked: RunJob, client: SlurmClient) -> str:
    """Cancel, and say what happens. Raises as `run`."""
    status = asked.status
    tasks = array_tasks(asked.paths)
    if tasks:
        client.cancel(asked.job)
        return f"job {asked.job} is cancelled: none of its {len(tasks)} runs begins any more, and those that run end"
    if status.state is RunState.ENDED:
        raise UsageError(f"run {status.run_id} has ended already: {status.outcome.replace('_', ' ')}")
    client.cancel(asked.job)
    if status.state in (RunState.SUBMITTED, RunState.REQUEUED):
        return f"job {asked.job} is cancelled; none of its workers was running"
    return f"job {asked.job} is cancelled: its workers get SIGTERM; {_where_the_report_is(asked)}"
