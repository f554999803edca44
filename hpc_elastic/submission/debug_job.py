"""``cluster="debug"``: the call in this process, when its result is asked for."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TypeVar

from submitit.core.utils import DelayedSubmission
from submitit.local.debug import DebugJob

R = TypeVar("R", covariant=True)


class ElasticDebugJob(DebugJob):  # type: ignore[misc]
    """submitit's own debug job, a world of one rank: what it raises comes out as it is, in a debugger first."""

    def __init__(self, folder: Path, submission: DelayedSubmission) -> None:
        super().__init__(folder, submission)
        self.environ.update(_world_of_one())

    def report(self) -> str:
        """There is none."""
        return ""


def _world_of_one() -> dict[str, str]:
    """What an agent would give the only worker, so that torch's ``env://`` works."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    zeros = dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK"), "0")
    ones = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"), "1")
    return {**zeros, **ones, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
