"""Tracebacks as they stand in an output file: among what others print, in a logger's form; and the failure's name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpc_elastic.failures.failure_text import (
    Frame,
    fingerprint,
    normalise_message,
    read_json_line,
    summary_line,
    undecorate,
    user_frames,
)
from hpc_elastic.failures.ranking import FailureClass
from hpc_elastic.failures.worker_failure import WorkerFailure
from tests.rigs.described import described, traceback_in

STACK = """\
Traceback (most recent call last):
  File "/home/ann/train.py", line 12, in <module>
    main()
  File "/home/ann/train.py", line 9, in main
    step()
"""
WHOLE = STACK + "ValueError: bad batch 17\n"
GROUP = """\
  + Exception Group Traceback (most recent call last):
  |   File "/home/ann/train.py", line 13, in <module>
  |     raise ExceptionGroup("many", [...])
  | ExceptionGroup: many (1 sub-exception)
  +-+---------------- 1 ----------------
    | ValueError: a
    +------------------------------------
"""
BAR = "\r  0%|          | 0/100 [00:00<?, ?it/s]\r  3%|\u258e         | 3/100 [00:01<00:45,  2.10it/s]"


@pytest.mark.parametrize(
    "before",
    [BAR, "loading ... ", f"{BAR}[rank1]: ", "ERROR:root:", "a line\n", "x" * 5000],
    ids=["tqdm", "print", "tqdm-and-rank", "logged", "line", "long"],
)
def test_a_line_that_was_not_ended_hides_no_traceback(tmp_path: Path, before: str) -> None:
    failure = described(tmp_path, before + WHOLE)
    assert (failure.exception_type, failure.headline) == ("ValueError", "ValueError: bad batch 17")
    assert (failure.traceback, failure.fingerprint) == (WHOLE.rstrip("\n"), described(tmp_path, WHOLE).fingerprint)
    ignored = f"Exception ignored in: <function f>\n{STACK}OSError: late\n"
    assert traceback_in(before + WHOLE + ignored).headline == "ValueError: bad batch 17"
    group = traceback_in(BAR + GROUP)
    assert (group.exception_type, group.text) == ("ExceptionGroup", GROUP.rstrip("\n"))


@pytest.mark.parametrize(
    "after",
    [
        "wandb: \nwandb: View run sunny-sea-{n} at: https://wandb.ai/a/b/runs/{n}ab12cd34ef\n",
        "/usr/lib/python3.11/multiprocessing/resource_tracker.py:224: UserWarning: resource_tracker: There appear to "
        "be {n} leaked semaphore objects to clean up at shutdown\n  warnings.warn('resource_tracker: There appear'\n",
        "2026-11-21 18:42:0{n},481 - INFO - closing\n",
        "[2026-11-21 18:42:0{n},481] [INFO] [launch.py:1] closing\n",
        "INFO:root:bye bye {n}\n",
        "[rank1]:[W1121 18:42:0{n}.038 ProcessGroupNCCL.cpp:1168] Warning: process group has NOT been destroyed\n",
        "n1:41{n}:41{n} [0] NCCL INFO comm 0x7f{n} destroyed\n",
        "\rEpoch {n}:   3%|          | 3/100 [00:01<00:45,  2.10it/s]\n",
        "\nSet the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace.\n",
        "slurmstepd: error: *** STEP 1{n}.0 ON n1 CANCELLED ***\n",
        "srun: error: n{n}: task 0: Killed\n",
        "sys:1: ResourceWarning: unclosed file {n}\n",
    ],
    ids=lambda text: text.split()[0][:20],
)
def test_what_is_printed_after_it_is_no_part_of_its_message(tmp_path: Path, after: str) -> None:
    failures = [described(tmp_path, WHOLE + after.format(n=n)) for n in (3, 5)]
    for failure in failures:
        assert (failure.message, failure.traceback) == ("ValueError: bad batch 17", WHOLE.rstrip("\n"))
        assert failure.stderr_tail, "it stands beside it"
    assert failures[0].fingerprint == failures[1].fingerprint == described(tmp_path, WHOLE).fingerprint
    # Nobody can tell words of an unknown kind from its message: it is the same failure all the same.
    unknown = described(tmp_path, f"{WHOLE}bye from run {len(after)}\n")
    assert (unknown.headline, unknown.fingerprint) == ("ValueError: bad batch 17", failures[0].fingerprint)


def test_what_is_printed_into_it_is_passed_over(tmp_path: Path) -> None:
    lines = WHOLE.splitlines()
    lines.insert(3, "n1:410:455 [0] NCCL INFO Channel 00/02 : 0 1")
    lines.insert(6, "[rank1]:[W1121 18:42:09.038 Utils.hpp:1] Warning: deprecated")
    failure = described(tmp_path, "\n".join(lines) + "\n")
    assert failure.headline == "ValueError: bad batch 17"
    assert failure.fingerprint == described(tmp_path, WHOLE).fingerprint
    # One that was cut off is none, whatever comes after the others' lines.
    cut = STACK + "INFO:root:going on\n" * 3 + "loss: 0.25\n"
    assert described(tmp_path, cut, exitcode=3).exception_type == ""


LOADER = """\
Caught ValueError in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "/opt/lib/python3.11/site-packages/torch/utils/data/_utils/worker.py", line 349, in _worker_loop
    data = fetcher.fetch(index)
  File "/home/ann/data.py", line 5, in __getitem__
    raise ValueError("bad sample 17")
ValueError: bad sample 17
"""
SPAWNED = """\


-- Process 0 terminated with the following error:
Traceback (most recent call last):
  File "/opt/lib/python3.11/site-packages/torch/multiprocessing/spawn.py", line 90, in _wrap
    fn(i, *args)
RuntimeError: no such device
"""


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("", ""),
        ("\n\n", ""),
        ("one", "one"),
        ("one:", "one:"),
        ("one\ntwo", "one"),
        ("\n  one \ntwo", "one"),
        ("Error(s) in loading state_dict for Net:\n\tMissing key(s): a, b.\n\tUnexpected: c", "Error(s) in loading "
         "state_dict for Net: Missing key(s): a, b."),
        (LOADER, "Caught ValueError in DataLoader worker process 0. (ValueError: bad sample 17)"),
        (f"E: {SPAWNED}", "E: -- Process 0 terminated with the following error: RuntimeError: no such device"),
        ("a:\nb:\nc:\nd:\ne", "a: b: c: d:"),
        ("E: An error occurred while calling o4.load.\n: java.io.IOException: x\n\tat y", "E: An error occurred while "
         "calling o4.load: java.io.IOException: x"),
        ('R: ray::f() (pid=7)\n  File "/p.py", line 4, in f\n    g()\nValueError: x', "R: ray::f() (pid=7) "
         "(ValueError: x)"),
        ("y" * 5000, "y" * 1000 + "... (4000 characters cut)"),
    ],
    ids=lambda text: text.strip()[:12],
)  # fmt: skip
def test_the_line_that_says_what_happened(message: str, line: str) -> None:
    assert summary_line(message) == line


def test_failures_in_a_loaders_processes_are_told_apart_by_what_was_raised_there(tmp_path: Path) -> None:
    def of(loader: str) -> WorkerFailure:
        return described(tmp_path, f"{STACK}ValueError: {loader}")

    other = LOADER.replace("bad sample 17", "no label")
    assert of(LOADER).fingerprint != of(other).fingerprint
    assert of(LOADER).fingerprint == of(LOADER.replace("17", "18")).fingerprint
    assert of(other).headline.endswith("(ValueError: no label)")
    assert of(other).failure_class is FailureClass.ROOT


# -- in the form of a logger, a wrapper or a notebook: as if Python had printed them (texts were captured)

PLAIN = """\
Traceback (most recent call last):
  File "/home/ann/train.py", line 9, in <module>
    train()
  File "/home/ann/train.py", line 5, in train
    scale = table[name]
KeyError: 'no scale for layer 17'"""
LOGURU = """\
Traceback (most recent call last):

> File "/home/ann/train.py", line 9, in <module>
    train()
    └ <function train at 0x7f7c352d2de0>

  File "/home/ann/train.py", line 5, in train
    scale = table[name]
            │     └ 'b'
            └ {'a': 1}

KeyError: 'no scale for layer 17'"""
IPYTHON = """\
---------------------------------------------------------------------------
KeyError                                  Traceback (most recent call last)
File /home/ann/train.py:9
      7 
      8 
----> 9 train()

File /home/ann/train.py:5, in train(name)
      4 def train(name):
----> 5     scale = table[name]

KeyError: 'no scale for layer 17'"""  # noqa: W291


def prefixed(prefix: str, text: str = PLAIN) -> str:
    return "".join(f"{prefix}{line}".rstrip() + "\n" for line in text.split("\n"))


@pytest.mark.parametrize(
    "text",
    [
        LOGURU,
        IPYTHON,
        prefixed("[04:37:58 rank2] "),
        prefixed("2026-11-23 04:37:58,570 ERROR train: "),
        prefixed("1: "),
        json.dumps({"level": "error", "event": "training failed", "exception": PLAIN}),
        json.dumps({"record": {"message": "failed", "exc_info": PLAIN}}),
    ],
    ids=["loguru", "ipython", "time and rank", "logger", "srun", "structlog", "nested json"],
)
def test_its_exception_and_its_frames_are_known(tmp_path: Path, text: str) -> None:
    assert undecorate(text).count("\n") == text.count("\n"), "each line keeps its number"
    failure = described(tmp_path, f"step 1\nstep 2\n{text}\n")
    assert failure.headline == "KeyError: 'no scale for layer 17'"
    assert 'File "/home/ann/train.py", line 5, in train' in failure.traceback


TIMES = "".join(f"[04:37:5{at}.{at}00] {line}\n" for at, line in enumerate(PLAIN.split("\n")))
CHAIN = f"{PLAIN}\n\nDuring handling of the above exception, another exception occurred:\n\n{PLAIN}\n"
IN_GROUP = f"  + Exception Group Traceback (most recent call last):\n  +-+---- 1 ----\n{prefixed('    | ')}"


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        pytest.param(TIMES, f"{PLAIN}\n", id="the time may change"),
        pytest.param(f"0: a\n{prefixed('1: ')}0: b\n", f"0: a\n{PLAIN}\n0: b\n", id="others keep their label"),
        pytest.param(prefixed("[rank 1] ", CHAIN), f"{CHAIN}\n", id="a chain"),
        *((text, text) for text in (PLAIN, "no traceback at all", prefixed("[rank1]: "), IN_GROUP)),
        *[("x Traceback (most recent call last):\ny",) * 2],
    ],
)
def test_a_prefix_is_taken_off_its_lines_and_no_others(text: str, plain: str) -> None:
    assert undecorate(text) == plain


def test_structlogs_dictionaries_are_a_traceback() -> None:
    stacks = [
        {
            "exc_type": "RuntimeError",
            "exc_value": "no batch",
            "frames": [{"filename": "b.py", "lineno": 3, "name": "g"}],
        },
        {"exc_type": "KeyError", "exc_value": "'zu'", "frames": [{"filename": "a.py", "lineno": 1, "name": "f"}]},
    ]
    found = traceback_in(read_json_line(json.dumps({"event": "failed", "exception": stacks}))[0])
    assert [raised.headline for raised in found.chain] == ["RuntimeError: no batch", "KeyError: 'zu'"]


def test_json_without_a_traceback_is_shown_by_its_message_and_its_reason(tmp_path: Path) -> None:
    line = json.dumps({"level": "error", "event": "training failed", "error": "vocabulary has a hole", "step": 7})
    info = json.dumps({"event": "closed the failed writers", "level": "info"})
    found = described(tmp_path, f"{line}\n{info}\n")
    assert found.headline == "training failed: vocabulary has a hole (exit code 1)"
    for foreign in ("{", "{}", "[1]", "{not json}", '{"a": 1'):
        assert read_json_line(foreign) == ("", "")


# -- the name of a failure

USER = Frame(file="/home/ann/train.py", line=61, function="train_step")
TORCH = Frame(file="/opt/venv/lib/python3.11/site-packages/torch/_tensor.py", line=625, function="backward")
STDLIB = Frame(file="/usr/lib/python3.11/runpy.py", line=198, function="_run")


@pytest.mark.parametrize(
    ("one", "other", "is_alike"),
    [
        ("bad batch 17", "bad batch 4711", True),
        ("object at 0x7fce9537d620", "object at 0x55aa0000ffff", True),
        ("[Rank 0] gone", "[Rank 127] gone", True),
        ("Connection closed by peer [10.0.0.1]:24496", "Connection closed by peer [10.0.0.32]:513", True),
        ("no file /tmp/tmpab12cd34/x.pt", "no file /scratch/job-77/run/x.pt", True),
        ("loss is 1.5e-3", "loss is -2", True),
        ("shape [2, 3, 4]", "shape [2, 3]", True),
        ("id 3f2a90c1-d4e5-4f00-9000-00000000abcd", "id 00000000-1111-4222-8333-444455556666", True),
        ("sha deadbeef12", "sha 0123456789abcdef", True),
        ("/run/attempt-000/round-003/rank-00012/x gone", "/run/attempt-001/round-000/rank-00003/x gone", True),
        ("a  b\nc", "a b c", True),
        ("bad batch", "bad epoch", False),
        ("no file /a/x.pt", "no file /a/y.pt", False),
        ("KeyError 'lr'", "KeyError 'wd'", False),
    ],
)
def test_what_changes_between_occurrences_is_left_out_and_the_rest_stays(one: str, other: str, is_alike: bool) -> None:
    assert (normalise_message(one) == normalise_message(other)) is is_alike


def test_the_users_frames_count_without_their_line_numbers() -> None:
    base = fingerprint(exception_type="ValueError", message="bad 1", frames=[STDLIB, USER, TORCH])
    moved = Frame(file="/scratch/bob/train.py", line=99, function="train_step")
    other = Frame(file="/home/ann/train.py", line=61, function="evaluate")
    assert base == fingerprint(exception_type="builtins.ValueError", message="bad 2", frames=[moved])
    assert base != fingerprint(exception_type="ValueError", message="bad 1", frames=[STDLIB, other, TORCH])
    assert base != fingerprint(exception_type="KeyError", message="bad 1", frames=[STDLIB, USER, TORCH])
    assert base.startswith("ValueError:")
    recorder = Frame(file="/src/hpc_elastic/failures/error_handler.py", line=1, function="wrapper")
    frozen = Frame(file="<frozen runpy>", line=198, function="_run")
    assert user_frames([STDLIB, frozen, recorder, USER, TORCH]) == (USER,)
    assert fingerprint(exitcode=-11, signal="SIGSEGV") == "signal:SIGSEGV"
    assert fingerprint(exitcode=3) == "exit:3"
    assert len(fingerprint(exception_type="an odd\ntype", message="x").split()) == 1


def test_each_ranks_own_file_is_no_other_failure() -> None:
    frames = (Frame(file="/home/ann/train.py", line=3, function="load"),)

    def name(message: str, kind: str = "FileNotFoundError") -> str:
        return fingerprint(exception_type=kind, message=message, frames=frames)

    missing = "[Errno 2] No such file or directory: '{}'"
    assert name(missing.format("shards/alpha.tar")) == name(missing.format("/data/shards/beta.tar"))
    assert name(missing.format("a")) != name("[Errno 13] Permission denied: 'a'")
    assert name("'lr'", "KeyError") != name("'width'", "KeyError")
