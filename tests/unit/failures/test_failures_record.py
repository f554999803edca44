from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from hpc_elastic.failures import ErrorHandler, record
from hpc_elastic.failures.error_file import read_error_file
from hpc_elastic.failures.evidence import describe_failure
from hpc_elastic.failures.failure_text import Frame
from hpc_elastic.failures.worker_failure import EvidenceSource, WorkerFailure, make_excerpt, user_frame
from hpc_elastic.report.collect import collect_run
from hpc_elastic.report.document import Document
from hpc_elastic.report.render_text import render_text
from tests.rigs.run_builder import RunBuilder, make_failure


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


def test_an_exception_is_written_and_raised_again(error_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="bad batch"):
        recorded(_plain)()
    found = read_error_file(error_file)
    assert (found.problem, found.message) == ("", "ValueError: bad batch 17")
    assert "in _plain" in found.traceback
    own = found.own
    places = {"global_rank": 5, "local_rank": 1, "round": 2, "attempt": 3}
    assert {key: own[key] for key in places} == places
    assert (own["exception_type"], own["pid"], own["frames"][-1][2]) == ("ValueError", os.getpid(), "_plain")
    assert own["fingerprint"].startswith("ValueError:")
    assert found.timestamp_ns is not None
    extra = json.loads(error_file.read_text())["message"]["extraInfo"]
    assert extra["timestamp"] == str(found.timestamp_ns // 10**9)
    assert oct(error_file.stat().st_mode & 0o777) == "0o600"
    assert os.listdir(error_file.parent) == ["error.json"]
    monkeypatch.setenv("RANK", "many")
    with pytest.raises(ValueError):
        recorded(_plain)()
    assert "global_rank" not in read_error_file(error_file).own, "a rank that is no number is left out"


@pytest.mark.parametrize(("code", "message"), [(3, "SystemExit: exit code 3"), ("no data", "SystemExit: no data")])
def test_an_exit_has_the_same_name_recorded_or_not(error_file: Path, code: Any, message: str) -> None:
    def exits() -> None:
        raise SystemExit(code)

    with pytest.raises(SystemExit):
        recorded(exits)()
    facts = WorkerFailure(exitcode=3, ended_ns=1)
    found = describe_failure(facts=facts, error_file=error_file, stderr_log=error_file.with_name("stderr.log"))
    assert found.message == message
    assert code != 3 or (found.fingerprint, found.reason) == ("exit:3", "ended itself with exit code 3")


def test_a_failure_while_recording_does_not_hide_the_failure(
    error_file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(error_file.parent / "no" / "folder" / "error.json"))

    with pytest.raises(ValueError, match="bad batch"):
        recorded(_plain)()
    assert "could not write the error file" in caplog.text

    class Broken(Quiet):
        def record_exception(self, exc: BaseException) -> None:
            raise OSError("disk full")

    with pytest.raises(ValueError, match="bad batch"):
        record(_plain, Broken())()
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


def _plain() -> None:
    raise ValueError("bad batch 17")


def _chained() -> None:
    try:
        _plain()
    except ValueError as error:
        raise RuntimeError("no data\nin two lines") from error


def _long() -> None:
    raise ValueError("x" * 300_000)


def _group() -> None:
    raise ExceptionGroup("two", [ValueError("a"), KeyError("b")])  # type: ignore[name-defined] # noqa: F821


_WAYS = [_plain, _chained, _long]
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


# As torch 2.13 printed it where no C++ compiler was found; 71 lines, of which the user's code has the first four.
INDUCTOR = Path(__file__).resolve().parents[2] / "data" / "tracebacks" / "inductor-no-compiler.txt"
LIBRARY = '  File "/opt/venv/lib/python3.11/site-packages/torch/_ops.py", line {}, in call\n    return f(x)\n'


def lines_of(failure: WorkerFailure, most: int | None) -> tuple[str, ...]:
    excerpt = make_excerpt(failure, most=most)
    assert excerpt is not None
    assert most is None or len(excerpt.lines) < most
    return excerpt.lines


def frame_of(failure: WorkerFailure) -> Frame:
    frame = user_frame(failure)
    assert frame is not None
    return frame


def failure_with(traceback: str, exception: str = "RuntimeError: no data") -> WorkerFailure:
    return replace(make_failure(0, at=5, exception=exception), traceback=traceback)


def test_the_users_frame_stands_above_those_of_the_compiler(tmp_path: Path) -> None:
    facts = make_failure(0, at=5)
    failure = describe_failure(facts=facts, error_file=tmp_path / "error.json", stderr_log=INDUCTOR)
    frame = frame_of(failure)
    assert (frame.file, frame.line, frame.function) == ("/home/ann/train.py", 9, "train")
    for most in (8, 12, 20):
        shown = lines_of(failure, most)
        assert '  File "/home/ann/train.py", line 9, in train' in shown
        assert "    model(torch.ones(4, 4))" in shown
        assert any(line.startswith("torch._inductor.exc.InductorError: ") for line in shown)
        assert any(line.endswith("lines of libraries (--all shows them)") for line in shown)
    whole = lines_of(failure, None)
    assert not any("--all" in line for line in whole)


def test_the_frame_is_of_the_exception_that_is_the_failure() -> None:
    """A chain: what is raised while the cause is handled comes last, and is no place to look at."""
    cause = 'Traceback (most recent call last):\n  File "/u/train.py", line 10, in step\nValueError: loss is NaN\n'
    then = "\nDuring handling of the above exception, another exception occurred:\n\n"
    last = (
        'Traceback (most recent call last):\n  File "/u/train.py", line 14, in main\n    dist.barrier()\n'
        + "".join(LIBRARY.format(line) for line in range(20))
        + "RuntimeError: Connection closed by peer\n"
    )
    failure = failure_with(cause + then + last, "ValueError: loss is NaN")
    assert frame_of(failure).line == 10
    shown = lines_of(failure, 10)
    assert shown[:2] == ('  File "/u/train.py", line 10, in step', "ValueError: loss is NaN")
    assert "lines below" in shown[2]
    assert frame_of(failure_with(cause + then + last, "RuntimeError: Connection closed by peer")).line == 14


def test_of_a_dump_the_beginning_is_shown_for_the_innermost_call_comes_first() -> None:
    libraries = "".join(
        f'  File "/opt/venv/lib/python3.11/site-packages/torch/nn/linear.py", line {line} in forward\n'
        for line in range(30)
    )
    dump = (
        "Fatal Python error: Segmentation fault\n\nCurrent thread 0x01 (most recent call first):\n"
        f'{libraries}  File "/u/train.py", line 7 in step\n  File "/u/train.py", line 9 in <module>\n'
    )
    failure = replace(make_failure(0, at=5, exitcode=-11), traceback=dump)
    frame = frame_of(failure)
    assert (frame.line, frame.function) == (7, "step")
    shown = lines_of(failure, 12)
    assert shown[0] == "Fatal Python error: Segmentation fault"
    assert "line 0 in forward" in shown[3]
    assert '  File "/u/train.py", line 7 in step' in shown
    assert shown[-1] == "... 1 lines below (--all shows them)"


@pytest.mark.parametrize(
    "file",
    [
        "/opt/venv/lib/python3.11/site-packages/numpy/core.py",
        "/usr/lib/python3/dist-packages/torch/_tensor.py",
        "/usr/lib64/python3.12/threading.py",
        "/home/me/pytorch/torch/autograd/function.py",
        "/home/me/pytorch/torch/_tensor.py",
        "<frozen importlib._bootstrap>",
        "<string>",
        "/opt/hpc_elastic/inprocess/wrapper.py",
    ],
)
def test_libraries_are_no_code_of_the_user(file: str) -> None:
    text = (
        f'Traceback (most recent call last):\n  File "/u/train.py", line 3, in main\n  File "{file}", line 1, in f\n'
        "RuntimeError: no data\n"
    )
    assert frame_of(failure_with(text)).file == "/u/train.py"
    assert user_frame(failure_with(text.replace('  File "/u/train.py", line 3, in main\n', ""))) is None
    own = text.replace("/u/train.py", "/home/ann/torch/train.py")  # a folder of the user's may have that name
    assert frame_of(failure_with(own)).file == "/home/ann/torch/train.py"


def test_where_there_is_no_traceback_the_end_of_stderr_is_shown_and_a_signal_needs_neither() -> None:
    said = make_excerpt(make_failure(0, at=5, exitcode=3, stderr_tail="epoch 1\nno data"))
    assert said is not None
    assert (said.name, said.title, said.lines) == ("stderr", "", ("epoch 1", "no data"))
    silent = make_excerpt(make_failure(0, at=5, exitcode=3))
    assert silent is not None
    assert silent.title == "empty, so there is no traceback"
    assert make_excerpt(make_failure(0, at=5, exitcode=-9)) is None


def test_of_a_long_chain_the_first_exception_is_shown_with_its_line(tmp_path: Path) -> None:
    """What a reader needs is where it began; the middle is cut."""
    joint = "\nThe above exception was the direct cause of the following exception:\n\n"
    names = ("IndexError: shard 7 is empty", "KeyError: 'shard'", "OSError: no cache", "RuntimeError: no data")
    parts = [
        "Traceback (most recent call last):\n"
        + "".join(f'  File "/u/train.py", line {10 * number + line}, in f\n    g()\n' for line in range(3))
        + f"{name}\n"
        for number, name in enumerate(names)
    ]
    failure = failure_with(joint.join(parts), names[-1])
    shown = lines_of(failure, 18)
    assert shown[:4] == (
        "... 4 lines above (--all shows them)",
        '  File "/u/train.py", line 2, in f',
        "    g()",
        "IndexError: shard 7 is empty",
    )
    assert shown[-1] == "RuntimeError: no data"
    builder = RunBuilder(tmp_path / "run")
    builder.attempt(0)
    builder.round(0, 0, at=1)
    builder.fail(failure)
    text = render_text(Document(collect_run(builder.root)))
    assert "  caused by : OSError: no cache\n" in text
    assert "  began with: IndexError: shard 7 is empty (1 exception between)\n" in text
