"""``hpc-elastic doctor``: does this cluster, this account and this installation let a run work?"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from msgspec import to_builtins

from hpc_elastic.base.clock import Clock, SystemClock
from hpc_elastic.base.host_facts import module_command
from hpc_elastic.cli.config import read_command_line
from hpc_elastic.cli.follow import ASK_SLURM_EVERY, SlurmWatch, show_to_end
from hpc_elastic.cli.main import print_note
from hpc_elastic.doctor.findings import DoctorFinding, Severity, problem
from hpc_elastic.doctor.host import check_host, judge_pythons, look_at_python
from hpc_elastic.doctor.node_job import DOCTOR_TAKEN, ProbedNode, ProbeJob, collect, judge_nodes, plan_job, unfinished
from hpc_elastic.doctor.slurm_checks import SavedFindings, SlurmFacts, ask_slurm, check_slurm, save_findings
from hpc_elastic.errors import UsageError
from hpc_elastic.launch.run_directory import create_run, make_runs_dir
from hpc_elastic.launch.submit_job import Submission, submission_client, submit_job
from hpc_elastic.options import job_options
from hpc_elastic.options.run_request import SlurmJob, cluster_here, spec_fields
from hpc_elastic.options.table import Group, Help, define, explaining
from hpc_elastic.output.terminal import one_line
from hpc_elastic.slurm.client import SubprocessRunner
from hpc_elastic.slurm.commands import SlurmError

DOCTOR_HELP = Help(
    usage="hpc-elastic doctor [--nodes N] [options]",
    description="Checks whether this cluster, account and installation let a run work: what Slurm is set to, files, "
    "software. With --nodes it then submits a short job with so many nodes, which measure the same and more "
    "there; without, nothing is submitted. Each check is one line: ok, a warning or a problem, what it means for a "
    "run, and the way out. Exit code 0, or 1 where there is a problem; 2: it can't be done as asked.",
    examples=(
        ("hpc-elastic doctor -p gpu", "this host, and what Slurm says of the partition"),
        ("hpc-elastic doctor -p gpu --nodes 2 --gpus-per-node 1 --save", "two nodes of it, too; submit then warns"),
    ),
)
DOCTOR_OPTIONS = (
    define(Group.JOB, "-N", "--nodes", metavar="N|MIN-MAX", in_files=False,
        help="examine so many nodes too, in a short job (default: no job; this host is judged for a run of 2)"),
    define(Group.SHOWN, "--json", in_files=False,
        help="print one JSON object, with what each node measured"),
    define(Group.SHOWN, "--save", metavar="user|site", optional_value=True, in_files=False,
        help="keep what was found, for this account or, as --save=site, for all: submit then warns by it"),
)  # fmt: skip


def main_doctor(argv: Sequence[str]) -> int:
    clock, env = SystemClock(), os.environ
    parsed = read_command_line(argv, subcommand="doctor", help_=DOCTOR_HELP, env=env, own=DOCTOR_OPTIONS, taken=DOCTOR_TAKEN)
    if parsed is None:
        return 0
    with explaining(parsed):
        if parsed.command:
            raise UsageError(f"doctor takes no script; leave out {parsed.command[0]}")
        asked = job_options.asked_cluster(parsed)
        has_job = parsed.get("nodes") is not None
        job = plan_job(parsed, cluster=cluster_here(asked, env), env=env)
        nodes = job_options.asked_nodes(parsed)[1] if has_job else 2  # this host is judged for a run of 2
        run = SlurmFacts(
            partition=parsed.get("partition") or env.get("SBATCH_PARTITION", ""),
            nodes=1 if asked == "local" else nodes,
            account=parsed.get("account") or env.get("SBATCH_ACCOUNT", ""),
            qos=parsed.get("qos") or env.get("SBATCH_QOS", ""),
            grace=job_options.notice_seconds(parsed),
            shutdown_timeout=spec_fields(parsed).get("shutdown_timeout", 30.0),
        )
        save = parsed.get("save")
        if save not in (None, "", "user", "site"):
            raise UsageError(f"--save={save}: give user (the default) or site")
    findings: list[DoctorFinding] = []

    def report(found: Iterable[DoctorFinding]) -> None:
        for finding in found:
            findings.append(finding)
            if not parsed.flag("json"):
                rest = f" — {finding.means}; {finding.way_out}" if finding.means else ""
                line = f"{finding.level.value:<8} {finding.check}: {finding.found}{rest}"
                sys.stdout.write(f"{one_line(line)}\n")
        sys.stdout.flush()

    slurm = ask_slurm(run, runner=SubprocessRunner(env), clock=clock, env=env)
    report(check_slurm(slurm))
    report(check_host(job.runs_dir.parent, nodes=1 if slurm.is_missing else run.nodes))
    container = job.settings.container
    python = look_at_python(job.settings.python, env, cwd=os.getcwd(), container=container)
    here = {socket.gethostname(): python} if python is not None else {}
    report(judge_pythons(here, container, of="software"))
    facts = _examine_nodes(job, report, clock=clock, env=env) if has_job else {}
    if parsed.flag("json"):
        value = {"version": 1, "findings": findings, "nodes": list(facts.values())}
        sys.stdout.write(json.dumps(to_builtins(value), indent=2) + "\n")
    if save is not None:
        kept = SavedFindings(saved_ns=clock.time_ns(), findings=tuple(findings), slurm=slurm)
        print_note(f"kept in {save_findings(kept, env=env, for_site=save == 'site')}")
    return 1 if any(finding.level is Severity.PROBLEM for finding in findings) else 0


def _examine_nodes(
    job: ProbeJob, report: Callable[[Iterable[DoctorFinding]], None], *, clock: Clock, env: Mapping[str, str]
) -> Mapping[str, ProbedNode]:
    """The job's run directory stays where something is missing."""
    for number in (signal.SIGTERM, signal.SIGHUP):  # the job ends with this process then, as with Ctrl-C
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    made: tuple[Path, ...] = ()
    try:
        for folder in (job.runs_dir.parent, job.runs_dir):  # the outer one's owner could replace the inner one
            made += make_runs_dir(folder)
        ended = _run_here(job, env) if job.slurm is None else _run_by_slurm(job, job.slurm, clock=clock, env=env)
    except (UsageError, SlurmError) as error:
        report([problem("nodes.job", str(error), "a run would not begin either", "give the options that it needs")])
        _remove_empty(made)
        return {}
    nodes, facts, why = collect(job.paths)
    is_whole = bool(nodes) and not unfinished(nodes, facts)
    report(judge_nodes(nodes, facts, why="" if is_whole else why or ended, container=job.settings.container))
    if is_whole:
        shutil.rmtree(job.paths.root, ignore_errors=True)
        _remove_empty(made)
    else:
        print_note(f"the job's files are in {job.paths.root}: job.log, and hpc-elastic report {job.paths.root}")
    return facts


def _remove_empty(folders: Sequence[Path]) -> None:
    for folder in reversed(folders):
        with suppress(OSError):
            folder.rmdir()


def _run_here(job: ProbeJob, env: Mapping[str, str]) -> str:
    create_run(job.spec, job.runs_dir)
    print_note(f"examining {job.spec.max_nodes} nodes that this machine plays")
    with open(job.paths.job_log, "ab") as log:
        process = subprocess.Popen(
            [*module_command("hpc_elastic.launch.local", "main"), str(job.paths.root)],
            env=dict(env), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    try:
        return f"exit code {process.wait()}"
    except BaseException:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(30.0)
        process.kill()  # nothing, where it has ended
        raise


def _run_by_slurm(job: ProbeJob, slurm: SlurmJob, *, clock: Clock, env: Mapping[str, str]) -> str:
    submission = Submission(job=slurm, runs_dir=job.runs_dir)
    client = submission_client(submission, env, clock, print_note)
    number = submit_job(submission, client, clock=clock, env=env, log=print_note)
    print_note(
        f"job {number} examines the nodes (Ctrl-C cancels it); the signal tried at its end makes it a failed job"
    )
    has_ended = False
    try:
        watch = SlurmWatch(client, number, job.paths, clock=clock)
        end = show_to_end(lambda: ASK_SLURM_EVERY, watch.end, clock=clock)
        has_ended = end.has_ended
    finally:
        if not has_ended:
            client.cancel(number)
            print_note(f"job {number} is cancelled")
    return end.why
