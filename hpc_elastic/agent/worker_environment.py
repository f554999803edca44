"""How a worker is started: torchrun's variables and ours, a container runtime's command line around its own, `Setup`.

Agents, supervisor and Slurm's programs stay on the host; a worker is the runtime's process. Its folders are mounted at
the paths that they have outside. Tried: charliecloud 0.31, podman 4.3; the others follow their manuals (apptainer 1.3,
enroot 3.5, pyxis 0.20). Pyxis starts containers through srun alone: there the agents are inside too.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from hpc_elastic.agent.part import HealthVerdict, Part
from hpc_elastic.agent.supervision import Phase
from hpc_elastic.base.files import make_private_dir, write_private
from hpc_elastic.base.loop import Inbox, wait_readable
from hpc_elastic.rendezvous.proposals import RankLayout
from hpc_elastic.run.agent_events import UserCommandEnded
from hpc_elastic.run.spec import Container, ContainerMount, RunSpec, Runtime
from hpc_elastic.slurm.job_environment import in_job
from hpc_elastic.worker_api.records import RESTART_REPORTS
from hpc_elastic.worker_api.records import VARIABLE as HEARTBEAT
from hpc_elastic.worker_api.torch_import import STORE_VARIABLE
from hpc_elastic.workers import user_command
from hpc_elastic.workers.spawn import NO_CHANGE, EnvironmentChange, WorkerStartError
from hpc_elastic.workers.stop import INSIDE_VARIABLE
from hpc_elastic.workers.tree import TAG_VARIABLE
from hpc_elastic.workers.user_command import CommandEnd, UserCommand

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

    from hpc_elastic.agent.node_agent import NodeAgent
    from hpc_elastic.agent.part import AgentSite

logger = logging.getLogger(__name__)

_MOST_LINES = 20


class WorkerSettings(Struct, frozen=True, kw_only=True):
    run_id: str
    role: str
    max_restarts: int
    virtual_local_rank: bool = False
    wandb: bool = False


class RoundFacts(Struct, frozen=True, kw_only=True):
    spec: RunSpec | WorkerSettings
    layout: RankLayout
    round: int
    master_addr: str
    master_port: int
    agent_store: bool
    """A TCPStore of ours serves at the master address; otherwise rank 0 opens it."""
    run_dir: str
    attempt: int
    tag: str


def worker_environment(
    base: Mapping[str, str], facts: RoundFacts, *, local_rank: int, error_file: str
) -> dict[str, str]:
    """`error_file` is written by ``@record``, torch's or ours: never the one that the agent itself was given."""
    layout, spec = facts.layout, facts.spec
    rank = layout.first_rank + local_rank
    env = dict(base)
    env.update(
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(layout.world_size),
            "LOCAL_WORLD_SIZE": str(layout.local_world_size),
            "GROUP_RANK": str(layout.group_rank),
            "GROUP_WORLD_SIZE": str(layout.group_world_size),
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": str(layout.world_size),
            "ROLE_NAME": spec.role,
            "MASTER_ADDR": facts.master_addr,
            "MASTER_PORT": str(facts.master_port),
            "TORCHELASTIC_RESTART_COUNT": str(facts.round),
            "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
            "TORCHELASTIC_RUN_ID": spec.run_id,
            "TORCHELASTIC_USE_AGENT_STORE": str(facts.agent_store),
            "TORCHELASTIC_ERROR_FILE": error_file,
            "HPC_ELASTIC_RUN_DIR": facts.run_dir,
            "HPC_ELASTIC_ATTEMPT": str(facts.attempt),
            TAG_VARIABLE: facts.tag,
            STORE_VARIABLE: f"{spec.run_id} {facts.master_addr} {facts.master_port}",
        }
    )
    if spec.virtual_local_rank:
        # As torchrun 2.13: through the devices that the agent sees, where these are limited.
        visible = [entry.strip() for entry in base.get("CUDA_VISIBLE_DEVICES", "").split(",") if entry.strip()]
        own = visible[local_rank : local_rank + 1] if visible else [str(local_rank)]
        env.update({"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": ",".join(own)})
    if spec.wandb:
        # Two processes can't write the same run: most scripts have rank 0 alone log.
        env.setdefault("WANDB_RUN_ID", spec.run_id if rank == 0 else f"{spec.run_id}-rank{rank}")
        env.setdefault("WANDB_RESUME", "allow")
    if in_job(base):
        _set_slurm_variables(env, layout, local_rank)
    # torchrun's default; torch's own, without it, is another.
    env.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    # A segmentation fault, and a SIGABRT from the agent, leave the Python stacks of all threads on stderr.
    env.setdefault("PYTHONFAULTHANDLER", "1")
    if layout.local_world_size > 1:
        env.setdefault("OMP_NUM_THREADS", "1")
    return env


def shared_environment(
    base: Mapping[str, str], *, spec: RunSpec, local_world_size: int, run_dir: str, attempt: int, tag: str
) -> tuple[dict[str, str], frozenset[str]]:
    """Returns the names of the variables that differ between workers or rounds, too."""
    environments = []
    for number in (1, 2):  # two workers that have nothing in common that workers need not have
        layout = RankLayout(
            group_rank=number,
            group_world_size=10 + number,
            first_rank=100 * number,
            local_world_size=local_world_size,
            world_size=1000 + number,
        )
        facts = RoundFacts(
            spec=spec,
            layout=layout,
            round=number,
            master_addr=f"10.0.0.{number}",
            master_port=number,
            agent_store=number == 1,
            run_dir=run_dir,
            attempt=attempt,
            tag=tag,
        )
        environments.append(worker_environment(base, facts, local_rank=number, error_file=str(number)))
    one, other = environments
    shared = {name: value for name, value in one.items() if other.get(name) == value}
    return shared, frozenset(one.keys() | other.keys()) - shared.keys()


# Of the step that started the agents: no task of it is a worker.
_AGENTS_OWN = ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_GTIDS")


def _set_slurm_variables(env: dict[str, str], layout: RankLayout, local_rank: int) -> None:
    """A library that asks Slurm for its rank (Lightning's SLURMEnvironment) would take all workers of a node for the
    same one. So the variables are those that srun would set had it started each worker as a task.
    """
    for name in _AGENTS_OWN:
        env.pop(name, None)
    env.update(
        {
            "SLURM_NTASKS": str(layout.world_size),
            "SLURM_NPROCS": str(layout.world_size),
            "SLURM_NNODES": str(layout.group_world_size),
            "SLURM_NTASKS_PER_NODE": str(layout.local_world_size),
            "SLURM_PROCID": str(layout.first_rank + local_rank),
            "SLURM_LOCALID": str(local_rank),
            "SLURM_NODEID": str(layout.group_rank),
        }
    )


_HOSTS_OWN = (
    *("LD_LIBRARY_PATH", "LD_PRELOAD", "LD_AUDIT", "PYTHONHOME", "PYTHONPATH", "PYTHONSTARTUP", "PYTHONUSERBASE"),
    *("VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV", "CONDA_EXE", "CONDA_PYTHON_EXE", "CONDA_SHLVL"),
)
"""They name the host's libraries and packages, which an image has not, or others."""
_IMAGES_OWN = ("PATH", "HOME", "HOSTNAME", "SHELL", "TMPDIR", "XDG_RUNTIME_DIR", "_", "OLDPWD", "PWD")
"""Variables that the image sets, where the runtime passes nothing on by itself."""
_NVIDIA = {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "compute,utility"}
_SHARED: Mapping[Runtime, tuple[str, ...]] = {
    Runtime.CHARLIECLOUD: ("/dev", "/proc", "/sys", "/tmp"),
    Runtime.APPTAINER: ("/dev", "/proc", "/sys", "/tmp"),
    Runtime.SINGULARITY: ("/dev", "/proc", "/sys", "/tmp"),
    Runtime.PODMAN: ("/dev/shm", "/proc", "/sys"),
    Runtime.ENROOT: ("/dev", "/proc", "/sys", "/tmp"),
    Runtime.PYXIS: ("/dev", "/proc", "/sys"),
}
"""Host folders that a container sees without being asked."""


class _Start(Struct, frozen=True, kw_only=True):
    container: Container
    mounts: tuple[ContainerMount, ...]
    argv: tuple[str, ...]
    env: Mapping[str, str]
    workdir: str
    has_nvidia: bool
    mark: str
    """``NAME=VALUE`` of what the script has in its environment, and the runtime itself has not."""


def enter_container(
    container: Container, argv: Sequence[str], env: Mapping[str, str], *, local_rank: int, cwd: str, has_nvidia: bool
) -> tuple[list[str], dict[str, str]]:
    if (image := container.image).image.startswith("."):
        container = replace(container, image=replace(image, image=os.path.join(cwd, image.image)))
    kept = {key: value for key, value in env.items() if key not in _HOSTS_OWN or key in container.env}
    start = _Start(
        container=container,
        mounts=(*needed_mounts(container, env=env, cwd=cwd), *container.mounts),
        argv=tuple(argv),
        env=kept,
        workdir=container.workdir or cwd,
        has_nvidia=has_nvidia,
        mark=f"{INSIDE_VARIABLE}={local_rank}",
    )
    runtime = container.image.runtime
    if runtime is Runtime.CHARLIECLOUD:
        # ch-run 0.31 refuses to start without USER, which a batch job may lack, and mounts TMPDIR in place of /tmp.
        kept = {"USER": str(os.getuid()), **{key: value for key, value in kept.items() if key != "TMPDIR"}}
    if runtime in (Runtime.APPTAINER, Runtime.SINGULARITY):
        # Not --env, which takes a value with a comma for several (CUDA_VISIBLE_DEVICES=0,1).
        prefix = f"{runtime.program.upper()}ENV_"
        kept |= {f"{prefix}{name}": kept[name] for name in container.env if name in kept}
    return _COMMANDS[runtime](start), kept


def exit_of_script(container: Container | None, exitcode: int) -> int:
    """podman reports a signal as a shell does, as 128 and its number (podman 4.3). charliecloud and enroot become the
    script, and apptainer 1.3 sends itself the signal that ended it."""
    is_podmans = container is not None and container.image.runtime is Runtime.PODMAN
    return 128 - exitcode if is_podmans and 128 < exitcode <= 128 + signal.SIGRTMAX else exitcode


def needed_mounts(container: Container, *, env: Mapping[str, str], cwd: str) -> list[ContainerMount]:
    """Folders of the host that a worker needs and its container would not have: each once, at its own path."""
    files = (env.get("TORCHELASTIC_ERROR_FILE", ""), env.get(HEARTBEAT, ""), env.get(RESTART_REPORTS, ""))
    folders = {cwd, env.get("HPC_ELASTIC_RUN_DIR", ""), *(os.path.dirname(file) for file in files)}
    given = [*_SHARED[container.image.runtime], *(mount.target for mount in container.mounts)]
    found: list[str] = []
    for folder in sorted(folders - {""}):
        if not any(_is_below(folder, other) for other in (*given, *found)):
            found.append(folder)
    return [ContainerMount(source=folder, target=folder) for folder in found]


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _charliecloud(start: _Start) -> list[str]:
    container, image = start.container, start.container.image.image
    from_image = [f"--set-env={image}/ch/environment"] if os.path.isfile(f"{image}/ch/environment") else []
    names = [name for name in container.env if name in start.env]
    seen = (*_SHARED[Runtime.CHARLIECLOUD], *(mount.target for mount in start.mounts))
    if "TMPDIR" not in names and any(_is_below(start.env.get("TMPDIR", ""), folder) for folder in seen):
        names.append("TMPDIR")
    return [
        *("ch-run", *(f"--bind={mount.source}:{mount.target}" for mount in start.mounts), f"--cd={start.workdir}"),
        *(*from_image, "--env-no-expand", *(f"--set-env={name}={start.env[name]}" for name in names)),
        f"--set-env={start.mark}",
        *(*container.args, image, "--", *start.argv),
    ]


def _apptainer(start: _Start) -> list[str]:
    container = start.container
    return [
        *(container.image.runtime.program, "exec", *_each("--bind", start.mounts), "--pwd", start.workdir),
        *(["--nv"] if start.has_nvidia else []),
        *("--env", start.mark, *container.args, container.image.image, *start.argv),
    ]


def _podman(start: _Start) -> list[str]:
    container, image = start.container, start.container.image.image
    return [
        # The host's namespaces: ranks meet over its network, share its /dev/shm, and are seen by the agent's tools.
        *("podman", "run", "--rm", "--network=host", "--ipc=host", "--pid=host", "--entrypoint="),
        *(["--userns=keep-id"] if os.getuid() != 0 else []),
        *(*_each("--volume", start.mounts), f"--workdir={start.workdir}"),
        *(["--device=nvidia.com/gpu=all"] if start.has_nvidia else []),
        *(*(f"--env={name}" for name in _passed_on(start)), f"--env={start.mark}"),
        *(*container.args, *(["--rootfs"] if image.startswith("/") else []), image, *start.argv),
    ]


def _enroot(start: _Start) -> list[str]:
    # fstab's fields: a folder that the image has not is made. Its hook for NVIDIA goes by the variables alone.
    mounts = (f"{m.source}:{m.target}:none:x-create=auto,rbind{',ro' if m.read_only else ''}" for m in start.mounts)
    nvidia = [f"{name}={value}" for name, value in _NVIDIA.items() if name not in start.env] if start.has_nvidia else []
    return [
        *("enroot", "start", *(word for mount in mounts for word in ("--mount", mount))),
        *(word for name in (*_passed_on(start), *nvidia, start.mark) for word in ("--env", name)),
        # It has no option for the working directory.
        *(*start.container.args, start.container.image.image),
        *("sh", "-c", 'cd "$0" && exec "$@"', start.workdir, *start.argv),
    ]


def pyxis_arguments(container: Container, *, cwd: str, run_dir: str, packages: Sequence[str]) -> list[str]:
    """Srun's arguments for a step of agents in a container (pyxis 0.20): its workers are in the same one.

    `packages`: folders of the agents' own interpreter and packages, which the image has not.
    """
    given = [*needed_mounts(container, env={"HPC_ELASTIC_RUN_DIR": run_dir}, cwd=cwd), *container.mounts]
    missing = [path for path in packages if not any(_is_below(path, mount.target) for mount in given)]
    mounts = [*given, *(ContainerMount(source=path, target=path, read_only=True) for path in missing)]
    each = (f"{mount.source}:{mount.target}{':ro' if mount.read_only else ''}" for mount in mounts)
    return [
        *(f"--container-image={container.image.image}", f"--container-mounts={','.join(each)}"),
        # The home folder may hold the host's packages; an entry point would run in place of the agent.
        *(f"--container-workdir={container.workdir or cwd}", "--no-container-mount-home", "--no-container-entrypoint"),
        *([f"--container-env={','.join(container.env)}"] if container.env else []),
        *container.args,
    ]


def _passed_on(start: _Start) -> list[str]:
    return [name for name in sorted(start.env) if name not in _IMAGES_OWN or name in start.container.env]


def _each(option: str, mounts: Sequence[ContainerMount]) -> Iterator[str]:
    for mount in mounts:
        yield option
        yield f"{mount.source}:{mount.target}{':ro' if mount.read_only else ''}"


_COMMANDS: Mapping[Runtime, Callable[[_Start], list[str]]] = {
    Runtime.CHARLIECLOUD: _charliecloud,
    Runtime.APPTAINER: _apptainer,
    Runtime.SINGULARITY: _apptainer,
    Runtime.PODMAN: _podman,
    Runtime.ENROOT: _enroot,
    Runtime.PYXIS: lambda start: list(start.argv),  # the agent is inside already
}


class Setup(Part):
    """``--setup``: what the user runs once on each node before it joins, and what that makes of the environment.

    An agent that takes the place of a killed one runs it again: the environment that it makes is in no file.
    """

    def __init__(self, site: AgentSite) -> None:
        self._site = site
        self._environ = site.me.command_environment(site.environ)
        self._ends = Inbox[CommandEnd]()
        self._command: UserCommand | None = None
        self.is_ready = False

    @property
    def pids(self) -> Collection[int]:
        return frozenset() if self._command is None or self._command.is_gone else frozenset({self._command.pid})

    def watched(self) -> Collection[FileDescriptorLike]:
        return (self._ends,)

    def begin(self) -> None:
        site = self._site
        try:
            self._command = UserCommand.start(
                user_command.setup_command(site.me.spec.setup),
                environ=self._environ,
                cwd=site.me.spec.cwd,
                inherited=site.me.inherited,
                clock=site.clock,
                kept=user_command.KEPT_ENVIRONMENT,
            )
        except WorkerStartError as error:
            self._ends.put(CommandEnd(exitcode=127, stderr=str(error).encode()))
            return
        self._command.attend(site.me.spec.setup_timeout, self._ends.put)

    def look(self, agent: NodeAgent) -> None:
        if not (ends := self._ends.take()):
            return
        self._command = None
        found = self._judge(ends[0])
        self.is_ready = isinstance(found, EnvironmentChange)
        if agent.phase is not Phase.JOINING:
            return
        if isinstance(found, EnvironmentChange):
            agent.begin_joining(found)
        else:
            agent.on_health(HealthVerdict(reason=f"--setup failed: {found}", is_usage=True))

    def close(self) -> None:
        if self._command is not None and not self._command.is_gone:
            self._command.kill()
            wait_readable([self._ends], user_command.END_SECONDS)

    def _judge(self, end: CommandEnd) -> EnvironmentChange | str:
        found = user_command.read_change(end, self._environ)
        why, change = (found, NO_CHANGE) if isinstance(found, str) else ("", found)
        output, log = end.stderr, self._site.me.paths.setup_log(self._site.me.node)
        shown = user_command.last_lines(output, _MOST_LINES)

        def keep() -> None:
            make_private_dir(log.parent)
            write_private(log, output)

        if output.strip():
            self._site.files.post(keep)
        self._site.events.write(
            UserCommandEnded(
                command="setup",
                reason=why,
                code=end.exitcode,
                seconds=round(end.seconds, 3),
                output=tuple(shown) if why else (),
                log=str(log) if output.strip() else "",
                set=tuple(sorted(change.put)),
                unset=tuple(sorted(change.unset)),
            )
        )
        if why:
            for line in shown:
                logger.error("--setup: %s", line)
        else:
            python = change.python
            logger.info("--setup: %.1f s%s", end.seconds, f", python is {python}" if python else "")
        return found
