"""What starts on every node must start at once: the command line and the agent import nothing heavy.

The only tests of this folder that start a process: what an interpreter imports can be seen in a fresh one alone.
"""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

HEAVY = {"torch", "submitit", "numpy", "scipy", "asyncio", "multiprocessing", "http", "logging.config"}
TORCH_FREE = ("cli", "launch", "agent", "rendezvous", "processes", "report", "store", "slurm", "failures")


def imported_by(*arguments: str) -> set[str]:
    """The modules that an interpreter with these arguments imports."""
    result = subprocess.run(
        [sys.executable, "-X", "importtime", *arguments], capture_output=True, text=True, check=True
    )
    return {line.rsplit("|", 1)[1].strip() for line in result.stderr.splitlines() if line.startswith("import time:")}


def test_help_imports_nothing_heavy() -> None:
    names = imported_by("-m", "hpc_elastic", "--help")
    assert "hpc_elastic.cli.main" in names
    assert not names & HEAVY


@pytest.mark.parametrize("package", TORCH_FREE)
def test_no_module_of_the_light_packages_imports_torch(package: str) -> None:
    # Not by -X importtime: it does not see what importlib.import_module imports.
    code = (
        "import importlib, pkgutil, sys\n"
        f"root = importlib.import_module('hpc_elastic.{package}')\n"
        "for module in pkgutil.walk_packages(root.__path__, root.__name__ + '.'):\n"
        "    if not module.name.endswith('__main__'): importlib.import_module(module.name)\n"
        "print(*sys.modules, sep='\\n')\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names = set(result.stdout.splitlines())
    assert f"hpc_elastic.{package}" in names
    assert not names & {"torch", "submitit", "numpy"}


def fastest(*arguments: str) -> float:
    """Seconds of the best of several runs: what the machine's other work adds is left out."""
    best = float("inf")
    for _ in range(7):
        started = time.perf_counter()
        subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True)
        best = min(best, time.perf_counter() - started)
    return best


def test_help_takes_at_most_ten_times_a_bare_interpreter() -> None:
    """150 ms where ``python -c pass`` takes 15."""
    assert fastest("-m", "hpc_elastic", "--help") <= 10 * fastest("-c", "pass")
