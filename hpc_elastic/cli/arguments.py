"""argparse for the subcommands without a script of the user's behind them: an error is a UsageError, one line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NoReturn

from hpc_elastic.errors import UsageError


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")


def with_dashes(argv: Sequence[str]) -> list[str]:
    """Long options with ``-`` where they were given with ``_``; what stands behind ``=`` or ``--`` is left alone."""
    end = argv.index("--") if "--" in argv else len(argv)
    found = list(argv)
    for index, word in enumerate(argv[:end]):
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            found[index] = name.replace("_", "-") + equals + value
    return found


def argument_parser(program: str, description: str) -> argparse.ArgumentParser:
    return _Parser(prog=program, description=description, allow_abbrev=False)
