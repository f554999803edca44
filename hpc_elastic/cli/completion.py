"""``hpc-elastic completion bash``: a completion script for a shell, written from the tables of options.

What it completes stands in the script itself, so that a TAB starts no Python.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Iterable, Mapping
from importlib import import_module

from msgspec import Struct

from hpc_elastic.cli.run_argument import argument_parser
from hpc_elastic.options.run_request import ALL_OPTIONS
from hpc_elastic.options.table import Keys, Option
from hpc_elastic.run.paths import RUN_ID

_WORD = re.compile(r"[a-z][a-z-]*\Z")
_FILES, _FOLDERS = frozenset(("FILE", "PATH")), frozenset(("DIR",))
_HELP = ("-h", "--help")


class _Subcommand(Struct, kw_only=True):
    options: list[str]
    valued: list[str]
    """Options whose value is a word of its own."""
    choices: dict[str, str]
    """Option → what completes its value: words, ``@files`` or ``@folders``."""
    argument: str
    """What completes an argument: words, ``@runs``, ``@script`` or nothing."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash",), help="the shell")


def run(args: argparse.Namespace) -> int:
    """Print. Returns 0."""
    from hpc_elastic.cli.main import _SUBCOMMANDS

    sys.stdout.write(_script({name: module for name, (module, _) in _SUBCOMMANDS.items()}))
    return 0


def _script(modules: Mapping[str, str]) -> str:
    cases = []
    for name, module in modules.items():
        one = _subcommand(name, module)
        choices = "".join(
            f"                {option}) choices={shlex.quote(text)} ;;\n" for option, text in one.choices.items()
        )
        cases.append(
            f"        {name})\n"
            f"            options={shlex.quote(' '.join(one.options))}\n"
            f"            valued={shlex.quote(' '.join(one.valued))}\n"
            f"            argument={shlex.quote(one.argument)}\n"
            + (f"            case $option in\n{choices}            esac\n" if choices else "")
            + "            ;;\n"
        )
    text = _BASH.replace("@SUBCOMMANDS@", " ".join(modules)).replace("@CASES@", "".join(cases))
    return text.replace("@RUN_ID@", RUN_ID)


def _subcommand(name: str, module: str) -> _Subcommand:
    if name in ("submit", "run", "agent", "config", "rehearse", "doctor"):
        if name == "config":
            from hpc_elastic.cli.config import OPTIONS

            keys = " ".join(Keys(option for option in ALL_OPTIONS if option.in_files).by_name)
            return _of_table(OPTIONS, argument=keys)
        if name == "rehearse":
            from hpc_elastic.cli.rehearse import OPTIONS as OWN

            return _of_table([*OWN, *ALL_OPTIONS], argument="@script")
        if name == "doctor":
            from hpc_elastic.cli.doctor import OPTIONS as DOCTORS
            from hpc_elastic.doctor.node_job import TAKEN

            return _of_table([*DOCTORS, *(one for one in ALL_OPTIONS if one.dest in TAKEN)], argument="")
        taken = [one for one in ALL_OPTIONS if (name == "submit" or not one.submit_only) and name not in one.ignored_by]
        return _of_table(taken, argument="@script")
    parser = argument_parser(name, "")
    import_module(f"hpc_elastic.cli.{module}").add_arguments(parser)
    return _of_parser(parser)


def _of_table(options: Iterable[Option], *, argument: str) -> _Subcommand:
    found = _Subcommand(options=[*_HELP, "--help-all"], valued=[], choices={}, argument=argument)
    for option in options:
        found.options += option.names
        if option.metavar is None or option.optional_value:
            continue
        found.valued += option.names
        if text := _values(option.metavar):
            found.choices["|".join(option.names)] = text
    return found


def _of_parser(parser: argparse.ArgumentParser) -> _Subcommand:
    found = _Subcommand(options=[], valued=[], choices={}, argument="")
    for action in parser._actions:
        metavar = action.metavar if isinstance(action.metavar, str) else ""
        text = " ".join(map(str, action.choices)) if action.choices else _values(metavar)
        if not action.option_strings:
            found.argument = "@runs" if metavar.startswith("RUN") else text
            continue
        found.options += action.option_strings
        if action.nargs == 0:
            continue
        found.valued += action.option_strings
        if text:
            found.choices["|".join(action.option_strings)] = text
    return found


def _values(metavar: str) -> str:
    """``auto|slurm|local`` → these words; a file or folder; else nothing."""
    if metavar in _FILES | _FOLDERS:
        return "@files" if metavar in _FILES else "@folders"
    return " ".join(word for word in re.split(r"[|,\[\]]", metavar) if _WORD.match(word))


_BASH = r"""# Completion for hpc-elastic. Load it with: source <(hpc-elastic completion bash)
# compgen -W would expand its words: a folder's name could be a command.
_hpc_elastic_words() {
    local IFS=' ' words word
    read -ra words <<< "$1"
    for word in "${words[@]}"; do
        [[ $word == "$2"* ]] && COMPREPLY+=("$word")
    done
}
_hpc_elastic() {
    local current=${COMP_WORDS[COMP_CWORD]} option=${COMP_WORDS[COMP_CWORD-1]}
    local options='' valued='' argument='' choices='' index word runs=${HPC_ELASTIC_RUNS_DIR:-runs} has_argument=''
    COMPREPLY=()
    if ((COMP_CWORD == 1)); then
        _hpc_elastic_words '@SUBCOMMANDS@ --help --version' "$current"
        return
    fi
    # --option=value arrives as three words
    if [[ $current == '=' ]]; then
        current=''
    elif [[ $option == '=' ]]; then
        option=${COMP_WORDS[COMP_CWORD-2]}
    fi
    case ${COMP_WORDS[1]} in
@CASES@    esac
    for ((index = 2; index < COMP_CWORD; index++)); do
        word=${COMP_WORDS[index]}
        if [[ $word == -- ]]; then
            has_argument=1
            break
        elif [[ $word == -* ]]; then
            if [[ " $valued " == *" $word "* ]]; then
                ((index++))
                [[ ${COMP_WORDS[index]} == '=' ]] && ((index++))
                [[ $word == --runs-dir && $index -lt $COMP_CWORD ]] && runs=${COMP_WORDS[index]}
            fi
        elif [[ $word != '=' ]]; then
            has_argument=1
            break
        fi
    done
    if [[ $has_argument && $argument == @script ]]; then
        compopt -o default
    elif [[ " $valued " == *" $option "* ]]; then
        case $choices in
            @files) compopt -o default ;;
            @folders) compopt -o dirnames ;;
            *) _hpc_elastic_words "$choices" "$current" ;;
        esac
    elif [[ $current == -* ]]; then
        _hpc_elastic_words "$options" "$current"
    else
        case $argument in
            @script) compopt -o default ;;
            @runs)
                local names=latest found LC_ALL=C
                for found in "$runs"/*/run.json; do
                    found=${found%/run.json}
                    found=${found##*/}
                    [[ $found =~ ^@RUN_ID@$ ]] && names+=" $found"
                done
                _hpc_elastic_words "$names" "$current"
                compopt -o filenames -o plusdirs
                ;;
            *) _hpc_elastic_words "$argument" "$current" ;;
        esac
    fi
}
complete -F _hpc_elastic hpc-elastic
"""
