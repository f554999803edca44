"""``hpc-elastic agent``: one node's agent."""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Run this node's agent to the end of the attempt."""
    from hpc_elastic.agent.main import agent_main

    return agent_main(list(argv))
