"""How a worker is started inside a container: the runtime's command line around the worker's own. Pure.

Agents, supervisor and Slurm's programs stay on the host; a worker is the runtime's process. Its folders are mounted at
the paths that they have outside. Tried: charliecloud 0.31, podman 4.3; the others follow their manuals (apptainer 1.3,
enroot 3.5, pyxis 0.20). Pyxis starts containers through srun alone: there the agents are inside too.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from hpc_elastic.run.container import Container, ContainerMount, Runtime
from hpc_elastic.worker_api.heartbeat_record import VARIABLE as HEARTBEAT
from hpc_elastic.worker_api.restart_group import REPORTS
from hpc_elastic.workers.handlers import INSIDE_VARIABLE

_HOSTS_OWN = (
    *("LD_LIBRARY_PATH", "LD_PRELOAD", "LD_AUDIT", "PYTHONHOME", "PYTHONPATH", "PYTHONSTARTUP", "PYTHONUSERBASE"),
    *("VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV", "CONDA_EXE", "CONDA_PYTHON_EXE", "CONDA_SHLVL"),
)
"""They name the host's libraries and packages, which an image has not, or others."""
_IMAGES_OWN = ("PATH", "HOME", "HOSTNAME", "SHELL", "TMPDIR", "XDG_RUNTIME_DIR", "_", "OLDPWD", "PWD")
"""Variables that the image sets, where the runtime passes nothing on by itself."""
_NVIDIA = {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "compute,utility"}
"""Variables that NVIDIA's images set."""
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
    """The script's exit code from its runtime's, as `subprocess` has it.

    podman reports a signal as a shell does, as 128 and its number (podman 4.3). charliecloud and enroot become the
    script, and apptainer 1.3 sends itself the signal that ended it.
    """
    is_podmans = container is not None and container.image.runtime is Runtime.PODMAN
    return 128 - exitcode if is_podmans and 128 < exitcode <= 128 + signal.SIGRTMAX else exitcode


def needed_mounts(container: Container, *, env: Mapping[str, str], cwd: str) -> list[ContainerMount]:
    """Folders of the host that a worker needs and its container would not have: each once, at its own path."""
    files = (env.get("TORCHELASTIC_ERROR_FILE", ""), env.get(HEARTBEAT, ""), env.get(REPORTS, ""))
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
