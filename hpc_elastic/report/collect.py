"""Read a run directory into a `RunHistory`. Any file may be missing, torn, newer or foreign; reads are bounded."""

from __future__ import annotations

import gc
import os
from collections.abc import Container, Sequence
from pathlib import Path

from hpc_elastic.atomic_file import read_json
from hpc_elastic.errors import UsageError
from hpc_elastic.events import event_files, read_event_file
from hpc_elastic.node_records import NodeRecord, load_record
from hpc_elastic.node_score import BadNodeSettings, NodeScore, Scope, parse_bad_nodes, score_nodes
from hpc_elastic.report.collect_attempt import AttemptBuilder
from hpc_elastic.report.collect_evidence import read_failures
from hpc_elastic.report.collect_round import rank_statuses
from hpc_elastic.report.collect_values import integer, job_id_of, names_of, text_of
from hpc_elastic.report.history import AttemptHistory, RunHistory
from hpc_elastic.run_paths import AttemptPaths, RunPaths, attempt_number

_JSON_LIMIT = 4 << 20
_WORKER = "hpc_elastic.submission.worker"


def collect_run(run_dir: Path | str, *, ranks: Container[int] = ()) -> RunHistory:
    """Read what is there. Works while the run goes on, after it ended, and on a copy with half of the files missing.

    Args:
        run_dir: The run.
        ranks: Global ranks of which all is wanted. Of others whose failures are alike some stand for all: what is known
            of those without a look at their error files is a failure without traceback, from `EvidenceSource.EVENT`.

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
    entrypoint = spec.get("entrypoint")
    target = text_of(entrypoint.get("target")) if isinstance(entrypoint, dict) else ""
    if isinstance(entrypoint, dict) and _WORKER in names_of(entrypoint.get("args")):
        target = ""  # it calls a function, whose name is the run's
    numbers = sorted(n for n in map(attempt_number, os.listdir(root)) if n is not None)
    record = load_record(paths.nodes_json)
    if record.problem:
        problems.append(f"nodes.json: {record.problem}")
    return RunHistory(
        run_id=text_of(spec.get("run_id")) or root.name,
        run_dir=str(root),
        name=target.rsplit("/", 1)[-1] or text_of(spec.get("name")) or root.name,
        max_requeues=integer(spec.get("max_requeues")),
        attempts=_collect_attempts(paths, numbers, ranks),
        bad_nodes=_bad_nodes(record, text_of(spec.get("bad_nodes"))),
        excluded=record.excluded,
        problems=tuple(problems),
    )


def _bad_nodes(record: NodeRecord, option: str) -> tuple[NodeScore, ...]:
    """As they were when the record was written: a report says the same whenever it is made."""
    try:
        settings = parse_bad_nodes(option)
    except UsageError:
        settings = BadNodeSettings()  # a newer version's word
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
    """Read one attempt's folder; `ranks` as in `collect_run`."""
    builder = AttemptBuilder(number=paths.number)
    info = read_json(paths.attempt_json, limit=_JSON_LIMIT)
    if isinstance(info, str):
        builder.problems.append(f"attempt.json: {info}")
    else:
        builder.job_id = job_id_of(info.get("job_id"))
        builder.nodes = names_of(info.get("nodes"))
        builder.started_ns = integer(info.get("started_ns"))
    for path in event_files(paths.events):
        builder.coverage.begin_file()
        for event in read_event_file(path, tell=builder.problems.append):
            try:
                builder.take(event)
            except (TypeError, ValueError, OverflowError) as error:
                builder.coverage.miss()
                builder.problems.append(f"event {text_of(event.get('event'))!r} could not be read: {error}")
    builder.coverage.begin_file()
    builder.problems += _describe_missing(builder)
    read_failures(paths, builder, ranks)
    _read_heartbeats(paths, builder)
    return builder.build()


def _describe_missing(builder: AttemptBuilder) -> list[str]:
    """What a copy, or a disk that was full, has lost of the events. A run that has just begun has none yet."""
    coverage, found = builder.coverage, []
    has_begun = bool(coverage.heard or builder.ended_ns)
    if has_begun and not builder.is_supervised:
        found.append("the supervisor's events are missing")
    # A node that was given up may never have had an agent, which then has said nothing that could be missing.
    told = coverage.heard | set(builder.given_up)
    silent = [name for node, name in enumerate(builder.nodes) if node not in told]
    if silent and has_begun:
        found.append(f"no events of {len(silent)} of {len(builder.nodes)} nodes: {_some(silent)}")
    if coverage.missing:
        whose = _some([builder.name_of(node) for node in sorted(coverage.missing)])
        found.append(f"{sum(coverage.missing.values())} lines of the events of {whose} are missing or torn")
    return found


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _read_heartbeats(paths: AttemptPaths, builder: AttemptBuilder) -> None:
    """Each node's last summary: it is about the round that the node took part in last."""
    folder = paths.heartbeats(0).parent
    for name in sorted(_names_in(folder)):
        value = read_json(folder / name, limit=_JSON_LIMIT)
        if isinstance(value, str):
            continue
        index, node, when = (integer(value.get(key)) for key in ("round", "node", "written_ns"))
        if index is None or index not in builder.rounds or node is None or when is None:
            continue
        statuses = builder.rounds[index].rank_statuses
        for status in rank_statuses(value.get("ranks"), node=node, when=when):
            statuses.setdefault(status.rank, status)


def _names_in(folder: Path) -> list[str]:
    try:
        return [name for name in os.listdir(folder) if name.endswith(".json") and not name.startswith(".")]
    except OSError:
        return []
