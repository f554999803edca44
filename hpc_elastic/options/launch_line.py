"""The command of an sbatch file that starts workers, taken apart: srun, containers, shells and launchers. Pure.

A word is raw: with the quotes and variables that it has in the file.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence

from msgspec import Struct, field

from hpc_elastic.options import job_options, worker_options
from hpc_elastic.options.sbatch import NO_HET_JOBS, split_option
from hpc_elastic.options.shell_text import (
    ASSIGNMENT,
    COUNTS,
    MEETING,
    PRINTS,
    SHELL,
    Variables,
    assignments,
    expanded_names,
    inner_text,
    parse_script,
    plain,
)
from hpc_elastic.options.table import Option

MEET = "nodes meet through files in the run directory, and workers get MASTER_ADDR and MASTER_PORT"
ENVIRONMENT = (
    "module", "ml", "source", ".", "conda", "mamba", "micromamba", "spack", "export", "unset", "eval", "alias",
)  # fmt: skip
_NO_VALUE_OF_SRUN = (
    "--label", "-l", "--unbuffered", "-u", "--kill-on-bad-exit", "-K", "--exclusive", "--overlap", "--verbose", "-v",
    "-vv", "-vvv", "--quiet", "-Q", "--overcommit", "-O", "--no-kill", "-k", "--disable-status", "-X", "--exact",
    "--preserve-env", "-E", "--pty", "--multi-prog", "--oversubscribe", "-s", "--whole", "--container-writable",
    "--container-readonly", "--container-mount-home", "--container-remap-root",
)  # fmt: skip
_STEP_OWN = (
    *_NO_VALUE_OF_SRUN,
    "-w", "--nodelist", "-W", "--wait", "-o", "--output", "-e", "--error", "--jobid", "-c", "--cpus-per-task", "--gres",
    "--gpus-per-node", "-J", "--job-name", "-p", "--partition", "-G", "--gpus", "--mem", "-t", "--time", "-A",
    "--account", "-r", "--relative", "-D", "--chdir", "-q", "--qos", "-i", "--input", "-C", "--constraint",
)  # fmt: skip
"""Options of srun that the agents' step has from the job, or must not have."""
_UNNEEDED: Mapping[str, Option] = {name: option for option in worker_options.UNNEEDED for name in option.names}
_COUNTS = {
    "--nproc-per-node": "nproc", "--num-gpus": "nproc", "--nnodes": "nodes", "--num-nodes": "nodes",
    "--num-machines": "nodes", "--num-processes": "total", "-np": "total",
}  # fmt: skip
_VALUES_OF_MEETING = (
    "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--master-addr", "--master-port", "--node-rank", "--local-addr",
    "--machine-rank", "--main-process-ip", "--main-process-port", "--hostfile", "-H", "--launcher", "--gpu-ids",
    "--launcher-args",
)  # fmt: skip
_FLAGS_OF_MEETING = (
    "--standalone", "--use-env", "--no-local-rank", "--same-network", "--multi-gpu", "--no-ssh", "--force-multi",
    "--no-ssh-check",
)  # fmt: skip
_EXPORTED = {
    "--mixed-precision": "ACCELERATE_MIXED_PRECISION", "--num-cpu-threads-per-process": "OMP_NUM_THREADS",
    "--gradient-accumulation-steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
}  # fmt: skip
"""Options by which accelerate sets a variable for the script."""
_MODULES = {
    "torch.distributed.run": "torchrun", "torch.distributed.launch": "torch.distributed.launch",
    "torch.distributed.elastic": "torchrun", "accelerate.commands.launch": "accelerate",
    "deepspeed.launcher.runner": "deepspeed",
}  # fmt: skip
_MPI = ("mpirun", "mpiexec", "horovodrun", "orterun")
_PREFIXES = ("numactl", "taskset", "nice", "ionice", "stdbuf", "chrt", "catchsegv")
_RUNNERS = ("uv", "conda", "mamba", "micromamba", "poetry", "pixi", "pipenv", "pdm", "hatch", "rye")
"""``uv run`` and the like start a program in the environment that they keep."""
_STARTS = r"\b(?:torchrun|accelerate|deepspeed|python[\d.]*)\b"


class _ContainerCommand(Struct, frozen=True, kw_only=True):
    verbs: tuple[str, ...] = ()
    """The subcommands that run one program in an image; none: there are no subcommands."""
    mounts: tuple[str, ...]
    workdir: tuple[str, ...]
    values: tuple[str, ...]


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
_FLAGS_GIVEN_ANYWAY = ("--nv", "--rocm", "--rm", "-it", "-ti", "-i", "-t", "--interactive", "--tty")
_VALUES_GIVEN_ANYWAY = ("--network", "--net", "--ipc", "--pid", "--gpus")
_OF_WORKERS: Mapping[str, Option] = {name: option for option in worker_options.OPTIONS for name in option.names} | {
    name: option for option in job_options.OPTIONS if option.dest == "runs_dir" for name in option.names
}
PER_WORKER = {"SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", *MEETING}


class LaunchLine(Struct):
    options: list[tuple[str, str]] = field(default_factory=list)
    """Name and raw value; an empty value: a flag."""
    program: list[str] = field(default_factory=list)
    is_module: bool = False
    script: list[str] = field(default_factory=list)
    """Empty: what is started can't be seen."""
    preamble: list[str] = field(default_factory=list)
    exports: list[str] = field(default_factory=list)
    counts: dict[str, str] = field(default_factory=dict)
    """Raw, by what they count: nodes, nproc (a node's workers), total, and srun's own options."""
    is_per_task: bool = False
    is_single: bool = False
    """One process, which neither srun nor a launcher started."""
    chdir: str = ""
    hostfile: str = ""
    notes: list[str] = field(default_factory=list)
    open: list[str] = field(default_factory=list)


def find_launch(words: Sequence[str], variables: Variables) -> LaunchLine | None:
    reader = _LaunchReader(variables)
    return reader.launch if reader.read(list(words)) else None


class _LaunchReader:
    def __init__(self, variables: Variables) -> None:
        self.launch = LaunchLine()
        self._variables = variables
        self._in_step = False
        self._in_container = False

    def read(self, rest: list[str]) -> bool:
        launch = self.launch
        while rest := self._variables.spread(rest):
            program = plain(rest[0]).rpartition("/")[2]
            if assigned := ASSIGNMENT.fullmatch(rest[0]):
                self._export(assigned[1], assigned[2])
                rest.pop(0)
            elif program in ("time", "exec", "nohup", "command", "env", "!"):
                rest.pop(0)
            elif program in ("srun", *_MPI):
                self._in_step = launch.is_per_task = True
                rest = self._mpi_options(rest[1:]) if program in _MPI else self._srun_options(rest[1:])
            elif program in _CONTAINER_COMMANDS:
                self._in_container = True
                if not self._enter_container(rest):
                    return False
            elif program in ("ssh", "pdsh", "clush"):
                launch.notes.append(f"{program}: one agent is started on each node")
                at = next((at for at, word in enumerate(rest) if at and re.search(_STARTS, word)), len(rest))
                rest = rest[at:] if len(rest) - at > 1 else ["bash", "-c", *rest[at:]]
            elif program in ("bash", "sh", "zsh", "dash"):
                return self._shell(rest)
            elif program in ("torchrun", "deepspeed") or (program == "accelerate" and rest[1:2] == ["launch"]):
                return self._launcher(program, rest[2 if program == "accelerate" else 1 :])
            elif re.fullmatch(r"python[\d.]*", program):
                return self._python(rest)
            elif program in (*PRINTS, *SHELL, "pip", "pip3", "pkill", "export") or not self._prefix(program, rest):
                return self._in_step and program not in (*PRINTS, *SHELL) and self._unseen(program)
        return self._in_step and bool(launch.open)

    def _unseen(self, program: str) -> bool:
        self.launch.open.append(f"what {program} starts can't be seen here: write its Python script in place of SCRIPT")
        return True

    def _export(self, name: str, value: str) -> None:
        if name in MEETING:
            self.launch.notes.append(f"workers have a {name} of their own")
        elif expanded_names(value) & PER_WORKER:
            self.launch.preamble.append(f"export {name}={value}")
        else:
            self.launch.exports.append(f"export {name}={value}")

    def _prefix(self, program: str, rest: list[str]) -> bool:
        known = ["srun", *_MPI, *_CONTAINER_COMMANDS, "torchrun", "accelerate", "deepspeed"]
        is_runner = program in _RUNNERS and "run" in map(plain, rest[1:3])
        known += ["python", "python3"] if self._in_step or is_runner or program in _PREFIXES else []
        at = next((at for at, word in enumerate(rest) if at and plain(word).rpartition("/")[2] in known), 0)
        if not at:
            return False
        before, rest[:] = " ".join(rest[:at]), rest[at:]
        if plain(rest[0]) in ("srun", *_MPI):
            self.launch.open.append(f"{before}: left out, it stood before {rest[0]}")
            return True
        if is_runner:
            self.launch.program = [f"\"$({before} python -c 'import sys; print(sys.executable)')\""]
            self.launch.notes.append(f"--python: the interpreter of {before}, asked for where you submit")
            return True
        self.launch.options.append(("--worker-prefix", shlex.quote(before)))
        if program not in _PREFIXES:
            self.launch.open.append(f"{before}: it stands before each worker now, by --worker-prefix")
        return True

    def _srun_options(self, rest: list[str]) -> list[str]:
        launch = self.launch
        while rest and rest[0].startswith("-"):
            word = rest.pop(0)
            name, equals, value = (word, "", "") if word in _NO_VALUE_OF_SRUN else split_option(word)
            if not equals and name not in _NO_VALUE_OF_SRUN and not name.startswith("--no-") and rest:
                value = rest.pop(0) if not rest[0].startswith("-") else ""
            if name in COUNTS:
                launch.counts[COUNTS[name]] = value
            elif name == "--multi-prog":
                launch.open.append("srun --multi-prog: only one program can be started on all nodes")
            elif name == "--export":
                for part in plain(value).split(","):
                    if match := ASSIGNMENT.fullmatch(part):
                        self._export(match[1], shlex.quote(match[2]) if value != match[2] else value)
            elif name not in _STEP_OWN or name.startswith("--container"):
                launch.options.append(option_of_pyxis(name, value) or ("--srun-arg", joined(name, value)))
        if ":" in rest:
            launch.open.append(NO_HET_JOBS)
            del rest[rest.index(":") :]
        return rest

    def _mpi_options(self, rest: list[str]) -> list[str]:
        while rest and rest[0].startswith("-"):
            name = rest.pop(0)
            has_value = rest and not rest[0].startswith("-") and not re.search(r"python|\$|\.py\b", rest[0])
            value = rest.pop(0) if name in ("-np", "-n") or has_value else ""
            if name in ("-np", "-n"):
                self.launch.counts["total"] = value
        self.launch.open.append("MPI has no part in it: the script gets its rank from RANK, LOCAL_RANK and WORLD_SIZE")
        return rest

    def _enter_container(self, rest: list[str]) -> bool:
        launch = self.launch
        program = plain(rest.pop(0)).rpartition("/")[2]
        known = _CONTAINER_COMMANDS[program]
        verb = plain(rest.pop(0)) if known.verbs and rest else ""
        if known.verbs and verb not in known.verbs:
            return self._in_step and self._unseen(f"{program} {verb}")
        if known.verbs and known.verbs.index(verb):
            why = "it is left out; what it sets goes into --container-env, or into the script"
            launch.open.append(f"{program} {verb} has the image's runscript start the command: {why}")
        mounts, args, dropped = [], [], []
        while rest and rest[0].startswith("-") and rest[0] != "--":
            name, equals, value = rest.pop(0).partition("=")
            if name in (*known.mounts, *known.workdir, *known.values, *_VALUES_GIVEN_ANYWAY) and not equals and rest:
                value = rest.pop(0)
            if name in known.mounts:
                mounts += plain(value).split(",")
            elif name in known.workdir:
                launch.options.append(("--container-workdir", value))
            elif name in (*_FLAGS_GIVEN_ANYWAY, *_VALUES_GIVEN_ANYWAY):
                dropped.append(name)
            else:
                args += [name if not value else f"{name}={value}" if name.startswith("--") else f"{name} {value}"]
        if rest:
            image = f"{'charliecloud' if program == 'ch-run' else program}:{rest.pop(0)}"
            launch.options.append(("--container-image", image))
        if rest[:1] == ["--"]:
            del rest[0]
        if mounts:
            launch.options.append(("--container-mounts", ",".join(mounts)))
        if args:
            launch.options.append(("--container-args", " ".join(args)))
        also = f"; {', '.join(dropped)}: not needed" if dropped else ""
        launch.notes.append(f"the workers run in the container, the agents outside{also}")
        return bool(rest) or self._unseen(f"the image of {program}")

    def _shell(self, rest: list[str]) -> bool:
        """``bash -c '…'``, or a shell file, which can't be seen here."""
        at = next((at for at, word in enumerate(rest) if re.fullmatch(r"-[a-z]*c", word)), 0)
        if not at or at + 1 >= len(rest):
            file = next((word for word in rest[1:] if not word.startswith("-")), rest[0])
            return self._in_step and self._unseen(file)
        word = rest[at + 1]
        text = inner_text(word)
        commands = parse_script(self._variables.inline(text) if word[:1] != "'" else text).commands
        has_start = False
        for command in commands:
            first = plain(command.words[0]) if command.words else ""
            if assigned := assignments(command):
                for name, value in assigned:
                    self._export(name, value) if first == "export" else self.launch.preamble.append(command.text)
            elif first == "cd":
                self.launch.chdir = command.words[1] if len(command.words) > 1 else ""
            elif first in (*ENVIRONMENT, "ulimit", "umask"):
                is_own = self._in_container or first not in ENVIRONMENT
                (self.launch.preamble if is_own else self.launch.exports).append(command.text)
            elif first in (*PRINTS, *SHELL):
                continue
            elif not has_start and self.read(list(command.words)):
                has_start = True
            else:
                self.launch.open.append(f"{command.text}: it ran in each task; do it in the script")
        return has_start or (self._in_step and self._unseen(rest[0]))

    def _python(self, rest: list[str]) -> bool:
        launch = self.launch
        interpreter = rest.pop(0)
        while rest and rest[0].startswith("-") and rest[0] not in ("-m", "-c"):
            del rest[: 2 if rest[0] in ("-X", "-W") else 1]
        if "/" in interpreter or "$" in interpreter:
            launch.program = [interpreter]
        if rest[:1] == ["-m"] and (launcher := _MODULES.get(plain("".join(rest[1:2])))):
            return self._launcher(launcher, rest[2:])
        if not rest or rest[0] == "-c":
            return False
        launch.is_single = not self._in_step
        if launch.is_per_task:
            launch.notes.append("the workers of a node are started by its agent; they find RANK and LOCAL_RANK")
        if rest[0] == "-m":
            launch.is_module = True
            rest.pop(0)
        launch.script = self._variables.spread(rest)
        return True

    def _launcher(self, launcher: str, rest: list[str]) -> bool:
        launch = self.launch
        launch.is_per_task = False
        meeting: list[str] = []
        passes_rank = launcher in ("torch.distributed.launch", "deepspeed")
        while (rest := self._variables.spread(rest)) and rest[0].startswith("-"):
            name, equals, value = rest.pop(0).partition("=")
            name = name.replace("_", "-") if name.startswith("--") else {"-t": "--tee"}.get(name, name)
            option = _UNNEEDED.get(name) or _OF_WORKERS.get(name)
            takes_value = name not in _FLAGS_OF_MEETING and rest and not re.match(r"-|.*\.py\b", plain(rest[0]))
            if name in (*_VALUES_OF_MEETING, *_COUNTS, *_EXPORTED):
                takes_value = True
            elif option is not None:
                takes_value = option.metavar is not None
            if takes_value and not equals and rest:
                value = rest.pop(0)
            passes_rank = passes_rank and name not in ("--use-env", "--no-local-rank")
            if name in ("--hostfile", "-H"):
                launch.hostfile = plain(value)
            if name in (*_VALUES_OF_MEETING, *_FLAGS_OF_MEETING):
                meeting += [name] if name not in ("--use-env", "--no-local-rank") else []
            else:
                self._worker_option(name, value, option)
        if meeting:
            launch.notes.append(f"{', '.join(meeting)}: not needed, {MEET}")
        launch.script = rest
        if not rest:
            self._unseen(launcher)
        elif passes_rank:
            name = "--local-rank" if launcher != "deepspeed" else "--local_rank"
            launch.script.insert(1, f"{name}=$LOCAL_RANK")
            launch.notes.append(f"{launcher} passes the local rank to the script, so the command does")
        return True

    def _worker_option(self, name: str, value: str, option: Option | None) -> None:
        launch = self.launch
        if name in _COUNTS:
            launch.counts[_COUNTS[name]] = value
        elif name in _UNNEEDED:
            launch.notes.append(f"{name}: not needed, {_UNNEEDED[name].help}")
        elif name in _EXPORTED:
            launch.exports.append(f"export {_EXPORTED[name]}={value}")
        elif option is None:
            why = "it is none of hpc-elastic's options; set it in the script"
            launch.open.append(f"{joined(name, value)}: {worker_options.REFUSED.get(name, why)}")
        elif option.dest == "module":
            launch.is_module = True
        elif option.dest == "rdzv_conf":
            kept = [part for part in value.split(",") if part.startswith(("timeout=", "last_call_timeout="))]
            launch.options += [("--rdzv-conf", ",".join(kept))] if kept else []
            launch.notes.append(f"of --rdzv-conf {value} timeouts are kept")
        else:
            launch.options.append((next(one for one in option.names if one.startswith("--")), value))


def joined(name: str, value: str) -> str:
    return f"{name}={value}" if value and name.startswith("--") else f"{name}{value}"


def option_of_pyxis(name: str, value: str) -> tuple[str, str] | None:
    if name == "--container-image":
        return name, f"pyxis:{value}"
    if name in ("--container-mounts", "--container-workdir", "--container-env"):
        return name, value
    return ("--container-args", joined(name, value)) if name.startswith(("--container", "--no-container")) else None
