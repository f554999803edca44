"""The evidence against nodes (nodes.json in the run directory), and which of them the next attempt leaves out.

A node is bad by a failure that is known to break with the node, or where failures keep beginning. A failure that begins
on one node and then on another moves with the code, and counts against none of them. Everything expires.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from enum import Enum
from itertools import combinations
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from hpc_elastic.base import codec
from hpc_elastic.base.files import read_json, write_json
from hpc_elastic.run.option_values import DEFAULT_HOURS, DEFAULT_SHARE

BAD = 1.0
"""Least score of a node that is left out."""
MOST_EVIDENCE = 2000
_LARGEST_FILE = 4 << 20
_AHEAD_NS = 3600 * 10**9
"""Evidence from further ahead of now is ignored; hosts' clocks differ."""


class EvidenceKind(str, Enum):
    LOST = "lost"
    """It fell silent, or Slurm gave it up, or no agent could be started there."""
    UNHEALTHY = "unhealthy"
    HARDWARE = "hardware"
    """A worker's message names a broken part of it: an ECC error, an Xid."""
    SLOW = "slow"
    """The other ranks waited for one of its ranks (``--slow-ranks exclude``)."""
    APART = "apart"
    """All its workers failed alike, and none of the other nodes': something is missing there."""
    FIRST_FAILURE = "first_failure"
    """A round's first failure was there, by a signal, a hang or a resource of the node."""
    FIRST_EXCEPTION = "first_exception"
    """A round's first failure was there, and an exception: most often the code's own."""


WEIGHTS = {**dict.fromkeys(EvidenceKind, 1.0), EvidenceKind.FIRST_FAILURE: 0.5, EvidenceKind.FIRST_EXCEPTION: 0.25}
_MOVING = (EvidenceKind.FIRST_FAILURE, EvidenceKind.FIRST_EXCEPTION, EvidenceKind.SLOW)
"""Kinds that count against no node where the same begins on another one."""


class Evidence(Struct, frozen=True, kw_only=True):
    node: str
    kind: EvidenceKind
    at_ns: int
    why: str = ""
    fingerprint: str = ""
    attempt: int = -1
    round: int = -1


class NodeRecord(Struct, frozen=True, kw_only=True):
    evidence: tuple[Evidence, ...] = ()
    excluded: tuple[str, ...] = ()
    """The nodes that this program, and not the user, has put on the job's list of excluded ones."""
    saved_ns: int = 0
    problem: str = ""
    """Why the file is unreadable; empty also where it is missing."""


def load_record(path: Path) -> NodeRecord:
    value = read_json(path, limit=_LARGEST_FILE)
    if isinstance(value, str):
        return NodeRecord(problem="" if value == "missing" else str(value))
    if problem := codec.version_problem(value):
        return NodeRecord(problem=problem)
    evidence = codec.readable_items(Evidence, value.get("evidence"))
    rest = codec.readable_fields(NodeRecord, {**value, "evidence": (), "problem": ""})
    return NodeRecord(**{**rest, "evidence": tuple(item for item in evidence if item.node)})


def save_record(path: Path, record: NodeRecord) -> None:
    latest = sorted(dict.fromkeys(record.evidence), key=lambda item: item.at_ns)[-MOST_EVIDENCE:]
    codec.save(path, replace(record, evidence=tuple(latest)), without=("problem",))


def forget_in(path: Path, nodes: Collection[str] | None) -> int:
    """Remove the evidence of some nodes, or of all, from a file. Returns how much that was. Raises OSError."""
    value = read_json(path, limit=_LARGEST_FILE)
    if isinstance(value, str):
        return 0
    listed = value.get("evidence")
    known = [item for item in listed if isinstance(item, dict)] if isinstance(listed, list) else []
    kept = [] if nodes is None else [item for item in known if item.get("node") not in nodes]
    if len(kept) < len(known):
        write_json(path, {**value, "evidence": kept})
    return len(known) - len(kept)


class NodeScore(Struct, frozen=True, kw_only=True):
    node: str
    score: float
    evidence: tuple[Evidence, ...]
    until_ns: int
    """When its score falls below `BAD` without new evidence; for a good node, when its last evidence expires."""

    @property
    def is_bad(self) -> bool:
        return self.score >= BAD

    @property
    def why(self) -> str:
        heaviest = max(self.evidence, key=lambda item: WEIGHTS[item.kind])
        more = len(self.evidence) - 1
        return f"{heaviest.why or heaviest.kind.value.replace('_', ' ')}{f' (and {more} more)' if more else ''}"


class Exclusion(Struct, frozen=True, kw_only=True):
    nodes: tuple[str, ...] = ()
    spared: tuple[tuple[str, str], ...] = ()
    """Bad nodes that stay in, each with the reason."""


def score_nodes(evidence: Iterable[Evidence], *, now_ns: int, hours: float = DEFAULT_HOURS) -> tuple[NodeScore, ...]:
    """The score of every node with evidence against it, the worst first.

    `evidence` may be in any order; the same thing reported twice counts once. It expires after `hours`, and shows even
    then that a failure moves with the code.
    """
    life_ns = int(hours * 3600e9)
    known = [item for item in dict.fromkeys(evidence) if item.at_ns <= now_ns + _AHEAD_NS]
    counts = [item for item in known if now_ns - life_ns < item.at_ns]
    places: dict[str, set[str]] = {}
    for item in known:
        if item.kind in _MOVING:
            places.setdefault(item.fingerprint, set()).add(item.node)
    moved = _moved(known)
    by_node: dict[str, list[Evidence]] = {}
    for item in counts:
        if item.kind is EvidenceKind.APART and item.fingerprint in moved:
            continue
        if item.kind not in _MOVING or len(places[item.fingerprint]) == 1:
            by_node.setdefault(item.node, []).append(item)
    found = [_score(node, items, life_ns) for node, items in by_node.items()]
    return tuple(sorted(found, key=lambda one: (-one.score, -one.evidence[0].at_ns, one.node)))


def _moved(counts: Sequence[Evidence]) -> set[str]:
    """Several nodes of one round may lack the same: it moves with the code if another round has other nodes."""
    rounds: dict[str, dict[tuple[int, int], set[str]]] = {}
    for item in counts:
        if item.kind is EvidenceKind.APART:
            place = (item.attempt, item.round)
            rounds.setdefault(item.fingerprint, {}).setdefault(place, set()).add(item.node)
    return {key for key, found in rounds.items() if any(a.isdisjoint(b) for a, b in combinations(found.values(), 2))}


def _score(node: str, items: list[Evidence], life_ns: int) -> NodeScore:
    # The order has every field, so that neither the input's order nor the first reporter matters.
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
    """The batch host runs the agent in any case: of four nodes or more, all the others are as good as all."""
    return nodes > 1 and unable >= nodes - (1 if nodes > 3 else 0)


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
        known: The nodes that the job may get, by Slurm's answer: another name never comes out.
        usable: Those of them that are not down or drained; busy ones count.
        need: The run's MIN: so many usable nodes are left.
        required: Nodes that the job was submitted for by name.
        share: Maximum share of `known` to exclude.
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
