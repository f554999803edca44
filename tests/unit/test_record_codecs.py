"""Every field of every record that is written to disk or sent goes through its codec and comes back.

The records are found by their writer methods, and their values are made from the fields' types: a new field, or a new
record, is covered by itself.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
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
from hpc_elastic.agent import health_gpu
from hpc_elastic.agent.health import GpuFacts
from hpc_elastic.failures.error_file import error_data, write_error_data
from hpc_elastic.failures.evidence import read_failure, write_evidence
from hpc_elastic.failures.worker_failure import WorkerFailure
from hpc_elastic.rendezvous.state import RoundRecord, decode_record
from hpc_elastic.run import index, node_records
from hpc_elastic.run.index import JobEntry
from hpc_elastic.run.node_records import NodeRecord
from hpc_elastic.run.node_score import Evidence
from hpc_elastic.submission import call
from hpc_elastic.submission.call import CallTerms
from hpc_elastic.worker_api import heartbeat_record
from hpc_elastic.worker_api.heartbeat_record import HeartbeatRecord, NoticeRecord

PACKAGE = Path(hpc_elastic.__file__).parent
WRITERS = ("to_json", "encode", "save")
"""Methods by which a record writes itself."""
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
    return str(seed) if "job" in name else f"{name}-{seed}"  # readers refuse what is no job's id


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


# -- records that write themselves ------------------------------------------------------------------------------------


def self_writing() -> Iterator[type]:
    """The records with one of the `WRITERS`; modules without any are not imported."""
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and any(
                isinstance(part, ast.FunctionDef) and part.name in WRITERS for part in node.body
            ):
                name = ".".join(("hpc_elastic", *path.relative_to(PACKAGE).with_suffix("").parts))
                if importlib.util.find_spec("torch") is None and ".inprocess." in name:
                    continue
                cls = getattr(importlib.import_module(name), node.name)
                if issubclass(cls, msgspec.Struct):
                    yield cls


def reader_of(cls: type) -> Callable[..., Any] | None:
    """What reads it: a class method, or a function of the same module that returns it."""
    for name in ("from_json", "decode"):
        if hasattr(cls, name):
            return typing.cast("Callable[..., Any]", getattr(cls, name))
    for _, function in inspect.getmembers(inspect.getmodule(cls), inspect.isfunction):
        returned = typing.get_type_hints(function).get("return") if function.__module__ == cls.__module__ else None
        first = next(iter(inspect.signature(function).parameters), "")
        if cls in (returned, *typing.get_args(returned)) and not first.startswith("_"):
            return typing.cast("Callable[..., Any]", function)
    return None


def there_and_back(record: Any, folder: Path) -> Any:
    """Write a record, and read it as another process does."""
    read = reader_of(type(record))
    assert read is not None
    writer = next(name for name in WRITERS if hasattr(record, name))
    if writer == "save":
        record.save(folder / "file.json")
        return read(folder / "file.json")
    written: Any = getattr(record, writer)()
    if isinstance(written, dict):
        written = json.loads(json.dumps(written))
    elif written[-1:] in ("\n", b"\n"):
        written = written[:-1]  # its reader is given the lines of a pipe
    fields = {each.name for each in msgspec.structs.fields(record)}
    positional, named = [], {}
    for parameter in inspect.signature(read).parameters.values():
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            # What a record's place says is not in the record itself: its number, its uid.
            positional.append(getattr(record, parameter.name) if parameter.name in fields else written)
        elif parameter.kind is parameter.KEYWORD_ONLY and parameter.default is parameter.empty:
            named[parameter.name] = "x"
    return read(*positional, **named)


def terms_there_and_back(record: CallTerms, folder: Path) -> CallTerms:
    call.write_call(folder / "call.pkl", call.Call(print), record)
    return call.read_terms(folder / "call.pkl")


def gpus_there_and_back(record: GpuFacts, folder: Path) -> GpuFacts:
    return health_gpu.from_json(health_gpu.to_json(record))


def nodes_there_and_back(record: NodeRecord, folder: Path) -> NodeRecord:
    node_records.save_record(folder / "nodes.json", record)
    return msgspec.structs.replace(node_records.load_record(folder / "nodes.json"), problem=record.problem)


def evidence_there_and_back(record: Evidence, folder: Path) -> Evidence:
    env = {"XDG_STATE_HOME": str(folder)}
    problem = node_records.remember([record], cluster="c", run_id="r", attempt=1, now_ns=10**18, env=env)
    assert problem is None
    (found,) = node_records.account_evidence(env, cluster="c")
    return found


def job_there_and_back(record: JobEntry, folder: Path) -> JobEntry:
    env = {"XDG_STATE_HOME": str(folder)}
    values = {each.name: getattr(record, each.name) for each in msgspec.structs.fields(record)}
    assert index.record(**values, env=env) is None
    (found,) = index.known_jobs(env=env)
    return found


def heartbeat_there_and_back(record: HeartbeatRecord, folder: Path) -> HeartbeatRecord | None:
    buffer = bytearray(heartbeat_record.empty_file())
    values = {each.name: getattr(record, each.name) for each in msgspec.structs.fields(record)}
    heartbeat_record.write_record(buffer, **{**values, "section": record.section.encode()})
    return heartbeat_record.read_record(bytes(buffer))


def notice_there_and_back(record: NoticeRecord, folder: Path) -> NoticeRecord | None:
    buffer = bytearray(heartbeat_record.empty_file())
    at, written = heartbeat_record.pack_notice(record)
    buffer[at : at + len(written)] = written
    return heartbeat_record.read_notice(buffer)


WRITTEN_BY_FUNCTIONS: dict[type, Callable[[Any, Path], Any]] = {
    CallTerms: terms_there_and_back,
    Evidence: evidence_there_and_back,
    GpuFacts: gpus_there_and_back,
    HeartbeatRecord: heartbeat_there_and_back,
    JobEntry: job_there_and_back,
    NodeRecord: nodes_there_and_back,
    NoticeRecord: notice_there_and_back,
}
RECORDS = {**dict.fromkeys(self_writing(), there_and_back), **WRITTEN_BY_FUNCTIONS}


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


def test_records_are_found() -> None:
    found = {cls.__name__ for cls in RECORDS}
    assert {
        "RoundRecord",
        "NodeInfo",
        "NodeFailure",
        "RunSpec",
        "AttemptInfo",
        "StoredResult",
        "WorkerFailure",
    } <= found
    unread = [cls for cls in self_writing() if cls not in WRITTEN_BY_FUNCTIONS and reader_of(cls) is None]
    assert not unread, f"{unread} can be written, and nothing is known here that reads them"
