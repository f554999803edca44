"""What others print before, into and after a traceback: progress bars, loggers, warnings, wandb, Slurm."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_elastic.failures.failure_text import summary_line
from hpc_elastic.failures.ranking import FailureClass
from hpc_elastic.failures.traceback_text import find_python_traceback
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
BAR = "\r  0%|          | 0/100 [00:00<?, ?it/s]\r  3%|\u258e         | 3/100 [00:01<00:45,  2.10it/s]"
GROUP = """\
  + Exception Group Traceback (most recent call last):
  |   File "/home/ann/train.py", line 13, in <module>
  |     raise ExceptionGroup("many", [...])
  | ExceptionGroup: many (1 sub-exception)
  +-+---------------- 1 ----------------
    | ValueError: a
    +------------------------------------
"""


@pytest.mark.parametrize(
    "before",
    [BAR, "loading ... ", f"{BAR}[rank1]: ", "ERROR:root:", "a line\n", "x" * 5000],
    ids=["tqdm", "print", "tqdm-and-rank", "logged", "line", "long"],
)
def test_a_line_that_was_not_ended_hides_no_traceback(tmp_path: Path, before: str) -> None:
    failure = described(tmp_path, before + WHOLE)
    assert (failure.exception_type, failure.headline) == ("ValueError", "ValueError: bad batch 17")
    assert failure.traceback == WHOLE.rstrip("\n")
    assert failure.fingerprint == described(tmp_path, WHOLE).fingerprint


def test_two_failures_behind_a_progress_bar_are_two(tmp_path: Path) -> None:
    one, other = (described(tmp_path, BAR + STACK + last) for last in ("ValueError: x\n", "KeyError: 'y'\n"))
    assert one.fingerprint != other.fingerprint


def test_where_no_traceback_begins_none_is_seen() -> None:
    for text in (
        "it says Traceback (most recent call last):\nand no more: x\n",
        '"Traceback (most recent call last):\n',
        "Original " + WHOLE,
    ):
        assert find_python_traceback(text) is None, text


def test_a_group_behind_a_progress_bar() -> None:
    found = traceback_in(BAR + GROUP)
    assert found.exception_type == "ExceptionGroup"
    assert found.text == GROUP.rstrip("\n")


def test_what_is_ignored_stays_so() -> None:
    found = traceback_in(f"{BAR}{WHOLE}Exception ignored in: <function f>\n{STACK}OSError: late\n")
    assert found.headline == "ValueError: bad batch 17"


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
        assert failure.message == "ValueError: bad batch 17"
        assert failure.traceback == WHOLE.rstrip("\n")
        assert failure.stderr_tail, "it stands beside it"
    assert failures[0].fingerprint == failures[1].fingerprint == described(tmp_path, WHOLE).fingerprint


def test_words_of_an_unknown_kind_after_it_do_not_make_it_another_failure(tmp_path: Path) -> None:
    """Nobody can tell them from its message, so they may stand there; it is the same failure all the same."""
    failures = [described(tmp_path, f"{WHOLE}bye from run {name}\n") for name in ("sunny-sea", "dark-wood")]
    assert failures[0].fingerprint == failures[1].fingerprint == described(tmp_path, WHOLE).fingerprint
    assert {failure.headline for failure in failures} == {"ValueError: bad batch 17"}


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
