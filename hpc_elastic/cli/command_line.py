"""The command lines of `submit` and `run`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from hpc_elastic.cli.screen import print_note
from hpc_elastic.options import job_options, worker_options
from hpc_elastic.options.all_options import ALL_OPTIONS, REFUSED, YIELDS
from hpc_elastic.options.resolve import resolve
from hpc_elastic.options.run_request import current_directory
from hpc_elastic.options.table import Parsed, parse, render_help

GROUPS = {
    worker_options.GROUP: "workers, as in torchrun (names with _ too; [PET_...]: a variable that gives the default)",
    job_options.GROUP: "job, as in sbatch",
    job_options.OWN_GROUP: "run (each option can also be set in a file, or as HPC_ELASTIC_MAX_RESTARTS; "
    "hpc-elastic config shows where its value comes from)",
}


def read_command_line(
    argv: Sequence[str], *, subcommand: str, description: str, env: Mapping[str, str]
) -> Parsed | None:
    """Read it, and the layers below it; None where ``--help`` was asked for and printed.

    Raises:
        UsageError: an option that is unknown, refused or without its value; something is wrong in a file.
    """
    left_out = [option.dest for option in ALL_OPTIONS if option.only not in ("", subcommand)]
    options = tuple(option for option in ALL_OPTIONS if option.dest not in left_out)
    given = parse(argv, options, refused=REFUSED, env={})
    if not given.help:
        here = current_directory(env)
        parsed = resolve(given, ALL_OPTIONS, env=env, here=here, left_out=left_out, yields=YIELDS).parsed
        for line in parsed.executed:
            print_note(line)
        return parsed
    usage = f"hpc-elastic {subcommand} [options] SCRIPT [arguments of the script...]"
    sys.stdout.write(render_help(usage, description, options, GROUPS))
    return None
