"""The options as keys of a file, variables of the environment and arguments of a program: names, values as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import date, datetime, time

from hpc_elastic.configuration.option_table import Option
from hpc_elastic.configuration.spellings import nearest
from hpc_elastic.errors import UsageError

VARIABLE_PREFIX = "HPC_ELASTIC_"
_YES, _NO = frozenset(("1", "true", "yes", "on")), frozenset(("0", "false", "no", "off"))
_KINDS = {bool: "a boolean", list: "an array", tuple: "an array", dict: "a table"}


class Keys:
    """A table of options, by their names outside the command line."""

    def __init__(self, options: Iterable[Option]) -> None:
        self.by_name: dict[str, Option] = {}
        """With ``-``, as in ``max-restarts``; ``nnodes`` as well as ``nodes``."""
        for option in options:
            if option.constant == "0":
                continue  # --no-requeue: requeue = false
            for name in option.names:
                if name.startswith("--"):
                    self.by_name.setdefault(name[2:], option)

    def options(self) -> list[Option]:
        """Each once, in the table's order."""
        return list({option.dest: option for option in self.by_name.values()}.values())

    def find(self, name: str) -> Option | None:
        """By any of its names, with ``-`` or ``_``."""
        return self.by_name.get(name.replace("_", "-"))

    def nearest(self, name: str, others: Sequence[str] = ()) -> str | None:
        """The key that was probably meant."""
        return nearest(name, [*self.by_name, *others])


def key_of(option: Option) -> str:
    """``--max-restarts`` → ``max-restarts``: the name to show."""
    return next(name[2:] for name in option.names if name.startswith("--"))


def variable_of(option: Option) -> str:
    """``HPC_ELASTIC_MAX_RESTARTS``."""
    return VARIABLE_PREFIX + key_of(option).replace("-", "_").upper()


def texts_of(option: Option, value: object, *, called: str) -> tuple[str, ...]:
    """A value of TOML's or Python's as what would stand on the command line.

    Args:
        option: Whose it is.
        value: A number, string, boolean, date or time; a list of strings where the option may be repeated.
        called: What the user gave it as, for the message: ``FILE:3: nodes``.

    Returns:
        One text, or several of a repeatable option; none: as if it was given nowhere.

    Raises:
        UsageError: of another type than the option takes.
    """
    if any(isinstance(item, str) and "\0" in item for item in (value if isinstance(value, (list, tuple)) else [value])):
        raise UsageError(f"{called} = {value!r}: a NUL character can stand in no path and no argument; take it out")
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
    """A variable's value as what would stand on the command line.

    Raises:
        UsageError: of a switch, and neither yes nor no; or quotes that don't end.
    """
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
