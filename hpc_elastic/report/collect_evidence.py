"""Read the ranks' error files: of many failures that are alike, those that stand for the others."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence

from hpc_elastic.atomic_file import ask_about
from hpc_elastic.failures.classify import FailureClass
from hpc_elastic.failures.evidence import read_failure
from hpc_elastic.failures.worker_failure import WorkerFailure
from hpc_elastic.light_dataclass import replace
from hpc_elastic.report.collect_attempt import AttemptBuilder
from hpc_elastic.report.collect_round import RoundBuilder
from hpc_elastic.report.fold import kind_of
from hpc_elastic.run_paths import AttemptPaths, rank_index, round_index

OF_EACH_KIND = 16
"""Error files that are read of a round's failures that are alike: the first ones, by what the events tell."""
_MISSING = "error.json is missing: this is what its agent's event says"


def read_failures(paths: AttemptPaths, builder: AttemptBuilder) -> None:
    """Complete what the events tell of failures, and add those that no event tells of."""
    texts: dict[str, str] = {}
    folders = set(_indices(paths.root, round_index))
    for index in sorted(folders | set(builder.rounds)):
        part = builder.round(index)
        if index in folders:
            _read_told(paths, part, texts)
            _read_untold(paths, builder, part, texts)
        for rank, told in part.told.items():
            if rank not in part.failures:
                part.failures[rank] = replace(told, problem=_MISSING)


def _read_told(paths: AttemptPaths, part: RoundBuilder, texts: dict[str, str]) -> None:
    kinds: dict[tuple[str, str, int], list[WorkerFailure]] = {}
    for failure in part.told.values():
        kinds.setdefault(kind_of(failure), []).append(failure)
    for members in kinds.values():
        if len(members) <= OF_EACH_KIND:
            for told in members:
                _read(paths, part, told.global_rank, texts)
            continue
        orders = [sorted(members, key=_by_time)]
        if members[0].failure_class is FailureClass.HANG:  # the one that is furthest behind may be the cause
            orders.append(sorted(members, key=_by_step))
        example = [found for order in orders if (found := _read_first(paths, part, order, texts)) is not None]
        if example:
            for told in members:
                if told.global_rank not in part.failures:
                    part.failures[told.global_rank] = _alike(told, example[0])


def _read_first(
    paths: AttemptPaths, part: RoundBuilder, order: Sequence[WorkerFailure], texts: dict[str, str]
) -> WorkerFailure | None:
    """Read until enough were found. Returns the first of them."""
    found: list[WorkerFailure] = []
    for told in order:
        rank = told.global_rank
        failure = part.failures.get(rank) or _read(paths, part, rank, texts)
        if failure is not None:
            found.append(failure)
        if len(found) == OF_EACH_KIND:
            break
    return found[0] if len(found) == OF_EACH_KIND else None


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


def _read_untold(paths: AttemptPaths, builder: AttemptBuilder, part: RoundBuilder, texts: dict[str, str]) -> None:
    """An event that was never written hides no failure."""
    sure = {
        rank for node in part.nodes.values() if builder.words.is_sure_of(part.index, node.node) for rank in node.ranks
    }
    if part.world_size is not None and len(sure) >= part.world_size:
        return
    for rank in sorted(_indices(paths.round_dir(part.index), rank_index)):
        if rank not in sure and rank not in part.failures:
            _read(paths, part, rank, texts)


def _read(paths: AttemptPaths, part: RoundBuilder, rank: int, texts: dict[str, str]) -> WorkerFailure | None:
    error_file = paths.rank(part.index, rank).error_file
    facts = part.facts(paths.number, rank)
    failure = read_failure(error_file, facts=facts)
    if failure is None and rank in part.told and ask_about(error_file.parent):
        failure = read_failure(error_file, facts=facts)  # an earlier report here missed it, and NFS remembers
    if failure is None:
        return None
    # Where the file lies is the truth about its place; the same text on 500 ranks is kept once.
    failure = part.failures[rank] = replace(
        failure,
        attempt=paths.number,
        round=part.index,
        global_rank=rank,
        traceback=texts.setdefault(failure.traceback, failure.traceback),
        stderr_tail=texts.setdefault(failure.stderr_tail, failure.stderr_tail),
        message=texts.setdefault(failure.message, failure.message),
        fingerprint=sys.intern(failure.fingerprint),
        host=sys.intern(failure.host),
    )
    return failure


def _by_time(failure: WorkerFailure) -> tuple[int, int]:
    return failure.ended_ns, failure.global_rank


def _by_step(failure: WorkerFailure) -> tuple[int, int, int]:
    return -1 if failure.last_step is None else failure.last_step, failure.ended_ns, failure.global_rank


def _indices(folder: os.PathLike[str], parse: Callable[[str], int | None]) -> Iterable[int]:
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    return [number for number in map(parse, names) if number is not None]
