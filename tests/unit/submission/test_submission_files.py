"""Calls, results and exceptions as files: by value where need be, whole or not at all, and nobody else's."""

from __future__ import annotations

import json
import os
import pickle
import sys
import threading
from pathlib import Path

import pytest

from hpc_elastic.errors import UnsafePathError, UsageError
from hpc_elastic.run.paths import RunPaths
from hpc_elastic.submission import environment
from hpc_elastic.submission.call import (
    Call,
    CallTerms,
    RoundPlace,
    UnreadableObjectError,
    function_name,
    own_sys_path,
    read_call,
    read_head,
    read_object,
    read_terms,
    write_call,
    write_object,
)
from hpc_elastic.submission.environment import (
    ElasticJobFailedError,
    ElasticJobUncompletedError,
    WorkerRaisedError,
    as_cause,
)

TERMS = CallTerms(name="f", folder="/f", timeout_min=1.5, timeouts_left=2, sys_path=("/a", "/b"))


def test_a_call_comes_back_with_its_terms(tmp_path: Path) -> None:
    path, outer = tmp_path / "call.pkl", 10
    size = write_call(path, Call(lambda left, *, right: left + right + outer, (1,), {"right": 2}), TERMS)
    assert size == path.stat().st_size
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_call(path)() == 13
    assert read_terms(path) == TERMS


def test_what_can_not_travel_is_refused_with_the_functions_name(tmp_path: Path) -> None:
    path = tmp_path / "call.pkl"
    with pytest.raises(UsageError, match="the function f, or one of its arguments, can't be handed"):
        write_call(path, Call(print, (threading.Lock(),)), TERMS)
    assert os.listdir(tmp_path) == [], "nothing half-written is left"


@pytest.mark.parametrize("raw", [b"", b"{}\n", b'{"version": 99}\n', b"no json\n", b"[]\n", b"\xff\n"])
def test_a_file_that_can_not_be_read_is_a_fact(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "result.pkl"
    with pytest.raises(UnreadableObjectError, match="no such file"):
        read_object(path)
    path.write_bytes(raw)
    path.chmod(0o600)
    with pytest.raises(UnreadableObjectError):
        read_object(path)


def test_nothing_is_unpickled_that_others_could_have_written(tmp_path: Path) -> None:
    path = tmp_path / "result.pkl"
    write_object(path, {}, 3)
    assert read_object(path) == 3
    path.chmod(0o660)
    with pytest.raises(UnsafePathError, match="is not unpickled"):
        read_object(path)
    path.chmod(0o600)
    link, fifo = tmp_path / "link.pkl", tmp_path / "fifo.pkl"
    link.symlink_to(path)
    os.mkfifo(fifo)
    for planted in (link, fifo):
        with pytest.raises(UnsafePathError):
            read_head(planted)


def test_a_torn_pickle_is_a_fact(tmp_path: Path) -> None:
    path = tmp_path / "result.pkl"
    write_object(path, {}, list(range(1000)))
    os.truncate(path, path.stat().st_size - 100)
    with pytest.raises(UnreadableObjectError, match="can't be unpickled"):
        read_object(path)


@pytest.mark.parametrize("forged", ["as it was", "without a word", "another inode", "no object"])
def test_a_copy_belongs_to_its_maker_and_is_not_unpickled(
    tmp_path: Path, forged: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, copy = tmp_path / "theirs.pkl", tmp_path / "mine.pkl"
    write_object(path, {"rank": 3}, 7)
    head, _, pickled = path.read_bytes().partition(b"\n")
    value = json.loads(head)
    if forged == "without a word":
        del value["made"]
    elif forged != "as it was":
        value["made"] = {"inode": 1, "path": str(copy)} if forged == "another inode" else 5
    copy.write_bytes(json.dumps(value).encode() + b"\n" + pickled)
    copy.chmod(0o600)
    assert read_head(copy)["rank"] == 3, "text can be read"
    with pytest.raises(UnsafePathError, match="is a copy") as caught:
        read_object(copy)
    assert str(copy) in str(caught.value)
    monkeypatch.setenv("HPC_ELASTIC_TRUST_COPIES", "1")
    assert read_object(copy) == 7


def test_a_run_that_was_moved_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    write_object(tmp_path / "run" / "result.pkl", {}, 7)
    (tmp_path / "run").rename(tmp_path / "kept")
    assert read_object(tmp_path / "kept" / "result.pkl") == 7


@pytest.mark.parametrize(("kind", "is_read"), [("fuse.sshfs", True), ("fuse", True), ("ext4", False), (None, False)])
def test_where_inodes_do_not_last_the_path_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str | None, is_read: bool
) -> None:
    path = tmp_path / "result.pkl"
    write_object(path, {}, 7)
    monkeypatch.setattr("hpc_elastic.submission.call.filesystem_type", lambda _: kind)
    renumbered = path.read_bytes().replace(f'"inode": {path.stat().st_ino}'.encode(), b'"inode": 1')
    path.write_bytes(renumbered)
    if is_read:
        assert read_object(path) == 7
    else:
        with pytest.raises(UnsafePathError):
            read_object(path)
    (tmp_path / "copy.pkl").write_bytes(renumbered)
    (tmp_path / "copy.pkl").chmod(0o600)
    with pytest.raises(UnsafePathError):
        read_object(tmp_path / "copy.pkl")


def test_the_submitters_modules_are_found_and_not_its_interpreters() -> None:
    found = own_sys_path()
    assert os.path.abspath(".") in found
    assert not [path for path in found if path.startswith(os.path.realpath(sys.prefix) + "/lib")]


def test_names_for_people() -> None:
    from functools import partial

    class Model:
        def __call__(self) -> None: ...

    assert function_name(max) == "max"
    assert function_name(partial(max, 1)) == "max"
    assert function_name(Model()).endswith("Model")
    assert "<locals>" not in function_name(Model())


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path)


def make_round(run: RunPaths, attempt: int, number: int, ranks: int) -> RoundPlace:
    place = RoundPlace(attempt=run.attempt(attempt), round=number)
    for rank in range(ranks):
        place.rank(rank).root.mkdir(parents=True)
    return place


def test_results_are_those_of_the_last_round(run: RunPaths) -> None:
    for number in (0, 999, 1000):
        place = make_round(run, 0, number, 2)
        for rank in range(2):
            write_object(place.rank(rank).result_pickle, {}, (number, rank))
    assert [environment.read_result(run, rank) for rank in range(2)] == [(1000, 0), (1000, 1)]
    assert environment.world_size(run) == 2
    with pytest.raises(UnreadableObjectError, match="rank 2 ended without returning anything"):
        environment.read_result(run, 2)


def test_the_exception_is_that_of_the_rank_that_the_report_names(run: RunPaths) -> None:
    place = make_round(run, 0, 1, 3)
    for rank in (2, 1):
        head = {"type": "ValueError", "message": str(rank), "traceback": f"line {rank}"}
        write_object(place.rank(rank).exception_pickle, head, ValueError(rank))
        os.utime(place.rank(rank).exception_pickle, ns=(10 - rank, 10 - rank))
    assert environment.read_exception(run)[1]["message"] == "2", "the first one"  # type: ignore[index]
    verdict = '{"verdict": {"attempt": 0, "round": 1, "failure": {"global_rank": 1}}}'
    run.attempt(0).report_json.write_text(verdict)
    assert environment.read_exception(run)[1]["message"] == "1"  # type: ignore[index]
    run.attempt(0).report_json.write_text('{"verdict": {"attempt": null, "round": 1, "failure": null}}')
    assert environment.read_exception(run)[1]["message"] == "2"  # type: ignore[index]


def test_the_exception_in_a_copied_run_is_text(run: RunPaths) -> None:
    path = make_round(run, 0, 0, 1).rank(0).exception_pickle
    write_object(path, {"type": "ValueError", "message": "m"}, ValueError("m"))
    path.write_bytes(path.read_bytes().replace(b'"inode": ', b'"inode": 1'))
    found = environment.read_exception(run)
    assert found is not None
    assert (found[0], found[1]["message"]) == (None, "m")


def test_output_is_that_of_all_attempts_and_rounds(run: RunPaths) -> None:
    assert environment.output(run, 0, "stdout") is None
    for attempt, number in ((0, 0), (0, 1), (1, 0)):
        place = make_round(run, attempt, number, 1)
        (place.rank(0).root / "stdout.log").write_text(f"{attempt}.{number}\n")
    (place.rank(0).root / "stdout.log.000").write_text("rotated\n")
    assert environment.output(run, 0, "stdout") == "0.0\n0.1\nrotated\n1.0\n"
    assert environment.output(run, 0, "stderr") is None


@pytest.mark.parametrize(
    "error",
    [
        ElasticJobFailedError(job_id="7", report="who failed"),
        ElasticJobUncompletedError(job_id="7", why="cancelled", report=""),
    ],
)
def test_a_jobs_error_pickles_with_its_cause(error: Exception) -> None:
    error.__cause__ = as_cause(ValueError("oh"), {"traceback": "Traceback: there"})
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), repr(again.__cause__)) == (type(error), str(error), "ValueError('oh')")


def test_the_cause_shows_where_it_was_raised() -> None:
    found = as_cause(None, {"type": "Odd", "message": "no copy", "traceback": "Traceback: there"})
    assert isinstance(found, WorkerRaisedError)
    assert str(found) == "Odd: no copy"
    assert "Traceback: there" in str(found.__cause__)
