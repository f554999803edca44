"""sbatch's options, with sbatch's names: how the job is queued. And ours: where the run is kept, what is awaited."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from typing import Any

from hpc_elastic.errors import UsageError
from hpc_elastic.options.sbatch import (
    AS_IT_IS,
    FORMS,
    MAX_NODES,
    SbatchOptions,
    check_srun_argument,
    check_time_option,
    option_name,
    parse_nodes,
    sbatch_variables,
)
from hpc_elastic.options.table import Group, Option, Parsed, define, key_of
from hpc_elastic.run.option_values import RequeueChoice, one_of, parse_bad_nodes, whole
from hpc_elastic.run.paths import RUN_ID, attempt_number, task_index

_PLAIN: Mapping[str, tuple[tuple[str, ...], str, str]] = {
    names[-1][2:].replace("-", "_"): (names, metavar, text)
    for names, metavar, text in (
        (("-p", "--partition"), "NAME", "partition"),
        (("-A", "--account"), "NAME", "account"),
        (("-q", "--qos"), "NAME", "quality of service"),
        (("-t", "--time"), "TIME", "time limit: minutes, H:M:S, D-H …"),
        (("-J", "--job-name"), "NAME", "name of the run (default: the script's name)"),
        (("-c", "--cpus-per-task"), "N", "CPUs on each node"),
        (("-x", "--exclude"), "NODES", "nodes to exclude"),
        (("-w", "--nodelist"), "NODES", "nodes to use"),
        (("-a", "--array"), "LIST", "job array: several runs, as in 1-4%2"),
        (("-o", "--output"), "PATTERN", "file for the job log, in place of job.log in the run directory"),
        (("-e", "--error"), "PATTERN", "separate file for the batch script's stderr"),
        (("--gpus-per-node",), "[TYPE:]N", "GPUs on each node"),
        (("--mem",), "SIZE", "memory on each node"),
        (("--signal",), "[B:]SIG[@T]", "signal before the time limit, in place of the one that --grace requests"),
        (("--comment",), "TEXT", "comment on the job"),
        (("--export",), "LIST", "environment variables of the job (default: all); ALL,NAME=value adds one"),
    )
}
"""Those that sbatch gets as they are, and that the help shows."""
_IGNORED_BY: Mapping[str, tuple[str, ...]] = {"job_name": (), "exclude": ("agent",), "nodelist": ("agent",)}
"""The exceptions; all others are ignored by ``run`` and ``agent``."""

_MAX_GRACE = 65535  # sbatch's own limit for --signal


class Cluster(str, Enum):
    AUTO = "auto"
    SLURM = "slurm"
    LOCAL = "local"


def _parse_run_id(text: str, option: str) -> str:
    if not re.fullmatch(RUN_ID, text):
        raise UsageError(
            f"{option} {text}: a run id has at most 100 letters, digits, '.', '_' and '-', a letter or digit first"
        )
    if task_index(text) is not None or attempt_number(text) is not None:
        raise UsageError(f"{option} {text}: this name is used for folders in a run directory")
    return text


def _as_it_is(word: str) -> Option:
    name = word.rstrip("=?")
    names = tuple(name.split("/"))
    return Option(
        names=names,
        dest=names[-1][2:].replace("-", "_"),
        metavar="VALUE" if name != word else None,
        optional_value=word.endswith("?"),
        executes=names[-1] in ("--container", "--export-file", "--get-user-env"),
        help="",
        group=Group.JOB,
        sbatch=True,
        slurm_only=True,
        ignored_by=("run", "agent"),
    )


OPTIONS = (
    define(Group.JOB, "-N", "--nodes", "--nnodes", metavar="N|MIN-MAX", env="PET_NNODES", parse=parse_nodes,
        sbatch=True,
        help="number of nodes; with a range (2-4 or 2:4) the run continues with fewer when nodes are lost (default 1)"),
    define(Group.RECOVERY, "--spares", metavar="K",
        parse=whole(least=0, most=MAX_NODES, wanted="a number of nodes, 0 or more"), in_spec=True,
        help="nodes beyond --nodes that wait to replace lost ones (default 0)"),
    define(Group.RECOVERY, "--segment", metavar="K",
        parse=whole(least=1, most=MAX_NODES, wanted="a number of nodes, 1 or more"),
        help="nodes join and leave in blocks of K neighbours; MIN, MAX and --spares must be multiples of K "
        "(default 1)"),
    *(
        Option(
            names=names, dest=dest, metavar=metavar, group=Group.JOB, help=text, sbatch=True,
            ignored_by=_IGNORED_BY.get(dest, ("run", "agent")),
            slurm_only=dest != "job_name", parse=check_time_option if dest == "time" else None,
        )
        for dest, (names, metavar, text) in _PLAIN.items()
    ),
    *map(_as_it_is, AS_IT_IS.split()),
    define(Group.JOB, "-G", "--gpus", metavar="[TYPE:]N", slurm_only=True, ignored_by=("run", "agent"),
        help="GPUs in total; each node gets the same number, so the number of nodes must be fixed"),
    define(Group.JOB, "--exclusive", metavar="user|mcs", optional_value=True, sbatch=True, slurm_only=True,
        ignored_by=("run", "agent"),
        help="no other jobs on the nodes"),
    define(Group.RECOVERY, "--requeue", sbatch=True,
        help="requeue the job after a failure that another attempt may get past (the default)"),
    define(Group.RECOVERY, "--no-requeue", dest="requeue", constant="0", sbatch=True,
        help="never requeue the job"),
    define(Group.RECOVERY, "--requeue-with", metavar="auto|scontrol|chain", parse=one_of(RequeueChoice), in_spec=True,
        slurm_only=True,
        help="how to requeue: scontrol, the same job again; chain, a follow-on job that depends on the end of this "
        "one; auto (the default), chain where this job may not be requeued"),
    define(Group.RECOVERY, "--bad-nodes", metavar="run|off[,hours=H][,share=S]", parse=parse_bad_nodes, in_spec=True,
        slurm_only=True,
        help="nodes that a requeue excludes (lost, unfit, or where failures began): run, those of the run's last H "
        "hours (the default, 24), at most a share S of all nodes (0.33); off, none"),
    define(Group.RECOVERY, "--grace", metavar="SECONDS",
        parse=whole(least=1, most=_MAX_GRACE, wanted=f"whole seconds from 1 to {_MAX_GRACE}"),
        help="notice before the time limit, for a last checkpoint (default 120; Slurm may send it 60 s early)"),
    define(Group.JOB, "--sbatch-arg", dest="sbatch_args", metavar="ARG", repeatable=True, executes=True, in_spec=True,
        sbatch=True, slurm_only=True, ignored_by=("run", "agent"),
        help="option of a newer sbatch, as in --sbatch-arg=--name=value; repeatable. Any option of today's sbatch is "
        "taken as it is, as in --licenses matlab:2"),
    define(Group.JOB, "--srun-arg", dest="srun_args", metavar="ARG", repeatable=True, executes=True, in_spec=True,
        slurm_only=True, ignored_by=("agent",),
        help="option for the srun that starts the agents; repeatable"),
    define(Group.RUN, "--profile", metavar="NAME", in_files=False,
        help="also read the [profile.NAME] tables of the configuration files [HPC_ELASTIC_PROFILE]"),
    define(Group.RUN, "--cluster", metavar="auto|slurm|local", parse=one_of(Cluster),
        ignored_by=("agent",),
        help="where to run: slurm, local (this machine), or auto (the default): Slurm if there is an sbatch, else "
        "local"),
    define(Group.RUN, "--runs-dir", "--log-dir", metavar="DIR", env="PET_LOG_DIR", path=True,
        help="where run directories are created; all nodes must see it (default ./runs)"),
    define(Group.RUN, "--run-id", "--rdzv-id", metavar="ID", env="PET_RDZV_ID", in_files=False, parse=_parse_run_id,
        in_spec=True,
        help="name of the run directory; must be new (default: time, name and four random hex digits)"),
    define(Group.WORKERS, "-D", "--chdir", metavar="DIR", path=True, executes=True,
        help="working directory of the workers (default: the current one)"),
    define(Group.RUN, "--allow-local-runs-dir", submit_only=True,
        help="accept a run directory that seems to be visible on this machine only"),
    define(Group.RUN, "--template", metavar="FILE", path=True, executes=True, slurm_only=True, submit_only=True,
        help="your own batch script, with the placeholders @SBATCH_LINES@ and @COMMAND@"),
    define(Group.RUN, "--dry-run", in_files=False, submit_only=True,
        help="print the plan and the batch script, and change nothing"),
    define(Group.RUN, "--wait", slurm_only=True, submit_only=True,
        help="wait until the run ends, through requeues, and exit with its code"),
    define(Group.RUN, "--follow", slurm_only=True, submit_only=True,
        help="--wait, and print the job log as it grows"),
)  # fmt: skip

_BY_DEST = {option.dest: option for option in OPTIONS}
AS_GIVEN = frozenset(
    option.dest
    for option in OPTIONS
    if option.sbatch and option.dest not in {*SbatchOptions.__struct_fields__, "sbatch_args"} - {"extra"}
)
"""`Option.dest` of those that become arguments of sbatch as they stand."""
SBATCH_VARIABLES: Mapping[str, tuple[str, ...]] = {
    **{option.dest: sbatch_variables(option.dest) for option in OPTIONS if option.sbatch},
    "nodes": (),
    "requeue": ("SBATCH_NO_REQUEUE", "SBATCH_REQUEUE"),
}
"""`Option.dest` → the variables by which sbatch is given the same: they win over files, as every variable does."""


def sbatch_options(parsed: Parsed, *, nodes: tuple[int, int], job_name: str, grace: int) -> SbatchOptions:
    parsed.value(_BY_DEST["time"])  # checked here, where it is known how the user called it
    plain: dict[str, Any] = {dest: parsed.get(dest) for dest in _PLAIN if dest not in AS_GIVEN}
    for dest, (pattern, example) in FORMS.items():
        if (value := parsed.get(dest)) and not re.fullmatch(pattern, value, re.IGNORECASE):
            option = parsed.source(dest, f"--{key_of(_BY_DEST[dest])}")
            raise UsageError(f"{option} {value}: sbatch can't read it; write it as in {example}")
    plain["job_name"] = job_name
    if parsed.get("gpus") is not None:
        plain["gpus_per_node"] = gpus_on_each(parsed, nodes)
    known = {
        name: f"{parsed.source(option.dest, f'--{key_of(option)}')} {parsed.get(option.dest) or '(default 1)'}"
        for option in OPTIONS
        if option.sbatch and not option.repeatable and (option.dest in parsed.values or option.dest == "nodes")
        for name in option.names
    }
    for argument in parsed.all("sbatch_args"):
        if (own := known.get(option_name(argument))) is not None:
            raise UsageError(f"--sbatch-arg {argument}: {own} contradicts it; leave one of them out")
    for argument in parsed.all("srun_args"):
        check_srun_argument(argument)
    as_given: list[str] = []
    for own_option in OPTIONS:
        text = parsed.get(own_option.dest) if own_option.dest in AS_GIVEN else None
        name = f"--{key_of(own_option)}"
        if text is not None and own_option.metavar is not None:
            as_given.append(f"{name}={text}" if text else name)
        elif text not in (None, "0"):
            as_given.append(name)
    # A fixed number has its spares for certain; where less than MAX will do, a spare is not waited for either.
    (least, most), whole = nodes, nodes[1] + spare_nodes(parsed)
    return SbatchOptions(
        nodes=f"{least}-{whole}" if least < most else str(whole),
        **plain,
        requeue=wants_requeue(parsed),
        grace=grace,
        extra=(*as_given, *parsed.all("sbatch_args")),
    )


def gpus_on_each(parsed: Parsed, nodes: tuple[int, int]) -> str:
    """A step asks for the total again, of one node too (Slurm 22.05 then gives some agents fewer, or none)."""
    text = parsed.get("gpus") or ""
    if parsed.get("gpus_per_node") is not None:
        raise UsageError(f"--gpus {text}: --gpus-per-node is given too; leave one out")
    kind, colon, number = text.rpartition(":")
    if not (number.isascii() and number.isdigit() and int(number[:9]) > 0) or "," in text:
        raise UsageError(f"--gpus {text}: give a number, as in 8 or a100:8")
    count = int(number[:9])
    least, most = nodes
    spares = spare_nodes(parsed)
    if least != most or count % (most + spares):
        raise UsageError(
            f"--gpus {text}: not the same number on each of {least if least == most else f'{least}-{most}'} nodes"
            f"{f' and {spares} spares' if spares else ''}; give --gpus-per-node"
        )
    return f"{kind}{colon}{count // (most + spares)}"


def asked_nodes(parsed: Parsed) -> tuple[int, int]:
    found: tuple[int, int] = parsed.value(_BY_DEST["nodes"]) or (1, 1)
    return found


def spare_nodes(parsed: Parsed) -> int:
    return int(parsed.value(_BY_DEST["spares"]) or 0)


def notice_seconds(parsed: Parsed) -> int:
    return int(parsed.value(_BY_DEST["grace"]) or 120)


def asked_cluster(parsed: Parsed) -> str:
    return str((parsed.value(_BY_DEST["cluster"]) or Cluster.AUTO).value)


def segment_nodes(parsed: Parsed, nodes: tuple[int, int]) -> int:
    segment = int(parsed.value(_BY_DEST["segment"]) or 1)
    for what, count in (("--nodes", nodes[0]), ("--nodes", nodes[1]), ("--spares", spare_nodes(parsed))):
        if count % segment:
            raise UsageError(
                f"--segment {segment}: {what} {count} is not a multiple of it, so a part of a segment would be unused"
            )
    return segment


def wants_requeue(parsed: Parsed) -> bool:
    return parsed.get("requeue") != "0"


def ignored_in_allocation(parsed: Parsed, subcommand: str) -> list[str]:
    return [
        source
        for dest, source in parsed.sources.items()
        if dest in _BY_DEST and subcommand in _BY_DEST[dest].ignored_by and parsed.from_command_line(dest)
    ]


def only_for_slurm(parsed: Parsed) -> list[str]:
    """The options on the command line that mean nothing without Slurm, as the user wrote them.

    What a configuration file says of the cluster is not meant for this run. ``-t 0:3`` is refused in any case: it was
    meant for torchrun's ``--tee``.
    """
    parsed.value(_BY_DEST["time"])
    return [
        source
        for dest, source in parsed.sources.items()
        if dest in _BY_DEST and _BY_DEST[dest].slurm_only and parsed.from_command_line(dest)
    ]
