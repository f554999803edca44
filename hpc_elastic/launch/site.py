"""What differs between a Slurm job and this machine, for one attempt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from hpc_elastic.attempt import AttemptInfo
from hpc_elastic.launch.launcher import Launcher
from hpc_elastic.launch.signal_table import SlurmAnswer
from hpc_elastic.run_paths import RunPaths
from hpc_elastic.run_spec import RunSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteFacts:
    """What the site says at an attempt's start."""

    cluster: str
    nodes: tuple[str, ...]
    job_id: str | None = None
    restart_count: int = 0
    requeue_armed: bool = False
    requeue_reason: str = ""
    kill_wait: float | None = None
    version: str = ""


class Site(Protocol):
    """Slurm's allocation, or this machine."""

    def facts(self, spec: RunSpec) -> SiteFacts:
        """Ask what an attempt's start needs to know."""
        ...

    def launcher(self, spec: RunSpec, paths: RunPaths, attempt: AttemptInfo) -> Launcher:
        """What starts the agents."""
        ...

    def ask(self, *, near: float) -> SlurmAnswer:
        """What Slurm says of the job, within seconds.

        Args:
            near: The time limit is near when it is so many seconds away.
        """
        ...

    def requeue(self) -> str:
        """Have the job run again.

        Returns:
            What was done, in words.

        Raises:
            HpcElasticError: it could not be; the message says why.
        """
        ...
