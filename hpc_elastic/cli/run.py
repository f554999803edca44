"""``hpc-elastic run``: a run in the foreground, in this Slurm allocation or on this machine.

``srun … hpc-elastic agent SCRIPT`` is a run whose agents are the tasks of a step of the user's own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_elastic.base.clock import SystemClock
from hpc_elastic.base.text import plural
from hpc_elastic.cli.config import read_command_line
from hpc_elastic.cli.main import print_note
from hpc_elastic.cli.submit import plan_text, remarks
from hpc_elastic.errors import UsageError
from hpc_elastic.launch.run_directory import (
    check_checkpoint_dir,
    create_run,
    earlier_run,
    make_runs_dir,
    why_not_shared,
)
from hpc_elastic.options import job_options
from hpc_elastic.options.run_request import build_spec, cluster_here, runs_directory, working_directory
from hpc_elastic.options.sbatch import parse_nodes, refuse_het_job
from hpc_elastic.options.table import Help, Parsed, explaining
from hpc_elastic.output.terminal import each_line
from hpc_elastic.run import index
from hpc_elastic.run.paths import ExitCode
from hpc_elastic.run.spec import RunSpec
from hpc_elastic.slurm.job_environment import HostlistError, JobEnvironment, expand, in_job, without_run_variables

if TYPE_CHECKING:
    from hpc_elastic.launch.slurm_site import NodeWish

HELP = Help(
    usage="hpc-elastic run [options] SCRIPT [script arguments...]",
    description="Executes a run in the foreground and exits with its exit code: in a Slurm allocation (your own batch "
    "script, or salloc) with one agent on each of its nodes, elsewhere with all agents on this machine. Script "
    "arguments go after the script.",
    examples=(
        ("hpc-elastic run --nproc-per-node 8 train.py --lr 0.1", "8 workers on each node of this allocation"),
        ("hpc-elastic run --cluster local --nodes 2 train.py", "2 agents on this machine"),
    ),
)


def main(argv: Sequence[str]) -> int:
    env = os.environ
    parsed = read_command_line(argv, subcommand="run", help_=HELP, env=env)
    if parsed is None:
        return 0
    with explaining(parsed):
        cluster = job_options.asked_cluster(parsed)
        if cluster == "slurm" and not in_job(env):
            raise UsageError("--cluster slurm: not in a Slurm allocation; use hpc-elastic submit, or salloc first")
        if cluster == "local" or not in_job(env):
            if cluster == "auto":
                nodes = job_options.asked_nodes(parsed)[1] + job_options.spare_nodes(parsed)
                if nodes > 1 and cluster_here("auto", env) == "slurm":
                    raise UsageError(
                        f"{parsed.source('nodes', '--nodes')} {parsed.get('nodes') or 1}: run starts everything on "
                        "this machine, and it can submit to Slurm; use hpc-elastic submit (or salloc first), or say "
                        "--cluster local to have all agents and workers on this machine"
                    )
            return run_here(parsed, env)
        return _run_in_allocation(parsed, env)


def run_here(parsed: Parsed, env: Mapping[str, str], *, dry_run: bool = False) -> int:
    if ignored := job_options.only_for_slurm(parsed):
        print_note(f"no effect without Slurm: {' '.join(ignored)}")
    cwd = working_directory(parsed, env)
    nodes = job_options.asked_nodes(parsed)
    spec = build_spec(parsed, cluster="local", nodes=nodes, cwd=cwd, env=env, grace=job_options.notice_seconds(parsed))
    runs_dir = runs_directory(parsed, cwd)
    for line in remarks(parsed, spec, env=env):
        print_note(line)
    if dry_run:
        check_checkpoint_dir(spec)
        sys.stdout.write(each_line(plan_text(spec, runs_dir / spec.run_id)))
        return 0
    from hpc_elastic.launch.local import run_behind_front, run_local

    def work(ready: Callable[[], None]) -> int:
        return run_local(create_run(spec, runs_dir).paths.root, ready=ready)

    return run_behind_front(work, what=str(runs_dir))


def _run_in_allocation(parsed: Parsed, env: Mapping[str, str]) -> int:
    refuse_het_job(env)  # before: salloc's shell in one has no list of nodes
    job = JobEnvironment.from_env(env)
    if job.task is not None and job.task.num_tasks > 1:
        if job.task.procid:
            return ExitCode.USAGE  # task 0 says why, once
        raise UsageError(
            f"run was started by srun on {job.task.num_tasks} tasks; start it once, without srun: it starts an "
            "agent on each node itself (or srun hpc-elastic agent, with one task on each node)"
        )
    from hpc_elastic.agent.heartbeats import candidates
    from hpc_elastic.launch.batch import run_batch
    from hpc_elastic.launch.slurm_site import open_claims

    if ignored := job_options.ignored_in_allocation(parsed, "run"):
        print_note(f"no effect in an existing allocation: {' '.join(ignored)}")
    cwd = working_directory(parsed, env)
    runs_dir = runs_directory(parsed, cwd)
    clock = SystemClock()
    claims = open_claims(job.requeue_id, job.restart_count, candidates(env), clock=clock)
    chosen = claims.claim(job.nodes, _node_wish(parsed))
    nodes = nodes_of(parsed, len(chosen), what="allocation" if chosen == job.nodes else "choice of nodes")
    spec = build_spec(parsed, cluster="slurm", nodes=nodes, cwd=cwd, env=env, grace=job_options.notice_seconds(parsed))
    for line in remarks(parsed, spec, env=env):
        print_note(line)
    why = why_not_shared(runs_dir) if len(job.nodes) > 1 else None
    if why is not None:
        raise UsageError(f"the nodes can't see {runs_dir}: {why}; give a shared folder with --runs-dir")
    run_dir = create_run_in_job(job, spec, runs_dir, env)
    claims.sign(f"run {run_dir.name}")
    return run_batch(run_dir, without_run_variables(env), nodes=chosen, keep=tuple(claims.held.values()))


def _node_wish(parsed: Parsed) -> NodeWish:
    """``-w`` of the command line, ``-x`` and ``-N``, as srun understands them within an allocation."""

    def names(dest: str) -> tuple[str, ...]:
        text = parsed.get(dest)
        try:
            return tuple(dict.fromkeys(expand(text))) if text else ()
        except HostlistError as error:
            raise UsageError(f"{parsed.source(dest, '--' + dest)} {text}: {error.why}") from None

    from hpc_elastic.launch.slurm_site import NodeWish

    # A file's nodelist is meant for submissions: the allocation is what became of it.
    listed = names("nodelist") if parsed.from_command_line("nodelist") else ()
    given = parsed.get("nodes")
    if given is None:
        return NodeWish(listed=listed, excluded=names("exclude"))
    least, most = parse_nodes(given, option=parsed.source("nodes", "--nodes"))
    most += job_options.spare_nodes(parsed)
    return NodeWish(listed=listed, excluded=names("exclude"), least=least, most=most)


def nodes_of(parsed: Parsed, allocated: int, *, what: str) -> tuple[int, int]:
    """``--nodes``, or all `allocated` ones; `what` is the allocation, choice of nodes or step, for the message."""
    given = parsed.get("nodes")
    if given is None:
        spares = job_options.spare_nodes(parsed)
        if spares >= allocated:
            raise UsageError(f"--spares {spares}: this {what} has {plural(allocated, 'node')}; at least 1 must work")
        return allocated - spares, allocated - spares
    option = parsed.source("nodes", "--nodes")
    least, most = parse_nodes(given, option=option)
    if least > allocated:
        raise UsageError(f"{option} {given}: this {what} has {plural(allocated, 'node')}")
    return least, min(most, allocated)


def create_run_in_job(job: JobEnvironment, spec: RunSpec, runs_dir: Path, env: Mapping[str, str]) -> Path:
    make_runs_dir(runs_dir)
    earlier = earlier_run(job, spec, runs_dir, env)
    if earlier is not None:
        return earlier
    paths = create_run(spec, runs_dir).paths
    problem = index.record(
        cluster=job.cluster or "", job_id=job.requeue_id, submitted_ns=spec.created_ns, run_dir=paths.root, env=env
    )
    if problem is not None:
        print_note(f"the run can't be found by its job id later, only by its directory: {problem}")
    return paths.root


AGENT_HELP = Help(
    usage="hpc-elastic agent [options] SCRIPT [script arguments...]",
    description="The agent of one node, started by srun in your own batch script, with one task on each node. Task 0 "
    "also writes the report and requeues the job. Script arguments go after the script.",
    examples=(("srun --ntasks-per-node=1 hpc-elastic agent train.py --lr 0.1", "in your own batch script"),),
)


def main_agent(argv: Sequence[str]) -> int:
    env = without_run_variables(os.environ)
    parsed = read_command_line(argv, subcommand="agent", help_=AGENT_HELP, env=env)
    if parsed is None:
        return 0
    job = JobEnvironment.from_env(env) if in_job(env) else None
    if job is None or job.task is None:
        raise UsageError(
            "agent must be started by srun in your own batch script (srun --ntasks-per-node=1 hpc-elastic agent "
            "SCRIPT); otherwise use hpc-elastic run or submit"
        )
    from hpc_elastic.launch.batch import check_one_task_per_node

    try:
        refuse_het_job(env)
        check_one_task_per_node(job.task)
    except UsageError:
        if job.task.procid == 0:
            raise
        return ExitCode.USAGE  # task 0 says why, once
    with explaining(parsed):
        return _take_part(parsed, job, env)


def _take_part(parsed: Parsed, job: JobEnvironment, env: Mapping[str, str]) -> int:
    from hpc_elastic.launch.batch import StepRendezvous, StepRun, become_agent, run_batch, step_nodes

    assert job.task is not None
    cwd = working_directory(parsed, env)
    runs_dir = runs_directory(parsed, cwd)
    nodes = step_nodes(job)
    why = why_not_shared(runs_dir) if len(nodes) > 1 else None
    try:
        rendezvous = StepRendezvous(runs_dir, job, env, SystemClock())
    except OSError as error:
        raise UsageError(f"can't write in {runs_dir}: {error.strerror}; choose another with --runs-dir") from None
    if job.task.procid:
        run = rendezvous.wait()
        return ExitCode.USAGE if run.refused else become_agent(run, env)
    try:
        if why is not None:
            raise UsageError(f"the nodes can't see {runs_dir}: {why}; give a shared folder with --runs-dir")
        if ignored := job_options.ignored_in_allocation(parsed, "agent"):
            print_note(f"no effect in an existing allocation: {' '.join(ignored)}")
        rendezvous.clean()
        count = nodes_of(parsed, len(nodes), what="step")
        spec = build_spec(
            parsed, cluster="slurm", nodes=count, cwd=cwd, env=env, grace=job_options.notice_seconds(parsed)
        )
        run_dir = create_run_in_job(job, spec, runs_dir, env)
    except BaseException:
        rendezvous.publish(StepRun(refused=True))
        raise
    return run_batch(run_dir, env, rendezvous=rendezvous)
