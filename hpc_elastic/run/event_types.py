"""What is common to all events that a run's log may hold: one type each, which writers build and readers get back.

The types stand by their writers: `supervisor_events`, `agent_events` and `coordinator_events`. The class's name, in
snake case, is the event's name in the file, where a `tag` gives no other. The fields are the keys of its line, beside
those that each line has (`events.EventLog`). A field with a default may be missing from a line of an earlier version;
a line without one of the others says nothing to a reader. Durations are seconds; `round` is the round's index in the
attempt.

docs/reference/events.md is made of them: a class's docstring and the texts below its fields are its row.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

Seconds = Annotated[float, Meta(ge=0, lt=1e9)]
"""A duration, as readers take it: what is out of these bounds is another host's defect."""


def _snake(name: str) -> str:
    return "".join(f"_{char.lower()}" if char.isupper() else char for char in name).lstrip("_")


class RunEvent(Struct, frozen=True, kw_only=True, tag_field="event", tag=_snake):
    """What was done, decided or found."""


class SupervisorEvent(RunEvent, frozen=True, kw_only=True):
    """Written by the supervisor."""


class AgentEvent(RunEvent, frozen=True, kw_only=True):
    """Written by an agent, about its own node."""


class CoordinatorEvent(RunEvent, frozen=True, kw_only=True):
    """Written by the agent that coordinates the rounds."""

    round: int


def name_of(event: RunEvent | type[RunEvent]) -> str:
    """Its name in the file."""
    return str(event.__struct_config__.tag)
