"""A run as submitit's users know it: its `JobPaths`, its ``submitit.JobEnvironment()``, its results and its errors.

All is read in the run's files alone.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from submitit.core.job_environment import JobEnvironment
from submitit.core.utils import FailedJobError, JobPaths, UncompletedJobError

from hpc_elastic.base.files import names_in, read_bytes, read_json
from hpc_elastic.errors import HpcElasticError, UnsafePathError
from hpc_elastic.run.log_pieces import find_pieces, piece_path
from hpc_elastic.run.paths import Outcome, RankPaths, RunPaths, StoredResult, load_newest_result
from hpc_elastic.submission.call import (
    FOLDER_VARIABLE,
    JOB_VARIABLE,
    UnreadableObjectError,
    newest_round,
    ranks,
    read_head,
    read_object,
    rounds,
)


class ElasticJobPaths(JobPaths):  # type: ignore[misc]
    """Restarts change the paths, so they are looked up on each use."""

    def __init__(self, folder: Path | str, job_id: str, task_id: int | None = None, *, run_dir: Path | None) -> None:
        super().__init__(folder, job_id=job_id, task_id=task_id)
        self.run_dir = Path(os.path.realpath(self._link)) if run_dir is None else run_dir

    @property
    def run(self) -> RunPaths:
        return RunPaths(self.run_dir)

    @property
    def _link(self) -> Path:
        return Path(self.folder) / f"{self.job_id}_run"

    def remember(self) -> None:
        Path(self.folder).mkdir(parents=True, exist_ok=True)
        self._link.unlink(missing_ok=True)  # ids come back
        self._link.symlink_to(self.run_dir)

    @property
    def submission_file(self) -> Path:
        return self.run.script

    @property
    def submitted_pickle(self) -> Path:
        return self.run.call_pickle

    @property
    def result_pickle(self) -> Path:
        return self._rank.result_pickle

    @property
    def stdout(self) -> Path:
        return self._rank.stdout

    @property
    def stderr(self) -> Path:
        return self._rank.stderr

    @property
    def _rank(self) -> RankPaths:
        place = newest_round(self.run)
        return self.run.attempt(0).rank(0, self.task_id) if place is None else place.rank(self.task_id)


class ElasticJobEnvironment(JobEnvironment):  # type: ignore[misc]
    _env: ClassVar[dict[str, str]] = {
        "job_id": JOB_VARIABLE,
        "num_tasks": "WORLD_SIZE",
        "num_nodes": "GROUP_WORLD_SIZE",
        "node": "GROUP_RANK",
        "global_rank": "RANK",
        "local_rank": "LOCAL_RANK",
    }

    @property
    def raw_job_id(self) -> str:
        return os.environ.get("SLURM_JOB_ID") or os.environ[JOB_VARIABLE]

    @property
    def job_id(self) -> str:
        return os.environ[JOB_VARIABLE]

    @property
    def array_job_id(self) -> str | None:
        return os.environ.get("SLURM_ARRAY_JOB_ID")

    @property
    def array_task_id(self) -> str | None:
        return os.environ.get("SLURM_ARRAY_TASK_ID")

    @property
    def hostnames(self) -> list[str]:
        from hpc_elastic.base.clock import SystemClock
        from hpc_elastic.launch.run_status import read_status

        run_dir = os.environ.get("HPC_ELASTIC_RUN_DIR")
        if run_dir is None or "SLURM_JOB_ID" not in os.environ:
            return [self.hostname]
        return list(read_status(RunPaths(Path(run_dir)), clock=SystemClock()).members) or [self.hostname]

    @property
    def paths(self) -> ElasticJobPaths:
        run_dir = Path(os.environ["HPC_ELASTIC_RUN_DIR"])
        return ElasticJobPaths(os.environ[FOLDER_VARIABLE], self.job_id, self.global_rank, run_dir=run_dir)

    def _requeue(self, countdown: int) -> None:
        """No effect: the supervisor requeues the job when all ranks have saved."""


class _CausedError(HpcElasticError):
    """submitit's errors take a text; these take facts, and pickle with them and with their cause."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.facts, self.__cause__)


def _rebuild(error_type: Any, facts: dict[str, Any], cause: BaseException | None) -> Any:
    error = error_type(**facts)
    error.__cause__ = cause
    return error


class ElasticJobFailedError(_CausedError, FailedJobError):  # type: ignore[misc]
    """The job's function failed: the text is the report's verdict, the cause the function's exception, if any."""

    template = "job {job_id} failed\n{report}"


class ElasticJobUncompletedError(_CausedError, UncompletedJobError):  # type: ignore[misc]
    """The job ended without a result: cancelled, out of time, never begun."""

    template = "job {job_id} has no result: {why}\n{report}"


class WorkerTracebackError(HpcElasticError):
    template = "\n{traceback}"


class WorkerRaisedError(HpcElasticError):
    template = "{type}: {message}"


def as_cause(error: BaseException | None, head: dict[str, Any]) -> BaseException:
    """`error` is None where no copy of it could be made; `head` is its file's."""
    facts = {name: str(head.get(name, "")) for name in ("type", "message")}
    found = error if error is not None else WorkerRaisedError(**facts)
    found.__cause__ = WorkerTracebackError(traceback=str(head.get("traceback", "")).rstrip())
    return found


_LONGEST_REPORT = 64 << 10


def state_of(end: StoredResult) -> str:
    from hpc_elastic.launch.site import Meaning  # a worker that asks submitit for its place needs none of launch

    is_out_of_time = end.outcome == Outcome.PREEMPTED.value and end.notice == Meaning.LIMIT.value
    return "TIMEOUT" if is_out_of_time else _STATES.get(end.outcome, "FAILED")


_STATES = {
    Outcome.SUCCEEDED.value: "COMPLETED",
    Outcome.CANCELLED.value: "CANCELLED",
    Outcome.PREEMPTED.value: "PREEMPTED",
    Outcome.TIMED_OUT.value: "TIMEOUT",
}


def find_end(paths: RunPaths) -> StoredResult | None:
    """The run's end; None while it runs, waits, or is about to come back."""
    from hpc_elastic.launch.requeue import RequeueAction

    stored = load_newest_result(paths)
    return None if stored is None or stored.action == RequeueAction.REQUEUE.value else stored


def world_size(paths: RunPaths) -> int | None:
    place = newest_round(paths)
    found = ranks(place.attempt.round_dir(place.round)) if place is not None else []
    return found[-1] + 1 if found else None


def read_result(paths: RunPaths, rank: int) -> Any:
    place = newest_round(paths)
    if place is None:
        raise UnreadableObjectError(path=str(paths.root), why="no worker has begun", errno=errno.ENOENT)
    path = place.rank(rank).result_pickle
    try:
        return read_object(path)
    except UnreadableObjectError as error:
        if error.errno is None:
            raise
        raise UnreadableObjectError(
            path=str(path), why=f"rank {rank} ended without returning anything (by sys.exit, say)", errno=error.errno
        ) from None


def results_count(paths: RunPaths) -> int | None:
    """Rank 0's file is certain: a mount may show a folder as it was a minute ago, with fewer ranks in it."""
    place = newest_round(paths)
    if place is None:
        return None
    try:
        return int(read_head(place.rank(0).result_pickle)["world_size"])
    except (UnreadableObjectError, KeyError, TypeError, ValueError):
        return None


def read_exception(paths: RunPaths) -> tuple[BaseException | None, dict[str, Any]] | None:
    """The exception is None where no copy could be made; the head of its file says then what it was."""
    for path in _exception_files(paths):
        try:
            head = read_head(path)
        except (UnreadableObjectError, UnsafePathError):
            continue
        try:
            found = read_object(path)
        except UnreadableObjectError:
            continue
        except UnsafePathError:
            found = None  # a copy: its head is only text
        return found if isinstance(found, BaseException) else None, head
    return None


def _exception_files(paths: RunPaths) -> Iterator[Path]:
    found = paths.begun_attempts()
    if not found:
        return
    report = read_json(found[-1].report_json)
    verdict = {} if isinstance(report, str) else report.get("verdict") or {}
    failure = verdict.get("failure") or {}
    with suppress(KeyError, TypeError, ValueError):  # it is about a node, say
        attempt, number, rank = int(verdict["attempt"]), int(verdict["round"]), int(failure["global_rank"])
        yield paths.attempt(attempt).rank(number, rank).exception_pickle
    place = newest_round(paths)
    if place is not None:
        written = [place.rank(rank).exception_pickle for rank in ranks(place.attempt.round_dir(place.round))]
        yield from sorted(filter(Path.exists, written), key=lambda path: path.stat().st_mtime_ns)


def report_text(paths: RunPaths) -> str:
    found = paths.begun_attempts()
    try:
        return read_bytes(found[-1].report_text, limit=_LONGEST_REPORT).decode("utf-8", "replace").strip()
    except (IndexError, OSError, UnsafePathError):
        return ""


def output(paths: RunPaths, rank: int, stream: str) -> str | None:
    texts = []
    for attempt in paths.begun_attempts():
        for number in rounds(attempt):
            text = _whole(getattr(attempt.rank(number, rank), stream))
            if text is not None:
                texts.append(text)
    return "".join(texts) if texts else None


def _whole(path: Path) -> str | None:
    try:
        pieces = [piece_path(path, number) for number in find_pieces(path, names=names_in)]
    except OSError:
        return None
    parts = []
    for piece in (*pieces, path):
        try:
            parts.append(read_bytes(piece, limit=sys.maxsize))
        except (OSError, UnsafePathError):
            continue  # rotated away meanwhile, or planted in what this is a copy of
    return b"".join(parts).decode("utf-8", "replace") if parts else None
