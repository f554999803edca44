"""`hpc_elastic.light_dataclass` makes what `dataclasses` makes, class by class and call by call."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import inspect
import pickle
import pkgutil
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, ClassVar

import pytest

import hpc_elastic
from hpc_elastic import light_dataclass

# The modules are told apart at run time alone.
light: Any = light_dataclass
standard: Any = dataclasses

OPTIONS = [
    {"frozen": True, "slots": True, "kw_only": True},
    {"frozen": True, "slots": True},
    {"frozen": True},
    {"slots": True},
    {},
]


def point(module: Any, **options: bool) -> Any:
    """A class with all that the package uses."""

    class Point:
        """A point."""

        KIND: ClassVar[str] = "point"
        x: int
        y: int = 2
        tags: list[str] = module.field(default_factory=list)
        seen: int = module.field(default=0, compare=False, repr=False)
        length: int = module.field(init=False)
        late: list[int] = module.field(init=False, default_factory=list)
        fixed: int = module.field(init=False, default=7)

        def __post_init__(self) -> None:
            object.__setattr__(self, "length", self.x + self.y)

        @property
        def double(self) -> int:
            return 2 * self.x

    return module.dataclass(**options)(Point)


def outcome(call: Callable[[], Any]) -> object:
    """What a call returns, or which kind of error it raises."""
    try:
        return call()
    except Exception as error:
        return type(error)


USES: dict[str, Callable[[Any], Any]] = {
    "repr": lambda cls: repr(cls(x=1)),
    "repr of itself": lambda cls: repr((lambda made: made.tags.append(made) or made)(cls(x=1))),
    "defaults": lambda cls: [getattr(cls(x=1), name) for name in ("x", "y", "tags", "seen", "length", "late", "fixed")],
    "a factory for each": lambda cls: (cls(x=1).tags is cls(x=1).tags, cls(x=1).late is cls(x=1).late),
    "all given": lambda cls: repr(cls(x=1, y=3, tags=["a"], seen=4)),
    "positional": lambda cls: repr(cls(1, 3)),
    "too many": lambda cls: cls(1, 2, [], 4, 5),
    "twice": lambda cls: cls(1, x=1),
    "missing": lambda cls: cls(),
    "unknown": lambda cls: cls(x=1, z=2),
    "one missing, one unknown": lambda cls: cls(z=2),
    "missing, all others given": lambda cls: cls(y=3, tags=[], seen=4, z=5),
    "no parameter": lambda cls: cls(x=1, length=2),
    "equal": lambda cls: (cls(x=1) == cls(x=1, seen=5), cls(x=1) == cls(x=2), cls(x=1) == 1, cls(x=1) != cls(x=1)),
    "hash": lambda cls: hash(cls(x=1, tags=())) == hash(cls(x=1, tags=(), seen=9)),
    "hash of a list": lambda cls: hash(cls(x=1)),
    "assign": lambda cls: setattr(cls(x=1), "x", 2),
    # (Frozen and slotted, those of Python 3.11 raise a TypeError of their own.)
    "assign another": lambda cls: "__slots__" in vars(cls) or setattr(cls(x=1), "w", 2),
    "delete": lambda cls: delattr(cls(x=1), "x"),
    "match": lambda cls: cls.__match_args__,
    "slots": lambda cls: getattr(cls, "__slots__", None),
    "own dict": lambda cls: hasattr(cls(x=1), "__dict__"),
    "class attributes": lambda cls: (cls.KIND, cls.__doc__, cls.__name__, cls(x=2).double),
    "default on the class": lambda cls: cls.y if "__slots__" not in vars(cls) else None,
    "no default on the class": lambda cls: cls.tags if "__slots__" not in vars(cls) else None,
    "is one": lambda cls: (dataclasses.is_dataclass(cls), dataclasses.is_dataclass(cls(x=1))),
    "names": lambda cls: [(item.name, item.type, item.compare) for item in dataclasses.fields(cls(x=1))],
    "as a dict": lambda cls: dataclasses.asdict(cls(x=1, tags=["a"])),
    "replaced": lambda cls: repr(dataclasses.replace(cls(x=1, tags=["a"]), y=9)),
    "replaced wrongly": lambda cls: dataclasses.replace(cls(x=1), length=9),
    "signature": lambda cls: str(inspect.signature(cls)).replace("<factory>", "").split(" ->")[0],
    "copied": lambda cls: copy.copy(cls(x=1, tags=["a"])) == cls(x=1, tags=["a"]),
    "copied deep": lambda cls: repr(copy.deepcopy(cls(x=1, tags=["a"]))),
}


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "+".join(options) or "plain")
@pytest.mark.parametrize("use", USES)
def test_is_what_dataclasses_makes(use: str, options: dict[str, bool]) -> None:
    ours, theirs = point(light, **options), point(standard, **options)
    expected = outcome(lambda: USES[use](theirs))
    assert outcome(lambda: USES[use](ours)) == expected
    for x in range(100):  # by the compiled __init__, from some number on
        ours(x=x)
    assert outcome(lambda: USES[use](ours)) == expected


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "+".join(options) or "plain")
def test_own_functions_are_those_of_dataclasses(options: dict[str, bool]) -> None:
    ours, theirs = point(light, **options), point(standard, **options)
    inner, outer = ours(x=1, tags=["a"]), theirs(x=1, tags=["a"])
    assert light.asdict(ours(x=1, tags=[inner, (inner,), {"k": inner}])) == standard.asdict(
        theirs(x=1, tags=[outer, (outer,), {"k": outer}])
    )
    assert repr(light.replace(inner, y=5)) == repr(standard.replace(outer, y=5))
    assert [item.name for item in light.fields(ours)] == [item.name for item in standard.fields(theirs)]
    with pytest.raises(ValueError, match="length"):
        light.replace(inner, length=5)


def test_an_init_is_compiled_for_a_class_of_which_many_are_made() -> None:
    cls = point(light, frozen=True, slots=True, kw_only=True)
    first = cls.__init__
    for x in range(63):
        cls(x=x)
    assert cls.__init__ is first
    made = [repr(cls(x=1)) for _ in range(3)]
    assert cls.__init__ is not first
    assert len(set(made)) == 1


def test_a_subclass_keeps_its_own_init() -> None:
    @light.dataclass(slots=True)
    class Base:
        x: int

    class Sub(Base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(x=5)

    assert {Sub().x for _ in range(100)} == {5}
    assert Base(x=3).x == 3


@pytest.mark.parametrize(
    ("kind", "default"), [("list[int]", []), ("InitVar[int]", 0), ("dataclasses.InitVar[int]", 0), ("KW_ONLY", 0)]
)
def test_what_it_does_not_know_is_refused(kind: str, default: object) -> None:
    cls = type("Odd", (), {"__annotations__": {"x": kind}, "x": default, "__module__": __name__})
    with pytest.raises((TypeError, ValueError), match="x"):
        light.dataclass(cls)


def test_inherited_fields_are_refused() -> None:
    base = point(light)
    with pytest.raises(TypeError, match="inherited"):
        light.dataclass(type("Sub", (base,), {"__annotations__": {"z": "int"}}))


def test_a_field_without_a_default_after_one_with_it_is_refused() -> None:
    cls = type("Odd", (), {"__annotations__": {"x": "int", "y": "int"}, "x": 1})
    with pytest.raises(TypeError, match="default"):
        light.dataclass(cls)
    light.dataclass(kw_only=True)(type("Fine", (), {"__annotations__": {"x": "int", "y": "int"}, "x": 1}))


def own_classes() -> Iterator[type]:
    """All of the package's that are made by `light_dataclass`."""

    def modules() -> Iterator[ModuleType]:
        for found in pkgutil.walk_packages(hpc_elastic.__path__, "hpc_elastic."):
            if not found.name.startswith("hpc_elastic.pytorch") and not found.name.endswith("__main__"):
                yield importlib.import_module(found.name)

    seen = set()
    for module in modules():
        for item in vars(module).values():
            if isinstance(item, type) and "__light_fields__" in vars(item) and item not in seen:
                seen.add(item)
                yield item


def test_every_class_of_the_package_has_the_parameters_that_dataclasses_would_give_it() -> None:
    found = list(own_classes())
    assert len(found) > 100
    for cls in found:
        names = [item.name for item in light.fields(cls)]
        assert [item.name for item in dataclasses.fields(cls)] == names, cls
        assert set(inspect.signature(cls).parameters) <= set(names), cls


def test_objects_pickle() -> None:
    from hpc_elastic.attempt import AttemptInfo

    attempt = AttemptInfo(number=1, cluster="local", nodes=("a",), batch_host="b", started_ns=1, versions={"x": "1"})
    assert pickle.loads(pickle.dumps(attempt)) == attempt
