"""``hpc-elastic list``: the runs in a folder, newest first, each in one line; Slurm is asked about all at once.

``hpc-elastic clean`` removes the directories of those that have ended, by age, state and size.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import sys
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import click
from msgspec import Struct

from hpc_elastic.base.clock import Clock, SystemClock
from hpc_elastic.base.text import duration, fit, plural, size_text
from hpc_elastic.cli import run_job
from hpc_elastic.cli.main import is_terminal, print_note, width_for
from hpc_elastic.cli.run_argument import RUN_HELP, RUNS_DIR, complete_runs, find_run_dir, runs_folder
from hpc_elastic.cli.status import LINE_HEAD, elapsed_text, read_goodput, status_json, status_line
from hpc_elastic.errors import UsageError
from hpc_elastic.launch.run_status import RunState, RunStatus, ends_by_slurm, read_status, silent_for
from hpc_elastic.output.terminal import one_line
from hpc_elastic.run.index import DEFAULT_RUNS_DIR, account_runs, array_tasks
from hpc_elastic.run.log_pieces import parse_bytes
from hpc_elastic.run.paths import Outcome, RunPaths, attempt_number

if TYPE_CHECKING:
    from hpc_elastic.report.goodput import Goodput


MOST = 20
STATES = (*(state.value for state in RunState), *(outcome.value for outcome in Outcome))
_AT_ONCE = 100
_LEAST_REASON = 10
"""Columns below which a reason is not begun."""

PARAMETERS = (
    RUNS_DIR,
    click.Option(["--state"], metavar="|".join(STATES), help="only runs in one of these states, as in training,failed"),
    click.Option(["--name"], metavar="TEXT", help="only runs whose name or id contains this"),
    click.Option(["-n", "--limit"], metavar="N", default=str(MOST), help=f"at most N, or all (default: {MOST})"),
    click.Option(["--json"], is_flag=True, help="print one JSON object per run, one per line"),
    click.Option(
        ["--goodput"], is_flag=True, help="show where the time of each run went, by its events, and of all together"
    ),
    click.Option(["--no-slurm"], is_flag=True, help="do not ask Slurm"),
)


def run(args: SimpleNamespace) -> int:
    wanted = asked_states(args.state)
    most = _limit(args.limit)
    where, folders = folders_of_runs(args.runs_dir)
    clock = SystemClock()
    client = None if args.no_slurm else run_job.slurm_client(timeout=run_job.SHORT_SECONDS)
    shown = seen = 0
    measured = MeasuredRuns() if args.goodput else None
    # A program that reads it gets whole lines.
    width = width_for(sys.stdout) if is_terminal(sys.stdout) else None
    runs = runs_in(folders)
    at_once = _AT_ONCE if most is None else min(_AT_ONCE, most + 1)
    while some := list(islice(runs, at_once)):
        statuses = [
            status for status in statuses_of(some, clock) if (args.name or "") in status.name + "\n" + status.run_id
        ]
        for status, _ in ends_by_slurm(client, statuses, clock=clock, warn=print_note):
            seen += 1
            if wanted and not wanted & states_of(status):
                continue
            if shown == most:
                _end(measured, as_json=args.json)
                print_note("more runs exist; --limit all shows them")
                return 0
            if not shown and not args.json:
                sys.stdout.write((LINE_HEAD if measured is None else measured.HEAD) + "\n")
            goodput = measured.read(status) if measured is not None else None
            if args.json:
                line = json.dumps(status_json(status, None, seconds_left=None, goodput=goodput))
            elif measured is not None:
                line = measured.line(status, goodput)
            else:
                line = status_line(status, clock.time_ns())
                # The reason is cut to the terminal's width, never what one needs to name the run.
                end = line.find(status.run_id) + len(status.run_id)
                if width is not None:
                    line = fit(line, width) if width > end + _LEAST_REASON else line[:end]
            sys.stdout.write(line + "\n")
            shown += 1
    _end(measured, as_json=args.json)
    if not shown:
        print_note(f"no such run in {where}" + (f" (of {plural(seen, 'run')})" if seen else ""))
    return 0


def folders_of_runs(runs_dir: str | None) -> tuple[str, list[Path]]:
    """Newest first. Without a runs folder here, they are the runs that this account has submitted."""
    chosen = runs_folder(runs_dir)
    folder = os.path.abspath(chosen or DEFAULT_RUNS_DIR)
    try:
        return folder, [Path(folder, name) for name in sorted(os.listdir(folder), reverse=True)]  # ids begin with time
    except OSError as error:
        if isinstance(error, FileNotFoundError) and chosen is None and (found := account_runs()):
            return "what this account has submitted", found
        raise UsageError(f"{folder} can't be read: {error.strerror}; say where runs are with --runs-dir") from None


def states_of(status: RunStatus) -> frozenset[str]:
    """The names by which ``--state`` finds a run: its state, its outcome if it has ended; ``failed`` is any bad end."""
    if status.state is not RunState.ENDED:
        return frozenset((status.state.value,))
    bad = (Outcome.FAILED,) if status.outcome in (Outcome.TOO_FEW_NODES, Outcome.TIMED_OUT) else ()
    return frozenset((status.state.value, status.outcome, *(end.value for end in bad)))


def statuses_of(some: Sequence[RunPaths], clock: Clock) -> Iterator[RunStatus]:
    for paths in some:
        try:
            yield read_status(paths, clock=clock)
        except OSError:
            continue  # it is being removed


def runs_in(folders: Sequence[Path]) -> Iterator[RunPaths]:
    for paths in map(RunPaths, folders):
        if paths.run_json.is_file():
            tasks = array_tasks(paths)
            yield from map(paths.task, tasks) if tasks else (paths,)


class MeasuredRuns:
    HEAD = f"{'goodput':<8}  {'of':<13}  run"

    def __init__(self) -> None:
        self._found: list[Goodput] = []

    def read(self, status: RunStatus) -> Goodput | None:
        found = read_goodput(Path(status.run_dir))
        self._found += [found] if found is not None else []
        return found

    def line(self, status: RunStatus, goodput: Goodput | None) -> str:
        """A run's line: the largest part first, what is below a tenth of a percent left out."""
        from hpc_elastic.report.goodput import describe_goodput

        if goodput is None:
            return one_line(f"{'-':<8}  {'-':<13}  {status.run_id}  it took less than a minute, or nothing is known")
        parts = sorted(describe_goodput(goodput)[1:], key=lambda part: -part[2])
        least = 0.0005 * goodput.wall
        shown = [f"{100 * seconds / goodput.wall:.1f} % {what}" for _, what, seconds in parts if seconds >= least]
        shown += [] if goodput.steps_known else [f"uptime of the processes, since {goodput.why_unknown}"]
        return one_line(f"{_share(goodput.share or 0.0, goodput.wall)}  {status.run_id}  {', '.join(shown)}")

    def of_all(self) -> str:
        if len(self._found) < 2:
            return ""
        wall = sum(one.wall for one in self._found)
        useful = sum((one.share or 0.0) * one.wall for one in self._found)
        without = sum(1 for one in self._found if not one.steps_known)
        by_uptime = f", {without} of them by uptime" if without else ""
        return f"{_share(useful / wall, wall)}  all {plural(len(self._found), 'run')} together{by_uptime}"


def _share(share: float, wall: float) -> str:
    return f"{f'{100 * share:.1f} %':>7}   {duration(wall):<13}"


def _end(measured: MeasuredRuns | None, *, as_json: bool) -> None:
    if measured is not None and not as_json and (line := measured.of_all()):
        sys.stdout.write(line + "\n")


def asked_states(text: str | None) -> frozenset[str]:
    names = [name.strip().replace("-", "_") for name in (text or "").split(",")] if text else []
    for name in names:
        if name not in STATES:
            raise UsageError(f"--state {name}: give one of {', '.join(STATES)}")
    return frozenset(names)


def _limit(text: str) -> int | None:
    if text == "all":
        return None
    if not (text.isascii() and text.isdigit() and int(text[:9]) > 0):
        raise UsageError(f"--limit {text}: give a number from 1, or all")
    return int(text)


ABANDONED_SECONDS = 24 * 3600.0
"""Agents write signs of life every half minute at most: a run of this machine that has written none so long died."""
_AGE = re.compile(r"(\d{1,6})([mhdw]?)\Z", re.ASCII)
_SECONDS = {"m": 60, "h": 3600, "": 86400, "d": 86400, "w": 7 * 86400}


class OldRun(Struct, frozen=True, kw_only=True):
    paths: RunPaths
    statuses: tuple[RunStatus, ...]
    size: int
    age: float
    """Seconds since its end, or since its last change where its end is not known."""


CLEAN_PARAMETERS = (
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
CLEAN_NOTE = f"RUN: only these: {RUN_HELP}"


def run_clean(args: SimpleNamespace) -> int:
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
        sys.stdout.write(
            one_line(f"{size_text(old.size):>9}  {elapsed_text(old.age):>12} ago  {old.paths.root}") + "\n"
        )
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
