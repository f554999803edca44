"""Numbers against facts: what was asked for, and what there is. Texts of torch 2.13 and numpy 2.4."""

from __future__ import annotations

import pytest

from hpc_elastic.base.text import size_text
from hpc_elastic.failures.classify import asked_bytes, classify
from hpc_elastic.failures.failure_text import Frame, RaisedException
from hpc_elastic.failures.ranking import Category, FailureClass
from hpc_elastic.failures.worker_failure import WorkerFailure

GIB = 1 << 30
CPU = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "{count} bytes. Error code 12 (Cannot allocate memory)"
)
NUMPY = "Unable to allocate {size} for an array with shape (10000000000000,) and data type float64"
GPU = (
    "CUDA out of memory. Tried to allocate {size}. GPU 0 has a total capacity of 79.10 GiB of which 40.00 GiB is free."
)


def judged(
    kind: str, message: str, file: str = "/home/ann/train.py", *, node: int = 64 * GIB, overcommits: bool = False
) -> WorkerFailure:
    frames = (Frame(file=file, line=3, function="f"),)
    raised = RaisedException(exception_type=kind, message=message, frames=frames, source="x = make(n)")
    return classify(WorkerFailure(exitcode=1), chain=[raised], node_bytes=node, overcommits=overcommits)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("RuntimeError", CPU.format(count=40_000_000_000_000)),
        ("numpy._core._exceptions._ArrayMemoryError", NUMPY.format(size="72.8 TiB")),
        ("torch.OutOfMemoryError", GPU.format(size="372529.03 GiB")),
    ],
    ids=["torch", "numpy", "cuda"],
)
def test_more_than_there_is_at_all_is_a_bug(kind: str, message: str) -> None:
    found = judged(kind, message)
    assert (found.failure_class, found.category) == (FailureClass.ROOT, Category.WORKER)
    assert found.reason.startswith("one allocation of ")


def test_what_the_node_could_have_had_is_its_full_memory() -> None:
    assert judged("RuntimeError", CPU.format(count=4_000_000_000)).failure_class is FailureClass.INFRASTRUCTURE
    small = judged("numpy._core._exceptions._ArrayMemoryError", NUMPY.format(size="7.45 GiB"))
    assert small.reason == "the node's memory is full"
    assert judged("torch.OutOfMemoryError", GPU.format(size="2.00 GiB")).reason == "the GPU's memory is full"
    limited = judged("RuntimeError", CPU.format(count=4_000_000_000), overcommits=True)
    assert (limited.failure_class, limited.category) == (FailureClass.ROOT, Category.WORKER)
    assert "a limit of the process" in limited.reason
    unknown = judged("RuntimeError", CPU.format(count=40_000_000_000_000), node=0)
    assert unknown.failure_class is FailureClass.INFRASTRUCTURE


def test_shared_memory_that_is_too_small_is_no_full_disk() -> None:
    full = "[Errno 28] No space left on device"
    assert judged("OSError", full, "/usr/lib/python3.11/multiprocessing/synchronize.py").reason == "/dev/shm is full"
    assert judged("OSError", f"{full}: '/dev/shm/cache.bin'").reason == "/dev/shm is full"
    torch = "unable to allocate shared memory(shm) for file </torch_1_2_0>: No space left on device (28)"
    assert judged("RuntimeError", torch).reason == "/dev/shm is full"
    assert judged("OSError", f"{full}: '/scratch/x.pt'").reason == "a disk or a quota is full"


@pytest.mark.parametrize(
    "message",
    ["basic_ios::clear: iostream error", "[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598"],
)
def test_a_save_that_torch_could_not_write_is_infrastructure(message: str) -> None:
    found = judged("RuntimeError", message, "/venv/lib/python3.11/site-packages/torch/serialization.py")
    assert found.failure_class is FailureClass.INFRASTRUCTURE
    assert "could not be written" in found.reason


def test_sizes() -> None:
    assert asked_bytes("you tried to allocate 100 bytes.") == 100
    assert asked_bytes("Tried to allocate 20.00 MiB.") == 20 << 20
    assert asked_bytes("tried to allocate much") is None
    assert [size_text(n) for n in (5, 36 << 40, 1536)] == ["5 B", "36.0 TiB", "1.5 KiB"]
