"""Hooks that free a main thread which waits for ranks that won't come."""

from __future__ import annotations

import abc
import logging

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from hpc_elastic.inprocess import interrupt
from hpc_elastic.inprocess.sockets import SocketLedger
from hpc_elastic.inprocess.state import State

logger = logging.getLogger(__name__)

BEFORE_CUT = 0.03
"""Seconds between the exception and the cut. An operation that begins in the very moment of the cut waits out its whole
timeout (torch 2.13, gloo: 1 in 50); 30 ms later the main thread can't begin another one."""
BEFORE_STORE_CUT = 0.3
"""Further seconds before the connection to the function's own store is cut."""

ledger = SocketLedger()
"""The sockets of this process' groups, kept while a wrapped call lasts."""


class Abort(abc.ABC):
    """Runs in the monitor thread, on every rank, after a fault, while the main thread may be anywhere."""

    @abc.abstractmethod
    def __call__(self, state: State) -> State:
        """Make whatever the main thread waits in return or raise."""


class AbortTorchDistributed(Abort):
    """Aborts what torch.distributed is doing, and destroys all process groups.

    NCCL's communicators are aborted. Gloo has nothing of the kind: the sockets of its groups are shut down, after the
    main thread was interrupted; what waits in a collective fails at once, instead of at gloo's timeout.
    """

    def __call__(self, state: State) -> State:
        part = interrupt.aborted()
        _abort_nccl()
        if part is not None:
            part.interrupt("torch.distributed is aborted")
        if part is None or not part.wait_until_left(BEFORE_CUT):
            # A thread that has left waits in nothing; a cut while its last operation ends can hold up the group's end.
            ledger.cut_groups()
            if part is not None and not part.wait_until_left(BEFORE_STORE_CUT):
                ledger.cut_stores()
        if dist.is_initialized():
            dist.destroy_process_group()
        return state


def _abort_nccl() -> None:
    # All at once where torch can, so that no communicator waits for another.
    # After torch 2.13 ``nccl`` is a class of its own, and the older one ``nccl-legacy``.
    names = ("ProcessGroupNCCL", "ProcessGroupNCCL2")
    kinds = tuple(kind for name in names for place in (distributed_c10d, dist) if (kind := getattr(place, name, None)))
    if not kinds or not dist.is_initialized():
        return
    for group in list(distributed_c10d._world.pg_map):
        try:
            backend = group._get_backend(torch.device("cuda"))
        except RuntimeError:
            continue  # a group without GPUs
        if isinstance(backend, kinds):
            (getattr(backend, "abort", None) or backend._shutdown)()


def forget_half_made_groups() -> None:
    """Let the next default group have the name that it has on a rank that had not begun to make one.

    torch counts groups in each process, and names them by that count; only destroying a default group sets it back.
    """
    if not dist.is_initialized() and hasattr(distributed_c10d._world, "group_count"):
        distributed_c10d._world.group_count = 0
