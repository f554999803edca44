"""What this host's files, names and installation mean for a run."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from hpc_elastic.doctor.findings import Finding, ok, problem, warning
from hpc_elastic.doctor.software_probe import PythonFacts
from hpc_elastic.run.container import Container, Runtime

_LEAST_FREE = 1 << 30
_SLOW_FILE = 0.2
_SOCKET_LIMIT, _SOCKET_NAME = 107, 40
"""Bytes of a Unix socket's path, and what of them a name in TMPDIR may need."""
_SLOW_IMPORT = 30.0
_SMALL_SHM = 256 << 20
_FULL = 0.95
_QUOTA_SECONDS = 20.0


class Room(Struct, frozen=True, kw_only=True):
    """A folder and what is free there."""

    path: str
    free: int = 0
    is_writable: bool = True
    error: str = ""


class Folders(Struct, frozen=True, kw_only=True):
    """What every host has of its own, or should see, beside the runs directory."""

    home: Room
    tmp: Room
    shm: Room
    umask: int = 0o022


class HostFacts(Struct, frozen=True, kw_only=True):
    """What was measured here."""

    runs_dir: str
    runs_room: Room
    why_not_shared: str = ""
    """Why other nodes can't see the runs directory; empty: nothing speaks against it."""
    quotas: str = ""
    """What `ask_quotas` got."""
    file_seconds: float = 0.0
    """To make a file there, rename it and list the folder."""
    folders: Folders
    host: str = ""
    address: str = ""
    """What its name resolves to; empty: to nothing."""
    package: str = ""
    package_not_shared: str = ""
    """Why other nodes can't see the installation."""
    python: str = ""
    torch: str = ""
    """Its version; empty: it can't be imported."""
    torch_error: str = ""
    torch_cold: float = 0.0
    """Seconds of the first ``import torch``."""
    torch_warm: float = 0.0
    """Of the second."""


def check_host(facts: HostFacts, *, nodes: int) -> Iterator[Finding]:
    """Judge. Pure; the order is that of the lines."""
    yield from _runs_dir(facts, nodes)
    yield from judge_folders("files", facts.folders)
    if not facts.address:
        yield warning(
            "network.name", f"{facts.host} resolves to no address", "other nodes may not find this one by its name",
            "agents try all their addresses; --master-addr where none of them is right",
        )  # fmt: skip
    elif facts.address.startswith("127.") or facts.address == "::1":
        yield warning(
            "network.name", f"{facts.host} resolves to {facts.address}", "a script that uses its host's name reaches "
            "itself alone", "use MASTER_ADDR, which agents choose among addresses that others have reached",
        )  # fmt: skip
    else:
        yield ok("network.name", f"{facts.host} is {facts.address}")
    yield from _software(facts, nodes)


def _runs_dir(facts: HostFacts, nodes: int) -> Iterator[Finding]:
    room = facts.runs_room
    if room.error or not room.is_writable:
        yield problem(
            "files.runs", f"{facts.runs_dir}: {room.error or 'not writable'}", "no run can be kept there",
            "another folder with --runs-dir",
        )  # fmt: skip
        return
    if facts.why_not_shared and nodes > 1:
        yield problem(
            "files.runs", f"{facts.runs_dir}: {facts.why_not_shared}", "the nodes can't meet there",
            "a folder on the shared filesystem with --runs-dir",
        )  # fmt: skip
    else:
        yield ok("files.runs", f"{facts.runs_dir}{f' ({facts.why_not_shared})' if facts.why_not_shared else ''}")
    if room.free < _LEAST_FREE:
        yield warning(
            "files.space", f"{room.free >> 20} MiB free in {facts.runs_dir}", "logs and checkpoints may fill it",
            "free some, another --runs-dir, --log-max-size",
        )  # fmt: skip
    else:
        yield ok("files.space", f"{room.free >> 30} GiB free in {facts.runs_dir}")
    yield judge_quota("files.quota", facts.quotas)
    if facts.file_seconds > _SLOW_FILE:
        yield warning(
            "files.speed", f"{facts.file_seconds:.2f} s for a new file, a rename and a listing",
            "the nodes meet more slowly after a failure", "another filesystem with --runs-dir",
        )  # fmt: skip
    else:
        yield ok("files.speed", f"{1000 * facts.file_seconds:.0f} ms for a new file, a rename and a listing")


def judge_room(name: str, room: Room, least: int) -> Finding:
    """Judge a folder of this host's, or of a node's, that is to have `least` bytes free."""
    if room.error or not room.is_writable:
        return problem(
            name, f"{room.path}: {room.error or 'not writable'}", "what needs a file there fails",
            "ask the site, or another folder (HOME, TMPDIR, HPC_ELASTIC_HEARTBEAT_DIR)",
        )  # fmt: skip
    if room.free < least:
        return warning(
            name, f"{room.path}: {room.free >> 20} MiB free", "data loaders and compilers fail when it is full",
            "free some, or another folder",
        )  # fmt: skip
    return ok(name, f"{room.path}: {room.free >> 20} MiB free")


def judge_folders(name: str, folders: Folders) -> Iterator[Finding]:
    """Judge them; each check's name begins with `name`."""
    yield judge_room(f"{name}.home", folders.home, 1 << 20)
    yield judge_room(f"{name}.tmp", folders.tmp, 1 << 27)
    yield judge_room(f"{name}.shm", folders.shm, _SMALL_SHM)
    tmp = folders.tmp.path
    if len(tmp) > _SOCKET_LIMIT - _SOCKET_NAME:
        yield problem(
            f"{name}.socket-path", f"TMPDIR has {len(tmp)} characters", "sockets there (of multiprocessing, say) fail: "
            "their paths may have 107", "export TMPDIR=/tmp",
        )  # fmt: skip
    else:
        yield ok(f"{name}.socket-path", f"TMPDIR={tmp}")
    if folders.umask & 0o700:
        yield problem(
            f"{name}.umask", f"{folders.umask:04o}", "files of this account can't be read or written by itself",
            "umask 022",
        )  # fmt: skip
    else:
        yield ok(f"{name}.umask", f"{folders.umask:04o}")


def judge_quota(name: str, text: str) -> Finding:
    """Judge what ``quota -w`` or ``lfs quota -q`` printed: name, then used, quota and limit of blocks and of files.

    A star marks a used figure that is beyond; a grace time, ``6days`` or ``-``, may follow each limit.
    """
    rows = []
    for line in text.splitlines():
        volume, *words = line.split() or [""]
        figures = [int(word.rstrip("*")) for word in words if word.rstrip("*").isdigit()]
        if len(figures) == 6:
            rows.append((volume, figures))
    for volume, figures in rows:
        for what, (used, soft, hard) in (("KiB", figures[:3]), ("files", figures[3:])):
            limit = soft or hard
            if limit and used >= _FULL * limit:
                return warning(
                    name, f"{volume}: {used} of {limit} {what} used", "logs and checkpoints fail beyond it",
                    "free some, or another folder with --runs-dir",
                )  # fmt: skip
    return ok(name, f"room in {len(rows)} quotas" if rows else "none is shown")


def _software(facts: HostFacts, nodes: int) -> Iterator[Finding]:
    if facts.package_not_shared and nodes > 1:
        yield problem(
            "software.install", f"{facts.package}: {facts.package_not_shared}", "other nodes have no hpc-elastic there",
            "install it into an environment on the shared filesystem",
        )  # fmt: skip
    else:
        yield ok("software.install", f"{facts.package}, Python {facts.python}")
    if not facts.torch:
        yield warning(
            "software.torch", facts.torch_error or "torch can't be imported", "scripts that train with it fail",
            "activate the environment that has it, or --python PATH",
        )  # fmt: skip
    elif facts.torch_warm > _SLOW_IMPORT:
        yield warning(
            "software.torch", f"torch {facts.torch}, import {facts.torch_cold:.1f} s, again {facts.torch_warm:.1f} s",
            "each restart takes so long", "--start-method forkserver",
        )  # fmt: skip
    else:
        yield ok(
            "software.torch", f"torch {facts.torch}, import {facts.torch_cold:.1f} s, again {facts.torch_warm:.1f} s"
        )  # fmt: skip


def judge_container(
    container: Container, python: PythonFacts, *, srun_help: str | None = "", srun_error: str = ""
) -> Finding:
    """Can workers be started in the image here? A login node may lack what the nodes have.

    Args:
        container: What was asked for.
        python: As the interpreter inside answered.
        srun_help: For Pyxis, which srun alone can start: ``srun --help``; None: it did not answer.
        srun_error: Why.
    """
    name = "software.container"
    if container.image.runtime is Runtime.PYXIS:
        if srun_help is not None and "--container-image" in srun_help:
            return ok(name, f"{container.image}: srun has --container-image")
        return problem(
            name, f"{container.image}: {srun_error or 'srun has no --container-image here'}",
            "srun refuses to start the agents", "another runtime (apptainer, enroot), or ask the site for Pyxis",
        )  # fmt: skip
    if python.error:
        return warning(
            name, f"{container.image}: {python.error}", "every node of the job must have the runtime and the image",
            "--nodes 2 tries it there; --setup 'module load ...' where a module has the runtime",
        )  # fmt: skip
    if not python.torch:
        return warning(
            name, f"{container.image}: Python {python.version}, {python.torch_error}",
            "scripts that train with it fail", "another image, or --python with the image's interpreter that has it",
        )  # fmt: skip
    return ok(name, f"{container.image}: Python {python.version}, torch {python.torch}")


# -- measured ------------------------------------------------------------------------------------------------------


def measure_room(path: Path) -> Room:
    """What is free in a folder, or in the nearest one above it that is there."""
    place = path
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        found = os.statvfs(place)
    except OSError as error:
        return Room(path=str(path), error=error.strerror or str(error))
    return Room(path=str(path), free=found.f_bavail * found.f_frsize, is_writable=os.access(place, os.W_OK | os.X_OK))


def measure_files(folder: Path) -> float:
    """Seconds for a new file, a rename and a listing; nothing is left. 0 where that can't be done."""
    first, second = (folder / f".doctor-{os.urandom(8).hex()}" for _ in range(2))
    began = time.monotonic()
    try:
        os.close(os.open(first, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))  # follows no planted link
        first.rename(second)
        os.listdir(folder)
        return time.monotonic() - began
    except OSError:
        return 0.0
    finally:
        for path in (first, second):
            path.unlink(missing_ok=True)


def resolve(host: str) -> str:
    """The first address of a name; empty: none."""
    try:
        return str(socket.getaddrinfo(host, None)[0][4][0])
    except OSError:
        return ""


def measure_folders(env: Mapping[str, str]) -> Folders:
    """This host's, for a process with these variables."""
    umask = os.umask(0o077)
    os.umask(umask)
    return Folders(
        home=measure_room(Path(env.get("HOME") or "/")),
        tmp=try_to_write(Path(env.get("TMPDIR") or "/tmp")),
        shm=try_to_write(Path("/dev/shm")),
        umask=umask,
    )


def try_to_write(folder: Path) -> Room:
    """A folder's room, and what only a try shows: a quota that is used up, a filesystem that has become read-only."""
    path = folder / f".doctor-{os.getpid()}-{os.urandom(4).hex()}"
    found = measure_room(folder)
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, bytes(1 << 16))
            os.fsync(fd)
        finally:
            os.close(fd)
            os.unlink(path)
    except OSError as error:
        return replace(found, is_writable=False, error=error.strerror or str(error))
    return found


def ask_quotas(folder: Path, kind: str) -> str:
    """What ``quota``, or ``lfs quota``, prints; empty: neither is there, or there are none.

    Args:
        folder: For which it is asked.
        kind: Of its filesystem.
    """
    command = ["lfs", "quota", "-q", "-u", str(os.getuid()), str(folder)] if kind == "lustre" else ["quota", "-w"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_QUOTA_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout  # quota exits with 1 where one is exceeded
