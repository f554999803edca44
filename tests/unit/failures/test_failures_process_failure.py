from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from hpc_elastic.failures import ChildFailedError, ProcessFailure
from hpc_elastic.failures.evidence import write_evidence
from hpc_elastic.failures.worker_failure import WorkerFailure

TRACE = "Traceback (most recent call last):\n  File 'x', line 1, in f\nValueError: bad"


def write(folder: Path, value: Any, name: str = "error.json") -> str:
    path = folder / name
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return str(path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"message": {"message": "half", "extraInfo": {"py_calls', "half"),
        ("", "its error file is empty"),
        ("[1]", "[1]"),
        ("{", "its error file is torn"),
    ],
)
def test_a_bad_file_raises_nothing(tmp_path: Path, content: str, words: str) -> None:
    failure = ProcessFailure(0, 997, -9, write(tmp_path, content))
    assert failure.error_file.endswith("error.json")
    assert words in str(failure.message)
    assert failure.timestamp > 1_700_000_000
    assert words in ChildFailedError("train", {0: failure}).format_msg()


def test_of_the_same_fine_time_the_mappings_first_counts(tmp_path: Path) -> None:
    def at(seconds: int, fine: int, name: str) -> ProcessFailure:
        own = {"timestamp_ns": seconds * 10**9 + fine}
        return ProcessFailure(
            0, 1, 1, write(tmp_path, {"message": "m", "timestamp": seconds, "hpc_elastic": own}, name)
        )

    late, early, fine, same = at(20, 0, "a"), at(10, 500, "b"), at(10, 100, "c"), at(10, 100, "d")
    assert ChildFailedError("x", {0: late, 1: early, 2: fine}).get_first_failure() == (2, fine)
    assert ChildFailedError("x", {3: same, 2: fine}).get_first_failure()[0] == 3


def test_failures_of_an_agent_are_taken_too(tmp_path: Path) -> None:
    told = WorkerFailure(
        local_rank=1, pid=7, exitcode=1, host="n3", message="ValueError: bad", traceback=TRACE, ended_ns=10**18
    )
    path = tmp_path / "error.json"
    assert write_evidence(told, path) == ""
    without = WorkerFailure(
        local_rank=0, pid=8, exitcode=-9, host="n4", message="Signal 9 of somebody", ended_ns=10**18 + 5
    )
    error = ChildFailedError("train", {5: replace(told, error_file=str(path)), 6: without})
    rank, first = error.get_first_failure()
    assert (rank, first.error_file, first.host) == (5, str(path), "n3")
    assert error.failures[6].message == "Signal 9 of somebody"
    assert error.failures[6].timestamp_ns == 10**18 + 5
    for words in (
        "train FAILED",
        "  host      : n3\n",
        "ValueError: bad",
        "  host      : n4\n",
        "Signal 9 of somebody",
    ):
        assert words in str(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
