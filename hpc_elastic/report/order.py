"""In which order things happened that different nodes saw, and whether that is known at all. Pure."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from hpc_elastic.failures.worker_failure import WorkerFailure
from hpc_elastic.report.clocks import Clocks, Moment

if TYPE_CHECKING:  # whose module needs this one
    from hpc_elastic.report.history import NodeLoss

SAME_NODE_NS = 2_000_000
"""One agent reads the ends of its workers one after the other."""
NOTICED_NS = 10_000_000
"""An agent that is woken by a worker's end, on a busy node, may read the clock by so much later."""
SIGN_NS = 1_000_000_000
"""A lost node lived for so long after the last sign of it, at most: then the next one was due."""


class Order(str, Enum):
    """Of two moments, the first of which seems to be the earlier one."""

    KNOWN = "known"
    TIE = "tie"
    """Closer than the clocks can tell."""
    UNKNOWN = "unknown"
    """Two nodes whose clocks nobody has compared."""


def moment_of_failure(failure: WorkerFailure, clocks: Clocks) -> Moment:
    """When its agent saw it."""
    node = failure.node if failure.node >= 0 else None
    return clocks.moment(node, failure.ended_ns, uptime_ns=failure.ended_uptime_ns)


def moment_of_loss(loss: NodeLoss, clocks: Clocks) -> Moment:
    """The last sign of it, by whoever observed it."""
    return clocks.moment(loss.observer, loss.gone_ns)


def order_of(first: Moment, other: Moment, *, slack_ns: int = 0) -> Order:
    """Whether `first` came first.

    Args:
        first: What seems to be the earlier one.
        other: The later one.
        slack_ns: By so much more `first` may be later than it says.
    """
    within = resolution_ns(first, other)
    if within is None:
        return Order.UNKNOWN
    return Order.TIE if gap_ns(first, other) <= within + slack_ns else Order.KNOWN


def gap_ns(first: Moment, other: Moment) -> int:
    """From the one to the other."""
    if _same_node(first, other) and first.is_uptime == other.is_uptime:
        return other.own_ns - first.own_ns
    return other.at_ns - first.at_ns


def resolution_ns(first: Moment, other: Moment) -> int | None:
    """How close two moments may be before their order means nothing; None: it means nothing at all."""
    if _same_node(first, other):
        return SAME_NODE_NS
    bound = clock_bound_ns(first, other)
    return None if bound is None else bound + 2 * NOTICED_NS


def clock_bound_ns(first: Moment, other: Moment) -> int | None:
    """How well the clocks of two nodes are known against each other; None: not at all."""
    if first.bound_ns is None or other.bound_ns is None:
        return None
    return first.bound_ns + other.bound_ns


def _same_node(first: Moment, other: Moment) -> bool:
    return first.node == other.node >= 0
