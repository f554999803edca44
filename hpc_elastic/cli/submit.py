"""``hpc-elastic submit``: a run directory, a batch script, and sbatch; or the same run on this machine."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from hpc_elastic.atomic_file import write_private
from hpc_elastic.cli.command_line import read_command_line, say
from hpc_elastic.cli.het import Component, het_components
from hpc_elastic.cli.job_lookup import COMMENT_MARK
from hpc_elastic.cli.submit_nodes import exclude_arguments
from hpc_elastic.cli.template import read_template
from hpc_elastic.configuration import job_options
from hpc_elastic.configuration.option_table import Parsed, explaining
from hpc_elastic.configuration.run_request import (
    asked_cluster,
    build_spec,
    notice_seconds,
    runs_directory,
    working_directory,
)
from hpc_elastic.errors import UsageError
from hpc_elastic.launch.run_directory import NewRun, create_run, create_tasks, why_not_shared
from hpc_elastic.run_paths import RunPaths
from hpc_elastic.run_spec import RunSpec
from hpc_elastic.self_command import own_command
from hpc_elastic.slurm.array import parse_array
from hpc_elastic.slurm.client import CommandSlurmClient, SlurmClient, SubprocessRunner
from hpc_elastic.slurm.commands import JobId, sbatch
from hpc_elastic.slurm.errors import SlurmError, SlurmMissingError
from hpc_elastic.slurm.node_range import parse_nodes
from hpc_elastic.slurm.sbatch import SbatchOptions, notice_grace, render_script, sbatch_arguments

DESCRIPTION = (
    "Makes a run directory, writes the batch script into it, and submits it. What follows the script is the script's "
    "own. Without Slurm the run is done here and now, with agents side by side on this machine."
)


def main(argv: Sequence[str]) -> int:
    """Submit, or run here. Returns 0, or with --wait, --follow and on this machine the run's exit code."""
    env = os.environ
    parsed = read_command_line(argv, subcommand="submit", description=DESCRIPTION, env=env)
    if parsed is None:
        return 0
    with explaining(parsed):
        cluster = asked_cluster(parsed)
        have_sbatch = shutil.which("sbatch", path=env.get("PATH")) is not None
        if cluster == "auto":
            cluster = "slurm" if have_sbatch else "local"
            if not have_sbatch:
                say("no sbatch here, so the run is done on this machine (--cluster local)")
        if cluster == "local":
            from hpc_elastic.cli.run import run_here

            return run_here(parsed, env, dry_run=parsed.flag("dry_run"))
        return _submit(parsed, env, have_sbatch=have_sbatch)


def _submit(parsed: Parsed, env: Mapping[str, str], *, have_sbatch: bool) -> int:
    cwd = working_directory(parsed, env)
    template, parsed = read_template(parsed, cwd, env)
    runs_dir = runs_directory(parsed, cwd)
    nodes = parse_nodes(parsed.get("nodes") or "1", option=parsed.source("nodes", "--nodes"))
    components = het_components(parsed)
    all_nodes = (nodes[0] + sum(part.nodes[0] for part in components), nodes[1] + sum(p.nodes[1] for p in components))
    spec = build_spec(parsed, cluster="slurm", nodes=all_nodes, cwd=cwd, env=env, grace=notice_seconds(parsed))
    array = parsed.get("array") or env.get("SBATCH_ARRAY_INX") or ""
    tasks = parse_array(array, option=parsed.source("array", "SBATCH_ARRAY_INX")) if array else ()
    options, spec = _options(parsed, replace(spec, array=array), nodes, components)
    if not parsed.flag("allow_local_runs_dir"):
        why = why_not_shared(runs_dir)
        if why is not None:
            raise UsageError(
                f"the nodes can't see {runs_dir}: {why}; give a shared folder with --runs-dir "
                "(or --allow-local-runs-dir where they can)"
            )
    paths = RunPaths(runs_dir / spec.run_id)
    script = _script(options, paths, template)
    if parsed.flag("dry_run"):
        sys.stdout.write(f"{script}\n# {shlex.join(sbatch(str(paths.script)))}\n")
        return 0
    if not have_sbatch:
        raise UsageError("sbatch is not on PATH: no Slurm here; run on this machine with --cluster local")
    from hpc_elastic.clock import SystemClock

    clock = SystemClock()
    client = CommandSlurmClient(SubprocessRunner(env, overruled=options.overruled_variables()), clock)
    _check_node_count(client, options, parse_nodes(options.nodes or "1")[0], env)
    with _interrupts_deferred():
        job = _submit_run(client, spec, runs_dir, script, tasks, options, env, now_ns=clock.time_ns())
        _remember(job, paths, clock.time_ns(), env)
    _say_where(job, paths, options)
    if not (parsed.flag("wait") or parsed.flag("follow")):
        return 0
    from hpc_elastic.cli.follow import follow

    if parsed.flag("follow") and tasks:
        say(f"an array has a log for each task: hpc-elastic logs --follow {job}_{tasks[0]}, say")
    shows_log = parsed.flag("follow") and options.output is None and not tasks
    return follow(client, job, paths, clock=clock, show_log=shows_log)


def _options(
    parsed: Parsed, spec: RunSpec, nodes: tuple[int, int], components: Sequence[Component]
) -> tuple[SbatchOptions, RunSpec]:
    options = job_options.sbatch_options(parsed, nodes=nodes, job_name=spec.name, grace=spec.signal_grace)
    options = replace(
        options,
        requeue=spec.requeue,
        array=spec.array or None,
        components=tuple(component.arguments for component in components),
    )
    if parsed.get("chdir") is not None:
        options = replace(options, extra=(f"--chdir={spec.cwd}", *options.extra))
    arguments = (*sbatch_arguments(options), *(word for part in options.components for word in ("hetjob", *part)))
    return options, replace(spec, signal_grace=notice_grace(options), sbatch_args=arguments)


def _script(options: SbatchOptions, paths: RunPaths, template: str | None) -> str:
    """With the run directory in the job's comment, by which support staff find it."""
    run_dir = str(paths.root)
    if options.comment is None:
        options = replace(options, comment=f"{COMMENT_MARK}{run_dir}")
    return render_script(options, run_dir=run_dir, command=own_command("batch", run_dir), template=template)


def _submit_run(
    client: SlurmClient,
    spec: RunSpec,
    runs_dir: Path,
    script: str,
    tasks: Sequence[int],
    options: SbatchOptions,
    env: Mapping[str, str],
    *,
    now_ns: int,
) -> JobId:
    run: NewRun = create_run(spec, runs_dir)
    try:
        write_private(run.paths.script, script)
        create_tasks(run.paths, spec, tasks)
        if not tasks:
            write_private(run.paths.job_log, "")  # Slurm appends to it, and would make it with the job's umask
        left_out = exclude_arguments(client, run.paths, spec, options, env, now_ns=now_ns)
        return client.submit(str(run.paths.script), extra=left_out)
    except SlurmMissingError as error:
        run.discard()
        raise UsageError(f"{error.why}; run on this machine with --cluster local") from None
    except OSError as error:
        run.discard()
        raise UsageError(f"can't write {run.paths.script}: {error.strerror}") from None
    except BaseException:
        run.discard()
        raise


def _check_node_count(client: SlurmClient, options: SbatchOptions, least: int, env: Mapping[str, str]) -> None:
    """20.11, 22.05 and 26.05 accept more nodes than there are, and the job pends for ever."""
    elsewhere = any(argument.startswith(("-M", "--cluster")) for argument in options.extra)
    if elsewhere or env.get("SBATCH_CLUSTERS") or env.get("SLURM_CLUSTERS"):
        return
    names = options.partition or env.get("SBATCH_PARTITION")
    try:
        partitions = client.partitions(names)
    except SlurmError:
        return  # sbatch will say it better
    wanted = names.split(",") if names else []
    eligible = [partition for partition in partitions if (partition.name in wanted if wanted else partition.default)]
    largest = max(eligible, key=lambda partition: partition.total, default=None)
    if largest is None:
        return
    if largest.total < least:
        raise UsageError(
            f"--nodes {options.nodes}: partition {largest.name} has {largest.total} nodes; the job would wait for ever"
        )
    if largest.usable < least:
        say(f"only {largest.usable} of the {largest.total} nodes of partition {largest.name} are up now")


@contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """A Ctrl-C between sbatch and its answer would leave a job that nobody knows of: it takes effect afterwards.

    Blocked, it does not reach sbatch either, which inherits that; held back by a handler, it does not come in through
    another thread of this process.
    """
    waiting = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    came: list[int] = []
    handlers = {number: signal.signal(number, lambda number, _: came.append(number)) for number in waiting}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, waiting)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])


def _remember(job: JobId, paths: RunPaths, now_ns: int, env: Mapping[str, str]) -> None:
    from hpc_elastic import run_index

    problem = run_index.record(
        cluster=job.cluster or env.get("SLURM_CLUSTER_NAME", ""),
        job_id=job.number,
        submitted_ns=now_ns,
        run_dir=paths.root,
        env=env,
    )
    if problem is not None:
        say(f"the run can't be found by its job id later, only by its directory: {problem}")


def _say_where(job: JobId, paths: RunPaths, options: SbatchOptions) -> None:
    task = "task-*/" if options.array else ""
    log = options.output or f"{paths.root}/{task}job.log"
    sys.stdout.write(
        f"job             {job}{f' on cluster {job.cluster}' if job.cluster else ''}\n"
        f"run directory   {paths.root}\n"
        f"job log         {log}\n"
        f"workers' logs   {paths.root}/{task}attempt-*/round-*/rank-*/\n"
        f"report          hpc-elastic report {job}{'_TASK' if options.array else ''}\n"
        f"cancel          scancel {job}\n"
    )
    sys.stdout.flush()
