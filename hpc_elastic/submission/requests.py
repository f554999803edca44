"""From a call and its parameters to a run: its directory, and Slurm's job or a process of this machine."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpc_elastic import run_index
from hpc_elastic.atomic_file import write_private
from hpc_elastic.clock import SystemClock
from hpc_elastic.configuration import job_options, run_request
from hpc_elastic.configuration.option_table import Parsed
from hpc_elastic.errors import UsageError
from hpc_elastic.launch.run_directory import create_run, create_tasks, why_not_shared
from hpc_elastic.run_paths import RunPaths
from hpc_elastic.run_spec import EntryKind, Entrypoint, RunSpec
from hpc_elastic.self_command import own_command
from hpc_elastic.slurm.client import CommandSlurmClient, SubprocessRunner
from hpc_elastic.slurm.errors import SlurmMissingError
from hpc_elastic.slurm.node_range import parse_nodes
from hpc_elastic.slurm.sbatch import SbatchOptions, notice_grace, render_script, sbatch_arguments
from hpc_elastic.slurm.time_limit import check_time_option
from hpc_elastic.submission import local_process, places
from hpc_elastic.submission.call import Call, CallTerms, write_call
from hpc_elastic.submission.parameters import ScriptLines
from hpc_elastic.submission.script_lines import with_lines

WORKER_MODULE = "hpc_elastic.submission.worker"
_DEAF = 'trap "" USR2; exec "$@"'


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One call that is to become a run."""

    call: Call
    terms: CallTerms
    spec: RunSpec
    options: SbatchOptions | None
    """None: not for Slurm."""
    lines: ScriptLines
    runs_dir: Path
    largest: int
    """Bytes that the call may take."""
    limit: float
    """Seconds of one attempt; 0: none is known."""
    env: Mapping[str, str]
    shared: bool
    """The user says that all nodes see `runs_dir`."""

    @classmethod
    def of(
        cls,
        call: Call,
        terms: CallTerms,
        *,
        parameters: Mapping[str, Any],
        parsed: Parsed,
        cluster: str,
        runs_dir: Path,
        python: str,
        largest: int,
        env: Mapping[str, str],
    ) -> Request:
        """Put together.

        Raises:
            UsageError: a value that can't be right.
        """
        cwd = run_request.working_directory(parsed, env)
        nodes = parse_nodes(parsed.get("nodes") or "1", option=parsed.source("nodes", "nodes="))
        limit = check_time_option(parsed.get("time") or "", option=parsed.source("time", "time=")) or 0
        grace = run_request.notice_seconds(parsed)
        spec = run_request.build_spec(parsed, cluster=cluster, nodes=nodes, cwd=cwd, env=env, grace=grace)
        spec = replace(spec, entrypoint=_entrypoint(python), preemption_signal="SIGUSR2")
        options = None
        if cluster == "slurm":
            options = job_options.sbatch_options(parsed, nodes=nodes, job_name=spec.name, grace=grace)
            options = replace(options, requeue=spec.requeue)
            spec = replace(spec, signal_grace=notice_grace(options), sbatch_args=tuple(sbatch_arguments(options)))
        elif limit:
            spec = replace(spec, signal_grace=max(1, min(grace, limit // 4)))
        return cls(
            call=call,
            terms=replace(terms, timeout_min=limit / 60),
            spec=spec,
            options=options,
            lines=ScriptLines.of(parameters),
            runs_dir=runs_dir,
            largest=largest,
            limit=float(limit),
            env=env,
            shared=parsed.flag("allow_local_runs_dir"),
        )


def _entrypoint(python: str) -> Entrypoint:
    """`python` may be a command, such as one that enters a container.

    An interpreter that starts would die of a notice: until the worker can hear it, the signal is ignored, and then the
    worker looks whether one has come.
    """
    words = shlex.split(python)
    if not words:
        raise UsageError(f"python={python!r}: give the interpreter's path, or the command that starts it")
    args = ("-c", _DEAF, "worker", *words, "-u", "-m", WORKER_MODULE)
    host = {"python": words[0]} if len(words) == 1 else {}
    return Entrypoint(kind=EntryKind.COMMAND, target="/bin/sh", args=args, **host)


def submit_here(request: Request) -> tuple[str, Path]:
    """Start the run on this machine. Returns the job's id, which is the run's, and the run directory."""
    run = create_run(request.spec, request.runs_dir)
    try:
        _write_call(run.paths, request)
        local_process.start(
            run.paths,
            limit=request.limit,
            delay=float(request.spec.signal_grace),
            lines=request.lines,
            env=request.env,
            cwd=request.spec.cwd,
        )
    except BaseException:
        run.discard()
        raise
    return run.paths.run_id, run.paths.root


def submit_to_slurm(requests: Sequence[Request], *, parallelism: int) -> list[tuple[str, Path]]:
    """Submit one as a job, several as an array of one run each.

    Args:
        requests: What differs between them are the calls.
        parallelism: So many tasks of an array run at once.

    Returns:
        The jobs' ids and run directories, in order.

    Raises:
        UsageError: it can't be submitted as asked.
        SlurmError: Slurm did not take it. Nothing is left then.
    """
    first = requests[0]
    assert first.options is not None
    options, spec, count = first.options, first.spec, len(requests)
    if count > 1:
        spec = replace(spec, array=f"0-{count - 1}%{min(count, parallelism)}")
        options = replace(options, array=spec.array)
    why = None if first.shared else why_not_shared(first.runs_dir)
    if why is not None:
        raise UsageError(
            f"the nodes can't see the executor's folder {first.runs_dir}: {why}; give a shared one "
            "(or allow_local_runs_dir=True where they can)"
        )
    client = CommandSlurmClient(SubprocessRunner(first.env, overruled=options.overruled_variables()), SystemClock())
    run = create_run(spec, first.runs_dir)
    try:
        paths = [run.paths] if count == 1 else [run.paths.task(task) for task in range(count)]
        create_tasks(run.paths, spec, range(count) if count > 1 else ())
        for place, request in zip(paths, requests, strict=True):
            _write_call(place, request)
        write_private(run.paths.script, _script(options, run.paths, first.lines))
        if count == 1:
            write_private(run.paths.job_log, "")  # Slurm appends to it, and would make it with the job's umask
        job = client.submit(str(run.paths.script))
    except SlurmMissingError as error:
        run.discard()
        raise UsageError(f"{error.why}; run on this machine with cluster='local'") from None
    except OSError as error:
        run.discard()
        raise UsageError(f"can't write {run.paths.root}: {error.strerror}") from None
    except BaseException:
        run.discard()
        raise
    cluster = job.cluster or first.env.get("SLURM_CLUSTER_NAME", "")
    run_index.record(
        cluster=cluster, job_id=job.number, submitted_ns=time.time_ns(), run_dir=run.paths.root, env=first.env
    )
    ids = [job.number] if count == 1 else [f"{job.number}_{task}" for task in range(count)]
    return [(number, place.root) for number, place in zip(ids, paths, strict=True)]


def _script(options: SbatchOptions, paths: RunPaths, lines: ScriptLines) -> str:
    run_dir = str(paths.root)
    if options.comment is None:  # by which support staff find the run
        options = replace(options, comment=f"hpc-elastic {run_dir}")
    return with_lines(render_script(options, run_dir=run_dir, command=own_command("batch", run_dir)), lines)


def _write_call(paths: RunPaths, request: Request) -> None:
    path = places.call_file(paths)
    size = write_call(path, request.call, request.terms)
    if size > request.largest:
        raise RuntimeError(
            f"the function {request.terms.name} and its arguments take {size / 1e9:.2f} GB, and this submission may "
            f"take {request.largest / 1e9:.2f} GB for each; write what is large to a file, or raise max_pickle_size_gb"
        )
