"""The seam of all checks: the result of a check, with the way out, and a node's place among the probes.

The probes exchange values by files of the run's own store.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path

from msgspec import Struct, field
from msgspec.structs import replace

from hpc_elastic.base.clock import Clock
from hpc_elastic.base.text import first_of
from hpc_elastic.run.spec import Container
from hpc_elastic.slurm.job_environment import names_text
from hpc_elastic.store.file_store import FileStore


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


_LOOK_SECONDS = 0.01
_LONGEST_PAUSE = 0.2


class ProbeSettings(Struct, frozen=True, kw_only=True):
    python: str
    """The workers' interpreter. The probes themselves use doctor's own, which has this package."""
    container: Container | None = None


class ProbeSite(Struct, kw_only=True):
    rank: int
    world_size: int
    node: str
    """Slurm's name; ``node1`` where this machine plays the nodes."""
    folder: Path
    """``doctor`` in the run directory: all nodes see it."""
    settings: ProbeSettings
    store: FileStore
    clock: Clock
    env: Mapping[str, str]
    stop: threading.Event = field(default_factory=threading.Event)

    def gather(self, name: str, value: str = "1", *, seconds: float = 60.0) -> dict[int, str]:
        """A `name` is used once. A rank that did not come in `seconds` is missing from the answer."""
        self.store.put_if_absent(f"{name}/{self.rank:05d}", value)
        deadline = self.clock.monotonic() + seconds
        found: dict[int, str] = {}
        invalidate_at, pause = 0.0, _LOOK_SECONDS
        while len(found) < self.world_size:
            now = self.clock.monotonic()
            if now >= invalidate_at:
                self.store.invalidate(name)
                invalidate_at = now + 0.5
            new = [key for key in self.store.list(name) if key.isdecimal() and int(key) not in found]
            values = self.store.get_many([f"{name}/{key}" for key in new])
            found.update({int(key): text for key, text in zip(new, values, strict=True) if text is not None})
            if now >= deadline or (not new and self.clock.wait(self.stop, pause)):
                break
            pause = _LOOK_SECONDS if new else min(_LONGEST_PAUSE, 1.2 * pause)
        return found

    def barrier(self, name: str, *, seconds: float = 60.0) -> tuple[int, ...]:
        """Wait for all; the ranks that did not come in time are returned."""
        came = self.gather(name, seconds=seconds)
        return tuple(rank for rank in range(self.world_size) if rank not in came)
