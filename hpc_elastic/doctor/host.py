"""What this host's files, name and installation mean for a run."""

from __future__ import annotations

import os
import platform
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

import hpc_elastic
from hpc_elastic.doctor.files import Folders, Room, judge_folders, measure_folders, try_to_write
from hpc_elastic.doctor.findings import Finding, ok, problem, warn_unless, warning
from hpc_elastic.doctor.slurm_facts import ask
from hpc_elastic.doctor.software import SLOW_IMPORT, PythonFacts
from hpc_elastic.launch.run_directory import why_not_shared
from hpc_elastic.run.container import Container, Runtime
from hpc_elastic.slurm.client import CommandRunner

_LEAST_FREE = 1 << 30
_SLOW_FILE = 0.2


class HostFacts(Struct, frozen=True, kw_only=True):
    """What was measured here."""

    runs: Room
    """The runs directory."""
    why_not_shared: str = ""
    """Why other nodes can't see the runs directory; empty: nothing speaks against it."""
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
    """Of this package."""


def look_at_host(runs_dir: Path, env: Mapping[str, str]) -> HostFacts:
    """What this host shows."""
    package = Path(hpc_elastic.__file__).resolve().parent
    place = runs_dir
    while not place.exists() and place != place.parent:
        place = place.parent
    host = socket.gethostname()
    return HostFacts(
        runs=replace(try_to_write(place), path=str(runs_dir)),
        why_not_shared=why_not_shared(runs_dir) or "",
        file_seconds=measure_files(place),
        folders=measure_folders(env),
        host=host,
        address=resolve(host),
        package=str(package),
        package_not_shared=why_not_shared(package) or "",
        python=f"{platform.python_version()} ({sys.executable})",
    )


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


def check_host(facts: HostFacts, *, nodes: int) -> Iterator[Finding]:
    """Judge. Pure; the order is that of the lines."""
    runs = facts.runs
    if runs.error or not runs.is_writable:
        yield problem(
            "files.runs", f"{runs.path}: {runs.error or 'not writable'}", "no run can be kept there",
            "another folder with --runs-dir",
        )  # fmt: skip
    else:
        yield from _runs(facts, nodes)
    yield from judge_folders("files", facts.folders)
    if not facts.address:
        yield warning(
            "network.name", f"{facts.host} resolves to no address", "other nodes may not find this one by its name",
            "agents try all their addresses; --master-addr where none of them is right",
        )  # fmt: skip
    else:
        yield warn_unless(
            not facts.address.startswith("127.") and facts.address != "::1", "network.name",
            f"{facts.host} resolves to {facts.address}", "a script that uses its host's name reaches itself alone",
            "use MASTER_ADDR, which agents choose among addresses that others have reached",
        )  # fmt: skip
    if facts.package_not_shared and nodes > 1:
        yield problem(
            "software.install", f"{facts.package}: {facts.package_not_shared}", "other nodes have no hpc-elastic there",
            "install it into an environment on the shared filesystem",
        )  # fmt: skip
    else:
        yield ok("software.install", f"{facts.package}, Python {facts.python}")


def _runs(facts: HostFacts, nodes: int) -> Iterator[Finding]:
    path, free, why = facts.runs.path, facts.runs.free, facts.why_not_shared
    if why and nodes > 1:
        yield problem(
            "files.runs", f"{path}: {why}", "the nodes can't meet there",
            "a folder on the shared filesystem with --runs-dir",
        )  # fmt: skip
    else:
        yield ok("files.runs", f"{path}{f' ({why})' if why else ''}")
    yield warn_unless(
        free >= _LEAST_FREE, "files.space", f"{free >> 20} MiB free in {path}", "logs and checkpoints may fill it",
        "free some, another --runs-dir, --log-max-size",
    )  # fmt: skip
    yield warn_unless(
        facts.file_seconds <= _SLOW_FILE, "files.speed",
        f"{1000 * facts.file_seconds:.0f} ms for a new file, a rename and a listing",
        "the nodes meet more slowly after a failure", "another filesystem with --runs-dir",
    )  # fmt: skip


def check_python(python: PythonFacts, container: Container | None, *, runner: CommandRunner) -> Finding:
    """Can workers be started here? A login node may lack what the nodes have.

    Args:
        python: As the workers' interpreter answered.
        container: That it is in; None: it is this host's.
        runner: For Pyxis, which srun alone can start.
    """
    if container is not None and container.image.runtime is Runtime.PYXIS:
        shown, why = ask(runner, "srun", "--help")
        if shown is not None and "--container-image" in shown:
            return ok("software.container", f"{container.image}: srun has --container-image")
        return problem(
            "software.container", f"{container.image}: {why or 'srun has no --container-image here'}",
            "srun refuses to start the agents", "another runtime (apptainer, enroot), or ask the site for Pyxis",
        )  # fmt: skip
    if container is not None:
        if python.error:
            return warning(
                "software.container", f"{container.image}: {python.error}",
                "every node of the job must have the runtime and the image",
                "--nodes 2 tries it there; --setup 'module load ...' where a module has the runtime",
            )  # fmt: skip
        torch = f"torch {python.torch}" if python.torch else python.torch_error
        return warn_unless(
            bool(python.torch), "software.container", f"{container.image}: Python {python.version}, {torch}",
            "scripts that train with it fail", "another image, or --python with the image's interpreter that has it",
        )  # fmt: skip
    if not python.torch:
        return warning(
            "software.torch", python.torch_error or python.error or "torch can't be imported",
            "scripts that train with it fail", "activate the environment that has it, or --python PATH",
        )  # fmt: skip
    return warn_unless(
        python.seconds <= SLOW_IMPORT, "software.torch", f"torch {python.torch}, imported in {python.seconds:.1f} s",
        "each restart takes so long", "--start-method forkserver",
    )  # fmt: skip
