"""The function that a run calls on each of its workers: written at submission, read by every worker."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpc_elastic.errors import UsageError
from hpc_elastic.submission.objects import UnreadableObjectError, read_head, read_object, write_object


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTerms:
    """What holds for a call besides the function itself. Travels as JSON."""

    name: str
    """The function's, for messages."""
    folder: str
    """The executor's: what submitit calls the folder."""
    timeout_min: float = 0.0
    """The time limit of one attempt, minutes; 0: none is known."""
    timeouts_left: int = 3
    """How often the job may still be requeued because its time was over."""
    stderr_to_stdout: bool = False
    exceptions_are_final: bool = False
    """What the function raises ends the run: no restart, no requeue."""
    sys_path: tuple[str, ...] = ()
    """Where the submitting program's modules are, beyond its interpreter's own."""

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class Call:
    """``function(*args, **kwargs)``."""

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self) -> Any:
        return self.function(*self.args, **self.kwargs)

    @property
    def checkpoint(self) -> Callable[..., Any] | None:
        """The callable's own way to go on elsewhere, by submitit's protocol; None where it has none."""
        found = getattr(self.function, "__submitit_checkpoint__", None) or getattr(self.function, "checkpoint", None)
        return found if callable(found) else None


def function_name(function: object) -> str:
    """For messages and for the run's name."""
    function = getattr(function, "func", function)  # of a functools.partial
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return str(name).replace("<locals>.", "")


def write_call(path: Path, call: Call, terms: CallTerms) -> int:
    """Returns the file's size in bytes.

    Raises:
        UsageError: the function or an argument can't be handed to another process.
        OSError: it can't be written.
    """
    try:
        return write_object(path, terms.to_json(), (call.function, call.args, dict(call.kwargs)))
    except OSError:
        raise
    except Exception as error:
        raise UsageError(
            f"the function {terms.name}, or one of its arguments, can't be handed to another process: {error}; "
            "open files, locks and connections must be made inside of it"
        ) from error


def read_terms(path: Path) -> CallTerms:
    """Raises UnreadableObjectError."""
    head = read_head(path)
    try:
        chosen = {name: head[name] for name in CallTerms.__slots__ if name in head}
        return CallTerms(**{**chosen, "sys_path": tuple(chosen.get("sys_path", ()))})
    except TypeError as error:
        raise UnreadableObjectError(path=str(path), why=f"torn: {error}") from None


def read_call(path: Path) -> Call:
    """Raises UnreadableObjectError."""
    function, args, kwargs = read_object(path)
    return Call(function, tuple(args), dict(kwargs))


def own_sys_path() -> tuple[str, ...]:
    """What a worker needs of ``sys.path`` to find the modules that this program finds: all but the interpreter's own.

    The workers' interpreter may be another one, whose standard library is elsewhere.
    """
    own = {os.path.realpath(prefix) for prefix in (sys.prefix, sys.base_prefix, sys.exec_prefix)}
    found = []
    for entry in sys.path:
        path = os.path.abspath(entry)
        if not any(_is_inside(os.path.realpath(path), prefix) for prefix in own):
            found.append(path)
    return tuple(dict.fromkeys(found))


def _is_inside(path: str, prefix: str) -> bool:
    """``/usr`` holds homes of some clusters: of it, only ``lib`` is the interpreter's."""
    library = os.path.join(prefix, "lib")
    return path in (prefix, library) or path.startswith(library + "/")
