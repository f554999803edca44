"""Each event is one type: written, read back, described."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import fields

import hpc_elastic
from hpc_elastic.base.codec import to_json
from hpc_elastic.run.agent_events import AgentEnded, RoundFinal, StacksTaken, WorkerFailed, WorkersStopped
from hpc_elastic.run.control_events import AgentProcessEnded
from hpc_elastic.run.event_reader import EVENTS, read_event, read_events
from hpc_elastic.run.events import (
    NOTES,
    AgentEvent,
    CoordinatorEvent,
    EventLog,
    Note,
    RunEvent,
    SupervisorEvent,
    name_of,
)
from hpc_elastic.run.progress import RankHeartbeat
from tests.rigs.event_samples import KINDS, sample
from tests.rigs.fake_clock import FakeClock


def test_every_event_is_of_one_writer_and_has_a_name_of_its_own() -> None:
    known = {kind for base in (SupervisorEvent, AgentEvent, CoordinatorEvent) for kind in base.__subclasses__()}
    assert set(KINDS) == {*known, Note}
    assert not {*EVENTS} & {*NOTES}
    assert {name_of(kind) for kind in KINDS} == set(EVENTS)
    twice = [kind for kind in KINDS if EVENTS[name_of(kind)] is not kind]
    assert twice == [AgentProcessEnded], "beside it the reader has to be given the role"
    assert all(re.fullmatch(r"[a-z]+(_[a-z]+)*", name) for name in (*EVENTS, *NOTES))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_what_is_written_is_read(kind: type[RunEvent], tmp_path: Path) -> None:
    event = sample(kind)
    role = "supervisor" if issubclass(kind, SupervisorEvent) else "agent"
    log = EventLog(tmp_path / "events", role=role, host="n3", node=3, uid="u1", clock=FakeClock())
    log.write(event)
    log.close()
    (found,) = read_events(tmp_path / "events")
    line = found.value
    assert line["event"] == name_of(kind)
    assert found.name == name_of(event)
    assert found.event == event
    written = json.loads(json.dumps(to_json(event)))
    assert {key: line[key] for key in written} == written
    if "node" in written and "by" not in written:
        assert (line["node"], line["by"]) == (7, 3), "the event's node, and its writer's"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_no_damage_of_a_field_is_an_error(kind: type[RunEvent]) -> None:
    role = "supervisor" if issubclass(kind, SupervisorEvent) else "agent"
    whole = {"role": role, **to_json(sample(kind))}
    for each in fields(kind):
        for damage in (None, [], {}, "x", -1, True, [None, {}, "x", 5], float("nan"), "\udcff"):
            found = read_event({**whole, each.encode_name: damage})
            if found is None:
                assert each.required
                continue
            assert type(found) is kind
            msgspec.convert(to_json(found), kind)  # nothing but what the types allow
        left = read_event({key: value for key, value in whole.items() if key != each.encode_name})
        assert (left is None) is each.required
        assert left is None or getattr(left, each.name) == (None if each.required else each.default)


def test_of_a_list_the_readable_items_are_read() -> None:
    beats = [{"rank": 1, "count": 2}, {"count": 3}, "x"]
    value = {"event": "stacks_taken", "round": 4, "silent": [1, "x", 2], "beats": beats, "groups": 5, "new": {}}
    found = read_event(value)
    assert found == StacksTaken(round=4, silent=(1, 2), beats=(RankHeartbeat(rank=1, count=2),))
    assert read_event({"event": "workers_stopped", "round": 1, "seconds": 1e300}) == WorkersStopped(round=1)


def test_what_is_not_known_is_no_event() -> None:
    for value in ({}, {"event": 5}, {"event": "from the future"}, {"event": "round_final"}, {"event": "event"}):
        assert read_event(value) is None
    assert isinstance(read_event({"event": "agent_ended", "role": "agent", "code": 1}), AgentEnded)
    assert isinstance(read_event({"event": "agent_ended", "role": "supervisor", "code": 1}), AgentProcessEnded)
    assert isinstance(read_event({"event": "round_final", "role": "supervisor", "round": 0}), RoundFinal)
    assert read_event({"event": "worker_failed", "round": 0}) is None, "of which rank"
    assert read_event({"event": "worker_failed", "round": 0, "rank": 1}) == WorkerFailed(round=0, global_rank=1)


DECISIONS = {
    "agent_ended", "agent_relaunched", "closed", "end_taken_over", "hang", "health_check_failed", "node_given_up",
    "node_left", "node_lost", "node_missing", "node_replaced", "note", "output_lost", "platform_failure",
    "requeue_decision", "round_frozen", "round_opened", "spare_lost", "verdict", "workers_stopping",
}  # fmt: skip
"""Events of a decision, or of a finding that others decide upon."""


def test_every_decision_has_its_reason() -> None:
    assert not {name for name in DECISIONS if "reason" not in EVENTS[name].__struct_fields__}


def test_every_event_is_written_somewhere() -> None:
    package = Path(hpc_elastic.__file__).parent
    texts = [
        path.read_text(encoding="utf-8")
        for path in package.rglob("*.py")
        if path.parent.name not in ("report", "cli") and not path.name.endswith("_events.py")
    ]
    used = {name for text in texts for name in re.findall(r"\b[A-Z]\w+\b", text)}
    assert {kind for kind in KINDS if kind.__name__ not in used} == set()
    subjects = {name for text in texts for name in re.findall(r'subject="(\w+)"|: \("(\w+)", "round', text)}
    assert {one or other for one, other in subjects} == set(NOTES)
