"""The user's own commands around the workers: environment, hooks and notifications."""

from __future__ import annotations

import os
import re
import shlex

from hpc_elastic.errors import UsageError
from hpc_elastic.options.table import Group, Option
from hpc_elastic.run.option_values import parse_positive_seconds

_LOOKS_LIKE_FILE = re.compile(r"[^\s;&|<>()$`'\"=]*(?:/[^\s;&|<>()$`'\"=]*|\.(?:ba)?sh)")


def parse_setup(text: str, option: str) -> str:
    """A file becomes the line that sources it; anything else is shell already.

    Raises:
        UsageError: it looks like a file's path, and there is none.
    """
    path = os.path.join(_here(), os.path.expanduser(text))
    if os.path.isfile(path):
        if not os.access(path, os.R_OK):
            raise UsageError(f"{option} {text}: the file can't be read")
        return f"source {shlex.quote(os.path.normpath(path))}"
    if _LOOKS_LIKE_FILE.fullmatch(text) and not os.access(path, os.X_OK):
        raise UsageError(
            f"{option} {text}: there is no such file; give one, or shell commands as in 'module load cuda'"
        )
    return text


def _here() -> str:
    """The working directory by the name that the shell uses, which is the one that all nodes know."""
    here = os.environ.get("PWD", "")
    try:
        return here if here.startswith("/") and os.path.samefile(here, ".") else os.getcwd()
    except OSError:
        return os.getcwd()


def parse_worker_prefix(text: str, option: str) -> tuple[str, ...]:
    """Words, quoted as for a shell; no shell is started."""
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(f"{option} {text}: {error}; quote as for a shell") from None
    if not words or not words[0]:
        raise UsageError(f"{option} {text!r}: give a command, as in 'numactl --interleave=all'")
    return words


def parse_notify(text: str, option: str) -> str:
    """A URL or a shell command."""
    if re.match(r"[a-z][a-z0-9+.-]*://", text) and not re.fullmatch(r"https?://[^\s/]+\S*", text):
        raise UsageError(f"{option} {text}: give a command, or a URL that begins with http:// or https://")
    return text


OPTIONS = (
    Option(
        group=Group.HOOKS, names=("--setup",), dest="setup", metavar="FILE|COMMAND",
        parse=parse_setup, field="setup", file_or_command=True,
        executes=True,
        help="shell file or commands that make the workers' environment, as in 'module load cuda; conda activate "
        "mine': sourced by bash once on each node, before the workers start (default: none)",
    ),
    Option(
        group=Group.HOOKS, names=("--setup-timeout",), dest="setup_timeout", metavar="SECONDS",
        parse=parse_positive_seconds, field="setup_timeout",
        help="time limit of --setup (default 300)",
    ),
    Option(
        group=Group.HOOKS, names=("--worker-prefix",), dest="worker_prefix", metavar="'WORDS'",
        parse=parse_worker_prefix, field="worker_prefix",
        executes=True,
        help="what stands before each worker's command, as in 'numactl --interleave=all' or 'nsys profile' (default: "
        "nothing)",
    ),
    Option(
        group=Group.HOOKS, names=("--after",), dest="after", metavar="COMMAND",
        field="after",
        executes=True,
        help="shell command that runs once on the batch host when the run has ended and is not requeued; the result is "
        "in HPC_ELASTIC_OUTCOME, HPC_ELASTIC_EXIT_CODE and others",
    ),
    Option(
        group=Group.HOOKS, names=("--hook-timeout",), dest="hook_timeout", metavar="SECONDS",
        parse=parse_positive_seconds, field="hook_timeout",
        help="time limit of --after (default 600)",
    ),
    Option(
        group=Group.HOOKS, names=("--notify",), dest="notify", metavar="COMMAND|URL",
        parse=parse_notify, field="notify",
        executes=True,
        help="shell command that gets JSON as its input, or URL that it is posted to, at an attempt's first failure, "
        "at hangs, requeues and the end; 10 seconds at most",
    ),
)  # fmt: skip
