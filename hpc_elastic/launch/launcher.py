"""How agents get onto nodes: the seam between the supervisor and Slurm, or this machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentEnded:
    """An agent is not there any more, or never came to be."""

    node: int
    """Node index."""
    code: int | None
    """As `subprocess` has it; None where nobody knows."""
    detail: str
    started: bool = True
    """False: it could not be started; the node may be dead."""
    gone: bool = False
    """Whether the site has given the node up: it never comes back into this job."""


class Launcher(Protocol):
    """Starts and ends agents. No method blocks for longer than it says."""

    @property
    def hears_all_ends(self) -> bool:
        """Whether `take` tells of every agent's end, however its node was lost."""
        ...

    def launch(self) -> None:
        """Start an agent on every node.

        Raises:
            HpcElasticError: nothing could be started at all.
        """
        ...

    def relaunch(self, node: int) -> None:
        """Start an agent on one node again, without disturbing the others."""
        ...

    def filenos(self) -> list[int]:
        """Descriptors that become readable when `take` may have something."""
        ...

    def due(self) -> float | None:
        """When `take` may have something that no descriptor tells of, on the monotonic clock; None: never."""
        ...

    def take(self) -> list[AgentEnded]:
        """What has ended since the last call."""
        ...

    def last_message(self, node: int) -> str:
        """The last line that the newest start on a node printed as an error; empty where that is not known.

        It may come a moment after the end that it explains.
        """
        ...

    def running(self) -> bool:
        """Whether some agent may still run."""
        ...

    def terminate(self) -> None:
        """SIGTERM to all agents; a repeated call does it again."""
        ...

    def end(self, *, within: float) -> None:
        """Leave nothing of ours behind: SIGTERM, and SIGKILL after `within` seconds."""
        ...
