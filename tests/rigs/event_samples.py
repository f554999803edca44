"""An example of each type of event."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec.structs import fields

from hpc_elastic.run.event_reader import EVENTS, SUPERVISOR_EVENTS
from hpc_elastic.run.events import name_of

KINDS = sorted({*EVENTS.values(), *SUPERVISOR_EVENTS.values()}, key=lambda kind: (name_of(kind), kind.__name__))


def sample(kind: Any) -> Any:
    """A value of a type that is none of its defaults."""
    origin, args = msgspec.inspect.type_info(kind), getattr(kind, "__args__", ())
    match origin:
        case msgspec.inspect.IntType():
            return 7
        case msgspec.inspect.FloatType():
            return 2.5
        case msgspec.inspect.StrType():
            return "so"
        case msgspec.inspect.BoolType():
            return True
        case msgspec.inspect.EnumType():
            return next(iter(kind))
        case msgspec.inspect.VarTupleType():
            return (sample(args[0]),)
        case msgspec.inspect.TupleType():
            return tuple(map(sample, args))
        case msgspec.inspect.UnionType():
            return sample(args[0])
        case msgspec.inspect.StructType():
            return kind(**{each.name: sample(each.type) for each in fields(kind)})
    raise AssertionError(f"no sample of {kind}")
