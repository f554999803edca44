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

_WORD = re.compile(r"[a-z][a-z-]*\Z")
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
    """Print what completes the words that the shell's function has put into the environment."""
    sys.exit(shell_complete(_Subcommands(), {}, PROGRAM, COMPLETE_VARIABLE, os.environ[COMPLETE_VARIABLE]))


class _Subcommands(click.Group):
    """The subcommands as click has them: only the one that is completed is imported."""

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
        return click.Command(
            cmd_name,
            params=[*options, _argument(cmd_name)],
            help=help_,
            context_settings={"allow_interspersed_args": False},
        )


def _parameter(option: Option) -> click.Parameter:
    names = [*option.names, f"option_{option.names[0].strip('-').replace('-', '_')}"]
    if option.metavar is None:
        return click.Option(names, is_flag=True, help=option.help)
    return click.Option(names, type=_type(option.metavar), help=option.help)


def _type(metavar: str) -> click.ParamType[str] | type[str]:
    """``auto|slurm|local`` → these words; a file or folder; else anything."""
    if metavar in ("FILE", "PATH", "DIR"):
        return click.Path(file_okay=metavar != "DIR")
    words = [word for word in re.split(r"[|,\[\]]", metavar) if _WORD.match(word)]
    return click.Choice(words) if words else str


def _argument(subcommand: str) -> click.Argument:
    if subcommand == "config":
        keys = list(Keys(option for option in ALL_OPTIONS if option.in_files).by_name)
        return click.Argument(["keys"], nargs=-1, type=click.Choice(keys))
    return click.Argument(["command"], nargs=-1, type=click.Path())
