"""``hpc-elastic agent``: one node's agent."""

from __future__ import annotations

from collections.abc import Sequence

_OF_LAUNCHERS = ("--run-dir", "--attempt", "--node", "--launcher-pid")


def main(argv: Sequence[str]) -> int:
    """Run this node's agent to the end of the attempt: as a launcher of ours calls it, or as a user's srun does."""
    if not (argv and argv[0].partition("=")[0] in _OF_LAUNCHERS):
        from hpc_elastic.cli import step_agent

        return step_agent.main(argv)
    from hpc_elastic.agent.main import agent_main

    return agent_main(list(argv))
