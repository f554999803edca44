"""``hpc-elastic status RUN``: where a run stands now, from its files and one question to Slurm."""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time

from hpc_elastic.cli.run_argument import RUN_HELP, find_run_dir
from hpc_elastic.cli.screen import is_terminal, tell
from hpc_elastic.cli.status_text import status_json, status_lines
from hpc_elastic.clock import Clock, SystemClock
from hpc_elastic.errors import UsageError
from hpc_elastic.reading.run_status import RunState, RunStatus, read_status
from hpc_elastic.run_index import jobs_of
from hpc_elastic.run_paths import RunPaths, attempt_number
from hpc_elastic.slurm.client import CommandSlurmClient, SlurmClient, SubprocessRunner
from hpc_elastic.slurm.commands import JobId
from hpc_elastic.slurm.errors import SlurmError, SlurmMissingError
from hpc_elastic.slurm.job_state import JobState

WATCH_SECONDS = 5.0
"""Between two looks of ``--watch``: some file operations, and one squeue."""
SLURM_SECONDS = 10.0
_CLEAR = "\x1b[H\x1b[J"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommand's arguments."""
    parser.add_argument("run", metavar="RUN|JOBID|DIR", help=RUN_HELP)
    parser.add_argument("--runs-dir", metavar="DIR", help="where runs are (default: ./runs)")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument(
        "-w", "--watch", action="store_true", help=f"again each {WATCH_SECONDS:g} s, until the run has ended"
    )
    parser.add_argument("--no-slurm", action="store_true", help="from the files alone")


def run(args: argparse.Namespace) -> int:
    """Print. Returns 0 whatever the run does: `report` has its exit code.

    Raises:
        UsageError: RUN means none.
    """
    folder = find_run_dir(args.run, args.runs_dir)
    paths = RunPaths(folder.parent if attempt_number(folder.name) is not None else folder)
    clock = SystemClock()
    client = None if args.no_slurm else CommandSlurmClient(SubprocessRunner(os.environ), clock, timeout=SLURM_SECONDS)
    while True:
        try:
            status = read_status(paths, clock=clock)
        except OSError as error:
            raise UsageError(f"{error.filename or paths.root} can't be read: {error.strerror}") from None
        job = ask_slurm(client, status) if client is not None else None
        _print(status, job, clock, as_json=args.json, clears=args.watch and is_terminal(sys.stdout))
        if not args.watch or status.state is RunState.ENDED:
            return 0
        clock.wait(threading.Event(), WATCH_SECONDS)


def ask_slurm(client: SlurmClient, status: RunStatus) -> JobState | None:
    """What Slurm says of the run's job; None where it knows nothing of it, or can't be asked: then that is said."""
    if status.cluster != "slurm" or status.state is RunState.ENDED:
        return None
    job_id = status.job_id
    if job_id is None:
        known = jobs_of(status.run_dir)
        job_id = known[0].job_id if known else None
    if job_id is None:
        return None
    try:
        states = client.queue_states([JobId(job_id)])
    except SlurmMissingError:
        return None
    except SlurmError as error:
        tell(f"Slurm can't be asked: {error}")
        return None
    return states[0] if states else None


def seconds_left(job: JobState | None, clock: Clock) -> float | None:
    """Until the job's time limit, by this host's wall clock and time zone; None where there is none."""
    try:
        end = time.mktime(time.strptime(job.end_time if job and job.end_time else "", "%Y-%m-%dT%H:%M:%S"))
    except (ValueError, OverflowError):
        return None
    return max(0.0, end - clock.time_ns() / 1e9)


def _print(status: RunStatus, job: JobState | None, clock: Clock, *, as_json: bool, clears: bool) -> None:
    left = seconds_left(job, clock)
    if as_json:
        sys.stdout.write(json.dumps(status_json(status, job, seconds_left=left)) + "\n")
    else:
        lines = status_lines(status, job, seconds_left=left)
        sys.stdout.write((_CLEAR if clears else "") + "\n".join(lines) + "\n")
    sys.stdout.flush()
