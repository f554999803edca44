"""Nodes that the run has lost and Slurm has not: each may be back, with nobody to start an agent there.

srun tells of an agent's end only while it hears of the node. One that lost its power and was back before Slurm missed
it (SlurmdTimeout: 300 s by default) is in the job as before, idle, and srun waits for it for ever (seen on 20.11 to
26.05). So an agent is started there on trial; where the node is dead that fails, in a step of its own, and is tried
again later.

Nodes that can't run the agent: what was started there ended before it was one. Pure.

An agent announces itself in the store before all else. What ends without having done so was never an agent: there is no
interpreter (exit code 127), it can't be executed (126), the run directory is not mounted (2, and the agent says so), or
Slurm's TaskProlog failed.
"""

from __future__ import annotations

from collections.abc import Collection

from msgspec import Struct

from hpc_elastic.base.outcome import ExitCode
from hpc_elastic.launch.local_launcher import describe_code
from hpc_elastic.run.node_score import is_everywhere

FIRST_TRIAL = 3.0
"""Seconds after the loss. Whoever was only held up has come back by itself by then."""
LONGEST_PAUSE = 120.0
"""Between two trials: the pauses double up to that."""
MAX_TRIALS = 8
"""Some ten minutes: a site's SlurmdTimeout, and a slow reboot."""


class _Lost(Struct, kw_only=True):
    """One lost node."""

    at: float | None
    """When to start the next agent there on trial; None: one is on its way, or runs."""
    trials: int = 0


class LostNodes:
    """When to try which node. Times are of one monotonic clock."""

    def __init__(self) -> None:
        self._lost: dict[int, _Lost] = {}

    def see(self, lost: Collection[int], *, now: float) -> None:
        """Take in which nodes are lost by now; one that is not any more begins anew when it is lost again."""
        self._lost = {node: state for node, state in self._lost.items() if node in lost}
        for node in lost:
            self._lost.setdefault(node, _Lost(at=now + FIRST_TRIAL))

    def forget(self, node: int) -> None:
        """It is given up."""
        self._lost.pop(node, None)

    def due(self, now: float) -> list[int]:
        """The nodes on which an agent is to be started now; each is named once."""
        found = sorted(node for node, state in self._lost.items() if state.at is not None and state.at <= now)
        for node in found:
            self._lost[node].at = None
            self._lost[node].trials += 1
        return found

    def next_at(self) -> float | None:
        """When `due` has something; None: never."""
        return min((state.at for state in self._lost.values() if state.at is not None), default=None)

    def is_on_trial(self, node: int) -> bool:
        """Whether an agent was started there that has neither come nor failed."""
        return node in self._lost and self._lost[node].at is None

    def failed(self, node: int, *, now: float) -> float | None:
        """No agent could be started there.

        Returns:
            Seconds until the next trial; None where that was the last.
        """
        state = self._lost[node]
        if state.trials >= MAX_TRIALS:
            return None
        pause = min(LONGEST_PAUSE, FIRST_TRIAL * 2.0**state.trials)
        state.at = now + pause
        return pause


NOT_EXECUTABLE = 126
NOT_FOUND = 127
_LASTING = (ExitCode.USAGE, NOT_EXECUTABLE, NOT_FOUND)
_PROLOG = "TaskProlog failed"
"""slurmstepd's words (20.11 to 26.05); the exit code is the program's own."""
_OWN_PREFIX = "hpc-elastic: error: "
_NAMED = 4


class UnableNode(Struct, frozen=True, kw_only=True):
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
