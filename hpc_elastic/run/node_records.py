"""What is remembered of nodes: nodes.json in the run directory. What can't be read counts for nothing."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from hpc_elastic.base import codec
from hpc_elastic.base.files import read_json, write_json
from hpc_elastic.run.node_score import Evidence

MOST_EVIDENCE = 2000
"""The latest are kept."""
_LIMIT = 4 << 20


class NodeRecord(Struct, frozen=True, kw_only=True):
    """What the file holds."""

    evidence: tuple[Evidence, ...] = ()
    excluded: tuple[str, ...] = ()
    """The nodes that this program has put on the job's list of excluded ones, and not the user."""
    saved_ns: int = 0
    """When it was written, by the writer's wall clock."""
    problem: str = ""
    """Why the file could not be read; empty where it was, or where there is none."""


def load_record(path: Path) -> NodeRecord:
    """Read nodes.json. Never raises."""
    value = read_json(path, limit=_LIMIT)
    if isinstance(value, str):
        return NodeRecord(problem="" if value == "missing" else str(value))
    if problem := codec.version_problem(value):
        return NodeRecord(problem=problem)
    evidence = codec.readable_items(Evidence, value.get("evidence"))
    rest = codec.readable_fields(NodeRecord, {**value, "evidence": (), "problem": ""})
    return NodeRecord(**{**rest, "evidence": tuple(item for item in evidence if item.node)})


def save_record(path: Path, record: NodeRecord) -> None:
    """Write nodes.json whole. Raises OSError."""
    latest = sorted(dict.fromkeys(record.evidence), key=lambda item: item.at_ns)[-MOST_EVIDENCE:]
    codec.save(path, replace(record, evidence=tuple(latest)), without=("problem",))


def forget_in(path: Path, nodes: Collection[str] | None) -> int:
    """Forget nodes in a file; all of them where None.

    Returns:
        How many things were in it about them.

    Raises:
        OSError: the file can't be changed.
    """
    value = read_json(path, limit=_LIMIT)
    if isinstance(value, str):
        return 0
    listed = value.get("evidence")
    known = [item for item in listed if isinstance(item, dict)] if isinstance(listed, list) else []
    kept = [] if nodes is None else [item for item in known if item.get("node") not in nodes]
    if len(kept) < len(known):
        write_json(path, {**value, "evidence": kept})
    return len(known) - len(kept)
