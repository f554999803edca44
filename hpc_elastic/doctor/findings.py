"""The result of a check, with the way out."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from msgspec import Struct
from msgspec.structs import replace

from hpc_elastic.base.text import first_of
from hpc_elastic.slurm.notation import names_text


class Severity(str, Enum):
    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


class DoctorFinding(Struct, frozen=True, kw_only=True):
    check: str
    level: Severity
    found: str
    means: str = ""
    way_out: str = ""


def ok(check: str, found: str) -> DoctorFinding:
    return DoctorFinding(check=check, level=Severity.OK, found=found)


def warning(check: str, found: str, means: str, way_out: str) -> DoctorFinding:
    return DoctorFinding(check=check, level=Severity.WARNING, found=found, means=means, way_out=way_out)


def problem(check: str, found: str, means: str, way_out: str) -> DoctorFinding:
    return DoctorFinding(check=check, level=Severity.PROBLEM, found=found, means=means, way_out=way_out)


def warn_unless(is_fine: bool, check: str, found: str, means: str, way_out: str) -> DoctorFinding:
    return ok(check, found) if is_fine else warning(check, found, means, way_out)


def problem_unless(is_fine: bool, check: str, found: str, means: str, way_out: str) -> DoctorFinding:
    return ok(check, found) if is_fine else problem(check, found, means, way_out)


def fold(found: Sequence[tuple[str, DoctorFinding]]) -> list[DoctorFinding]:
    lines: dict[tuple[str, Severity, str], list[tuple[str, DoctorFinding]]] = {}
    for node, finding in found:
        lines.setdefault((finding.check, finding.level, finding.means), []).append((node, finding))
    folded = []
    for same in lines.values():
        texts = first_of(list(dict.fromkeys(finding.found for _, finding in same)), 2)
        folded.append(replace(same[0][1], found=f"{names_text([node for node, _ in same])}: {texts}"))
    return folded
