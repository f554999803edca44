"""Reads a command line against a table of options, up to the user's script: what follows it is the script's.

Not argparse: its REMAINDER drops ``--``, it takes an option's value that begins with ``-`` for an option, and it
accepts abbreviations that the next version may make ambiguous.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from hpc_elastic.configuration.spellings import SBATCHS_OWN, nearest, remark_on
from hpc_elastic.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option. Long names are matched with ``-`` and with ``_``."""

    names: tuple[str, ...]
    """The one to show first; ``--name`` or ``-n``."""
    dest: str
    help: str
    group: str = ""
    metavar: str | None = None
    """None: a flag."""
    constant: str = "1"
    """What a flag sets."""
    optional_value: bool = False
    """``--exclusive`` and ``--exclusive=user``."""
    repeatable: bool = False
    env: str | None = None
    """torchrun's variable that gives the value where the option is not there; ours follows from the name."""
    path: bool = False
    """A file or folder: ``~`` and variables are expanded where it stands in a configuration file."""
    executes: bool = False
    """Its value decides what is executed: where a file gives it, the user is shown which."""
    in_files: bool = True
    """Whether it may stand in a configuration file: not where it holds for one run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """A command line that was read."""

    values: Mapping[str, tuple[str, ...]]
    """By `Option.dest`, in order."""
    sources: Mapping[str, str]
    """As what the user gave each: ``--nnodes``, ``-N`` or ``PET_NNODES``, for error messages."""
    command: tuple[str, ...]
    """The script and its arguments, untouched."""
    help: bool = False
    named: Mapping[str, str] = field(default_factory=dict)
    """Option name → what the user wrote in its place, for options that came from elsewhere (`explained`)."""
    executed: tuple[str, ...] = ()
    """What a file says of the options that decide what is executed: ``/etc/hpc.toml:3: python = /opt/bin/python``."""

    def get(self, dest: str) -> str | None:
        """The last value given, or None."""
        found = self.values.get(dest)
        return found[-1] if found else None

    def all(self, dest: str) -> tuple[str, ...]:
        return self.values.get(dest, ())

    def flag(self, dest: str) -> bool:
        return dest in self.values and self.values[dest][-1] not in ("", "0")

    def source(self, dest: str, default: str) -> str:
        """How the user called the option, for a message about its value."""
        return self.sources.get(dest, default)

    def from_command_line(self, dest: str) -> bool:
        """Whether the option was given there, and not by a file or a variable."""
        return self.sources.get(dest, "").startswith("-")

    def explained(self, error: UsageError) -> UsageError:
        """The same error, naming what the user wrote where it names an option that a file or a variable gave.

        Whoever checks a value far from here knows its option alone: ``--mem 3X: …`` → ``hpc.toml:4: mem = 3X: …``.
        """
        name, blank, rest = str(error).partition(" ")
        written = self.named.get(name.removesuffix(":"))
        if written is None or type(error) is not UsageError:
            return error
        return UsageError(f"{written}{':' if name.endswith(':') else ''}{blank}{rest}")


@contextmanager
def explaining(parsed: Parsed) -> Iterator[None]:
    """Within, a UsageError about an option names what gave it (`Parsed.explained`)."""
    try:
        yield
    except UsageError as error:
        explained = parsed.explained(error)
        if explained is error:
            raise
        raise explained from None


@dataclass(slots=True)
class _Reading:
    values: dict[str, list[str]] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)

    def add(self, option: Option, value: str, source: str) -> None:
        if option.repeatable:
            self.values.setdefault(option.dest, []).append(value)
        else:
            self.values[option.dest] = [value]
        self.sources[option.dest] = source


def parse(
    argv: Sequence[str], options: Sequence[Option], *, refused: Mapping[str, str], env: Mapping[str, str]
) -> Parsed:
    """Read `argv` up to the first word that is no option, or ``--``.

    Args:
        argv: Without the program and the subcommand.
        options: The table.
        refused: Long options that will never be, with the reason and the way out.
        env: For options that have a variable.

    Raises:
        UsageError: an option that is unknown, refused, or without its value.
    """
    by_name = {name: option for option in options for name in option.names}
    reading = _Reading()
    index = 0
    while index < len(argv):
        word = argv[index]
        if word == "--":
            index += 1
            break
        if not word.startswith("-") or word == "-":
            break
        if word in ("-h", "--help"):
            return Parsed(values={}, sources={}, command=(), help=True)
        name, value = _split(word, by_name)
        option = by_name.get(name)
        if option is None:
            raise _unknown(name, by_name, refused)
        if option.metavar is None:
            if value is not None:
                raise UsageError(f"{name} takes no value; leave out ={value}")
            value = option.constant
        elif value is None and option.optional_value:
            value = ""
        elif value is None:
            index += 1
            if index == len(argv):
                raise UsageError(f"{name} needs a value ({option.metavar})")
            value = argv[index]
        if not value and option.metavar is not None and not option.optional_value:
            raise UsageError(f"{name} needs a value ({option.metavar})")
        reading.add(option, value, name)
        index += 1
    _from_environment(options, env, reading)
    return Parsed(
        values={dest: tuple(values) for dest, values in reading.values.items()},
        sources=reading.sources,
        command=tuple(argv[index:]),
    )


def render_help(usage: str, description: str, options: Sequence[Option], groups: Mapping[str, str]) -> str:
    """The text of ``--help``."""
    from textwrap import wrap

    lines = [f"usage: {usage}", "", *wrap(description, 100)]
    for group, title in groups.items():
        lines += ["", f"{title}:"]
        for option in options:
            if option.group != group:
                continue
            value = (
                ""
                if option.metavar is None
                else f"[={option.metavar}]"
                if option.optional_value
                else f" {option.metavar}"
            )
            left = "  " + ", ".join(option.names) + value
            right = wrap(option.help + (f" [{option.env}]" if option.env else ""), 68)
            if len(left) > 30:
                lines.append(left)
                left = ""
            lines += [f"{left if number == 0 else '':<32}{text}" for number, text in enumerate(right)]
    return "\n".join(lines) + "\n"


def _split(word: str, by_name: Mapping[str, Option]) -> tuple[str, str | None]:
    """``--nproc_per_node=4`` → ``--nproc-per-node``, ``4``; ``-N4`` → ``-N``, ``4``."""
    if word.startswith("--"):
        name, equals, value = word.partition("=")
        return name.replace("_", "-"), value if equals else None
    if len(word) > 2 and word not in by_name:
        value = word[2:]
        return word[:2], value.removeprefix("=")
    return word, None


def _unknown(name: str, by_name: Mapping[str, Option], refused: Mapping[str, str]) -> UsageError:
    if name in refused:
        return UsageError(f"{name}: {refused[name]}")
    long = name.startswith("--")
    match = nearest(name[2:], [known[2:] for known in by_name if known.startswith("--")]) if long else None
    if match is None:
        if name[2:] in SBATCHS_OWN:
            return UsageError(f"unknown option {name}; it is sbatch's: give --sbatch-arg={name}=value")
        return UsageError(
            f"unknown option {name}; the script's own stand behind its name, others of sbatch's in --sbatch-arg=--x=y"
        )
    remark = remark_on(name[2:])
    return UsageError(f"unknown option {name}; did you mean --{match}{f' ({remark})' if remark else ''}?")


def _from_environment(options: Sequence[Option], env: Mapping[str, str], reading: _Reading) -> None:
    for option in options:
        if option.env and option.dest not in reading.values and env.get(option.env):
            reading.add(option, env[option.env], option.env)
