"""Hooks that say whether a rank may go on."""

from __future__ import annotations

import abc
import os
import threading
from datetime import timedelta

import torch

from hpc_elastic.inprocess.exception import RestartError, TimeoutError
from hpc_elastic.inprocess.state import State


class HealthCheck(abc.ABC):
    """Runs on every rank before the function (what it raises restarts all) and after a fault (then this rank ends)."""

    @abc.abstractmethod
    def __call__(self, state: State, train_ex: Exception | None = None) -> tuple[State, Exception | None]:
        """Args:
        state: This rank's.
        train_ex: What the function raised on this rank; None where the fault was elsewhere, and before the function.
        """
        raise NotImplementedError


class CudaHealthCheck(HealthCheck):
    """Waits for this rank's GPU: a context that an error has spoilt says so, one that hangs takes too long.

    The device is ``LOCAL_RANK``'s, or the current one. Nothing where this process has not used a GPU.
    """

    def __init__(self, timeout: timedelta = timedelta(seconds=30)) -> None:
        """Args:
        timeout: For all work that was queued on the GPU.
        """
        self.timeout = timeout

    def __call__(self, state: State, train_ex: Exception | None = None) -> tuple[State, Exception | None]:
        """Raises:
        TimeoutError: the GPU has not answered in time.
        RuntimeError: CUDA's error.
        """
        if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
            return state, train_ex
        local_rank = os.environ.get("LOCAL_RANK")
        device = torch.device("cuda", torch.cuda.current_device() if local_rank is None else int(local_rank))
        raised: list[Exception] = []

        def wait() -> None:
            try:
                torch.cuda.synchronize(device)
            except Exception as error:
                raised.append(error)

        thread = threading.Thread(target=wait, name=f"{type(self).__name__}-{state.rank}", daemon=True)
        thread.start()
        thread.join(self.timeout.total_seconds())
        if thread.is_alive():
            raise TimeoutError(f"{device} has not answered after {self.timeout.total_seconds():g} s")
        if raised:
            raise raised.pop()
        torch.cuda.synchronize(device)
        return state, train_ex


class FaultCounterExceeded(RestartError):
    """This process caused more faults than it may."""


class FaultCounter(HealthCheck):
    """Counts the faults that this process itself caused: exceptions of the function, `initialize`, health check."""

    def __init__(self, max_rank_faults: int | None = None) -> None:
        """Args:
        max_rank_faults: So many are allowed; no limit where None.
        """
        self.max_rank_faults = max_rank_faults
        self.faults_count = 0

    def __call__(self, state: State, train_ex: Exception | None = None) -> tuple[State, Exception | None]:
        """Raises: FaultCounterExceeded: this was one too many."""
        if train_ex is not None:
            self.faults_count += 1
            if self.max_rank_faults is not None and self.faults_count > self.max_rank_faults:
                raise FaultCounterExceeded(
                    f"rank {state.rank} has caused {self.faults_count} faults; max_rank_faults={self.max_rank_faults}"
                )
        return state, train_ex
