"""What starts on every node must start at once: the command line and the agent import nothing heavy.

The only tests of this folder that start a process: what an interpreter imports can be seen in a fresh one alone.
"""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

HEAVY = {
    "torch",
    "jinja2",
    "filelock",
    "submitit",
    "numpy",
    "scipy",
    "asyncio",
    "multiprocessing",
    "http",
    "logging.config",
}
DEAR_TO_AGENTS = {"hashlib", "_hashlib", "hmac", "secrets", "ssl"}
DEAR_TO_AGENTS |= {"click", "tempfile", "shutil", "base64", "concurrent.futures", "dataclasses", "psutil", "filelock"}
TORCH_FREE = ("cli", "launch", "agent", "rendezvous", "workers", "output", "report", "store", "slurm", "failures")
TORCH_FREE += ("options", "run", "base")


def imported_by(*arguments: str) -> set[str]:
    """The modules that an interpreter with these arguments imports."""
    result = subprocess.run(
        [sys.executable, "-X", "importtime", *arguments], capture_output=True, text=True, check=True
    )
    return {line.rsplit("|", 1)[1].strip() for line in result.stderr.splitlines() if line.startswith("import time:")}


@pytest.mark.parametrize("argv", [("--help",), ("submit", "--help")])
def test_help_imports_nothing_heavy(argv: tuple[str, ...]) -> None:
    """Nor what submits a job: that was half of what ``submit --help`` took."""
    names = imported_by("-m", "hpc_elastic", *argv)
    assert "hpc_elastic.cli.main" in names
    assert not names & HEAVY
    assert not [name for name in names if name.startswith(("hpc_elastic.launch", "hpc_elastic.slurm"))]


@pytest.mark.parametrize("package", TORCH_FREE)
def test_no_module_of_the_light_packages_imports_torch(package: str) -> None:
    # Not by -X importtime: it does not see what importlib.import_module imports.
    names = after(
        "import importlib, pkgutil\n"
        f"root = importlib.import_module('hpc_elastic.{package}')\n"
        "for module in pkgutil.walk_packages(root.__path__, root.__name__ + '.'):\n"
        "    if not module.name.endswith('__main__'): importlib.import_module(module.name)"
    )
    assert f"hpc_elastic.{package}" in names
    assert not names & {"torch", "submitit", "numpy"}


def test_submitit_and_cloudpickle_are_imported_by_who_submits_alone() -> None:
    code = (
        "import hpc_elastic, hpc_elastic.submission, hpc_elastic.launch, hpc_elastic.cli.main\n"
        "import hpc_elastic.submission.worker"  # as each worker of a function does
    )
    loaded = after(code)
    assert "hpc_elastic.submission.worker" in loaded
    assert not loaded & {"submitit", "torch", "numpy", "cloudpickle"}


def after(code: str) -> set[str]:
    """The modules that are loaded when a fresh interpreter has run `code`."""
    script = f"{code}\nimport sys\nprint(*sys.modules, sep='\\n')"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(result.stdout.splitlines())


NOT_AN_AGENTS = ("hpc_elastic.report", "hpc_elastic.options.table", "tomllib")
"""Reports come later; what is configured comes with run.json, and is not read on every node anew."""
START = "import hpc_elastic.cli.main, hpc_elastic.agent.main"
AGENT = (
    f"{START}\n"
    "from hpc_elastic.agent import part, rounds\n"
    "rounds.load()\n"
    "for name, _, is_needed in part.PARTS:\n"
    "    if name not in ('fork_server', 'checkpoint_copies'): __import__(f'hpc_elastic.agent.{name}')\n"
)
"""All that is loaded when the first worker starts."""
MOST_AT_START = 90
"""Modules of ours that an agent imports before it asks to join; 160 with all that it may need."""


def test_an_agent_asks_to_join_before_it_imports_what_describes_failures() -> None:
    loaded = [name for name in after(START) if name.startswith("hpc_elastic") and ".cli" not in name]
    assert "hpc_elastic.agent.local_workers" not in loaded
    assert 40 < len(loaded) <= MOST_AT_START


def test_an_agent_starts_without_what_it_may_never_need() -> None:
    """OpenSSL alone is 4 MB: `base.codec` and `os.urandom` do as well."""
    loaded = after(AGENT)
    assert "hpc_elastic.agent.node_agent" in loaded
    assert not loaded & (HEAVY | DEAR_TO_AGENTS)
    assert not [name for name in loaded if name.startswith(NOT_AN_AGENTS)]


def test_what_an_agent_may_need_is_imported_at_its_start() -> None:
    """A mount that hangs must not keep it from reporting what failed, nor a newer version lie there by then: all is
    loaded before the first worker starts."""
    loaded = after(AGENT)
    missing = {}
    for name in sorted(after(AGENT)):
        if not name.startswith("hpc_elastic.") or name.startswith(NOT_AT_WORK):
            continue
        source = importlib.util.find_spec(name)
        assert source is not None
        assert source.origin is not None
        functions = [node for node in ast.walk(ast.parse(Path(source.origin).read_bytes())) if isinstance(node, DEF)]
        if left := {module for function in functions for module in imported_in(function)} - loaded - RARELY_NEEDED:
            missing[name] = left
    assert not missing


COMMAND = """
import gc, sys
from hpc_elastic.cli.main import console_main
sys.argv[1:] = {}
try: console_main()
except SystemExit: pass
"""


def test_the_command_takes_no_typing_extensions_for_msgspec() -> None:
    """It imports inspect and ast; an agent that finds no run directory has imported all that it needs to join."""
    loaded = after(COMMAND.format(["agent", "--run-dir", "/nowhere", "--attempt", "0"]))
    assert {"hpc_elastic.agent.main", "msgspec"} <= loaded
    assert not loaded & {"typing_extensions", "inspect"}


@pytest.mark.parametrize("arguments", [["config"], ["agent", "--run-dir", "/nowhere", "--attempt", "0"]])
def test_the_collector_looks_at_no_module_and_then_at_all_that_comes(arguments: list[str]) -> None:
    assert after(COMMAND.format(arguments) + "assert gc.isenabled() and gc.get_freeze_count() > 1000")


NOT_A_REPORTS = (
    "hpc_elastic.agent",
    "hpc_elastic.launch",
    "hpc_elastic.rendezvous",
    "hpc_elastic.slurm.client",
    "jinja2",
)


def test_a_report_imports_nothing_that_runs_a_run() -> None:
    """The agent, the coordinator and the launcher were a fifth of what a small run's report takes."""
    loaded = after("import hpc_elastic.cli.report, hpc_elastic.report.collect, hpc_elastic.report.document")
    assert "hpc_elastic.report.collect" in loaded
    assert not [name for name in loaded if name.startswith(NOT_A_REPORTS)]
    assert not loaded & (HEAVY | {"statistics", "fractions"})


@pytest.mark.parametrize("module", ["report", "preflight"])
def test_a_command_imports_what_it_is_asked_for(module: str) -> None:
    """Not what the other one of its module needs: that was half of ``hangs``, and ``--help`` needs neither."""
    loaded = after(f"import hpc_elastic.cli.{module}")
    assert f"hpc_elastic.cli.{module}" in loaded
    packages = ("hpc_elastic.report", "hpc_elastic.doctor", "hpc_elastic.rehearsal", "hpc_elastic.agent")
    assert not [name for name in loaded if name.startswith(packages)]


DEF = (ast.FunctionDef, ast.AsyncFunctionDef)
NOT_AT_WORK = ("hpc_elastic.cli",)
"""What they import in functions, agents need at their start, or never."""
RARELY_NEEDED = {
    "hpc_elastic.agent.numa_binding",
    "psutil",
    "base64",
    "concurrent.futures",
    "importlib.util",
    "traceback",
    "shutil",
}
"""For a run that asks for it, at an agent's start or after a hang; by the health check; for thousands of nodes; for
another Python than the agent's own; loaded by `logging`; the guardian's, for its very last duty."""


def imported_in(function: ast.AST) -> Iterator[str]:
    for node in ast.walk(function):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module


MOST_PATTERNS = 130
"""What an agent's start compiles: each takes 0.1 ms, as long as a module, and a large one milliseconds."""


def test_an_agents_start_compiles_few_patterns() -> None:
    compiler = "re._compiler" if sys.version_info >= (3, 11) else "sre_compile"
    code = f"import {compiler} as c; n = []; f = c.compile; c.compile = lambda *a: n.append(a) or f(*a)\n{AGENT}\n"
    printed = "print(len(n), max(len(pattern) for pattern, *_ in n if isinstance(pattern, str)))"
    result = subprocess.run([sys.executable, "-c", code + printed], capture_output=True, text=True, check=True)
    count, longest = map(int, result.stdout.split())
    assert 20 < count <= MOST_PATTERNS
    assert longest <= 500


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
