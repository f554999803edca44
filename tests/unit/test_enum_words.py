"""Every kind of failure, cause, outcome and state has its words wherever one is shown.

The enums are iterated, and the tables found by their keys: a new member fails here, and not in a user's report.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import hpc_elastic
from hpc_elastic.cli.log_events import describe_event
from hpc_elastic.cli.status import status_json, status_line, status_lines
from hpc_elastic.failures.ranking import Category, FailureClass
from hpc_elastic.failures.worker_failure import EvidenceSource
from hpc_elastic.launch.requeue import RequeueAction
from hpc_elastic.launch.run_status import RunState, read_status
from hpc_elastic.report import document as document_module
from hpc_elastic.report.collect import collect_run
from hpc_elastic.report.document import Document, Subject, choose_subject
from hpc_elastic.report.history import OutageKind, read_outage
from hpc_elastic.report.render_html import render_html
from hpc_elastic.report.render_text import render_text
from hpc_elastic.report.verdict import Cause, Confidence
from hpc_elastic.report.wording import describe_outages
from hpc_elastic.report.write import json_report
from hpc_elastic.run.agent_events import FilesystemRefused
from hpc_elastic.run.control_events import LinkLost
from hpc_elastic.run.event_reader import event_line
from hpc_elastic.run.paths import GivenUp, Outcome, StoredResult
from hpc_elastic.submission.environment import state_of as state_of_end
from tests.rigs.event_pairs import read_events
from tests.rigs.run_builder import RunBuilder, make_failure

PACKAGE = Path(hpc_elastic.__file__).parent
NEED_TORCH = ("inprocess", "pytorch", "tools")
PARTIAL = {
    "WORKER_STATE": "an agent that has ended says how it did",
    "_ENDS": "a part of the table, which is whole",
    "_NOTES": "the other records' events have types of their own",
    "_NEAR_LIMIT": "a part of the table, which is whole",
    "_PREEMPTING": "a part of the table, which is whole",
    "_WHY": "why a process does not finish the attempt, which it does where its node is the job's",
}
"""Table → why it does not hold every member of its keys' enum."""


def tables() -> Iterator[tuple[str, Mapping[Any, Any], type[Enum]]]:
    """Name, table and enum, of each mapping of a module whose keys are members of one enum."""
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if path.parent.name in NEED_TORCH or not re.search(r"^ +\w+\.[A-Z_]+: |^\w+ = \{.* in ", text, re.MULTILINE):
            continue
        module = importlib.import_module(".".join(("hpc_elastic", *path.relative_to(PACKAGE).with_suffix("").parts)))
        for name, value in vars(module).items():
            if isinstance(value, Mapping) and value and all(isinstance(key, Enum) for key in value):
                kinds = {type(key) for key in value}
                if len(kinds) == 1:
                    yield name, value, kinds.pop()


def test_tables_that_are_keyed_by_an_enum_hold_every_member() -> None:
    found = list(tables())
    assert {FailureClass, Category} <= {enum for _, _, enum in found}
    missing = {name: set(enum) - set(table) for name, table, enum in found}
    assert not {name: members for name, members in missing.items() if members and name not in PARTIAL}
    assert not PARTIAL.keys() - {name for name, members in missing.items() if members}


def raw_values(*enums: type[Enum]) -> list[str]:
    """Of members whose values are no words: ``too_few_nodes``."""
    return [member.value for enum in enums for member in enum if "_" in member.value]


def shown_by_all(builder: RunBuilder) -> dict[str, str]:
    """The run's report by each renderer."""
    history = collect_run(builder.root)
    found = {
        "text": render_text(Document(history), max_lines=None),
        "html": re.sub(r"<[^>]*>", " ", render_html(Document(history))),
        "json": json_report(Document(history)),
    }
    json.loads(found["json"])
    return found


@pytest.mark.parametrize(
    ("failure_class", "category"),
    [*((one, Category.WORKER) for one in FailureClass), *((FailureClass.ROOT, one) for one in Category)],
)
@pytest.mark.parametrize("is_first", [True, False])
def test_every_kind_of_failure_is_rendered(
    failure_class: FailureClass, category: Category, is_first: bool, tmp_path: Path
) -> None:
    builder = RunBuilder(tmp_path / "run-1")
    builder.attempt(0)
    builder.round(0, 0, at=1)
    failure = make_failure(2, at=5 if is_first else 20, exception="ValueError: bad batch 17")
    builder.fail(replace(failure, failure_class=failure_class, category=category))
    builder.fail(make_failure(1, at=10, exitcode=-11))
    builder.end(0, at=30, outcome="failed", code=1)
    found = shown_by_all(builder)
    for name, text in found.items():
        assert "bad batch 17" in text, name
    for value in raw_values(FailureClass):
        assert value not in found["text"] + found["html"]
    assert f'"{failure_class.value}"' in found["json"]
    (line,) = [
        describe_event(event_line(event))
        for event in read_events(builder.paths.attempt(0).events)
        if event["event"] == "worker_failed" and event["rank"] == 2
    ]
    assert failure_class.value.replace("_", " ") in line


@pytest.mark.parametrize("outcome", Outcome)
def test_every_outcome_is_rendered(outcome: Outcome, tmp_path: Path) -> None:
    builder = RunBuilder(tmp_path / "run-1")
    builder.attempt(0)
    builder.round(0, 0, at=1)
    builder.end(0, at=30, outcome=outcome.value, code=1, decision="end: so")
    StoredResult(outcome=outcome.value, reason="", exit_code=1, action="end", decision="so").save(
        builder.paths.attempt(0).result_json
    )
    found = shown_by_all(builder)
    words = outcome.value.replace("_", " ")
    assert words in found["text"].lower()
    assert words in found["html"].lower()
    assert f'"{outcome.value}"' in found["json"]
    status = read_status(builder.paths, clock=builder.clock)
    assert status.state is RunState.ENDED
    lines = [*status_lines(status, None, seconds_left=None), status_line(status)]
    assert words in lines[-1]
    assert words in "\n".join(lines[:-1])
    events = [describe_event(event_line(event)) for event in read_events(builder.paths.attempt(0).events)]
    assert sum(words in line for line in events) >= 2
    for value in raw_values(Outcome):
        assert value not in found["text"] + found["html"] + "\n".join([*lines, *events])
    assert state_of_end(StoredResult(outcome=outcome.value, reason="", exit_code=1, action="end", decision=""))


@pytest.mark.parametrize("state", RunState)
def test_every_state_of_a_run_is_shown(state: RunState, tmp_path: Path) -> None:
    builder = RunBuilder(tmp_path / "run-1")
    known = read_status(builder.paths, clock=builder.clock)
    status = replace(known, state=state, outcome=Outcome.TOO_FEW_NODES.value, reason="so", exit_code=1)
    lines = [*status_lines(status, None, seconds_left=None), status_line(status)]
    assert state.value in lines[0]
    assert (state.value if state is not RunState.ENDED else "too few nodes") in lines[-1]
    assert json.loads(json.dumps(status_json(status, None, seconds_left=None)))["state"] == state.value
    for value in raw_values(Outcome, RunState):
        assert value not in "\n".join(lines)


LOSS_IN_A_ROUND = {GivenUp.DIED, GivenUp.UNHEALTHY, GivenUp.STORE_LOST, GivenUp.REFUSED}
"""An agent of the node had taken part, so that its loss stands with the round."""


@pytest.mark.parametrize("cause", GivenUp)
def test_every_reason_to_give_a_node_up_is_rendered(cause: GivenUp, tmp_path: Path) -> None:
    builder = RunBuilder(tmp_path / "run-1")
    builder.attempt(0)
    fields = {"node": 1, "name": "n2", "cause": cause.value, "reason": "as it was"}
    builder.event(0, "supervisor", -1, 5, "node_given_up", **fields)
    builder.end(0, at=30, outcome="too_few_nodes", code=1, reason="1 of 4 nodes is left")
    found = shown_by_all(builder)
    assert f'"{cause.value}"' in found["json"]
    (line,) = [
        describe_event(event_line(event))
        for event in read_events(builder.paths.attempt(0).events)
        if event["event"] == "node_given_up"
    ]
    assert cause.value.replace("_", " ") in line
    for value in raw_values(GivenUp):
        assert value not in found["text"] + found["html"] + line
    (given_up,) = (one for one in collect_run(builder.root).attempts[0].given_up if one.node == 1)
    assert (not given_up.unable) is (cause in LOSS_IN_A_ROUND), "either a sentence here, or a loss in a round"
    assert ("n2" in found["text"]) is bool(given_up.unable)


@pytest.mark.parametrize(
    ("cause", "confidence"),
    [*((one, Confidence.HIGH) for one in Cause), *((Cause.WORKER, one) for one in Confidence)],
)
def test_every_verdict_is_rendered(
    cause: Cause, confidence: Confidence, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builder = RunBuilder(tmp_path / "run-1")
    builder.attempt(0)
    builder.round(0, 0, at=1)
    builder.fail(make_failure(1, at=10, exception="ValueError: bad batch 17"))
    builder.end(0, at=30, outcome="failed", code=1)

    def choose(*args: Any, **named: Any) -> Subject:
        chosen = choose_subject(*args, **named)
        return replace(chosen, verdict=replace(chosen.verdict, cause=cause, confidence=confidence))

    monkeypatch.setattr(document_module, "choose_subject", choose)
    found = shown_by_all(builder)
    value = json.loads(found["json"])["verdict"]
    assert (value["cause"], value["confidence"]) == (cause.value, confidence.value)
    assert all("bad batch 17" in text for text in found.values())


@pytest.mark.parametrize("kind", OutageKind)
def test_every_kind_of_outage_is_described(kind: OutageKind) -> None:
    event = {OutageKind.FILESYSTEM: "filesystem_refused", OutageKind.LINK: "link_lost"}[kind]
    told = {"round": 0, "host": "n2", "node": 1, "seconds": 7.0, "error": "EIO", "t": 10**18}
    line = event_line({"event": event, "role": "agent", **told})
    assert isinstance(line.event, (FilesystemRefused, LinkLost))
    outage = read_outage(line, line.event)
    assert outage.kind is kind
    ((name, text),) = describe_outages([outage], str)
    assert name
    assert "n2" in text
    assert "7 s" in text


@pytest.mark.parametrize("action", RequeueAction)
def test_every_decision_about_the_queue_has_its_sentence(action: RequeueAction) -> None:
    line = describe_event(event_line({"event": "requeue_decision", "action": action.value, "reason": "so"}))
    assert re.fullmatch(r"the job .*: so", line)


DESCRIBED: dict[type[Enum], str] = {
    Category: "json.md",
    Cause: "json.md",
    Confidence: "json.md",
    EvidenceSource: "json.md",
    FailureClass: "json.md",
    GivenUp: "events.md",
    Outcome: "events.md",
    RunState: "json.md",
}
"""The page that says what an enum's values mean."""


@pytest.mark.parametrize("enum", DESCRIBED, ids=lambda enum: enum.__name__)
def test_every_value_that_is_written_is_described(enum: type[Enum]) -> None:
    page = (PACKAGE.parent / "docs" / "reference" / DESCRIBED[enum]).read_text(encoding="utf-8")
    assert not [member.value for member in enum if f"`{member.value}`" not in page]
