"""The line of an sbatch file that starts workers, taken apart: srun, torchrun, accelerate launch, python. Pure.

A word is raw: with the quotes and variables that it has in the file.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence

from msgspec import Struct, field

from hpc_elastic.errors import UsageError
from hpc_elastic.options import job_options, worker_options
from hpc_elastic.options.sbatch import NO_HET_JOBS
from hpc_elastic.options.table import Option

ASSIGNMENT = re.compile(r"(?:export\s+)?([A-Za-z_]\w*)=(.*)", re.DOTALL)
OF_THE_JOB = re.compile(
    r"\$\{?(?:SLURM_\w+|SLURM[A-Z]\w+|RANK\b|LOCAL_RANK\b|WORLD_SIZE\b)|scontrol|\bhostname\b|/dev/tcp"
)
"""What only has a value in the job."""
PRINTS = ("echo", "printf", "date", "hostname", "env", "printenv", "nvidia-smi", "squeue", "scontrol", "pwd", "whoami")
_NO_VALUE_OF_SRUN = frozenset(
    ("--label", "-l", "--unbuffered", "-u", "--kill-on-bad-exit", "-K", "--exclusive", "--overlap", "--verbose", "-v")
)
_STEP_OWN = frozenset(
    (
        "-N", "--nodes", "-n", "--ntasks", "--ntasks-per-node", "-w", "--nodelist", "-l", "--label", "-u",
        "--unbuffered", "-K", "--kill-on-bad-exit", "-W", "--wait", "-o", "--output", "-e", "--error", "--jobid",
        "-v", "--verbose",
        "--export", "-c", "--cpus-per-task", "--gres", "--gpus-per-node", "--gpus-per-task", "--exclusive",
        "--overlap", "-J", "--job-name", "-p", "--partition", "-G", "--gpus", "--mem", "-t", "--time",
    )
)  # fmt: skip
"""Of srun's options what the agents' step has from the job, or must not have."""
_RENDEZVOUS = (
    "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--master-addr", "--master-port", "--node-rank", "--standalone",
    "--local-addr", "--machine-rank", "--main-process-ip", "--main-process-port",
)  # fmt: skip
_UNNEEDED: Mapping[str, Option] = {name: option for option in worker_options.UNNEEDED for name in option.names}
_IN_ACCELERATE = {"--num-machines": "--nnodes"}
_WRAPPERS = ("time", "exec", "nohup", "command")


class _ContainerCommand(Struct, frozen=True, kw_only=True):
    """What of a runtime's command line is taken over."""

    verbs: tuple[str, ...] = ()
    """The subcommands that run one program in an image; none: there are no subcommands."""
    mounts: tuple[str, ...]
    workdir: tuple[str, ...]
    values: tuple[str, ...]
    """Options that have a value, of which nothing else is known."""


_APPTAINER = _ContainerCommand(
    verbs=("exec", "run"),
    mounts=("--bind", "-B"),
    workdir=("--pwd", "--cwd"),
    values=("--env", "--env-file", "--overlay", "-o", "--home", "-H", "--workdir", "-W", "--scratch", "-S"),
)
_CONTAINER_COMMANDS: Mapping[str, _ContainerCommand] = {
    "apptainer": _APPTAINER,
    "singularity": _APPTAINER,
    "podman": _ContainerCommand(
        verbs=("run",),
        mounts=("--volume", "-v"),
        workdir=("--workdir", "-w"),
        values=("--env", "-e", "--env-file", "--device", "--security-opt", "--shm-size", "--user", "-u", "--ulimit"),
    ),
    "ch-run": _ContainerCommand(mounts=("--bind", "-b"), workdir=("--cd", "-c"), values=("--feature",)),
}
_FLAGS_GIVEN_ANYWAY = ("--nv", "--rm", "-it", "-ti", "-i", "-t", "--interactive", "--tty")
_VALUES_GIVEN_ANYWAY = ("--network", "--net", "--ipc", "--pid", "--gpus")
_OF_WORKERS: Mapping[str, Option] = {name: option for option in worker_options.OPTIONS for name in option.names} | {
    name: option for option in job_options.OPTIONS if option.dest in ("nodes", "runs_dir") for name in option.names
}


def plain(word: str) -> str:
    """A raw word without its quotes, where nothing in it is the shell's; else as it is."""
    if any(char in word for char in "$`"):
        return word
    try:
        (value,) = shlex.split(word)
        return value
    except ValueError:
        return word


class Launch(Struct):
    """The line that starts the workers, taken apart."""

    options: list[str] = field(default_factory=list)
    script: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    is_per_task: bool = False
    """``srun python train.py``: each task is a worker."""
    nnodes: str | None = None
    decide: list[str] = field(default_factory=list)
    """What the user has to see to."""
    rendezvous: list[str] = field(default_factory=list)
    """Options that are not needed."""


def find_launch(words: Sequence[str]) -> Launch | None:
    """The launch that a simple command is; None: it is none.

    Raises:
        UsageError: it is one that can't be taken over.
    """
    launch = Launch()
    rest = list(words)
    while rest and (plain(rest[0]) in _WRAPPERS or ASSIGNMENT.fullmatch(rest[0])):
        if ASSIGNMENT.fullmatch(rest[0]):
            return None if len(rest) == 1 else _with_variable(rest)
        rest.pop(0)
    in_srun = bool(rest) and plain(rest[0]) == "srun"
    if in_srun:
        if ":" in rest:
            raise UsageError(f"{' '.join(words)[:70]}: {NO_HET_JOBS}")
        rest.pop(0)
        _drop_srun_options(rest, launch)
    if not rest:
        return None
    program = plain(rest[0]).rpartition("/")[2]
    if program in _CONTAINER_COMMANDS:
        _enter_container(rest, launch)
        program = plain(rest[0]).rpartition("/")[2]
    if program == "torchrun":
        return _torchrun(rest[1:], launch)
    if program == "accelerate" and rest[1:2] == ["launch"]:
        return _torchrun(rest[2:], launch, accelerate=True)
    if re.fullmatch(r"python[\d.]*", program):
        return _python(rest, launch, in_srun=in_srun)
    if in_srun and program in PRINTS:
        return None
    if in_srun or program in ("deepspeed", "mpirun", "mpiexec", "horovodrun"):
        raise UsageError(
            f"{' '.join(words)[:70]}: what {program} starts is not seen from here; give the Python script that it "
            "starts in the end to hpc-elastic submit, or the program itself with --no-python"
        )
    return None


def _with_variable(words: Sequence[str]) -> Launch | None:
    launch = find_launch(words[1:])
    if launch is not None:
        raise UsageError(f"{words[0]} before the command: write export {words[0]} in a line of its own above it")
    return None


def _drop_srun_options(rest: list[str], launch: Launch) -> None:
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if not word.startswith("--") and len(word) > 2:
            name, equals, value = word[:2], "=", word[2:]
        if not equals and name not in _NO_VALUE_OF_SRUN and rest and not rest[0].startswith("-"):
            value = rest.pop(0)
        if name == "--container-image":
            launch.options += [name, f"pyxis:{value}"]
            launch.notes.append(f"{name} pyxis:{value}: srun starts agents and workers in the container")
        elif name in ("--container-mounts", "--container-workdir", "--container-env"):
            launch.options += [name, value]
        elif name.startswith(("--container", "--no-container")):
            launch.options.append(f"--container-args={name}={value}" if value else f"--container-args={name}")
        elif name not in _STEP_OWN:
            argument = f"{name}={value}" if value and name.startswith("--") else f"{name}{value}"
            launch.options.append(f"--srun-arg={argument}")
            launch.notes.append(f"--srun-arg={argument}")


def _enter_container(rest: list[str], launch: Launch) -> None:
    """Take a runtime's command line off `rest`, as ``--container-*``; what has none of these is the runtime's own.

    Raises:
        UsageError: it is no command that starts one program in an image.
    """
    line = " ".join(rest)[:70]
    program = plain(rest.pop(0)).rpartition("/")[2]
    known = _CONTAINER_COMMANDS[program]
    verb = plain(rest.pop(0)) if known.verbs and rest else ""
    if known.verbs and verb not in known.verbs:
        raise UsageError(f"{line}: of {program} only {program} {known.verbs[0]} IMAGE COMMAND can be taken over")
    if known.verbs.index(verb) if verb else 0:
        launch.decide.append(
            f"{program} {verb} has the image's runscript start the command: it is left out; what it sets goes into "
            "--container-env, or into the script"
        )
    mounts, args, dropped = [], [], []
    while rest and rest[0].startswith("-") and rest[0] != "--":
        name, equals, value = rest.pop(0).partition("=")
        if name in (*known.mounts, *known.workdir, *known.values, *_VALUES_GIVEN_ANYWAY) and not equals and rest:
            value = rest.pop(0)
        if name in known.mounts:
            mounts += plain(value).split(",")
        elif name in known.workdir:
            launch.options += ["--container-workdir", value]
        elif name in (*_FLAGS_GIVEN_ANYWAY, *_VALUES_GIVEN_ANYWAY):
            dropped.append(name)
        else:
            args += [name if not value else f"{name}={value}" if name.startswith("--") else f"{name} {value}"]
    if rest[1:2] == ["--"]:
        del rest[1]
    if len(rest) < 2:
        raise UsageError(f"{line}: give the image and the command that {program} runs in it")
    launch.options += ["--container-image", f"{'charliecloud' if program == 'ch-run' else program}:{rest.pop(0)}"]
    if mounts:
        launch.options += ["--container-mounts", ",".join(mounts)]
    if args:
        launch.options.append(f"--container-args={shlex.quote(' '.join(args))}")
    also = f"; {', '.join(dropped)}: not needed" if dropped else ""
    launch.notes.append(f"the workers run in the container, the agents outside{also}")


def _python(rest: Sequence[str], launch: Launch, *, in_srun: bool) -> Launch | None:
    """``python -m torch.distributed.run …``, or the script that srun starts in each task."""
    interpreter = plain(rest[0])
    words = list(rest[1:])
    while words and words[0] in ("-u", "-O", "-B"):
        words.pop(0)
    if "/" in interpreter:
        launch.options += ["--python", rest[0]]
    if words[:1] == ["-m"] and words[1:2] in (["torch.distributed.run"], ["torch.distributed.launch"]):
        return _torchrun(words[2:], launch)
    if words[:2] == ["-m", "accelerate.commands.launch"]:
        return _torchrun(words[2:], launch, accelerate=True)
    if not in_srun:
        return None
    launch.is_per_task = True
    launch.notes.append("the workers of a node are started by its agent; they find RANK, LOCAL_RANK and WORLD_SIZE")
    if words[:1] == ["-m"]:
        launch.options.append("--module")
        words.pop(0)
    launch.script = words
    return launch if words else None


def _torchrun(words: Sequence[str], launch: Launch, *, accelerate: bool = False) -> Launch:
    rest = list(words)
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        name = name.replace("_", "-") if name.startswith("--") else name
        name = {"-t": "--tee", **(_IN_ACCELERATE if accelerate else {})}.get(name, name)
        option = _UNNEEDED.get(name) or _OF_WORKERS.get(name)
        takes_value = option.metavar is not None if option is not None else name in (*_RENDEZVOUS, "--num-processes")
        if takes_value and not equals and rest:
            value = rest.pop(0)
        _worker_option(name, value, option, launch)
    if not rest:
        raise UsageError("the line that starts workers names no script")
    launch.script = rest
    return launch


def _worker_option(name: str, value: str, option: Option | None, launch: Launch) -> None:
    if name in _RENDEZVOUS:
        launch.rendezvous.append(name)
    elif name in _UNNEEDED:
        launch.notes.append(f"{name}: not needed, {_UNNEEDED[name].help}")
    elif option is not None and option.dest == "nodes":
        launch.nnodes = value
    elif option is not None and option.dest == "nproc_per_node" and OF_THE_JOB.search(value):
        launch.notes.append("--nproc-per-node: by default one worker for each GPU that Slurm gives the node")
    elif option is not None and option.dest == "rdzv_conf":
        kept = [part for part in value.split(",") if part.startswith(("timeout=", "last_call_timeout="))]
        if kept:
            launch.options += ["--rdzv-conf", ",".join(kept)]
        launch.notes.append(f"of --rdzv-conf {value} timeouts are kept")
    elif option is not None:
        launch.options += [next(one for one in option.names if one.startswith("--")), *([value] if value else [])]
    elif name == "--num-processes":
        launch.notes.append(f"{name} {value}: by default one worker for each GPU that Slurm gives the node")
    else:
        why = worker_options.REFUSED.get(name, "it is none of hpc-elastic's options; set it in the script")
        raise UsageError(f"{name}: {why}; take it out of the line that starts the workers, and convert again")
