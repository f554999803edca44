"""What takes the workers' output, as far as an agent's other parts need it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from hpc_elastic.processes.log_losses import LossEpisode
from hpc_elastic.processes.spawn import WorkerProcess
from hpc_elastic.processes.std_streams import Std


class Pump(Protocol):
    """What is needed of `processes.logs.LogPump`."""

    def add(
        self, *, rank: int, worker: WorkerProcess, stdout: Path, stderr: Path, shown: Std
    ) -> Callable[[], bytes]: ...

    def drained(self, pid: int, timeout: float) -> bool: ...

    def take_losses(self) -> LossEpisode | None: ...
