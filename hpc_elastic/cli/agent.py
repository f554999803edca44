"""``srun … hpc-elastic agent SCRIPT``: a run whose agents are the tasks of a step of the user's own."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from hpc_elastic.base.clock import SystemClock
from hpc_elastic.cli.config import read_command_line
from hpc_elastic.cli.main import print_note
from hpc_elastic.cli.run import create_run_in_job, nodes_of
from hpc_elastic.errors import UsageError
from hpc_elastic.launch.batch import (
    StepRendezvous,
    StepRun,
    become_agent,
    check_one_task_per_node,
    run_batch,
    step_nodes,
)
from hpc_elastic.launch.run_directory import why_not_shared
from hpc_elastic.options.job_options import ignored_in_allocation, notice_seconds
from hpc_elastic.options.run_request import build_spec, runs_directory, working_directory
from hpc_elastic.options.sbatch import refuse_het_job
from hpc_elastic.options.table import Help, Parsed, explaining
from hpc_elastic.run.paths import ExitCode
from hpc_elastic.slurm.job_environment import JobEnvironment, in_job, without_run_variables

HELP = Help(
    usage="hpc-elastic agent [options] SCRIPT [script arguments...]",
    description="The agent of one node, started by srun in your own batch script, with one task on each node. Task 0 "
    "also writes the report and requeues the job. Script arguments go after the script.",
    examples=(("srun --ntasks-per-node=1 hpc-elastic agent train.py --lr 0.1", "in your own batch script"),),
)


def main(argv: Sequence[str]) -> int:
    env = without_run_variables(os.environ)
    parsed = read_command_line(argv, subcommand="agent", help_=HELP, env=env)
    if parsed is None:
        return 0
    job = JobEnvironment.from_env(env) if in_job(env) else None
    if job is None or job.task is None:
        raise UsageError(
            "agent must be started by srun in your own batch script (srun --ntasks-per-node=1 hpc-elastic agent "
            "SCRIPT); otherwise use hpc-elastic run or submit"
        )
    try:
        refuse_het_job(env)
        check_one_task_per_node(job.task)
    except UsageError:
        if job.task.procid == 0:
            raise
        return ExitCode.USAGE  # task 0 says why, once
    with explaining(parsed):
        return _take_part(parsed, job, env)


def _take_part(parsed: Parsed, job: JobEnvironment, env: Mapping[str, str]) -> int:
    assert job.task is not None
    cwd = working_directory(parsed, env)
    runs_dir = runs_directory(parsed, cwd)
    nodes = step_nodes(job)
    why = why_not_shared(runs_dir) if len(nodes) > 1 else None
    try:
        rendezvous = StepRendezvous(runs_dir, job, env, SystemClock())
    except OSError as error:
        raise UsageError(f"can't write in {runs_dir}: {error.strerror}; choose another with --runs-dir") from None
    if job.task.procid:
        run = rendezvous.wait()
        return ExitCode.USAGE if run.refused else become_agent(run, env)
    try:
        if why is not None:
            raise UsageError(f"the nodes can't see {runs_dir}: {why}; give a shared folder with --runs-dir")
        if ignored := ignored_in_allocation(parsed, "agent"):
            print_note(f"no effect in an existing allocation: {' '.join(ignored)}")
        rendezvous.clean()
        count = nodes_of(parsed, len(nodes), what="step")
        spec = build_spec(parsed, cluster="slurm", nodes=count, cwd=cwd, env=env, grace=notice_seconds(parsed))
        run_dir = create_run_in_job(job, spec, runs_dir, env)
    except BaseException:
        rendezvous.publish(StepRun(refused=True))
        raise
    return run_batch(run_dir, env, rendezvous=rendezvous)
