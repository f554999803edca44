"""`ElasticExecutor`: submitit's executor, with agents under the function. Calls become Slurm jobs, or local processes.

Its parameters are submitit's and Slurm's, and every option of ``hpc-elastic submit`` by its own name. They become the
command line's options, and so have the same meaning, defaults, layers and checks.

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
from hpc_elastic.base.host_facts import worker_arguments
from hpc_elastic.errors import UsageError
from hpc_elastic.launch.run_directory import create_run
from hpc_elastic.launch.submit_job import Submission, submission_client, submit_job
from hpc_elastic.options import job_options, run_request
from hpc_elastic.options.job_options import SBATCH_VARIABLES
from hpc_elastic.options.resolve import resolve
from hpc_elastic.options.run_request import ALL_OPTIONS, check_values, cluster_here, slurm_job
from hpc_elastic.options.sbatch import ScriptLines, check_time_option
from hpc_elastic.options.table import Option, Parsed, explaining, nearest, texts_of
from hpc_elastic.options.worker_options import current_directory, removal
from hpc_elastic.run.paths import RunPaths
from hpc_elastic.run.spec import EntryKind, Entrypoint, RunSpec
from hpc_elastic.submission import local_process
from hpc_elastic.submission.call import Call, CallTerms, function_name, own_sys_path, write_call
from hpc_elastic.submission.job import ElasticJob

logger = logging.getLogger(__name__)

WORKER_MODULE = "hpc_elastic.submission.worker"
GENERIC = (
    "name", "timeout_min", "mem_gb", "nodes", "cpus_per_task", "gpus_per_node", "tasks_per_node", "stderr_to_stdout",
)  # fmt: skip
"""submitit's own, which any executor takes without a prefix."""

_SYNONYMS = {
    "name": "job_name",
    "timeout_min": "time",
    "mem_gb": "mem",
    "tasks_per_node": "ntasks_per_node",
    "nproc_per_node": "ntasks_per_node",
    "grace": "signal_delay_s",
    "num_gpus": "gpus_per_node",
}
_GIVEN_AS = {"ntasks_per_node": "nproc_per_node", "signal_delay_s": "grace", "gpus_per_task": "gpus_per_node"}
_AS_SBATCH_ARGUMENT = ("cpus_per_gpu", "mem_per_gpu", "mem_per_cpu", "wckey")
_OWN = (
    "min_nodes", "ntasks_per_node", "signal_delay_s", "gpus_per_task", "array_parallelism", "setup", "teardown",
    "stderr_to_stdout", "additional_parameters", "srun_args", "use_srun", "restart_on", "cluster",
    "max_num_timeout", "allow_local_runs_dir",
)  # fmt: skip
_NOT_HERE = frozenset(
    (
        "module", "no_python", "start_method", "python", "wait", "follow", "dry_run", "array", "output",
        "error", "runs_dir", "run_id", "chdir", "cluster", "nproc_per_node", "grace", "signal", "preemption_signal",
    )
)  # fmt: skip
"""Options of the command line that an executor has no use for, or has another name for."""

_LEFT_OUT = tuple(sorted(_NOT_HERE - {"python", "chdir", "cluster", "nproc_per_node", "grace"}))
_OPTION_OF = {option.dest: option for option in ALL_OPTIONS}
NAMES = frozenset(
    {dest for dest in _OPTION_OF if dest not in _NOT_HERE} | {*GENERIC, *_SYNONYMS, *_OWN, *_AS_SBATCH_ARGUMENT}
)

RESTART_ON = ("all", "infrastructure", "never")
DEFAULT_MINUTES = 5
DEFAULT_SIGNAL_DELAY = 90
DEFAULT_PARALLELISM = 256
_CLUSTERS = ("auto", "slurm", "local", "debug")


class UnknownParameterError(UsageError, ValueError, NameError, TypeError):
    """There is no such parameter. (submitit raises ValueError, or NameError, or in a constructor TypeError for it.)"""


def unknown(name: str) -> UnknownParameterError:
    if (why := removal(name)) is not None:
        return UnknownParameterError(f"{name} {why}")
    found = nearest(name, {known.replace("_", "-") for known in NAMES})
    hint = "; what sbatch has besides goes into additional_parameters"
    if found is not None:
        hint = f"; did you mean {found.replace('-', '_')}?"
    return UnknownParameterError(f"the executor has no parameter {name}{hint}")


def normalized(given: Mapping[str, Any]) -> dict[str, Any]:
    """The later one of two names for the same counts. None is "not given". Raises UsageError."""
    found: dict[str, Any] = {}
    for name, value in given.items():
        if name not in NAMES:
            raise unknown(name)
        if value is None:
            continue
        if name == "mem_gb":
            value = _memory(value)
        found[_SYNONYMS.get(name, name)] = value
    _check(found)
    return found


def _check(found: Mapping[str, Any]) -> None:
    if not found.get("use_srun", True):
        raise UsageError("use_srun=False: the agents are started with srun, one on each node; leave it out")
    policy = found.get("restart_on", "all")
    if policy not in RESTART_ON:
        raise UsageError(f"restart_on={policy!r}: give one of {', '.join(RESTART_ON)}")
    if found.get("cluster", "auto") not in _CLUSTERS:
        raise UsageError(f"cluster={found['cluster']!r}: give one of {', '.join(_CLUSTERS)}")
    for name in ("setup", "teardown"):
        lines = found.get(name, ())
        if isinstance(lines, str) or not all(isinstance(line, str) for line in lines):
            raise UsageError(f"{name}={lines!r}: give a list of shell commands")
    for name in ("max_num_timeout", "signal_delay_s", "array_parallelism"):
        value = found.get(name, 1)
        least = 0 if name == "max_num_timeout" else 1
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise UsageError(f"{name}={value!r}: give a whole number from {least}")


def parsed_options(parameters: Mapping[str, Any], *, job_name: str, env: Mapping[str, str], slurm: bool) -> Parsed:
    """sbatch's own variables count with `slurm`; `job_name` is the default. Raises UsageError."""
    values: dict[str, tuple[str, ...]] = {}
    sources: dict[str, str] = {}
    for name, option, value in _options(parameters):
        texts = _texts(name, option, value)
        if texts:
            values[option.dest] = (*values.get(option.dest, ()), *texts) if option.repeatable else texts
            sources[option.dest] = f"{name} ="
    given = Parsed(values=values, sources=sources, command=(WORKER_MODULE,))
    here = current_directory(env)
    resolved = resolve(
        given, ALL_OPTIONS, env=env, here=here, left_out=_LEFT_OUT, yields=SBATCH_VARIABLES if slurm else None
    ).parsed
    found = dict(resolved.values)
    found.setdefault("time", (str(DEFAULT_MINUTES),))
    found.setdefault("grace", (str(DEFAULT_SIGNAL_DELAY),))
    found.setdefault("nproc_per_node", ("1",))
    found.setdefault("job_name", (job_name,))
    found["module"] = ("1",)
    return replace(resolved, values=found)


def _options(found: Mapping[str, Any]) -> Iterator[tuple[str, Option, Any]]:
    tasks = found.get("ntasks_per_node", 1)
    per_task = max(1, tasks) if isinstance(tasks, int) else 1
    for name, value in found.items():
        if name in _AS_SBATCH_ARGUMENT:
            yield name, _OPTION_OF["sbatch_args"], [f"--{name.replace('_', '-')}={value}"]
        elif name == "time":
            yield name, _OPTION_OF["time"], _minutes(value)
        elif name in _GIVEN_AS or (name in _OPTION_OF and name not in {"nodes", *_NOT_HERE}):
            if isinstance(value, int) and name in ("cpus_per_task", "gpus_per_task"):
                value *= per_task  # submitit's tasks are our workers; Slurm's task is an agent, one on each node
            elif isinstance(value, int) and name == "ntasks_per_node":
                value = per_task
            yield name, _OPTION_OF[_GIVEN_AS.get(name, name)], value
    nodes = _nodes(found)
    if nodes is not None:
        yield "nodes", _OPTION_OF["nodes"], nodes
    for key, value in (found.get("additional_parameters") or {}).items():
        dest = key.replace("-", "_")
        source = f"additional_parameters {key}"
        if dest in _OPTION_OF and dest not in ("sbatch_args", "signal", "output", "error", "array"):
            yield source, _OPTION_OF[dest], value
        else:
            flag = f"--{key.replace('_', '-')}"
            yield source, _OPTION_OF["sbatch_args"], [flag if value is True else f"{flag}={value}"]
    if found.get("restart_on") == "never":
        for dest in ("max_restarts", "max_requeues"):
            yield "restart_on", _OPTION_OF[dest], 0
    elif "max_num_timeout" in found and "max_requeues" not in found:
        yield "max_num_timeout", _OPTION_OF["max_requeues"], max(3, found["max_num_timeout"])


def _nodes(found: Mapping[str, Any]) -> str | None:
    nodes, least = found.get("nodes"), found.get("min_nodes")
    if isinstance(nodes, Sequence) and not isinstance(nodes, str):
        nodes = "-".join(map(str, nodes))
    if least is None:
        return None if nodes is None else str(nodes)
    return str(least) if nodes is None else f"{least}-{str(nodes).replace(':', '-').rpartition('-')[2]}"


def _texts(name: str, option: Option, value: Any) -> tuple[str, ...]:
    if option.dest == "requeue" and isinstance(value, bool):
        return ("1" if value else "0",)
    is_many = isinstance(value, Mapping | Sequence) and not isinstance(value, str)
    if option.repeatable and not is_many:
        value = [str(value)]
    elif isinstance(value, Mapping) and not option.repeatable:
        mark = ":" if option.dest == "section_timeouts" else "="
        value = ",".join(f"{key}{mark}{item}" for key, item in value.items())
    elif is_many and not option.repeatable:
        value = ",".join(map(str, value))
    return texts_of(option, value, called=name)


def _minutes(value: Any) -> str:
    """submitit counts minutes; a text is sbatch's."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if value <= 0:
        raise UsageError(f"timeout_min={value}: give minutes, more than 0")
    seconds = max(1, round(value * 60))
    return str(seconds // 60) if seconds % 60 == 0 else f"{seconds // 60}:{seconds % 60:02d}"


def _memory(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise UsageError(f"mem_gb={value!r}: give gigabytes, as a number")
    return f"{int(value)}G" if value == int(value) else f"{int(value * 1024)}M"


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
        raise unknown(str(name))

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
            raise unknown(f"slurm_{next(iter(dropped))}")
        self.update_parameters(cluster=cluster)

    @classmethod
    def affinity(cls) -> int:
        """0: available, and taken only on request."""
        return 0

    @classmethod
    def _valid_parameters(cls) -> ParameterNames:
        return ParameterNames(NAMES)

    def _convert_parameters(self, params: dict[str, Any]) -> dict[str, Any]:
        return {**params, **normalized(slurm_arguments())}

    def _internal_update_parameters(self, **kwargs: Any) -> None:
        changed = normalized(kwargs)
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
        parsed = parsed_options(parameters, job_name=name, env=os.environ, slurm=slurm)
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
        at_once = min(count, self.parameters.get("array_parallelism", DEFAULT_PARALLELISM))
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
