"""``hpc-elastic chaos RUN --fault …``: does one fault, or a series, to a run of one's own that is going on."""

from __future__ import annotations

import argparse
import os
import random
import re
import sys
import time
from itertools import count

from hpc_elastic.base.text import plural
from hpc_elastic.cli.run_argument import check_single, whole_number
from hpc_elastic.cli.run_job import add_arguments as add_run_arguments
from hpc_elastic.cli.run_job import find_paths, slurm_client
from hpc_elastic.cli.screen import is_terminal, print_note
from hpc_elastic.errors import UsageError
from hpc_elastic.output.terminal import one_line
from hpc_elastic.rehearsal.chaos import KINDS, Chaos
from hpc_elastic.rehearsal.faults import NATURES, Kind, parse_kinds, plan
from hpc_elastic.run.paths import RunPaths

_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser)
    names = ", ".join(kind.value for kind in KINDS)
    parser.add_argument("--fault", required=True, metavar="NAME,...", help=f"what is done: {names}; or all")
    parser.add_argument(
        "--every", metavar="TIME", help="go on with another fault after so long, as in 10m, until the end"
    )
    parser.add_argument("--times", type=whole_number, metavar="N", help="with --every: end after so many faults")
    parser.add_argument("--rank", type=whole_number, metavar="R", help="the rank that is hit (default: by the seed)")
    parser.add_argument("--seed", type=whole_number, metavar="N", help="for the same faults again (default: by chance)")
    parser.add_argument("--yes", action="store_true", help="do not ask first")


def run(args: argparse.Namespace) -> int:
    """Do it. Returns 0.

    Raises:
        UsageError: it is not one's own run, it does not run, or can't be reached from here; it was not confirmed.
    """
    kinds = parse_kinds(args.fault, "--fault", known=KINDS)
    every = None if args.every is None else _seconds(args.every)
    paths = find_paths(args)
    check_single(paths)
    chaos = Chaos(paths, rank=args.rank, client=slurm_client(), env=os.environ)
    if not args.yes:
        _ask(paths, kinds, args.every)
    seed = args.seed if args.seed is not None else random.randrange(1 << 16)
    for number, fault in zip(count(1), plan(seed, kinds), strict=False):
        sys.stdout.write(one_line(chaos.do(fault)) + "\n")
        sys.stdout.flush()
        if every is None or number == args.times:
            return 0
        time.sleep(every)
        if not chaos.is_running():
            print_note(f"the run has ended; {plural(number, 'fault')}, seed {seed}")
            return 0
    return 0


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text.strip())
    seconds = float(match[1]) * _UNITS[match[2]] if match is not None else 0.0
    if seconds < 1:
        raise UsageError(f"--every {text}: give a time of a second or more, as in 90s, 10m or 1h")
    return seconds


def _ask(paths: RunPaths, kinds: tuple[Kind, ...], every: str | None) -> None:
    what = ", ".join(NATURES[kind].title for kind in kinds)
    again = f", another one every {every}" if every else ""
    if not is_terminal(sys.stdin):
        raise UsageError(f"this does faults to run {paths.run_id} ({what}{again}); confirm it with --yes")
    sys.stderr.write(one_line(f"do this to run {paths.run_id}: {what}{again}? [y/N] "))
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise UsageError("nothing was done")
