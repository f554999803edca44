"""Read the ranks' error files: of many failures that are alike, those that stand for the others."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import replace

from hpc_elastic.atomic_file import ask_about
from hpc_elastic.failures.classify import FailureClass
from hpc_elastic.failures.evidence import read_failure
from hpc_elastic.failures.failure_patterns import find_pattern
from hpc_elastic.failures.worker_failure import WorkerFailure
from hpc_elastic.report.clocks import Clocks
from hpc_elastic.report.collect_attempt import AttemptBuilder
from hpc_elastic.report.collect_round import RoundBuilder
from hpc_elastic.report.event_coverage import EventCoverage
from hpc_elastic.report.fold import wording_of
from hpc_elastic.report.order import moment_of_failure
from hpc_elastic.run_paths import AttemptPaths, rank_index, round_index

OF_EACH_KIND = 16
"""Error files that are read of a round's failures that are alike: the first ones, by what the events tell."""
_MISSING = "error.json is missing: this is what its agent's event says"


def read_failures(paths: AttemptPaths, builder: AttemptBuilder, ranks: Container[int] = ()) -> None:
    """Complete what the events tell of failures, and add those that no event tells of.

    Args:
        paths: The attempt's.
        builder: Fed with all events.
        ranks: Whose error files are read in any case.
    """
    texts: dict[str, str] = {}
    reasons: dict[str, str] = {}
    clocks = builder.clocks.build()
    folders = set(_indices(paths.root, round_index))
    for index in sorted(folders | set(builder.rounds)):
        part = builder.round(index)
        reader = _RoundReader(paths, part, texts, clocks)
        if index in folders:
            reader.read_reported(ranks)
            reader.read_unreported(builder.coverage)
        for rank, told in part.told.items():
            if rank not in part.failures:
                part.failures[rank] = replace(told, problem=_MISSING, reason=_reason(told, reasons))


class _RoundReader:
    """Reads one round's error files into its builder."""

    def __init__(self, paths: AttemptPaths, part: RoundBuilder, texts: dict[str, str], clocks: Clocks) -> None:
        self._paths = paths
        self._part = part
        self._texts = texts
        self._clocks = clocks
        self._missing: set[int] = set()

    def _by_time(self, failure: WorkerFailure) -> tuple[int, int]:
        return moment_of_failure(failure, self._clocks).at_ns, failure.global_rank

    def read_reported(self, ranks: Container[int]) -> None:
        """Those of which events tell."""
        part = self._part
        kinds: dict[tuple[str, str, int], list[WorkerFailure]] = {}
        for failure in part.told.values():
            kinds.setdefault(wording_of(failure), []).append(failure)
        for members in kinds.values():
            if len(members) <= OF_EACH_KIND:
                for told in members:
                    self._read(told.global_rank)
                continue
            members.sort(key=self._by_time)
            example = self._read_some(members)
            if members[0].failure_class is FailureClass.HANG:  # the one that is furthest behind may be the cause
                self._read_some(sorted(members, key=lambda told: -1 if told.last_step is None else told.last_step))
            for told in members:
                if told.global_rank in ranks and told.global_rank not in part.failures:
                    self._read(told.global_rank)
                is_new = told.global_rank not in part.failures and told.global_rank not in self._missing
                if is_new and example is not None:
                    part.failures[told.global_rank] = _alike(told, example)

    def read_unreported(self, coverage: EventCoverage) -> None:
        """An event that was never written hides no failure."""
        part = self._part
        sure = {
            rank for node in part.nodes.values() if coverage.is_sure_of(part.index, node.node) for rank in node.ranks
        }
        if part.world_size is not None and len(sure) >= part.world_size:
            return
        for rank in sorted(_indices(self._paths.round_dir(part.index), rank_index)):
            if rank not in sure and rank not in part.failures and rank not in self._missing:
                self._read(rank)

    def _read_some(self, order: Sequence[WorkerFailure]) -> WorkerFailure | None:
        """Read until there are enough. Returns the first; None where there are not as many: all have been tried."""
        found: list[WorkerFailure] = []
        for told in order:
            failure = self._part.failures.get(told.global_rank) or self._read(told.global_rank)
            if failure is not None:
                found.append(failure)
            if len(found) == OF_EACH_KIND:
                return found[0]
        return None

    def _read(self, rank: int) -> WorkerFailure | None:
        part, texts = self._part, self._texts
        error_file = self._paths.rank(part.index, rank).error_file
        facts = part.facts(self._paths.number, rank)
        failure = read_failure(error_file, facts=facts)
        if failure is None and rank in part.told and ask_about(error_file.parent):
            failure = read_failure(error_file, facts=facts)  # an earlier report here missed it, and NFS remembers
        if failure is None:
            self._missing.add(rank)
            return None
        # Where the file lies is the truth about its place; the same text on 500 ranks is kept once.
        failure = part.failures[rank] = replace(
            failure,
            attempt=self._paths.number,
            round=part.index,
            global_rank=rank,
            traceback=texts.setdefault(failure.traceback, failure.traceback),
            stderr_tail=texts.setdefault(failure.stderr_tail, failure.stderr_tail),
            message=texts.setdefault(failure.message, failure.message),
            fingerprint=sys.intern(failure.fingerprint),
            host=sys.intern(failure.host),
        )
        return failure


def _alike(told: WorkerFailure, example: WorkerFailure) -> WorkerFailure:
    """What is known of a failure without a look at its own file."""
    return replace(
        told,
        exception_type=example.exception_type,
        category=example.category,
        reason=example.reason,
        retryable=example.retryable,
        node_suspect=example.node_suspect,
    )


def _reason(told: WorkerFailure, known: dict[str, str]) -> str:
    """What a consequence tells, by the words that its event has; `known`: by fingerprint."""
    if told.failure_class is not FailureClass.SYMPTOM:
        return ""
    key = told.fingerprint or told.message
    if key not in known:
        words = find_pattern(told.message)
        known[key] = words.says if words is not None and words.failure_class is FailureClass.SYMPTOM else ""
    return known[key]


def _indices(folder: os.PathLike[str], parse: Callable[[str], int | None]) -> Iterable[int]:
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    return [number for number in map(parse, names) if number is not None]
