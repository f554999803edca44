"""The user's own commands around the workers: environment, hooks and notifications."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from hpc_elastic.errors import UsageError
from hpc_elastic.options.table import Group, define
from hpc_elastic.run.option_values import parse_positive_seconds

_LOOKS_LIKE_FILE = re.compile(r"[^\s;&|<>()$`'\"=]*(?:/[^\s;&|<>()$`'\"=]*|\.(?:ba)?sh)")


def parse_setup(text: str, option: str) -> str:
    path = os.path.join(current_directory(os.environ), os.path.expanduser(text))
    if os.path.isfile(path):
        if not os.access(path, os.R_OK):
            raise UsageError(f"{option} {text}: the file can't be read")
        return f"source {shlex.quote(os.path.normpath(path))}"
    if _LOOKS_LIKE_FILE.fullmatch(text) and not os.access(path, os.X_OK):
        raise UsageError(
            f"{option} {text}: there is no such file; give one, or shell commands as in 'module load cuda'"
        )
    return text


def current_directory(env: Mapping[str, str]) -> Path:
    """This process' own: absolute, by the name that the shell uses, which is the one that all nodes know.

    (A home may be mounted at another path on each host, with one symbolic link for people.)
    """
    here = env.get("PWD", "")
    with suppress(OSError):
        if here.startswith("/") and os.path.samefile(here, "."):
            return Path(here)
    return Path.cwd()


def parse_worker_prefix(text: str, option: str) -> tuple[str, ...]:
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(f"{option} {text}: {error}; quote as for a shell") from None
    if not words or not words[0]:
        raise UsageError(f"{option} {text!r}: give a command, as in 'numactl --interleave=all'")
    return words


def parse_notify(text: str, option: str) -> str:
    if re.match(r"[a-z][a-z0-9+.-]*://", text) and not re.fullmatch(r"https?://[^\s/]+\S*", text):
        raise UsageError(f"{option} {text}: give a command, or a URL that begins with http:// or https://")
    return text


OPTIONS = (
    define(Group.HOOKS, "--setup", metavar="FILE|COMMAND", parse=parse_setup, in_spec=True, file_or_command=True,
        executes=True,
        help="shell file or commands that make the workers' environment, as in 'module load cuda; conda activate "
        "mine': sourced by bash once on each node, before the workers start (default: none)"),
    define(Group.HOOKS, "--setup-timeout", metavar="SECONDS", parse=parse_positive_seconds, in_spec=True,
        help="time limit of --setup (default 300)"),
    define(Group.HOOKS, "--worker-prefix", metavar="'WORDS'", parse=parse_worker_prefix, in_spec=True, executes=True,
        help="what stands before each worker's command, as in 'numactl --interleave=all' or 'nsys profile' (default: "
        "nothing)"),
    define(Group.HOOKS, "--after", metavar="COMMAND", in_spec=True, executes=True,
        help="shell command that runs once on the batch host when the run has ended and is not requeued; the result "
        "is in HPC_ELASTIC_OUTCOME, HPC_ELASTIC_EXIT_CODE and others"),
    define(Group.HOOKS, "--hook-timeout", metavar="SECONDS", parse=parse_positive_seconds, in_spec=True,
        help="time limit of --after (default 600)"),
    define(Group.HOOKS, "--notify", metavar="COMMAND|URL", parse=parse_notify, in_spec=True, executes=True,
        help="shell command that gets JSON as its input, or URL that it is posted to, at an attempt's first failure, "
        "at hangs, requeues and the end; 10 seconds at most"),
)  # fmt: skip
