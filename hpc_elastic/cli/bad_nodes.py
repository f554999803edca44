"""``list --bad-nodes`` and ``--forget-nodes``: what this account remembers of nodes, and that it forgets it."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from hpc_elastic.cli.screen import print_note
from hpc_elastic.errors import UsageError
from hpc_elastic.output.terminal import one_line
from hpc_elastic.run.index import account_folder
from hpc_elastic.run.node_records import account_evidence, forget, forget_in
from hpc_elastic.run.node_score import NodeScore, score_nodes
from hpc_elastic.slurm.notation import HostlistError, expand


def add_forget_argument(parser: argparse.ArgumentParser, whose: str) -> None:
    """``--forget-nodes``."""
    parser.add_argument(
        "--forget-nodes", metavar="NODES|all", help=f"forget what {whose} remembers of bad nodes (--bad-nodes)"
    )


def show_account(env: Mapping[str, str] | None = None, *, now_ns: int | None = None) -> int:
    """Print the nodes that something counts against, the worst first. Returns 0."""
    env = os.environ if env is None else env
    scores = score_nodes(account_evidence(env), now_ns=time.time_ns() if now_ns is None else now_ns)
    for score in scores:
        sys.stdout.write(one_line(_line(score)) + "\n")
    if not scores:
        print_note(f"nothing is known against any node (in {account_folder('nodes', env)})")
    return 0


def _line(score: NodeScore) -> str:
    until = time.strftime("%Y-%m-%d %H:%M", time.localtime(score.until_ns / 1e9))
    word = "bad" if score.is_bad else "fair"
    return f"{score.node:<12}  {word:<4}  {score.score:4.2f}  until {until}  {score.why}"


def forget_account(text: str, env: Mapping[str, str] | None = None) -> int:
    """Forget what the account remembers. Returns 0. Raises UsageError."""
    return _print_count(forget(os.environ if env is None else env, _nodes(text)))


def forget_run(text: str, path: Path) -> int:
    """Forget what a run's nodes.json remembers. Returns 0. Raises UsageError."""
    return _print_count(forget_in(path, _nodes(text)))


def _nodes(text: str) -> tuple[str, ...] | None:
    if text == "all":
        return None
    try:
        nodes = expand(text)
    except HostlistError as error:
        raise UsageError(f"--forget-nodes {text}: give nodes, as in n3,n[5-7], or all: {error.why}") from None
    if not nodes:
        raise UsageError("--forget-nodes: give nodes, as in n3,n[5-7], or all")
    return nodes


def _print_count(count: int) -> int:
    sys.stdout.write(f"{count} thing{'' if count == 1 else 's'} forgotten\n")
    return 0
