"""``hpc-elastic status RUN``: where a run stands now, from its files and one question to Slurm."""

from __future__ import annotations

import argparse
import json
import sys
import threading
from collections.abc import Sequence

from hpc_elastic.base.clock import Clock, SystemClock
from hpc_elastic.cli import bad_nodes, run_job
from hpc_elastic.cli.screen import is_terminal, output_failed
from hpc_elastic.cli.status_text import status_json, status_lines
from hpc_elastic.errors import UsageError
from hpc_elastic.launch.run_status import RunState, RunStatus, read_status
from hpc_elastic.output.terminal import one_line
from hpc_elastic.run.index import array_tasks, jobs_of
from hpc_elastic.run.paths import RunPaths
from hpc_elastic.slurm.client import SlurmClient
from hpc_elastic.slurm.job_state import JobState, seconds_until_end

WATCH_SECONDS = 5.0
"""Between two looks of ``--watch``: some file operations, and one squeue."""
_CLEAR = "\x1b[H\x1b[J"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommand's arguments."""
    run_job.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument(
        "-w", "--watch", action="store_true", help=f"again each {WATCH_SECONDS:g} s, until the run has ended"
    )
    parser.add_argument("--no-slurm", action="store_true", help="from the files alone")
    bad_nodes.add_forget_argument(parser, "the run")


def run(args: argparse.Namespace) -> int:
    """Print. Returns 0 whatever the run does: `report` has its exit code.

    Raises:
        UsageError: RUN means none.
    """
    paths = run_job.find_paths(args)
    if args.forget_nodes is not None:
        return bad_nodes.forget_run(args.forget_nodes, paths.nodes_json)
    clock = SystemClock()
    client = None if args.no_slurm else run_job.slurm_client(timeout=run_job.SHORT_SECONDS)
    while True:
        clears = args.watch and is_terminal(sys.stdout)
        try:
            if tasks := array_tasks(paths):
                has_ended = _show_array(paths, tasks, client, clock, as_json=args.json, clears=clears)
            else:
                ((status, job),) = run_job.ends_by_slurm(client, [read_status(paths, clock=clock)], clock=clock)
                _print(status, job, clock, as_json=args.json, clears=clears)
                has_ended = status.state is RunState.ENDED
        except OSError as error:
            if output_failed(error):
                raise
            raise UsageError(f"{error.filename or paths.root} can't be read: {error.strerror}") from None
        if not args.watch or has_ended:
            return 0
        clock.wait(threading.Event(), WATCH_SECONDS)


def _show_array(
    paths: RunPaths, tasks: Sequence[int], client: SlurmClient | None, clock: Clock, *, as_json: bool, clears: bool
) -> bool:
    from hpc_elastic.cli import status_array

    runs = status_array.read_tasks(paths, tasks, clock=clock)
    found = run_job.ends_by_slurm(client, list(runs.values()), clock=clock)
    runs = {task: status for task, (status, _) in zip(runs, found, strict=True)}
    jobs = {task: job for task, (_, job) in zip(runs, found, strict=True) if job is not None}
    told = [status.job_id.partition("_")[0] for status in runs.values() if status.job_id]
    known = [entry.job_id for entry in jobs_of(str(paths.root)) if "_" not in entry.job_id]
    number = next(iter((*known, *told)), "")
    if as_json:
        text = json.dumps(status_array.array_json(paths, runs, jobs))
    else:
        text = "\n".join(map(one_line, status_array.array_lines(paths, runs, jobs, number)))
    sys.stdout.write((_CLEAR if clears and not as_json else "") + text + "\n")
    sys.stdout.flush()
    return all(status.state is RunState.ENDED for status in runs.values())


def seconds_left(job: JobState | None, clock: Clock) -> float | None:
    """Until the job's time limit, never below 0; None where there is none."""
    left = seconds_until_end(job, now_ns=clock.time_ns())
    return None if left is None else max(0.0, left)


def _print(status: RunStatus, job: JobState | None, clock: Clock, *, as_json: bool, clears: bool) -> None:
    left = seconds_left(job, clock)
    if as_json:
        sys.stdout.write(json.dumps(status_json(status, job, seconds_left=left)) + "\n")
    else:
        lines = map(one_line, status_lines(status, job, seconds_left=left))
        sys.stdout.write((_CLEAR if clears else "") + "\n".join(lines) + "\n")
    sys.stdout.flush()
