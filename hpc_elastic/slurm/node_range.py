"""How many nodes: ``4``, ``2-4`` as in sbatch, ``2:4`` as in torchrun."""

from __future__ import annotations

import re

from hpc_elastic.errors import UsageError

MAX_NODES = 1 << 17
_RANGE = re.compile(r"(\d{1,9})(?:[-:](\d{1,9}))?\Z", re.ASCII)


def parse_nodes(text: str, *, option: str = "--nodes") -> tuple[int, int]:
    """The least and the most nodes.

    Raises:
        UsageError: with one line that names the value and what would be right.
    """
    match = _RANGE.match(text)
    if match is None:
        raise UsageError(f"{option} {text}: not a number of nodes; give one as in 4, or a range as in 2-4 or 2:4")
    least = int(match.group(1))
    most = int(match.group(2) or least)
    if least < 1 or most < 1:
        raise UsageError(f"{option} {text}: a run needs at least 1 node")
    if most < least:
        raise UsageError(f"{option} {text}: the least is above the most; write {option} {most}-{least}")
    if most > MAX_NODES:
        raise UsageError(f"{option} {text}: at most {MAX_NODES} nodes")
    return least, most
