"""What a node tells the coordinator about its workers' failures in a round: one record of them all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hpc_elastic.rendezvous.state import HangMark, NodeFailure

if TYPE_CHECKING:
    from hpc_elastic.agent.hang_watch import HangWatch
    from hpc_elastic.agent.local_workers import LocalWorkers
    from hpc_elastic.failures.worker_failure import WorkerFailure

_FROM_OUTSIDE = {"SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGQUIT"}


def sum_up(
    failures: Sequence[WorkerFailure], *, node: int, seconds: float, step: int = -1, hang: HangMark | None = None
) -> NodeFailure:
    """One node's failures in a round, as the coordinator needs them.

    Args:
        failures: At least one.
        node: Index of this node.
        seconds: How long the workers ran.
        step: The furthest that a worker here has reported.
        hang: Of the hung worker that is furthest behind.
    """
    from hpc_elastic.failures.classify import FailureClass

    order = {"root": 0, "hang": 1, "infrastructure": 2, "symptom": 3}
    first = min(failures, key=lambda f: (order.get(f.failure_class.value, 4), f.ended_ns))
    is_hang = first.failure_class is FailureClass.HANG
    counts = is_hang or (first.failure_class is FailureClass.ROOT and first.signal not in _FROM_OUTSIDE)
    return NodeFailure(
        node=node,
        # Who kills from outside is no bug in the script: it never counts as "the same failure again".
        fingerprint=first.fingerprint if counts else "",
        failure_class=first.failure_class.value,
        retryable=all(f.retryable for f in failures),
        message=f"rank {first.global_rank}: {first.headline}",
        step=max([step, *(f.last_step for f in failures if f.last_step is not None)]),
        seconds=seconds,
        hang=hang if is_hang else None,
    )


def early_failure(reason: str, *, node: int, workers: LocalWorkers, watch: HangWatch) -> NodeFailure:
    """A failure of this node's workers as it is reported at once, before the evidence is there.

    Args:
        reason: In a few words.
        node: Index of this node.
        workers: Know how long they ran, and whether one of them said by its exit code not to try again.
        watch: Knows whether one hangs, and how far they came.
    """
    hang = watch.mark
    return NodeFailure(
        node=node,
        fingerprint="",
        failure_class="unknown" if hang is None else "hang",
        retryable=not workers.want_no_other_try,
        message=reason,
        step=watch.furthest_step,
        seconds=workers.seconds,
        hang=hang,
    )


def own_failure(message: str, *, node: int, seconds: float) -> NodeFailure | None:
    """What of our own failed in a round, where none of the workers did; None: nothing.

    Args:
        message: What it was; empty: nothing.
        node: Index of this node.
        seconds: How long the workers ran.
    """
    if not message:
        return None
    return NodeFailure(
        node=node, fingerprint="", failure_class="infrastructure", retryable=True, message=message, seconds=seconds
    )
