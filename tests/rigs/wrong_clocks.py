"""Local runs whose nodes have clocks of their own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
_FOLDER = Path(__file__).with_name("node_clocks")


def node_clocks(clocks: Mapping[int, tuple[float, float]]) -> dict[str, str]:
    """What to put into the run's environment.

    Args:
        clocks: Node → seconds by which its wall clock, and its time since the boot, are ahead of this machine's.
    """
    return {
        "PYTHONPATH": f"{_FOLDER}:{_ROOT}",
        "TEST_NODE_CLOCKS": json.dumps({str(node): shifts for node, shifts in clocks.items()}),
    }
