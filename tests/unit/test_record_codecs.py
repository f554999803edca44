"""Every field of every record that is written to disk or sent goes through its codec and comes back.

The records are found by their writer methods and by the calls of `hpc_elastic.base.codec`, and their values are made
from the fields' types: a new field, or a new record, is covered by itself.
"""

from __future__ import annotations

import ast
import importlib
import json
import re
import types
import typing
import zlib
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec
import pytest

import hpc_elastic
from hpc_elastic.agent import health
from hpc_elastic.agent.health import GpuFacts
from hpc_elastic.base import codec
from hpc_elastic.checkpoints.copying import Header
from hpc_elastic.doctor.host import ProbeSettings
from hpc_elastic.failures.error_file import error_data, write_error_data
from hpc_elastic.failures.evidence import read_failure, write_evidence
from hpc_elastic.failures.worker_failure import WorkerFailure
from hpc_elastic.rendezvous.claims import Departure, OwnClaims, Ready, Saved, read_claim
from hpc_elastic.rendezvous.state import NodeFailure, PreemptionStatus, RoundRecord, decode_record
from hpc_elastic.run import index, node_score
from hpc_elastic.run.index import JobEntry
from hpc_elastic.run.node_score import Evidence, NodeRecord
from hpc_elastic.run.option_values import BadNodeSettings
from hpc_elastic.run.paths import AttemptInfo, StoredResult, load_attempt, load_result
from hpc_elastic.run.progress import RankHeartbeat
from hpc_elastic.run.spec import Preload, RunSpec, load_run_spec
from hpc_elastic.submission import call
from hpc_elastic.submission.call import CallTerms
from hpc_elastic.worker_api import records
from hpc_elastic.worker_api.records import HeartbeatRecord, NoticeRecord, RestartGroupReport
from tests.rigs.heartbeat_page import write_record
from tests.rigs.memory_store import MemoryStore

PACKAGE = Path(hpc_elastic.__file__).parent
WRITERS = ("to_json", "encode", "save")
"""Methods by which a record writes itself."""
SENT = ("agent", "inprocess", "report")
"""Packages whose records are no files: they are sent, or part of events."""
ALTERNATIVES = {"members_at"}
"""Fields of which the codec takes another way when they are set; each has its own test below."""


# -- values -----------------------------------------------------------------------------------------------------------


def make(cls: type, *, index: int = 0, **given: Any) -> Any:
    """An instance whose every field differs from its default and from its other fields; `index` tells several apart."""
    hints = typing.get_type_hints(cls)
    values = {}
    for each in msgspec.structs.fields(cls):
        default = default_of(each)
        if each.name in ALTERNATIVES:
            values[each.name] = default
        else:
            values[each.name] = value_of(hints[each.name], each.name, default, index=index)
    return cls(**{**values, **given})


def value_of(hint: Any, name: str, default: Any = None, *, index: int = 0) -> Any:
    """A value of the type `hint` that is not `default`. Numbers grow with `index`."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    seed = 3 + zlib.crc32(name.encode()) % 1000 + 1000 * index
    if origin in (types.UnionType, typing.Union):
        return value_of(next(each for each in arguments if each is not types.NoneType), name, default, index=index)
    if origin is tuple:
        if arguments[-1] is not ...:
            return tuple(value_of(each, name, index=n) for n, each in enumerate(arguments))
        return tuple(value_of(arguments[0], name, index=n) for n in range(2))
    if origin is set:
        return {value_of(arguments[0], name, index=n) for n in range(2)}
    if origin is not None and issubclass(origin, Mapping):
        return {value_of(arguments[0], f"{name} key"): value_of(arguments[1], name)}
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return make(typing.cast("type", hint), index=index)
    if hint is bool:
        return default is not True
    if hint is int:
        return seed
    if hint is float:
        return seed + 0.25
    if hint is Path:
        return Path(f"/{name}")
    if issubclass(hint, Enum):
        return next(member for member in reversed(hint) if member is not default)
    assert hint is str, f"{name}: no values of {hint} are made here yet"
    return str(seed) if "job" in name else f"{name}-{seed}"  # readers refuse what is not a job id


def names_of_differences(one: Any, other: Any) -> set[str]:
    return {each.name for each in msgspec.structs.fields(one) if getattr(one, each.name) != getattr(other, each.name)}


def test_made_values_differ_from_the_defaults() -> None:
    made = make(RoundRecord)
    for each in msgspec.structs.fields(RoundRecord):
        if each.name not in ALTERNATIVES:
            assert getattr(made, each.name) not in (default_of(each), None, ()), each.name
    assert made.hang is not None
    assert made.notice is not None
    assert made.notice.left is not None


# -- the records, and their ways there and back -----------------------------------------------------------------------


def modules() -> Iterator[tuple[str, ast.Module]]:
    """Name and source of each module of the package."""
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(("hpc_elastic", *path.relative_to(PACKAGE).with_suffix("").parts))
        if ".integrations." in name:  # each imports its framework
            continue
        if importlib.util.find_spec("torch") is not None or ".inprocess." not in name:
            yield name, ast.parse(path.read_text(encoding="utf-8"))


def self_writing() -> Iterator[type]:
    """The records with one of the `WRITERS`."""
    for name, tree in modules():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and any(
                isinstance(part, ast.FunctionDef) and part.name in WRITERS for part in node.body
            ):
                cls = getattr(importlib.import_module(name), node.name)
                if issubclass(cls, msgspec.Struct):
                    yield cls


def read_by_the_codec() -> Iterator[type]:
    """The records that a function of `base.codec` is called with."""
    for name, tree in modules():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or name == codec.__name__:
                continue
            function = ast.unparse(node.func).removeprefix("codec.")
            first = ("loads", "from_json", "readable_items", "readable_fields", "readable", "read_claim")
            at = {"load": 1, **dict.fromkeys(first, 0), "ClaimReader": 2}.get(function)
            if at is not None and len(node.args) > at and isinstance(node.args[at], ast.Name | ast.Attribute):
                cls: Any = importlib.import_module(name)
                for part in ast.unparse(node.args[at]).split("."):
                    cls = getattr(cls, part, None)
                if isinstance(cls, type) and issubclass(cls, msgspec.Struct):
                    yield cls


def as_a_line(record: Any, folder: Path) -> Any:
    return codec.loads(type(record), codec.dumps(record))


def record_there_and_back(record: RoundRecord, folder: Path) -> RoundRecord:
    return decode_record(record.number, json.loads(json.dumps(record.to_json())), run_id="x")


def failure_claim_there_and_back(record: NodeFailure, folder: Path) -> NodeFailure | None:
    store = MemoryStore()
    claims = OwnClaims(store, "00001-a")
    claims.report_failure(0, record)
    return read_claim(NodeFailure, store.get(claims.flush()[0]))


def claim_there_and_back(record: Any, folder: Path) -> Any:
    return read_claim(type(record), codec.dumps(record))


def failure_there_and_back(record: WorkerFailure, folder: Path) -> WorkerFailure:
    return WorkerFailure.from_json(json.loads(json.dumps(record.to_json())))


def report_there_and_back(record: RestartGroupReport, folder: Path) -> RestartGroupReport | None:
    return records.read_report(record.encode()[:-1])


def saved_and_read_by(load: Callable[[Path], Any]) -> Callable[[Any, Path], Any]:
    def there_and_back(record: Any, folder: Path) -> Any:
        record.save(folder / "file.json")
        return load(folder / "file.json")

    return there_and_back


def terms_there_and_back(record: CallTerms, folder: Path) -> CallTerms:
    call.write_call(folder / "call.pkl", call.Call(print), record)
    return call.read_terms(folder / "call.pkl")


def gpus_there_and_back(record: GpuFacts, folder: Path) -> GpuFacts:
    return health.gpus_from_json(codec.dumps(record))


def nodes_there_and_back(record: NodeRecord, folder: Path) -> NodeRecord:
    node_score.save_record(folder / "nodes.json", record)
    return msgspec.structs.replace(node_score.load_record(folder / "nodes.json"), problem=record.problem)


def evidence_there_and_back(record: Evidence, folder: Path) -> Evidence:
    (found,) = nodes_there_and_back(NodeRecord(evidence=(record,)), folder).evidence
    return found


def job_there_and_back(record: JobEntry, folder: Path) -> JobEntry:
    env = {"XDG_STATE_HOME": str(folder)}
    values = {each.name: getattr(record, each.name) for each in msgspec.structs.fields(record)}
    assert index.record(**values, env=env) is None
    (found,) = index.known_jobs(env=env)
    return found


def heartbeat_there_and_back(record: HeartbeatRecord, folder: Path) -> HeartbeatRecord | None:
    buffer = bytearray(records.empty_file())
    values = {each.name: getattr(record, each.name) for each in msgspec.structs.fields(record)}
    names = ("step", "saved_step", "first_step")
    steps = {name: records.NO_STEP if values[name] is None else values[name] for name in names}
    write_record(buffer, **{**values, **steps, "section": record.section.encode()})
    return records.read_record(bytes(buffer))


def notice_there_and_back(record: NoticeRecord, folder: Path) -> NoticeRecord | None:
    buffer = bytearray(records.empty_file())
    at, written = records.pack_notice(record)
    buffer[at : at + len(written)] = written
    return records.read_notice(buffer)


OWN_WAYS: dict[type, Callable[[Any, Path], Any]] = {
    AttemptInfo: saved_and_read_by(load_attempt),
    CallTerms: terms_there_and_back,
    Evidence: evidence_there_and_back,
    GpuFacts: gpus_there_and_back,
    HeartbeatRecord: heartbeat_there_and_back,
    JobEntry: job_there_and_back,
    NodeFailure: failure_claim_there_and_back,
    NodeRecord: nodes_there_and_back,
    NoticeRecord: notice_there_and_back,
    **dict.fromkeys((Departure, PreemptionStatus, Ready, Saved), claim_there_and_back),
    RestartGroupReport: report_there_and_back,
    RoundRecord: record_there_and_back,
    RunSpec: saved_and_read_by(load_run_spec),
    Preload: saved_and_read_by(lambda path: codec.load(path, Preload)),
    StoredResult: saved_and_read_by(load_result),
    WorkerFailure: failure_there_and_back,
}
"""Records that do more on their way than their types say: each by the functions that the program calls."""
RECORDS = {**dict.fromkeys(read_by_the_codec(), as_a_line), **OWN_WAYS}


def test_each_record_that_writes_itself_is_known_here() -> None:
    assert not set(self_writing()) - OWN_WAYS.keys(), "give it a way there and back above"


@pytest.mark.parametrize("cls", RECORDS, ids=lambda cls: cls.__name__)
def test_every_field_comes_back(cls: type, tmp_path: Path) -> None:
    record = make(cls)
    found = RECORDS[cls](record, tmp_path)
    assert found is not None, "its own reader refuses it"
    assert not names_of_differences(found, record)
    assert found == record


@pytest.mark.parametrize("cls", RECORDS, ids=lambda cls: cls.__name__)
def test_what_has_a_default_comes_back_as_it(cls: type, tmp_path: Path) -> None:
    required = {each.name for each in msgspec.structs.fields(cls) if each.required}
    record = cls(**{name: getattr(make(cls), name) for name in required})
    assert RECORDS[cls](record, tmp_path) == record


def default_of(each: msgspec.structs.FieldInfo) -> Any:
    return each.default_factory() if callable(each.default_factory) else each.default


def test_a_member_list_elsewhere_comes_back() -> None:
    record = make(RoundRecord, members_at=7)
    known = make(RoundRecord, number=7)
    written = json.loads(json.dumps(record.to_json()))
    assert decode_record(record.number, written, run_id="x", known=known) == record


@pytest.mark.parametrize("is_the_workers", [False, True])
def test_a_failure_comes_back_from_its_error_file(is_the_workers: bool, tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    failure = make(WorkerFailure, error_file=str(path))
    if is_the_workers:  # it wrote one itself, which the agent completes
        write_error_data(path, error_data(message=failure.message, traceback=failure.traceback, timestamp_ns=10**18))
    assert write_evidence(failure, path) == ""
    found = read_failure(path, facts=make(WorkerFailure, index=1))
    assert found is not None
    assert not names_of_differences(found, failure)


def test_the_page_on_files_names_the_records_that_are_written_to_disk() -> None:
    page = (PACKAGE.parent / "docs" / "reference" / "files.md").read_text(encoding="utf-8")
    rows = page.partition("## Which type is in which file")[2].partition("\n## ")[0]
    named = set(re.findall(r"`([a-z]+): (\w+)`", rows))
    elsewhere = {HeartbeatRecord, NoticeRecord, RestartGroupReport}  # a pipe, or a page in memory
    elsewhere |= {cls for cls in RECORDS if ".rehearsal." in cls.__module__}  # what a step is given and prints
    elsewhere |= {BadNodeSettings, RankHeartbeat}  # within another record
    elsewhere |= {cls for cls in RECORDS if cls.__name__.startswith("_")}  # the head of each line of an event log
    elsewhere |= {Header}  # between two agents
    elsewhere |= {ProbeSettings}  # on a worker's command line
    written = {(cls.__module__.split(".")[1], cls.__qualname__) for cls in RECORDS if cls not in elsewhere}
    assert named == {(package, name) for package, name in written if package not in SENT}
