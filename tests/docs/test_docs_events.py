"""Every event that the code writes is described, and no other."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from hpc_elastic.output.losses import LossEpisode, StreamLoss
from tests.rigs.run_builder import make_failure

ROOT = Path(__file__).resolve().parent.parent.parent

IN_MEMORY = {"agents_departed", "end_claimed", "end_unclaimed", "looked_anew"}
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


DECISIONS = {
    "agent_ended", "agent_relaunched", "attempt_superseded", "closed", "coordinator_changed", "end_taken_over", "hang",
    "health_check_failed", "health_warning", "node_given_up", "node_left", "node_lost", "node_missing", "node_replaced",
    "nodes_asked", "nodes_waiting", "notice_given", "output_lost", "platform_failure", "requeue_decision",
    "round_confirmed", "round_frozen", "round_opened", "spare_lost", "step_agreed", "verdict",
    "workers_stopping",
}  # fmt: skip
"""Events by which somebody decides something, or finds something that others decide upon."""


def written_fields() -> dict[str, set[str]]:
    """Event → the fields that the source gives by name to a writer."""
    found: dict[str, set[str]] = {}
    for path in (ROOT / "hpc_elastic").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "write"
                and node.args
                and isinstance(node.args[0], ast.Constant)
                and isinstance(node.args[0].value, str)
                and re.fullmatch(r"[a-z]+(_[a-z]+)*", node.args[0].value)
            ):
                found.setdefault(node.args[0].value, set()).update(word.arg for word in node.keywords if word.arg)
    # Written as a whole:
    found["worker_failed"] |= set(make_failure(0, at=1).to_event())
    found["output_lost"] |= {*LossEpisode.__struct_fields__, *StreamLoss.__struct_fields__}
    return found


def described_rows() -> dict[str, list[str]]:
    """Event → its rows on the page: several components may write one of this name."""
    page = (ROOT / "docs" / "reference" / "events.md").read_text(encoding="utf-8").split("## Supervisor", 1)[1]
    found: dict[str, list[str]] = {}
    for name, row in re.findall(r"^\| `([a-z_]+)` \| (.*) \|$", page, re.MULTILINE):
        found.setdefault(name, []).append(row)
    return found


def test_fields_that_are_written_are_described_and_no_others() -> None:
    rows = described_rows()
    written = written_fields()
    assert {"attempt_started", "workers_started", "worker_failed", "output_lost"} <= set(written)
    for name, fields in written.items():
        text = " ".join(rows[name])
        described = set(re.findall(r"`([a-z_]+)`", text))
        assert fields <= described, f"{name}: {fields - described} are written, and not described"
        # What stands behind a colon or in brackets explains; what stands by itself is a field.
        plain = " ".join(re.sub(r"\([^()]*\)", "", row).split(":")[0] for row in rows[name])
        named = set(re.findall(r"`([a-z_]+)`", plain))
        assert named <= fields, f"{name}: {named - fields} are described, and not written"


def test_every_decision_has_its_reason() -> None:
    rows = described_rows()
    assert set(rows) >= DECISIONS
    for name in DECISIONS:
        assert any("`reason`" in row for row in rows[name]), f"{name} has no reason"
