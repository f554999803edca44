"""`hpc_elastic.light_dataclasses` makes the classes that Python's `dataclasses` makes."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from hpc_elastic.light_dataclasses import asdict, dataclass, field, field_names, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """Frozen, by keywords."""

    kind: ClassVar[str] = "node"

    name: str
    rank: int = 0
    seen: dict[str, int] = field(default_factory=dict, compare=False)


@dataclass(slots=True)
class Count:
    """Mutable, by position."""

    of: str
    by: list[int] = field(default_factory=list)
    to: int = 7

    def __post_init__(self) -> None:
        self.by.append(self.to)


@dataclass(frozen=True, slots=True)
class One:
    only: tuple[Any, ...]

    def __repr__(self) -> str:
        return f"<{self.only}>"


@dataclasses.dataclass(frozen=True, slots=True)
class Foreign:
    """Python's own, among them."""

    node: Node


def twin(cls: type) -> type:
    """What Python's decorator makes of the same."""
    light: Any = cls
    options = {"frozen": cls is not Count, "kw_only": cls is Node}
    body = dict.fromkeys(light.__light_fields__)
    for name, of in light.__light_fields__.items():
        default = {} if cls is One or name in ("name", "of") else {"default": of.default}
        if name in ("seen", "by"):
            default = {"default_factory": of.factory}
        body[name] = dataclasses.field(**default, compare=of.compare)
    body.update({name: vars(cls)[name] for name in ("__annotations__", "__module__")})
    own: Callable[[type], type] = dataclasses.dataclass(slots=True, **options)  # type: ignore[call-overload]
    return own(type(cls.__name__, (), body))


@pytest.mark.parametrize("cls", [Node, Count, One])
def test_pythons_own_functions_take_it_for_theirs(cls: Any) -> None:
    theirs: Any = twin(cls)
    assert dataclasses.is_dataclass(cls)
    assert inspect.signature(cls) == inspect.signature(theirs)
    assert [(each.name, each.type, each.compare) for each in dataclasses.fields(cls)] == [
        (each.name, each.type, each.compare) for each in dataclasses.fields(theirs)
    ]
    assert cls.__match_args__ == theirs.__match_args__
    assert cls.__slots__ == theirs.__slots__ == field_names(cls) == field_names(theirs)
    assert cls.__dataclass_params__.frozen == theirs.__dataclass_params__.frozen
    assert (cls.__hash__ is None) == (theirs.__hash__ is None)


@pytest.mark.parametrize(
    ("cls", "positional", "named"),
    [
        (Node, (), {"name": "a"}),
        (Node, (), {"rank": 3, "name": "a", "seen": {"b": 1}}),
        (Node, ("a",), {}),
        (Node, (), {"rank": 1}),
        (Node, (), {"name": "a", "kind": "b"}),
        (Count, ("a",), {}),
        (Count, ("a", [1]), {"to": 2}),
        (Count, ("a", [], 3, 4), {}),
        (Count, ("a",), {"of": "b"}),
        (Count, (), {"by": []}),
        (One, ((1, 2),), {}),
        (One, (), {"only": ()}),
        (One, (), {}),
    ],
)
def test_it_takes_and_refuses_the_same_arguments(cls: Any, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
    def made(of: Any) -> Any:
        try:
            found = of(*copy.deepcopy(positional), **copy.deepcopy(named))
        except TypeError:
            return None
        return [getattr(found, name) for name in field_names(cls)]

    theirs = made(twin(cls))
    if cls is Count and theirs is not None:
        theirs[1].append(theirs[2])  # which __post_init__ does, and the twin has none
    assert made(cls) == theirs


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ({"rank": 1}, r"Node.__init__\(\) missing 1 required arguments: 'name'"),
        ({"name": "a", "hue": 2}, r"Node.__init__\(\) got an unexpected keyword argument 'hue'"),
    ],
)
def test_a_refusal_names_the_class_and_the_argument(named: dict[str, Any], said: str) -> None:
    with pytest.raises(TypeError, match=said):
        Node(**named)


def test_equal_values_are_equal_and_hash_alike_where_it_is_frozen() -> None:
    assert Node(name="a") == Node(name="a", seen={"x": 1}), "`seen` is not compared"
    assert Node(name="a") != Node(name="b")
    assert hash(Node(name="a", seen={"x": 1})) == hash(Node(name="a"))
    assert One((1,)) != Foreign(Node(name="a"))
    assert Count("a") == Count("a") != Count("a", to=8)
    with pytest.raises(TypeError, match="unhashable"):
        hash(Count("a"))


def test_factories_are_called_for_each() -> None:
    first, second = Node(name="a"), Node(name="b")
    first.seen["x"] = 1
    assert second.seen == {}


def test_a_frozen_one_cannot_be_changed_nor_anything_be_added() -> None:
    node: Any = Node(name="a")
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'rank'"):
        node.rank = 1
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot delete field 'rank'"):
        del node.rank
    count: Any = Count("a")
    count.to = 9
    assert count.to == 9
    with pytest.raises(AttributeError):
        count.other = 1


def test_it_shows_its_fields() -> None:
    assert repr(Node(name="a", rank=2)) == "Node(name='a', rank=2, seen={})"
    assert repr(One((1,))) == "<(1,)>", "its own"
    assert Node.kind == "node"


@pytest.mark.parametrize("of", [Node(name="a", rank=1, seen={"x": 1}), One((1, 2)), Count("a", [1]), One(((),))])
def test_it_is_copied_and_pickled(of: Any) -> None:
    for again in (pickle.loads(pickle.dumps(of)), copy.copy(of), copy.deepcopy(of)):
        assert again == of
        assert [getattr(again, name) for name in field_names(type(of))] == [
            getattr(of, name) for name in field_names(type(of))
        ]


def test_replace_and_asdict_are_those_of_python() -> None:
    node = Node(name="a", seen={"x": 1})
    assert replace(node, rank=4) == dataclasses.replace(node, rank=4) == Node(name="a", rank=4)
    assert replace(Foreign(node), node=Node(name="b")) == Foreign(Node(name="b"))
    nested = One((node, [Foreign(node)], {"k": node}))
    assert asdict(nested) == dataclasses.asdict(nested)
    with pytest.raises(TypeError, match="'hue'"):
        replace(node, hue=1)  # type: ignore[call-arg]


def test_pythons_own_decorator_extends_it() -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Wider(Node):  # type: ignore[misc]
        more: int = 0

    assert [each.name for each in dataclasses.fields(Wider)] == ["name", "rank", "seen", "more"]
    assert field_names(Wider) == ("name", "rank", "seen", "more")
    assert Wider(name="a", more=2).more == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        Wider(name="a").name = "b"  # type: ignore[misc]


def test_what_it_does_not_know_is_refused_where_a_class_is_defined() -> None:
    with pytest.raises(TypeError, match="no bases"):

        @dataclass(slots=True)
        class Based(Exception):
            a: int

    with pytest.raises(TypeError, match=r"Init\.a: light dataclasses have no dataclasses\.InitVar"):

        @dataclass(slots=True)
        class Init:
            a: dataclasses.InitVar[int]

    with pytest.raises(TypeError, match="are slotted"):

        @dataclass(slots=False)
        class Loose:
            a: int

    with pytest.raises(ValueError, match=r"Shared\.a: all would share one default"):

        @dataclass(slots=True)
        class Shared:
            a: list[int] = []  # noqa: RUF012
