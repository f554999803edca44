"""Nodes that can't run the agent: what was started there ended before it was one. Pure.

An agent announces itself in the store before all else. What ends without having done so was never an agent: there is no
interpreter (exit code 127), it can't be executed (126), the run directory is not mounted (2, and the agent says so), or
Slurm's TaskProlog failed.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from hpc_elastic.launch.local_launcher import describe_code
from hpc_elastic.node_score import is_everywhere
from hpc_elastic.outcome import ExitCode

NOT_EXECUTABLE = 126
NOT_FOUND = 127
_LASTING = (ExitCode.USAGE, NOT_EXECUTABLE, NOT_FOUND)
_PROLOG = "TaskProlog failed"
"""slurmstepd's words (20.11 to 26.05); the exit code is the program's own."""
_OWN_PREFIX = "hpc-elastic: error: "
_NAMED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class UnableNode:
    """A node that can't run the agent."""

    name: str
    code: int | None
    """As `subprocess` has it; None where nobody knows."""
    detail: str
    """How the start ended, in srun's words."""
    message: str = ""
    """The last line that was printed there; empty where none was seen."""

    @property
    def reason(self) -> str:
        """``exit code 127: /usr/bin/env: 'python': No such file or directory``."""
        how = describe_code(self.code) if self.code else self.detail
        message = self.message.removeprefix(_OWN_PREFIX)
        return f"{how}: {message}" if message else how


def is_usage_error(code: int | None) -> bool:
    """Whether an agent ended with the code for wrong usage: it said why, and would say it again."""
    return code == ExitCode.USAGE


def is_same_everywhere(unable: Collection[UnableNode], *, nodes: int) -> bool:
    """Whether the nodes failed alike, by something that lasts: another attempt would end the same way.

    One node that fails shows nothing of the others, but where its agent itself says that the run is not usable.

    Args:
        unable: The nodes that could not run the agent.
        nodes: How many the attempt has.
    """
    codes = {node.code for node in unable}
    if len(unable) == nodes == 1:
        return codes == {ExitCode.USAGE}
    if not is_everywhere(len(unable), nodes=nodes) or len(codes) != 1:
        return False
    return codes <= set(_LASTING) or all(_PROLOG in node.message for node in unable)


def describe_unable_nodes(unable: Collection[UnableNode], *, nodes: int) -> str:
    """Which nodes could not run the agent, and why. Empty where there are none."""
    if not unable:
        return ""
    first = next(iter(unable))
    if is_everywhere(len(unable), nodes=nodes):
        whose = "no node" if len(unable) == nodes else "no node but the batch host"
        return f"{whose} could run the agent: {first.name}: {first.reason}"
    parts = [f"{node.name} could not run the agent: {node.reason}" for node in unable]
    more = f"; {len(parts) - _NAMED} more nodes could not either" if len(parts) > _NAMED else ""
    return "; ".join(parts[:_NAMED]) + more
