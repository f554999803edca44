"""``hpc-elastic config``: every option's value, and its source. And the command line of ``submit`` and its like.

``hpc-elastic completion SHELL`` is click's completion, of subcommands, options, their values and runs.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from importlib import import_module
from shutil import get_terminal_size
from types import SimpleNamespace
from typing import Any, NoReturn

import click
from msgspec.structs import replace

from hpc_elastic.cli.main import _SUBCOMMANDS, COMPLETE_VARIABLE, PROGRAM, of_subcommand, print_note
from hpc_elastic.errors import UsageError
from hpc_elastic.options.config_files import Layer
from hpc_elastic.options.job_options import SBATCH_VARIABLES
from hpc_elastic.options.resolve import Origin, Resolved, resolve
from hpc_elastic.options.run_request import ALL_OPTIONS, REFUSED, check_values, default_of
from hpc_elastic.options.table import (
    Group,
    Help,
    HelpWanted,
    Keys,
    Option,
    Parsed,
    define,
    explaining,
    key_of,
    parse,
    render_help,
)
from hpc_elastic.options.worker_options import UNNEEDED, current_directory
from hpc_elastic.output.terminal import each_line


def options_of(subcommand: str, own: Sequence[Option] = (), taken: Collection[str] | None = None) -> tuple[Option, ...]:
    found = (option for option in ALL_OPTIONS if own or subcommand == "submit" or not option.submit_only)
    return (*own, *(option for option in found if taken is None or option.dest in taken))


def read_command_line(
    argv: Sequence[str],
    *,
    subcommand: str,
    help_: Help,
    env: Mapping[str, str],
    own: Sequence[Option] = (),
    taken: Collection[str] | None = None,
) -> Parsed | None:
    """None where ``--help`` was printed. `own`: options of this subcommand alone."""
    options = options_of(subcommand, own, taken)
    left_out = {option.dest for option in ALL_OPTIONS if option not in options}
    others = {name: "submit" for option in ALL_OPTIONS if option.dest in left_out for name in option.names}
    try:
        given = parse(argv, options, refused=REFUSED, elsewhere=others, unneeded=UNNEEDED)
    except HelpWanted as wanted:
        _print_help(subcommand, help_, options, wanted, own)
        return None
    here = current_directory(env)
    parsed = resolve(given, ALL_OPTIONS, env=env, here=here, left_out=sorted(left_out), yields=SBATCH_VARIABLES).parsed
    for line in parsed.executed:
        print_note(line)
    mine = {option.dest: given.values[option.dest] for option in own if option.dest in given.values}
    return replace(parsed, values={**parsed.values, **mine}, sources={**given.sources, **parsed.sources})


_FIRST = ("nodes", "gpus_per_node", "nproc_per_node", "time", "partition", "max_restarts")
_FIRST_HERE = ("nodes", "nproc_per_node", "cluster", "runs_dir", "module", "max_restarts")
"""Slurm has given ``run`` and ``agent`` their job already."""
_THEN = ("setup", "export", "container_image", "hangs")


def _print_help(
    subcommand: str, help_: Help, taken: Sequence[Option], wanted: HelpWanted, own: Sequence[Option] = ()
) -> None:
    options = [option for option in taken if option.help and subcommand not in option.ignored_by]
    if wanted.everything:
        sections = {group.value: [option for option in options if option.group is group] for group in Group}
    else:
        by_dest = {option.dest: option for option in options if option not in own}
        first = ("profile",) if subcommand == "config" else _FIRST if "partition" in by_dest else _FIRST_HERE
        sections = {
            Group.SHOWN.value: list(own),
            "options that matter most": [by_dest[dest] for dest in first if dest in by_dest],
            "often needed, too": [by_dest[dest] for dest in _THEN if dest in by_dest and not own],
        }
    sections = {title: found for title, found in sections.items() if found}
    shown = [option for found in sections.values() for option in found]
    ending = (
        "Long options are taken with - and with _. Each option can also be set in a configuration file or by a "
        "variable: --max-restarts is HPC_ELASTIC_MAX_RESTARTS (hpc-elastic config shows each value and where it comes "
        "from)."
    )
    if any(option.env for option in shown):
        ending += " A variable in brackets, as in [PET_NNODES], is one of torchrun's for the same option."
    if len(shown) < len(options):
        ending += f" hpc-elastic {subcommand} --help-all shows all {len(options)} options."
    sys.stdout.write(render_help(replace(help_, ending=ending), sections, width=get_terminal_size().columns))


HELP = Help(
    usage="hpc-elastic config [options] [KEY...]",
    description="Shows the value that each option would have for submit or run here and now, and where it comes from. "
    "It takes the options of submit and run, and checks them as submit does. A later source wins: defaults, the "
    "site's file, the user's file, the project's file, the tables of a profile, variables, the command line. KEY: "
    "only these settings.",
    examples=(
        ("hpc-elastic config", "the settings that have a value"),
        ("hpc-elastic config --nodes 2-4 max-restarts nodes", "two settings, as for this command line"),
    ),
)
OPTIONS = (
    define(Group.SHOWN, "--json", in_files=False,
        help="print one JSON object"),
    define(Group.SHOWN, "--all", in_files=False,
        help="show settings without a value as well"),
    *(option for option in ALL_OPTIONS if option.dest != "dry_run"),
)  # fmt: skip


TAKEN = frozenset[str]()
"""`OPTIONS` has them all."""


def main_config(argv: Sequence[str]) -> int:
    try:
        given = parse(argv, OPTIONS, refused=REFUSED, unneeded=UNNEEDED)
    except HelpWanted as wanted:
        _print_help("config", HELP, OPTIONS, wanted, OPTIONS[:2])
        return 0
    env = os.environ
    found = resolve(given, ALL_OPTIONS, env=env, here=current_directory(env), yields=SBATCH_VARIABLES)
    with explaining(found.parsed):
        check_values(found.parsed)
    shown = _asked(given.command)
    if given.flag("json"):
        sys.stdout.write(json.dumps(_as_json(found, shown, env), indent=2) + "\n")
    else:
        sys.stdout.write(each_line(_as_text(found, shown, env, everything=given.flag("all") or bool(given.command))))
    return 0


def _asked(names: Sequence[str]) -> list[Option]:
    keys = Keys(option for option in ALL_OPTIONS if option.in_files)
    if not names:
        return keys.options()
    found = []
    for name in names:
        option = keys.find(name)
        if option is None:
            if name.startswith("-"):
                raise UsageError(f"{name}: options go before the settings, as in config --nodes 2-4 max-restarts")
            nearest = keys.nearest(name)
            raise UsageError(f"no setting {name}{f'; did you mean {nearest}?' if nearest else ''}")
        found.append(option)
    return found


def _value(found: Resolved, option: Option, env: Mapping[str, str]) -> tuple[Any, Origin | None]:
    origin = found.origins.get(option.dest)
    if option.dest not in found.parsed.values:
        if origin is not None:
            return None, origin
        default = default_of(option)
        return default, None if default is None else Origin(layer=Layer.DEFAULT, where="")
    if option.metavar is None:
        return found.parsed.flag(option.dest), origin
    return (list(found.parsed.all(option.dest)) if option.repeatable else found.parsed.get(option.dest)), origin


def _as_json(found: Resolved, shown: Sequence[Option], env: Mapping[str, str]) -> dict[str, Any]:
    settings = {}
    for option in shown:
        value, origin = _value(found, option, env)
        settings[key_of(option)] = {
            "value": value,
            "layer": origin.layer.value if origin is not None else None,
            "where": (origin.where or None) if origin is not None else None,
            "profile": origin.profile if origin is not None else None,
        }
    files = [{"layer": file.layer.value, "path": str(file.path), "state": state} for file, state in found.files]
    return {"version": 1, "profile": found.profile, "files": files, "settings": settings}


def _as_text(found: Resolved, shown: Sequence[Option], env: Mapping[str, str], *, everything: bool) -> str:
    lines = []
    project = {file.path: state for file, state in found.files if file.layer is Layer.PROJECT}
    for file, state in found.files:
        if file.layer is not Layer.PROJECT or state not in ("not there", "no [tool.hpc-elastic] in it"):
            lines.append(f"{file.layer.value:<9}{file.path} ({state})")
    if project and "read" not in project.values():
        lines.append(f"{Layer.PROJECT.value:<9}none, from {next(iter(project)).parent} upwards")
    lines.append(f"{'profile':<9}{found.profile or 'none'}")
    rows = []
    for option in shown:
        value, origin = _value(found, option, env)
        if value is None and origin is None and not everything:
            continue
        source = "not set"
        if origin is not None:
            profile = f" [profile.{origin.profile}]" if origin.profile else ""
            source = f"{origin.where or origin.layer.value}{profile}"
        rows.append((key_of(option), _shown(value), source))
    widths = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
    lines += ["", *(f"{key:<{widths[0]}}  {value:<{min(widths[1], 30)}}  {source}" for key, value, source in rows)]
    return "\n".join(lines) + "\n"


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    return " ".join(value) if isinstance(value, list) else value or "true"


COMPLETION_PARAMETERS = (click.Argument(["shell"], type=click.Choice(("bash", "zsh", "fish"))),)
COMPLETION_NOTE = (
    "To load it: source <(hpc-elastic completion bash), in ~/.bashrc; for zsh likewise; for fish: "
    "hpc-elastic completion fish | source"
)


def run_completion(args: SimpleNamespace) -> int:
    from click.shell_completion import get_completion_class

    found = get_completion_class(args.shell)
    assert found is not None
    sys.stdout.write(found(_Subcommands(), {}, PROGRAM, COMPLETE_VARIABLE).source())
    return 0


def answer_shell() -> NoReturn:
    from click.shell_completion import shell_complete

    sys.exit(shell_complete(_Subcommands(), {}, PROGRAM, COMPLETE_VARIABLE, os.environ[COMPLETE_VARIABLE]))


class _Subcommands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_SUBCOMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _SUBCOMMANDS:
            return None
        module_name, help_ = _SUBCOMMANDS[cmd_name]
        module = import_module(f"hpc_elastic.cli.{module_name}")
        if parameters := of_subcommand(module, "PARAMETERS", cmd_name):
            return click.Command(cmd_name, params=list(parameters), help=help_)
        own, taken = (of_subcommand(module, what, cmd_name) for what in ("OPTIONS", "TAKEN"))
        found = options_of(cmd_name, own or (), taken)
        options = [_parameter(option) for option in found if cmd_name not in option.ignored_by]
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
