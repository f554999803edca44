from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpc_elastic.failures import ErrorHandler, record
from hpc_elastic.failures.error_file import read_error_file
from hpc_elastic.failures.evidence import describe_failure
from hpc_elastic.failures.worker_failure import EvidenceSource, WorkerFailure


@pytest.fixture
def error_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    places = {"RANK": "5", "LOCAL_RANK": "1", "TORCHELASTIC_RESTART_COUNT": "2", "HPC_ELASTIC_ATTEMPT": "3"}
    for name, value in places.items():
        monkeypatch.setenv(name, value)
    return path


class Quiet(ErrorHandler):
    """Leaves the interpreter's faulthandler as pytest set it."""

    def initialize(self) -> None:
        pass


def recorded(fn: Any) -> Any:
    return record(fn, Quiet())


def test_an_exception_is_written_and_raised_again(error_file: Path) -> None:
    boom = ValueError("bad")

    @recorded
    def main() -> None:
        raise boom

    with pytest.raises(ValueError, match="bad") as caught:
        main()
    assert caught.value is boom
    found = read_error_file(error_file)
    assert found.problem == ""
    assert found.message == "ValueError: bad"
    assert "in main" in found.traceback
    assert found.timestamp_ns is not None
    own = found.own
    assert (own["exception_type"], own["pid"]) == ("ValueError", os.getpid())
    assert (own["global_rank"], own["local_rank"], own["round"], own["attempt"]) == (5, 1, 2, 3)
    assert own["frames"][-1][2] == "main"
    assert own["fingerprint"].startswith("ValueError:")
    extra = json.loads(error_file.read_text())["message"]["extraInfo"]
    assert extra["timestamp"] == str(found.timestamp_ns // 10**9)
    assert oct(error_file.stat().st_mode & 0o777) == "0o600"
    assert os.listdir(error_file.parent) == ["error.json"]


def test_exits(error_file: Path) -> None:
    for code, message in ((3, "SystemExit: exit code 3"), ("no data", "SystemExit: no data")):

        @recorded
        def main(code: Any = code) -> None:
            raise SystemExit(code)

        with pytest.raises(SystemExit):
            main()
        assert read_error_file(error_file).message == message


def test_a_failure_while_recording_does_not_hide_the_failure(
    error_file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(error_file.parent / "no" / "folder" / "error.json"))

    @recorded
    def main() -> None:
        raise ValueError("bad")

    with pytest.raises(ValueError, match="bad"):
        main()
    assert "could not write the error file" in caplog.text

    class Broken(Quiet):
        def record_exception(self, exc: BaseException) -> None:
            raise OSError("disk full")

    def fails() -> None:
        raise ValueError("the first")

    with pytest.raises(ValueError, match="the first"):
        record(fails, Broken())()
    assert "could not be recorded" in caplog.text


def test_an_exception_that_cannot_be_shown(error_file: Path) -> None:
    class Odd(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    @recorded
    def main() -> None:
        raise Odd

    with pytest.raises(Odd):
        main()
    assert read_error_file(error_file).message == "Odd: <its text could not be made: RuntimeError>"


def test_a_torn_childs_file_is_passed_on_as_far_as_it_goes(error_file: Path) -> None:
    child = error_file.parent / "child.json"
    child.write_text('{"message": {"message": "ValueError: half')
    Quiet().dump_error_file(str(child), 7)
    found = read_error_file(error_file)
    assert (found.problem, found.message, found.data["message"]["errorCode"]) == ("", "ValueError: half", 7)


@pytest.mark.torch
def test_torchs_child_error_is_passed_on_too(error_file: Path) -> None:
    theirs = pytest.importorskip("torch.distributed.elastic.multiprocessing.errors")
    child = error_file.parent / "child.json"
    inner = {"message": "ValueError: bad", "extraInfo": {"py_callstack": "Trace", "timestamp": "1700000001"}}
    child.write_text(json.dumps({"message": inner}))

    @recorded
    def main() -> None:
        raise theirs.ChildFailedError("train", {0: theirs.ProcessFailure(0, 1, 5, str(child))})

    with pytest.raises(theirs.ChildFailedError):
        main()
    assert read_error_file(error_file).data["message"] == {**inner, "errorCode": 5}


class _OddName(Exception):
    pass


def _plain() -> None:
    raise ValueError("bad batch 17")


def _bare() -> None:
    raise AssertionError


def _chained() -> None:
    try:
        _plain()
    except ValueError as error:
        raise RuntimeError("no data\nin two lines") from error


def _of_a_module() -> None:
    raise _OddName("with: colons: in it")


def _long() -> None:
    raise ValueError("x" * 300_000)


def _group() -> None:
    raise ExceptionGroup("two", [ValueError("a"), KeyError("b")])  # type: ignore[name-defined] # noqa: F821


_WAYS = [_plain, _bare, _chained, _of_a_module, _long]
if sys.version_info >= (3, 11):
    _WAYS.append(_group)


@pytest.mark.parametrize("fails", _WAYS, ids=[way.__name__ for way in _WAYS])
def test_recorded_or_not_it_is_the_same_failure(error_file: Path, fails: Callable[[], None]) -> None:
    facts = WorkerFailure(exitcode=1, ended_ns=1)
    stderr = error_file.with_name("stderr.log")
    try:
        recorded(fails)()
    except Exception:
        outermost = "in test_recorded_or_not_it_is_the_same_failure"
        stderr.write_text("loss 0.2\n" + traceback.format_exc().replace(outermost, "in <module>"))
    found = describe_failure(facts=facts, error_file=error_file, stderr_log=stderr)
    error_file.unlink()
    printed = describe_failure(facts=facts, error_file=error_file, stderr_log=stderr)
    assert found.source is EvidenceSource.ERROR_FILE
    assert printed.source is EvidenceSource.STDERR
    for name in ("fingerprint", "exception_type", "failure_class", "category", "reason", "stderr_tail"):
        assert getattr(found, name) == getattr(printed, name), name
    if fails is not _long:  # its header lies before what is read of stderr
        assert found.stderr_tail == "loss 0.2"


def test_a_rank_that_is_no_number_is_left_out(error_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "many")
    with pytest.raises(ValueError):
        recorded(_plain)()
    assert "global_rank" not in read_error_file(error_file).own


def test_an_exit_code_has_the_same_name_recorded_or_not(error_file: Path) -> None:
    def exits() -> None:
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        recorded(exits)()
    facts = WorkerFailure(exitcode=3, ended_ns=1)
    found = describe_failure(facts=facts, error_file=error_file, stderr_log=error_file.with_name("stderr.log"))
    assert (found.message, found.fingerprint) == ("SystemExit: exit code 3", "exit:3")
    assert found.reason == "ended itself with exit code 3"
