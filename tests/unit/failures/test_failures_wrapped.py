"""What stands behind an exception that only reports the end of something else (CPython 3.11, torch 2.13)."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_elastic.failures.ranking import FailureClass
from tests.rigs.described import described

CHILD = """\
Traceback (most recent call last):
  File "/home/ann/child.py", line 2, in <module>
    raise ValueError("tokenizer: bad merge table")
ValueError: tokenizer: bad merge table
"""
PARENT = """\
[rank1]: Traceback (most recent call last):
[rank1]:   File "/home/ann/train.py", line 11, in <module>
[rank1]:     subprocess.run(command, check=True)
[rank1]:   File "/usr/lib/python3.11/subprocess.py", line 571, in run
[rank1]:     raise CalledProcessError(retcode, process.args,
[rank1]: subprocess.CalledProcessError: Command '['prepare']' returned non-zero exit status 1.
"""
LAUNCHER = """\
E1123 01:09:06.237000 14890 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1) local_rank: 1
Traceback (most recent call last):
  File "<frozen runpy>", line 198, in _run_module_as_main
  File "/venv/lib/python3.11/site-packages/torch/distributed/launcher/api.py", line 383, in launch_agent
    raise ChildFailedError(
torch.distributed.elastic.multiprocessing.errors.ChildFailedError: 
============================================================
child.py FAILED
------------------------------------------------------------
Failures:
  <NO_OTHER_FAILURES>
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-23_01:09:06
  rank      : 1 (local_rank: 1)
  exitcode  : 1 (pid: 14973)
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
============================================================
"""  # noqa: W291
HIDING = """\
Traceback (most recent call last):
  File "/home/ann/train.py", line 7, in <module>
    raise RuntimeError('training step failed') from None
RuntimeError: training step failed
"""


@pytest.mark.parametrize("between", ["", LAUNCHER], ids=["child", "launcher"])
def test_a_childs_exception_stands_first(tmp_path: Path, between: str) -> None:
    failure = described(tmp_path, CHILD + between + PARENT)
    assert failure.headline.startswith("ValueError: tokenizer: bad merge table (subprocess.CalledProcessError: Command")
    assert failure.exception_type == "ValueError"
    full = described(tmp_path, f"tar: /scratch/x: Cannot write: No space left on device\n{PARENT}")
    assert full.failure_class is FailureClass.INFRASTRUCTURE


IN_RUN = CHILD.replace("<module>", "run")
SPECIFIC = HIDING.replace("raise RuntimeError('training step failed') from None", "rate = config['lr']").replace(
    "RuntimeError: training step failed", "KeyError: 'lr'"
)
EMPTY = HIDING.replace("RuntimeError: training step failed", "_queue.Empty")
ENDED = HIDING.replace("step failed", "ended with 1")
BAD_TABLE = "(logged just before: ValueError: tokenizer: bad merge table)"
TASK = f"Task exception was never retrieved\nfuture: <Task finished name='Task-2'>\n{IN_RUN}"


@pytest.mark.parametrize(
    ("stderr", "headline"),
    [
        (
            f"rsync: x failed: No such file (2)\n{PARENT}",
            "rsync: x failed: No such file (2) (subprocess.CalledProcessE",
        ),
        (PARENT, "subprocess.CalledProcessError: Command"),
        # multiprocessing: the parent looks at the child's exit code alone.
        (f"Process ForkProcess-1:\n{IN_RUN}{HIDING}", f"RuntimeError: training step failed {BAD_TABLE}"),
        (f"Process ForkProcess-1:\n{IN_RUN}{SPECIFIC}", "KeyError: 'lr'"),
        (f"Process Crop-1:\n{CHILD}{ENDED}", f"RuntimeError: training ended with 1 {BAD_TABLE}"),
        (f"Exception in thread prefetch:\n{IN_RUN}{EMPTY}", f"_queue.Empty {BAD_TABLE}"),
        (HIDING + TASK, "RuntimeError: training step failed"),
    ],
    ids=["program", "parent", "multiprocessing", "specific", "exit-code", "thread", "task"],
)
def test_what_another_process_or_thread_printed_stands_beside_a_general_exception(
    tmp_path: Path, stderr: str, headline: str
) -> None:
    found = described(tmp_path, stderr).headline
    assert found.startswith(headline) if "subprocess" in headline else found == headline


def test_a_line_that_a_script_hides_behind_its_own_exception(tmp_path: Path) -> None:
    memory = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
    failure = described(tmp_path, f"{memory}\n{HIDING}")
    assert failure.headline == f"RuntimeError: training step failed (logged just before: {memory})"
    assert failure.reason == "the GPU's memory is full"
    closed = "[E1122 10:00:00.1 pair.cc:553] Connection closed by peer"
    assert described(tmp_path, f"{closed}\n{HIDING}").failure_class is FailureClass.SYMPTOM
    far = f"{memory}\n" + "".join(f"line {n} of something else\n" for n in range(20))
    assert described(tmp_path, far + HIDING).headline == "RuntimeError: training step failed"


def test_what_fails_after_a_lost_connection_that_was_logged_is_a_symptom_too(tmp_path: Path) -> None:
    lost = """\
ERROR:root:sync failed
Traceback (most recent call last):
  File "/home/ann/train.py", line 5, in sync
    dist.all_reduce(x)
  File "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 3000, in all_reduce
    work.wait()
RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4711
"""
    cleanup = HIDING.replace("RuntimeError: training step failed", "FileNotFoundError: [Errno 2] … 'emergency.pt'")
    failure = described(tmp_path, lost + cleanup)
    assert failure.failure_class is FailureClass.SYMPTOM
    assert failure.headline.startswith("FileNotFoundError")
    between = "".join(f"reconnected, step {n}\n" for n in range(9))
    assert described(tmp_path, lost + between + cleanup).failure_class is FailureClass.ROOT


def test_the_output_of_a_child_whose_end_another_exception_reports(tmp_path: Path) -> None:
    """torch's cpp_extension, with what ninja printed."""
    said = "/home/ann/rope.cpp:7:12: error: 'x' is not a member of 'torch'\nninja: build stopped: subcommand failed.\n"
    chained = PARENT.replace("[rank1]: ", "") + (
        "\nThe above exception was the direct cause of the following exception:\n\n"
        'Traceback (most recent call last):\n  File "/home/ann/train.py", line 3, in <module>\n    load("rope")\n'
        '  File "/v/lib/python3.11/site-packages/torch/utils/cpp_extension.py", line 9, in _run\n'
        "    raise RuntimeError(message) from e\nRuntimeError: Error building extension 'rope'\n"
    )
    failure = described(tmp_path, said + chained)
    assert failure.headline.startswith("RuntimeError: Error building extension 'rope' (/home/ann/rope.cpp:7:12: error")


SPAWNED = """\
Traceback (most recent call last):
  File "/home/ann/train.py", line 12, in <module>
    mp.spawn(main_worker, nprocs=2)
  File "/v/lib/python3.11/site-packages/torch/multiprocessing/spawn.py", line 212, in join
    raise ProcessRaisedException(msg, error_index, failed_process.pid)
torch.multiprocessing.spawn.ProcessRaisedException: 

-- Process 1 terminated with the following error:
Traceback (most recent call last):
  File "/home/ann/train.py", line 5, in main_worker
    dist.all_reduce(x)
  File "/v/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 9, in all_reduce
    work.wait()
RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:4711

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "/v/lib/python3.11/site-packages/torch/multiprocessing/spawn.py", line 90, in _wrap
    fn(i, *args)
  File "/home/ann/train.py", line 9, in main_worker
    raise RuntimeError("no gradients") from error
RuntimeError: no gradients
"""  # noqa: W291


def test_a_traceback_right_below_an_exception_is_its_message(tmp_path: Path) -> None:
    failure = described(tmp_path, SPAWNED)
    assert failure.exception_type.endswith("ProcessRaisedException")
    assert failure.headline.endswith("terminated with the following error: RuntimeError: no gradients")
    assert failure.failure_class is FailureClass.SYMPTOM
    own = SPAWNED.replace("RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:4711", "ValueError: x")
    assert described(tmp_path, own).failure_class is FailureClass.ROOT


NCCL = """\
Traceback (most recent call last):
  File "/home/ann/train.py", line 7, in <module>
    dist.all_reduce(x)
  File "/v/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 9, in all_reduce
    work = group.allreduce([tensor], opts)
torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:77, unhandled system error
ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.
"""
LOGGED = f"WARNING:root:trying again\n{CHILD.replace('<module>', 'run')}"
BARE = HIDING.replace("raise RuntimeError('training step failed') from None", "assert done").replace(
    "RuntimeError: training step failed", "AssertionError"
)
IN_KERNEL = "Loss.cu:89: nll_loss: block: [5,0,0], thread: [2,0,0] Assertion `t < n_classes` failed."
MEMLOCK = "n1:4711:4800 [0] NCCL WARN Call to ibv_reg_mr failed with error Cannot allocate memory [12]"


@pytest.mark.parametrize(
    ("before", "exception", "also", "is_of_logged"),
    [
        (LOGGED, BARE, "ValueError: tokenizer", True),
        (LOGGED, BARE.replace("AssertionError", "Stop: epoch 3"), "ValueError: tokenizer", True),
        (LOGGED + "".join(f"step {n}\n" for n in range(4)), BARE, "", False),
        (IN_KERNEL + "\n", HIDING, "`t < n_classes`", True),
        (IN_KERNEL + "\n", NCCL.replace("unhandled system", "device-side assert triggered"), "`t < n_classes`", False),
        (MEMLOCK + "\n", NCCL, "ibv_reg_mr", False),
    ],
    ids=["bare", "own-type", "progress", "kernel", "kernel-and-its-exception", "nccl"],
)
def test_what_was_logged_just_before(
    tmp_path: Path, before: str, exception: str, also: str, is_of_logged: bool
) -> None:
    failure = described(tmp_path, before + exception)
    assert failure.headline.startswith(exception.rsplit("\n    ")[-1].split("\n")[1].split(",")[0])
    assert (also in failure.headline, failure.is_of_logged) == (True, is_of_logged)
    assert failure.failure_class is not FailureClass.SYMPTOM
