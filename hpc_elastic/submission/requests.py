"""From calls and their parameters to runs: Slurm's jobs, or processes of this machine."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from hpc_elastic.base.clock import SystemClock
from hpc_elastic.base.self_command import worker_arguments
from hpc_elastic.errors import UsageError
from hpc_elastic.launch.run_directory import create_run
from hpc_elastic.launch.submit_job import MessageHints, Submission, submission_client, submit_job
from hpc_elastic.options import run_request
from hpc_elastic.options.run_request import slurm_job
from hpc_elastic.options.sbatch import ScriptLines, check_time_option, parse_nodes
from hpc_elastic.options.table import Parsed, explaining
from hpc_elastic.run.paths import RunPaths
from hpc_elastic.run.spec import EntryKind, Entrypoint, RunSpec
from hpc_elastic.submission import local_process, places
from hpc_elastic.submission.call import Call, CallTerms, function_name, write_call

logger = logging.getLogger(__name__)

WORKER_MODULE = "hpc_elastic.submission.worker"
_IGNORING_NOTICE = 'trap "" USR2; exec "$@"'
_HINTS = MessageHints(
    another_folder="give the executor a shared one (or allow_local_runs_dir=True where they can)",
    this_machine="cluster='local'",
)


class Request(Struct, frozen=True, kw_only=True):
    """One call that is to become a run; several, one run each, are to become an array."""

    calls: tuple[Call, ...]
    terms: CallTerms
    """But for the time limit and, of several calls, the name."""
    parsed: Parsed
    lines: ScriptLines
    runs_dir: Path
    """Absolute."""
    python: str
    """The workers' interpreter, with its arguments, as for a shell."""
    largest: int
    """Bytes that a call may take."""
    env: Mapping[str, str]


def submit_here(requests: Sequence[Request]) -> list[tuple[str, Path]]:
    """Start runs on this machine, of one call each.

    Returns:
        The jobs' ids, which are the runs', and the run directories, in order.

    Raises:
        UsageError: a value that can't be right: nothing is started then.
    """
    _log_what_files_decide(*requests)
    prepared = [(request, *_local_run(request)) for request in requests]
    return [_start(request, spec, limit) for request, spec, limit in prepared]


def _log_what_files_decide(*requests: Request) -> None:
    for line in dict.fromkeys(line for request in requests for line in request.parsed.executed):
        logger.warning("%s", line)


def _local_run(request: Request) -> tuple[RunSpec, int]:
    """What it will hold, and the seconds that an attempt may take; 0: as long as it likes."""
    parsed = request.parsed
    with explaining(parsed):
        nodes = parse_nodes(parsed.get("nodes") or "1", option=parsed.source("nodes", "nodes ="))
        limit = check_time_option(parsed.get("time") or "", option=parsed.source("time", "time =")) or 0
        grace = run_request.notice_seconds(parsed)
        if limit:
            grace = max(1, min(grace, limit // 4))
        cwd = run_request.working_directory(parsed, request.env)
        spec = run_request.build_spec(parsed, cluster="local", nodes=nodes, cwd=cwd, env=request.env, grace=grace)
    return _calling(spec, request), limit


def _start(request: Request, spec: RunSpec, limit: int) -> tuple[str, Path]:
    run = create_run(spec, request.runs_dir)
    try:
        _write_call(run.paths, request, request.calls[0], limit)
        local_process.start(
            run.paths,
            limit=float(limit),
            delay=float(spec.signal_grace),
            lines=request.lines,
            env=request.env,
            cwd=spec.cwd,
        )
    except BaseException:
        run.discard()
        raise
    return run.paths.run_id, run.paths.root


def submit_to_slurm(request: Request, *, parallelism: int) -> list[tuple[str, Path]]:
    """Submit one call as a job, several as an array of one run each.

    Args:
        request: All of it.
        parallelism: So many tasks of an array run at once.

    Returns:
        The jobs' ids and run directories, in order.

    Raises:
        UsageError: it can't be submitted as asked.
        SlurmError: Slurm did not take it. Nothing is left then.
    """
    _log_what_files_decide(request)
    count = len(request.calls)
    array = f"0-{count - 1}%{min(count, parallelism)}" if count > 1 else ""
    with explaining(request.parsed):
        job = slurm_job(request.parsed, request.env, array=array)
        limit = check_time_option(job.options.time or "") or 0
        submission = Submission(
            job=replace(job, spec=_calling(job.spec, request)),
            runs_dir=request.runs_dir,
            lines=request.lines,
            hints=_HINTS,
        )

        def write_calls() -> None:
            for place, call in zip(submission.places, request.calls, strict=True):
                _write_call(place, request, call, limit)

        clock = SystemClock()
        client = submission_client(submission, request.env, clock, logger.warning)
        number = submit_job(
            submission, client, clock=clock, env=request.env, tell=logger.warning, fill=write_calls
        ).number
    ids = [f"{number}_{task}" for task in job.tasks] or [number]
    return [(one, place.root) for one, place in zip(ids, submission.places, strict=True)]


def _calling(spec: RunSpec, request: Request) -> RunSpec:
    """A run whose workers call a function.

    An interpreter that starts would die of a notice: until the worker can hear it, the signal is ignored, and then the
    worker looks whether one has come.
    """
    words = shlex.split(request.python)
    if not words:
        raise UsageError(f"python={request.python!r}: give the interpreter's path, or the command that starts it")
    args = ("-c", _IGNORING_NOTICE, "worker", *words, *worker_arguments(WORKER_MODULE))
    host = {"python": words[0]} if len(words) == 1 else {}
    entrypoint = Entrypoint(kind=EntryKind.COMMAND, target="/bin/sh", args=args, **host)
    return replace(spec, entrypoint=entrypoint, preemption_signal="SIGUSR2")


def _write_call(paths: RunPaths, request: Request, call: Call, limit: int) -> None:
    terms = replace(request.terms, name=function_name(call.function), timeout_min=limit / 60)
    size = write_call(places.call_file(paths), call, terms)
    if size > request.largest:
        raise RuntimeError(
            f"the function {terms.name} and its arguments take {size / 1e9:.2f} GB, and this submission may "
            f"take {request.largest / 1e9:.2f} GB for each; write what is large to a file, or raise max_pickle_size_gb"
        )
