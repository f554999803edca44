"""Where the nodes' files lie: one path per node to the same folder, and what can go wrong with it."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections import Counter
from pathlib import Path

from tests.rigs.chaos.schedule import Kind
from tests.rigs.network_mounts import KINDS, NetworkMounts
from tests.rigs.nfs_emulator import MountSettings, NfsEmulator
from tests.rigs.small_disk import fill_disk

_FILLER = "fill"
_PROCESS_KINDS = (
    Kind.KILL_AGENT,
    Kind.KILL_NODE,
    Kind.LOSE_NODE,
    Kind.KILL_WORKER,
    Kind.STOP_AGENT,
    Kind.STOP_NODE,
    Kind.CLOCK,
)


class Place:
    """A shared folder. A context manager; it is empty at first, and gone in the end."""

    kinds: tuple[Kind, ...] = _PROCESS_KINDS
    """What can be done here; each kind that is not done to processes has its methods below."""

    def path(self, node: int) -> Path:
        raise NotImplementedError

    def mount(self, node: int) -> int:
        """Which mount the node is on: what hangs there, hangs for all its nodes."""
        return 0

    def outside(self) -> Path:
        """The folder as the test sees it, whatever goes wrong."""
        raise NotImplementedError

    def freeze(self, node: int | None) -> None:
        """What the node is on, or None for the server; as often as it is thawed."""
        raise NotImplementedError

    def thaw(self, node: int | None) -> None:
        raise NotImplementedError

    def fail(self, node: int, *, error: str, operation: str, done: bool, count: int) -> None:
        raise NotImplementedError

    def heal(self, node: int) -> None:
        """Nothing is wrong."""

    def fill(self) -> None:
        raise NotImplementedError

    def free(self) -> None:
        raise NotImplementedError

    def drop_caches(self, node: int) -> None:
        raise NotImplementedError

    def cut(self) -> None:
        """End all that waits for a place that does not answer any more; here nothing ever waits."""

    def __enter__(self) -> Place:
        raise NotImplementedError

    def __exit__(self, *_: object) -> None:
        raise NotImplementedError


class SmallDisk(Place):
    """A small ext4 of its own, which all nodes share as they do on one machine; it can be filled."""

    kinds = (*_PROCESS_KINDS, Kind.FULL)

    def __init__(self, folder: Path) -> None:
        self._image = folder / "disk.img"
        self._mount = folder / "disk"

    def __enter__(self) -> SmallDisk:
        self._mount.mkdir()
        with open(self._image, "wb") as image:
            image.truncate(64 << 20)
        _run("mkfs.ext4", "-q", "-F", "-m", "0", str(self._image))
        _run("mount", "-o", "loop", str(self._image), str(self._mount))
        self._root().mkdir(mode=0o700)
        return self

    def __exit__(self, *_: object) -> None:
        _run("umount", "-l", str(self._mount))
        self._image.unlink()
        self._mount.rmdir()

    def _root(self) -> Path:
        return self._mount / "shared"

    def path(self, node: int) -> Path:
        return self._root()

    def outside(self) -> Path:
        return self._root()

    def fill(self) -> None:
        fill_disk(self._mount / _FILLER)

    def free(self) -> None:
        (self._mount / _FILLER).unlink(missing_ok=True)


class EmulatedNfs(Place):
    """`mounts` emulated NFS clients; node k is on mount k modulo `mounts`."""

    kinds = tuple(Kind)

    def __init__(self, folder: Path, *, mounts: int, settings: MountSettings | None = None) -> None:
        self._backing = folder / "backing"
        self._backing.mkdir(mode=0o700)
        self._mounts = mounts
        self._frozen: Counter[int | None] = Counter()
        self._emulator = NfsEmulator(self._backing, mounts=mounts, settings=settings)

    def __enter__(self) -> EmulatedNfs:
        self._emulator.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._emulator.__exit__()

    def mount(self, node: int) -> int:
        return node % self._mounts

    def _mount_of(self, node: int | None) -> int | None:
        return None if node is None else self.mount(node)

    def path(self, node: int) -> Path:
        return self._emulator.paths[self.mount(node)]

    def outside(self) -> Path:
        return self._backing

    def freeze(self, node: int | None) -> None:
        self._frozen[self._mount_of(node)] += 1
        self._emulator.freeze(self._mount_of(node))

    def thaw(self, node: int | None) -> None:
        self._frozen[self._mount_of(node)] -= 1
        for mount in range(self._mounts):
            if not self._frozen[None] and not self._frozen[mount]:
                self._emulator.thaw(mount)

    def fail(self, node: int, *, error: str, operation: str, done: bool, count: int) -> None:
        self._emulator.fail(error, operation, self._mount_of(node), done=done, times=count)

    def heal(self, node: int) -> None:
        self._emulator.heal(self._mount_of(node))

    def fill(self) -> None:
        for operation in ("create", "write", "mkdir", "symlink", "link"):
            self._emulator.fail("ENOSPC", operation)

    def free(self) -> None:
        self._emulator.heal()

    def drop_caches(self, node: int) -> None:
        self._emulator.drop_caches(self._mount_of(node))

    def cut(self) -> None:
        self._emulator.thaw()


class NetworkFilesystem(Place):
    """A real network filesystem: `mounts` clients, and one more for the test; node k is on mount k modulo `mounts`."""

    def __init__(self, kind: str, *, mounts: int) -> None:
        self.kinds = network_kinds(kind)
        self._count = mounts
        self._mounts = NetworkMounts(kind, mounts=mounts + 1)
        self._frozen: Counter[int | None] = Counter()
        """Client, None for the server → how often."""

    def __enter__(self) -> NetworkFilesystem:
        self._mounts.__enter__()
        (self._mounts.paths[0] / "shared").mkdir(mode=0o700)
        deadline = time.monotonic() + 30.0
        for path in self._mounts.paths:
            while "shared" not in os.listdir(path):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{path} does not show what was made on another mount")
                time.sleep(0.1)
        return self

    def __exit__(self, *_: object) -> None:
        for what in +self._frozen:
            self._mounts.thaw(what)
        self._mounts.__exit__()

    def mount(self, node: int) -> int:
        return node % self._count

    def path(self, node: int) -> Path:
        return self._mounts.paths[self.mount(node)] / "shared"

    def outside(self) -> Path:
        return self._mounts.paths[-1] / "shared"

    def freeze(self, node: int | None) -> None:
        what = None if node is None else self.mount(node)
        self._frozen[what] += 1
        self._mounts.freeze(what)

    def thaw(self, node: int | None) -> None:
        what = None if node is None else self.mount(node)
        self._frozen[what] -= 1
        if not self._frozen[what]:
            self._mounts.thaw(what)

    def fill(self) -> None:
        fill_disk(self._mounts.server_disk / _FILLER)

    def free(self) -> None:
        (self._mounts.server_disk / _FILLER).unlink(missing_ok=True)

    def cut(self) -> None:
        self._mounts.cut()


def network_kinds(kind: str) -> tuple[Kind, ...]:
    """What can be done on a network filesystem."""
    full = (Kind.FULL,) if KINDS[kind].disk_megabytes else ()
    return (*_PROCESS_KINDS, Kind.FREEZE_ALL, Kind.FREEZE_ONE, *full)


def sharing_unavailable() -> str | None:
    """Why a small disk can't be made here, in one line."""
    if os.geteuid() != 0:
        return "mounting a disk image needs root"
    missing = [name for name in ("mkfs.ext4", "mount", "umount") if shutil.which(name) is None]
    return f"{', '.join(missing)} is missing" if missing else None


def _run(*argv: str) -> None:
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(argv)}: {done.stderr.strip()}")
