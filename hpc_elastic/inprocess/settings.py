"""The wrapper's arguments: types and order; and the value of an annotated parameter of the wrapped function."""

from __future__ import annotations

import inspect
import os.path
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from msgspec import Struct

from hpc_elastic.inprocess.abort import Abort
from hpc_elastic.inprocess.hooks import Compose, Finalize, HealthCheck, Initialize, RankFilter
from hpc_elastic.inprocess.rank_assignment import RankAssignment
from hpc_elastic.inprocess.store import StoreMixin

LESS_THAN = (
    ("soft_timeout", "hard_timeout"),
    ("hard_timeout", "barrier_timeout"),
    ("monitor_process_interval", "barrier_timeout"),
    ("heartbeat_timeout", "barrier_timeout"),
    ("monitor_process_interval", "heartbeat_timeout"),
    ("monitor_thread_interval", "soft_timeout"),
    ("progress_watchdog_interval", "soft_timeout"),
)
"""The first must be less than the second."""

_HOOKS = (Abort, Finalize, HealthCheck, Initialize, RankAssignment, RankFilter)
GIVEN: Mapping[str, Sequence[str]] = {
    "initialize": ("state",),
    "abort": ("state",),
    "finalize": ("state", "train_ex"),
    "health_check": ("state", "train_ex"),
    "rank_assignment": ("state", "terminated_ranks"),
    "rank_filter": ("state",),
}


def check(wrapper: Struct) -> None:
    """Raise TypeError for a wrong type, and ValueError for a wrong order, or a path that is not absolute."""
    hints = typing.get_type_hints(type(wrapper))
    arguments = {name: getattr(wrapper, name) for name in hints}
    factory = arguments["store_factory"]
    if not (isinstance(factory, type) and issubclass(factory, StoreMixin)):
        raise TypeError(f"Wrapper: store_factory={factory!r} must be a subclass of StoreMixin")
    for name, hint in hints.items():
        value = arguments[name]
        kinds = tuple(typing.get_origin(kind) or kind for kind in typing.get_args(hint) or (hint,))
        if name != "store_factory" and not isinstance(value, kinds):
            names = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
            raise TypeError(f"Wrapper: {name}={value!r} must be {names}, not {type(value).__name__}")
    for name, given in GIVEN.items():
        if arguments[name] is not None:
            _check_call(name, arguments[name], given)
    seconds = {name: f"{arguments[name].total_seconds():g} s" for name, hint in hints.items() if hint is timedelta}
    for name, shown in seconds.items():
        if arguments[name] < timedelta(0):
            raise ValueError(f"Wrapper: {name}={shown} must not be negative")
    for less, more in LESS_THAN:
        if not arguments[less] < arguments[more]:
            raise ValueError(f"Wrapper: {less}={seconds[less]} must be less than {more}={seconds[more]}")
    logfile = arguments["monitor_process_logfile"]
    if logfile is not None and not os.path.isabs(logfile):
        raise ValueError(f"Wrapper: monitor_process_logfile={logfile!r} must be an absolute path")


def _check_call(name: str, hook: Callable[..., Any], given: Sequence[str]) -> None:
    """Check early that a hook takes its arguments: it is called for the first time after a fault."""
    # The last of a chain is called first. What the others get is the one's value that is called before them.
    parts = hook.instances if isinstance(hook, Compose) else (hook,)
    for part in (parts[-1], *(part for part in parts[:-1] if isinstance(part, _HOOKS))):
        try:
            signature = inspect.signature(part)
        except (TypeError, ValueError):
            continue  # written in C
        try:
            signature.bind(*given)
        except TypeError as error:
            raise TypeError(
                f"Wrapper: {name}={part!r} is called with ({', '.join(given)}), and its call takes {signature}: {error}"
            ) from None


def with_value_for(
    wanted: type, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], value: object
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """`args` and `kwargs`, with `value` for each parameter of `fn` annotated with `wanted` or ``Optional[wanted]``."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return args, dict(kwargs)
    try:
        hints = typing.get_type_hints(fn)
    except Exception:
        hints = {}  # a name that only a type checker knows
    names = [
        name
        for name, parameter in signature.parameters.items()
        if _is_for(hints.get(name, parameter.annotation), wanted)
    ]
    if not names:
        return args, dict(kwargs)
    bound = signature.bind_partial(*args, **kwargs)
    for name in names:
        bound.arguments[name] = value
    # Keep the signature's order: positional ones are taken from the front.
    bound.arguments = {name: bound.arguments[name] for name in signature.parameters if name in bound.arguments}
    return bound.args, bound.kwargs


def _is_for(annotation: object, wanted: type) -> bool:
    if isinstance(annotation, str):
        bare = annotation.replace(" ", "").removesuffix("|None").removeprefix("None|")
        bare = bare.removeprefix("typing.").removeprefix("Optional[").removesuffix("]")
        return bare.rsplit(".", 1)[-1] == wanted.__name__
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return wanted in typing.get_args(annotation)
    return annotation is wanted
