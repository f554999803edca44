"""sbatch's options, with sbatch's names: how the job is queued. And ours: where the run is kept, what is awaited."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from hpc_elastic.errors import UsageError
from hpc_elastic.options.sbatch import MAX_NODES, SbatchOptions, check_time_option, sbatch_variables
from hpc_elastic.options.table import Option, Parsed

GROUP = "job"
OWN_GROUP = "own"


class RequeueChoice(str, Enum):
    """``--requeue-with``."""

    AUTO = "auto"
    SCONTROL = "scontrol"
    CHAIN = "chain"


_PLAIN: tuple[tuple[tuple[str, ...], str, str], ...] = (
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

OPTIONS = (
    Option(
        names=("-N", "--nodes", "--nnodes"), dest="nodes", metavar="N|MIN-MAX", group=GROUP, env="PET_NNODES",
        help="nodes; a range (2-4 or 2:4) goes on with fewer when some are lost (default 1)",
    ),
    Option(
        names=("--spares",), dest="spares", metavar="K", group=GROUP,
        help="nodes beyond --nodes that wait, ready, to take a lost one's place with its ranks (default 0)",
    ),
    Option(
        names=("--segment",), dest="segment", metavar="K", group=GROUP,
        help="K neighbouring nodes are in together or not at all; MIN, MAX and spares are multiples (default 1)",
    ),
    *(
        Option(names=names, dest=names[-1][2:].replace("-", "_"), metavar=metavar, group=GROUP, help=text)
        for names, metavar, text in _PLAIN
    ),
    Option(
        names=("-G", "--gpus"), dest="gpus", metavar="[TYPE:]N", group=GROUP,
        help="GPUs in all, the same number on each of a fixed number of nodes",
    ),
    Option(
        names=("--het",), dest="het", metavar="'OPTIONS'", repeatable=True, group=GROUP,
        help="one more component of a het job, as in --het '-N 2 -p gpu'; its nodes are in the same run; repeatable",
    ),
    Option(
        names=("--exclusive",), dest="exclusive", metavar="user|mcs", optional_value=True, group=GROUP,
        help="no other job on the nodes",
    ),
    Option(names=("--requeue",), dest="requeue", group=GROUP, help="requeue what can be mended (the default)"),
    Option(names=("--no-requeue",), dest="requeue", constant="0", group=GROUP, help="never requeue"),
    Option(
        names=("--requeue-with",), dest="requeue_with", metavar="auto|scontrol|chain", group=GROUP,
        help="how: the same job again (scontrol), or a follow-on job that depends on this one's end (chain); auto "
        "(the default) takes that where this job may not be requeued",
    ),
    Option(
        names=("--bad-nodes",), dest="bad_nodes", metavar="run|jobs|off[,hours=H][,share=S]", group=GROUP,
        help="which nodes a requeue leaves out: what was lost, unfit, or where failures began, in this run (the "
        "default) or in all jobs of yours that say jobs, in the last H hours (24), at most a share S of all (0.33)",
    ),
    Option(
        names=("--grace",), dest="grace", metavar="SECONDS", group=GROUP,
        help="notice before the time limit, for a last checkpoint (default 120; Slurm may be 60 s early)",
    ),
    Option(
        names=("--sbatch-arg",), dest="sbatch_args", metavar="ARG", repeatable=True, group=GROUP,
        executes=True,
        help="any other option of sbatch's, as in --sbatch-arg=--licenses=matlab:2; repeatable",
    ),
    Option(
        names=("--srun-arg",), dest="srun_args", metavar="ARG", repeatable=True, group=GROUP,
        executes=True,
        help="an option for the srun that starts the agents; repeatable",
    ),
    Option(
        names=("--profile",), dest="profile", metavar="NAME", group=OWN_GROUP, in_files=False,
        help="take the [profile.NAME] tables of the configuration files as well [HPC_ELASTIC_PROFILE]",
    ),
    Option(
        names=("--cluster",), dest="cluster", metavar="auto|slurm|local", group=OWN_GROUP,
        help="where it runs: auto takes Slurm where there is one, else this machine",
    ),
    Option(
        names=("--runs-dir", "--log-dir"), dest="runs_dir", metavar="DIR", group=OWN_GROUP, env="PET_LOG_DIR",
        path=True, help="where run directories are made (default ./runs); all nodes must see it",
    ),
    Option(
        names=("--run-id", "--rdzv-id"), dest="run_id", metavar="ID", group=OWN_GROUP, env="PET_RDZV_ID",
        in_files=False, help="the run directory's name (default: time, name and four random digits); must be new",
    ),
    Option(
        names=("-D", "--chdir"), dest="chdir", metavar="DIR", group=OWN_GROUP, path=True,
        executes=True,
        help="the workers' working directory (default: this one)",
    ),
    Option(
        names=("--allow-local-runs-dir",), dest="allow_local_runs_dir", group=OWN_GROUP,
        help="accept a run directory that looks as if only this machine saw it",
    ),
    Option(
        names=("--template",), dest="template", metavar="FILE", group=OWN_GROUP, path=True,
        executes=True,
        help="a batch script of your own, with @SBATCH_LINES@ and @COMMAND@ where ours go",
    ),
    Option(
        names=("--dry-run",), dest="dry_run", group=OWN_GROUP, in_files=False,
        help="print the script and the command, and change nothing",
    ),
    Option(
        names=("--wait",), dest="wait", group=OWN_GROUP,
        help="wait for the run's end, through requeues, and exit with its code",
    ),
    Option(
        names=("--overlap",), dest="overlap", group=OWN_GROUP, in_files=False,
        help="within an allocation: share nodes with other runs of it",
    ),
    Option(names=("--follow",), dest="follow", group=OWN_GROUP, help="--wait, and print the job log as it grows"),
)  # fmt: skip

SBATCH_VARIABLES: Mapping[str, tuple[str, ...]] = {
    **{dest: sbatch_variables(dest) for dest in (names[-1][2:].replace("-", "_") for names, _, _ in _PLAIN)},
    "exclusive": ("SBATCH_EXCLUSIVE",),
    "requeue": ("SBATCH_NO_REQUEUE", "SBATCH_REQUEUE"),
}
"""`Option.dest` → the variables by which sbatch is given the same."""

SUBMIT_ONLY = ("dry_run", "wait", "follow", "allow_local_runs_dir", "template", "het")
"""What `run` does not take."""
RUN_ONLY = ("overlap",)
"""What `run` alone takes."""
_OURS = ("spares", "segment", "grace", "sbatch_args", "srun_args", "gpus", "het")


def sbatchs_own() -> tuple[Option, ...]:
    """Those that mean the same to sbatch, and ``--sbatch-arg``."""
    return tuple(
        option
        for option in OPTIONS
        if option.group == GROUP and (option.dest not in _OURS or option.dest == "sbatch_args")
    )


def sbatch_options(parsed: Parsed, *, nodes: tuple[int, int], job_name: str, grace: int) -> SbatchOptions:
    """The sbatch side of a command line. Values are checked when the script is rendered."""
    plain: dict[str, Any] = {
        names[-1][2:].replace("-", "_"): parsed.get(names[-1][2:].replace("-", "_")) for names, _, _ in _PLAIN
    }
    plain["job_name"] = job_name
    if parsed.get("gpus") is not None:
        plain["gpus_per_node"] = gpus_on_each(parsed, nodes)
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


def spare_nodes(parsed: Parsed) -> int:
    """``--spares``.

    Raises:
        UsageError: it is no number of nodes.
    """
    text = parsed.get("spares")
    if text is None:
        return 0
    if not (text.isascii() and text.isdigit() and int(text[:9]) <= MAX_NODES):
        raise UsageError(f"--spares {text}: give a number of nodes, 0 or more")
    return int(text)


def segment_nodes(parsed: Parsed, nodes: tuple[int, int]) -> int:
    """``--segment``, 1 where it was not given.

    Args:
        parsed: The command line.
        nodes: MIN and MAX.

    Raises:
        UsageError: it is no number of nodes, or there would be parts of segments.
    """
    text = parsed.get("segment")
    if text is None:
        return 1
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= MAX_NODES):
        raise UsageError(f"--segment {text}: give a number of nodes, 1 or more")
    segment, spares = int(text), spare_nodes(parsed)
    for what, count in (("--nodes", nodes[0]), ("--nodes", nodes[1]), ("--spares", spares)):
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


def requeue_choice(parsed: Parsed) -> RequeueChoice:
    """``--requeue-with``.

    Raises:
        UsageError: it is none of the three.
    """
    text = parsed.get("requeue_with") or RequeueChoice.AUTO.value
    try:
        return RequeueChoice(text)
    except ValueError:
        names = ", ".join(choice.value for choice in RequeueChoice)
        raise UsageError(f"{parsed.source('requeue_with', '--requeue-with')} {text}: give one of {names}") from None


def wants_requeue(parsed: Parsed) -> bool:
    return parsed.get("requeue") != "0"


def only_for_slurm(parsed: Parsed) -> list[str]:
    """The options on the command line that mean nothing without Slurm, as the user wrote them.

    What a configuration file says of the cluster is not meant for this run.

    Raises:
        UsageError: one is wrong in any case: ``-t 0:3`` was meant for torchrun's ``--tee``.
    """
    time_limit = parsed.get("time")
    if time_limit is not None:
        check_time_option(time_limit, option=parsed.sources["time"])
    meaningless = {names[-1][2:].replace("-", "_") for names, _, _ in _PLAIN} - {"job_name"}
    meaningless |= {"exclusive", "sbatch_args", "srun_args", "wait", "follow", "gpus", "het", "template"}
    meaningless |= {"requeue_with", "bad_nodes", "overlap"}
    return [source for dest, source in parsed.sources.items() if dest in meaningless and parsed.from_command_line(dest)]
