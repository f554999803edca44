"""The image that workers run in, and the parsers of the ``--container-*`` options.

The names are those of Pyxis. ``--container`` itself is sbatch's own, for OCI bundles.
"""

from __future__ import annotations

import os
from enum import Enum

from msgspec import Struct

from hpc_elastic.errors import UsageError


class Runtime(str, Enum):
    CHARLIECLOUD = "charliecloud"
    APPTAINER = "apptainer"
    SINGULARITY = "singularity"
    PODMAN = "podman"
    ENROOT = "enroot"
    PYXIS = "pyxis"
    """Part of srun: the agents are inside too."""

    @property
    def program(self) -> str:
        return {Runtime.CHARLIECLOUD: "ch-run", Runtime.PYXIS: "srun"}.get(self, self.value)


class ContainerImage(Struct, frozen=True, kw_only=True):
    runtime: Runtime
    image: str
    """The runtime's notation: a path, a URI, or a name in its store."""

    def __str__(self) -> str:
        return f"{self.runtime.value}:{self.image}"


class ContainerMount(Struct, frozen=True, kw_only=True):
    source: str
    target: str
    read_only: bool = False


class Container(Struct, frozen=True, kw_only=True):
    image: ContainerImage
    mounts: tuple[ContainerMount, ...] = ()
    workdir: str = ""
    """The workers' folder inside; empty: where the run was started."""
    env: tuple[str, ...] = ()
    """Variables that keep the host's value, whatever the image says."""
    args: tuple[str, ...] = ()


def parse_container_image(text: str, option: str) -> ContainerImage:
    name, colon, image = text.partition(":")
    names = [runtime.value for runtime in Runtime]
    if colon and name in names:
        if not image:
            raise UsageError(f"{option} {text}: the image is missing; give {name}:IMAGE")
        return ContainerImage(runtime=Runtime(name), image=image)
    from shutil import which  # agents read run.json, and never come here

    candidates = _runtimes_for(text)
    installed = [runtime for runtime in candidates if which(runtime.program)]
    if len(candidates) == 1 or installed:
        return ContainerImage(runtime=(installed or candidates)[0], image=text)
    programs = " and ".join(runtime.program for runtime in candidates)
    raise UsageError(
        f"{option} {text}: its runtime can't be guessed, {programs} are not in PATH; "
        f"give RUNTIME:{text} with one of {', '.join(names)}"
    )


def _runtimes_for(image: str) -> tuple[Runtime, ...]:
    if image.endswith(".sif") or image.startswith(("docker://", "library://", "oras://", "shub://")):
        return Runtime.APPTAINER, Runtime.SINGULARITY
    if image.endswith((".sqsh", ".squashfs", ".sqfs")):
        return Runtime.ENROOT, Runtime.CHARLIECLOUD
    if image.startswith(("/", ".", "~")):
        return Runtime.CHARLIECLOUD, Runtime.APPTAINER, Runtime.SINGULARITY
    return Runtime.PODMAN, Runtime.CHARLIECLOUD


def parse_container_mounts(text: str, option: str) -> tuple[ContainerMount, ...]:
    """Read ``SRC[:DST[:ro]],...``."""
    mounts = []
    for part in map(str.strip, text.split(",")):
        source, *rest = part.split(":")
        target = rest[0] if rest and rest[0] else source
        mode = rest[1] if len(rest) > 1 else "rw"
        if not os.path.isabs(source) or not os.path.isabs(target) or len(rest) > 2 or mode not in ("ro", "rw"):
            raise UsageError(
                f"{option} {text}: {part!r} is not of the form SRC[:DST[:ro]] with absolute paths, as in /data:/data:ro"
            )
        mounts.append(ContainerMount(source=source, target=target, read_only=mode == "ro"))
    return tuple(mounts)


def parse_container_workdir(text: str, option: str) -> str:
    if not os.path.isabs(text):
        raise UsageError(f"{option} {text}: give an absolute path inside the container")
    return text


def parse_container_env(text: str, option: str) -> tuple[str, ...]:
    names = tuple(word.strip() for word in text.split(","))
    if bad := [name for name in names if not name.replace("_", "a").isalnum() or name[:1].isdigit()]:
        raise UsageError(
            f"{option} {text}: {bad[0]!r} is no name of a variable; give names, as in PATH,LD_LIBRARY_PATH"
        )
    return names
