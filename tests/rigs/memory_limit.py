"""A memory cgroup around a local run: the kernel's own OOM killer strikes in it, as in a job's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.rigs.local_run import LocalRun
from tests.rigs.requirements import require


@contextmanager
def memory_limit(size: int, run: LocalRun) -> Iterator[None]:
    """Start `run` in a memory cgroup of `size` bytes; it has ended when this is left.

    Where no cgroup can be made: skips the test, or fails it in CI.
    """
    cgroup: Path | None = None
    problem = "no cgroup v1 memory controller"
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            cgroup = Path("/sys/fs/cgroup/memory") / path.lstrip("/") / f"hpc-elastic-{run.mark}"
    if cgroup is not None:
        try:
            cgroup.mkdir()
            (cgroup / "memory.limit_in_bytes").write_text(str(size))
        except OSError as error:
            problem, cgroup = str(error), None
    require("a memory cgroup", "" if cgroup else problem)
    assert cgroup is not None
    try:
        (cgroup / "cgroup.procs").write_text(str(os.getpid()))  # what is started from here on is in it
        run.__enter__()
        (cgroup.parent / "cgroup.procs").write_text(str(os.getpid()))
        try:
            yield
        finally:
            run.__exit__(None, None, None)
    finally:
        (cgroup.parent / "cgroup.procs").write_text(str(os.getpid()))
        cgroup.rmdir()
