"""``hpc-elastic submit``: a run directory, a batch script, and sbatch; or the same run on this machine.

`run` too shows a run's plan in a few lines, and its probable mistakes. A refusal is a `UsageError`; a remark is one
line, after which the run goes on: what it is about may be meant.

``hpc-elastic convert FILE`` makes its command of an sbatch file that starts torchrun, and says why for each line.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import click

from hpc_elastic.base.host_facts import ask_interpreter
from hpc_elastic.base.text import fit, plural
from hpc_elastic.cli.config import read_command_line
from hpc_elastic.cli.main import is_terminal, print_note
from hpc_elastic.errors import UsageError
from hpc_elastic.options import job_options
from hpc_elastic.options.run_request import (
    ALL_OPTIONS,
    REFUSED,
    check_values,
    cluster_here,
    runs_directory,
    slurm_job,
    working_directory,
)
from hpc_elastic.options.sbatch import SbatchOptions
from hpc_elastic.options.table import Help, Parsed, explaining, parse
from hpc_elastic.output.terminal import each_line, one_line
from hpc_elastic.run.spec import EntryKind, RunSpec, Runtime

HELP = Help(
    usage="hpc-elastic submit [options] SCRIPT [script arguments...]",
    description="Creates a run directory with a batch script and submits it to Slurm. Script arguments go after the "
    "script. On a machine without Slurm the run is executed at once, with all agents on this machine.",
    examples=(
        ("hpc-elastic submit --nodes 4 --gpus-per-node 8 -t 720 train.py --lr 0.1", "4 nodes with 8 GPUs each"),
        (
            "hpc-elastic submit --nodes 3-4 --spares 1 --follow train.py",
            "continue with 3 nodes when one is lost and the spare is used up; print the job log",
        ),
        (
            "hpc-elastic submit --cluster local --nodes 2 --nproc-per-node 2 train.py",
            "try it on this machine: 2 agents with 2 workers each",
        ),
    ),
)


def main_submit(argv: Sequence[str]) -> int:
    env = os.environ
    parsed = read_command_line(argv, subcommand="submit", help_=HELP, env=env)
    if parsed is None:
        return 0
    with explaining(parsed):
        asked = job_options.asked_cluster(parsed)
        if cluster_here(asked, env) == "local":
            if asked == "auto":
                print_note("no sbatch here: running on this machine (--cluster local)")
            from hpc_elastic.cli.run import run_here

            return run_here(parsed, env, dry_run=parsed.flag("dry_run"))
        return _submit(parsed, env)


def _submit(parsed: Parsed, env: Mapping[str, str]) -> int:
    # What submits is imported here: a third of a second that ``--help`` has no use for.
    from hpc_elastic.base.clock import SystemClock
    from hpc_elastic.cli.follow import follow, leave
    from hpc_elastic.doctor.checks import saved_notes
    from hpc_elastic.launch.submit_job import Submission, dry_run, submission_client, submit_job
    from hpc_elastic.slurm.commands import scancel

    runs_dir = runs_directory(parsed, working_directory(parsed, env))
    submission = Submission(job=slurm_job(parsed, env), runs_dir=runs_dir)
    spec, options = submission.job.spec, submission.job.options
    for line in remarks(parsed, spec, env=env):
        print_note(line)
    for line in saved_notes(
        env, partition=options.partition or env.get("SBATCH_PARTITION", ""), nodes=spec.max_nodes + spec.spares,
        account=options.account or env.get("SBATCH_ACCOUNT", ""), qos=options.qos or env.get("SBATCH_QOS", ""),
        shutdown_timeout=spec.shutdown_timeout, grace=spec.signal_grace,
    ):  # fmt: skip
        print_note(f"hpc-elastic doctor found: {line}")
    if parsed.flag("dry_run"):
        text = dry_run(submission)
        # On stderr: what comes from stdout is a batch script as it stands.
        sys.stderr.write(each_line(plan_text(spec, submission.paths.root, options)) + "\n")
        sys.stderr.flush()
        sys.stdout.write(each_line(text) if is_terminal(sys.stdout) else text)
        return 0
    clock = SystemClock()
    client = submission_client(submission, env, clock, print_note)
    job = submit_job(submission, client, clock=clock, env=env, log=print_note)
    tasks = submission.job.tasks
    try:
        root, task = submission.paths.root, "task-*/" if options.array else ""
        text = (
            f"job             {job}{f' on cluster {job.cluster}' if job.cluster else ''}\n"
            f"run directory   {root}\n"
            f"job log         {options.output or f'{root}/{task}job.log'}\n"
            f"workers' logs   {root}/{task}attempt-*/round-*/rank-*/\n"
            f"report          hpc-elastic report {job}{'_TASK' if options.array else ''}\n"
            f"cancel          {shlex.join(scancel(job))}\n"
        )
        sys.stdout.write(each_line(text))
        sys.stdout.flush()
        if not (parsed.flag("wait") or parsed.flag("follow")):
            return 0
        if parsed.flag("follow") and tasks:
            print_note(f"each task of an array has its own log, as in: hpc-elastic logs --follow {job}_{tasks[0]}")
        shows_log = parsed.flag("follow") and options.output is None and not tasks
        return follow(client, job, submission.paths, clock=clock, show_log=shows_log)
    except KeyboardInterrupt:
        return leave(job, submission.paths)


_LAUNCHERS = ("torchrun", "deepspeed", "mpirun", "mpiexec", "horovodrun", "srun")
_LAUNCHING_MODULES = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")
_ASK_SECONDS = 5.0


def plan_text(spec: RunSpec, run_dir: Path, options: SbatchOptions | None = None) -> str:
    """Nodes and workers, what they run, where, what happens at a failure; without `options` on this machine."""
    nodes = str(spec.max_nodes) if spec.min_nodes == spec.max_nodes else f"{spec.min_nodes}-{spec.max_nodes}"
    nodes += f" and {plural(spec.spares, 'spare')}" if spec.spares else ""
    nodes += f", for each task of --array {spec.array}" if spec.array else ""
    number = spec.nproc_per_node
    workers = f"workers on each: as many as it has {number.upper()}s"
    if number.isdigit():
        workers = f"{plural(int(number), 'worker')} on each"
    elif number == "auto":
        workers = "workers on each: as many as Slurm gave it GPUs, else 1"
    where = "this machine"
    if options is not None:
        partition = f"partition {options.partition}" if options.partition else "the default partition"
        limit = f"time limit {options.time}" if options.time else "the partition's time limit"
        where = f"Slurm, {partition}, {limit}"
    restarts = f"up to {plural(spec.max_restarts, 'restart')} within the job" if spec.max_restarts else "no restart"
    has_requeues = spec.requeue and spec.max_requeues
    requeues = f", then up to {plural(spec.max_requeues, 'requeue')}" if has_requeues else "; no requeue"
    rows = (
        ("nodes", f"{nodes}; {workers}"),
        ("runs", spec.command),
        ("where", f"{where}, in {spec.cwd}"),
        *([("around it", spec.around)] if spec.around else []),
        ("on failure", restarts + requeues),
        ("run directory", str(run_dir)),
    )
    return "".join(f"{label:<16}{text}\n" for label, text in rows)


def remarks(parsed: Parsed, spec: RunSpec, *, env: Mapping[str, str]) -> Iterator[str]:
    by_name = {name: option for option in ALL_OPTIONS for name in option.names if name.startswith("--")}
    for word in parsed.command[1:]:
        option = by_name.get(word.partition("=")[0].replace("_", "-")) if word.startswith("--") else None
        if option is not None and option.dest not in parsed.values:
            yield (
                f"{word.partition('=')[0]} comes after {parsed.command[0]}, so it is an argument of the script; "
                f"if it is meant for hpc-elastic, write it before {parsed.command[0]}"
            )
    export = parsed.get("export")
    names = [name.partition("=")[0] for name in (export or "").split(",")]
    if export is not None and not any(name in ("ALL", "NONE", "NIL") for name in names):
        yield (
            f"{parsed.source('export', '--export')} {export}: Slurm then keeps everything else of your environment "
            f"(PATH, a conda environment) from the job; to add to it write ALL,{export}"
        )
    if "--no-requeue" in parsed.all("sbatch_args"):
        yield (
            "--sbatch-arg --no-requeue: the job can't be requeued, so the run would go on in follow-on jobs; "
            "where no further attempt is wanted, give --no-requeue itself"
        )
    if nested := _nested_launcher(spec):
        yield (
            f"{nested} starts workers of its own inside each worker here; give its script to hpc-elastic instead, "
            "or add --nproc-per-node 1 if that is meant"
        )
    yield from _container(parsed, spec, env)
    yield from _interpreter(parsed, spec, env)
    if spec.health_check:
        program = spec.health_check[0]
        if _found(program, spec, env) is None:
            yield from _missing(f"{parsed.source('health_check', '--health-check')} {program}", program, spec)


def _found(program: str, spec: RunSpec, env: Mapping[str, str]) -> str | None:
    return shutil.which(os.path.join(spec.cwd, program) if "/" in program else program, path=env.get("PATH"))


def _nested_launcher(spec: RunSpec) -> str:
    entry = spec.entrypoint
    if entry.kind is EntryKind.MODULE:
        return f"python -m {entry.target}" if entry.target in _LAUNCHING_MODULES else ""
    name = os.path.basename(entry.target)
    if name in _LAUNCHERS or (name == "accelerate" and entry.args[:1] == ("launch",)):
        return name
    words = (entry.target, *entry.args[:2])
    is_module = name.startswith("python") and words[1:2] == ("-m",) and words[2:3] and words[2] in _LAUNCHING_MODULES
    return f"python -m {words[2]}" if is_module else ""


def _container(parsed: Parsed, spec: RunSpec, env: Mapping[str, str]) -> Iterator[str]:
    container = spec.container
    if container is None:
        for dest in ("container_mounts", "container_workdir", "container_env", "container_args"):
            if (given := parsed.get(dest)) is not None:
                name = parsed.source(dest, dest)
                raise UsageError(f"{name} {given}: the workers run in no container; give --container-image too")
        return
    runtime, image = container.image.runtime, container.image.image
    option = f"{parsed.source('container_image', '--container-image')} {parsed.get('container_image')}"
    if runtime is Runtime.PYXIS and spec.cluster == "local":
        raise UsageError(f"{option}: Pyxis starts containers in Slurm's steps alone; use hpc-elastic submit")
    if runtime is Runtime.CHARLIECLOUD and (mount := next((m for m in container.mounts if m.read_only), None)):
        raise UsageError(
            f"{parsed.source('container_mounts', '--container-mounts')} {parsed.get('container_mounts')}: charliecloud "
            f"can't mount {mount.source} read-only; leave out :ro"
        )
    if image.startswith(("/", ".")) and not (path := Path(spec.cwd, image)).exists():
        where = f"{path} does not exist"
        if spec.cluster == "local" or path.is_relative_to(spec.cwd):
            raise UsageError(f"{option}: {where}")
        yield f"{option}: {where} on this host; every node of the job must have it"
    if shutil.which(runtime.program, path=env.get("PATH")) is None:
        if spec.cluster == "local":
            raise UsageError(f"{option}: {runtime.program} is not in PATH; install {runtime.value}, or load its module")
        yield f"{option}: {runtime.program} is not in PATH on this host; every node of the job must have it"


def _interpreter(parsed: Parsed, spec: RunSpec, env: Mapping[str, str]) -> Iterator[str]:
    given = parsed.get("python")
    if given is None or spec.entrypoint.kind is EntryKind.COMMAND or spec.container is not None:
        return
    option = f"{parsed.source('python', '--python')} {given}"
    found = _found(given, spec, env)
    if found is None:
        yield from _missing(option, given, spec)
        return
    said = ask_interpreter(found, "print(sys.version_info[0])", seconds=_ASK_SECONDS)
    # None: a slow filesystem, or a binary for the nodes' processors. The nodes find out.
    if said is not None and not said.strip().isdigit():
        raise UsageError(f"{option}: not a Python interpreter ({found} -c does not run Python code)")


def _missing(option: str, program: str, spec: RunSpec) -> Iterator[str]:
    """A bare name, or a path outside of the working directory, may exist on the nodes alone."""
    path = Path(spec.cwd, program)
    where = f"in {spec.cwd}" if "/" in program else "in PATH"
    if path.exists() and "/" in program:
        why = "is a folder" if path.is_dir() else f"is not executable; run: chmod +x {program}"
        raise UsageError(f"{option}: {why}")
    if spec.cluster == "local" or ("/" in program and path.is_relative_to(spec.cwd)):
        raise UsageError(f"{option}: no such program {where}")
    yield f"{option}: there is no such program on this host; every node of the job must have it"


_LARGEST = 1 << 20
_WIDTH = 100

CONVERT_PARAMETERS = (click.Argument(["file"], metavar="FILE", type=click.Path()),)
CONVERT_NOTE = "FILE: an sbatch file; -: standard input"


def run_convert(args: SimpleNamespace) -> int:
    from hpc_elastic.options.convert import convert

    found = convert(_read(args.file), lambda argv: check_values(parse(argv, ALL_OPTIONS, refused=REFUSED)))
    last = (0, "")
    for line in found.lines:
        if last != (line.number, line.text):
            last = line.number, line.text
            sys.stderr.write(f"{line.number:>4}  {fit(one_line(line.text), _WIDTH)}\n")
        sys.stderr.write(f"      {line.status.value}: {one_line(line.why)}\n")
    sys.stderr.flush()
    lines, current = [], ""
    for word in found.words:
        if current and len(current) + len(word) + 3 > _WIDTH and word.startswith("-"):
            lines.append(f"{current} \\")
            current = f"    {word}"
        else:
            current = f"{current} {word}" if current else word
    sys.stdout.write(each_line("\n".join([*found.before, *lines, current, *found.after]) + "\n"))
    sys.stdout.flush()
    if found.manual:
        print_note(f"{plural(len(found.manual), 'point')} left to you (above): decide about each before you submit")
    return 1 if found.manual else 0


def _read(name: str) -> str:
    try:
        if name == "-":
            data = sys.stdin.buffer.read(_LARGEST + 1)
        else:
            flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC  # a FIFO keeps nobody waiting
            with open(os.open(Path(name), flags), "rb") as file:
                data = file.read(_LARGEST + 1) or b""
        if len(data) > _LARGEST:
            raise UsageError(f"{name} is larger than {_LARGEST} bytes, so no sbatch file")
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise UsageError(f"{name} is not UTF-8 text") from None
    except OSError as error:
        raise UsageError(f"{name} can't be read: {error.strerror}") from None
