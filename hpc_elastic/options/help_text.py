"""The text of ``--help`` (the options that most people use) and of ``--help-all``, as wide as the terminal. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap

from msgspec import Struct

from hpc_elastic.options.table import Group, Option

_LEAST_WIDTH, _MOST_WIDTH = 40, 120
_COLUMN = 32
"""Where the texts begin, beside the names; on a narrow terminal they stand below them."""
_BESIDE_FROM = 76


class Help(Struct, frozen=True, kw_only=True):
    """What the help of a subcommand says beside its options."""

    usage: str
    description: str
    examples: Sequence[tuple[str, str]] = ()
    """Command and what it does."""
    ending: str = ""


def render_help(help_: Help, options: Sequence[Option], *, width: int) -> str:
    """The whole text: no line is longer than `width`, unless one word is.

    Args:
        help_: What stands around the options.
        options: Those to show; they are put into their groups.
        width: The columns of the terminal.
    """
    width = min(max(width, _LEAST_WIDTH), _MOST_WIDTH) - 1
    lines = [
        *wrap(f"usage: {help_.usage}", width, subsequent_indent="       "),
        "",
        *wrap(help_.description, width, break_on_hyphens=False),
    ]
    for group in Group:
        shown = [option for option in options if option.group is group]
        if shown:
            lines += ["", f"{group.value}:", *(line for option in shown for line in _option(option, width))]
    if help_.examples:
        lines += ["", "examples:"]
        for command, does in help_.examples:
            lines += [*wrap(f"# {does}", width, initial_indent="  ", subsequent_indent="  # ")]
            lines += _command(command, width)
    if help_.ending:
        lines += ["", *wrap(help_.ending, width, break_on_hyphens=False)]
    return "\n".join(lines) + "\n"


def _option(option: Option, width: int) -> list[str]:
    value = f" {option.metavar}" if option.metavar is not None else ""
    if option.optional_value:
        value = f"[={option.metavar}]"
    left = "  " + ", ".join(option.names) + value
    text = option.help + (f" [{option.env}]" if option.env else "")
    indent = " " * (_COLUMN if width >= _BESIDE_FROM else 6)
    right = wrap(text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
    if len(left) + 2 > len(indent):
        return [*wrap(left, width, subsequent_indent="      ", break_on_hyphens=False), *right]
    return [left + right[0][len(left) :], *right[1:]]


def _command(command: str, width: int) -> list[str]:
    parts = wrap(command, width - 2, initial_indent="  ", subsequent_indent="      ", break_on_hyphens=False)
    return [*(f"{part} \\" for part in parts[:-1]), parts[-1]]
