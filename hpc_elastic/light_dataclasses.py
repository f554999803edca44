"""`dataclasses`, for what every agent imports at its start: the same classes, with nothing compiled.

Python's own decorator writes the source of six methods for every class and compiles it, 0.5 ms each, which for an
agent's eighty classes was a third of its start; and `dataclasses` itself imports `inspect`, `ast` and `dis`. (Measured
on Python 3.11.) Here the methods are closures over the fields' names. What is rarely asked for, `dataclasses.fields`
with all that builds on it and the signature, is Python's own, made when somebody first asks.

Type checkers see Python's own in any case. All classes are slotted, as in the whole of this package; bases, ``order``,
`InitVar` and ``KW_ONLY`` are refused where a class is defined: nobody uses them here.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NoReturn

_MISSING: Any = object()
_FULL = ("__dataclass_fields__", "__dataclass_params__", "__signature__")


def _dataclass(*, slots: bool, frozen: bool = False, kw_only: bool = False) -> Callable[[type], type]:
    """`dataclasses.dataclass`, of these options."""
    if not slots:
        raise TypeError("light dataclasses are slotted")

    def make(cls: type) -> type:
        return _made(cls, frozen=frozen, kw_only=kw_only)

    return make


def _field(*, default: Any = _MISSING, default_factory: Any = _MISSING, compare: bool = True) -> Any:
    """`dataclasses.field`, of these options."""
    return _Field(default, default_factory, compare)


def _replace(of: Any, /, **changes: Any) -> Any:
    """`dataclasses.replace`."""
    return type(of)(**{**{name: getattr(of, name) for name in field_names(type(of))}, **changes})


def _asdict(of: Any, /) -> dict[str, Any]:
    """`dataclasses.asdict`, for what JSON can say: other values are kept as they are, not copied."""
    return {name: _plain(getattr(of, name)) for name in field_names(type(of))}


def field_names(cls: type, /) -> tuple[str, ...]:
    """Of a dataclass of this module or of Python's own, in their order; none for any other class."""
    if (light := vars(cls).get("__light_fields__")) is not None:
        return tuple(light)
    if not hasattr(cls, "__dataclass_fields__"):
        return ()
    import dataclasses

    return tuple(each.name for each in dataclasses.fields(cls))


class _Field:
    """What `field` gives: the value of an attribute in the body of a class, until the class is made."""

    __slots__ = ("compare", "default", "factory")

    def __init__(self, default: Any, factory: Any, compare: bool) -> None:
        self.default, self.factory, self.compare = default, factory, compare


def _made(cls: type, *, frozen: bool, kw_only: bool) -> type:
    if cls.__bases__ != (object,):
        raise TypeError(f"{cls.__qualname__}: light dataclasses have no bases")
    body = dict(cls.__dict__)
    fields = _fields(cls, body)
    names = tuple(fields)
    values = _values(tuple(name for name, of in fields.items() if of.compare))
    setters: list[tuple[str, Callable[..., None]]] = []
    methods = {
        "__init__": _init(fields, cls, setters, kw_only=kw_only),
        "__repr__": _repr(names),
        "__eq__": _eq(values),
    }
    if frozen:
        methods |= {"__setattr__": _refuse_to_set, "__delattr__": _refuse_to_delete, "__hash__": _hash(values)}
        methods |= {"__getstate__": _state, "__setstate__": _set_state}  # one by one, as pickle does it, is refused
    else:
        methods["__hash__"] = None  # type: ignore[assignment]
    for name in ("__dict__", "__weakref__"):
        body.pop(name, None)
    full = {name: _Full(name, frozen=frozen, kw_only=kw_only) for name in _FULL}
    made = type(
        cls.__name__,
        (),
        {
            "__slots__": names,
            "__light_fields__": fields,
            "__match_args__": () if kw_only else names,
            **full,
            **methods,
            **body,
        },
    )
    setters += [(name, made.__dict__[name].__set__) for name in names]
    for each in full.values():
        each.of = made
    return made


def _fields(cls: type, body: dict[str, Any]) -> dict[str, _Field]:
    """In their order; `body` loses them, as a slot's name may not be a class's attribute too."""
    fields = {}
    for name, of in cls.__annotations__.items():
        if "ClassVar" in of:
            continue
        if "InitVar" in of or "KW_ONLY" in of:
            raise TypeError(f"{cls.__qualname__}.{name}: light dataclasses have no {of}")
        given = body.pop(name, _MISSING)
        found = given if isinstance(given, _Field) else _Field(given, _MISSING, True)
        if type(found.default).__hash__ is None:
            raise ValueError(f"{cls.__qualname__}.{name}: all would share one default; give a default_factory")
        fields[name] = found
    return fields


def _init(
    fields: dict[str, _Field], cls: type, setters: list[tuple[str, Callable[..., None]]], *, kw_only: bool
) -> Callable[..., None]:
    called, names, count = f"{cls.__qualname__}.__init__()", tuple(fields), len(fields)
    after = cls.__dict__.get("__post_init__")

    def __init__(self: object, /, *args: Any, **given: Any) -> None:
        if args:
            if kw_only or len(args) > len(names):
                most = 1 if kw_only else len(names) + 1
                raise TypeError(f"{called} takes {most} positional arguments but {len(args) + 1} were given")
            for name, value in zip(names, args, strict=False):
                if name in given:
                    raise TypeError(f"{called} got multiple values for argument {name!r}")
                given[name] = value
        if len(given) != count:
            complete(given)
        try:
            for name, put in setters:
                put(self, given[name])
        except KeyError:
            complete(given)  # as many as there are, but not these
        if after is not None:
            after(self)

    def complete(given: dict[str, Any]) -> None:
        for name in given:
            if name not in fields:
                raise TypeError(f"{called} got an unexpected keyword argument {name!r}")
        missing = []
        for name, of in fields.items():
            if name in given:
                continue
            if of.factory is not _MISSING:
                given[name] = of.factory()
            elif of.default is not _MISSING:
                given[name] = of.default
            else:
                missing.append(repr(name))
        if missing:
            raise TypeError(f"{called} missing {len(missing)} required arguments: {', '.join(missing)}")

    return __init__


def _values(names: tuple[str, ...]) -> Callable[[Any], tuple[Any, ...]]:
    if len(names) > 1:
        return attrgetter(*names)
    return lambda of: tuple(getattr(of, name) for name in names)


def _repr(names: tuple[str, ...]) -> Callable[[Any], str]:
    def __repr__(self: Any) -> str:
        return f"{type(self).__qualname__}({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

    return __repr__


def _eq(values: Callable[[Any], tuple[Any, ...]]) -> Callable[[Any, object], bool]:
    def __eq__(self: Any, other: object) -> bool:
        return values(self) == values(other) if type(other) is type(self) else NotImplemented

    return __eq__


def _hash(values: Callable[[Any], tuple[Any, ...]]) -> Callable[[Any], int]:
    def __hash__(self: Any) -> int:
        return hash(values(self))

    return __hash__


def _refuse_to_set(self: object, name: str, value: object) -> NoReturn:
    from dataclasses import FrozenInstanceError

    raise FrozenInstanceError(f"cannot assign to field {name!r}")


def _refuse_to_delete(self: object, name: str) -> NoReturn:
    from dataclasses import FrozenInstanceError

    raise FrozenInstanceError(f"cannot delete field {name!r}")


def _state(self: Any) -> list[Any]:
    return [getattr(self, name) for name in self.__light_fields__]


def _set_state(self: Any, state: list[Any]) -> None:
    for name, value in zip(self.__light_fields__, state, strict=True):
        object.__setattr__(self, name, value)


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(map(_plain, value))
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    return _asdict(value) if field_names(type(value)) else value


class _Full:
    """An attribute of a class that Python's own decorator gives to a twin of it, when it is first looked at."""

    of: type

    def __init__(self, name: str, *, frozen: bool, kw_only: bool) -> None:
        self._name, self._frozen, self._kw_only = name, frozen, kw_only

    def __get__(self, instance: object, owner: type) -> Any:
        import dataclasses
        import inspect

        body: dict[str, Any] = {"__module__": self.of.__module__, "__annotations__": self.of.__annotations__}
        for name, of in self.of.__light_fields__.items():  # type: ignore[attr-defined]
            given = {"default": of.default, "default_factory": of.factory, "compare": of.compare}
            body[name] = dataclasses.field(**{key: item for key, item in given.items() if item is not _MISSING})
        twin: type = dataclasses.dataclass(frozen=self._frozen, kw_only=self._kw_only)(type(self.of.__name__, (), body))
        found = {
            "__signature__": inspect.signature(twin),
            **{name: getattr(twin, name) for name in ("__dataclass_fields__", "__dataclass_params__")},
        }
        for name, value in found.items():
            setattr(self.of, name, value)
        return found[self._name]


if TYPE_CHECKING:
    from dataclasses import asdict as asdict
    from dataclasses import dataclass as dataclass
    from dataclasses import field as field
    from dataclasses import replace as replace
else:
    dataclass, field, replace, asdict = _dataclass, _field, _replace, _asdict
