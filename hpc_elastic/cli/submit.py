"""``hpc-elastic submit``: a run directory, a batch script, and sbatch; or the same run on this machine.

``hpc-elastic convert FILE`` makes its command of an sbatch file that starts torchrun, and says why for each line.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import click

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
from hpc_elastic.options.table import Help, Parsed, explaining, parse
from hpc_elastic.output.terminal import each_line, one_line

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
    from hpc_elastic.cli.run import plan_text, remarks
    from hpc_elastic.doctor.slurm_checks import saved_notes
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
        data = sys.stdin.buffer.read(_LARGEST + 1) if name == "-" else _read_file(Path(name))
        if len(data) > _LARGEST:
            raise UsageError(f"{name} is larger than {_LARGEST} bytes, so no sbatch file")
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise UsageError(f"{name} is not UTF-8 text") from None
    except OSError as error:
        raise UsageError(f"{name} can't be read: {error.strerror}") from None


def _read_file(path: Path) -> bytes:
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:  # a FIFO keeps nobody waiting
        return file.read(_LARGEST + 1) or b""
