"""Read a run directory into a `RunHistory`. Any file may be missing, torn, newer or foreign; reads are bounded."""

from __future__ import annotations

import gc
import os
import shlex
import sys
from collections.abc import Callable, Container, Iterable, Sequence
from functools import lru_cache
from pathlib import Path

from msgspec.structs import replace

from hpc_elastic.base import codec
from hpc_elastic.base.codec import readable_fields
from hpc_elastic.base.files import Unreadable, ask_about, names_in, read_json
from hpc_elastic.base.text import cut_end, first_of
from hpc_elastic.failures.classify import wording_of
from hpc_elastic.failures.evidence import read_failure
from hpc_elastic.failures.patterns import find_pattern
from hpc_elastic.failures.ranking import FailureClass
from hpc_elastic.failures.worker_failure import WorkerFailure
from hpc_elastic.report.clocks import Clocks
from hpc_elastic.report.collect_attempt import AttemptBuilder
from hpc_elastic.report.collect_round import EventCoverage, RoundBuilder, rank_statuses
from hpc_elastic.report.history import AttemptHistory, RunHistory
from hpc_elastic.run.event_reader import EventFile, event_files
from hpc_elastic.run.node_score import NodeRecord, NodeScore, load_record, score_nodes
from hpc_elastic.run.option_values import Scope, SectionTimeouts, StartMethod
from hpc_elastic.run.paths import (
    AttemptInfo,
    AttemptPaths,
    RunPaths,
    attempt_number,
    is_job_id,
    load_result,
    rank_index,
    round_index,
)
from hpc_elastic.run.progress import NodeHeartbeats
from hpc_elastic.run.spec import EntryKind, Entrypoint, RunSpec, decode_bad_nodes
from hpc_elastic.worker_api.records import STEP, is_section_name

OF_EACH_KIND = 16
"""Error files that are read of a round's failures that are alike: the first ones, by the events."""
_MISSING = "error.json is missing: this is what its agent's event says"


def read_failures(paths: AttemptPaths, builder: AttemptBuilder, ranks: Container[int] = ()) -> None:
    texts: dict[str, str] = {}
    reasons: dict[str, str] = {}
    clocks = builder.history.clocks
    folders = set(_indices(paths.root, round_index))
    for index in sorted(folders | set(builder.rounds)):
        part = builder.round(index)
        reader = _RoundReader(paths, part, texts, clocks)
        if index in folders:
            reader.read_reported(ranks)
            reader.read_unreported(builder.coverage)
        for rank, reported in part.reported.items():
            if rank not in part.failures:
                part.failures[rank] = replace(reported, problem=_MISSING, reason=_reason(reported, reasons))


class _RoundReader:
    def __init__(self, paths: AttemptPaths, part: RoundBuilder, texts: dict[str, str], clocks: Clocks) -> None:
        self._paths = paths
        self._part = part
        self._texts = texts
        self._clocks = clocks
        self._missing: set[int] = set()

    def _by_time(self, failure: WorkerFailure) -> tuple[int, int]:
        """The verdict goes by when a traceback was printed, where that is known."""
        since_ns = failure.ended_ns - failure.printed_ns if failure.printed_ns else 0
        return self._clocks.of_failure(failure).at_ns - since_ns, failure.global_rank

    def read_reported(self, ranks: Container[int]) -> None:
        part = self._part
        kinds: dict[tuple[str, str, int], list[WorkerFailure]] = {}
        for failure in part.reported.values():
            kinds.setdefault(wording_of(failure), []).append(failure)
        for members in kinds.values():
            if len(members) <= OF_EACH_KIND:
                for reported in members:
                    self._read(reported.global_rank)
                continue
            members.sort(key=self._by_time)
            example = self._read_some(members)
            if members[0].failure_class is FailureClass.HANG:  # the one that is furthest behind may be the cause
                self._read_some(
                    sorted(members, key=lambda reported: -1 if reported.last_step is None else reported.last_step)
                )
            for reported in members:
                if reported.global_rank in ranks and reported.global_rank not in part.failures:
                    self._read(reported.global_rank)
                is_new = reported.global_rank not in part.failures and reported.global_rank not in self._missing
                if is_new and example is not None:
                    part.failures[reported.global_rank] = replace(
                        reported,
                        exception_type=example.exception_type,
                        category=example.category,
                        reason=example.reason,
                        retryable=example.retryable,
                        node_suspect=example.node_suspect,
                    )

    def read_unreported(self, coverage: EventCoverage) -> None:
        """An event that was never written hides no failure."""
        part = self._part
        unsure = coverage.unsure(part.history.index)
        sure = _all_of(tuple(node.ranks for node in part.nodes.values() if node.node not in unsure))
        if part.history.world_size is not None and len(sure) >= part.history.world_size:
            return
        for rank in sorted(_indices(self._paths.round_dir(part.history.index), rank_index)):
            if rank not in sure and rank not in part.failures and rank not in self._missing:
                self._read(rank)

    def _read_some(self, order: Sequence[WorkerFailure]) -> WorkerFailure | None:
        """Returns the first; None where there are not as many: all have been tried."""
        found: list[WorkerFailure] = []
        for reported in order:
            failure = self._part.failures.get(reported.global_rank) or self._read(reported.global_rank)
            if failure is not None:
                found.append(failure)
            if len(found) == OF_EACH_KIND:
                return found[0]
        return None

    def _read(self, rank: int) -> WorkerFailure | None:
        part, texts = self._part, self._texts
        error_file = self._paths.rank(part.history.index, rank).error_file
        facts = part.facts(self._paths.number, rank)
        failure = read_failure(error_file, facts=facts)
        if failure is None and rank in part.reported and ask_about(error_file.parent):
            failure = read_failure(error_file, facts=facts)  # an earlier report here missed it, and NFS remembers
        if failure is None:
            self._missing.add(rank)
            return None
        # Where the file lies is the truth about its place; the same text on 500 ranks is kept once.
        failure = part.failures[rank] = replace(
            failure,
            attempt=self._paths.number,
            round=part.history.index,
            global_rank=rank,
            traceback=texts.setdefault(failure.traceback, failure.traceback),
            stderr_tail=texts.setdefault(failure.stderr_tail, failure.stderr_tail),
            message=texts.setdefault(failure.message, failure.message),
            fingerprint=sys.intern(failure.fingerprint),
            host=sys.intern(failure.host),
        )
        return failure


@lru_cache(maxsize=1)
def _all_of(ranks: tuple[tuple[int, ...], ...]) -> frozenset[int]:
    """They are the same in most rounds."""
    return frozenset().union(*ranks)


def _reason(reported: WorkerFailure, known: dict[str, str]) -> str:
    if reported.failure_class is not FailureClass.SYMPTOM:
        return ""
    key = reported.fingerprint or reported.message
    if key not in known:
        found = find_pattern(reported.message)
        known[key] = found.says if found is not None and found.failure_class is FailureClass.SYMPTOM else ""
    return known[key]


def _indices(folder: Path, parse: Callable[[str], int | None]) -> Iterable[int]:
    try:
        names = names_in(folder)
    except OSError:
        return []
    return [number for number in map(parse, names) if number is not None]


_JSON_LIMIT = 4 << 20
_LONGEST = 4000
_WORKER = "hpc_elastic.submission.worker"


def collect_run(run_dir: Path | str, *, ranks: Container[int] = ()) -> RunHistory:
    """Read a run while it goes on, after it ended, or from a copy with half of the files missing.

    Args:
        run_dir: The run.
        ranks: Global ranks that are read in full. Some of the others' failures that are alike stand for all: those that
            are not read have no traceback, and are from `EvidenceSource.EVENT`.

    Raises:
        OSError: `run_dir` itself can't be listed.
    """
    root = Path(os.path.abspath(run_dir))
    paths = RunPaths(root)
    problems: list[str] = []
    spec = read_json(paths.run_json, limit=_JSON_LIMIT)
    if isinstance(spec, str):
        problems.append(f"run.json: {spec}")
        spec = {}
    known = readable_fields(RunSpec, spec)
    entrypoint: Entrypoint = known.get("entrypoint") or Entrypoint(kind=EntryKind.COMMAND, target="")
    timeouts: SectionTimeouts = known.get("section_timeouts") or SectionTimeouts()
    sections = tuple(filter(is_section_name, timeouts.seconds))
    given = str(known.get("name", ""))
    # An image's Python is not ours to fork, and a command may be no Python script.
    can_fork = entrypoint.kind is not EntryKind.COMMAND and known.get("container_image") is None
    # The run's own name where a function is called, and of `bash -c` and a container's runtime.
    is_named = entrypoint.kind is EntryKind.COMMAND or _WORKER in entrypoint.args
    name = (is_named and given) or entrypoint.target.rsplit("/", 1)[-1] or given or root.name
    numbers = sorted(n for n in map(attempt_number, os.listdir(root)) if n is not None)
    record = load_record(paths.nodes_json)
    if record.problem:
        problems.append(f"nodes.json: {record.problem}")
    return RunHistory(
        run_id=cut_end(known.get("run_id") or root.name, _LONGEST),
        run_dir=str(root),
        name=cut_end(name, _LONGEST),
        max_requeues=known.get("max_requeues"),
        command="" if _WORKER in entrypoint.args else shlex.join(filter(None, (entrypoint.target, *entrypoint.args))),
        section_timeouts=(*sections, STEP) if timeouts.learns_step and STEP not in sections else sections,
        step_timeout=None if timeouts.learns_step else timeouts.seconds.get(STEP),
        could_fork=can_fork and known.get("start_method") is not StartMethod.FORKSERVER,
        attempts=_collect_attempts(paths, numbers, ranks),
        bad_nodes=_bad_nodes(record, spec.get("bad_nodes")),
        excluded=record.excluded,
        problems=tuple(problems),
    )


def _bad_nodes(record: NodeRecord, option: object) -> tuple[NodeScore, ...]:
    """The scores are those at the record's time: a report says the same whenever it is made."""
    settings = decode_bad_nodes(option)
    if settings.scope is Scope.OFF:
        return ()
    scores = score_nodes(record.evidence, now_ns=record.saved_ns, hours=settings.hours)
    return tuple(score for score in scores if score.is_bad)


def _collect_attempts(paths: RunPaths, numbers: Sequence[int], ranks: Container[int]) -> tuple[AttemptHistory, ...]:
    # Hundreds of thousands of objects that all stay: the collector would look at each of them again and again.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return tuple(collect_attempt(paths.attempt(number), ranks=ranks) for number in numbers)
    finally:
        if was_enabled:
            gc.enable()


def collect_attempt(paths: AttemptPaths, *, ranks: Container[int] = ()) -> AttemptHistory:
    history = AttemptHistory(number=paths.number)
    builder = AttemptBuilder(history)
    info = read_json(paths.attempt_json, limit=_JSON_LIMIT)
    if isinstance(info, str):
        history.problems += (f"attempt.json: {info}",)
    else:
        known = readable_fields(AttemptInfo, info)
        history.job_id = known["job_id"] if is_job_id(known.get("job_id")) else ""
        history.nodes = known.get("nodes", ())
        history.started_ns = known.get("started_ns")
        history.versions = tuple(known.get("versions", {}).items())
    for path in event_files(paths.events):
        builder.coverage.begin_file()
        file = EventFile(path)
        for line in file.events():
            try:
                builder.take(line)
            except (TypeError, ValueError, OverflowError) as error:
                builder.coverage.miss()
                history.problems += (f"event {line.name!r} could not be read: {error}",)
        history.problems += tuple(file.left_out())
    builder.coverage.begin_file()
    _read_result(paths, builder)
    history.problems += tuple(_describe_missing(builder))
    history.clocks = builder.clocks.build()
    read_failures(paths, builder, ranks)
    _read_heartbeats(paths, builder)
    return builder.build()


def _read_result(paths: AttemptPaths, builder: AttemptBuilder) -> None:
    """Fill in the end that no event reports: events/ may be missing, or may not have fitted on a full disk."""
    result = load_result(paths.result_json)
    if result is None or builder.history.exit_code is not None:
        return
    builder.has_result, history = True, builder.history
    history.outcome = history.outcome or result.outcome
    history.reason = history.reason or result.reason
    history.exit_code = result.exit_code
    history.decision = history.decision or f"{result.action}: {result.decision}"


def _describe_missing(builder: AttemptBuilder) -> list[str]:
    """The events that a copy, or a full disk, has lost. A run that has just begun has none yet."""
    coverage, found = builder.coverage, []
    has_begun = bool(coverage.heard or builder.history.ended_ns or builder.has_result)
    if has_begun and not builder.is_supervised:
        found.append("the supervisor's events are missing")
    # A node that was given up may never have had an agent, whose events could be missing.
    reported = coverage.heard | set(builder.given_up)
    silent = [name for node, name in enumerate(builder.history.nodes) if node not in reported]
    if silent and has_begun:
        found.append(f"no events of {len(silent)} of {len(builder.history.nodes)} nodes: {first_of(silent, 3)}")
    if coverage.missing:
        whose = first_of([builder.name_of(node) for node in sorted(coverage.missing)], 3)
        found.append(f"{sum(coverage.missing.values())} lines of the events of {whose} are missing or torn")
    return found


def _read_heartbeats(paths: AttemptPaths, builder: AttemptBuilder) -> None:
    """Each node's last summary: it is about the round that the node took part in last."""
    folder = paths.heartbeats(0).parent
    try:
        names = [name for name in names_in(folder) if name.endswith(".json") and not name.startswith(".")]
    except OSError:
        return
    for name in sorted(names):
        found = codec.load(folder / name, NodeHeartbeats, limit=_JSON_LIMIT)
        if isinstance(found, Unreadable) or found.round not in builder.rounds:
            continue
        if found.progress is not None:
            builder.rounds[found.round].history.progress.setdefault(found.node, found.progress)
        statuses = builder.rounds[found.round].rank_statuses
        for status in rank_statuses(found.ranks, node=found.node, when=found.written_ns):
            statuses.setdefault(status.rank, status)
