"""``hpc-elastic report RUN|JOBID|DIR`` (or ``why``): what failed first, while the run goes on or after it ended."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

from hpc_elastic.errors import UsageError
from hpc_elastic.run_paths import attempt_number

_NO_TERMINAL_WIDTH = 120


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommand's arguments."""
    parser.add_argument("run", metavar="RUN|JOBID|DIR", help="a run id, a Slurm job id, or a run directory")
    parser.add_argument("--format", choices=("text", "json"), default="text", help="default: text")
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
        from hpc_elastic.atomic_file import json_text
        from hpc_elastic.report.render_json import render_json

        _print(json_text(render_json(history, attempt=attempt), indent=1) + "\n")
        return 0
    width = args.width
    if width is None:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else _NO_TERMINAL_WIDTH
    _print(render_text(history, attempt=attempt, max_lines=None if args.all else DEFAULT_LINES, width=width))
    return 0


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
