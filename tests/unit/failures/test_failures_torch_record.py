"""Error files that torch's own ``@record`` wrote, by several versions: read, classed, completed and passed on."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from hpc_elastic.failures import ErrorHandler, ProcessFailure
from hpc_elastic.failures.error_file import read_error_file
from hpc_elastic.failures.evidence import describe_failure, read_failure, write_evidence
from hpc_elastic.failures.ranking import Category, FailureClass
from hpc_elastic.failures.worker_failure import EvidenceSource, WorkerFailure

DATA = Path(__file__).resolve().parents[2] / "data" / "failures" / "torch-record"
VERSIONS = ("2.4.1", "2.6.0", "2.13.0")
SECONDS = 1_795_263_000
"""The files were made on that day."""

# case → (message, exception type, what the traceback holds, errorCode in the file)
CASES: dict[str, tuple[str, str, tuple[str, ...], int | None]] = {
    "plain": ("ValueError: bad batch 17", "ValueError", ("in step", "bad batch {n}"), None),
    "chained": ("RuntimeError: no data\nin two lines", "RuntimeError", ("KeyError: 'shard'", "direct cause"), None),
    "group": ("ExceptionGroup: two (2 sub-exceptions)", "ExceptionGroup", ("| ValueError: a", "| KeyError: 'b'"), None),
    "unicode": ("ValueError: Größe 日本 🙂 ? red end", "ValueError", ("Größe 日本 🙂",), None),
    "no-message": ("AssertionError: ", "AssertionError", ("AssertionError",), None),
    "passed-on": ("ZeroDivisionError: division by zero", "ZeroDivisionError", ("in main",), -11),
    "by-torchrun": ("ValueError: bad batch 17", "ValueError", ("in main",), 1),
}


@pytest.fixture(params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def describe(path: Path, exitcode: int = 1) -> WorkerFailure:
    facts = WorkerFailure(
        attempt=0, round=1, host="n3", node=2, local_rank=1, global_rank=5, pid=7, exitcode=exitcode, ended_ns=9
    )
    return describe_failure(facts=facts, error_file=path, stderr_log=path.with_name("stderr.log"))


def test_every_version_wrote_every_case() -> None:
    for version in VERSIONS:
        assert {path.stem for path in (DATA / version).glob("*.json")} == set(CASES)


@pytest.mark.parametrize("case", list(CASES))
def test_it_is_understood(version: str, case: str) -> None:
    message, _, parts, code = CASES[case]
    found = read_error_file(DATA / version / f"{case}.json")
    assert found.problem == ""
    assert found.message == message
    assert all(part in found.traceback for part in parts)
    assert "\x1b" not in found.traceback
    assert found.data["message"].get("errorCode") == code
    assert found.timestamp_ns is not None
    assert 0 <= found.timestamp_ns // 10**9 - SECONDS < 1000
    assert found.own == {}


@pytest.mark.parametrize("case", list(CASES))
def test_it_is_classed_and_completed(version: str, case: str, tmp_path: Path) -> None:
    message, kind, parts, _ = CASES[case]
    path = tmp_path / "error.json"
    shutil.copy(DATA / version / f"{case}.json", path)
    before = json.loads(path.read_text())
    failure = describe(path)
    assert (failure.message, failure.exception_type) == (message, kind)
    assert failure.source is EvidenceSource.ERROR_FILE
    assert (failure.failure_class, failure.category) == (FailureClass.ROOT, Category.WORKER)
    assert all(part in failure.traceback for part in parts)
    assert failure.fingerprint.startswith(f"{kind}:")
    assert write_evidence(failure, path) == ""
    after = json.loads(path.read_text())
    before["message"]["errorCode"] = 1
    assert after["message"] == before["message"]  # what torch wrote stays as it was
    assert not {"message", "traceback"} & set(after["hpc_elastic"])  # … and stands there once
    assert read_failure(path, facts=WorkerFailure(exitcode=1, ended_ns=1)) == failure
    assert os.listdir(tmp_path) == ["error.json"]


def test_the_same_failure_has_the_same_name_whichever_version_wrote_it() -> None:
    for case in CASES:
        names = {describe(DATA / version / f"{case}.json").fingerprint for version in VERSIONS}
        assert len(names) == 1, case


@pytest.mark.parametrize("case", list(CASES))
def test_torchs_names_read_it(version: str, case: str) -> None:
    path = DATA / version / f"{case}.json"
    failure = ProcessFailure(1, 7, -9, str(path))
    assert failure.error_file_data == json.loads(path.read_text())
    assert failure.message == failure.error_file_data["message"]
    assert 0 <= failure.timestamp - SECONDS < 1000


@pytest.mark.torch
@pytest.mark.parametrize("case", list(CASES))
def test_torch_reads_what_was_completed_and_passed_on(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = pytest.importorskip("torch.distributed.elastic.multiprocessing.errors")
    path = tmp_path / "error.json"
    shutil.copy(DATA / "2.6.0" / f"{case}.json", path)
    assert write_evidence(describe(path), path) == ""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "outer.json"))
    ErrorHandler().dump_error_file(str(path), -9)
    for file, code in ((path, 1), (tmp_path / "outer.json", -9)):
        read: Any = theirs.ProcessFailure(0, 1, 1, str(file))
        mine = ProcessFailure(0, 1, 1, str(file))
        assert read.message["errorCode"] == code
        assert (read.message, read.timestamp, read.error_file_data) == (
            mine.message,
            mine.timestamp,
            mine.error_file_data,
        )
