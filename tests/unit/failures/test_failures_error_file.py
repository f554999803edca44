from __future__ import annotations

import errno
import json
import os
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from hpc_elastic.failures import ErrorHandler, ProcessFailure
from hpc_elastic.failures.error_file import ErrorFile, error_data, read_error_file, write_error_data
from hpc_elastic.failures.evidence import describe_failure, read_failure, write_evidence
from hpc_elastic.failures.ranking import Category, FailureClass
from hpc_elastic.failures.worker_failure import EvidenceSource, WorkerFailure

TORCH = {
    "message": {
        "message": "ValueError: bad",
        "extraInfo": {
            "py_callstack": "Traceback (most recent call last):\nValueError: bad\n",
            "timestamp": "1700000001",
        },
    }
}


def put(tmp_path: Path, value: object) -> Path:
    path = tmp_path / "error.json"
    if isinstance(value, bytes):
        path.write_bytes(value)
    else:
        path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


@pytest.mark.parametrize(
    ("value", "message", "timestamp_ns"),
    [
        ({"message": "just text", "timestamp": 1700000002}, "just text", 1_700_000_002 * 10**9),
        ({"message": "just text", "timestamp": "1700000002.5"}, "just text", 1_700_000_002_500_000_000),
        ({"message": "no time"}, "no time", None),
        ({"message": "with a code", "errorCode": 3}, "with a code", None),
        ({"message": {"message": "m", "errorCode": 3}}, "m", None),
        ({"message": {"message": "m", "extraInfo": {"timestamp": "soon"}}}, "m", None),
        ({"message": {"message": "m", "extraInfo": {"timestamp": 1e400}}}, "m", None),
        ({"message": {"message": "m", "extraInfo": "text"}}, "m", None),
        ({"message": {"message": ["a", 1]}}, '["a", 1]', None),
        ({"message": "<NONE>"}, "", None),
        ({"message": None}, "", None),
        ({"message": 7}, "7", None),
    ],
)
def test_other_shapes(tmp_path: Path, value: dict[str, Any], message: str, timestamp_ns: int | None) -> None:
    found = read_error_file(put(tmp_path, value))
    assert (found.problem, found.message, found.timestamp_ns) == ("", message, timestamp_ns)


def test_what_we_write_is_what_torch_reads_and_what_we_read(tmp_path: Path) -> None:
    data = error_data(
        message="ValueError: x",
        traceback="Trace",
        timestamp_ns=1_700_000_001_123_456_789,
        error_code=3,
        own={"host": "n1"},
    )
    path = tmp_path / "error.json"
    write_error_data(path, data)
    assert json.loads(path.read_text())["message"] == {
        "message": "ValueError: x",
        "extraInfo": {"py_callstack": "Trace", "timestamp": "1700000001"},
        "errorCode": 3,
    }
    found = read_error_file(path)
    assert (found.message, found.traceback, found.own["host"]) == ("ValueError: x", "Trace", "n1")
    assert found.timestamp_ns == 1_700_000_001_123_456_789
    # Lone surrogates and control characters are stored, and cleaned when they are read.
    write_error_data(path, error_data(message="a\ud800\x1b[31m\x00b", traceback="", timestamp_ns=10**9))
    assert read_error_file(path).message == "a?b"


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (b"", "empty"),
        (b"\0\0\0\0", "empty"),
        (b" \n", "empty"),
        (b"[1, 2]", "foreign: holds a JSON list"),
        (b"3", "foreign: holds a JSON int"),
        (b'{"error": 1}', "foreign: has no 'message'"),
        (b"\xff\xfe\x00garbage", "torn: "),
        (b"[" * 100_000, "torn: "),
    ],
)
def test_files_that_are_something_else(tmp_path: Path, value: bytes, problem: str) -> None:
    assert read_error_file(put(tmp_path, value)).problem.startswith(problem)


def test_missing_unreadable_and_odd_files(tmp_path: Path) -> None:
    assert read_error_file(tmp_path / "none.json") == ErrorFile(problem="missing")
    assert read_error_file(tmp_path / "no" / "folder.json").problem == "missing"
    (tmp_path / "folder").mkdir()
    assert read_error_file(tmp_path / "folder").problem.startswith("unreadable: ")
    os.symlink(put(tmp_path, TORCH), tmp_path / "link")
    assert read_error_file(tmp_path / "link").problem.startswith("unreadable: ")
    os.mkfifo(tmp_path / "fifo")
    assert read_error_file(tmp_path / "fifo").problem.startswith("unreadable: ")
    assert read_error_file("bad\0name").problem.startswith("unreadable: ")


@given(cut=st.integers(min_value=1, max_value=len(json.dumps(TORCH)) - 1))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_torn_file_gives_what_is_there(tmp_path: Path, cut: int) -> None:
    text = json.dumps(TORCH)
    found = read_error_file(put(tmp_path, text[:cut]))
    assert found.problem.startswith("torn: ")
    assert "ValueError: bad".startswith(found.message)
    assert TORCH["message"]["extraInfo"]["py_callstack"].startswith(found.traceback)  # type: ignore[index]
    if cut >= text.index('", "extraInfo"'):
        assert found.message == "ValueError: bad"


@pytest.mark.parametrize("words", ['say "no"', "C:\\", '\\"', '\\\\" and "', '"', "\\u00e9 \u00e9 \\\\"])
def test_a_quote_in_a_torn_file_ends_no_message(tmp_path: Path, words: str) -> None:
    extra = {"py_callstack": f"Traceback\n{words}", "timestamp": "17"}
    whole = json.dumps({"message": {"message": words, "extraInfo": extra}})
    found = read_error_file(put(tmp_path, whole[:-1]))
    assert found.problem.startswith("torn: ")
    assert (found.message, found.traceback) == (words, f"Traceback\n{words}")


def test_a_file_of_100_mb_is_cut_not_loaded(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    with open(path, "wb") as file:
        file.write(b'{"message": {"message": "ValueError: big", "noise": "')
        file.seek(20_000_000)
        file.write(b'", "extraInfo": {"py_callstack": "Traceback (most recent call last):\\nValueError: big", "n": "')
        file.seek(100_000_000)
        file.write(b'", "timestamp": "1700000003"}}}')
    found = read_error_file(path)
    assert found.problem.startswith("cut: 100000031 bytes")
    assert found.message == "ValueError: big"
    assert found.traceback == "Traceback (most recent call last):\nValueError: big"
    assert (found.timestamp_ns, found.data) == (1_700_000_003_000_000_000, {})
    assert read_error_file(path, seek_traceback=False) == replace(found, traceback="")
    long = read_error_file(put(tmp_path, error_data(message="m" * 100_000, traceback="t" * 300_000, timestamp_ns=1)))
    assert (long.problem, len(long.message) < 17_000, len(long.traceback) < 66_000) == ("", True, True)


@pytest.mark.parametrize(
    ("number", "problem"),
    [(errno.ENOENT, "missing"), (errno.EACCES, "unreadable: "), (errno.ESTALE, "unreadable: ")],
)
@pytest.mark.parametrize("call", ["open", "fstat", "pread"])
def test_a_file_that_vanishes_or_fails_at_any_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int, problem: str
) -> None:
    path = put(tmp_path, TORCH)

    def fails(*args: object) -> None:
        raise OSError(number, os.strerror(number))

    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(os, call, fails)
        found = read_error_file(path)
        failure = ProcessFailure(0, 7, -9, str(path))
    assert found.problem.startswith(problem)
    assert not found.found
    assert str(failure.message).startswith("Signal 9 (SIGKILL) received by PID 7")
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("size", [3 << 20, 100 << 20])
def test_a_large_file_is_held_in_little_memory(tmp_path: Path, size: int) -> None:
    path = tmp_path / "error.json"
    with open(path, "wb") as file:
        file.write(b'{"message": {"message": "ValueError: ' + b"x" * (2 << 20))
        file.truncate(size)
    tracemalloc.start()
    try:
        found = read_error_file(path)
        failure = ProcessFailure(0, 1, 1, str(path))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found.problem.startswith(f"cut: {size} bytes")
    assert found.message.startswith("ValueError: xxx")
    assert len(str(failure.message)) < 40_000
    assert peak < 8 << 20


@pytest.mark.parametrize("quotes", [0, 3, 64, 5000])
@pytest.mark.parametrize("place", [0, 200 << 10, (256 << 10) - 30, (256 << 10) - 14, (512 << 10) - 20, 3 << 20])
def test_in_a_large_file_the_traceback_is_found_wherever_it_begins(tmp_path: Path, place: int, quotes: int) -> None:
    path = tmp_path / "error.json"
    filler = ('\\"' * quotes).ljust(place, "x")
    path.write_text(
        f'{{"message": {{"message": "{filler}", "extraInfo": {{"py_callstack": "Traceback\\nE: here", "timestamp": "17"'
        f'}}, "more": "{"y" * (3 << 20)}"}}}}'
    )
    found = read_error_file(path)
    assert found.problem.startswith("cut:")
    assert found.traceback == "Traceback\nE: here"
    assert read_error_file(path, seek_traceback=False).traceback == ""


# -- what torch's own ``@record`` wrote, by several versions: read, classed, completed and passed on

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


@pytest.mark.parametrize("case", list(CASES))
def test_it_is_understood_classed_and_completed(version: str, case: str, tmp_path: Path) -> None:
    message, kind, parts, code = CASES[case]
    path = tmp_path / "error.json"
    shutil.copy(DATA / version / f"{case}.json", path)
    found, theirs = read_error_file(path), ProcessFailure(1, 7, -9, str(path))
    before = json.loads(path.read_text())
    assert (found.problem, found.own, found.data["message"].get("errorCode")) == ("", {}, code)
    assert "\x1b" not in found.traceback
    assert 0 <= theirs.timestamp - SECONDS < 1000
    assert theirs.timestamp * 10**9 == found.timestamp_ns
    assert (theirs.error_file_data, theirs.message) == (before, before["message"])
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
