"""Memory: allocations that no machine has, limits, and what hides them."""

from __future__ import annotations

from tests.verdicts.case import ENVIRON, GLOO, MEET, TORCH, Case

GROUP = "memory"
_LIMIT = "import resource\n"

CASES = (
    Case(
        "layer-of-64-terabytes",
        GROUP,
        GLOO
        + """\
hidden = 4_000_000 if rank == 1 else 4
torch.nn.Linear(hidden, hidden)
dist.all_reduce(torch.ones(2))
time.sleep(60)
""",
        ranks=(1,),
        says=("can't allocate memory: you tried to allocate 64000000000000 bytes",),
        category="worker",
    ),
    Case(
        "numpy-array-of-petabytes",
        GROUP,
        ENVIRON
        + """\
import numpy
"""
        + MEET
        + """\
if rank == 3:
    numpy.zeros((50_000_000, 50_000_000), dtype="float32")
time.sleep(60)
""",
        ranks=(3,),
        says=("Unable to allocate",),
        category="worker",
    ),
    Case(
        "memory-error-under-a-limit",
        GROUP,
        ENVIRON
        + _LIMIT
        + MEET
        + """\
if rank == 0:
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
    cache = [bytearray(1 << 26) for sample in range(64)]
time.sleep(60)
""",
        ranks=(0,),
        says=("MemoryError",),
    ),
    Case(
        "torch-under-a-limit",
        GROUP,
        GLOO
        + _LIMIT
        + """\
if rank == 2:
    used = int(open("/proc/self/statm").read().split()[0]) * 4096
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 28), used + (1 << 28)))
    activations = [torch.zeros(1 << 24) for layer in range(16)]
dist.all_reduce(torch.ones(2))
time.sleep(60)
""",
        ranks=(2,),
        says=("can't allocate memory",),
    ),
    Case(
        # Mistaken at first: torch 2.13 does not print the dimension any more.
        "negative-dimension",
        GROUP,
        TORCH
        + MEET
        + """\
if rank == 2:
    torch.zeros(1024 - 2048 * rank // 2, 8)
time.sleep(60)
""",
        ranks=(2,),
        says=("negative dimension -1024", "Dimension size must be non-negative"),
    ),
    Case(
        "no-thread-can-be-started",
        GROUP,
        ENVIRON
        + _LIMIT
        + """\
import threading
"""
        + MEET
        + """\
if rank == 0:
    threading.stack_size(1 << 29)
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
    for number in range(8):
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
time.sleep(60)
""",
        ranks=(0,),
        says=("can't start new thread",),
    ),
    Case(
        "hidden-in-a-child",
        GROUP,
        ENVIRON
        + MEET
        + """\
import subprocess
child = "import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 29,) * 2); bytearray(1 << 32)"
if rank == 1 and subprocess.run([sys.executable, "-c", child]).returncode:
    raise RuntimeError("preprocessing failed")
time.sleep(60)
""",
        ranks=(1,),
        says=("MemoryError",),
    ),
    Case(
        # Mistaken at first, a category: the message has no number, so that no reader can know it for a bug.
        "map-of-64-terabytes",
        GROUP,
        ENVIRON
        + MEET
        + """\
import mmap
if rank == 3:
    mmap.mmap(-1, 1 << 46)
time.sleep(60)
""",
        ranks=(3,),
        says=("Cannot allocate memory",),
    ),
    Case(
        "bad-alloc",
        GROUP,
        ENVIRON
        + MEET
        + """\
import ctypes
if rank == 2:
    ctypes.CDLL("libstdc++.so.6")._ZSt17__throw_bad_allocv()
time.sleep(60)
""",
        ranks=(2,),
        says=("std::bad_alloc",),
    ),
    Case(
        "endless-recursion",
        GROUP,
        ENVIRON
        + MEET
        + """\
class Node:
    def __init__(self, parent=None):
        self.parent = parent or self
    def depth(self):
        return 1 + self.parent.depth()
if rank == 0:
    Node().depth()
time.sleep(60)
""",
        ranks=(0,),
        says=("maximum recursion depth exceeded",),
    ),
)
