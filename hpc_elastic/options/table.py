"""The type of an option, and its values as they stand on a command line, in files, variables and a program's arguments.

Command lines and their help are on click: the words up to the user's script become values, an error is one line.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date, datetime, time
from enum import Enum
from types import SimpleNamespace
from typing import Any

import click
from msgspec import Struct, field

from hpc_elastic.errors import UsageError


class Group(str, Enum):
    """Options that ``--help`` shows together, in this order, each group under its title."""

    SHOWN = "output of this command"
    WORKERS = "workers"
    JOB = "Slurm job, with the names of sbatch"
    RUN = "where to run, and what to do"
    CONTAINER = "containers"
    HOOKS = "environment and notifications"
    RECOVERY = "failures, preemption and lost nodes"
    HANGS = "hangs and node health"
    OUTPUT = "logs and metrics"
    NETWORK = "network"


class Option(Struct, frozen=True, kw_only=True):
    """One option. Long names are matched with ``-`` and with ``_``."""

    names: tuple[str, ...]
    """The one to show first; ``--name`` or ``-n``."""
    dest: str
    help: str
    """Empty: it is taken, and the help does not show it."""
    group: Group = Group.RUN
    metavar: str | None = None
    """None: a flag."""
    constant: str = "1"
    optional_value: bool = False
    repeatable: bool = False
    env: str | None = None
    """torchrun's variable that gives the value where the option is not there; ours follows from the name."""
    path: bool = False
    """A file or folder: ``~`` and variables are expanded where it stands in a configuration file."""
    file_or_command: bool = False
    """A shell file, which in a project's file is relative to that, or shell commands."""
    executes: bool = False
    """Its value decides what is executed: where a file gives it, the user is shown which."""
    in_files: bool = True
    """It may stand in a configuration file; not where it holds for one run."""
    parse: Callable[[str, str], Any] | None = None
    """Makes its value of the text and of the option as the user called it; raises UsageError. None: the text is it."""
    in_spec: bool = False
    """The field of `RunSpec` that has the name of `dest` takes the value, and nothing else has a part in it."""
    sbatch: bool = False
    """sbatch has the same option, and gets it as it is."""
    slurm_only: bool = False
    submit_only: bool = False
    """``run`` and ``agent`` do not take it."""
    ignored_by: tuple[str, ...] = ()
    """Subcommands that accept it, and do nothing with it: their help leaves it out."""


def define(group: Group, *names: str, dest: str = "", **facts: Any) -> Option:
    """The option with these names; `Option.dest` follows from the first long one."""
    dest = dest or next(name for name in names if name.startswith("--"))[2:].replace("-", "_")
    return Option(group=group, names=names, dest=dest, **facts)


class Parsed(Struct, frozen=True, kw_only=True):
    values: Mapping[str, tuple[str, ...]]
    """`Option.dest` → words, in order."""
    sources: Mapping[str, str]
    """The user's name for each: ``--nnodes``, ``-N`` or ``PET_NNODES``, for error messages."""
    command: tuple[str, ...]
    named: Mapping[str, str] = field(default_factory=dict)
    """Option name → what the user wrote in its place, for options that came from elsewhere (`explaining`)."""
    executed: tuple[str, ...] = ()
    """A line for each option of a file that decides what is executed: ``/etc/hpc.toml:3: python = /opt/bin/python``."""

    def get(self, dest: str) -> str | None:
        found = self.values.get(dest)
        return found[-1] if found else None

    def all(self, dest: str) -> tuple[str, ...]:
        return self.values.get(dest, ())

    def value(self, option: Option) -> Any:
        """The value of an option; None where it was not given. An error names it as the user did."""
        if option.repeatable:
            return self.all(option.dest) or None
        text = self.get(option.dest)
        if text is None or option.parse is None:
            return text
        return option.parse(text, self.source(option.dest, option.names[0]))

    def flag(self, dest: str) -> bool:
        return dest in self.values and self.values[dest][-1] not in ("", "0")

    def source(self, dest: str, default: str) -> str:
        return self.sources.get(dest, default)

    def from_command_line(self, dest: str) -> bool:
        return self.sources.get(dest, "").startswith("-")


@contextmanager
def explaining(parsed: Parsed) -> Iterator[None]:
    """Within, a UsageError names what the user wrote where it names an option that a file or a variable gave.

    Code that checks a value far from here knows its option alone: ``--mem 3X: …`` → ``hpc.toml:4: mem = 3X: …``.
    """
    try:
        yield
    except UsageError as error:
        name, blank, rest = str(error).partition(" ")
        written = parsed.named.get(name.removesuffix(":"))
        if written is None or type(error) is not UsageError:
            raise
        raise UsageError(f"{written}{':' if name.endswith(':') else ''}{blank}{rest}") from None


_MEANT: tuple[tuple[str, str, str], ...] = (
    ("nproc-per-node", "on each node", "nproc nprocs np num-procs procs-per-node processes-per-node"),
    ("nproc-per-node", "on each node", "num-processes-per-node workers nworkers workers-per-node"),
    ("nproc-per-node", "per node, not in total", "world-size num-processes"),
    ("rdzv-conf", "timeout=SECONDS", "rdzv-timeout"),
    ("nodes", "", "num-machines num-nodes nnode n-nodes machines num-hosts"),
    ("master-addr", "only if the detected address does not work", "main-process-ip"),
    ("master-port", "only for a fixed port", "main-process-port"),
    ("nodes", "a range, as in --nodes 2-4", "min-nodes max-nodes min-nnodes max-nnodes"),
    ("gpus-per-node", "on each node", "num-gpus ngpus n-gpus gpu devices gpus-per-machine num-gpus-per-node"),
    ("nodelist", "", "include hosts hostfile nodes-list"),
    ("exclude", "", "exclude-nodes exclude-hosts"),
    ("time", "", "time-limit timelimit walltime wall-time max-time timeout"),
    ("mail-user", "with --mail-type", "mail email mail-to"),
    ("job-name", "", "name job jobname"),
    ("partition", "", "queue"),
    ("account", "", "project"),
    ("cpus-per-task", "on each node", "cpus ncpus num-cpus cores cpus-per-node"),
    ("mem", "on each node", "memory mem-per-node"),
    ("chdir", "", "workdir work-dir working-dir working-directory cwd"),
    ("export", "", "env environment"),
    ("runs-dir", "", "logs logdir log-path output-dir run-dir"),
    ("max-restarts", "", "restarts retries max-retries"),
    ("max-requeues", "", "requeues"),
    ("spares", "", "spare spare-nodes hot-spares"),
    ("grace", "", "grace-period grace-time notice"),
)
"""An option of ours, what differs, and the names that others have for it: torchrun, mpirun, accelerate, DeepSpeed,
Lightning, PBS and LSF, sbatch as one remembers it. Without the dashes in front."""
MEANT: Mapping[str, tuple[str, str]] = {
    name: (meant, remark) for meant, remark, names in _MEANT for name in names.split()
}


def nearest(name: str, known: Collection[str]) -> str | None:
    """The one of `known` that was probably meant; None: none looks like it. Names have no dashes in front."""
    plain = name.replace("_", "-").lower()
    meant = MEANT.get(plain, ("", ""))[0]
    if meant in known:
        return meant
    from difflib import get_close_matches

    return next(iter(get_close_matches(plain, known, n=1, cutoff=0.66)), None)


VARIABLE_PREFIX = "HPC_ELASTIC_"
_YES, _NO = frozenset(("1", "true", "yes", "on")), frozenset(("0", "false", "no", "off"))
_KINDS = {bool: "a boolean", list: "an array", tuple: "an array", dict: "a table"}


class Keys:
    def __init__(self, options: Iterable[Option]) -> None:
        self.by_name: dict[str, Option] = {}
        """``max-restarts``; ``nnodes`` as well as ``nodes``."""
        for option in options:
            if option.constant == "0":
                continue  # --no-requeue: requeue = false
            for name in option.names:
                if name.startswith("--"):
                    self.by_name.setdefault(name[2:], option)

    def options(self) -> list[Option]:
        return list({option.dest: option for option in self.by_name.values()}.values())

    def find(self, name: str) -> Option | None:
        return self.by_name.get(name.replace("_", "-"))

    def nearest(self, name: str, others: Sequence[str] = ()) -> str | None:
        return nearest(name, [*self.by_name, *others])


def key_of(option: Option) -> str:
    return next(name[2:] for name in option.names if name.startswith("--"))


def variable_of(option: Option) -> str:
    return VARIABLE_PREFIX + key_of(option).replace("-", "_").upper()


def texts_of(option: Option, value: object, *, called: str) -> tuple[str, ...]:
    """A value of TOML's or Python's as what would stand on the command line; none: as if it was given nowhere.

    `called` is what the user gave it as, for the message: ``FILE:3: nodes``. Raises UsageError for a value of another
    type than the option takes.
    """
    if any(isinstance(item, str) and "\0" in item for item in (value if isinstance(value, (list, tuple)) else [value])):
        raise UsageError(f"{called} = {value!r}: paths and arguments can't contain a NUL character")
    if option.repeatable and isinstance(value, (list, tuple)):
        if not all(isinstance(item, str) and item for item in value):
            raise UsageError(f"{called} = {_shown(value)}: give an array of strings ({option.metavar} each)")
        return tuple(value)
    if option.metavar is None:
        if not isinstance(value, bool):
            raise UsageError(f"{called} = {_shown(value)}: give true or false")
        return (option.constant if value else "0",)
    if option.optional_value and isinstance(value, bool):
        return ("",) if value else ()
    if isinstance(value, (date, datetime, time)):
        return (value.isoformat(),)  # begin, and time = 04:00:00, which TOML reads as a time of day
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        kind = _KINDS.get(type(value), f"a {type(value).__name__}")
        raise UsageError(f"{called} = {_shown(value)}: give {option.metavar}, not {kind}")
    text = str(value)
    return (text,) if text else ()


def texts_of_variable(option: Option, text: str, *, called: str) -> tuple[str, ...]:
    if option.metavar is None:
        word = text.strip().lower()
        if word not in _YES | _NO:
            raise UsageError(f"{called}={text}: give 1 or 0")
        return (option.constant if word in _YES else "0",)
    if option.repeatable:
        import shlex

        try:
            return tuple(shlex.split(text))
        except ValueError as error:
            raise UsageError(f"{called}={text}: {error}; quote as for a shell") from None
    return (text,)


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if isinstance(value, (list, tuple, dict)) else str(value)


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
    _, remark = MEANT.get(name[2:].replace("_", "-").lower(), ("", ""))
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
            rows = []
            for option in options:
                value = f" {option.metavar}" if option.metavar is not None else ""
                left = ", ".join(option.names) + (f"[={option.metavar}]" if option.optional_value else value)
                rows.append((left, f"{option.help}{f' [{option.env}]' if option.env else ''}".translate(whole)))
            formatter.write_dl(rows, col_max=formatter.width // 3)
    if help_.examples:
        with formatter.section("examples"):
            for command, does in help_.examples:
                formatter.write_text(f"# {does}".translate(whole))
                formatter.write(f"{'':{formatter.current_indent}}{command}\n")
    if help_.ending:
        formatter.write_paragraph()
        formatter.write_text(help_.ending.translate(whole))
    return formatter.getvalue().replace("\u2011", "-")
