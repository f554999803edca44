"""Nodes that the run has lost and Slurm has not: each may be back, with nobody to start an agent there.

srun tells of an agent's end only while it hears of the node. One that lost its power and was back before Slurm missed
it (SlurmdTimeout: 300 s by default) is in the job as before, idle, and srun waits for it for ever (seen on 20.11 to
26.05). So an agent is started there on trial; where the node is dead that fails, in a step of its own, and is tried
again later.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

FIRST_TRIAL = 3.0
"""Seconds after the loss. Whoever was only held up has come back by itself by then."""
LONGEST_PAUSE = 120.0
"""Between two trials: the pauses double up to that."""
MAX_TRIALS = 8
"""Some ten minutes: a site's SlurmdTimeout, and a slow reboot."""


@dataclass(slots=True, kw_only=True)
class _Lost:
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
