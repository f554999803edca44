"""The parameters of the subcommands that look at runs: RUN, and the ranks, rounds and nodes of it (``0-3,7``)."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
from click.shell_completion import CompletionItem
from msgspec import Struct

from hpc_elastic.base.files import read_json
from hpc_elastic.base.text import range_bounds, ranges
from hpc_elastic.cli.main import print_note
from hpc_elastic.errors import UsageError
from hpc_elastic.run.index import DEFAULT_RUNS_DIR
from hpc_elastic.run.paths import RUN_ID, AttemptPaths, RunPaths, attempt_number


class NumberSet(Struct, frozen=True):
    ranges: tuple[tuple[int, int], ...]
    text: str

    def __contains__(self, number: object) -> bool:
        return isinstance(number, int) and any(first <= number <= last for first, last in self.ranges)

    def within(self, numbers: Iterable[int]) -> list[int]:
        return [number for number in numbers if number in self]


def parse_numbers(text: str, *, option: str) -> NumberSet:
    """Read ``3``, ``0-3,7``; raises UsageError for anything else."""
    items = text.replace(" ", "").split(",")
    for item in items:
        if range_bounds(item) is None:
            raise UsageError(f"{option} {text}: {item or 'nothing'} is not a number or a range; write it as 0-3,7")
    return NumberSet(tuple(range_bounds(",".join(items)) or ()), text)


def check_ranks(ranks: NumberSet, world_size: int, *, option: str, where: str) -> None:
    """Raises UsageError for ranks that are nowhere; `world_size` is 0 where it is not known."""
    if world_size and max(last for _, last in ranks.ranges) >= world_size:
        valid = f"ranks 0-{world_size - 1}" if world_size > 1 else "rank 0 only"
        raise UsageError(f"{option} {ranks.text}: {where} has {valid}")


LAST = "latest"
RUN_HELP = "run id or its beginning, Slurm job id, or directory of a run or attempt"
LAST_HELP = f"{RUN_HELP}; default, or {LAST}: the last run in this folder, else of this account"


class AskedRun(Struct, frozen=True, kw_only=True):
    paths: RunPaths
    attempt: int | None

    def attempts(self) -> list[int]:
        return self._attempts_there() if self.attempt is None else [self.attempt]

    def _attempts_there(self) -> list[int]:
        names = _names_in(self.paths.root)
        return sorted(number for number in map(attempt_number, names) if number is not None)

    def shown_attempt(self) -> AttemptPaths | None:
        """The attempt that was asked for, or the newest; None: there is none yet."""
        numbers = self._attempts_there()
        if self.attempt is not None:
            check_attempt(self.attempt, numbers, self.paths.run_id)
            return self.paths.attempt(self.attempt)
        return self.paths.attempt(numbers[-1]) if numbers else None


class _Number(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.4
    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        text = str(value)
        if not (text.isascii() and text.isdigit() and len(text) < 10):
            self.fail(f"{text!r} is not a number", param, ctx)
        return int(text)


NUMBER = _Number()
RUNS_DIR = click.Option(
    ["--runs-dir"],
    metavar="DIR",
    type=click.Path(file_okay=False),
    help="folder of the runs (default: from the configuration, else ./runs)",
)


def complete_runs(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    folder = Path(context.params.get("runs_dir") or os.environ.get("HPC_ELASTIC_RUNS_DIR") or DEFAULT_RUNS_DIR)
    names = [LAST, *(run.parent.name for run in folder.glob("*/run.json"))]
    found = [CompletionItem(name) for name in names if name.startswith(incomplete) and re.fullmatch(RUN_ID, name)]
    return found or [CompletionItem(incomplete, type="dir")]


RUN_PARAMETERS = (
    click.Argument(["run"], metavar="[RUN|JOBID|DIR]", required=False, default=LAST, shell_complete=complete_runs),
    RUNS_DIR,
)


def asked_run(args: SimpleNamespace) -> AskedRun:
    folder = find_run_dir(args.run, args.runs_dir)
    given = attempt_number(folder.name)
    if given is None:
        check_single(RunPaths(folder))
        return AskedRun(paths=RunPaths(folder), attempt=args.attempt)
    if args.attempt not in (None, given):
        raise UsageError(f"--attempt {args.attempt}: {args.run} is attempt {given}; give its run's directory instead")
    return AskedRun(paths=RunPaths(folder.parent), attempt=given)


def check_attempt(attempt: int, numbers: Sequence[int], run_id: str) -> None:
    if attempt not in numbers:
        there = f"it has {', '.join(map(str, numbers))}" if numbers else "it has none yet"
        raise UsageError(f"run {run_id} has no attempt {attempt}; {there}")


def check_rounds(rounds: NumberSet, numbers: Sequence[int], attempt: int) -> list[int]:
    found = rounds.within(numbers)
    if not found:
        there = f"has {ranges(numbers)}" if numbers else "has none yet"
        raise UsageError(f"--round {rounds.text}: attempt {attempt} {there}")
    return found


def find_run_dir(text: str, runs_dir: str | None, *, ask_slurm: bool = True) -> Path:
    """`runs_dir` is where run ids are looked for; `ask_slurm`: about a job that is not known here."""
    path = Path(os.path.abspath(text))
    if path.name == "latest" and path.is_symlink():
        path = Path(os.path.realpath(path))
    try:
        if text and path.is_dir():
            names = [path.name] if attempt_number(path.name) is not None else _names_in(path)
            # A copy may have lost its run.json.
            if "run.json" in names or any(attempt_number(name) is not None for name in names):
                return path
        from hpc_elastic.run.index import UnknownRunError, find, last_run
        from hpc_elastic.run.paths import is_job_id

        if text == LAST:
            found = last_run(folder := runs_folder(runs_dir))
            if found is None:
                where = os.path.abspath(folder or DEFAULT_RUNS_DIR)
                raise UsageError(f"no run in {where} (--runs-dir), and none submitted by this account; name one")
            print_note(f"the last run: {found}")
            return found
        try:
            return find(text, runs_folder(runs_dir), cluster_here=_cluster_here if ask_slurm else str)
        except UnknownRunError as error:
            if not (ask_slurm and is_job_id(text)):
                raise
            from hpc_elastic.cli.run_job import run_of_job, slurm_client
            from hpc_elastic.slurm.commands import SlurmMissingError

            try:
                return run_of_job(text, slurm_client())
            except SlurmMissingError:
                raise error from None
    except PermissionError as error:
        raise UsageError(
            f"{error.filename} can't be read: {error.strerror}; only their owner can read a run's files: ask for a copy"
        ) from None


def runs_folder(given: str | None) -> Path | None:
    """A mistake in a configuration file, which keeps a run from being started, keeps nobody from looking at one."""
    if given is None:
        from hpc_elastic.options.resolve import configured_runs_dir

        try:
            given = configured_runs_dir(os.environ, Path.cwd())
        except UsageError as error:
            print_note(f"{error}; continuing without the configuration")
    return Path(given) if given is not None else None


def _cluster_here() -> str:
    from hpc_elastic.cli.run_job import slurm_client
    from hpc_elastic.slurm.commands import SlurmError

    try:
        return slurm_client().config().cluster
    except SlurmError:
        return ""


def check_single(paths: RunPaths) -> None:
    """Raises UsageError, with how to name one, where `paths` is an array of runs."""
    from hpc_elastic.run.index import array_tasks, jobs_of

    if tasks := array_tasks(paths):
        known = [entry for entry in jobs_of(str(paths.root)) if "_" not in entry.job_id]
        names = f"{known[0].job_id}_{tasks[0]} or {paths.run_id}_{tasks[0]}" if known else f"{paths.run_id}_{tasks[0]}"
        raise UsageError(f"{paths.run_id} is an array of {len(tasks)} runs; name one of them, as in {names}")


def _names_in(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except PermissionError as error:
        whose = ""
        with suppress(OSError):
            whose = f"it belongs to uid {folder.stat().st_uid}, and "
        raise UsageError(
            f"{folder} can't be read: {error.strerror}; {whose}only their owner can read a run's files: ask for a copy"
        ) from None
    except OSError as error:
        raise UsageError(f"{folder} can't be read: {error.strerror}") from None


def asked_nodes(text: str, attempt: AttemptPaths) -> frozenset[int]:
    """``n1,n[3-4]``, a hostlist of Slurm's, or ``0,2``, in Slurm's node order."""
    from hpc_elastic.output.log_streams import read_layouts
    from hpc_elastic.slurm.job_environment import HostlistError, expand, names_text

    try:
        wanted = expand(text)
    except HostlistError as error:
        raise UsageError(f"--node {text}: {error.why}") from None
    value = read_json(attempt.attempt_json)
    names = value.get("nodes") if not isinstance(value, str) else None
    hosts = dict(enumerate(map(str, names))) if isinstance(names, list) else {}
    if not hosts:
        hosts = {node: host for layout in read_layouts(attempt).values() for node, host in layout.hosts.items()}
    found: set[int] = set()
    for name in wanted:
        indices = [index for index, host in hosts.items() if host == name]
        if not indices and name.isascii() and name.isdigit() and int(name) in hosts:
            indices = [int(name)]
        if not indices:
            there = names_text(hosts[index] for index in sorted(hosts)) or "not known"
            raise UsageError(f"--node {name}: its nodes are {there}")
        found.update(indices)
    if not found:
        raise UsageError(f"--node {text!r} names no node")
    return frozenset(found)
