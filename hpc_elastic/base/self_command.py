"""Commands by which one process of ours starts another Python: never with the working directory first on its path.

``python -c`` and ``python -m`` put it there, and a ``json.py`` in it would be imported in place of Python's: from
Python 3.13 on ``-c`` imports ``linecache`` before the first statement. A test finds other ways of starting one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import hpc_elastic

_SAFE_PATH = ("-P",) if sys.version_info >= (3, 11) else ()


def own_command(*arguments: str) -> list[str]:
    """The argument list that runs ``hpc-elastic ARGUMENTS`` with this interpreter and this very package."""
    return [*module_command("hpc_elastic.cli.main", "console_main"), *arguments]


def module_command(module: str, function: str) -> list[str]:
    """The same for a function of one of this package's modules, which takes no arguments."""
    parent = str(Path(hpc_elastic.__file__).resolve().parent.parent)
    path = f"[{parent!r}, *filter(None, sys.path)]"
    boot = f"import sys; sys.path[:] = {path}; from {module} import {function}; {function}()"
    return [sys.executable, *_SAFE_PATH, "-c", boot]


def worker_arguments(module: str) -> tuple[str, ...]:
    """Arguments of an interpreter that has this package, to run a module's ``main(arguments)`` in a worker.

    Like ``-m MODULE``; but modules of the working directory, which are found too, hide no others.
    """
    boot = f"import sys; sys.path.sort(key=lambda path: path == ''); from {module} import main; main(sys.argv[2:])"
    return "-u", "-c", boot, module


def source_command(python: str, source: str) -> list[str]:
    """The argument list that runs a text in any interpreter, from Python 3.6 on, with `source_environment`.

    Not by ``-P``, which came with 3.11, nor by ``-I``, which leaves out PYTHONPATH and the user's own packages.
    """
    return [python, "-c", f"import sys; sys.path[:] = filter(None, sys.path)\n{source}"]


def source_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    return {**environ, "PYTHONSAFEPATH": "1"}


def ask_interpreter(python: str, source: str, *, seconds: float) -> str | None:
    try:
        done = subprocess.run(
            source_command(python, source),
            env=source_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=seconds,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace")


def idle_arguments() -> tuple[str, ...]:
    """Arguments of an interpreter to import its ``sitecustomize``, and do nothing then."""
    return "-u", "-c", "pass"
