"""What a process printed last: the headline where it left no exception. Texts captured from the programs named."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_elastic.failures.evidence import describe_failure
from hpc_elastic.failures.ranking import Category
from hpc_elastic.failures.worker_failure import EvidenceSource, WorkerFailure
from tests.rigs.described import described

TRACE = """\
Traceback (most recent call last):
  File "/home/ann/train.py", line 12, in {top}
    load("/nope/cache")
FileNotFoundError: [Errno 2] No such file or directory: '/nope/cache'
"""
UNCAUGHT, CAUGHT = TRACE.format(top="<module>"), TRACE.format(top="load_cache")
STEPS = "".join(f"step {step}: loss 0.{step}\n" for step in range(20))
DUMP = """\
Fatal Python error: Aborted

Current thread 0x00007f4b437cbb80 (most recent call first):
  File "/home/ann/train.py", line 6 in corrupt
  File "/home/ann/train.py", line 7 in <module>
"""


@pytest.mark.parametrize(
    ("stderr", "exitcode", "headline"),
    [
        (
            "I1123 04:37:58.570026 1399 ab.py:4] start\nF1123 04:37:58.570145 1399 ab.py:5] 3 shards, 4 expected\n"
            + DUMP,
            -6,
            "3 shards, 4 expected (SIGABRT)"
        ),
        (
            "F20261123 04:37:58.570145  8096 sampler.cc:77] Check failed: n == 4 (3 vs. 4)\n"
            "*** Check failure stack trace: ***\n    @     0x7f0f4c3d1b03  google::LogMessage::Fail()\n",
            -6,
            "Check failed: n == 4 (3 vs. 4) (SIGABRT)"
        ),
        (
            "\nthread 'main' (28281) panicked at src/lib.rs:1:87:\nindex out of bounds: the len is 3 but the index is 7"
            "\n"
            "note: run with `RUST_BACKTRACE=1` environment variable to display a backtrace\n",
            101,
            "thread 'main' (28281) panicked at src/lib.rs:1:87: index out of bounds: the len is 3 but the index is 7 "
            "(exit code 101)"
        ),
        (
            "panic: runtime error: index out of range [7] with length 3\n\ngoroutine 1 [running]:\nmain.shard(...)\n"
            "\t/home/u/fetch.go:6\nmain.main()\n\t/home/u/fetch.go:10 +0x1d\nexit status 2\n",
            2,
            "panic: runtime error: index out of range [7] with length 3 (exit code 2)"
        ),
        (
            "==9==ERROR: AddressSanitizer: heap-buffer-overflow on address 0x6020\n    #0 0x556e in f /home/u/a.c:2\n\n"
            "SUMMARY: AddressSanitizer: heap-buffer-overflow /home/u/a.c:2 in f\nShadow bytes around the address:\n"
            "=>0x0c047fff8000: fa fa 00[fa]fa\nShadow byte legend (one shadow byte represents 8 application bytes):\n"
            "  Addressable:           00\n  Partially addressable: 01 02 03\n"
            "  Right alloca redzone:    cb\n==9==ABORTING\n",
            1,
            "==9==ERROR: AddressSanitizer: heap-buffer-overflow on address 0x6020 (exit code 1)",
        ),
        (
            "pure virtual method called\nterminate called without an active exception\n",
            -6,
            "pure virtual method called (SIGABRT)"
        ),
        (
            "At line 12 of file mesh.f90\nFortran runtime error: End of file\n\nError termination. Backtrace:\n"
            "#0  0x7f1c2e423960 in ???\n",
            2,
            "Fortran runtime error: End of file (exit code 2)"
        ),
        (
            "ERROR: LoadError: BoundsError: index [7]\nStacktrace:\n [1] throw_boundserror(A::Vector{Int64})\n"
            "   @ Base ./essentials.jl:14\nin expression starting at mesh.jl:3\n",
            1,
            "ERROR: LoadError: BoundsError: index [7] (exit code 1)"
        ),
        (
            "E       AssertionError: loss is too high\n\ntest_train.py:4: AssertionError\n"
            "=========================== short test summary info ============================\n"
            "FAILED test_train.py::test_train - AssertionError: loss is too high\n"
            "============================== 1 failed in 0.05s ===============================\n",
            1,
            "FAILED test_train.py::test_train - AssertionError: loss is too high (exit code 1)"
        ),
        (
            "train.py: base.yaml: key 'optimizer' is given twice\nmake: *** [Makefile:12: train] Error 3\n",
            2,
            "train.py: base.yaml: key 'optimizer' is given twice (exit code 2)"
        ),
        (
            'usage: train.py [--lr LR]\nerror: Parser key "lr":\n  Expected a float. Got value: fast\n',
            2,
            'error: Parser key "lr": Expected a float. Got value: fast (exit code 2)'
        ),
        (
            "usage: train.py [-h] [--lr LR]\ntrain.py: error: argument --lr: invalid float value: 'x'\n",
            2,
            "train.py: error: argument --lr: invalid float value: 'x' (exit code 2)"
        ),
        (
            "Usage: train.py [OPTIONS]\nTry 'train.py --help' for help.\n\nError: No such option '--lrr'.\n",
            2,
            "Error: No such option '--lrr'. (exit code 2)"
        ),
        (
            "Could not override 'optimizer.lrr'.\nKey 'lrr' is not in struct\n    full_key: optimizer.lrr\n\n"
            "Set the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace.\n",
            1,
            "Could not override 'optimizer.lrr'. (exit code 1)"
        ),
        ("free(): invalid pointer\n", -6, "free(): invalid pointer (SIGABRT)"),
        ("free(): invalid pointer\n" + DUMP, -6, "free(): invalid pointer (SIGABRT)"),
        (
            "python: tokenizer.cpp:17: int encode(int): Assertion `n > 0' failed.\n",
            -6,
            "python: tokenizer.cpp:17: int encode(int): Assertion `n > 0' failed. (SIGABRT)"
        ),
        (f"{STEPS}validation loss is NaN, giving up\n", 1, "validation loss is NaN, giving up (exit code 1)"),
        ("run.sh: line 3: ROOT: unbound variable\n", 1, "run.sh: line 3: ROOT: unbound variable (exit code 1)"),
        (
            "2026-11-23 01:00:00,123 [INFO] trainer: epoch 9\n"
            "2026-11-23 01:00:00,124 [CRITICAL] trainer: gradient norm is inf\n"
            "2026-11-23 01:00:00,125 [INFO] trainer: closing the data loader\n",
            5,
            "[CRITICAL] trainer: gradient norm is inf (exit code 5)"
        ),
        (
            "Error: no key 'model'\n/home/ann/train.py:3: UserWarning: a leak\n  warnings.warn('a leak')\n",
            2,
            "Error: no key 'model' (exit code 2)"
        ),
        (
            "\u256d\u2500 Error \u2500\u256e\n\u2502 No such option: --lrr  \u2502\n\u2570\u2500\u2500\u2500\u256f\n",
            2,
            "No such option: --lrr (exit code 2)"
        ),
        (
            "tar: /data/x.tar: Cannot open: No such file or directory\ntar: Error is not recoverable: exiting now\n",
            2,
            "tar: /data/x.tar: Cannot open: No such file or directory (exit code 2)"
        ),
        ("Error: no peer\n" * 3, 1, "Error: no peer (exit code 1)"),
        (
            "terminate called without an active exception\n",
            -6,
            "terminate called without an active exception (SIGABRT)",
        ),
        (STEPS, 3, "Process failed with exitcode 3"),
        ("", 3, "Process failed with exitcode 3"),
        ("Error: the disk is slow\n", -9, "Signal 9 (SIGKILL) received by PID 7"),
        ("loading\n", -11, "Signal 11 (SIGSEGV) received by PID 7"),
    ],
    ids=[
        "absl", "glog", "rust", "go", "asan", "virtual", "fortran", "julia", "pytest", "make", "jsonargparse",
        "argparse", "click", "hydra", "glibc", "glibc-and-dump", "assert", "sys-exit", "bash", "logger", "warning",
         "typer", "tar", "repeated", "terminate", "progress", "nothing", "killed", "crashed"],
)  # fmt: skip
def test_the_line_that_says_why_is_the_headline(tmp_path: Path, stderr: str, exitcode: int, headline: str) -> None:
    assert described(tmp_path, stderr, exitcode=exitcode).headline == headline


def test_where_stderr_says_nothing_stdout_is_asked(tmp_path: Path) -> None:
    for stderr in ("", STEPS, "+ python train.py\n"):
        failure = described(tmp_path, stderr, STEPS + UNCAUGHT)
        assert (failure.exception_type, failure.source) == ("FileNotFoundError", EvidenceSource.STDOUT)
        assert failure.traceback == UNCAUGHT.rstrip("\n")
    printed = described(tmp_path, "", f"{STEPS}the dataset has no shard 7\n", exitcode=4)
    assert printed.headline == "the dataset has no shard 7 (exit code 4)"
    wrong_call = described(tmp_path, "", "usage: t.py\nt.py: error: unrecognized arguments: --lrr\n", exitcode=2)
    assert (wrong_call.category, wrong_call.retryable) == (Category.INPUT, False)
    assert described(tmp_path, "Error: bad key\n", "Error: worse\n").headline == "Error: bad key (exit code 1)"


def test_the_same_end_with_other_numbers_is_one_failure(tmp_path: Path) -> None:
    one, other = (described(tmp_path, f"shard {n} of /data/{n}/x.tar is corrupt\n", exitcode=3) for n in (3, 14))
    assert one.fingerprint == other.fingerprint
    assert one.fingerprint != described(tmp_path, "the model is corrupt\n", exitcode=3).fingerprint
    assert described(tmp_path, "", exitcode=3).fingerprint == "exit:3"


@pytest.mark.parametrize(
    ("stderr", "headline"),
    [
        (f"{STEPS}{CAUGHT}{STEPS}loss diverged\n", "loss diverged (exit code 1)"),
        (f"ERROR:root:cache unavailable\n{CAUGHT}{STEPS}loss diverged\n", "loss diverged (exit code 1)"),
        (f"{CAUGHT}{STEPS}loss diverged\n", "loss diverged (exit code 1)"),
        (
            f"ERROR:root:no cache\n{UNCAUGHT}{STEPS * 10}accuracy too low, stopping\n",
            "accuracy too low, stopping (exit code 1)",
        ),
        (f"ERROR:root:training failed\n{CAUGHT}ERROR:root:exiting\n", CAUGHT.splitlines()[-1]),
        (UNCAUGHT + "".join(f"closing shard {n}\n" for n in range(80)), UNCAUGHT.splitlines()[-1]),
        (f"{UNCAUGHT}bye\n{CAUGHT.replace('/nope/cache', '/nope/flush')}", UNCAUGHT.splitlines()[-1]),
        ("".join(f"[rank1]: {line}\n" for line in UNCAUGHT.splitlines()) + CAUGHT, UNCAUGHT.splitlines()[-1]),
    ],
    ids=[
        "went-on", "logged-far-above", "printed-far-above", "logged-at-the-top", "logged-then-exit", "teardown",
        "atexit", "prefixed",
    ],
)  # fmt: skip
def test_logged_is_not_uncaught(tmp_path: Path, stderr: str, headline: str) -> None:
    assert described(tmp_path, stderr).headline == headline


INTERRUPT = """\
Traceback (most recent call last):
  File "/home/ann/train.py", line 8, in <module>
    next_batch()
  File "/home/ann/train.py", line 7, in next_batch
    time.sleep(5)
KeyboardInterrupt
"""


def test_an_interrupt_from_within_is_no_signal_from_outside(tmp_path: Path) -> None:
    watchdog = "watchdog: no batch for 30 s, interrupting the main thread\n"
    failure = described(tmp_path, watchdog + INTERRUPT, exitcode=-2)
    assert (failure.headline, failure.failure_class) == (f"KeyboardInterrupt: {watchdog.strip()}", "root")
    assert described(tmp_path, INTERRUPT, exitcode=-2).headline == "KeyboardInterrupt"
    thread = UNCAUGHT.replace("<module>", "run")
    failure = described(tmp_path, f"Exception in thread Thread-1 (watch):\n{thread}{INTERRUPT}", exitcode=-2)
    assert failure.exception_type == "FileNotFoundError"
    # Without a KeyboardInterrupt of its own the default action ended it.
    assert described(tmp_path, "", exitcode=-2).failure_class == "infrastructure"


def test_a_worker_that_went_on_after_a_traceback_was_not_failing_when_it_was_stopped(tmp_path: Path) -> None:
    few = "".join(STEPS.splitlines(keepends=True)[:4])
    for stderr in (UNCAUGHT + few, few + CAUGHT + "step 9: loss 0.1\n"):
        assert described(tmp_path, stderr, exitcode=-15, stopped_by_agent=True).exception_type == ""
    for stderr in (few + UNCAUGHT, few + UNCAUGHT + "closing\n"):
        assert described(tmp_path, stderr, exitcode=-15, stopped_by_agent=True).exception_type == "FileNotFoundError"


def test_a_line_of_stdout_long_before_the_end_is_no_reason(tmp_path: Path) -> None:
    """``os._exit(3)`` in the middle of a training: "rank 1 starts at step 0" once was its headline."""
    log = tmp_path / "stdout.log"
    log.write_text("rank 1 starts at step 0\n")
    ended = WorkerFailure(exitcode=3, global_rank=1, ended_ns=log.stat().st_mtime_ns + 5_000_000_000)
    found = describe_failure(
        facts=ended, error_file=tmp_path / "none.json", stderr_log=tmp_path / "none.log", stdout_log=log
    )
    assert "starts at step 0" not in found.headline
    assert found.headline == "Process failed with exitcode 3"
