"""A case of the calibration catalogue: a script as users write it, how it fails, and what is right to report of it.

The expectation is written before the case is run for the first time. It changes only where it was a mistake, and the
case's comment says so.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.rigs.local_run import LocalRun

FOLDER = Path(__file__).resolve().parent

ENVIRON = """\
import os, sys, time
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
local_rank = int(os.environ["LOCAL_RANK"])
"""
"""A script's beginning: the variables that every launcher gives. It needs no torch."""

TORCH = (
    ENVIRON
    + """\
from datetime import timedelta
import torch
import torch.distributed as dist
"""
)
"""A script's beginning that imports torch and makes no process group."""

GLOO = (
    TORCH
    + """\
dist.init_process_group("gloo", timeout=timedelta(seconds=120))
dist.barrier()
"""
)
"""A script's beginning: all ranks have met, so that no rank fails while others still start.

For a short timeout a script makes a group of its own: on a busy machine the ranks come here many seconds apart."""

MEET = """\
def meet(name):
    open(f"{name}-{rank}", "w").close()
    while not all(os.path.exists(f"{name}-{other}") for other in range(world)):
        time.sleep(0.02)
meet("here")
"""
"""For scripts without torch, after `ENVIRON`: the ranks meet by files in the working directory."""


@dataclass(frozen=True, slots=True)
class Case:
    """One failure. The script runs in a folder of its own, as ``train.py``, on nodes named node0, node1 …"""

    name: str
    group: str
    """The class of failures in the table."""
    script: str
    """The whole of train.py."""
    ranks: tuple[int, ...]
    """Global ranks that are right to name; empty: only `node` is. Where that is None too, no rank is at fault: a
    report may name one for its text (`says`), and must suspect none."""
    says: tuple[str, ...] = ()
    """One of these stands in the headline or in what is shown of the root cause; letter case does not count. Empty: no
    exception has the cause, and a rank is right to suspect but not for what a victim reports."""
    options: Sequence[str] = ()
    """Further ones of ``hpc-elastic run``."""
    arguments: Sequence[str] = ()
    """Of the script."""
    command: Sequence[str] | None = None
    """What is started in place of ``train.py``, as in ``["--no-python", "./wrapper.sh"]``."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Further files in the folder: name → text. What begins with ``#!`` can be executed."""
    environ: Mapping[str, str] = field(default_factory=dict)
    tmpfs: Mapping[str, str] = field(default_factory=dict)
    """Small filesystems that are mounted in the folder: name → size, as in ``{"scratch": "1m"}``."""
    nodes: int = 2
    nproc: int = 2
    seconds: float = 150.0
    """The run is killed after this time, and counts as wrong."""
    act: Callable[[LocalRun], None] | None = None
    """What happens from outside while the run lives (see `pid_of`)."""
    unknown_is_right: bool = False
    """An honest report states "not known", with one of `ranks` as the suspect."""
    node: str | None = None
    """The host that is right to name, where the cause is a node and no single rank."""
    not_says: tuple[str, ...] = ()
    """None of these stands in the headline."""
    category: str | None = None
    """Of the verdict; None: either."""
    retryable: bool | None = None
    """Of the verdict; None: either."""
    succeeds: bool = False
    """The run goes on after the failure, and succeeds; its report is on what it survived."""


def pid_of(run: LocalRun, rank: int, *, name: str = "pid") -> int:
    """For `Case.act`: wait until a rank has written its pid to ``<name>-<rank>`` in the working directory."""
    path = run.folder / f"{name}-{rank}"
    return int(run.until(lambda: path.exists() and path.read_text().strip(), f"file {path.name}"))


def wait_file(run: LocalRun, name: str) -> Path:
    """For `Case.act`: wait until the script has written a file."""
    path = run.folder / name
    run.until(path.exists, f"file {name}")
    return path


def all_cases() -> tuple[Case, ...]:
    """The cases of all ``cases_*.py``, by group and in the order in which they stand there.

    Raises:
        ValueError: Two cases have one name.
    """
    cases: list[Case] = []
    for path in sorted(FOLDER.glob("cases_*.py")):
        cases += importlib.import_module(f"tests.verdicts.{path.stem}").CASES
    names = [case.name for case in cases]
    if double := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"cases of the same name: {', '.join(double)}")
    return tuple(cases)
