"""argparse for the subcommands without a script of the user's behind them: an error is a UsageError, one line."""

from __future__ import annotations

import argparse
from typing import NoReturn

from hpc_elastic.errors import UsageError


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")


def argument_parser(program: str, description: str) -> argparse.ArgumentParser:
    return _Parser(prog=program, description=description, allow_abbrev=False)
