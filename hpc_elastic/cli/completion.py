"""``hpc-elastic completion SHELL``: click's completion, of subcommands, options, their values and runs."""

from __future__ import annotations

import os
import re
import sys
from importlib import import_module
from types import SimpleNamespace
from typing import NoReturn

import click
from click.shell_completion import get_completion_class, shell_complete

from hpc_elastic.cli.config import options_of
from hpc_elastic.cli.main import _SUBCOMMANDS, COMPLETE_VARIABLE, PROGRAM
from hpc_elastic.options.run_request import ALL_OPTIONS
from hpc_elastic.options.table import Keys, Option

PARAMETERS = (click.Argument(["shell"], type=click.Choice(("bash", "zsh", "fish"))),)
NOTE = (
    "To load it: source <(hpc-elastic completion bash), in ~/.bashrc; for zsh likewise; for fish: "
    "hpc-elastic completion fish | source"
)


def run(args: SimpleNamespace) -> int:
    found = get_completion_class(args.shell)
    assert found is not None
    sys.stdout.write(found(_Subcommands(), {}, PROGRAM, COMPLETE_VARIABLE).source())
    return 0


def answer_shell() -> NoReturn:
    sys.exit(shell_complete(_Subcommands(), {}, PROGRAM, COMPLETE_VARIABLE, os.environ[COMPLETE_VARIABLE]))


class _Subcommands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_SUBCOMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _SUBCOMMANDS:
            return None
        module_name, help_ = _SUBCOMMANDS[cmd_name]
        module = import_module(f"hpc_elastic.cli.{module_name}")
        if hasattr(module, "PARAMETERS"):
            return click.Command(cmd_name, params=list(module.PARAMETERS), help=help_)
        taken = options_of(cmd_name, getattr(module, "OPTIONS", ()), getattr(module, "TAKEN", None))
        options = [_parameter(option) for option in taken if cmd_name not in option.ignored_by]
        argument = click.Argument(["command"], nargs=-1, type=click.Path())
        if cmd_name == "config":
            keys = list(Keys(option for option in ALL_OPTIONS if option.in_files).by_name)
            argument = click.Argument(["keys"], nargs=-1, type=click.Choice(keys))
        settings = {"allow_interspersed_args": False}
        return click.Command(cmd_name, params=[*options, argument], help=help_, context_settings=settings)


def _parameter(option: Option) -> click.Parameter:
    names = [*option.names, f"option_{option.names[0].strip('-').replace('-', '_')}"]
    if option.metavar is None:
        return click.Option(names, is_flag=True, help=option.help)
    words = [word for word in re.split(r"[|,\[\]]", option.metavar) if re.fullmatch(r"[a-z][a-z-]*", word)]
    kind: click.ParamType[str] | type[str] = click.Choice(words) if words else str  # ``auto|slurm|local``
    if option.metavar in ("FILE", "PATH", "DIR"):
        kind = click.Path(file_okay=option.metavar != "DIR")
    return click.Option(names, type=kind, help=option.help)
