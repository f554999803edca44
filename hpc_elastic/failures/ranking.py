"""The kinds of failures, and the one ranking by which the cause is found among several: live and post mortem.

The order: a failure that nothing else explains before one that the agent's own signal may have provoked, before a
symptom; what the agent ended is none. Of several causes the earliest, by when its traceback was printed; where that is
a hang, the hung rank that is furthest behind. Where times can't be compared, `_CAUSES` is the order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from typing import Generic, NamedTuple, TypeVar

from msgspec import Struct

ALL_ALIKE = "all its workers failed alike, and none of the other nodes'"
"""Why such a node is left out."""


class FailureClass(str, Enum):
    ROOT = "root"
    SYMPTOM = "symptom"
    STOPPED_BY_US = "stopped_by_us"
    HANG = "hang"
    """It gave no sign of life any more, and was ended for that. Never by `classify`: its end alone does not show it."""
    INFRASTRUCTURE = "infrastructure"


class Category(str, Enum):
    """Who has to do something about it."""

    INPUT = "input"
    """The user's call or environment: a script that can't be compiled, a wrong option, a module that isn't there."""
    WORKER = "worker"
    PLATFORM = "platform"
    """This package: its agent or supervisor failed."""
    INFRASTRUCTURE = "infrastructure"


class Suspect(Struct, frozen=True, kw_only=True):
    """A rank to look at where every failure is a symptom: it may be the cause, and nothing proves it."""

    rank: int
    host: str = ""
    why: str


_CAUSES = (FailureClass.ROOT, FailureClass.HANG, FailureClass.INFRASTRUCTURE)
"""Possible causes, in the order that holds where times can't be compared."""
_SYMPTOMS = (FailureClass.SYMPTOM, None)
_SENT_BY_AGENT = ("SIGTERM", "SIGKILL")

F = TypeVar("F")


class Standing(NamedTuple):
    """The part of a failure that its ranking needs. Times are by a clock that all failures of one ranking share."""

    failure_class: FailureClass | None
    """None: not known yet."""
    at_ns: int = 0
    """When its end was seen; the same for all where there is no common clock."""
    rank: int = 0
    step: int = -1
    """The last step that a hung worker reported, -1 for none."""
    silent: float = 0.0
    """Seconds for which a hung worker gave no sign of life, where no time says so."""
    raised: bool = False
    printed_ns: int = 0
    stopped: bool = False
    may_follow_stop: bool = False
    """It may have provoked by that what the worker printed."""
    signal: str = ""
    lost_connection: bool = False
    """It reports that what it was connected to is gone: another rank's own server, or a service elsewhere."""
    fingerprint: str = ""


class Ranking(Generic[F]):
    def __init__(self, failures: Iterable[F], standing: Callable[[F], Standing]) -> None:
        found = [(standing(failure), failure) for failure in failures]
        is_cause = [how.failure_class in _CAUSES and not how.may_follow_stop for how, _ in found]
        deciding = [how for (how, _), one in zip(found, is_cause, strict=True) if one or not any(is_cause)]
        are_printed = any(how.printed_ns for how in deciding) and all(
            how.printed_ns or not how.raised for how in deciding
        )
        are_alike = len({how.fingerprint for how in deciding}) == 1 and bool(deciding[0].fingerprint)
        self.by_printed = are_printed or are_alike
        """False: by when their processes' ends were seen, milliseconds or minutes after an exception is printed.

        Where one that raised has no known time all are ordered by their ends, unless all are the same failure.
        """
        strength: dict[FailureClass | None, int] = {kind: place for place, kind in enumerate(_CAUSES)}
        found.sort(
            key=lambda item: (self.time_of(item[0]), strength.get(item[0].failure_class, len(_CAUSES)), item[0].rank)
        )
        self.all = [failure for _, failure in found]
        self.causes = [failure for how, failure in found if how.failure_class in _CAUSES and not how.may_follow_stop]
        self.symptoms = [failure for how, failure in found if how.failure_class in _SYMPTOMS]
        self.late = [failure for how, failure in found if how.failure_class in _CAUSES and how.may_follow_stop]
        """Possible causes that the agent's own signal may have provoked."""
        # A run that is cancelled breaks connections, too, and ends whatever had logged an exception.
        is_broken = any(how.failure_class in _SYMPTOMS and not how.stopped for how, _ in found)
        self.first: F | None = None
        """The cause as far as it is known; None where there is nothing but what the agent ended."""
        if self.causes:
            self.first = self.causes[0]
            hung = [item for item in found if item[0].failure_class is FailureClass.HANG]
            if hung and hung[0][1] is self.first:
                self.first = min(hung, key=lambda item: (item[0].step, -item[0].silent))[1]
        elif is_broken or any(how.signal not in _SENT_BY_AGENT for how, failure in found if failure in self.late):
            self.first = next(iter(self.late or self.symptoms), None)

    def time_of(self, standing: Standing) -> int:
        """The failure's time; a lost connection is as late as what it lost may have been seen to end."""
        at_ns = standing.printed_ns if self.by_printed and standing.printed_ns else standing.at_ns
        return at_ns + _LOST_NS if standing.lost_connection else at_ns


_LOST_NS = 100_000_000
"""A process's sockets close before its end can be seen: its clients may fail so much before it."""
SAME_NODE_NS = 2_000_000
"""One agent reads the ends of its workers one after the other."""
OBSERVED_NS = 10_000_000
"""An agent that is woken by a worker's end, on a busy node, may read the clock by so much later."""
PRINTED_NS = 20_000_000
"""The pump reads what was printed up to 10 ms later, and keeps its time to 10 ms."""


class Moment(NamedTuple):
    at_ns: int
    """The reference's wall clock as far as that is known; else the wall clock of its own node."""
    bound_ns: int | None = None
    """It is off by at most so much more or less; None: its node's clock was not compared with the reference's."""
    node: int = -1
    own_ns: int = 0
    """Its node's own clock: two moments of one node are as far apart as this says."""
    is_uptime: bool = False
    """`own_ns` is the time since its boot, not the wall clock's."""
    blur_ns: int = 0
    """It may have been so much earlier."""


class Order(str, Enum):
    KNOWN = "known"
    TIE = "tie"
    UNKNOWN = "unknown"
    """Two nodes whose clocks nobody has compared."""


def order_of(first: Moment, other: Moment, *, slack_ns: int = 0) -> Order:
    """Decide whether `first` came first; it may be later than it says by `slack_ns` more."""
    if (within := resolution_ns(first, other)) is None:
        return Order.UNKNOWN
    return Order.TIE if gap_ns(first, other) <= within + slack_ns else Order.KNOWN


def gap_ns(first: Moment, other: Moment) -> int:
    if first.node == other.node >= 0 and first.is_uptime == other.is_uptime:
        return other.own_ns - first.own_ns
    return other.at_ns - first.at_ns


def resolution_ns(first: Moment, other: Moment) -> int | None:
    """Give how close two moments may be before their order means nothing; None: it means nothing at all."""
    blur = first.blur_ns + other.blur_ns
    if first.node == other.node >= 0:
        return max(SAME_NODE_NS, blur)
    bound = clock_bound_ns(first, other)
    return None if bound is None else bound + max(2 * OBSERVED_NS, blur)


def clock_bound_ns(first: Moment, other: Moment) -> int | None:
    if first.bound_ns is None or other.bound_ns is None:
        return None
    return first.bound_ns + other.bound_ns
