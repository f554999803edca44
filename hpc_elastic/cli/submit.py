"""``hpc-elastic submit``: a run directory, a batch script, and sbatch; or the same run on this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from hpc_elastic.cli.command_line import read_command_line
from hpc_elastic.cli.screen import is_terminal, print_note
from hpc_elastic.launch.submit_job import Submission, dry_run, submission_client, submit_job
from hpc_elastic.options.run_request import asked_cluster, cluster_here, runs_directory, slurm_job, working_directory
from hpc_elastic.options.sbatch import SbatchOptions
from hpc_elastic.options.table import Parsed, explaining
from hpc_elastic.output.terminal import each_line
from hpc_elastic.run.paths import RunPaths
from hpc_elastic.slurm.commands import JobId

DESCRIPTION = (
    "Makes a run directory, writes the batch script into it, and submits it. What follows the script is the script's "
    "own. Without Slurm the run is done here and now, with agents side by side on this machine."
)


def main(argv: Sequence[str]) -> int:
    """Submit, or run here. Returns 0, or with --wait, --follow and on this machine the run's exit code."""
    env = os.environ
    parsed = read_command_line(argv, subcommand="submit", description=DESCRIPTION, env=env)
    if parsed is None:
        return 0
    with explaining(parsed):
        asked = asked_cluster(parsed)
        if cluster_here(asked, env) == "local":
            if asked == "auto":
                print_note("no sbatch here, so the run is done on this machine (--cluster local)")
            from hpc_elastic.cli.run import run_here

            return run_here(parsed, env, dry_run=parsed.flag("dry_run"))
        return _submit(parsed, env)


def _submit(parsed: Parsed, env: Mapping[str, str]) -> int:
    runs_dir = runs_directory(parsed, working_directory(parsed, env))
    submission = Submission(job=slurm_job(parsed, env), runs_dir=runs_dir)
    if parsed.flag("dry_run"):
        text = dry_run(submission)
        sys.stdout.write(each_line(text) if is_terminal(sys.stdout) else text)
        return 0
    from hpc_elastic.base.clock import SystemClock

    clock = SystemClock()
    client = submission_client(submission, env, clock, print_note)
    job = submit_job(submission, client, clock=clock, env=env, tell=print_note)
    from hpc_elastic.cli.follow import follow, leave

    options, tasks = submission.job.options, submission.job.tasks
    try:
        _print_where(job, submission.paths, options)
        if not (parsed.flag("wait") or parsed.flag("follow")):
            return 0
        if parsed.flag("follow") and tasks:
            print_note(f"an array has a log for each task: hpc-elastic logs --follow {job}_{tasks[0]}, say")
        shows_log = parsed.flag("follow") and options.output is None and not tasks
        return follow(client, job, submission.paths, clock=clock, show_log=shows_log)
    except KeyboardInterrupt:
        return leave(job, submission.paths)


def _print_where(job: JobId, paths: RunPaths, options: SbatchOptions) -> None:
    task = "task-*/" if options.array else ""
    log = options.output or f"{paths.root}/{task}job.log"
    text = (
        f"job             {job}{f' on cluster {job.cluster}' if job.cluster else ''}\n"
        f"run directory   {paths.root}\n"
        f"job log         {log}\n"
        f"workers' logs   {paths.root}/{task}attempt-*/round-*/rank-*/\n"
        f"report          hpc-elastic report {job}{'_TASK' if options.array else ''}\n"
        f"cancel          scancel {job}\n"
    )
    sys.stdout.write(each_line(text))
    sys.stdout.flush()
