"""Giving a function the value for its parameters of one type."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any


def with_value_for(
    wanted: type, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], value: object
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """`args` and `kwargs`, with `value` for each parameter of `fn` annotated with `wanted` or ``Optional[wanted]``.

    Whatever the caller gave there is replaced. Annotations may be text.
    """
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return args, dict(kwargs)
    hints = _hints(fn)
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
    # In the signature's order: positional ones are taken from the front.
    bound.arguments = {name: bound.arguments[name] for name in signature.parameters if name in bound.arguments}
    return bound.args, bound.kwargs


def _hints(fn: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(fn)
    except Exception:
        return {}  # a name that only a type checker knows


def _is_for(annotation: object, wanted: type) -> bool:
    if isinstance(annotation, str):
        bare = annotation.replace(" ", "").removesuffix("|None").removeprefix("None|")
        bare = bare.removeprefix("typing.").removeprefix("Optional[").removesuffix("]")
        return bare.rsplit(".", 1)[-1] == wanted.__name__
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return wanted in typing.get_args(annotation)
    return annotation is wanted
