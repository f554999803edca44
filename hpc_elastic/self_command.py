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
    parent = str(Path(hpc_elastic.__file__).resolve().parent.parent)
    boot = f"import sys; sys.path[0] = {parent!r}; from hpc_elastic.cli.main import console_main; console_main()"
    return [sys.executable, "-c", boot, *arguments]
