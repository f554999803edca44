"""`dataclass`, `field`, `replace`, `fields` and `asdict` without what `dataclasses` costs at each start.

`dataclasses` imports `inspect`, and with it the compiler's modules, and compiles several functions for each class: an
agent with its eighty classes spent half of its start in that, and megabytes. The methods here are closures over the
fields' names; a class of which many objects are made gets a compiled ``__init__`` then. Type checkers see `dataclasses`
itself, and so do programs that ask an object for its fields (`dataclasses.fields`, `is_dataclass`, `replace`, `asdict`,
`inspect.signature`): a twin is made when they first do.

Left out, and refused: ``order``, ``eq=False``, ``unsafe_hash``, ``InitVar``, and inheritance of fields.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import asdict as asdict
    from dataclasses import dataclass as dataclass
    from dataclasses import field as field
    from dataclasses import fields as fields
    from dataclasses import replace as replace
else:

    class _Missing:
        """No default."""

    _SPECS = "__light_fields__"
    _put = object.__setattr__
    _MANY = 64
    """Objects of one class: what compiling costs is some hundred times what it saves for each."""

    class Field:
        """One field, as `fields` tells of it."""

        __slots__ = ("compare", "default", "default_factory", "init", "name", "repr", "type")

        def __init__(self, default, default_factory, init, compare, repr):
            self.name, self.type = "", Any
            self.default, self.default_factory = default, default_factory
            self.init, self.compare, self.repr = init, compare, repr

    def field(*, default=_Missing, default_factory=_Missing, init=True, compare=True, repr=True):
        """What `dataclasses.field` makes of these."""
        if default is not _Missing and default_factory is not _Missing:
            raise ValueError("give default or default_factory, and not both")
        return Field(default, default_factory, init, compare, repr)

    def dataclass(cls=None, /, *, frozen=False, slots=False, kw_only=False):
        """As `dataclasses.dataclass`."""

        def made(cls):
            return _made(cls, frozen=frozen, slots=slots, kw_only=kw_only)

        return made if cls is None else made(cls)

    def fields(record):
        """The fields of a class or an object, in order. A default that is missing is a class of this module's own."""
        return getattr(record, _SPECS)

    def replace(record, /, **changes):
        """A copy with some fields changed."""
        for spec in getattr(record, _SPECS):
            if spec.init:
                if spec.name not in changes:
                    changes[spec.name] = getattr(record, spec.name)
            elif spec.name in changes:
                raise ValueError(
                    f"field {spec.name} is declared with init=False, it cannot be specified with replace()"
                )
        return type(record)(**changes)

    def asdict(record):
        """The fields by name, all the way down; values that are no records or containers are not copied."""
        return {spec.name: _plain(getattr(record, spec.name)) for spec in getattr(record, _SPECS)}

    def _plain(value):
        if hasattr(type(value), _SPECS):
            return asdict(value)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(_plain, value))
        if isinstance(value, list | tuple):
            return type(value)(map(_plain, value))
        if isinstance(value, dict):
            return type(value)((_plain(key), _plain(item)) for key, item in value.items())
        return value

    def _made(cls, *, frozen, slots, kw_only):
        if any(hasattr(base, "__dataclass_fields__") for base in cls.__mro__[1:]):
            raise TypeError(f"{cls.__qualname__}: fields can't be inherited here; use dataclasses.dataclass")
        specs = _specs_of(cls)
        names = tuple(spec.name for spec in specs)
        ours = {
            "__init__": _init(cls, specs, kw_only=kw_only),
            "__repr__": _repr(tuple(spec.name for spec in specs if spec.repr)),
            "__eq__": _eq(_values(tuple(spec.name for spec in specs if spec.compare))),
            "__match_args__": () if kw_only else tuple(spec.name for spec in specs if spec.init),
        }
        if frozen and slots:
            ours.update(__getstate__=_getstate(names), __setstate__=_setstate(names))
        space = {name: value for name, value in cls.__dict__.items() if name not in ("__dict__", "__weakref__")}
        for name, value in ours.items():
            space.setdefault(name, value)
        if space.get("__hash__") is None:  # Python puts None there where a class has an __eq__ of its own
            space["__hash__"] = _hash(_values(tuple(s.name for s in specs if s.compare))) if frozen else None
        if frozen:
            space.update(__setattr__=_refuse("assign to"), __delattr__=_refuse("delete"))
        twin = _Twin(cls, specs, frozen=frozen, kw_only=kw_only)
        space[_SPECS] = specs
        space["__dataclass_fields__"] = _FromTwin(twin, lambda found: found.__dataclass_fields__)
        space["__dataclass_params__"] = _FromTwin(twin, lambda found: found.__dataclass_params__)
        space["__signature__"] = _FromTwin(twin, _signature)
        for spec in specs:
            space.pop(spec.name, None)
            if not slots and spec.default is not _Missing:
                space[spec.name] = spec.default
        if slots:
            space["__slots__"] = names
            made = type(cls)(cls.__name__, cls.__bases__, space)
            made.__qualname__ = cls.__qualname__
            return made
        for spec in specs:
            if spec.name in cls.__dict__ and spec.name not in space:
                delattr(cls, spec.name)
        for name, value in space.items():
            if cls.__dict__.get(name, _Missing) is not value:
                setattr(cls, name, value)
        return cls

    def _specs_of(cls):
        specs = []
        for name, kind in cls.__annotations__.items():
            told = kind if isinstance(kind, str) else getattr(kind, "__name__", "")
            if told.startswith(("ClassVar", "typing.ClassVar")):
                continue
            if told.startswith(("InitVar", "KW_ONLY", "dataclasses.")):
                raise TypeError(f"{cls.__qualname__}.{name}: {told} is not known here; use dataclasses.dataclass")
            given = cls.__dict__.get(name, _Missing)
            spec = given if isinstance(given, Field) else field(default=given)
            if spec.default is not _Missing and type(spec.default).__hash__ is None:
                raise ValueError(f"mutable default for field {name} is not allowed: use default_factory")
            spec.name, spec.type = name, kind
            specs.append(spec)
        return tuple(specs)

    def _init(cls, specs, *, kw_only):
        """The ``__init__`` that looks at its plan each time, and after `_MANY` times has a compiled one replace it."""
        plan = _Plan(cls, specs, kw_only=kw_only)
        names, defaults, factories, count = plan.names, plan.defaults, plan.factories, len(plan.names)
        made = 0

        def __init__(self, /, *args, **given):
            nonlocal made
            made += 1
            if made == _MANY:
                for found in type(self).__mro__:
                    if found.__dict__.get("__init__") is __init__:
                        found.__init__ = plan.compiled()
            if args:
                plan.place(args, given)
            values = {**defaults, **given}
            if len(values) != count or given.keys() - names:
                plan.complete(values)
            for name in names:
                _put(self, name, values[name])
            for name, value in plan.preset:
                _put(self, name, value)
            for name in plan.late:
                _put(self, name, factories[name]())
            if plan.after:
                self.__post_init__()

        __init__.__qualname__ = f"{cls.__qualname__}.__init__"
        return __init__

    class _Plan:
        """How objects of one class are made."""

        def __init__(self, cls, specs, *, kw_only):
            taken = [spec for spec in specs if spec.init]
            self.names = dict.fromkeys(spec.name for spec in taken).keys()
            self.title = f"{cls.__qualname__}.__init__()"
            self.defaults = {spec.name: spec.default for spec in taken if spec.default is not _Missing}
            self.factories = {spec.name: spec.default_factory for spec in specs if spec.default_factory is not _Missing}
            others = [spec for spec in specs if not spec.init]
            self.preset = tuple((spec.name, spec.default) for spec in others if spec.default is not _Missing)
            """Fields that are no parameters, with their defaults …"""
            self.late = tuple(spec.name for spec in others if spec.name in self.factories)
            """… and those that are made."""
            self.after = hasattr(cls, "__post_init__")
            self.kw_only = kw_only
            self._qualname = f"{cls.__qualname__}.__init__"
            optional = [name in self.defaults or name in self.factories for name in self.names]
            if not kw_only and optional != sorted(optional):
                raise TypeError(f"{cls.__qualname__}: a field without a default follows one that has one")

        def place(self, args, given):
            """Put positional arguments to the others."""
            names = () if self.kw_only else tuple(self.names)
            if len(args) > len(names):
                most = f"{len(names) + 1} positional argument{'s' if names else ''}"
                raise TypeError(f"{self.title} takes {most} but {len(args) + 1} were given")
            for name, value in zip(names, args, strict=False):
                if name in given:
                    raise TypeError(f"{self.title} got multiple values for argument {name!r}")
                given[name] = value

        def complete(self, values):
            """Make what is missing, or say what is wrong."""
            for name in values:
                if name not in self.names:
                    raise TypeError(f"{self.title} got an unexpected keyword argument {name!r}")
            missing = [name for name in self.names if name not in values]
            for name in missing:
                if name not in self.factories:
                    told = ", ".join(repr(name) for name in missing if name not in self.factories)
                    raise TypeError(f"{self.title} missing required arguments: {told}")
                values[name] = self.factories[name]()

        def compiled(self):
            """The same as a function of its own."""
            space = {f"_make_{name}": factory for name, factory in self.factories.items()}
            space |= {f"_preset_{name}": value for name, value in self.preset}
            space |= {"_light_put": _put, "_light_missing": _Missing}
            lines = [
                f"def __init__(self, {'*, ' if self.kw_only and self.names else ''}{', '.join(self.names)}):",
                " pass",
            ]
            for name in self.names:
                made = f"_make_{name}() if {name} is _light_missing else {name}" if name in self.factories else name
                lines.append(f" _light_put(self, {name!r}, {made})")
            lines += [f" _light_put(self, {name!r}, _preset_{name})" for name, _ in self.preset]
            lines += [f" _light_put(self, {name!r}, _make_{name}())" for name in self.late]
            lines += [" self.__post_init__()"] if self.after else []
            exec("\n".join(lines), space)  # of identifiers alone: values come in by name
            init = space["__init__"]
            known = dict.fromkeys((name for name in self.names if name in self.factories), _Missing) | self.defaults
            if self.kw_only:
                init.__kwdefaults__ = known
            else:
                init.__defaults__ = tuple(known[name] for name in self.names if name in known)
            init.__qualname__ = self._qualname
            return init

    def _values(names):
        """Record → the values of these fields, as a tuple."""
        if len(names) > 1:
            return attrgetter(*names)
        return (lambda record: (getattr(record, names[0]),)) if names else (lambda record: ())

    def _eq(values):
        def __eq__(self, other):
            if other.__class__ is self.__class__:
                return values(self) == values(other)
            return NotImplemented

        return __eq__

    def _hash(values):
        def __hash__(self):
            return hash(values(self))

        return __hash__

    def _repr(names):
        showing = set()

        def __repr__(self):
            if id(self) in showing:
                return "..."
            showing.add(id(self))
            try:
                shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
            finally:
                showing.discard(id(self))
            return f"{self.__class__.__qualname__}({shown})"

        return __repr__

    def _getstate(names):
        def __getstate__(self):
            return [getattr(self, name) for name in names]

        return __getstate__

    def _setstate(names):
        def __setstate__(self, state):
            for name, value in zip(names, state, strict=True):
                _put(self, name, value)

        return __setstate__

    def _refuse(what):
        def refuse(self, name, *value):
            from dataclasses import FrozenInstanceError

            raise FrozenInstanceError(f"cannot {what} field {name!r}")

        return refuse

    class _Twin:
        """The class that `dataclasses` would have made, made when it is asked for."""

        def __init__(self, cls, specs, **options):
            self._name, self._module, self._specs, self._options = cls.__name__, cls.__module__, specs, options
            self._made = None

        def get(self):
            if self._made is None:
                import dataclasses

                space = {"__annotations__": {spec.name: spec.type for spec in self._specs}, "__module__": self._module}
                for spec in self._specs:
                    known = {"init": spec.init, "compare": spec.compare, "repr": spec.repr}
                    if spec.default is not _Missing:
                        known["default"] = spec.default
                    if spec.default_factory is not _Missing:
                        known["default_factory"] = spec.default_factory
                    space[spec.name] = dataclasses.field(**known)
                self._made = dataclasses.dataclass(type(self._name, (), space), **self._options)
            return self._made

    class _FromTwin:
        """An attribute of the class that its twin has."""

        def __init__(self, twin, read):
            self._twin, self._read = twin, read

        def __get__(self, record, cls):
            return self._read(self._twin.get())

    def _signature(found):
        import inspect

        return inspect.signature(found)
