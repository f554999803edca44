"""What a check found, with the way out."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from msgspec import Struct
from msgspec.structs import replace

from hpc_elastic.base.text import first_of
from hpc_elastic.slurm.notation import names_text


class Level(str, Enum):
    """How bad it is."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


class Finding(Struct, frozen=True, kw_only=True):
    """One line of `hpc-elastic doctor`."""

    check: str
    """Its name, as in ``slurm.requeue``."""
    level: Level
    found: str
    means: str = ""
    """For a run; empty where nothing follows."""
    way_out: str = ""


def ok(check: str, found: str) -> Finding:
    return Finding(check=check, level=Level.OK, found=found)


def warning(check: str, found: str, means: str, way_out: str) -> Finding:
    return Finding(check=check, level=Level.WARNING, found=found, means=means, way_out=way_out)


def problem(check: str, found: str, means: str, way_out: str) -> Finding:
    return Finding(check=check, level=Level.PROBLEM, found=found, means=means, way_out=way_out)


def warn_unless(is_fine: bool, check: str, found: str, means: str, way_out: str) -> Finding:
    return ok(check, found) if is_fine else warning(check, found, means, way_out)


def problem_unless(is_fine: bool, check: str, found: str, means: str, way_out: str) -> Finding:
    return ok(check, found) if is_fine else problem(check, found, means, way_out)


def fold(found: Sequence[tuple[str, Finding]]) -> list[Finding]:
    """The findings of nodes, those that say the same in one line that names the nodes.

    Args:
        found: Node and finding, in the order of the lines.
    """
    lines: dict[tuple[str, Level, str], list[tuple[str, Finding]]] = {}
    for node, finding in found:
        lines.setdefault((finding.check, finding.level, finding.means), []).append((node, finding))
    folded = []
    for same in lines.values():
        texts = first_of(list(dict.fromkeys(finding.found for _, finding in same)), 2)
        folded.append(replace(same[0][1], found=f"{names_text([node for node, _ in same])}: {texts}"))
    return folded
