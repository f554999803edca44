"""What is tried before a run: ``hpc-elastic doctor`` checks the cluster and the account, ``rehearse`` the script."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct, to_builtins
from msgspec.structs import replace

from hpc_elastic.base import codec
from hpc_elastic.base.clock import Clock, SystemClock
from hpc_elastic.base.files import make_private_dir
from hpc_elastic.base.host_facts import module_command
from hpc_elastic.cli.config import read_command_line
from hpc_elastic.cli.main import print_note
from hpc_elastic.errors import UsageError
from hpc_elastic.launch.run_directory import create_run, make_runs_dir
from hpc_elastic.launch.submit_job import Submission, submission_client, submit_job
from hpc_elastic.options import job_options
from hpc_elastic.options.run_request import (
    SlurmJob,
    build_spec,
    cluster_here,
    runs_directory,
    slurm_job,
    spec_fields,
    working_directory,
)
from hpc_elastic.options.table import Group, Help, Parsed, define, explaining
from hpc_elastic.output.terminal import each_line, one_line
from hpc_elastic.run.option_values import GrowPolicy
from hpc_elastic.run.paths import RunPaths
from hpc_elastic.run.spec import EntryKind, RunSpec
from hpc_elastic.slurm.client import SubprocessRunner
from hpc_elastic.slurm.commands import SlurmError

if TYPE_CHECKING:  # each of the two is imported once it is asked for: the other needs none of it, nor does --help
    from hpc_elastic.doctor.checks import DoctorFinding
    from hpc_elastic.doctor.host import ProbeSettings
    from hpc_elastic.doctor.node_job import ProbedNode
    from hpc_elastic.rehearsal.live_run import RehearsalOptions

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
DOCTOR_TAKEN = frozenset(
    (
        *job_options.AS_GIVEN,
        *("partition", "account", "qos", "time", "exclude", "gpus_per_node", "sbatch_args", "srun_args", "profile"),
        *("cluster", "runs_dir", "allow_local_runs_dir", "chdir", "python", "setup", "setup_timeout", "rdzv_conf"),
        *("master_addr", "container_image", "container_mounts", "container_workdir", "container_env", "container_args"),
        *("grace", "shutdown_timeout"),
    )
)
"""`Option.dest` of the options of ``submit`` that it takes."""


def main_doctor(argv: Sequence[str]) -> int:
    clock, env = SystemClock(), os.environ
    parsed = read_command_line(
        argv, subcommand="doctor", help_=DOCTOR_HELP, env=env, own=DOCTOR_OPTIONS, taken=DOCTOR_TAKEN
    )
    if parsed is None:
        return 0
    from hpc_elastic.doctor import checks, host

    with explaining(parsed):
        if parsed.command:
            raise UsageError(f"doctor takes no script; leave out {parsed.command[0]}")
        asked = job_options.asked_cluster(parsed)
        has_job = parsed.get("nodes") is not None
        job = plan_job(parsed, cluster=cluster_here(asked, env), env=env)
        nodes = job_options.asked_nodes(parsed)[1] if has_job else 2  # this host is judged for a run of 2
        run = checks.SlurmFacts(
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

    slurm = checks.ask_slurm(run, runner=SubprocessRunner(env), clock=clock, env=env)
    report(checks.check_slurm(slurm))
    report(host.check_host(job.runs_dir.parent, nodes=1 if slurm.is_missing else run.nodes))
    container = job.settings.container
    python = host.look_at_python(job.settings.python, env, cwd=os.getcwd(), container=container)
    here = {socket.gethostname(): python} if python is not None else {}
    report(host.judge_pythons(here, container, of="software"))
    facts = _examine_nodes(job, report, clock=clock, env=env) if has_job else {}
    if parsed.flag("json"):
        value = {"version": 1, "findings": findings, "nodes": list(facts.values())}
        sys.stdout.write(json.dumps(to_builtins(value), indent=2) + "\n")
    if save is not None:
        kept = checks.SavedFindings(saved_ns=clock.time_ns(), findings=tuple(findings), slurm=slurm)
        print_note(f"kept in {checks.save_findings(kept, env=env, for_site=save == 'site')}")
    return 1 if any(finding.level is checks.Severity.PROBLEM for finding in findings) else 0


class ProbeJob(Struct, frozen=True, kw_only=True):
    spec: RunSpec
    runs_dir: Path
    """A folder below the one for runs, so that `hpc-elastic list` does not show it."""
    settings: ProbeSettings
    slurm: SlurmJob | None = None
    """The same spec as a job; None: on this machine."""

    @property
    def paths(self) -> RunPaths:
        return RunPaths(self.runs_dir / self.spec.run_id)


def plan_job(parsed: Parsed, *, cluster: str, env: Mapping[str, str]) -> ProbeJob:
    from hpc_elastic.doctor.host import ProbeSettings
    from hpc_elastic.doctor.node_job import facts_folder

    # Not this interpreter's name alone: --setup would put its own interpreter in that place.
    command = ("/usr/bin/env", *module_command("hpc_elastic.doctor.node_job", "main"))
    values = {
        "job_name": ("doctor",), "no_python": ("1",), "nproc_per_node": ("1",), "requeue": ("0",),
        "max_requeues": ("0",), "max_restarts": ("0",), "health_checks": ("none",),
    }  # fmt: skip
    if "SBATCH_TIMELIMIT" not in env:
        values["time"] = ("20",)
    asked = replace(parsed, command=command, values={**values, **parsed.values, "grace": ("60",)})
    cwd = working_directory(parsed, env)
    runs_dir = runs_directory(parsed, cwd) / "doctor"
    slurm = slurm_job(asked, env, array="") if cluster == "slurm" else None
    if slurm is not None:
        spec = slurm.spec
    else:
        spec = build_spec(
            asked, cluster="local", nodes=job_options.asked_nodes(parsed), cwd=cwd, env=env,
            grace=job_options.notice_seconds(asked),
        )  # fmt: skip
    own = sys.executable if spec.container is None else "python3"
    settings = ProbeSettings(python=parsed.get("python") or own, container=spec.container)
    args = (*spec.entrypoint.args, str(facts_folder(RunPaths(runs_dir / spec.run_id))), codec.dumps(settings))
    spec = replace(
        spec,
        # The agents would serve the workers' store by the workers' interpreter, which is yet to be tried.
        entrypoint=replace(spec.entrypoint, args=args, python=sys.executable),
        min_nodes=1,  # facts of the nodes that come are better than none
        grow=GrowPolicy.NEVER,
        rdzv_conf={"last_call_timeout": 60.0, **spec.rdzv_conf},
        container_image=None,
    )
    slurm = replace(slurm, spec=spec) if slurm is not None else None
    return ProbeJob(spec=spec, runs_dir=runs_dir, settings=settings, slurm=slurm)


def _examine_nodes(
    job: ProbeJob, report: Callable[[Iterable[DoctorFinding]], None], *, clock: Clock, env: Mapping[str, str]
) -> Mapping[str, ProbedNode]:
    """The job's run directory stays where something is missing."""
    from hpc_elastic.doctor.checks import problem
    from hpc_elastic.doctor.node_job import collect, judge_nodes, unfinished

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
    from hpc_elastic.cli.follow import ASK_SLURM_EVERY, SlurmWatch, show_to_end

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


REHEARSE_HELP = Help(
    usage="hpc-elastic rehearse [options of submit] SCRIPT [script arguments...]",
    description="Runs the script small and undisturbed, then again with faults: kills, an exception, a notice; on "
    "this machine, or with --cluster slurm as jobs on the cluster. Reports whether it resumed, from which step, how "
    "long that took, and whether its losses are those of the undisturbed run. Exit code 0: all holds; 1: the script is "
    "guilty of something; 2: it can't be rehearsed, or a fault that --faults names was not done. "
    "Each run has a working directory of its own; {folder} in the "
    "script's arguments is that folder.",
    examples=(
        ("hpc-elastic rehearse --nodes 2 train.py --steps 40", "each fault once, on 2 nodes that this machine plays"),
        ("hpc-elastic rehearse --faults quick train.py --data /data/small", "the three faults that find most"),
        (
            "hpc-elastic rehearse --cluster slurm -p debug --nodes 2 --gpus-per-node 2 -t 30 train.py",
            "on 2 nodes of the cluster, in jobs of your own",
        ),
    ),
)


REHEARSE_OPTIONS = tuple(
    define(
        Group.SHOWN, f"--{name}", metavar=metavar, repeatable=text.endswith("repeatable"), in_files=False,
        help=text,
    )
    for name, metavar, text in (
        ("faults", "NAME,...|quick|all|list", "what is done to it (default: all that can be done); quick: kill-worker, "
         "kill-saving and notice, which find most; list shows them"),
        ("losses", "REGEX", "lines of the output that have a step and its loss, as two groups"),
        ("losses-file", "FILE", "the file in which the script writes them, in its working directory"),
        ("tolerance", "T", "relative difference of losses that does not count (default: 0.001)"),
        ("patience", "SECONDS", "without a step for so long, the script is stuck (default: 180)"),
        ("input", "PATH", "link it into the working directory of each run; repeatable"),
        ("watch", "DIR", "a folder elsewhere in which the script saves; repeatable"),
        ("json", None, "print one JSON object"),
    )
)  # fmt: skip
_MOST_NODES = _MOST_WORKERS = 2
"""Small: of each, unless fewer are asked for."""


def main_rehearse(argv: Sequence[str]) -> int:
    env = os.environ
    if list(argv) in (["--faults", "list"], ["--faults=list"]):
        from hpc_elastic.rehearsal.judge import KINDS, QUICK

        lines = [f"{kind.name:<12}{kind.title}{f'; {kind.need.value}' if kind.need else ''}" for kind in KINDS]
        lines.append(f"{'quick':<12}{', '.join(kind.name for kind in QUICK)}: those that find most\n")
        sys.stdout.write(each_line("\n".join(lines)))
        return 0
    parsed = read_command_line(argv, subcommand="rehearse", help_=REHEARSE_HELP, env=env, own=REHEARSE_OPTIONS)
    if parsed is None:
        return 0
    from hpc_elastic.rehearsal.judge import as_json, as_page, as_text
    from hpc_elastic.rehearsal.rehearse import Rehearsal

    with explaining(parsed):
        options = _options(parsed, env)
    quiet = parsed.flag("json")
    outcome = Rehearsal(options, report=lambda line: None if quiet else print_note(line)).run()
    (options.folder / "rehearsal.html").write_text(as_page(outcome))
    found = json.dumps(as_json(outcome), indent=2) + "\n"
    (options.folder / "rehearsal.json").write_text(found)
    if quiet:
        sys.stdout.write(found)
    else:
        sys.stdout.write(each_line(f"{as_text(outcome)}page: {options.folder / 'rehearsal.html'}\n"))
    return outcome.code


def _options(parsed: Parsed, env: Mapping[str, str]) -> RehearsalOptions:
    from hpc_elastic.rehearsal.journal import LossSource, parse_pattern
    from hpc_elastic.rehearsal.judge import parse_kinds
    from hpc_elastic.rehearsal.live_run import RehearsalOptions

    cwd = working_directory(parsed, env)
    pattern = parsed.get("losses")
    kinds = parse_kinds(parsed.get("faults") or "all")
    job, spec = _small(parsed, cwd, env)
    folder = runs_directory(parsed, cwd) / f"rehearsal-{time.strftime('%Y%m%d-%H%M%S')}-{spec.name}-{os.getpid()}"
    options = RehearsalOptions(
        spec=spec,
        folder=Path(os.path.abspath(folder)),
        kinds=kinds,
        tolerance=_number(parsed.get("tolerance") or "0.001", "--tolerance"),
        source=LossSource(
            pattern=None if pattern is None else parse_pattern(pattern),
            file=parsed.get("losses_file") or "",
            is_asked=pattern is not None or parsed.get("losses_file") is not None,
        ),
        patience=_number(parsed.get("patience") or "180", "--patience"),
        inputs=tuple(_there(cwd / path, "--input") for path in parsed.all("input")),
        watched=tuple(_there(cwd / path, "--watch") for path in parsed.all("watch")),
        env=env,
        job=job,
    )
    make_runs_dir(options.folder.parent)
    make_private_dir(options.folder, exist_ok=False)
    return options


def _number(text: str, option: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = -1
    if not 0 <= found < 1e9:
        raise UsageError(f"{option} {text}: give a number, 0 or more")
    return found


def _there(path: Path, option: str) -> Path:
    if not path.exists():
        raise UsageError(f"{option} {path}: not there")
    return path


def _small(parsed: Parsed, cwd: Path, env: Mapping[str, str]) -> tuple[SlurmJob | None, RunSpec]:
    least, most = job_options.asked_nodes(parsed)
    nodes = (min(least, _MOST_NODES), min(most, _MOST_NODES))
    grace = min(job_options.notice_seconds(parsed), 40) if parsed.get("grace") else 15
    small: dict[str, str] = {"nodes": "-".join(map(str, dict.fromkeys(nodes))), "grace": str(grace)}
    asked = parsed.get("nproc_per_node") or ""
    if asked.isdigit():
        small["nproc_per_node"] = str(min(int(asked), _MOST_WORKERS))
    if job_options.spare_nodes(parsed) > 1:
        small["spares"] = "1"
    reduced = replace(parsed, values={**parsed.values, **{dest: (value,) for dest, value in small.items()}})
    job: SlurmJob | None = None
    if job_options.asked_cluster(parsed) == "slurm":
        job = slurm_job(reduced, env, array="")
        spec = job.spec
    else:
        spec = build_spec(reduced, cluster="local", nodes=nodes, cwd=cwd, env=env, grace=grace)
        if not asked.isdigit():
            workers = spec.nproc_per_node if spec.nproc_per_node.isdigit() else "1"  # not given: GPUs, or one
            spec = replace(spec, nproc_per_node=str(min(int(workers), _MOST_WORKERS)))
    if most > _MOST_NODES or (asked.isdigit() and int(asked) > _MOST_WORKERS):
        print_note(f"small: {nodes[1]} nodes with {spec.nproc_per_node} workers each")
    entry = spec.entrypoint
    if entry.kind is EntryKind.SCRIPT:
        entry = replace(entry, target=str(cwd / entry.target))
    spec = replace(
        spec,
        entrypoint=entry,
        segment=1,
        max_restarts=10_000,
        max_requeues=10_000,
        requeue=True,
        shutdown_timeout=min(spec.shutdown_timeout, 5.0),
        array="",
    )
    return job, spec
