"""The errors that a caller may handle: one type per thing to handle, facts as attributes.

Every error pickles, by its arguments.
"""

from __future__ import annotations

import os
from typing import Any


class HpcElasticError(Exception):
    """Base of all errors of this package.

    A subclass takes keyword-only facts, sets `template` to the message with the facts' names in braces, and so gets
    its text, its attributes and its pickling from here. Without facts it takes the arguments of any exception, as the
    errors of the same names do that torch, say, has.
    """

    template = "{message}"

    def __init__(self, *args: Any, **facts: Any) -> None:
        self.facts = facts
        has_text = facts or (not args and "{" not in self.template)
        super().__init__(*([self.template.format(**facts)] if has_text else args))

    def __getattr__(self, name: str) -> Any:
        # Only reached when the normal lookup fails. `facts` itself is absent while unpickling.
        facts = self.__dict__.get("facts", {})
        if name in facts:
            return facts[name]
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), () if self.facts else self.args, self.facts)


def _rebuild(error_type: type[HpcElasticError], args: tuple[Any, ...], facts: dict[str, Any]) -> HpcElasticError:
    return error_type(*args, **facts)


class UsageError(HpcElasticError):
    """The user asked for something that can't be done as asked. The CLI prints it on one line and exits with 2.

    The message names the value and the way out.
    """

    def __init__(self, message: str = "", **facts: Any) -> None:
        super().__init__(message=message, **facts)


class UnsafePathError(UsageError):
    """A file or folder that another user owns, or could have planted, stands where ours should be."""


class UnreadableFileError(HpcElasticError):
    """A file of the run directory is missing, torn, or of a version that this program does not know."""

    template = "{path}: {why}"

    @property
    def may_pass(self) -> bool:
        """Whether the filesystem refused to give it (the fact `errno`), and may not the next time."""
        return self.facts.get("errno") is not None


class IllegalTransitionError(HpcElasticError):
    """A state machine was given an event that its state does not know: a defect in this package."""

    template = "internal error: no transition from state {state} on event {event}"


def describe_error(error: BaseException) -> str:
    """``ValueError: bad batch``."""
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def where_raised(error: BaseException) -> str:
    """The innermost frame: ``node_agent.py:123 in _handle_workers``."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    if frame is None:
        return ""
    code = frame.tb_frame.f_code
    return f"{os.path.basename(code.co_filename)}:{frame.tb_lineno} in {code.co_name}"
