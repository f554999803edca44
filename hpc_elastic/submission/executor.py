"""`ElasticExecutor`: submitit's executor, with agents under the function. Calls become Slurm jobs, or local processes.

An AutoExecutor (submitit 1.5) silently drops what has another executor's prefix. A program that gives
``slurm_partition`` and moves to ``cluster="elastic"`` means it all the same; so it is read where the AutoExecutor,
which is calling, holds it.
"""

from __future__ import annotations

import logging
import os
import shlex
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace
from submitit.core.core import Executor, Job
from submitit.core.utils import DelayedSubmission, JobPaths
from submitit.local.debug import DebugJob
from submitit.local.local import LocalExecutor
from submitit.slurm.slurm import SlurmExecutor

from hpc_elastic.base.clock import SystemClock
from hpc_elastic.base.self_command import worker_arguments
from hpc_elastic.errors import UsageError
from hpc_elastic.launch.run_directory import create_run
from hpc_elastic.launch.submit_job import Submission, submission_client, submit_job
from hpc_elastic.options import job_options, run_request
from hpc_elastic.options.run_request import check_values, cluster_here, slurm_job
from hpc_elastic.options.sbatch import ScriptLines, check_time_option
from hpc_elastic.options.table import Parsed, explaining
from hpc_elastic.run.paths import RunPaths
from hpc_elastic.run.spec import EntryKind, Entrypoint, RunSpec
from hpc_elastic.submission import local_process, parameters
from hpc_elastic.submission import parameters as names
from hpc_elastic.submission.call import Call, CallTerms, call_file, function_name, own_sys_path, write_call
from hpc_elastic.submission.job import ElasticJob

logger = logging.getLogger(__name__)

WORKER_MODULE = "hpc_elastic.submission.worker"
_IGNORING_NOTICE = 'trap "" USR2; exec "$@"'


class Request(Struct, frozen=True, kw_only=True):
    """A call to run; several calls, one run each, become an array."""

    calls: tuple[Call, ...]
    terms: CallTerms
    """Without the time limit and, of several calls, the name."""
    parsed: Parsed
    lines: ScriptLines
    runs_dir: Path
    python: str
    """The workers' interpreter, with its arguments, as for a shell."""
    largest: int
    """Most bytes of a call."""
    env: Mapping[str, str]


def submit_here(requests: Sequence[Request]) -> list[tuple[str, Path]]:
    """Start runs on this machine, of one call each. Returns the jobs' ids, which are the runs', and their directories.

    Nothing is started where a value is invalid (UsageError).
    """
    _log_what_files_decide(*requests)
    prepared = [(request, *_local_run(request)) for request in requests]
    return [_start(request, spec, limit) for request, spec, limit in prepared]


def _log_what_files_decide(*requests: Request) -> None:
    for line in dict.fromkeys(line for request in requests for line in request.parsed.executed):
        logger.warning("%s", line)


def _local_run(request: Request) -> tuple[RunSpec, int]:
    parsed = request.parsed
    with explaining(parsed):
        nodes = job_options.asked_nodes(parsed)
        limit = check_time_option(parsed.get("time") or "", option=parsed.source("time", "time =")) or 0
        grace = job_options.notice_seconds(parsed)
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
    """Submit one call as a job, several as an array of one run each. Returns the jobs' ids and run directories.

    `parallelism` tasks of an array run at once. Raises UsageError, SlurmError: not submitted; nothing is left.
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
            another_folder="give the executor a shared one (or allow_local_runs_dir=True where they can)",
            this_machine="cluster='local'",
        )

        def write_calls() -> None:
            for place, call in zip(submission.places, request.calls, strict=True):
                _write_call(place, request, call, limit)

        clock = SystemClock()
        client = submission_client(submission, request.env, clock, logger.warning)
        number = submit_job(
            submission, client, clock=clock, env=request.env, log=logger.warning, fill=write_calls
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
    size = write_call(call_file(paths), call, terms)
    if size > request.largest:
        raise RuntimeError(
            f"the function {terms.name} and its arguments take {size / 1e9:.2f} GB, and this submission may "
            f"take {request.largest / 1e9:.2f} GB for each; write what is large to a file, or raise max_pickle_size_gb"
        )


class ElasticDebugJob(DebugJob):  # type: ignore[misc]
    """submitit's own debug job, a world of one rank: its exceptions come out as they are, in a debugger first."""

    def __init__(self, folder: Path, submission: DelayedSubmission) -> None:
        super().__init__(folder, submission)
        # An agent's variables for the only worker, so that torch's env:// works.
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(probe.getsockname()[1]))
        self.environ.update(dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK"), "0"))
        self.environ.update(dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"), "1"))

    def report(self) -> str:
        """Always empty."""
        return ""


def slurm_arguments() -> dict[str, Any]:
    """The ``slurm_*`` arguments, without the prefix, of the AutoExecutor's call that is under way; empty: none."""
    frame = sys._getframe(1).f_back
    for _ in range(4):
        if frame is None:
            break
        is_call = frame.f_code.co_name in ("flexible_init", "_internal_update_parameters")
        if is_call and frame.f_globals.get("__name__") == "submitit.auto.auto":
            given = frame.f_locals.get("kwargs", {})
            return {name[len("slurm_") :]: value for name, value in given.items() if name.startswith("slurm_")}
        frame = frame.f_back
    return {}


class ParameterNames(frozenset[str]):
    """The executor's names, as an AutoExecutor looks at them.

    It asks whether a name is one: an unknown one is refused here, with the nearest known one. And it lists them, to
    learn what `partition=` without a prefix means on *every* cluster, where the last executor that has the name wins:
    so only those are listed that are ours alone.
    """

    def __contains__(self, name: object) -> bool:
        if super().__contains__(name):
            return True
        raise parameters.unknown(str(name))

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(name for name in super().__iter__() if name not in _OF_OTHERS))


_OF_OTHERS = frozenset(SlurmExecutor._valid_parameters() | LocalExecutor._valid_parameters())


class ElasticExecutor(Executor):  # type: ignore[misc]
    """Runs functions on every rank of every node, restarted, requeued and reported on as any run of this package.

    Parameters are given to `update_parameters`: submitit's (``nodes``, ``tasks_per_node``, ``timeout_min``,
    ``gpus_per_node`` …), those of submitit's SlurmExecutor (``partition``, ``setup``, ``additional_parameters`` …), and
    the options of ``hpc-elastic submit`` (``min_nodes``, ``spares``, ``max_restarts`` …), by their names.
    """

    job_class = ElasticJob

    def __init__(
        self,
        folder: Path | str,
        max_num_timeout: int = 3,
        max_pickle_size_gb: float = 1.0,
        python: str | None = None,
        cluster: str = "auto",
    ) -> None:
        """Args:
        folder: Everything about the jobs; under Slurm, all nodes share it. May hold ``%j``.
        max_num_timeout: Most requeues of a job because its time was over.
        max_pickle_size_gb: Most gigabytes of a submission's functions and arguments.
        python: The workers' interpreter, with its arguments, as for a shell (default: this one).
        cluster: ``slurm``; ``local``: real agents, on this machine; ``debug``: in this process; ``auto``: Slurm where
        there is one, else this machine.

        Raises:
            UsageError: an invalid value.
        """
        super().__init__(folder)
        dropped = slurm_arguments()
        self.max_num_timeout = dropped.pop("max_num_timeout", max_num_timeout)
        self.max_pickle_size_gb = dropped.pop("max_pickle_size_gb", max_pickle_size_gb)
        self.python = dropped.pop("python", python)
        if dropped:
            raise names.unknown(f"slurm_{next(iter(dropped))}")
        self.update_parameters(cluster=cluster)

    @classmethod
    def affinity(cls) -> int:
        """0: available, and taken only on request."""
        return 0

    @classmethod
    def _valid_parameters(cls) -> ParameterNames:
        return ParameterNames(names.NAMES)

    def _convert_parameters(self, params: dict[str, Any]) -> dict[str, Any]:
        """Called by an AutoExecutor with parameters that have no prefix."""
        return {**params, **names.normalized(slurm_arguments())}

    def _internal_update_parameters(self, **kwargs: Any) -> None:
        """Change parameters for the jobs to come.

        Raises UnknownParameterError, with the nearest name in the message, and UsageError for an invalid value.
        """
        changed = names.normalized(kwargs)
        wanted = {**self.parameters, **changed}
        if "max_num_timeout" in changed:
            self.max_num_timeout = changed["max_num_timeout"]
        self._parsed(wanted, "any")
        self.parameters.update(changed)

    @property
    def cluster(self) -> str:
        """``slurm``, ``local`` or ``debug``."""
        asked: str = self.parameters.get("cluster", "auto")
        if asked == "auto":
            asked = self._parsed(self.parameters, "any").get("cluster") or "auto"
        return cluster_here(asked, os.environ)

    def _parsed(self, parameters: Mapping[str, Any], name: str) -> Parsed:
        slurm = parameters.get("cluster", "auto") in ("auto", "slurm")
        parsed = names.parsed_options(parameters, job_name=name, env=os.environ, slurm=slurm)
        with explaining(parsed):
            check_values(parsed)
        return parsed

    def _internal_process_submissions(self, delayed_submissions: Sequence[DelayedSubmission]) -> list[Job[Any]]:
        cluster = self.cluster
        if cluster == "debug":
            return [ElasticDebugJob(self.folder, delayed) for delayed in delayed_submissions]
        calls = [_call(delayed) for delayed in delayed_submissions]
        many = len(calls)
        if cluster == "local":
            placed = submit_here([self._request((call,), many=many) for call in calls])
        else:
            parallelism = self.parameters.get("array_parallelism", names.DEFAULT_PARALLELISM)
            placed = submit_to_slurm(self._request(tuple(calls), many=many), parallelism=parallelism)
        jobs: list[Job[Any]] = [ElasticJob(self.folder, job_id, run_dir=run_dir) for job_id, run_dir in placed]
        for job in jobs:
            job.paths.remember()
        return jobs

    def _request(self, calls: tuple[Call, ...], *, many: int) -> Request:
        """`many`: the number of calls that share a submission's size limit."""
        name = function_name(calls[0].function)
        terms = CallTerms(
            name=name,
            folder=str(self.folder),
            timeouts_left=self.max_num_timeout,
            stderr_to_stdout=bool(self.parameters.get("stderr_to_stdout", False)),
            exceptions_are_final=self.parameters.get("restart_on", "all") != "all",
            sys_path=own_sys_path(),
        )
        parameters = {"max_num_timeout": self.max_num_timeout, **self.parameters}
        parsed = self._parsed(parameters, name)
        return Request(
            calls=calls,
            terms=terms,
            parsed=parsed,
            lines=names.script_lines(parameters),
            runs_dir=Path(os.path.abspath(JobPaths.get_first_id_independent_folder(self.folder))),
            python=self.python or parsed.get("python") or sys.executable,
            largest=int(self.max_pickle_size_gb * (1 << 30) / many),
            env=os.environ,
        )


def _call(delayed: DelayedSubmission) -> Call:
    if not callable(delayed.function):
        raise UsageError(f"{delayed.function!r} is not a function: give one to submit, with its arguments after it")
    return Call(delayed.function, tuple(delayed.args), dict(delayed.kwargs))
