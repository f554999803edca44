"""The run's folder, and each host's own folders: the view of this host and of the nodes, and what that means."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from msgspec import Struct, field
from msgspec.structs import replace

import hpc_elastic
from hpc_elastic.agent.health import RoomFacts
from hpc_elastic.base.host_facts import filesystem_type
from hpc_elastic.doctor.findings import DoctorFinding, fold, problem, problem_unless, warn_unless
from hpc_elastic.doctor.probe_site import ProbeSite
from hpc_elastic.launch.run_directory import why_not_shared

_LEAST_FREE = {"runs": 1 << 30, "home": 1 << 20, "tmp": 1 << 27, "shm": 256 << 20}


class FileFacts(Struct, frozen=True, kw_only=True):
    rooms: Mapping[str, RoomFacts] = field(default_factory=dict)
    """``runs``, ``home``, ``tmp`` and ``shm``."""
    filesystem: str = ""
    store_seconds: float | None = None
    """Seconds from writing a value to having read those of all others through the store; None: they never came."""
    created: bool | None = None
    """This node created the one name that all nodes tried to create at once; None: not tried."""


def check_host(runs_dir: Path, *, nodes: int) -> Iterator[DoctorFinding]:
    place = next(folder for folder in (runs_dir, *runs_dir.parents) if folder.exists())
    yield _room("files.space", replace(try_to_write(place), path=str(runs_dir)), _LEAST_FREE["runs"])
    package = Path(hpc_elastic.__file__).resolve().parent
    for check, path, means, way_out in (
        ("files.runs", runs_dir, "the nodes can't meet there", "a folder on the shared filesystem with --runs-dir"),
        ("software.install", package, "other nodes have no hpc-elastic there", "install it on the shared filesystem"),
    ):
        why = why_not_shared(path) if nodes > 1 else None
        yield problem_unless(why is None, check, f"{path}{f': {why}' if why else ''}", means, way_out)


def probe_files(site: ProbeSite) -> FileFacts:
    seconds: float | None = None
    created: bool | None = None
    if not site.barrier("files"):
        began = site.clock.monotonic()
        if not site.barrier("files-read"):
            seconds = site.clock.monotonic() - began
        created = site.store.put_if_absent("create/one", site.node)
    own = {"home": site.env.get("HOME") or "/", "tmp": site.env.get("TMPDIR") or "/tmp", "shm": "/dev/shm"}
    runs = replace(try_to_write(site.folder), path=str(site.folder.parents[2]))
    return FileFacts(
        rooms={"runs": runs, **{name: try_to_write(Path(path)) for name, path in own.items()}},
        filesystem=filesystem_type(os.path.realpath(site.folder)) or "",
        store_seconds=seconds,
        created=created,
    )


def try_to_write(folder: Path) -> RoomFacts:
    """A folder's room, and what only a try shows: a quota that is used up, a read-only filesystem."""
    path = folder / f".doctor-{os.getpid()}-{os.urandom(4).hex()}"
    try:
        found = os.statvfs(folder)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, bytes(1 << 16))
            os.fsync(fd)
        finally:
            os.close(fd)
            os.unlink(path)
    except OSError as error:
        return RoomFacts(path=str(folder), error=error.strerror or str(error))
    return RoomFacts(path=str(folder), free=found.f_bavail * found.f_frsize)


def judge_files(files: Mapping[str, FileFacts]) -> Iterator[DoctorFinding]:
    yield from fold([
        (node, _room(f"nodes.{name}", room, _LEAST_FREE[name]))
        for node, each in files.items()
        for name, room in each.rooms.items()
    ])  # fmt: skip
    if len(files) < 2:
        return
    if all(each.created is not None for each in files.values()):
        winners = [node for node, each in files.items() if each.created]
        yield problem_unless(
            len(winners) == 1, "nodes.create",
            f"of {len(files)} nodes that created one name at once, {len(winners)} did",
            "the nodes could not agree on anything: rounds would have several coordinators",
            "another filesystem with --runs-dir, or caches of names off on this one",
        )  # fmt: skip
    yield from fold([(node, _store(each)) for node, each in files.items()])


def _store(files: FileFacts) -> DoctorFinding:
    seconds = files.store_seconds
    kind = f" ({files.filesystem})" if files.filesystem else ""
    if seconds is None:
        return problem(
            "nodes.store", f"what other nodes wrote to the runs directory{kind} was not seen within a minute",
            "the nodes can't meet there", "another filesystem with --runs-dir; is it the same one on all nodes?",
        )  # fmt: skip
    return warn_unless(
        seconds <= 2.0, "nodes.store",
        f"within {max(seconds, 0.1):.1f} s all nodes have read what each wrote{kind}",
        "starts and restarts take that much longer, and a slow node may count as lost",
        f"--rdzv-conf heartbeat_ttl={max(20, round(10 * seconds))}, or another filesystem with --runs-dir",
    )  # fmt: skip


def _room(check: str, room: RoomFacts, least: int) -> DoctorFinding:
    if room.error:
        return problem(
            check, f"{room.path}: {room.error}", "what needs a file there fails",
            "ask the site, or another folder (--runs-dir, HOME, TMPDIR, HPC_ELASTIC_HEARTBEAT_DIR)",
        )  # fmt: skip
    return warn_unless(
        room.free >= least, check, f"{room.path}: {room.free >> 20} MiB free",
        "logs, data loaders or compilers fail when it is full", "free some, or another folder (--runs-dir, TMPDIR)",
    )  # fmt: skip
