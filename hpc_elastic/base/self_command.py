"""How one process of ours starts another."""

from __future__ import annotations

import sys
from pathlib import Path

import hpc_elastic


def own_command(*arguments: str) -> list[str]:
    """The argument list that runs ``hpc-elastic ARGUMENTS`` with this interpreter and this very package.

    Not ``python -m``: that puts the working directory first on the path, where a user's ``json.py`` would be imported
    in place of Python's.
    """
    return [*module_command("hpc_elastic.cli.main", "console_main"), *arguments]


def worker_arguments(module: str) -> tuple[str, ...]:
    """What an interpreter that has this package gets to run a module's ``main(arguments)`` in a worker.

    As ``-m MODULE``; but modules of the working directory, which are found too, hide no others.
    """
    boot = f"import sys; sys.path.sort(key=lambda path: path == ''); from {module} import main; main(sys.argv[2:])"
    return "-u", "-c", boot, module


def module_command(module: str, function: str) -> list[str]:
    """The same for a function of one of this package's modules, which takes no arguments."""
    parent = str(Path(hpc_elastic.__file__).resolve().parent.parent)
    boot = f"import sys; sys.path[0] = {parent!r}; from {module} import {function}; {function}()"
    return [sys.executable, "-c", boot]
