"""The same assertions over torch's module and over ours: who changes the import finds the same names and meaning.

What torch 2.13 does worse stands at the end, each with what torch does and with what ours does.
"""

from __future__ import annotations

import dataclasses
import errno
import faulthandler
import importlib
import inspect
import json
import logging
import os
import pickle
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

import hpc_elastic.failures
from hpc_elastic.failures.evidence import write_evidence
from hpc_elastic.failures.worker_failure import WorkerFailure

OURS, TORCH = "hpc_elastic.failures", "torch.distributed.elastic.multiprocessing.errors"
VARIABLE = "TORCHELASTIC_ERROR_FILE"
TRACE = "Traceback (most recent call last):\n  File 'x', line 1, in f\nValueError: bad"


def _module(name: str) -> Any:
    pytest.importorskip(name)
    parts = [name, f"{name}.error_handler", f"{name}.handlers"]
    return SimpleNamespace(
        name=name,
        **{p.rsplit(".", 1)[-1]: importlib.import_module(p) for p in parts[1:]},
        errors=importlib.import_module(name),
    )


@pytest.fixture(params=[OURS, pytest.param(TORCH, marks=pytest.mark.torch)])
def kit(request: pytest.FixtureRequest) -> Any:
    """The module's names; `kit.ours` tells which it is."""
    errors = _module(request.param).errors
    return SimpleNamespace(
        **{name: getattr(errors, name) for name in hpc_elastic.failures.__all__},
        module=errors,
        ours=request.param == OURS,
    )


@pytest.fixture(autouse=True)
def _faulthandler_as_it_was() -> Iterator[None]:
    was = faulthandler.is_enabled()
    yield
    if was:
        faulthandler.enable()


@pytest.fixture
def error_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "mine.json"
    monkeypatch.setenv(VARIABLE, str(path))
    return path


def put(folder: Path, value: Any, name: str = "child.json") -> str:
    (folder / name).write_text(value if isinstance(value, str) else json.dumps(value))
    return str(folder / name)


def shaped(seconds: int = 1_700_000_001, **more: Any) -> dict[str, Any]:
    inner = {"message": "ValueError: bad", "extraInfo": {"py_callstack": TRACE, "timestamp": str(seconds)}}
    return {"message": {**inner, **more}}


def raising(kit: Any, error: BaseException, *handler: Any) -> Callable[[], Any]:
    """A recorded function that raises this."""

    def main() -> None:
        raise error

    return kit.record(main, *handler)  # type: ignore[no-any-return]


# -- the names -------------------------------------------------------------------------------------------------------


@pytest.mark.torch
def test_every_public_name_of_torchs_is_here() -> None:
    theirs = _module(TORCH)
    ours = _module(OURS)
    assert set(theirs.errors.__all__) == set(ours.errors.__all__) == set(hpc_elastic.failures.__all__)
    for name in ("error_handler", "handlers"):
        assert set(getattr(theirs, name).__all__) == set(getattr(ours, name).__all__)
    for name in ours.errors.__all__:
        assert name in dir(ours.errors)
        assert getattr(ours.errors, name).__name__ == name
    assert not hasattr(ours.errors, "nothing_like_that")


_HANDLER = "initialize record_exception dump_error_file override_error_code_in_rootcause_data _get_error_file_path"
_CALLABLES = [
    *("record", "get_error_handler", *(f"ErrorHandler.{name}" for name in (*_HANDLER.split(), "_write_error_file"))),
    *("ProcessFailure", "ProcessFailure.signal_name", "ProcessFailure.timestamp_isoformat"),
    *("ChildFailedError", "ChildFailedError.get_first_failure", "ChildFailedError.format_msg"),
]


@pytest.mark.torch
@pytest.mark.parametrize("path", _CALLABLES)
def test_every_parameter_has_torchs_name_place_and_default(path: str) -> None:
    signatures = []
    for name in (OURS, TORCH):
        found = _module(name).errors
        for part in path.split("."):
            found = getattr(found, part)
        parameters = inspect.signature(found).parameters.values()
        signatures.append([(p.name, p.kind, p.default) for p in parameters])
    assert signatures[0] == signatures[1]


# -- record ------------------------------------------------------------------------------------------------------------


def test_what_returns_is_returned(kit: Any, error_file: Path) -> None:
    @kit.record
    def main(a: int, *, b: int = 2) -> int:
        """Add."""
        return a + b

    assert (main(1), main(1, b=5)) == (3, 6)
    assert (main.__name__, main.__doc__) == ("main", "Add.")
    assert not error_file.exists()


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), *(SystemExit(code) for code in (None, 0, 1, 3, "no data"))], ids=repr
)
def test_what_is_no_failure_is_raised_and_not_written(kit: Any, error_file: Path, error: BaseException) -> None:
    code = getattr(error, "code", None)
    if code == 0:
        assert raising(kit, error)() is None
    else:
        with pytest.raises(type(error)) as caught:
            raising(kit, error)()
        assert caught.value is error
    assert error_file.exists() is bool(kit.ours and code)  # ours names an exit: torch writes nothing


def test_of_several_children_the_first_by_time_is_passed_on_with_its_exit_code(kit: Any, error_file: Path) -> None:
    files = [put(error_file.parent, {**shaped(1_700_000_000 + at), "kept": [1]}, f"{at}.json") for at in (30, 10, 20)]
    failures = {n: kit.ProcessFailure(n, 1, -n - 10, path) for n, path in enumerate(files)}
    for found in (failures, {3: kit.ProcessFailure(2, 1, -9, "")}):  # one without a file writes nothing
        with pytest.raises(kit.ChildFailedError):
            raising(kit, kit.ChildFailedError("t", found))()
        assert json.loads(error_file.read_text()) == {**shaped(1_700_000_010, errorCode=-11), "kept": [1]}


def test_without_the_variable_it_is_only_raised(kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    child = put(tmp_path, shaped())
    for error in (ValueError("bad"), kit.ChildFailedError("t", {0: kit.ProcessFailure(0, 1, 1, child)})):
        with pytest.raises(type(error)):
            raising(kit, error)()
    assert os.listdir(tmp_path) == ["child.json"]


# -- ErrorHandler ------------------------------------------------------------------------------------------------------


def test_each_method_may_be_overridden(kit: Any, error_file: Path) -> None:
    calls: list[Any] = []

    class Mine(kit.ErrorHandler):  # type: ignore[misc,name-defined]
        def initialize(self) -> None:
            calls.append("initialize")

        def record_exception(self, e: BaseException) -> None:
            calls.append(e)
            super().record_exception(e)

        def dump_error_file(self, rootcause_error_file: str, error_code: int = 0) -> None:
            calls.append((rootcause_error_file, error_code))
            super().dump_error_file(rootcause_error_file, error_code)

        def override_error_code_in_rootcause_data(
            self, rootcause_error_file: str, rootcause_error: dict[str, Any], error_code: int = 0
        ) -> None:
            calls.append(("override", rootcause_error_file, error_code))
            rootcause_error["message"]["errorCode"] = error_code + 100

        def _get_error_file_path(self) -> str | None:
            return str(error_file) + ".mine"

    child = put(error_file.parent, shaped())
    boom = ValueError("bad")
    written = Path(f"{error_file}.mine")
    for error in (boom, kit.ChildFailedError("t", {0: kit.ProcessFailure(0, 1, 4, child)})):
        with pytest.raises(type(error)):
            raising(kit, error, Mine())()
        code = json.loads(written.read_text())["message"].get("errorCode")
        assert code == (None if error is boom else 104)
    assert calls == ["initialize", boom, "initialize", (child, 4), ("override", child, 4)]
    assert not error_file.exists()
    assert type(kit.get_error_handler()) is kit.ErrorHandler
    faulthandler.disable()
    kit.ErrorHandler().initialize()
    assert faulthandler.is_enabled()


@pytest.mark.parametrize(
    ("data", "code", "after"),
    [
        (shaped(), 0, shaped()),
        (shaped(), 7, shaped(errorCode=7)),
        (shaped(errorCode=1), 7, shaped(errorCode=7)),
        ({"message": "text"}, 7, {"message": "text"}),
        ({"other": 1}, 7, {"other": 1}),
    ],
)
def test_a_file_that_is_there_already_is_replaced_with_the_exit_code_where_message_is_an_object(
    kit: Any, error_file: Path, data: dict[str, Any], code: int, after: dict[str, Any]
) -> None:
    error_file.write_text('{"message": "an old one, and longer than the new one" ' + "x" * 1000)
    kit.ErrorHandler().dump_error_file(put(error_file.parent, data), code)
    assert json.loads(error_file.read_text()) == after


# -- ProcessFailure ----------------------------------------------------------------------------------------------------

FILES: dict[str, Any] = {
    "torch": shaped(),
    "code": shaped(errorCode=3),
    "text": {"message": "just text", "timestamp": 1700000003},
    "text, time as text": {"message": "just text", "timestamp": "1700000003"},
    "text without a time": {"message": "just text"},
    "more keys": {**shaped(), "other": [1, {"a": None}]},
    "empty text": {"message": "", "timestamp": 5},
}


@pytest.mark.parametrize("exitcode", [-9, -11, -63])
@pytest.mark.parametrize("name", list(FILES))
def test_fields_of_a_failure_with_a_file(kit: Any, tmp_path: Path, name: str, exitcode: int) -> None:
    path = put(tmp_path, FILES[name])
    failure = kit.ProcessFailure(local_rank=2, pid=997, exitcode=exitcode, error_file=path)
    assert (failure.local_rank, failure.pid, failure.exitcode, failure.error_file) == (2, 997, exitcode, path)
    assert failure.error_file_data == FILES[name]
    signal = {-9: "SIGKILL", -11: "SIGSEGV", -63: "<N/A>"}[exitcode]
    assert failure.signal_name() == signal
    said = FILES[name]["message"] or f"Signal {-exitcode} ({signal}) received by PID 997"
    assert failure.message == said
    times = {"text": 1700000003, "text, time as text": 1700000003, "text without a time": 0, "empty text": 5}
    assert failure.timestamp == times.get(name, 1700000001)
    assert isinstance(failure.timestamp, int)


def test_fields_of_a_failure_without_a_file(kit: Any, tmp_path: Path) -> None:
    for missing in ("", str(tmp_path / "none"), "<N/A>"):
        before = int(time.time())
        failure = kit.ProcessFailure(0, 997, -9, missing)
        assert failure.error_file == "<N/A>"
        assert failure.error_file_data["message"] == "<NONE>"
        assert failure.message == "Signal 9 (SIGKILL) received by PID 997"
        assert before <= failure.timestamp <= time.time()
        assert dataclasses.asdict(failure)["message"] == failure.message
    for exitcode in (0, 1, 3, 137):
        assert kit.ProcessFailure(0, 1, exitcode, "").signal_name() == "<N/A>"


# -- ChildFailedError --------------------------------------------------------------------------------------------------


def test_the_first_failure_is_the_earliest_then_the_mappings_first(kit: Any, tmp_path: Path) -> None:
    def at(seconds: int) -> Any:
        return kit.ProcessFailure(0, 1, 1, put(tmp_path, shaped(seconds), f"{seconds}.json"))

    late, early, same = at(20), at(10), at(10)
    assert kit.ChildFailedError("x", {0: late, 1: early}).get_first_failure() == (1, early)
    rank, failure = kit.ChildFailedError("x", {5: same, 1: early}).get_first_failure()
    assert (rank, failure is same) == (5, True)
    assert same == early
    assert same != late
    with pytest.raises(AssertionError):
        kit.ChildFailedError("train.py", {})


def _skip_other_torch(kit: Any) -> None:
    if not kit.ours and not importlib.import_module("torch").__version__.startswith("2.13"):
        pytest.skip("what torch does was seen with 2.13")


def _shape(text: str) -> str:
    """torch's host is the one of whoever formats the report, and it leaves blanks before and for no signal."""
    shown = re.sub(r" +$", "", text.replace(")  (", ") ("), flags=re.MULTILINE)
    return re.sub(r"host      : \S+", "host      : H", shown)


GOLDEN = """
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2023-11-15_03:58:31
  host      : H
  rank      : 12 (local_rank: 1)
  exitcode  : -9 (pid: 901) (SIGKILL)
  error_file: {folder}/1.json
  traceback : just text
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2023-11-15_03:58:21
  host      : H
  rank      : 3 (local_rank: 0)
  exitcode  : 1 (pid: 900)
  error_file: {folder}/0.json
  traceback : Traceback (most recent call last):
    File 'x', line 1, in f
  ValueError: bad
============================================================"""


def test_the_block_that_users_know(kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _skip_other_torch(kit)  # 2.6 names no signal there
    monkeypatch.setenv("TZ", "<+0545>-5:45")
    time.tzset()
    folder = tmp_path / ("long" * 12)
    folder.mkdir()
    values: list[Any] = [shaped(), {"message": "just text", "timestamp": 1_700_000_011}]
    files = [put(folder, value, f"{at}.json") for at, value in enumerate(values)]
    failures = {3: kit.ProcessFailure(0, 900, 1, files[0]), 12: kit.ProcessFailure(1, 901, -9, files[1])}
    error = kit.ChildFailedError("train.py", failures)
    try:
        assert _shape(str(error)) == GOLDEN.format(folder=folder)
        other = _shape(error.format_msg(boarder_delim="*", section_delim="~"))
        assert other == GOLDEN.format(folder=folder).replace("=" * 60, "*" * 60).replace("-" * 60, "~" * 60)
        assert (isinstance(error, Exception), error.name, error.failures) == (True, "train.py", failures)
        alone = str(kit.ChildFailedError(name="t", failures={3: failures[3]}))
        assert "Failures:\n  <NO_OTHER_FAILURES>\n" in alone
    finally:
        monkeypatch.undo()
        time.tzset()


# -- what torch 2.13 does worse ----------------------------------------------------------------------------------------
#
# A defect is what a call comes to: a word of ours, and what torch 2.13 was seen to do. Torch's half is asserted so that
# the list stays true; with another version of torch it is left out.

Outcome = Callable[[Any, Path], str]


def _came_to(action: Callable[[], Any]) -> str:
    try:
        return str(action())
    except Exception as error:
        return type(error).__name__


def _broken_file(content: str) -> Outcome:
    def outcome(kit: Any, folder: Path) -> str:
        path = put(folder, content)
        return _came_to(lambda: "told" if kit.ProcessFailure(0, 1, -9, path).message else "")

    return outcome


def _file_that_is_gone_when_it_is_passed_on(kit: Any, folder: Path) -> str:
    failure = kit.ProcessFailure(0, 1, 1, put(folder, shaped()))
    os.unlink(failure.error_file)
    return _came_to(raising(kit, kit.ChildFailedError("train", {0: failure})))


def _disk_full_while_it_is_written(kit: Any, folder: Path) -> str:
    class Full(kit.ErrorHandler):  # type: ignore[misc,name-defined]
        def _get_error_file_path(self) -> str | None:
            return "/dev/full"

        def _write_error_file(self, file_path: str, error_msg: str) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    return _came_to(raising(kit, ValueError("the one that matters"), Full()))


def _text_that_cannot_be_made(kit: Any, folder: Path) -> str:
    class OddError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    os.environ[VARIABLE] = str(folder / "mine.json")
    return _came_to(raising(kit, OddError()))


def _half_written(kit: Any, folder: Path) -> str:
    """Whether a reader meets an incomplete file while one is being written."""
    path = folder / "mine.json"
    path.write_text('{"message": "old"}')
    inode = path.stat().st_ino
    os.environ[VARIABLE] = str(path)
    _came_to(raising(kit, ValueError("bad")))
    return "in place" if path.stat().st_ino == inode else "replaced"


def _times_within_one_second(kit: Any, folder: Path) -> str:
    files = []
    for rank, fine in ((0, 900_000_000), (1, 100_000_000)):
        value = {**shaped(), "hpc_elastic": {"timestamp_ns": 1_700_000_001_000_000_000 + fine}}
        files.append(kit.ProcessFailure(rank, 1, 1, put(folder, value, f"{rank}.json")))
    return f"rank {kit.ChildFailedError('t', dict(enumerate(files))).get_first_failure()[0]}"


def _host(kit: Any, folder: Path) -> str:
    value = {**shaped(), "hpc_elastic": {"host": "nid042"}}
    text = str(kit.ChildFailedError("t", {0: kit.ProcessFailure(0, 1, 1, put(folder, value))}))
    return "where it happened" if "  host      : nid042\n" in text else "where it is read"


def _pickled(kit: Any, folder: Path) -> str:
    error = kit.ChildFailedError("train.py", {3: kit.ProcessFailure(0, 1, -9, "")})
    return _came_to(lambda: "whole" if str(pickle.loads(pickle.dumps(error))) == str(error) else "changed")


def _no_word_about_the_failure(kit: Any, folder: Path) -> str:
    return str(kit.ProcessFailure(0, 1, 3, "").message)


def _data_shared_between_failures(kit: Any, folder: Path) -> str:
    one, other = kit.ProcessFailure(0, 1, 1, ""), kit.ProcessFailure(1, 2, 1, "")
    return "shared" if one.error_file_data is other.error_file_data else "each its own"


def _callstack_that_is_none(kit: Any, folder: Path) -> str:
    value = shaped()
    value["message"]["extraInfo"]["py_callstack"] = None
    failure = kit.ProcessFailure(0, 1, 1, put(folder, value))
    return _came_to(lambda: "shown" if "ValueError: bad" in str(kit.ChildFailedError("t", {0: failure})) else "lost")


DEFECTS: dict[str, tuple[Outcome, str, str]] = {
    "a half-written file": (_broken_file('{"message": {"mess'), "told", "JSONDecodeError"),
    "an empty file": (_broken_file(""), "told", "JSONDecodeError"),
    "a file that holds a list": (_broken_file("[1]"), "told", "TypeError"),
    "a foreign object": (_broken_file('{"err": 1}'), "told", "KeyError"),
    "an object without extraInfo": (_broken_file('{"message": {"message": "m"}}'), "told", "KeyError"),
    "a message of null": (_broken_file('{"message": null}'), "told", "TypeError"),
    "a time that is no number": (_broken_file('{"message": "m", "timestamp": "soon"}'), "told", "ValueError"),
    "a callstack of null": (_callstack_that_is_none, "shown", "AttributeError"),
    "the child's file vanishes": (_file_that_is_gone_when_it_is_passed_on, "ChildFailedError", "FileNotFoundError"),
    "the disk is full": (_disk_full_while_it_is_written, "ValueError", "OSError"),
    "a text that can't be made": (_text_that_cannot_be_made, "OddError", "RuntimeError"),
    "written in place": (_half_written, "replaced", "in place"),
    "whole seconds tie": (_times_within_one_second, "rank 1", "rank 0"),
    "the host": (_host, "where it happened", "where it is read"),
    "pickling": (_pickled, "whole", "TypeError"),
    "no word but a link": (
        _no_word_about_the_failure,
        "Process failed with exitcode 3",
        "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html",
    ),
    "data shared between failures": (_data_shared_between_failures, "each its own", "shared"),
}


@pytest.mark.parametrize("name", list(DEFECTS))
def test_a_defect_of_torchs_is_not_here(
    kit: Any, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "mine.json"))
    caplog.set_level(logging.CRITICAL)
    outcome, ours, theirs = DEFECTS[name]
    _skip_other_torch(kit)
    assert outcome(kit, tmp_path) == (ours if kit.ours else theirs)


# -- what ours has beside


def test_failures_of_an_agent_are_taken_too(tmp_path: Path) -> None:
    told = WorkerFailure(
        local_rank=1, pid=7, exitcode=1, host="n3", message="ValueError: bad", traceback=TRACE, ended_ns=10**18
    )
    path = tmp_path / "error.json"
    assert write_evidence(told, path) == ""
    without = WorkerFailure(
        local_rank=0, pid=8, exitcode=-9, host="n4", message="Signal 9 of somebody", ended_ns=10**18 + 5
    )
    error = hpc_elastic.failures.ChildFailedError("train", {5: replace(told, error_file=str(path)), 6: without})
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


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"message": {"message": "half", "extraInfo": {"py_calls', "half"),
        ("", "its error file is empty"),
        ("[1]", "[1]"),
        ("{", "its error file is torn"),
    ],
)
def test_of_a_bad_file_what_is_known_is_shown(tmp_path: Path, content: str, words: str) -> None:
    failure = hpc_elastic.failures.ProcessFailure(0, 997, -9, put(tmp_path, content))
    assert words in str(failure.message)
    assert failure.timestamp > 1_700_000_000
    assert words in hpc_elastic.failures.ChildFailedError("train", {0: failure}).format_msg()
