"""Wall clocks that are wrong: of one node's agents, from the next one on."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

_FOLDER = Path(__file__).parents[1] / "node_clocks"


def set_clock(stage: Path, node: int, offset: float) -> None:
    """What the node's next agent will take for the time: `offset` seconds from the truth."""
    temporary = stage / f".clock-{node}"
    temporary.write_text(str(offset))
    os.rename(temporary, stage / f"clock-{node}")


def with_clock(environ: Mapping[str, str], stage: Path, node: int) -> dict[str, str]:
    """`environ` for a process of `node`'s."""
    try:
        offset = float((stage / f"clock-{node}").read_text())
    except FileNotFoundError:
        offset = 0.0
    path = f"{_FOLDER}:{environ.get('PYTHONPATH', '')}".rstrip(":")
    return {**environ, "PYTHONPATH": path, "TEST_CLOCK_OFFSET": f"{offset:g}"}
