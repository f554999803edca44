"""The coordinator's events: its decisions about rounds, and about the nodes in them."""

from __future__ import annotations

from hpc_elastic.run.events import CoordinatorEvent, Seconds


class RoundOpened(CoordinatorEvent, frozen=True, kw_only=True):
    """Nodes may join the round."""

    reason: str = ""
    """why the one before ended"""
    restarts_used: int | None = None


class RoundFrozen(CoordinatorEvent, frozen=True, kw_only=True):
    """The members of the round are chosen."""

    reason: str = ""
    """the decision about the failures of the round before"""
    restarts_used: int | None = None
    nodes: tuple[int, ...] = ()
    explained: tuple[int, ...] = ()
    """nodes whose failures in the round before follow from the loss of a member"""


class RoundConfirmed(CoordinatorEvent, frozen=True, kw_only=True):
    """All members have confirmed the round."""

    reason: str = ""
    restarts_used: int | None = None


class NodeLost(CoordinatorEvent, frozen=True, kw_only=True):
    """A node is taken out of the round: it was silent for too long."""

    round: int
    """the one that it is taken out of"""
    node: int
    host: str = ""
    age: Seconds = 0.0
    """seconds without a heartbeat"""
    reason: str = ""


class NodeLeft(CoordinatorEvent, frozen=True, kw_only=True):
    """A node took itself out, because of a health check for instance."""

    node: int
    host: str = ""
    reason: str = ""


class SpareLost(CoordinatorEvent, frozen=True, kw_only=True):
    """A node that waited for a place had died when the run was closed."""

    node: int
    host: str = ""
    age: Seconds = 0.0
    """seconds without a heartbeat"""
    reason: str = ""


class NodeMissing(CoordinatorEvent, frozen=True, kw_only=True):
    """A node is not a member of the round."""

    round: int
    """the one that begins without it, or that waited for it until the time limit"""
    node: int
    host: str = ""
    """empty: unknown"""
    reason: str = ""


class NodeReplaced(CoordinatorEvent, frozen=True, kw_only=True):
    """A node takes the place of one that is not a member any more."""

    group_rank: int | None = None
    """the place"""
    node: int
    """the node that came"""
    host: str = ""
    reason: str = ""
    replaces_node: int = -1
    """the node whose place that was"""
    replaces_host: str = ""


class NodesWaiting(CoordinatorEvent, frozen=True, kw_only=True):
    """Nodes wait for a place in the next round."""

    reason: str = ""
    """which nodes, and for what"""
    restarts_used: int | None = None


class LinkLost(CoordinatorEvent, frozen=True, kw_only=True):
    """No packet of a node came through for a while, though it answered through the files; written when packets come
    through again."""

    node: int
    host: str = ""
    since_ns: int | None = None
    seconds: Seconds = 0.0
    over: bool = True
    """false: not again by the end"""
    reason: str = ""


class NodesAsked(CoordinatorEvent, frozen=True, kw_only=True):
    """Silent nodes are asked through the files, or have answered."""

    reason: str = ""
    restarts_used: int | None = None


class CoordinatorChanged(CoordinatorEvent, frozen=True, kw_only=True):
    """The agent that writes this coordinates now."""

    reason: str = ""
    restarts_used: int | None = None


class SignalHeard(CoordinatorEvent, frozen=True, kw_only=True):
    """An agent got a signal, and the supervisor has to find out its meaning."""

    reason: str = ""
    """`SIGTERM on n2`"""
    restarts_used: int | None = None


class NoticeGiven(CoordinatorEvent, frozen=True, kw_only=True):
    """The job is about to end. A second event: sooner than expected, with the agreed step."""

    reason: str = ""
    """the agent that got it"""
    restarts_used: int | None = None
    seconds: float = 0.0
    """limit of the wait for checkpoints"""
    step: int | None = None
    """null at first"""


class StepAgreed(CoordinatorEvent, frozen=True, kw_only=True):
    """All workers save after this step."""

    reason: str = ""
    restarts_used: int | None = None
    seconds: float = 0.0
    step: int | None = None
    """null if no worker reports its steps"""


class RunClosed(CoordinatorEvent, frozen=True, kw_only=True, tag="closed"):
    """No further round begins."""

    outcome: str
    reason: str = ""
    restarts_used: int | None = None
    explained: tuple[int, ...] = ()
    """same as in `round_frozen`"""
