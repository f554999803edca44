"""The base types of all events in a run's log: one type each, which writers build and readers get back.

The types stand by their writers: `supervisor_events`, `agent_events` and `coordinator_events`. The class's name in
snake case, or its `tag`, is the event's name in the file. The fields are the keys of its line, beside those that each
line has (`events.EventLog`). A line of an earlier version may lack a field with a default; a line without one of the
others is useless. Durations are seconds; `round` is the round's index in the attempt.

docs/reference/events.md is generated: a class's docstring and the texts below its fields are its row.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

Seconds = Annotated[float, Meta(ge=0, lt=1e9)]
"""A duration; a reader takes a value outside of these bounds for another host's defect."""


class RunEvent(
    Struct,
    frozen=True,
    kw_only=True,
    tag_field="event",
    tag=lambda name: "".join(f"_{char.lower()}" if char.isupper() else char for char in name).lstrip("_"),
):
    """An action, a decision or a finding."""


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
