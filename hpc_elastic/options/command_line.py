"""Command lines and their help, on click: the words up to the user's script become values, an error one line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import click
from msgspec import Struct

from hpc_elastic.errors import UsageError
from hpc_elastic.options.table import Option, Parsed, nearest, remark_on

_LEAST_WIDTH, _MOST_WIDTH = 40, 120


class HelpWanted(Exception):
    def __init__(self, *, everything: bool) -> None:
        super().__init__()
        self.everything = everything


class Help(Struct, frozen=True, kw_only=True):
    usage: str
    description: str
    examples: Sequence[tuple[str, str]] = ()
    ending: str = ""


def parse(
    argv: Sequence[str],
    options: Sequence[Option],
    *,
    refused: Mapping[str, str],
    elsewhere: Mapping[str, str] | None = None,
    unneeded: Sequence[Option] = (),
) -> Parsed:
    """Read `argv` up to the first word that is not an option, or ``--``.

    `refused` are options that will never be, with the reason and the way out; `elsewhere` those of another subcommand,
    with its name; `unneeded` another program's that mean nothing here, refused all together. Raises HelpWanted, too.
    """
    by_name = {name: option for option in options for name in option.names}
    meaningless = {name: option for option in unneeded for name in option.names}
    values: dict[str, tuple[str, ...]] = {}
    sources: dict[str, str] = {}
    leave_out: dict[str, str] = {}
    parameters: list[click.Parameter] = [
        click.Option(words, is_flag=True, is_eager=True, expose_value=False, callback=_raise_help)
        for words in (["-h", "--help"], ["--help-all"])
    ]

    def use(option: Option, name: str, given: Any) -> None:
        if not given:
            return
        if name in meaningless:
            leave_out[name] = option.help
            return
        texts = (option.constant,) if option.metavar is None else tuple(given)
        if not all(texts) and not option.optional_value:
            raise UsageError(f"{name} needs a value ({option.metavar})")
        values[option.dest] = (*values.get(option.dest, ()), *texts) if option.repeatable else texts[-1:]
        sources[option.dest] = name

    # Each name is an option of click's: a message names it as the user did.
    for name, option in (*by_name.items(), *meaningless.items()):
        parameters.append(
            click.Option(
                [name, f"option_{len(parameters)}"],
                is_flag=option.metavar is None or None,
                multiple=option.metavar is not None,
                expose_value=False,
                callback=lambda _, __, given, option=option, name=name: use(option, name, given),
            )
        )
    command = click.Command("", params=parameters, add_help_option=False)
    # A value may be left out only where it stands behind "=": `--exclusive train.py`.
    bare = {name for name, option in by_name.items() if option.optional_value}
    words = [f"{word}=" if word in bare else word for word in argv]
    try:
        context = command.make_context(
            "",
            words,
            allow_interspersed_args=False,
            allow_extra_args=True,
            token_normalize_func=lambda name: name.replace("_", "-"),
        )
    except click.NoSuchOption as error:
        before = argv[: next((at for at, word in enumerate(argv) if _names(word, error.option_name)), 0)]
        if leave_out := {name: meaningless[name].help for name in map(_long_name, before) if name in meaningless}:
            raise _not_needed(leave_out) from None
        raise _unknown(error.option_name, by_name, refused, elsewhere or {}) from None
    except click.BadOptionUsage as error:
        name = error.option_name
        option = by_name.get(name) or meaningless[name]
        if option.metavar is not None:
            raise UsageError(f"{name} needs a value ({option.metavar})") from None
        value = next((word.partition("=")[2] for word in argv if _long_name(word) == name and "=" in word), "")
        raise UsageError(f"{name} takes no value; leave out ={value}") from None
    if leave_out:
        raise _not_needed(leave_out)
    return Parsed(values=values, sources=sources, command=tuple(argv[len(argv) - len(context.args) :]))


class _Command(click.Command):
    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write_usage(ctx.command_path, " ".join(self.collect_usage_pieces(ctx)), prefix="usage: ")


def read_arguments(
    program: str, description: str, parameters: Sequence[click.Parameter], argv: Sequence[str], *, note: str = ""
) -> SimpleNamespace | None:
    """Read the command line of a subcommand without a script of the user's behind it.

    `note`, at the end of the help, explains its arguments. Returns a value for each parameter; None where ``--help``
    was asked for and printed. Raises UsageError for what can't be right.
    """
    command = _Command(program, params=list(parameters), help=description, epilog=note, options_metavar="[options]")
    try:
        context = command.make_context(
            program,
            list(argv),
            help_option_names=["-h", "--help"],
            token_normalize_func=lambda name: name.replace("_", "-"),
        )
    except click.exceptions.Exit:
        return None
    except click.UsageError as error:
        raise UsageError(f"{' '.join(error.format_message().split()).rstrip('.')}; see {program} --help") from None
    return SimpleNamespace(**context.params)


def _raise_help(context: click.Context, parameter: click.Parameter, given: bool) -> None:
    if given:
        raise HelpWanted(everything="--help-all" in parameter.opts)


def _long_name(word: str) -> str:
    return word.partition("=")[0].replace("_", "-")


def _names(word: str, name: str) -> bool:
    return _long_name(word) == name or (not word.startswith("--") and word.startswith(name))


def _not_needed(leave_out: Mapping[str, str]) -> UsageError:
    them = "it" if len(leave_out) == 1 else "them"
    why = "; ".join(dict.fromkeys(leave_out.values()))
    return UsageError(f"{', '.join(leave_out)}: not needed: {why}; leave {them} out")


def _unknown(
    name: str, by_name: Mapping[str, Option], refused: Mapping[str, str], elsewhere: Mapping[str, str]
) -> UsageError:
    if name in elsewhere:
        return UsageError(f"{name} belongs to hpc-elastic {elsewhere[name]}")
    if name in refused:
        return UsageError(f"{name}: {refused[name]}")
    long = name.startswith("--")
    match = nearest(name[2:], [known[2:] for known in by_name if known.startswith("--")]) if long else None
    if match is None:
        return UsageError(
            f"unknown option {name}; script arguments go after the script, sbatch's other options in --sbatch-arg=--x=y"
        )
    remark = remark_on(name[2:])
    return UsageError(f"unknown option {name}; did you mean --{match}{f' ({remark})' if remark else ''}?")


def render_help(help_: Help, sections: Mapping[str, Sequence[Option]], *, width: int) -> str:
    """The text of ``--help``, `width` columns wide: no line is longer, unless one word is.

    `sections`: title → options.
    """
    whole = str.maketrans("-", "\u2011")  # click breaks lines at hyphens: --sbatch-/arg
    formatter = click.HelpFormatter(width=min(max(width, _LEAST_WIDTH), _MOST_WIDTH) - 1)
    program, _, arguments = help_.usage.partition(" ")
    formatter.write_usage(program, arguments, prefix="usage: ")
    formatter.write_paragraph()
    formatter.write_text(help_.description.translate(whole))
    for title, options in sections.items():
        with formatter.section(title):
            rows = [(_left(option), f"{option.help}{f' [{option.env}]' if option.env else ''}") for option in options]
            formatter.write_dl([(left, text.translate(whole)) for left, text in rows], col_max=formatter.width // 3)
    if help_.examples:
        with formatter.section("examples"):
            for command, does in help_.examples:
                formatter.write_text(f"# {does}".translate(whole))
                formatter.write(f"{'':{formatter.current_indent}}{command}\n")
    if help_.ending:
        formatter.write_paragraph()
        formatter.write_text(help_.ending.translate(whole))
    return formatter.getvalue().replace("\u2011", "-")


def _left(option: Option) -> str:
    value = f" {option.metavar}" if option.metavar is not None else ""
    return ", ".join(option.names) + (f"[={option.metavar}]" if option.optional_value else value)
