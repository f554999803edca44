"""sbatch's options, with sbatch's names: how the job is queued. And ours: where the run is kept, what is awaited."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from typing import Any

from hpc_elastic.errors import UsageError
from hpc_elastic.options.sbatch import (
    MAX_NODES,
    SbatchOptions,
    check_given_once,
    check_srun_argument,
    check_time_option,
    parse_nodes,
    sbatch_variables,
)
from hpc_elastic.options.table import Option, Parsed, key_of
from hpc_elastic.run.option_values import RequeueChoice, one_of, parse_bad_nodes, whole
from hpc_elastic.run.paths import attempt_number, task_index

GROUP = "job"
OWN_GROUP = "own"

_PLAIN: Mapping[str, tuple[tuple[str, ...], str, str]] = {
    names[-1][2:].replace("-", "_"): (names, metavar, text)
    for names, metavar, text in (
        (("-p", "--partition"), "NAME", "partition"),
        (("-A", "--account"), "NAME", "account"),
        (("-q", "--qos"), "NAME", "quality of service"),
        (("-t", "--time"), "TIME", "time limit: minutes, H:M:S, D-H …"),
        (("-J", "--job-name"), "NAME", "the run's name (default: the script's)"),
        (("-c", "--cpus-per-task"), "N", "CPUs on each node"),
        (("-C", "--constraint"), "LIST", "node features"),
        (("-x", "--exclude"), "NODES", "nodes to leave out"),
        (("-w", "--nodelist"), "NODES", "nodes to have"),
        (("-d", "--dependency"), "LIST", "start after other jobs"),
        (("-a", "--array"), "LIST", "several runs, as in 1-4%2"),
        (("-o", "--output"), "PATTERN", "instead of job.log in the run directory"),
        (("-e", "--error"), "PATTERN", "the batch host's stderr, apart from its stdout"),
        (("--gres",), "LIST", "generic resources on each node"),
        (("--gpus-per-node",), "[TYPE:]N", "GPUs on each node"),
        (("--mem",), "SIZE", "memory on each node"),
        (("--reservation",), "NAME", "reservation"),
        (("--signal",), "[B:]SIG[@T]", "instead of the notice that --grace asks for"),
        (("--comment",), "TEXT", "a comment"),
        (("--mail-type",), "LIST", "when to send mail"),
        (("--mail-user",), "ADDRESS", "to whom"),
        (("--export",), "LIST", "environment variables to hand on (default: all)"),
        (("-b", "--begin"), "TIME", "not before"),
    )
}
"""Those that sbatch gets as they are."""

_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}\Z")
_MAX_GRACE = 65535  # sbatch's own limit for --signal


class Cluster(str, Enum):
    """``--cluster``."""

    AUTO = "auto"
    SLURM = "slurm"
    LOCAL = "local"


def _parse_run_id(text: str, option: str) -> str:
    if not _RUN_ID.match(text):
        raise UsageError(
            f"{option} {text}: a run id has at most 100 letters, digits, '.', '_' and '-', a letter or digit first"
        )
    if task_index(text) is not None or attempt_number(text) is not None:
        raise UsageError(f"{option} {text}: folders in a run directory are called so")
    return text


OPTIONS = (
    Option(
        names=("-N", "--nodes", "--nnodes"), dest="nodes", metavar="N|MIN-MAX", group=GROUP, env="PET_NNODES",
        parse=parse_nodes, sbatch=True,
        help="nodes; a range (2-4 or 2:4) goes on with fewer when some are lost (default 1)",
    ),
    Option(
        names=("--spares",), dest="spares", metavar="K", group=GROUP,
        parse=whole(least=0, most=MAX_NODES, wanted="a number of nodes, 0 or more"), field="spares",
        help="nodes beyond --nodes that wait, ready, to take a lost one's place with its ranks (default 0)",
    ),
    Option(
        names=("--segment",), dest="segment", metavar="K", group=GROUP,
        parse=whole(least=1, most=MAX_NODES, wanted="a number of nodes, 1 or more"),
        help="K neighbouring nodes are in together or not at all; MIN, MAX and spares are multiples (default 1)",
    ),
    *(
        Option(
            names=names, dest=dest, metavar=metavar, group=GROUP, help=text, sbatch=True,
            slurm_only=dest != "job_name", parse=check_time_option if dest == "time" else None,
        )
        for dest, (names, metavar, text) in _PLAIN.items()
    ),
    Option(
        names=("-G", "--gpus"), dest="gpus", metavar="[TYPE:]N", group=GROUP, slurm_only=True,
        help="GPUs in all, the same number on each of a fixed number of nodes",
    ),
    Option(
        names=("--het",), dest="het", metavar="'OPTIONS'", repeatable=True, group=GROUP, slurm_only=True, only="submit",
        help="one more component of a het job, as in --het '-N 2 -p gpu'; its nodes are in the same run; repeatable",
    ),
    Option(
        names=("--exclusive",), dest="exclusive", metavar="user|mcs", optional_value=True, group=GROUP,
        sbatch=True, slurm_only=True,
        help="no other job on the nodes",
    ),
    Option(
        names=("--requeue",), dest="requeue", group=GROUP, sbatch=True,
        help="requeue what can be mended (the default)",
    ),
    Option(names=("--no-requeue",), dest="requeue", constant="0", group=GROUP, sbatch=True, help="never requeue"),
    Option(
        names=("--requeue-with",), dest="requeue_with", metavar="auto|scontrol|chain", group=GROUP,
        parse=one_of(RequeueChoice), field="requeue_with", slurm_only=True,
        help="how: the same job again (scontrol), or a follow-on job that depends on this one's end (chain); auto "
        "(the default) takes that where this job may not be requeued",
    ),
    Option(
        names=("--bad-nodes",), dest="bad_nodes", metavar="run|jobs|off[,hours=H][,share=S]", group=GROUP,
        parse=parse_bad_nodes, field="bad_nodes", slurm_only=True,
        help="which nodes a requeue leaves out: what was lost, unfit, or where failures began, in this run (the "
        "default) or in all jobs of yours that say jobs, in the last H hours (24), at most a share S of all (0.33)",
    ),
    Option(
        names=("--grace",), dest="grace", metavar="SECONDS", group=GROUP,
        parse=whole(least=1, most=_MAX_GRACE, wanted=f"whole seconds from 1 to {_MAX_GRACE}"),
        help="notice before the time limit, for a last checkpoint (default 120; Slurm may be 60 s early)",
    ),
    Option(
        names=("--sbatch-arg",), dest="sbatch_args", metavar="ARG", repeatable=True, group=GROUP,
        executes=True, field="sbatch_args", sbatch=True, slurm_only=True,
        help="any other option of sbatch's, as in --sbatch-arg=--licenses=matlab:2; repeatable",
    ),
    Option(
        names=("--srun-arg",), dest="srun_args", metavar="ARG", repeatable=True, group=GROUP,
        executes=True, field="srun_args", slurm_only=True,
        help="an option for the srun that starts the agents; repeatable",
    ),
    Option(
        names=("--profile",), dest="profile", metavar="NAME", group=OWN_GROUP, in_files=False,
        help="take the [profile.NAME] tables of the configuration files as well [HPC_ELASTIC_PROFILE]",
    ),
    Option(
        names=("--cluster",), dest="cluster", metavar="auto|slurm|local", group=OWN_GROUP, parse=one_of(Cluster),
        help="where it runs: auto takes Slurm where there is one, else this machine",
    ),
    Option(
        names=("--runs-dir", "--log-dir"), dest="runs_dir", metavar="DIR", group=OWN_GROUP, env="PET_LOG_DIR",
        path=True, help="where run directories are made (default ./runs); all nodes must see it",
    ),
    Option(
        names=("--run-id", "--rdzv-id"), dest="run_id", metavar="ID", group=OWN_GROUP, env="PET_RDZV_ID",
        in_files=False, parse=_parse_run_id, field="run_id",
        help="the run directory's name (default: time, name and four random hex digits); must be new",
    ),
    Option(
        names=("-D", "--chdir"), dest="chdir", metavar="DIR", group=OWN_GROUP, path=True,
        executes=True,
        help="the workers' working directory (default: this one)",
    ),
    Option(
        names=("--allow-local-runs-dir",), dest="allow_local_runs_dir", group=OWN_GROUP, only="submit",
        help="accept a run directory that looks as if only this machine saw it",
    ),
    Option(
        names=("--template",), dest="template", metavar="FILE", group=OWN_GROUP, path=True,
        executes=True, slurm_only=True, only="submit",
        help="a batch script of your own, with @SBATCH_LINES@ and @COMMAND@ where ours go",
    ),
    Option(
        names=("--dry-run",), dest="dry_run", group=OWN_GROUP, in_files=False, only="submit",
        help="print the script and the command, and change nothing",
    ),
    Option(
        names=("--wait",), dest="wait", group=OWN_GROUP, slurm_only=True, only="submit",
        help="wait for the run's end, through requeues, and exit with its code",
    ),
    Option(
        names=("--overlap",), dest="overlap", group=OWN_GROUP, in_files=False, slurm_only=True, only="run",
        help="within an allocation: share nodes with other runs of it",
    ),
    Option(
        names=("--follow",), dest="follow", group=OWN_GROUP, slurm_only=True, only="submit",
        help="--wait, and print the job log as it grows",
    ),
)  # fmt: skip

_BY_DEST = {option.dest: option for option in OPTIONS}
SBATCH_VARIABLES: Mapping[str, tuple[str, ...]] = {
    **{dest: sbatch_variables(dest) for dest in _PLAIN},
    "exclusive": ("SBATCH_EXCLUSIVE",),
    "requeue": ("SBATCH_NO_REQUEUE", "SBATCH_REQUEUE"),
}
"""`Option.dest` → the variables by which sbatch is given the same."""


def sbatch_options(parsed: Parsed, *, nodes: tuple[int, int], job_name: str, grace: int) -> SbatchOptions:
    """The sbatch side of a command line. Values are checked when the script is rendered."""
    parsed.value(_BY_DEST["time"])  # checked here, where it is known how the user called it
    plain: dict[str, Any] = {dest: parsed.get(dest) for dest in _PLAIN}
    plain["job_name"] = job_name
    if parsed.get("gpus") is not None:
        plain["gpus_per_node"] = gpus_on_each(parsed, nodes)
    known = {
        name: f"{parsed.source(option.dest, f'--{key_of(option)}')} {parsed.get(option.dest) or '(default 1)'}"
        for option in OPTIONS
        if option.sbatch and not option.repeatable and (option.dest in parsed.values or option.dest == "nodes")
        for name in option.names
    }
    check_given_once(parsed.all("sbatch_args"), known)
    for argument in parsed.all("srun_args"):
        check_srun_argument(argument)
    return SbatchOptions(
        nodes=allocated_nodes(nodes, spare_nodes(parsed)),
        **plain,
        exclusive=parsed.get("exclusive"),
        requeue=wants_requeue(parsed),
        grace=grace,
        extra=parsed.all("sbatch_args"),
    )


def gpus_on_each(parsed: Parsed, nodes: tuple[int, int]) -> str:
    """``--gpus``, a total, as ``--gpus-per-node``.

    A step asks for the job's total again, of one node too (Slurm 22.05 then gives some agents fewer, or none).

    Raises:
        UsageError: it is not the same number on each node, or contradicts another option.
    """
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
    """``--nodes``: MIN and MAX."""
    found: tuple[int, int] = parsed.value(_BY_DEST["nodes"]) or (1, 1)
    return found


def spare_nodes(parsed: Parsed) -> int:
    """``--spares``."""
    return int(parsed.value(_BY_DEST["spares"]) or 0)


def notice_seconds(parsed: Parsed) -> int:
    """``--grace``."""
    return int(parsed.value(_BY_DEST["grace"]) or 120)


def asked_cluster(parsed: Parsed) -> str:
    """``auto``, ``slurm`` or ``local``."""
    return str((parsed.value(_BY_DEST["cluster"]) or Cluster.AUTO).value)


def segment_nodes(parsed: Parsed, nodes: tuple[int, int]) -> int:
    """``--segment``, 1 where it was not given.

    Args:
        parsed: The command line.
        nodes: MIN and MAX.

    Raises:
        UsageError: it is no number of nodes, or there would be parts of segments.
    """
    segment = int(parsed.value(_BY_DEST["segment"]) or 1)
    for what, count in (("--nodes", nodes[0]), ("--nodes", nodes[1]), ("--spares", spare_nodes(parsed))):
        if count % segment:
            raise UsageError(
                f"--segment {segment}: {what} {count} is no multiple of it, so a part of a segment would idle"
            )
    return segment


def allocated_nodes(nodes: tuple[int, int], spares: int) -> str:
    """What Slurm is asked for, as ``--nodes``: of a range, spares are what is beyond the most.

    A fixed number has its spares for certain; where less than MAX will do, a spare is not waited for either.
    """
    least, most = nodes
    low = least if least < most else most + spares
    return str(low) if low == most + spares else f"{low}-{most + spares}"


def wants_requeue(parsed: Parsed) -> bool:
    return parsed.get("requeue") != "0"


def only_for_slurm(parsed: Parsed) -> list[str]:
    """The options on the command line that mean nothing without Slurm, as the user wrote them.

    What a configuration file says of the cluster is not meant for this run.

    Raises:
        UsageError: one is wrong in any case: ``-t 0:3`` was meant for torchrun's ``--tee``.
    """
    parsed.value(_BY_DEST["time"])
    return [
        source
        for dest, source in parsed.sources.items()
        if dest in _BY_DEST and _BY_DEST[dest].slurm_only and parsed.from_command_line(dest)
    ]
