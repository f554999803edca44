"""Many ranks, one line: identical failures become one entry with a list of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hpc_elastic.failures.worker_failure import WorkerFailure
from hpc_elastic.report.clocks import NO_CLOCKS, Clocks
from hpc_elastic.report.order import moment_of_failure


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """Failures of one kind."""

    first: WorkerFailure
    """The earliest: it stands for the others."""
    members: tuple[WorkerFailure, ...]
    """All of them, by time."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks, ascending."""
        return tuple(sorted(failure.global_rank for failure in self.members))

    @property
    def hosts(self) -> tuple[str, ...]:
        """Each once, by node index."""
        return tuple(dict.fromkeys(f.host for f in sorted(self.members, key=lambda f: (f.node, f.host))))


def kind_of(failure: WorkerFailure) -> tuple[str, str, int]:
    """Equal for failures that are one entry of a report."""
    return failure.fingerprint or failure.headline, failure.failure_class.value, failure.exitcode


def fold_failures(failures: Iterable[WorkerFailure], clocks: Clocks = NO_CLOCKS) -> tuple[Fold, ...]:
    """Group failures of the same fingerprint, class and exit code; groups and members by time, then rank."""
    groups: dict[tuple[str, str, int], list[WorkerFailure]] = {}
    for failure in sorted(failures, key=lambda f: (moment_of_failure(f, clocks).at_ns, f.global_rank)):
        groups.setdefault(kind_of(failure), []).append(failure)
    return tuple(Fold(first=members[0], members=tuple(members)) for members in groups.values())


def rank_ranges(ranks: Sequence[int]) -> str:
    """``(12, 0, 1, 2)`` → ``0-2,12``."""
    parts: list[str] = []
    start = end = None
    for rank in sorted(set(ranks)):
        if end is not None and rank == end + 1:
            end = rank
            continue
        if start is not None:
            parts.append(str(start) if start == end else f"{start}-{end}")
        start = end = rank
    if start is not None:
        parts.append(str(start) if start == end else f"{start}-{end}")
    return ",".join(parts)
