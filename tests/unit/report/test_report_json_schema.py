"""report.json, key by key: each is there, of its type, and described where it belongs; and none besides.

A type's ``?``: it may be null. A program that was written against this schema goes on working: a key is never removed,
or given another type, without another `version`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from hpc_elastic.report.collect import collect_run
from hpc_elastic.report.document import Document
from hpc_elastic.report.write import VERSION, json_report
from hpc_elastic.run.node_score import Evidence, EvidenceKind, NodeRecord, save_record
from tests.browser.sample_runs import agents, collectives_run, hung_run, requeued_run
from tests.rigs.run_builder import GLOO, START_NS, RunBuilder, make_failure
from tests.unit.report.test_report_advice import failing_run

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "reference" / "json.md"

INT, TEXT, NUMBER, BOOL = "int", "str", "float|int", "bool"


def of(kind: str, names: str) -> dict[str, Any]:
    return dict.fromkeys(names.split(), kind)


LOSS: dict[str, Any] = {
    **of(INT, "node round seen_ns"),
    **of(TEXT, "host"),
    **of(NUMBER, "silent_seconds"),
    **of("str?", "detail left broke unable refusal"),
    **of(BOOL, "agent_only"),
}
FAILURE: dict[str, Any] = {
    **of(INT, "version attempt round node local_rank global_rank pid exitcode"),
    **of(INT, "ended_ns ended_uptime_ns printed_ns stopped_ns oom_kills"),
    **of(NUMBER, "waited"),
    **of(TEXT, "host signal message exception_type traceback stderr_tail fingerprint"),
    **of(TEXT, "category failure_class reason source error_file problem"),
    **of(BOOL, "retryable core_dumped stopped_by_agent node_suspect is_caught is_nodes_oom is_shown"),
    **of("int?", "last_step"),
}
PLACE: dict[str, Any] = {
    **of(INT, "global_rank local_rank node pid exitcode ended_ns"),
    **of(TEXT, "host error_file"),
    **of("int?", "at_ns at_bound_ns"),
}
CORE: dict[str, Any] = {
    **of(TEXT, "cause summary confidence evidence same_failure_ranks"),
    **of("str?", "category fingerprint"),
    **of(BOOL, "retryable"),
    **of("int?", "resolution_ns"),
    "suspects": [{**of(INT, "rank"), **of("str?", "host"), **of(TEXT, "why")}],
    "lost_node": (LOSS, None),
}
VERDICT: dict[str, Any] = {
    **CORE,
    **of("int?", "attempt round"),
    "failure": (FAILURE, None),
    "nodes_apart": [TEXT],
    "user_frame": ({**of(TEXT, "file function"), **of(INT, "line")}, None),
    "candidates": [PLACE],
}
RING: dict[str, Any] = {
    **of(INT, "iteration world_size told_ns node"),
    **of(NUMBER, "seconds"),
    **of("str?", "gave_up"),
    "interruptions": [{**of(INT, "rank"), **of(TEXT, "interruption")}],
    "joined": [INT],
}
ROUND: dict[str, Any] = {
    **of(INT, "index"),
    **of("str?", "reason"),
    **of("int?", "started_ns world_size"),
    **of("float|int?", "seconds"),
    **of(BOOL, "succeeded"),
    "nodes": [{**of(INT, "node group_rank"), **of(TEXT, "host ranks")}],
    "replaced": [{**of(INT, "node group_rank replaces_node"), **of(TEXT, "host replaces_host")}],
    "in_process": [RING],
    "fresh_starts": [{**of(TEXT, "host reason")}],
    "stopping_reasons": [TEXT],
    "decision": ({**of(TEXT, "action reason"), **of("int?", "restarts_used max_restarts")}, None),
    "lost_nodes": [LOSS],
    "verdict": (CORE, None),
    "failures": [
        {
            **of(TEXT, "ranks"),
            **of(INT, "count"),
            "hosts": [TEXT],
            "first": FAILURE,
            "wordings": [{**of(TEXT, "ranks"), **of(INT, "count"), "first": FAILURE}],
            "members": [PLACE],
        }
    ],
    "heartbeats": [
        {**of(INT, "rank node told_ns"), **of("int?", "step counted_steps"), **of(TEXT, "section"), **of(NUMBER, "age")}
    ],
    "stacks": [{**of(TEXT, "ranks state"), "stack": [TEXT]}],
    "threads": [{**of(TEXT, "ranks name"), "stack": [TEXT]}],
}
STREAM: dict[str, Any] = {
    **of(INT, "round rank not_in_file not_in_job_log"),
    **of(TEXT, "stream"),
}
ATTEMPT: dict[str, Any] = {
    **of(INT, "number"),
    **of("str?", "job_id outcome reason decision"),
    **of("int?", "started_ns ended_ns exit_code"),
    "nodes": [TEXT],
    "notices": [TEXT],
    "outages": [
        {
            **of(TEXT, "kind host"),
            **of("int?", "node"),
            **of(INT, "since_ns"),
            **of(NUMBER, "seconds"),
            **of(BOOL, "over"),
            **of("str?", "error path"),
        }
    ],
    "output_lost": [
        {
            **of(TEXT, "host reason"),
            **of(INT, "node not_in_files not_in_job_log told_ns"),
            "streams": [STREAM],
        }
    ],
    "commands": [
        {
            **of(TEXT, "command host reason"),
            **of("str?", "about log"),
            **of("int?", "node"),
            **of(INT, "code told_ns"),
            **of(NUMBER, "seconds"),
            "output": [TEXT],
        }
    ],
    "agents_ended": [{**of(INT, "node seen_ns"), **of(TEXT, "name"), **of("int?", "code"), **of("str?", "detail")}],
    "agents_relaunched": [TEXT],
    "nodes_given_up": [{**of(INT, "node seen_ns"), **of(TEXT, "name cause reason")}],
    "problems": [TEXT],
    "clocks": (
        {
            **of(INT, "reference_node"),
            **of(TEXT, "reference_host"),
            "offsets": [{**of(INT, "node offset_ns bound_ns")}],
            "contradicted": [TEXT],
        },
        None,
    ),
    "rounds": [ROUND],
}
COST: dict[str, Any] = {
    **of(INT, "attempt round"),
    **of(TEXT, "what host"),
    **of(NUMBER, "seconds queued recomputed"),
    **of(BOOL, "recovered is_failure"),
    "parts": [{**of(TEXT, "name"), **of(NUMBER, "seconds")}],
}
GOODPUT: dict[str, Any] = {
    **of("float|int?", "share"),
    **of(NUMBER, "wall training starting interrupted queued ending kept recomputed hanging checkpointing"),
    **of(INT, "checkpoints"),
    **of(BOOL, "steps_known"),
    **of(TEXT, "why_unknown progress"),
    **of("int?", "until_ns"),
    "costs": [COST],
}
BAD_NODE: dict[str, Any] = {
    **of(TEXT, "node"),
    **of(NUMBER, "score"),
    **of(BOOL, "excluded"),
    **of(INT, "until_ns"),
    "evidence": [{**of(TEXT, "kind why"), **of(INT, "at_ns attempt round")}],
}
RUN: dict[str, Any] = {
    **of(INT, "version"),
    **of(TEXT, "run_id run_dir name title"),
    **of("int?", "attempt exit_code"),
    **of("str?", "outcome decision place"),
    "recovery": [TEXT],
    "lines": [{**of(TEXT, "part text"), **of("str?", "name")}],
    "verdict": VERDICT,
    "goodput": GOODPUT,
    "advice": [{**of(TEXT, "about text")}],
    "bad_nodes": [BAD_NODE],
    "problems": [TEXT],
    "attempts": [ATTEMPT],
}
SECTIONS = {
    "report.json": RUN,
    "verdict": VERDICT,
    "goodput": GOODPUT,
    "bad_nodes": BAD_NODE,
    "attempts": ATTEMPT,
    "rounds": ROUND,
}


def wrong(value: object, schema: object, place: str) -> Iterator[str]:
    """What of a value is not as the schema says."""
    if isinstance(schema, tuple):
        if value is not None:
            yield from wrong(value, schema[0], place)
    elif isinstance(schema, list):
        if not isinstance(value, list):
            yield f"{place} is a {type(value).__name__}, not a list"
            return
        for number, item in enumerate(value):
            yield from wrong(item, schema[0], f"{place}[{number}]")
    elif isinstance(schema, dict):
        if not isinstance(value, dict):
            yield f"{place} is a {type(value).__name__}, not an object"
            return
        if set(value) != set(schema):
            yield f"{place} has other keys: {sorted(set(value) ^ set(schema))}"
        for key in set(value) & set(schema):
            yield from wrong(value[key], schema[key], f"{place}.{key}")
    else:
        assert isinstance(schema, str)
        names = schema.rstrip("?").split("|")
        if type(value).__name__ not in names and not (value is None and schema.endswith("?")):
            yield f"{place} is a {type(value).__name__}, not {schema}"


def everything(root: Path) -> RunBuilder:
    """What the other runs have not: a replaced node, lost output, an agent that died, a tie, compared clocks."""
    builder = RunBuilder(root, nodes=5, per_node=2, compares_clocks=True)
    lost = Evidence(node="n5", kind=EvidenceKind.LOST, at_ns=START_NS)
    save_record(builder.paths.nodes_json, NodeRecord(evidence=(lost,), saved_ns=START_NS))
    builder.attempt(0)
    agents(builder, 0, at=1)
    builder.round(0, 0, at=9, without=(4,))
    for rank in (2, 5):
        builder.fail(make_failure(rank, at=60 + rank / 1000, exception=f"Kind{'ab'[rank % 2]}Error: odd", per_node=2))
    builder.fail(make_failure(0, at=60.2, exception=f"RuntimeError: {GLOO.format(rank=0)}", per_node=2))
    builder.fail(make_failure(1, at=60.3, exception="BrokenPipeError: [Errno 32] Broken pipe", per_node=2))
    builder.event(0, "supervisor", 3, 61, "agent_ended", name="n4", code=137)
    builder.event(0, "supervisor", 3, 61, "agent_relaunched", name="n4")
    builder.event(0, "agent", 3, 61, "agent_started")
    builder.event(0, "supervisor", -1, 61, "notice", signal="SIGTERM")
    builder.event(0, "supervisor", 3, 61, "node_given_up", name="n4", cause="died", reason="SIGKILL")
    streams = [{"round": 0, "rank": 1, "stream": "stdout", "not_in_file": 4, "not_in_job_log": 4}]
    lost = {"reason": "the disk is full", "not_in_files": 4, "not_in_job_log": 4, "streams": streams}
    builder.event(0, "agent", 1, 62, "output_lost", **lost)
    ended = {"reason": "exit code 3", "code": 3, "seconds": 0.5, "output": ["no room"], "log": "/r/setup/x.log"}
    builder.event(0, "agent", 1, 62, "user_command_ended", command="setup", **ended)
    builder.event(0, "supervisor", 3, 62, "user_command_ended", command="notify", about="end", **ended)
    refused = {"error": "Permission denied", "path": "/r", "since_ns": 1, "seconds": 25.0, "over": True}
    builder.event(0, "agent", 1, 62, "filesystem_refused", **refused)
    builder.event(0, "agent", 0, 62, "link_lost", round=0, node=1, host="n2", since_ns=2, seconds=5.0, over=False)
    place = {"group_rank": 2, "replaces_node": 2, "replaces_host": "n3"}
    builder.event(0, "agent", 0, 63, "node_replaced", round=1, node=4, host="n5", **place)
    fault = {"iteration": 1, "seconds": 0.25, "world_size": 10, "interruptions": [[2, "TERMINATED"]], "joined": [2]}
    builder.event(0, "agent", 0, 62, "workers_started", round=1, started_fresh="the fork server is not ready yet")
    builder.event(0, "agent", 0, 63, "ring_restarted", round=1, active_world_size=10, **fault)
    builder.event(0, "agent", 0, 64, "ring_gave_up", round=1, rank=0, iteration=2, reason="RestartAbort: enough")
    builder.round(0, 1, at=64, without=(2,), reason="restart 1 of 3")
    builder.event(0, "agent", 0, 90, "node_lost", round=1, node=1, host="n2", age=3.0)
    builder.fail(make_failure(0, at=92, exception="KindaError: odd", per_node=2, round_index=1))
    return builder


def unknown_cause(root: Path) -> RunBuilder:
    builder = RunBuilder(root).begin(at=9)
    builder.fail(make_failure(0, at=60, exception=f"RuntimeError: {GLOO.format(rank=0)}"))
    return builder


def empty(root: Path) -> RunBuilder:
    return RunBuilder(root)


@pytest.mark.parametrize("make", [requeued_run, hung_run, collectives_run, everything, unknown_cause, empty])
def test_every_key_and_its_type(tmp_path: Path, make: Any) -> None:
    value = json.loads(json_report(Document(collect_run(make(tmp_path / "run").root))))
    assert list(wrong(value, RUN, "report")) == []
    assert value["version"] == VERSION == 1


def node_apart(root: Path) -> RunBuilder:
    builder = RunBuilder(root, nodes=2).begin(at=9)
    builder.fail(replace(make_failure(1, at=60, exception="ModuleNotFoundError: No module named 'x'"), waited=1.0))
    return builder


def test_the_samples_fill_every_list(tmp_path: Path) -> None:
    """Else a wrong type in one that is always empty would not be seen."""
    filled: set[str] = set()

    def walk(value: object, place: str) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                walk(item, key)
        elif isinstance(value, list):
            filled.update([place] if value else [])
            for item in value:
                walk(item, place)

    samples = (requeued_run, hung_run, collectives_run, failing_run, everything, unknown_cause, node_apart)
    for number, make in enumerate(samples):
        walk(json.loads(json_report(Document(collect_run(make(tmp_path / f"run-{number}").root)))), "report")
    builder = everything(tmp_path / "torn")
    builder.paths.run_json.unlink()
    walk(json.loads(json_report(Document(collect_run(builder.root)))), "report")
    lists = {
        key
        for part in (*SECTIONS.values(), ROUND["failures"][0], COST, PLACE)
        for key, item in part.items()
        if isinstance(item, list)
    }
    assert lists - filled == {"threads"}  # test_report_collect has them


@pytest.mark.parametrize("name", SECTIONS)
def test_each_section_of_the_document_lists_its_keys(name: str) -> None:
    text = DOCUMENT.read_text()
    title = re.escape(f"## {name}" if name == "report.json" else f"### {name}")
    found = re.search(rf"^{title}$(.*?)(?=^#|\Z)", text, re.MULTILINE | re.DOTALL)
    assert found is not None
    heads = re.findall(r"^- ((?:`\w+`(?:,\s+)?)+)(?::|$)", found[1], re.MULTILINE)
    listed = [key for head in heads for key in re.findall(r"`(\w+)`", head)]
    assert sorted(listed) == sorted(SECTIONS[name])


def keys_of(schema: object) -> set[str]:
    if isinstance(schema, dict):
        return set(schema) | {key for part in schema.values() for key in keys_of(part)}
    return {key for part in schema for key in keys_of(part)} if isinstance(schema, (list, tuple)) else set()


def test_all_keys_are_described() -> None:
    text = DOCUMENT.read_text()
    assert {key for key in keys_of(RUN) if f"`{key}`" not in text} == set()
