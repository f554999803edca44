"""``hpc-elastic status RUN``: where a run stands now, from its files and one question to Slurm."""

from __future__ import annotations

import argparse
import json
import sys
import threading

from hpc_elastic.cli import run_job
from hpc_elastic.cli.screen import is_terminal, tell
from hpc_elastic.cli.status_text import status_json, status_lines
from hpc_elastic.clock import Clock, SystemClock
from hpc_elastic.errors import UsageError
from hpc_elastic.reading.run_status import RunState, RunStatus, read_status
from hpc_elastic.slurm.client import SlurmClient
from hpc_elastic.slurm.errors import SlurmError, SlurmMissingError
from hpc_elastic.slurm.job_state import JobState, seconds_until_end

WATCH_SECONDS = 5.0
"""Between two looks of ``--watch``: some file operations, and one squeue."""
SLURM_SECONDS = 10.0
_CLEAR = "\x1b[H\x1b[J"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommand's arguments."""
    run_job.add_arguments(parser)
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
    paths = run_job.find_paths(args)
    clock = SystemClock()
    client = None if args.no_slurm else run_job.slurm_client(timeout=SLURM_SECONDS)
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
    job = run_job.job_of(status)
    if job is None:
        return None
    try:
        states = client.queue_states([job])
    except SlurmMissingError:
        return None
    except SlurmError as error:
        tell(f"Slurm can't be asked: {error}")
        return None
    return states[0] if states else None


def seconds_left(job: JobState | None, clock: Clock) -> float | None:
    """Until the job's time limit, never below 0; None where there is none."""
    left = seconds_until_end(job, now_ns=clock.time_ns())
    return None if left is None else max(0.0, left)


def _print(status: RunStatus, job: JobState | None, clock: Clock, *, as_json: bool, clears: bool) -> None:
    left = seconds_left(job, clock)
    if as_json:
        sys.stdout.write(json.dumps(status_json(status, job, seconds_left=left)) + "\n")
    else:
        lines = status_lines(status, job, seconds_left=left)
        sys.stdout.write((_CLEAR if clears else "") + "\n".join(lines) + "\n")
    sys.stdout.flush()
