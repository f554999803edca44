"""``hpc-elastic report RUN|JOBID|DIR`` (or ``why``): what failed first, while the run goes on or after it ended."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_elastic.errors import UsageError
from hpc_elastic.run_paths import attempt_number

if TYPE_CHECKING:
    from hpc_elastic.report.history import RunHistory

_NO_TERMINAL_WIDTH = 120


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommand's arguments."""
    parser.add_argument("run", metavar="RUN|JOBID|DIR", help="a run id, a Slurm job id, or a run directory")
    parser.add_argument(
        "--format",
        choices=("text", "json", "html"),
        default="text",
        help="default: text; html: a page with a timeline, whose path is printed",
    )
    parser.add_argument(
        "--output",
        metavar="FILE",
        help="with --format html: where to write the page (default: the attempt's report.html; -: standard output)",
    )
    parser.add_argument(
        "--attempt", type=_number, metavar="N", help="the N-th execution of the job (default: the last with a failure)"
    )
    parser.add_argument("--all", action="store_true", help="every line, instead of at most 40")
    parser.add_argument("--width", type=_number, metavar="N", help="cut longer lines (default: the terminal's, or 120)")
    parser.add_argument("--runs-dir", metavar="DIR", help="where runs are (default: ./runs)")


def run(args: argparse.Namespace) -> int:
    """Print the report. Returns 0 whatever the run's outcome was.

    Raises:
        UsageError: there is no such run or attempt.
    """
    from hpc_elastic.report.collect import collect_run
    from hpc_elastic.report.render_text import DEFAULT_LINES, render_text

    if args.output is not None and args.format != "html":
        raise UsageError(f"--output {args.output} goes with --format html; redirect the {args.format} instead")
    folder = find_run_dir(args.run, getattr(args, "runs_dir", None))
    attempt = args.attempt
    if attempt is None and attempt_number(folder.name) is not None:  # somebody gave an attempt's folder
        attempt, folder = attempt_number(folder.name), folder.parent
    try:
        history = collect_run(folder)
    except OSError as error:
        raise UsageError(f"{folder} can't be read: {error.strerror}") from None
    numbers = [part.number for part in history.attempts]
    if attempt is not None and attempt not in numbers:
        there = f"it has {', '.join(map(str, numbers))}" if numbers else "it has none yet"
        raise UsageError(f"run {history.run_id} has no attempt {attempt}; {there}")
    if args.format == "json":
        from hpc_elastic.report.render_json import json_report

        _print(json_report(history, attempt=attempt))
        return 0
    if args.format == "html" and args.output == "-":
        from hpc_elastic.report.render_html import render_html

        _print(render_html(history, attempt=attempt))
        return 0
    if args.format == "html":
        _print(f"{_write_page(history, attempt, args.output)}\n")
        return 0
    width = args.width
    if width is None:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else _NO_TERMINAL_WIDTH
    _print(render_text(history, attempt=attempt, max_lines=None if args.all else DEFAULT_LINES, width=width))
    return 0


def _write_page(history: RunHistory, attempt: int | None, output: str | None) -> Path:
    """Make the page. Returns its path.

    Raises:
        UsageError: it can't be written there.
    """
    from hpc_elastic.atomic_file import write_private
    from hpc_elastic.report.render_html import render_html
    from hpc_elastic.run_paths import RunPaths

    if output is not None:
        path = Path(os.path.abspath(output))
    else:
        number = attempt if attempt is not None else history.attempts[-1].number if history.attempts else None
        if number is None:
            raise UsageError(f"run {history.run_id} has no attempt yet; say where to write the page with --output FILE")
        path = RunPaths(Path(history.run_dir)).attempt(number).report_html
    if path.exists() and not path.is_file():  # it would be replaced, /dev/stdout as well
        raise UsageError(f"{path} is no regular file; --output - writes the page to standard output")
    try:
        write_private(path, render_html(history, attempt=attempt))
    except OSError as error:
        other = "" if output is not None else "; say where else with --output FILE"
        raise UsageError(f"{path} can't be written: {error.strerror}{other}") from None
    return path


def find_run_dir(text: str, runs_dir: str | None) -> Path:
    """The run directory that `text` means: a path (to an attempt's folder, too), a run id or a job id.

    Raises:
        UsageError: it means none.
    """
    path = Path(os.path.abspath(text))
    if path.name == "latest" and path.is_symlink():
        path = Path(os.path.realpath(path))
    if path.is_dir() and (attempt_number(path.name) is not None or _is_run_dir(path)):
        return path
    from hpc_elastic.run_index import find

    return find(text, Path(runs_dir) if runs_dir is not None else None)


def _is_run_dir(path: Path) -> bool:
    """A copy may have lost its run.json."""
    try:
        names = os.listdir(path)
    except OSError as error:
        raise UsageError(f"{path} can't be read: {error.strerror}") from None
    return "run.json" in names or any(attempt_number(name) is not None for name in names)


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number")
    return int(text)


def _print(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
