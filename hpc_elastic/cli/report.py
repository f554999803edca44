"""``hpc-elastic report``: what failed first, also while the run goes on; ``hangs``: which rank the others wait for."""

from __future__ import annotations

import json
import os
import re
import resource
import stat
import sys
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import click
from msgspec import Struct, to_builtins
from msgspec.structs import replace

from hpc_elastic.base.clock import Clock, SystemClock
from hpc_elastic.base.files import sole_owner, write_private
from hpc_elastic.base.text import plural, ranks_text
from hpc_elastic.cli.main import (
    BOLD,
    DIM,
    GREEN,
    RED,
    YELLOW,
    is_terminal,
    painted,
    print_note,
    wants_colour,
    width_for,
)
from hpc_elastic.cli.run_argument import (
    LAST_HELP,
    NUMBER,
    RUN_PARAMETERS,
    AskedRun,
    asked_run,
    check_attempt,
    check_ranks,
    find_run_dir,
    parse_numbers,
)
from hpc_elastic.errors import UnsafePathError, UsageError
from hpc_elastic.failures.flight_analysis import Analysis, GroupState, analyse
from hpc_elastic.failures.flight_dump import MOST_BYTES, RankDump, UnreadableDumpError, rank_of_name, read_dump
from hpc_elastic.output.terminal import one_line
from hpc_elastic.run.paths import ExitCode, RunPaths

if TYPE_CHECKING:  # what reads a run is imported where one is read: hangs reads none
    from hpc_elastic.report.history import RunHistory

_CLEAR = "\x1b[H\x1b[2J"
_FIELD = re.compile(r"(  [a-z_ ]{10}: )(.*)", re.DOTALL)
_RULE = re.compile(r"[-=]{20,}\Z")
_OPEN = (" is running", " is starting", "no attempt yet", " REQUEUED ")

PARAMETERS = (
    *RUN_PARAMETERS,
    click.Option(["--attempt"], type=NUMBER, metavar="N", help="attempt N (default: the last with a failure)"),
    click.Option(
        ["--format"],
        type=click.Choice(("text", "json", "html")),
        help="text (default), json, or html: a page with a timeline, whose path is printed",
    ),
    *(click.Option([f"--{name}"], is_flag=True, help=f"the same as --format {name}") for name in ("json", "html")),
    click.Option(
        ["--output"],
        metavar="FILE",
        help="with --format html: where to write the page (default: the attempt's report.html; -: standard output)",
    ),
    click.Option(["--all"], is_flag=True, help="all lines, not at most 40"),
    click.Option(
        ["--rank"],
        metavar="RANKS",
        help="everything that is known about failures of these ranks, as in 0-3,7 (--all: in all rounds)",
    ),
    click.Option(["--width"], type=NUMBER, metavar="N", help="width of the lines (default: the terminal's, or 120)"),
    click.Option(
        ["-f", "--follow"],
        is_flag=True,
        help="print the report again when it changes, until the run ends, and exit with its code",
    ),
)
NOTE = f"RUN: {LAST_HELP}"


def run(args: SimpleNamespace) -> int:
    args.format = "json" if args.json else "html" if args.html else args.format or "text"
    if args.output is not None and args.format != "html":
        raise UsageError(f"--output {args.output} goes with --format html; redirect the {args.format} instead")
    if args.rank is not None and args.format != "text":
        raise UsageError(f"--rank {args.rank} goes with --format text; the {args.format} report has all ranks")
    if args.follow and args.format == "html":
        raise UsageError("--follow goes with --format text or json; a page is written at the end of every attempt")
    asked = asked_run(args)
    if not args.follow:
        history = _history(asked, args)
        is_page = args.format == "html"
        _print(_page(history, asked.attempt, args.output) if is_page else _text(history, asked.attempt, args))
        return 0
    from hpc_elastic.cli.follow import follow_to_end

    clears = args.format == "text" and is_terminal(sys.stdout)
    shown = ""

    def show() -> None:
        nonlocal shown
        text = _text(_history(asked, args, follows=True), asked.attempt, args)
        if text != shown:
            shown = text
            _print((_CLEAR if clears else "") + text)

    clock = SystemClock()
    return follow_to_end(asked, ReportFollower(asked, show, clock=clock), clock=clock)


def _history(asked: AskedRun, args: SimpleNamespace, *, follows: bool = False) -> RunHistory:
    from hpc_elastic.report.collect import collect_run

    ranks: Container[int] = parse_numbers(args.rank, option="--rank") if args.rank is not None else ()
    try:
        history = collect_run(asked.paths.root, ranks=ranks)
    except OSError as error:
        raise UsageError(f"{asked.paths.root} can't be read: {error.strerror}") from None
    if asked.attempt is not None and (history.attempts or not follows):
        check_attempt(asked.attempt, [part.number for part in history.attempts], history.run_id)
    return history if follows else _with_slurms_end(history, asked)


def _with_slurms_end(history: RunHistory, asked: AskedRun) -> RunHistory:
    """The history with the end that the files do not hold and Slurm knows; it is asked only where they hold none."""
    if history.attempts and history.attempts[-1].exit_code not in (None, ExitCode.REQUEUED):
        return history
    from hpc_elastic.cli import run_job
    from hpc_elastic.launch.run_status import RunState, ends_by_slurm, read_status
    from hpc_elastic.report.document import with_end

    clock = SystemClock()
    before = read_status(asked.paths, clock=clock)
    client = run_job.slurm_client(timeout=run_job.SHORT_SECONDS)
    ((status, _),) = ends_by_slurm(client, [before], clock=clock, warn=print_note)
    if before.state is RunState.ENDED or status.state is not RunState.ENDED:
        return history
    if status.attempt is None or before.state is RunState.REQUEUED:
        print_note(f"run {status.run_id} has ended: {status.reason}")
        return history if status.attempt is not None else replace(history, never_began=status.reason)
    decision = f"end: {status.reason}"
    return with_end(
        history, attempt=status.attempt, outcome=status.outcome, exit_code=status.exit_code, decision=decision
    )


def _text(history: RunHistory, attempt: int | None, args: SimpleNamespace) -> str:
    from hpc_elastic.report.document import Document

    if args.format == "json":
        from hpc_elastic.report.write import json_report

        text = json_report(Document(history, attempt=attempt))
        return text.replace("\n", "") + "\n" if args.follow else text
    if args.rank is not None:
        text = _ranks(history, attempt, args)
    else:
        from hpc_elastic.report.render_text import DEFAULT_LINES, render_text

        width = args.width if args.width is not None else width_for(sys.stdout)
        document = Document(history, attempt=attempt)
        text = render_text(document, max_lines=None if args.all else DEFAULT_LINES, width=width)
    return coloured_report(text) if wants_colour(sys.stdout, os.environ) else text


def _ranks(history: RunHistory, attempt: int | None, args: SimpleNamespace) -> str:
    from hpc_elastic.report.render_text import render_ranks, world_size

    ranks = parse_numbers(args.rank, option="--rank")
    size = world_size(history, attempt=attempt)
    where = f"run {history.run_id}" if attempt is None else f"attempt {attempt} of run {history.run_id}"
    check_ranks(ranks, size, option="--rank", where=where)

    return render_ranks(history, ranks.within(range(size)), attempt=attempt, everywhere=args.all)


def _page(history: RunHistory, attempt: int | None, output: str | None) -> str:
    from hpc_elastic.report.document import Document
    from hpc_elastic.report.render_html import render_html
    from hpc_elastic.run.fold import relinked

    def made() -> str:
        links = ".." if output is None else Path(history.run_dir).as_uri()
        page = render_html(Document(history, attempt=attempt), links=links)
        return relinked(page, Path(history.run_dir))

    if output == "-":
        return made()
    path = _page_path(history, attempt, output)
    try:
        write_private(path, made())
    except OSError as error:
        other = "" if output is not None else "; say where else with --output FILE"
        raise UsageError(f"{path} can't be written: {error.strerror}{other}") from None
    return f"{one_line(str(path))}\n"


def _page_path(history: RunHistory, attempt: int | None, output: str | None) -> Path:
    if output is not None:
        path = Path(os.path.abspath(output))
    else:
        number = attempt if attempt is not None else history.attempts[-1].number if history.attempts else None
        if number is None:
            raise UsageError(f"run {history.run_id} has no attempt yet; say where to write the page with --output FILE")
        path = RunPaths(Path(history.run_dir)).attempt(number).report_html
        attempt_dir = path.parent
        try:  # a link in another user's folder could lead to any file of this name
            is_own = {sole_owner(folder) for folder in (attempt_dir, attempt_dir.parent)} == {os.geteuid()}
        except (OSError, UnsafePathError):
            is_own = False
        if not is_own:
            raise UsageError(f"{attempt_dir} is not yours alone; say where to write the page with --output FILE")
    if path.exists() and not path.is_file():  # it would be replaced, /dev/stdout as well
        raise UsageError(f"{path} is not a regular file; --output - writes the page to standard output")
    return path


def _print(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def coloured_report(text: str) -> str:
    found, is_headline, after_rule = [], False, False
    for number, line in enumerate(text.split("\n")):
        is_rule, field, style = _RULE.match(line) is not None, _FIELD.fullmatch(line), ""
        is_cause = line.startswith("Root Cause")
        is_headline = is_cause or (is_headline and field is None and line.startswith("  "))
        if is_rule:
            style = DIM
        elif is_cause:
            style = f"{BOLD};{RED}"
        elif after_rule and number == 1:
            is_open = any(text in line for text in _OPEN)
            style = f"{BOLD};{GREEN if ' SUCCEEDED' in line else YELLOW if is_open else RED}"
        elif is_headline or (line and not line.startswith(" ") and (line.endswith(":") or after_rule)):
            style = BOLD
        after_rule = is_rule
        found.append(painted(line, style) if field is None else painted(field[1], DIM) + field[2])
    return "\n".join(found)


class ReportFollower(Struct):
    asked: AskedRun
    show: Callable[[], None]
    clock: Clock
    seen: object = None

    def look(self, *, everything: bool = False) -> float:
        files: list[tuple[str, int]] = []
        attempt = self.asked.shown_attempt()
        if attempt is not None:
            with suppress(OSError), os.scandir(attempt.events) as entries:
                files = sorted((entry.name, entry.stat(follow_symlinks=False).st_size) for entry in entries)
        # The sizes of the newest attempt's event logs, and whether it has ended, change when there is news.
        state = (attempt.number, files, attempt.result_json.exists()) if attempt is not None else None
        began = self.clock.monotonic()
        if state != self.seen:
            self.seen = state
            self.show()
        cost = self.clock.monotonic() - began
        return max(1.0, len(files) / 200, 10 * cost)  # making a report takes at most a tenth of the time

    def finish(self) -> None:
        self.show()


_MOST_GROUPS = 20
_OTHER = re.compile(r"/attempt-\d+/(?!round-)")

HANGS_PARAMETERS = (
    click.Argument(["files"], metavar="FILES...", nargs=-1, required=True, type=click.Path()),
    click.Option(["--json"], is_flag=True, help="as JSON, with all facts"),
)
HANGS_NOTE = (
    "FILES: dumps, JSON or pickle, or folders or runs with them; the rank is the number at the end of a file's name"
)


def run_hangs(args: SimpleNamespace) -> int:
    with _limited_memory():
        found = _without_older(_read_all(_files(args.files)))
    dumps = [dump for _, dump in found if isinstance(dump, RankDump)]
    unreadable = [(name, why) for name, why in found if isinstance(why, str)]
    if not dumps:
        name, why = unreadable[0] if unreadable else (args.files[0], "no dump of the flight recorder is in it")
        raise UsageError(f"{name}: {why}")
    analysis = analyse(dumps)
    if args.json:
        document = {
            "schema": 1,
            "ranks": sorted({dump.rank for dump in dumps}),
            "suspects": analysis.suspects,
            "says": analysis.says,
            "groups": analysis.groups,
            "unreadable": [{"file": name, "why": why} for name, why in unreadable],
        }
        print(json.dumps(to_builtins(document), separators=(",", ":")))
    else:
        print("\n".join(one_line(line) for line in _lines(analysis, dumps, unreadable)))
    return 0


@contextmanager
def _limited_memory() -> Iterator[None]:
    """Ten bytes of a pickle can ask for all memory of the machine; a thousand real dumps take 140 MB."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (min(each for each in (8 << 30, soft, hard) if each >= 0), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _files(given: Sequence[str]) -> list[Path]:
    """Each once, those of folders (or runs) and of the folders in them by their names; of a run those of its ranks."""
    found: dict[Path, None] = {}
    for text in given:
        path = Path(text)
        if not os.path.lexists(text):
            with suppress(UsageError):
                path = find_run_dir(text, None)
        if path.is_dir():
            folders = ((root, names) for root, _, names in os.walk(path) if not _OTHER.search(os.path.abspath(root)))
            within = (Path(root, name) for root, names in folders for name in names)
            found |= dict.fromkeys(sorted(each for each in within if _may_be_dump(each)))
        else:
            found[path] = None
    return list(found)


def _may_be_dump(path: Path) -> bool:
    if rank_of_name(path.name) is None or not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            return file.read(1) in (b"", b"{", b"\x80")
    except OSError:
        return True


def _without_older(found: Sequence[tuple[str, RankDump | str]]) -> list[tuple[str, RankDump | str]]:
    """Keep the newest of several dumps of one rank with the same groups: two failures leave two."""
    newest: dict[tuple[int, str, str], tuple[float, int]] = {}
    chosen: list[tuple[str, RankDump | str]] = list(found)
    for place, (name, dump) in enumerate(found):
        if not isinstance(dump, RankDump):
            continue
        at = os.stat(name).st_mtime
        keys = [(dump.rank, *key) for key in (*dump.collectives, *dump.transfers)]
        others = {newest[key] for key in keys if key in newest}
        if any(at < when for when, _ in others):
            chosen[place] = name, f"rank {dump.rank} has a newer dump"
            continue
        for _, other in others:
            chosen[other] = found[other][0], f"rank {dump.rank} has a newer dump"
        newest |= dict.fromkeys(keys, (at, place))
    return chosen


def _read_all(files: Sequence[Path]) -> list[tuple[str, RankDump | str]]:
    processes = min(8, len(os.sched_getaffinity(0)))
    if len(files) <= 64 or processes == 1:
        return [_read(path) for path in files]
    import multiprocessing

    with multiprocessing.get_context("fork").Pool(processes) as pool:
        return pool.map(_read, files, chunksize=32)


def _read(path: Path) -> tuple[str, RankDump | str]:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # waits for no pipe's writer
        with open(fd, "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return str(path), "no regular file"
            raw = file.read(MOST_BYTES + 1)
        return str(path), read_dump(raw, rank=rank_of_name(path.name))
    except UnreadableDumpError as error:
        return str(path), str(error)
    except OSError as error:
        return str(path), error.strerror or str(error)


def _lines(analysis: Analysis, dumps: Sequence[RankDump], unreadable: Sequence[tuple[str, str]]) -> list[str]:
    ranks = sorted({dump.rank for dump in dumps})
    lines = [f"{plural(len(dumps), 'dump')}, of {ranks_text(ranks, limit=80)}"]
    lines += [f"rank {suspect.rank} {suspect.reason}" for suspect in analysis.suspects]
    lines += [analysis.says] if analysis.says else []
    lines += [_group_line(group) for group in analysis.groups[:_MOST_GROUPS]]
    if len(analysis.groups) > _MOST_GROUPS:
        lines.append(f"... and {len(analysis.groups) - _MOST_GROUPS} groups more; --json has all")
    lines += [f"unreadable: {name}: {why}" for name, why in unreadable]
    return lines


def _group_line(group: GroupState) -> str:
    all_of_them = f"all have completed #{group.completed}" if group.completed >= 0 else "none is completed by all"
    at: dict[int, list[int]] = {}
    for rank, number in group.waiting:
        at.setdefault(number, []).append(rank)
    parts = [f"in #{number}: {ranks_text(who, limit=60)}" for number, who in sorted(at.items())[:4]]
    backend = f" ({group.backend})" if group.backend else ""
    return "; ".join([f"group {group.group}{backend}, {ranks_text(group.members, limit=60)}: {all_of_them}", *parts])
