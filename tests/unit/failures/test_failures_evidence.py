from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hpc_elastic.failures import evidence
from hpc_elastic.failures.evidence import describe_failure, find_logged, read_failure, write_evidence
from hpc_elastic.failures.ranking import Category, FailureClass
from hpc_elastic.failures.worker_failure import EvidenceSource, WorkerFailure
from hpc_elastic.worker_api.torch_import import NOTE

TRACE = 'Traceback (most recent call last):\n  File "/u/t.py", line 3, in f\n    x()\nValueError: bad 7\n'


def facts(**changes: Any) -> WorkerFailure:
    place: dict[str, Any] = {"attempt": 1, "round": 2, "host": "n3", "node": 2, "local_rank": 1, "global_rank": 5}
    return WorkerFailure(**{**place, "pid": 4711, "ended_ns": 1_700_000_009_000_000_007, **changes})


@dataclass
class Printed:
    """Stands for a `LogFile`: a byte that is N before the end was printed at -N."""

    unwritten: bytes = b""
    at_ns: int = 0

    def printed_ns(self, before_end: int) -> int:
        return self.at_ns or -before_end


def describe(tmp_path: Path, stderr: str | bytes = "", output: Printed | None = None, **changes: Any) -> WorkerFailure:
    (tmp_path / "stderr.log").write_bytes(stderr.encode() if isinstance(stderr, str) else stderr)
    return describe_failure(
        facts=facts(**changes), error_file=tmp_path / "error.json", stderr_log=tmp_path / "stderr.log", output=output
    )


@pytest.mark.parametrize(
    ("recorded", "stderr", "message", "kind", "problem"),
    [
        pytest.param(
            '{"message": "OSError: of it", "timestamp": 5}', TRACE, "OSError: of it", "OSError", "", id="file"
        ),
        pytest.param('{"message": "it broke: twice"}', "", "it broke: twice", "", "", id="words that are no type"),
        pytest.param("", TRACE, "ValueError: bad 7", "ValueError", "empty", id="an empty file"),
        pytest.param(None, None, "Process failed with exitcode 1", "", "", id="nothing at all, which is no problem"),
    ],
)
def test_the_error_file_is_believed_before_stderr(
    tmp_path: Path, recorded: str | None, stderr: str | None, message: str, kind: str, problem: str
) -> None:
    for name, text in (("error.json", recorded), ("stderr.log", stderr)):
        if text is not None:
            (tmp_path / name).write_text(text)
    found = describe_failure(facts=facts(), error_file=tmp_path / "error.json", stderr_log=tmp_path / "stderr.log")
    assert (found.message, found.exception_type, found.problem) == (message, kind, problem)
    assert found.stderr_tail.endswith("ValueError: bad 7") is (kind == "OSError")


@pytest.mark.parametrize(
    ("function", "says", "is_blamed"),
    [
        ("init_process_group", "RuntimeError: Gloo connectFullMesh failed with timed out connecting", True),
        ("init_process_group", "RuntimeError: The server socket has failed to listen: EADDRINUSE", True),
        ("init_process_group", "TypeError: 'str' object is not callable", False),
        ("all_reduce", "RuntimeError: [gloo/pair.cc:534] Connection closed by peer [127.0.0.1]:4711", False),
    ],
)
def test_what_its_rendezvous_found_explains_a_peer_that_never_came(
    tmp_path: Path, function: str, says: str, is_blamed: bool
) -> None:
    raised = f'  File "/x/torch/distributed/distributed_c10d.py", line 9, in {function}\n    x()\n{says}\n'
    trace = TRACE.replace("ValueError: bad 7\n", raised)
    failure = describe(tmp_path, f"{NOTE}an earlier round left the file /meet\n...\n{trace}")
    assert (failure.reason == "an earlier round left the file /meet") is is_blamed
    assert failure.headline == says
    if is_blamed:
        assert (failure.failure_class, failure.category) == (FailureClass.ROOT, Category.INPUT)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"exitcode": -9}, "Signal 9 (SIGKILL) received by PID 4711"),
        (
            {"exitcode": -9, "oom_kills": 2},
            "Out of memory: Signal 9 (SIGKILL) received by PID 4711; the OOM killer struck in its cgroup",
        ),
        ({"exitcode": -11, "core_dumped": True}, "Signal 11 (SIGSEGV) received by PID 4711; core dumped"),
        ({"exitcode": 139}, "Process failed with exitcode 139 (SIGSEGV, as a shell reports it)"),
        ({"exitcode": -40}, "Signal 40 (signal 40) received by PID 4711"),
        ({"exitcode": 129}, "Process failed with exitcode 129"),
        ({"exitcode": 255}, "Process failed with exitcode 255"),
    ],
)
def test_messages_without_words_of_the_worker(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    assert describe(tmp_path, **changes).message == message
    assert describe(tmp_path, TRACE, exitcode=-9).exception_type == "", "an old traceback explains no kill"


def test_an_exception_before_a_crash_at_exit_is_the_cause(tmp_path: Path) -> None:
    crash = "terminate called after throwing an instance of 'c10::Error'\n  what():  driver shutting down\n"
    failure = describe(tmp_path, TRACE + crash, exitcode=-6)
    assert (failure.message, failure.exitcode) == ("ValueError: bad 7", -6)
    assert describe(tmp_path, crash, exitcode=-6).message == "c10::Error: driver shutting down"


@pytest.mark.parametrize("noise", ["layer.{n}      {n} ms", "[W1123 04:37:58.{n} socket.cpp:{n}] close"])
def test_noise_between_what_nothing_caught_and_a_crash_at_exit(tmp_path: Path, noise: str) -> None:
    end = "".join(noise.format(n=n) + "\n" for n in range(80)) + "Aborted in shut_down\n"
    soon, late = (Printed(at_ns=facts().ended_ns - seconds * 10**9) for seconds in (1, 30))
    assert describe(tmp_path, AT_TOP + end, soon, exitcode=-6).headline == "ValueError: bad 7"
    assert describe(tmp_path, AT_TOP + end, late, exitcode=-6).exception_type == ""
    assert describe(tmp_path, TRACE + end, soon, exitcode=-6).exception_type == "", "a handler printed it"


def test_a_signal_that_the_process_sent_itself(tmp_path: Path) -> None:
    soon, late = (Printed(at_ns=facts().ended_ns - ms * 10**6) for ms in (100, 5000))
    own = describe(tmp_path, "the store is inconsistent, leaving\n", soon, exitcode=-15)
    assert (own.failure_class, own.category) == (FailureClass.ROOT, Category.WORKER)
    assert own.headline == "the store is inconsistent, leaving (SIGTERM)"
    assert "Slurm" not in own.reason
    assert "Slurm" in describe(tmp_path, "the store is inconsistent\n", late, exitcode=-15).reason
    watchdog = describe(tmp_path, "watchdog: no progress for 300 s\n", soon, exitcode=-15)
    assert watchdog.failure_class is FailureClass.SYMPTOM
    assert "crash" not in describe(tmp_path, exitcode=-14).reason


def test_describing_never_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> None:
        raise RuntimeError("defect")

    monkeypatch.setattr(evidence, "_read_tail", broken)
    failure = describe(tmp_path, TRACE, exitcode=-9, oom_kills=1)
    assert failure.message.startswith("Out of memory: Signal 9 (SIGKILL)")
    assert failure.failure_class is FailureClass.INFRASTRUCTURE
    assert "defect" in failure.problem


@pytest.mark.parametrize(("stderr", "exitcode"), [(TRACE, 1), ("", -9)], ids=["a traceback", "none"])
def test_written_and_read_back(tmp_path: Path, stderr: str, exitcode: int) -> None:
    failure = describe(tmp_path, stderr, exitcode=exitcode)
    path = tmp_path / "error.json"
    assert write_evidence(failure, path) == ""
    data = json.loads(path.read_text())
    callstack = stderr.rstrip("\n") or failure.message
    extra = {"py_callstack": callstack, "timestamp": "1700000009"}
    assert data["message"] == {"message": failure.message, "extraInfo": extra, "errorCode": exitcode}
    assert data["hpc_elastic"]["version"] == 1
    assert read_failure(path, facts=facts(attempt=0, round=0)) == failure
    assert "could not write" in write_evidence(failure, tmp_path / "no" / "folder" / "error.json")


def test_what_the_worker_wrote_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    inner = {"message": "ValueError: x", "extraInfo": {"py_callstack": TRACE, "timestamp": "1700000001"}}
    path.write_text(json.dumps({"message": inner, "theirs": 1, "hpc_elastic": {"frames": [1]}}))
    failure = describe(tmp_path)
    assert write_evidence(failure, path) == ""
    data = json.loads(path.read_text())
    assert data["theirs"] == 1
    assert data["message"] == {**inner, "errorCode": 1}
    assert data["hpc_elastic"]["frames"] == [1]
    again = read_failure(path, facts=facts())
    assert again is not None
    assert (again.message, again.exception_type) == ("ValueError: x", "ValueError")
    assert os.listdir(tmp_path).count("error.original.json") == 0
    path.write_text(json.dumps({"message": "text"}))
    assert write_evidence(describe(tmp_path), path) == ""
    data = json.loads(path.read_text())
    assert (data["message"], data["timestamp"]) == ("text", 1_700_000_009), "a text keeps its shape, and gets a time"
    path.write_text('{"err": "x"}')
    assert write_evidence(describe(tmp_path, TRACE), path) == ""
    assert (tmp_path / "error.original.json").read_text() == '{"err": "x"}', "a foreign file is kept beside"


def test_a_file_that_no_agent_completed(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    path.write_text(json.dumps({"message": {"message": "ValueError: x", "extraInfo": {"py_callstack": TRACE}}}))
    failure = read_failure(path, facts=facts())
    assert failure is not None
    assert (failure.message, failure.host, failure.global_rank) == ("ValueError: x", "n3", 5)
    assert read_failure(tmp_path / "none.json", facts=facts()) is None


def test_a_failure_of_another_version_is_read_as_far_as_it_goes() -> None:
    value = {
        "version": 99,
        "new": 1,
        "failure_class": "a new word",
        "category": "infrastructure",
        "exitcode": "3",
        "pid": True,
        "last_step": 1.5,
        "host": "n\x1b[31m1",
        "oom_kills": 2,
    }
    failure = WorkerFailure.from_json(value, global_rank=4)
    assert failure == WorkerFailure(category=Category.INFRASTRUCTURE, host="n1", oom_kills=2, global_rank=4)
    assert WorkerFailure.from_json({}) == WorkerFailure()


def test_what_a_full_disk_kept_from_the_log_is_read_all_the_same(tmp_path: Path) -> None:
    head, _, rest = TRACE.rpartition("ValueError")
    for stored, unwritten in (("", TRACE), (head, "ValueError" + rest)):
        output = Printed(unwritten=unwritten.encode())
        assert describe(tmp_path, stored, output, exitcode=1).exception_type == "ValueError"
    output, none = Printed(unwritten=TRACE.encode()), tmp_path / "none"
    found = describe_failure(facts=facts(exitcode=1), error_file=none, stderr_log=none, output=output)
    assert found.exception_type == "ValueError"


@pytest.mark.parametrize("before", ["", "one\ntwo\n", "10 %\r20 %\r30 %\r\n\x1b[31mred\x1b[0m\n", "\xe4\xf6 torn\n"])
@pytest.mark.parametrize("after", ["", "Exception ignored in: <x>\nbye\n"])
def test_the_time_of_a_failure_is_that_of_its_tracebacks_first_line(tmp_path: Path, before: str, after: str) -> None:
    failure = describe(tmp_path, before.encode("latin-1") + (TRACE + after).encode(), Printed())
    assert (failure.message, failure.printed_ns) == ("ValueError: bad 7", -len((TRACE + after).encode()))


def test_a_recorded_exception_has_the_time_at_which_it_was_printed_or_recorded(tmp_path: Path) -> None:
    ended = facts().ended_ns
    own = {"version": 1, "timestamp_ns": ended - 5}
    message = {"message": "ValueError: bad 7", "extraInfo": {"py_callstack": TRACE, "timestamp": "1700000000"}}
    (tmp_path / "error.json").write_text(json.dumps({"message": message, "hpc_elastic": own}))
    for printed, expected in (("", ended - 5), (f"one\n{TRACE}", -len(TRACE))):
        assert describe(tmp_path, printed, Printed()).printed_ns == expected
    (tmp_path / "error.json").write_text(json.dumps({"message": message}))
    assert describe(tmp_path).printed_ns == 0, "torch's time has whole seconds"


def recorded(tmp_path: Path, trace: str) -> None:
    error = {
        "message": trace.rstrip().rpartition("\n")[2],
        "extraInfo": {"py_callstack": trace, "timestamp": "1700000000"},
    }
    (tmp_path / "error.json").write_text(json.dumps({"message": error}))


LATER = TRACE.replace("ValueError: bad 7", "IndexError: list index out of range").replace("in f", "in <module>")
AT_TOP = TRACE.replace("in f", "in <module>")


@pytest.mark.parametrize("before", ["", TRACE, "step 1\n" * 50], ids=["silent", "logged", "steps"])
def test_a_recorded_exception_that_was_handled_is_not_the_one_that_ended_it(tmp_path: Path, before: str) -> None:
    recorded(tmp_path, TRACE)
    failure = describe(tmp_path, before + LATER)
    assert (failure.headline, failure.source) == ("IndexError: list index out of range", EvidenceSource.STDERR)
    assert "ValueError: bad 7" in failure.problem
    assert write_evidence(failure, tmp_path / "error.json") == ""
    again = read_failure(tmp_path / "error.json", facts=facts())
    assert again is not None
    assert again.headline == failure.headline


@pytest.mark.parametrize(
    ("stderr", "changes"),
    [
        (AT_TOP, {}),
        (TRACE + "\nDuring handling of the above exception, another exception occurred:\n\n" + LATER, {}),
        (LATER.replace("in <module>", "in report"), {}),
        ("Error in atexit._run_exitfuncs:\n" + LATER, {}),
        ("", {}),
        (AT_TOP, {"exitcode": -11}),
        (AT_TOP + "terminate called without an active exception\n", {"exitcode": -6}),
        ("", {"exitcode": 3, "ended_ns": 1_700_000_000_900_000_000}),
        ("", {"exitcode": -9, "stopped_by_agent": True}),
    ],
    ids=[
        *("same", "chained", "logged", "at exit", "nothing", "crash in the shutdown", "abort in the shutdown"),
        *("an exit code for it", "hung in the shutdown"),
    ],
)
def test_a_recorded_exception_that_ended_it_is_believed_whatever_comes_in_the_shutdown(
    tmp_path: Path, stderr: str, changes: dict[str, Any]
) -> None:
    recorded(tmp_path, TRACE)
    assert describe(tmp_path, stderr, **changes).headline == "ValueError: bad 7"


@pytest.mark.parametrize("exitcode", [-9, -11, -6, 3])
@pytest.mark.parametrize("stderr", ["", TRACE + "".join(f"step {n}\n" for n in range(50))], ids=["silent", "logged"])
def test_a_rank_that_lived_on_after_a_recorded_exception_ended_otherwise(
    tmp_path: Path, exitcode: int, stderr: str
) -> None:
    """It had handled the exception, or a helper of it has the same error file."""
    recorded(tmp_path, TRACE)  # 9 s before the end
    failure = describe(tmp_path, stderr, exitcode=exitcode)
    assert "ValueError" not in failure.headline
    assert "ValueError: bad 7" in failure.problem


@pytest.mark.parametrize(("written", "lived_on"), [(0.4, True), (0.95, False), (-9.0, False)])
def test_the_whole_second_of_an_error_file_is_completed_by_the_files_time(
    tmp_path: Path, written: float, lived_on: bool
) -> None:
    recorded(tmp_path, TRACE)
    at = 1_700_000_000_000_000_000 + int(written * 1e9)
    os.utime(tmp_path / "error.json", ns=(at, at))
    failure = describe(tmp_path, "", exitcode=-9, ended_ns=1_700_000_001_900_000_000)
    assert ("ValueError" not in failure.headline) is lived_on


STACK = """\
Traceback (most recent call last):
  File "/u/t.py", line 12, in <module>
    main()
  File "/u/t.py", line 9, in main
    step()
"""
STOPPED = {"exitcode": -15, "stopped_by_agent": True, "stopped_ns": 1_700_000_009_000_000_000}


@pytest.mark.parametrize("cut", [0, 5], ids=["a line", "half a line"])
def test_an_exception_that_was_half_printed_at_the_stop_keeps_its_place(tmp_path: Path, cut: int) -> None:
    output = Printed(at_ns=1_700_000_008_000_000_000)
    failure = describe(tmp_path, "step 1\n" + STACK[: len(STACK) - cut], output, **STOPPED)
    assert (failure.failure_class, failure.printed_ns) == (FailureClass.ROOT, output.at_ns)
    assert failure.headline.startswith("Exception: its type was not printed before the stop; t.py:9 main")
    assert not failure.may_follow_stop


@pytest.mark.parametrize(
    "text",
    [
        STACK.replace("step()", "dist.all_reduce(x)"),
        STACK + '  File "/v/torch/distributed/distributed_c10d.py", line 2, in recv\n    work.wait()\n',
        "Exception ignored in: <function f>\n" + STACK,
        STACK + "step 2\n",
    ],
    ids=["may wait", "waits", "ignored", "went on"],
)
def test_a_half_printed_exception_that_may_be_a_victims_is_none(tmp_path: Path, text: str) -> None:
    assert describe(tmp_path, text, **STOPPED).exception_type == ""


@pytest.mark.parametrize(
    ("prefix", "body"), [("", "x" * 30_000_000), ("[rank5]: ", "\n" + "error in row 17\n" * 1_200_000)]
)
def test_a_message_of_30_megabytes_keeps_type_and_place(tmp_path: Path, prefix: str, body: str) -> None:
    printed = prefix + f"{STACK}ValueError: bad {body}".replace("\n", f"\n{prefix}" if prefix else "\n")
    failure = describe(tmp_path, printed)
    assert (failure.exception_type, failure.headline[:15]) == ("ValueError", "ValueError: bad")
    assert failure.traceback.startswith(STACK)


def test_a_signal_that_the_agent_did_not_get_is_not_slurms(tmp_path: Path) -> None:
    log = tmp_path / "stderr.log"
    log.write_text("step 1\nstep 2\n")
    alone, both = (
        describe_failure(facts=facts(exitcode=-15), error_file=tmp_path / "none", stderr_log=log, is_alone=is_alone)
        for is_alone in (True, False)
    )
    assert "probably Slurm" in both.reason
    assert "sent to this process alone, so not by Slurm" in alone.reason
    assert alone.failure_class is both.failure_class


TORCH_LOAD = """\
  File "/v/site-packages/torch/serialization.py", line 763, in __init__
    super().__init__(torch._C.PyTorchFileReader(name_or_buffer))
RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory
"""
SCRIPT = (
    'def load(name):\n    with open(name, "rb") as file:\n        return pickle.load(file)\npath = f"ckpt/{n}.pkl"\n'
)
PICKLE = """\
Traceback (most recent call last):
  File "{0}", line 5, in <module>
    load(path)
  File "{0}", line 3, in load
    return pickle.load(file)
           ^^^^^^^^^^^^^^^^^
EOFError: Ran out of input
"""


@pytest.mark.parametrize(
    ("text", "file"),
    [
        (STACK.replace("step()", 'torch.load("last.pt")') + TORCH_LOAD, "last.pt"),
        (
            "resuming from ckpt/step_10.pt\n" + STACK.replace("step()", "torch.load(path)") + TORCH_LOAD,
            "ckpt/step_10.pt",
        ),
        (PICKLE, "ckpt/{n}.pkl"),
        ("step 3/100 2.1it/s\n" + STACK.replace("step()", "torch.load(path)") + TORCH_LOAD, ""),
        ("saved ckpt/step_10.pt\n" + STACK + "ValueError: bad\n", ""),
        (STACK.replace("step()", 'open("a.txt")') + "FileNotFoundError: no such file: 'b/a.txt'\n", ""),
    ],
    ids=["literal", "printed", "assigned", "unknown", "no reading", "named"],
)
def test_an_error_of_reading_names_the_file(tmp_path: Path, text: str, file: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    found = describe(tmp_path, text.replace("{0}", str(script))).headline.partition(" (file: ")[2]
    assert found == (f"{file})" if file else "")


@pytest.mark.parametrize(
    ("text", "logged"),
    [
        (TRACE + "giving up\n", "ValueError: bad 7"),
        (TRACE + "".join(f"step {n}\n" for n in range(9)), ""),
        ("done\n", ""),
    ],
)
def test_what_was_logged_just_before_an_end_with_0(tmp_path: Path, text: str, logged: str) -> None:
    (tmp_path / "stderr.log").write_text(text)
    assert find_logged(tmp_path / "stderr.log") == logged
    assert find_logged(tmp_path / "none") == ""


_DUMP = 'Current thread 0x00007f1542893b80 (most recent call first):\n  File "/u/t.py", line 3 in wait\n' * 30
_ENDINGS = {
    "traceback": (1, TRACE),
    "terminate": (-6, "terminate called after throwing an instance of 'E'\n  what():  boom\n"),
    "fatal": (-6, f"Fatal Python error: Aborted\n\n{_DUMP}"),
    "terminate, fatal": (
        -6,
        f"terminate called after throwing an instance of 'E'\nFatal Python error: Aborted\n\n{_DUMP}",
    ),
    "syntax": (1, '  File "/u/t.py", line 1\n    def f(:\n          ^\nSyntaxError: invalid syntax\n'),
}


@pytest.mark.parametrize(("exitcode", "words"), _ENDINGS.values(), ids=_ENDINGS)
def test_the_end_of_stderr_is_what_stands_beside_the_words_of_the_failure(
    tmp_path: Path, exitcode: int, words: str
) -> None:
    failure = describe(tmp_path, "loss 0.2\n" * 100 + "the last words\n" + words, exitcode=exitcode)
    assert failure.traceback
    assert failure.stderr_tail.split("\n") == ["loss 0.2"] * 19 + ["the last words"]
