"""`ElasticExecutor`: submitit's executor, with agents under the function.

``submitit.AutoExecutor(folder, cluster="elastic")`` finds it by the entry points in pyproject.toml.

An AutoExecutor (submitit 1.5) silently drops what has another executor's prefix. A program that gives
``slurm_partition`` and moves to ``cluster="elastic"`` means it all the same; so it is read where the AutoExecutor,
which is calling, holds it.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from submitit.core.core import Executor, Job
from submitit.core.utils import DelayedSubmission, JobPaths
from submitit.local.debug import DebugJob

from hpc_elastic.errors import UsageError
from hpc_elastic.options.run_request import check_values, cluster_here
from hpc_elastic.options.table import Parsed, explaining
from hpc_elastic.submission import parameters
from hpc_elastic.submission import parameters as names
from hpc_elastic.submission.call import Call, CallTerms, function_name, own_sys_path
from hpc_elastic.submission.job import ElasticJob
from hpc_elastic.submission.requests import Request, submit_here, submit_to_slurm

R = TypeVar("R", covariant=True)


class ElasticDebugJob(DebugJob):  # type: ignore[misc]
    """submitit's own debug job, a world of one rank: what it raises comes out as it is, in a debugger first."""

    def __init__(self, folder: Path, submission: DelayedSubmission) -> None:
        super().__init__(folder, submission)
        self.environ.update(_world_of_one())

    def report(self) -> str:
        """There is none."""
        return ""


def _world_of_one() -> dict[str, str]:
    """What an agent would give the only worker, so that torch's ``env://`` works."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    zeros = dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK"), "0")
    ones = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"), "1")
    return {**zeros, **ones, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


_MODULE = "submitit.auto.auto"
_PREFIX = "slurm_"
_FRAMES = 4


def slurm_arguments() -> dict[str, Any]:
    """The ``slurm_*`` arguments, without the prefix, of the AutoExecutor's call that is under way; empty for none."""
    frame = sys._getframe(1)
    for _ in range(_FRAMES):
        found = frame.f_back
        if found is None:
            return {}
        frame = found
        is_call = frame.f_code.co_name in ("flexible_init", "_internal_update_parameters")
        if is_call and frame.f_globals.get("__name__") == _MODULE:
            given = frame.f_locals.get("kwargs", {})
            return {name[len(_PREFIX) :]: value for name, value in given.items() if name.startswith(_PREFIX)}
    return {}


class ParameterNames(frozenset[str]):
    """The executor's names, as an AutoExecutor looks at them.

    It asks whether a name is one: what is none is refused here, with the nearest one that there is. And it lists them,
    to learn what `partition=` without a prefix means on *every* cluster, where the last executor that has the name
    wins: so only those are listed that are ours alone.
    """

    def __contains__(self, name: object) -> bool:
        if super().__contains__(name):
            return True
        raise parameters.unknown(str(name))

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(name for name in super().__iter__() if name not in _OF_OTHERS))


def _others() -> frozenset[str]:
    from submitit.local.local import LocalExecutor
    from submitit.slurm.slurm import SlurmExecutor

    return frozenset(SlurmExecutor._valid_parameters() | LocalExecutor._valid_parameters())


_OF_OTHERS = _others()


_GIGABYTE = 1 << 30


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
        folder: For everything about the jobs; under Slurm, one that all nodes share. May hold ``%j``.
        max_num_timeout: How often a job may be requeued because its time was over.
        max_pickle_size_gb: The most that a submission's functions and arguments may take.
        python: The workers' interpreter, with its arguments, as for a shell (default: this one).
        cluster: ``slurm``; ``local``: real agents, on this machine; ``debug``: in this process; ``auto``: Slurm where
            there is one, else this machine.

        Raises:
            UsageError: a value that can't be right.
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
        """0: there, and taken only where it is asked for."""
        return 0

    @classmethod
    def _valid_parameters(cls) -> ParameterNames:
        return ParameterNames(names.NAMES)

    def _convert_parameters(self, params: dict[str, Any]) -> dict[str, Any]:
        """Called by an AutoExecutor with what has no prefix."""
        return {**params, **names.normalized(slurm_arguments())}

    def _internal_update_parameters(self, **kwargs: Any) -> None:
        """Change parameters for the jobs to come.

        Raises:
            UnknownParameterError: there is no such one; the nearest name is in the message.
            UsageError: a value that can't be right.
        """
        changed = names.normalized(kwargs)
        wanted = {**self.parameters, **changed}
        if "max_num_timeout" in changed:
            self.max_num_timeout = changed["max_num_timeout"]
        self._parsed(wanted, "any", os.environ)
        self.parameters.update(changed)

    @property
    def cluster(self) -> str:
        """Where jobs go: ``slurm``, ``local`` or ``debug``."""
        asked: str = self.parameters.get("cluster", "auto")
        if asked == "auto":
            asked = self._parsed(self.parameters, "any", os.environ).get("cluster") or "auto"
        return cluster_here(asked, os.environ)

    def _parsed(self, parameters: Mapping[str, Any], name: str, env: Mapping[str, str]) -> Parsed:
        slurm = parameters.get("cluster", "auto") in ("auto", "slurm")
        parsed = names.parsed_options(parameters, job_name=name, env=env, slurm=slurm)
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
        return [self._job(job_id, run_dir) for job_id, run_dir in placed]

    def _job(self, job_id: str, run_dir: Path) -> ElasticJob[Any]:
        job: ElasticJob[Any] = ElasticJob(self.folder, job_id, run_dir=run_dir)
        job.paths.remember()
        return job

    def _request(self, calls: tuple[Call, ...], *, many: int) -> Request:
        """`many`: how many calls share what a submission may take."""
        env = os.environ
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
        parsed = self._parsed(parameters, name, env)
        return Request(
            calls=calls,
            terms=terms,
            parsed=parsed,
            lines=names.script_lines(parameters),
            runs_dir=Path(os.path.abspath(JobPaths.get_first_id_independent_folder(self.folder))),
            python=self.python or parsed.get("python") or sys.executable,
            largest=int(self.max_pickle_size_gb * _GIGABYTE / many),
            env=env,
        )


def _call(delayed: DelayedSubmission) -> Call:
    if not callable(delayed.function):
        raise UsageError(f"{delayed.function!r} is no function: give one to submit, with its arguments behind it")
    return Call(delayed.function, tuple(delayed.args), dict(delayed.kwargs))
