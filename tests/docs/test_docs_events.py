"""Every event that the code writes is described, and no other."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent

IN_MEMORY = {"agents_departed", "end_seen_to", "end_is_ours", "looked_anew"}
"""What the participant tells the supervisor alone, which does not write it."""
READ_ONLY = {"restart_decision"}
"""What the report understands, and this version does not write."""


def written_events() -> set[str]:
    """The names of events in the source: literal arguments, and the coordinator's table."""
    found: set[str] = set()
    for path in (ROOT / "hpc_elastic").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
                first = node.args[0]
                if (
                    node.func.attr in ("write", "on_event")
                    and isinstance(first, ast.Constant)
                    and re.fullmatch(r"[a-z]+(_[a-z]+)*", str(first.value))
                ):
                    found.add(str(first.value))
            if isinstance(node, ast.Tuple) and len(node.elts) == 2 and isinstance(node.elts[1], ast.Dict):
                name = node.elts[0]  # an event that is handed on: its name and its fields
                if isinstance(name, ast.Constant) and re.fullmatch(r"[a-z]+(_[a-z]+)+", str(name.value)):
                    found.add(str(name.value))
            if isinstance(node, ast.Dict):
                for key, value in zip(node.keys, node.values, strict=True):
                    if ast.unparse(key or ast.Constant("")).startswith("RoundEvent.") and isinstance(
                        value, ast.Constant
                    ):
                        found.add(str(value.value))
    return found


def test_events_are_described() -> None:
    page = (ROOT / "docs" / "reference" / "events.md").read_text(encoding="utf-8")
    sections = page.split("## Supervisor", 1)[1]
    described = set(re.findall(r"^\| `([a-z_]+)` \|", sections, re.MULTILINE))
    assert {"attempt_started", "round_frozen", "node_lost", "worker_failed"} <= written_events()
    assert not written_events() - described - IN_MEMORY
    assert not described - written_events() - READ_ONLY
