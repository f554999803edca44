"""Events as a name and the JSON values of their fields, which tests compare."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from functools import cache
from pathlib import Path
from typing import Any, cast

from msgspec import defstruct

from hpc_elastic.base.codec import to_json
from hpc_elastic.run import event_reader
from hpc_elastic.run.events import EventLog, RunEvent, name_of


def pair_of(event: RunEvent) -> tuple[str, dict[str, Any]]:
    """Name and fields, as a line of the log has them."""
    fields = json.loads(json.dumps(to_json(event)))
    del fields["event"]
    return name_of(event), fields


@cache
def _kind(name: str, fields: tuple[str, ...]) -> type[RunEvent]:
    return defstruct(
        "AnyEvent", [(each, Any) for each in fields], bases=(RunEvent,), tag=name, frozen=True, kw_only=True
    )


def event_of(name: str, /, **fields: Any) -> RunEvent:
    """An event of any name and fields, as other versions may write them."""
    return _kind(name, tuple(fields))(**fields)


class PairLog:
    """An event log that hands each event to a function, by its name and its fields."""

    def __init__(self, take: Callable[[str, dict[str, Any]], object]) -> None:
        self._take = take

    def write(self, event: RunEvent) -> None:
        self._take(*pair_of(event))

    def close(self, *, within: float = 0.0) -> None:
        pass


def log_into(pairs: list[tuple[str, dict[str, Any]]]) -> EventLog:
    """An event log that appends to a list."""
    return cast("EventLog", PairLog(lambda name, fields: pairs.append((name, fields))))


def log_into_dicts(events: list[dict[str, Any]]) -> EventLog:
    """The same; ``event`` is the name."""
    return cast("EventLog", PairLog(lambda name, fields: events.append({"event": name, **fields})))


def read_events(folder: Path, *, names: Collection[str] | None = None) -> Iterator[dict[str, Any]]:
    """The lines of an attempt's events, as JSON values; ``event`` of a note is its subject."""
    for line in event_reader.read_events(folder, names=names):
        yield {**line.value, "event": line.name}
