"""What a node sees of the run's folder, and the folders of its own: the probe, and what its facts mean."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from hpc_elastic.base.host_facts import filesystem_type
from hpc_elastic.doctor.findings import Finding, fold, ok, problem, warn_unless
from hpc_elastic.doctor.probe_site import ProbeSite

_ROUNDS = 5
_SLOW_STORE = 2.0
_LEAST_FREE = 1 << 30
_SMALL_SHM = 256 << 20
_SOCKET_LIMIT, _SOCKET_NAME = 107, 40
"""Bytes of a Unix socket's path, and what of them a name in TMPDIR may need."""


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


class FileFacts(Struct, frozen=True, kw_only=True):
    """Of one node. Seconds by its own clock."""

    runs: Room
    folders: Folders
    filesystem: str = ""
    """The kind of the one with the run's folder; empty: not known."""
    store_seconds: float | None = None
    """From the writing of a value until those of all others were read, through the store; None: they never came."""
    created: bool | None = None
    """Of one name that all nodes create at once: this node did. None: not tried."""


# -- measured ------------------------------------------------------------------------------------------------------


def probe_files(site: ProbeSite) -> FileFacts:
    """Measure, together with all other nodes."""
    seconds: float | None = None
    created: bool | None = None
    if not site.barrier("files"):
        seconds = _store_seconds(site)
        created = site.store.put_if_absent("create/one", site.node)
    return FileFacts(
        runs=replace(try_to_write(site.folder), path=str(site.folder.parents[2])),
        folders=measure_folders(site.env),
        filesystem=filesystem_type(os.path.realpath(site.folder)) or "",
        store_seconds=seconds,
        created=created,
    )


def _store_seconds(site: ProbeSite) -> float | None:
    times = []
    for number in range(_ROUNDS):
        began = site.clock.monotonic()
        if len(site.gather(f"round-{number}")) < site.world_size:
            return None
        times.append(site.clock.monotonic() - began)
    return sorted(times)[_ROUNDS // 2]


def measure_folders(env: Mapping[str, str]) -> Folders:
    """This host's, for a process with these variables."""
    umask = os.umask(0o077)
    os.umask(umask)
    home = Path(env.get("HOME") or "/")
    try:
        found = os.statvfs(home)
        is_writable = os.access(home, os.W_OK | os.X_OK)
        room = Room(path=str(home), free=found.f_bavail * found.f_frsize, is_writable=is_writable)
    except OSError as error:
        room = Room(path=str(home), error=error.strerror or str(error))
    tmp = try_to_write(Path(env.get("TMPDIR") or "/tmp"))
    return Folders(home=room, tmp=tmp, shm=try_to_write(Path("/dev/shm")), umask=umask)


def try_to_write(folder: Path) -> Room:
    """A folder's room, and what only a try shows: a quota that is used up, a filesystem that has become read-only."""
    path = folder / f".doctor-{os.getpid()}-{os.urandom(4).hex()}"
    free = 0
    try:
        found = os.statvfs(folder)
        free = found.f_bavail * found.f_frsize
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, bytes(1 << 16))
            os.fsync(fd)
        finally:
            os.close(fd)
            os.unlink(path)
    except OSError as error:
        return Room(path=str(folder), free=free, is_writable=False, error=error.strerror or str(error))
    return Room(path=str(folder), free=free)


# -- judged --------------------------------------------------------------------------------------------------------


def judge_files(files: Mapping[str, FileFacts]) -> Iterator[Finding]:
    """Judge the nodes' facts."""
    yield from fold([(node, finding) for node, each in files.items() for finding in _folders(each)])
    if len(files) < 2:
        return
    winners = [node for node, each in files.items() if each.created]
    if len(winners) == 1:
        yield ok("nodes.create", f"of {len(files)} nodes that created one name at once, one did")
    elif all(each.created is not None for each in files.values()):
        yield problem(
            "nodes.create", f"{len(winners)} of {len(files)} nodes could create the same name",
            "the nodes could not agree on anything: rounds would have several coordinators",
            "another filesystem with --runs-dir, or caches of names off on this one",
        )  # fmt: skip
    yield from fold([(node, _store(each)) for node, each in files.items()])


def _folders(files: FileFacts) -> Iterator[Finding]:
    yield _room("nodes.runs", files.runs, _LEAST_FREE)
    yield from judge_folders("nodes", files.folders)


def _store(files: FileFacts) -> Finding:
    seconds = files.store_seconds
    kind = f" ({files.filesystem})" if files.filesystem else ""
    if seconds is None:
        return problem(
            "nodes.store", f"what other nodes wrote to the runs directory{kind} was not seen within a minute",
            "the nodes can't meet there", "another filesystem with --runs-dir; is it the same one on all nodes?",
        )  # fmt: skip
    return warn_unless(
        seconds <= _SLOW_STORE, "nodes.store",
        f"within {max(seconds, 0.1):.1f} s all nodes have read what each wrote{kind}",
        "starts and restarts take that much longer, and a slow node may count as lost",
        f"--rdzv-conf heartbeat_ttl={max(20, round(10 * seconds))}, or another filesystem with --runs-dir",
    )  # fmt: skip


def judge_folders(name: str, folders: Folders) -> Iterator[Finding]:
    """Judge a host's, or a node's; each check's name begins with `name`."""
    yield _room(f"{name}.home", folders.home, 1 << 20)
    yield _room(f"{name}.tmp", folders.tmp, 1 << 27)
    yield _room(f"{name}.shm", folders.shm, _SMALL_SHM)
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


def _room(name: str, room: Room, least: int) -> Finding:
    if room.error or not room.is_writable:
        return problem(
            name, f"{room.path}: {room.error or 'not writable'}", "what needs a file there fails",
            "ask the site, or another folder (HOME, TMPDIR, HPC_ELASTIC_HEARTBEAT_DIR)",
        )  # fmt: skip
    return warn_unless(
        room.free >= least, name, f"{room.path}: {room.free >> 20} MiB free",
        "data loaders and compilers fail when it is full", "free some, or another folder",
    )  # fmt: skip
