"""``Compose(a, b, c)(x)`` is ``a(b(c(x)))``."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any


class Compose:
    """Hooks in a chain, which is itself a hook: an instance of the nearest class that all its parts have in common.

    The last one is called first. A tuple that one returns is the next one's arguments; one that takes none is given
    none.
    """

    instances: tuple[Callable[..., Any], ...]

    def __new__(cls, *instances: Callable[..., Any]) -> Compose:
        """Raises: TypeError: there are none, or one can't be called."""
        if not instances:
            raise TypeError("Compose: there is nothing to compose")
        for instance in instances:
            if not callable(instance):
                raise TypeError(f"Compose: {instance!r} can't be called")
        bases: tuple[type, ...] = (Compose,)
        ancestor = _nearest_ancestor(instances)
        if ancestor is Compose or issubclass(ancestor, Compose):
            bases = (ancestor,)
        elif ancestor is not object:
            bases = (Compose, ancestor)
        # A hook's base class is abstract, and Compose has the call that it lacks.
        made = type("Compose", bases, {"__new__": object.__new__, "__init__": object.__init__})()
        made.instances = instances
        return made  # type: ignore[no-any-return]

    def __call__(self, *arguments: Any) -> Any:
        """The chain's value.

        Warns:
            UserWarning: a link was given something and returned None: the next one gets that None.
        """
        result: Any = None
        for instance in reversed(self.instances):
            result = instance(*arguments)
            if result is None and any(argument is not None for argument in arguments):
                warnings.warn(f"Compose: {instance!r} returned None, which breaks the chain", stacklevel=2)
            if isinstance(result, tuple):
                arguments = result
            else:
                arguments = (result,) if _takes_arguments(instance) else ()
        return result


def _nearest_ancestor(instances: tuple[object, ...]) -> type:
    shared = set(type(instances[0]).__mro__).intersection(*(type(other).__mro__ for other in instances[1:]))
    found = next(each for each in type(instances[0]).__mro__ if each in shared)
    try:
        type("Probe", (found,), {})
    except TypeError:
        return object  # functions: nobody can inherit from them
    return found


def _takes_arguments(instance: Callable[..., Any]) -> bool:
    try:
        return bool(inspect.signature(instance).parameters)
    except (TypeError, ValueError):
        return True
