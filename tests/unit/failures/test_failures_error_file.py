from __future__ import annotations

import errno
import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from hpc_elastic.failures import ProcessFailure
from hpc_elastic.failures.error_file import ErrorFile, error_data, read_error_file, write_error_data

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


def test_torchs_shape(tmp_path: Path) -> None:
    found = read_error_file(put(tmp_path, TORCH))
    assert found.problem == ""
    assert found.message == "ValueError: bad"
    assert found.traceback.startswith("Traceback")
    assert found.timestamp_ns == 1_700_000_001_000_000_000
    assert found.own == {}
    assert found.data == TORCH


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
    assert (found.message, found.traceback) == ("ValueError: x", "Trace")
    assert found.timestamp_ns == 1_700_000_001_123_456_789
    assert found.own["host"] == "n1"


def test_lone_surrogates_and_control_characters_are_stored_and_cleaned(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
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
    assert found.timestamp_ns == 1_700_000_003_000_000_000
    assert found.data == {}
    assert read_error_file(path, seek_traceback=False) == replace(found, traceback="")


def test_long_texts_are_bounded(tmp_path: Path) -> None:
    data = error_data(message="m" * 100_000, traceback="t" * 300_000, timestamp_ns=1)
    found = read_error_file(put(tmp_path, data))
    assert found.problem == ""
    assert len(found.message) < 17_000
    assert len(found.traceback) < 66_000


@pytest.mark.parametrize(
    ("number", "problem"),
    [
        (errno.ENOENT, "missing"),
        (errno.EACCES, "unreadable: "),
        (errno.ESTALE, "unreadable: "),
        (errno.EIO, "unreadable: "),
        (errno.ELOOP, "unreadable: "),
    ],
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
