"""The command lines of `submit` and `run`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from hpc_elastic.configuration import job_options, worker_options
from hpc_elastic.configuration.option_table import Parsed, parse, render_help

_GROUPS = {
    worker_options.GROUP: "workers, as in torchrun (names with _ too; [PET_...]: a variable that gives the default)",
    job_options.GROUP: "job, as in sbatch",
    job_options.OWN_GROUP: "run",
}


def read_command_line(
    argv: Sequence[str], *, subcommand: str, description: str, env: Mapping[str, str]
) -> Parsed | None:
    """Read it; None where ``--help`` was asked for and printed.

    Raises:
        UsageError: an option that is unknown, refused or without its value.
    """
    options = (*worker_options.OPTIONS, *job_options.OPTIONS)
    if subcommand == "run":
        options = tuple(option for option in options if option.dest not in job_options.SUBMIT_ONLY)
    parsed = parse(argv, options, refused=worker_options.REFUSED, env=env)
    if not parsed.help:
        return parsed
    usage = f"hpc-elastic {subcommand} [options] SCRIPT [arguments of the script...]"
    sys.stdout.write(render_help(usage, description, options, _GROUPS))
    return None


def say(text: str) -> None:
    """One line for the person, on stderr: stdout is for what was asked for."""
    sys.stderr.write(f"hpc-elastic: {text}\n")
    sys.stderr.flush()
