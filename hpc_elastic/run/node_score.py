"""Which nodes to leave out of the next attempt: pure functions over what happened there.

A node is bad by what is known to break with the node (it was lost, it failed a health check, the driver named its GPU),
or where failures keep beginning. A failure that begins on one node and then on another moves with the code, and speaks
against none of them. Everything expires, and never are so many nodes left out that a run could not have its MIN.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from enum import Enum
from itertools import combinations

from msgspec import Struct

from hpc_elastic.run.option_values import DEFAULT_HOURS, DEFAULT_SHARE

BAD = 1.0
"""From this score on a node is left out."""
_FEW = 3
_AHEAD_NS = 3600 * 10**9
"""So far ahead of now the time of a piece of evidence may be: hosts' clocks differ. Beyond, it is left out."""


class EvidenceKind(str, Enum):
    """What speaks against a node."""

    LOST = "lost"
    """It fell silent, or Slurm gave it up, or no agent could be started there."""
    UNHEALTHY = "unhealthy"
    """It failed a health check."""
    HARDWARE = "hardware"
    """A worker's words name a broken part of it: an ECC error, an Xid."""
    APART = "apart"
    """All its workers failed alike, and none of the other nodes': something is missing there."""
    FIRST_FAILURE = "first_failure"
    """A round's first failure was there, by a signal, a hang or something that the node offers."""
    FIRST_EXCEPTION = "first_exception"
    """A round's first failure was there, and an exception: most often the code's own."""


WEIGHTS = {
    EvidenceKind.LOST: 1.0,
    EvidenceKind.UNHEALTHY: 1.0,
    EvidenceKind.HARDWARE: 1.0,
    EvidenceKind.APART: 1.0,
    EvidenceKind.FIRST_FAILURE: 0.5,
    EvidenceKind.FIRST_EXCEPTION: 0.25,
}
_FIRST = (EvidenceKind.FIRST_FAILURE, EvidenceKind.FIRST_EXCEPTION)


class Evidence(Struct, frozen=True, kw_only=True):
    """One thing that happened on a node."""

    node: str
    kind: EvidenceKind
    at_ns: int
    """By the wall clock of the host that saw it."""
    why: str = ""
    """In words, for people."""
    fingerprint: str = ""
    """Of a failure."""
    attempt: int = -1
    round: int = -1


class NodeScore(Struct, frozen=True, kw_only=True):
    """How bad a node is."""

    node: str
    score: float
    evidence: tuple[Evidence, ...]
    """What counts, the latest first."""
    until_ns: int
    """When its score falls below `BAD`, where nothing more happens; when its last evidence expires, where it is."""

    @property
    def is_bad(self) -> bool:
        return self.score >= BAD

    @property
    def why(self) -> str:
        """The latest of what weighs most, in words."""
        heaviest = max(self.evidence, key=lambda item: WEIGHTS[item.kind])
        more = len(self.evidence) - 1
        return f"{heaviest.why or heaviest.kind.value.replace('_', ' ')}{f' (and {more} more)' if more else ''}"


class Exclusion(Struct, frozen=True, kw_only=True):
    """Which nodes to leave out."""

    nodes: tuple[str, ...] = ()
    """Sorted by name; may be empty."""
    spared: tuple[tuple[str, str], ...] = ()
    """Bad ones that stay in, each with the reason."""


def score_nodes(evidence: Iterable[Evidence], *, now_ns: int, hours: float = DEFAULT_HOURS) -> tuple[NodeScore, ...]:
    """The score of every node that something counts against, the worst first.

    Args:
        evidence: In any order; the same thing reported twice counts once.
        now_ns: The wall clock.
        hours: For how long something counts.
    """
    life_ns = int(hours * 3600e9)
    counts = [item for item in dict.fromkeys(evidence) if now_ns - life_ns < item.at_ns <= now_ns + _AHEAD_NS]
    places: dict[str, set[str]] = {}
    for item in counts:
        if item.kind in _FIRST:
            places.setdefault(item.fingerprint, set()).add(item.node)
    moved = _moved(counts)
    by_node: dict[str, list[Evidence]] = {}
    for item in counts:
        if item.kind is EvidenceKind.APART and item.fingerprint in moved:
            continue
        if item.kind not in _FIRST or len(places[item.fingerprint]) == 1:
            by_node.setdefault(item.node, []).append(item)
    found = [_score(node, items, life_ns) for node, items in by_node.items()]
    return tuple(sorted(found, key=lambda one: (-one.score, -one.evidence[0].at_ns, one.node)))


def _moved(counts: Sequence[Evidence]) -> set[str]:
    """The failures that some nodes had apart from the others, and in another round other nodes: these move with the
    code. Several nodes of one round may lack the same."""
    rounds: dict[str, dict[tuple[int, int], set[str]]] = {}
    for item in counts:
        if item.kind is EvidenceKind.APART:
            place = (item.attempt, item.round)
            rounds.setdefault(item.fingerprint, {}).setdefault(place, set()).add(item.node)
    return {key for key, found in rounds.items() if any(a.isdisjoint(b) for a, b in combinations(found.values(), 2))}


def _score(node: str, items: list[Evidence], life_ns: int) -> NodeScore:
    # By everything, so that neither the order nor the first reporter matters.
    items.sort(key=lambda e: (-e.at_ns, e.kind.value, e.why, e.attempt, e.round, e.fingerprint))
    total = sum(WEIGHTS[item.kind] for item in items)
    left, until = total, items[-1].at_ns
    for item in reversed(items):
        left -= WEIGHTS[item.kind]
        until = item.at_ns
        if left < BAD <= total:
            break
    return NodeScore(node=node, score=total, evidence=tuple(items), until_ns=until + life_ns)


def is_everywhere(unable: int, *, nodes: int) -> bool:
    """Whether so many nodes of an attempt could not run the agent that it is what they share, and speaks against none.

    The batch host, where the supervisor runs, has the interpreter and the run directory in any case: of four nodes or
    more, all the others are as good as all. One node alone shows nothing.
    """
    return nodes > 1 and unable >= nodes - (1 if nodes > _FEW else 0)


def choose_excluded(
    scores: Sequence[NodeScore],
    *,
    known: Collection[str],
    usable: Collection[str],
    need: int,
    required: Collection[str] = (),
    share: float = DEFAULT_SHARE,
) -> Exclusion:
    """Choose the nodes to leave out, the worst first.

    Args:
        scores: From `score_nodes`.
        known: Names of the nodes that the job may get, by Slurm's own word: another name never comes out.
        usable: Those of them that are not down or drained; busy ones count.
        need: The run's MIN: so many usable nodes are left.
        required: Nodes that the job was submitted for by name.
        share: Of `known` never more are left out.
    """
    most = int(len(set(known)) * share + 1e-9)
    chosen: list[str] = []
    spared: list[tuple[str, str]] = []
    left = set(usable) & set(known)
    for score in scores:
        if not score.is_bad or score.node not in known:
            continue
        if score.node in required:
            spared.append((score.node, "the job asks for it by name"))
        elif len(chosen) >= most:
            spared.append((score.node, f"{len(chosen)} of {len(set(known))} nodes are left out already"))
        elif len(left - {score.node}) < need:
            spared.append((score.node, f"fewer than the {need} nodes that the run needs would be left"))
        else:
            chosen.append(score.node)
            left.discard(score.node)
    return Exclusion(nodes=tuple(sorted(chosen)), spared=tuple(spared))
