"""How the workers run: torchrun's options, with its names and PET_* variables, and the user's commands around them."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from hpc_elastic.errors import UsageError
from hpc_elastic.options.sbatch import NO_HET_JOBS
from hpc_elastic.options.table import Group, Option, Parsed, define
from hpc_elastic.run.log_pieces import parse_bytes, parse_size
from hpc_elastic.run.option_values import (
    CheckpointRoom,
    GrowPolicy,
    NumaBinding,
    RestartWith,
    command_like,
    one_of,
    parse_handled_signals,
    parse_health_checks,
    parse_local_ranks,
    parse_metrics,
    parse_modules,
    parse_nproc,
    parse_positive_seconds,
    parse_rank_ranges,
    parse_seconds,
    parse_section_timeouts,
    parse_signal,
    parse_start_method,
    parse_std_streams,
    parse_words,
    whole,
)
from hpc_elastic.run.progress import OnSlowRank, parse_hangs
from hpc_elastic.run.spec import (
    EntryKind,
    Entrypoint,
    parse_container_env,
    parse_container_image,
    parse_container_mounts,
    parse_container_workdir,
    parse_rdzv_conf,
)

_LAUNCHER = re.compile(r"torchrun|deepspeed|accelerate|srun|mpirun|mpiexec|horovodrun|python[\d.]*")
_SHELL = re.compile(rb"#!\s*(?:\S*/env\s+)?(?:\S*/)?(?:ba|da|z|k|c|tc)?sh(?:\s|$)")

_COUNT = whole(least=0, most=1_000_000)
_PIECES = whole(least=2, most=1000, wanted="a whole number from 2 to 1000; the first and the last piece are kept")


def parse_texts(text: str, option: str) -> tuple[str, ...]:
    """``loss,nan``, as torchrun has it: ``,,`` is a comma in a text."""
    found = (one.replace("\0", ",") for one in text.replace(",,", "\0").split(","))
    return tuple(filter(None, found))


def parse_checkpoint_local(text: str, option: str) -> CheckpointRoom:
    folder, colon, room = text.strip().rpartition(":")
    if not colon:
        folder, room = room, ""
    if not folder.startswith("/"):
        raise UsageError(f"{option} {text}: give a folder of each node by its whole path, as in /dev/shm:40G")
    return CheckpointRoom(folder=os.path.normpath(folder), room=parse_bytes(room, option) if colon else None)


def parse_checkpoint_dir(text: str, option: str) -> str:
    return os.path.abspath(os.path.expanduser(text))


_LOOKS_LIKE_FILE = re.compile(r"[^\s;&|<>()$`'\"=]*(?:/[^\s;&|<>()$`'\"=]*|\.(?:ba)?sh)")


def parse_setup(text: str, option: str) -> str:
    path = os.path.join(current_directory(os.environ), os.path.expanduser(text))
    if os.path.isfile(path):
        if not os.access(path, os.R_OK):
            raise UsageError(f"{option} {text}: the file can't be read")
        return f"source {shlex.quote(os.path.normpath(path))}"
    if _LOOKS_LIKE_FILE.fullmatch(text) and not os.access(path, os.X_OK):
        raise UsageError(
            f"{option} {text}: there is no such file; give one, or shell commands as in 'module load cuda'"
        )
    return text


def current_directory(env: Mapping[str, str]) -> Path:
    """This process' own: absolute, by the name that the shell uses, which is the one that all nodes know.

    (A home may be mounted at another path on each host, with one symbolic link for people.)
    """
    here = env.get("PWD", "")
    with suppress(OSError):
        if here.startswith("/") and os.path.samefile(here, "."):
            return Path(here)
    return Path.cwd()


def parse_notify(text: str, option: str) -> str:
    if re.match(r"[a-z][a-z0-9+.-]*://", text) and not re.fullmatch(r"https?://[^\s/]+\S*", text):
        raise UsageError(f"{option} {text}: give a command, or a URL that begins with http:// or https://")
    return text


OPTIONS = (
    define(Group.WORKERS, "--nproc-per-node", metavar="N|auto|gpu|cpu", env="PET_NPROC_PER_NODE", parse=parse_nproc,
        in_spec=True,
        help="workers on each node (default: one for each GPU that Slurm allocated, else 1); without Slurm auto is "
        "the machine's GPUs, else its CPUs"),
    define(Group.RECOVERY, "--max-restarts", metavar="N", env="PET_MAX_RESTARTS", parse=_COUNT, in_spec=True,
        help="restarts of the workers within one attempt, all nodes together (default 3)"),
    define(Group.RECOVERY, "--restart-policy", metavar="processes|in-process", parse=one_of(RestartWith), in_spec=True,
        help="processes (the default): after a failure all workers restart; in-process: only the failed worker is "
        "replaced, at most --max-restarts times on a node, in scripts that use hpc_elastic.inprocess"),
    define(Group.RECOVERY, "--max-requeues", metavar="N", parse=_COUNT, in_spec=True,
        help="requeues of the job: attempts after the first one (default 3)"),
    define(Group.RECOVERY, "--max-same-failures", metavar="N", parse=_COUNT, in_spec=True,
        help="give up after N identical failures without progress (default 2; 0: never)"),
    define(Group.RECOVERY, "--restart-window", metavar="SECONDS", parse=parse_seconds, in_spec=True,
        help="reset the restart counter after the workers have run this long (default: never)"),
    define(Group.RECOVERY, "--grow", metavar="checkpoint|now|never", parse=one_of(GrowPolicy), in_spec=True,
        help="when a late node is added to a run that is smaller than MAX: checkpoint (the default), after the next "
        "checkpoint that the script reports, or at once if it reported none for 5 minutes; now, at once; never, only "
        "at the next restart"),
    define(Group.RECOVERY, "--preemption-signal", metavar="NAME", parse=parse_signal, in_spec=True,
        help="signal for the workers, as in USR1, when the job is about to end and they should save (default: none; "
        "hpc_elastic.should_checkpoint then returns True)"),
    define(Group.RECOVERY, "--checkpoint-dir", metavar="DIR", path=True, parse=parse_checkpoint_dir, in_spec=True,
        help="shared folder to which each node copies what the script writes in hpc_elastic.checkpoint_dir, while "
        "training goes on (default: none)"),
    define(Group.RECOVERY, "--checkpoint-local", metavar="FOLDER[:SIZE]", parse=parse_checkpoint_local, in_spec=True,
        help="folder of each node for the script's checkpoints, and the room that they may take; in /dev/shm that is "
        "memory of the job (default: /dev/shm, half of what is free)"),
    define(Group.RECOVERY, "--checkpoint-keep", metavar="N", parse=whole(least=1, most=10**6), in_spec=True,
        help="number of checkpoints to keep in --checkpoint-dir (default 2)"),
    define(Group.RECOVERY, "--checkpoint-bandwidth", metavar="SIZE", parse=parse_size, in_spec=True,
        help="bytes per second that each node copies while training goes on (default 500M)"),
    define(Group.RECOVERY, "--checkpoint-replicas", metavar="0|1", parse=whole(least=0, most=1), in_spec=True,
        help="1: the next node keeps a copy of each node's part, so that a lost node loses nothing (default 0)"),
    define(Group.HANGS, "--section-timeouts", metavar="NAME:SECONDS,...", parse=parse_section_timeouts, in_spec=True,
        help="longest time between two heartbeats (hpc_elastic.heartbeat) before a worker counts as hung, by section, "
        "as in setup:900,step:60,checkpoint:300; step:auto learns it from the steps (default: none; --hangs needs no "
        "heartbeats)"),
    define(Group.HANGS, "--hangs", metavar="observe|act[:SECONDS]", parse=parse_hangs, in_spec=True,
        help="when no worker makes progress for 300 s or SECONDS, and for three times as long as the run has ever "
        "paused: observe (the default), the job log, status and the report show it, with the rank that the others "
        "wait for; act, the workers also leave their stacks and are started again; the script needs no change"),
    define(Group.HANGS, "--slow-ranks", metavar="observe|exclude|off", parse=one_of(OnSlowRank), in_spec=True,
        help="when the other ranks wait for one, or the run is slower than it was: observe (the default), the job log, "
        "status and the report show it; exclude, the next restart or requeue also leaves its node out, where a spare "
        "or fewer nodes are allowed; off, ranks are not compared"),
    define(Group.HANGS, "--health-checks", metavar="NAME[=LIMIT],...|none", parse=parse_health_checks, in_spec=True,
        help="checks that a node must pass before it joins a round: tmp=SIZE, shm=SIZE, memory=SIZE, shared=SECONDS, "
        "clock=SECONDS, gpu=ERRORS, gpu-memory=SECONDS, link=SECONDS; default: all, with default limits (the default)"),
    define(Group.HANGS, "--health-check", metavar="COMMAND", parse=command_like("/path/check.sh --fast"), in_spec=True,
        executes=True,
        help="your own check, run on each node before it joins a round; a node where it exits with another code than "
        "0 leaves the run"),
    define(Group.HANGS, "--health-check-timeout", metavar="SECONDS", parse=parse_positive_seconds, in_spec=True,
        help="time limit of --health-check; a check that takes longer has failed (default 30)"),
    define(Group.OUTPUT, "--metrics", metavar="prometheus:FILE.prom", parse=parse_metrics, in_spec=True,
        help="file to which each agent writes its metrics; {host} in FILE is the node's name (default: none)"),
    define(Group.WORKERS, "-m", "--module", env="PET_MODULE", executes=True,
        help="SCRIPT is the name of a module, as for python -m"),
    define(Group.WORKERS, "--no-python", env="PET_NO_PYTHON", executes=True,
        help="SCRIPT is a command and is not run by Python"),
    define(Group.WORKERS, "--python", metavar="PATH", path=True, executes=True,
        help="Python interpreter of the workers (default: the one that runs hpc-elastic)"),
    define(Group.CONTAINER, "--container-image", metavar="[RUNTIME:]IMAGE", parse=parse_container_image, in_spec=True,
        executes=True,
        help="run the workers in a container of this image; RUNTIME is charliecloud, apptainer, singularity, podman, "
        "enroot or pyxis (default: by the image's form and what is installed)"),
    define(Group.CONTAINER, "--container-mounts", metavar="SRC[:DST[:ro]],...", parse=parse_container_mounts,
        in_spec=True,
        help="what else of the host the container has; the working directory and the run directory are there"),
    define(Group.CONTAINER, "--container-workdir", metavar="DIR", parse=parse_container_workdir, in_spec=True,
        help="the workers' working directory inside (default: where the run was started)"),
    define(Group.CONTAINER, "--container-env", metavar="NAME,...", parse=parse_container_env, in_spec=True,
        help="variables that keep the host's value where the image has its own, such as PATH or LD_LIBRARY_PATH"),
    define(Group.CONTAINER, "--container-args", metavar="'ARGS'", parse=parse_words, in_spec=True, executes=True,
        help="further arguments of the runtime, before the image"),
    define(Group.WORKERS, "--role", metavar="NAME", env="PET_ROLE", in_spec=True,
        help="role of the workers (default: default)"),
    define(Group.OUTPUT, "-r", "--redirects", metavar="STREAMS", env="PET_REDIRECTS", parse=parse_std_streams,
        in_spec=True,
        help="worker streams that go to their files only, not to the job log: 0 (none), 1 (stdout), 2 (stderr), 3 "
        "(both), or by local rank, as in 0:3,1:1"),
    define(Group.OUTPUT, "--tee", metavar="STREAMS", env="PET_TEE", parse=parse_std_streams, in_spec=True,
        help="worker streams that go to the job log in spite of --redirects (torchrun's -t; here -t is sbatch's time "
        "limit)"),
    define(Group.OUTPUT, "--local-ranks-filter", metavar="RANKS", env="PET_LOCAL_RANKS_FILTER",
        parse=parse_local_ranks, in_spec=True,
        help="local ranks whose output goes to the job log, as in 0,1 (default: all)"),
    define(Group.OUTPUT, "--job-log-ranks", metavar="RANKS", parse=parse_rank_ranges, in_spec=True,
        help="global ranks whose output goes to the job log, as in 0 or 0-3,8 (default: all)"),
    *(
        define(
            Group.OUTPUT, f"--duplicate-{stream}-filters", metavar="TEXTS",
            env=f"PET_DUPLICATE_{stream.upper()}_FILTERS", parse=parse_texts, in_spec=True,
            help=f"lines of a worker's {stream} in the job log with one of these texts go to filtered_{stream}.log "
            "beside its files, too, as in loss,nan (,, is a comma in a text)",
        )
        for stream in ("stdout", "stderr")
    ),
    define(Group.OUTPUT, "--log-max-size", metavar="SIZE", parse=parse_size, in_spec=True,
        help="rotate a worker's stdout.log and stderr.log at this size, as in 1G (default: never)"),
    define(Group.OUTPUT, "--log-max-files", metavar="N", parse=_PIECES, in_spec=True,
        help="with --log-max-size: number of files to keep of each log, the first and the latest ones (default 5)"),
    define(Group.WORKERS, "--shutdown-timeout", metavar="SECONDS", env="PET_SHUTDOWN_TIMEOUT", parse=parse_seconds,
        in_spec=True,
        help="seconds from SIGTERM to SIGKILL when workers are stopped (default 30)"),
    define(Group.WORKERS, "--monitor-interval", metavar="SECONDS", env="PET_MONITOR_INTERVAL",
        parse=parse_positive_seconds, in_spec=True,
        help="poll interval; only a fallback, since workers are watched by events (default 30)"),
    define(Group.NETWORK, "--rdzv-conf", metavar="KEY=VALUE,...", env="PET_RDZV_CONF", parse=parse_rdzv_conf,
        in_spec=True,
        help="rendezvous settings: timeout, last_call_timeout, heartbeat_interval, heartbeat_ttl, poll_interval, "
        "doorbell, grow_patience"),
    define(Group.NETWORK, "--master-addr", metavar="ADDRESS", env="PET_MASTER_ADDR", in_spec=True,
        help="MASTER_ADDR of the workers (default: an address that another node has reached)"),
    define(Group.NETWORK, "--master-port", metavar="PORT", env="PET_MASTER_PORT", parse=whole(least=0, most=65535),
        in_spec=True,
        help="MASTER_PORT of the workers (default: a free port)"),
    define(Group.WORKERS, "--virtual-local-rank", env="PET_VIRTUAL_LOCAL_RANK",
        help="give each worker LOCAL_RANK=0 and its own GPU alone in CUDA_VISIBLE_DEVICES, as torchrun does"),
    define(Group.WORKERS, "--wandb",
        help="give each rank a W&B run that goes on through restarts and requeues: WANDB_RUN_ID and WANDB_RESUME, "
        "where you have not set them"),
    define(Group.RECOVERY, "--signals-to-handle", metavar="NAME,...", env="PET_SIGNALS_TO_HANDLE",
        parse=parse_handled_signals, in_spec=True,
        help="signals that announce the job's end, as in SIGTERM,SIGUSR1, and are passed on to the workers, as by "
        "torchrun; SIGTERM, SIGINT and SIGHUP end a run and SIGUSR2 announces its end in any case"),
    define(Group.WORKERS, "--numa-binding", metavar="node|socket|exclusive|core-complex", parse=one_of(NumaBinding),
        in_spec=True,
        help="bind each worker to CPUs near the GPU of its local rank: those of its NUMA node, of its socket, an own "
        "part of the node, or cores that share a cache; without GPUs by local rank (default: all CPUs of the job)"),
    define(Group.WORKERS, "--start-method", metavar="spawn|forkserver", env="PET_START_METHOD",
        parse=parse_start_method, in_spec=True,
        help="spawn (the default): each worker is a fresh interpreter; forkserver: on each node one process imports "
        "the modules of --preload, and each worker is a fork of it, so that a restart imports nothing"),
    define(Group.WORKERS, "--preload", metavar="MODULES|auto", parse=parse_modules, in_spec=True,
        help="with --start-method forkserver: the modules, as in auto,mylib.models; auto (the default) is torch and "
        "what workers are seen to import of it, and of the installed libraries that the script imports first"),
    define(Group.HOOKS, "--setup", metavar="FILE|COMMAND", parse=parse_setup, in_spec=True, file_or_command=True,
        executes=True,
        help="shell file or commands that make the workers' environment, as in 'module load cuda; conda activate "
        "mine': sourced by bash once on each node, before the workers start (default: none)"),
    define(Group.HOOKS, "--setup-timeout", metavar="SECONDS", parse=parse_positive_seconds, in_spec=True,
        help="time limit of --setup (default 300)"),
    define(Group.HOOKS, "--worker-prefix", metavar="'WORDS'", parse=command_like("numactl --interleave=all"),
        in_spec=True, executes=True,
        help="what stands before each worker's command, as in 'numactl --interleave=all' or 'nsys profile' (default: "
        "nothing)"),
    define(Group.HOOKS, "--after", metavar="COMMAND", in_spec=True, executes=True,
        help="shell command that runs once on the batch host when the run has ended and is not requeued; the result "
        "is in HPC_ELASTIC_OUTCOME, HPC_ELASTIC_EXIT_CODE and others"),
    define(Group.HOOKS, "--hook-timeout", metavar="SECONDS", parse=parse_positive_seconds, in_spec=True,
        help="time limit of --after (default 600)"),
    define(Group.HOOKS, "--notify", metavar="COMMAND|URL", parse=parse_notify, in_spec=True, executes=True,
        help="shell command that gets JSON as its input, or URL that it is posted to, at an attempt's first failure, "
        "at hangs, requeues and the end; 10 seconds at most"),
)  # fmt: skip

_MEETING = "nodes find each other through files in the run directory"
_NODE_RANK = "Slurm says which node is which"
UNNEEDED = tuple(
    Option(names=(name,), dest="", metavar=metavar, help=why)
    for name, metavar, why in (
        ("--rdzv-backend", "NAME", _MEETING),
        ("--rdzv-endpoint", "ADDRESS", _MEETING),
        ("--standalone", None, _MEETING),
        ("--local-addr", "ADDRESS", "the address of each node is detected"),
        ("--node-rank", "N", _NODE_RANK),
        ("--machine-rank", "N", _NODE_RANK),
        ("--multi-gpu", None, "each worker gets its rank"),
        ("--run-path", None, "a script always runs as __main__"),
        ("--logs-specs", "NAME", "each worker has its own files in the run directory"),
        ("--event-log-handler", "NAME", "events are in the run directory"),
        ("--log-line-prefix-template", "TEXT", "lines begin with [host:rank]"),
    )
)
"""Options of torchrun and accelerate that mean nothing here, each with the reason as its help."""
REFUSED: Mapping[str, str] = {
    "--mixed-precision": "not a launcher's option: set it in the script, as in Accelerator(mixed_precision='bf16')",
}
REMOVED: Mapping[str, str] = {
    "--het": NO_HET_JOBS,
    "--overlap": "give each run nodes of its own with -N or -w; a run in an interactive step needs no option",
    "--run-path": "a script always runs as __main__; leave it out",
    "--restart-steps": "use --restart-window SECONDS",
    "--prewarm": "leave it out; --start-method forkserver imports torch while the nodes meet",
    "--node-prolog": "--setup runs shell on each node before the workers start",
    "--node-epilog": "--srun-arg=--task-epilog=PROGRAM runs on each node after its agent, --after after the run",
}
"""Options of earlier versions → what to use in their place."""


def removal(name: str) -> str | None:
    instead = REMOVED.get(f"--{name.lower().replace('_', '-')}")
    return None if instead is None else f"was removed: {instead}"


def entrypoint(parsed: Parsed, *, cwd: Path, interpreter: str) -> Entrypoint:
    """The command of every worker; a script's relative path is relative to `cwd`, `interpreter` runs it by default."""
    if not parsed.command:
        raise UsageError("no script was given; write it after the options, as in --nodes 4 train.py --lr 0.1")
    target, args = parsed.command[0], parsed.command[1:]
    module, command = parsed.flag("module"), parsed.flag("no_python")
    if module and command:
        raise UsageError("--module and --no-python can't both be: a module is run by Python")
    if not target:
        raise UsageError("the script's name is empty")
    kind = EntryKind.MODULE if module else EntryKind.COMMAND if command else EntryKind.SCRIPT
    in_container = parsed.get("container_image") is not None
    # An absolute path that is not here may be the image's own.
    is_images_own = in_container and os.path.isabs(target) and not os.path.exists(target)
    if kind is EntryKind.SCRIPT and not is_images_own:
        _check_script(target, cwd)
        if in_container:
            target = str(cwd / target)  # whatever the working directory is inside
    elif kind is EntryKind.COMMAND and "/" in target and not is_images_own:
        path = cwd / target
        if not path.exists():
            raise UsageError(f"the command {target} does not exist in {cwd}")
        if path.is_dir() or not os.access(path, os.X_OK):
            raise UsageError(f"the command {target} is not executable; run: chmod +x {target}")
    python = parsed.get("python") or ("python3" if in_container else interpreter)
    return Entrypoint(kind=kind, target=target, args=tuple(args), python=python)


def _check_script(target: str, cwd: Path) -> None:
    path = cwd / target
    if _LAUNCHER.fullmatch(path.name) and ("/" in target or not path.exists()):
        raise UsageError(
            f"leave {target} out: hpc-elastic starts the workers itself, as in hpc-elastic submit --nodes 2 train.py"
        )
    if path.is_dir():
        raise UsageError(f"{target} is a folder, not a script; for a module use --module")
    try:
        with open(path, "rb") as file:
            start = file.read(4096)
    except FileNotFoundError:
        hint = "; a module is run with --module, a command with --no-python" if "/" not in target else ""
        raise UsageError(f"the script {target} does not exist in {cwd}{hint}") from None
    except OSError as error:
        raise UsageError(f"the script {target} can't be read: {error.strerror}") from None
    # A .py may begin with the shell's lines that look for a Python, and be Python all the same.
    if path.suffix != ".py" and _SHELL.match(start):
        way_out = "give the Python script that it starts"
        if b"\n#SBATCH" in start:
            way_out = f"hpc-elastic convert {target} prints the command that does the same"
        raise UsageError(
            f"{target} is a shell script, and a script is run by Python; {way_out}, or have it run as it is with "
            "--no-python"
        )
