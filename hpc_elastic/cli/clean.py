"""``hpc-elastic clean``: removes the directories of runs that have ended, by age, state and size."""

from __future__ import annotations

import os
import re
import shutil
import stat
import sys
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import click
from msgspec import Struct

from hpc_elastic.base.clock import Clock, SystemClock
from hpc_elastic.base.text import plural, size_text
from hpc_elastic.cli import run_job
from hpc_elastic.cli.list_runs import STATES, asked_states, folders_of_runs, states_of
from hpc_elastic.cli.main import is_terminal, print_note
from hpc_elastic.cli.run_argument import RUN_HELP, RUNS_DIR, complete_runs, find_run_dir
from hpc_elastic.cli.status import duration
from hpc_elastic.errors import UsageError
from hpc_elastic.launch.run_status import RunState, RunStatus, ends_by_slurm, read_status, silent_for
from hpc_elastic.output.terminal import one_line
from hpc_elastic.run.index import array_tasks
from hpc_elastic.run.log_pieces import parse_bytes
from hpc_elastic.run.paths import RunPaths, attempt_number

ABANDONED_SECONDS = 24 * 3600.0
"""Agents write signs of life every half minute at most: a run of this machine that has written none so long died."""
_AGE = re.compile(r"(\d{1,6})([mhdw]?)\Z", re.ASCII)
_SECONDS = {"m": 60, "h": 3600, "": 86400, "d": 86400, "w": 7 * 86400}
_AT_ONCE = 100


class OldRun(Struct, frozen=True, kw_only=True):
    paths: RunPaths
    statuses: tuple[RunStatus, ...]
    size: int
    age: float
    """Seconds since its end, or since its last change where its end is not known."""


PARAMETERS = (
    click.Argument(["runs"], metavar="[RUN|JOBID|DIR]...", nargs=-1, shell_complete=complete_runs),
    RUNS_DIR,
    click.Option(
        ["--older-than"], metavar="AGE", help="only runs that ended at least this long ago, as in 30d, 12h or 2w"
    ),
    click.Option(
        ["--state"], metavar="|".join(STATES), help="only runs with one of these outcomes, as in succeeded,cancelled"
    ),
    click.Option(["--larger-than"], metavar="SIZE", help="only runs larger than this, as in 500M or 1G"),
    click.Option(["-y", "--yes"], is_flag=True, help="remove them without asking"),
    click.Option(["-n", "--dry-run"], is_flag=True, help="show what would be removed, and change nothing"),
)
NOTE = f"RUN: only these: {RUN_HELP}"


def run(args: SimpleNamespace) -> int:
    older = 0.0
    if args.older_than is not None:
        match = _AGE.match(args.older_than)
        if match is None:
            wrong = "give an age such as 30d, 12h or 2w (m, h, d, w; days without a unit)"
            raise UsageError(f"--older-than {args.older_than}: {wrong}")
        older = float(int(match[1]) * _SECONDS[match[2]])
    wanted = asked_states(args.state)
    larger = -1 if args.larger_than is None else parse_bytes(args.larger_than, "--larger-than")
    if not (args.runs or wanted or args.older_than or args.larger_than):
        raise UsageError("name the runs to remove: RUN..., --older-than 30d, --state failed or --larger-than 1G")
    clock = SystemClock()
    paths = [_named(text, args.runs_dir) for text in args.runs] or [
        run for run in map(RunPaths, folders_of_runs(args.runs_dir)[1]) if run.run_json.is_file()
    ]
    found = []
    for old in ended_runs(paths, clock, says_why=bool(args.runs)):
        states = {name for status in old.statuses for name in states_of(status)}
        if (wanted and not wanted & states) or old.age < older or old.size <= larger:
            continue
        sys.stdout.write(one_line(f"{size_text(old.size):>9}  {duration(old.age):>12} ago  {old.paths.root}") + "\n")
        found.append(old)
    total = f"{plural(len(found), 'run')}, {size_text(sum(old.size for old in found))}"
    if not found or args.dry_run:
        print_note(f"would remove {total}" if found else "no ended run matches; nothing is removed")
        return 0
    if not args.yes:
        if not is_terminal(sys.stdin):
            raise UsageError(f"{total} would be removed, and there is no terminal to ask on; give --yes")
        sys.stdout.flush()
        sys.stderr.write(f"hpc-elastic: remove {total}? [y/N] ")
        sys.stderr.flush()
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            print_note("nothing is removed")
            return 0
    failed = [old for old in found if not _remove(old, clock)]
    print_note(f"removed {plural(len(found) - len(failed), 'run')}")
    return 1 if failed else 0


def ended_runs(paths: Sequence[RunPaths], clock: Clock, *, says_why: bool = False) -> Iterator[OldRun]:
    """Those of `paths` that have ended, with their sizes; `says_why` prints for each other one why it stays."""
    client = run_job.slurm_client(timeout=run_job.SHORT_SECONDS)
    for first in range(0, len(paths), _AT_ONCE):
        some = paths[first : first + _AT_ONCE]
        members = [[run.task(task) for task in array_tasks(run)] or [run] for run in some]
        flat = []
        for one in chain.from_iterable(members):
            try:
                flat.append(read_status(one, clock=clock))
            except OSError:
                flat.append(RunStatus(run_id="", run_dir="", name="", cluster="", state=RunState.TRAINING))
        known = iter(ends_by_slurm(client, flat, clock=clock, warn=print_note))
        for run, runs in zip(some, members, strict=True):
            statuses = tuple(next(known)[0] for _ in runs)
            silent = [_silent(one, status, clock) for one, status in zip(runs, statuses, strict=True)]
            if all(seconds is not None for seconds in silent):
                age = min(seconds for seconds in silent if seconds is not None)
                yield OldRun(paths=run, statuses=statuses, size=_bytes_in(run.root), age=age)
            elif says_why:
                print_note(f"{run.run_id} may be running ({statuses[0].state.value}); it is not removed")


def _silent(paths: RunPaths, status: RunStatus, clock: Clock) -> float | None:
    now = clock.time_ns()
    changed = silent_for(paths, status.attempt, now_ns=now) if status.attempt is not None else None
    if status.state is RunState.ENDED:
        return max(0.0, (now - status.ended_ns) / 1e9) if status.ended_ns else changed or 0.0
    is_abandoned = status.cluster == "local" and changed is not None and changed > ABANDONED_SECONDS
    return changed if is_abandoned else None


def _named(text: str, runs_dir: str | None) -> RunPaths:
    folder = find_run_dir(text, runs_dir)
    if attempt_number(folder.name) is not None:
        raise UsageError(f"{text} is one attempt of a run; give the run's directory, {folder.parent}")
    run_job.run_owner(text, RunPaths(folder))
    return RunPaths(folder)


def _remove(old: OldRun, clock: Clock) -> bool:
    """Returns whether the directory is gone. The run is read once more: it may have been started again meanwhile."""
    if not list(ended_runs([old.paths], clock, says_why=True)):
        return False
    try:
        run_job.run_owner("", old.paths)
        shutil.rmtree(old.paths.root)  # never through a symbolic link
    except UsageError as error:
        print_note(f"not removed: {error}")
        return False
    except OSError as error:
        print_note(f"{error.filename or old.paths.root} can't be removed: {error.strerror}")
        return False
    return True


def _bytes_in(folder: Path) -> int:
    total, left = 0, [str(folder)]
    while left:
        try:
            with os.scandir(left.pop()) as entries:
                for entry in entries:
                    found = entry.stat(follow_symlinks=False)
                    total += found.st_blocks * 512
                    if stat.S_ISDIR(found.st_mode):
                        left.append(entry.path)
        except OSError:
            continue
    return total
