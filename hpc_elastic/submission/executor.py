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
from hpc_elastic.submission import local_process
from hpc_elastic.submission import parameters as names
from hpc_elastic.submission.call import Call, CallTerms, function_name, own_sys_path, write_call
from hpc_elastic.submission.job import ElasticJob

logger = logging.getLogger(__name__)

WORKER_MODULE = "hpc_elastic.submission.worker"
_IGNORING_NOTICE = 'trap "" USR2; exec "$@"'


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
    """An AutoExecutor asks whether a name is one: an unknown one is refused here, with the nearest known one.

    It also lists names, to learn what `partition=` means on *every* cluster, where the last executor that has it wins:
    so only those are listed that are ours alone.
    """

    def __contains__(self, name: object) -> bool:
        if super().__contains__(name):
            return True
        raise names.unknown(str(name))

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
        return {**params, **names.normalized(slurm_arguments())}

    def _internal_update_parameters(self, **kwargs: Any) -> None:
        changed = names.normalized(kwargs)
        wanted = {**self.parameters, **changed}
        if "max_num_timeout" in changed:
            self.max_num_timeout = changed["max_num_timeout"]
        self._parsed(wanted, "any")
        self.parameters.update(changed)

    @property
    def cluster(self) -> str:
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
        placed = self._start_here(calls) if cluster == "local" else self._submit_to_slurm(calls)
        jobs: list[Job[Any]] = [ElasticJob(self.folder, job_id, run_dir=run_dir) for job_id, run_dir in placed]
        for job in jobs:
            job.paths.remember()
        return jobs

    @property
    def _runs_dir(self) -> Path:
        return Path(os.path.abspath(JobPaths.get_first_id_independent_folder(self.folder)))

    @property
    def _lines(self) -> ScriptLines:
        setup, teardown = (tuple(self.parameters.get(key, ())) for key in ("setup", "teardown"))
        return ScriptLines(setup=setup, teardown=teardown)

    def _options(self, *calls: Call) -> list[Parsed]:
        given = {"max_num_timeout": self.max_num_timeout, **self.parameters}
        found = [self._parsed(given, function_name(call.function)) for call in calls]
        for line in dict.fromkeys(line for parsed in found for line in parsed.executed):
            logger.warning("%s", line)
        return found

    def _start_here(self, calls: Sequence[Call]) -> list[tuple[str, Path]]:
        """An invalid value (UsageError) starts none."""
        prepared = []
        for parsed in self._options(*calls):
            with explaining(parsed):
                nodes = job_options.asked_nodes(parsed)
                limit = check_time_option(parsed.get("time") or "", option=parsed.source("time", "time =")) or 0
                grace = job_options.notice_seconds(parsed)
                if limit:
                    grace = max(1, min(grace, limit // 4))
                cwd = run_request.working_directory(parsed, os.environ)
                spec = run_request.build_spec(
                    parsed, cluster="local", nodes=nodes, cwd=cwd, env=os.environ, grace=grace
                )
            prepared.append((self._calling(spec, parsed), limit))
        placed = []
        for call, (spec, limit) in zip(calls, prepared, strict=True):
            run = create_run(spec, self._runs_dir)
            try:
                self._write_call(run.paths, call, limit, many=len(calls))
                local_process.start(run.paths, limit=limit, delay=spec.signal_grace, lines=self._lines, cwd=spec.cwd)
            except BaseException:
                run.discard()
                raise
            placed.append((run.paths.run_id, run.paths.root))
        return placed

    def _submit_to_slurm(self, calls: Sequence[Call]) -> list[tuple[str, Path]]:
        """Several calls are an array of one run each. Raises UsageError, SlurmError: nothing is left."""
        (parsed,), count = self._options(calls[0]), len(calls)
        at_once = min(count, self.parameters.get("array_parallelism", names.DEFAULT_PARALLELISM))
        with explaining(parsed):
            job = slurm_job(parsed, os.environ, array=f"0-{count - 1}%{at_once}" if count > 1 else "")
            limit = check_time_option(job.options.time or "") or 0
            submission = Submission(
                job=replace(job, spec=self._calling(job.spec, parsed)),
                runs_dir=self._runs_dir,
                lines=self._lines,
                another_folder="give the executor a shared one (or allow_local_runs_dir=True where they can)",
                this_machine="cluster='local'",
            )

            def write_calls() -> None:
                for place, call in zip(submission.places, calls, strict=True):
                    self._write_call(place, call, limit, many=count)

            clock = SystemClock()
            client = submission_client(submission, os.environ, clock, logger.warning)
            number = submit_job(
                submission, client, clock=clock, env=os.environ, log=logger.warning, fill=write_calls
            ).number
        ids = [f"{number}_{task}" for task in job.tasks] or [number]
        return [(one, place.root) for one, place in zip(ids, submission.places, strict=True)]

    def _calling(self, spec: RunSpec, parsed: Parsed) -> RunSpec:
        """The notice, which would end an interpreter that starts, is ignored until the worker can hear it."""
        python = self.python or parsed.get("python") or sys.executable
        words = shlex.split(python)
        if not words:
            raise UsageError(f"python={python!r}: give the interpreter's path, or the command that starts it")
        args = ("-c", _IGNORING_NOTICE, "worker", *words, *worker_arguments(WORKER_MODULE))
        host = {"python": words[0]} if len(words) == 1 else {}
        entrypoint = Entrypoint(kind=EntryKind.COMMAND, target="/bin/sh", args=args, **host)
        return replace(spec, entrypoint=entrypoint, preemption_signal="SIGUSR2")

    def _write_call(self, paths: RunPaths, call: Call, limit: int, *, many: int) -> None:
        terms = CallTerms(
            name=function_name(call.function),
            folder=str(self.folder),
            timeout_min=limit / 60,
            timeouts_left=self.max_num_timeout,
            stderr_to_stdout=bool(self.parameters.get("stderr_to_stdout", False)),
            exceptions_are_final=self.parameters.get("restart_on", "all") != "all",
            sys_path=own_sys_path(),
        )
        size, largest = write_call(paths.call_pickle, call, terms), int(self.max_pickle_size_gb * (1 << 30) / many)
        if size > largest:
            raise RuntimeError(
                f"the function {terms.name} and its arguments take {size / 1e9:.2f} GB, and this submission may "
                f"take {largest / 1e9:.2f} GB for each; write what is large to a file, or raise max_pickle_size_gb"
            )


def _call(delayed: DelayedSubmission) -> Call:
    if not callable(delayed.function):
        raise UsageError(f"{delayed.function!r} is not a function: give one to submit, with its arguments after it")
    return Call(delayed.function, tuple(delayed.args), dict(delayed.kwargs))
