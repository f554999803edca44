"""A host as a run uses it: its folders, the memory and the notices of its job, the workers' interpreter, its GPUs.

The probes run on each node, and exchange values by files of the run's own store (`ProbeSite`). Their judges run where
doctor does; `check_host` judges the host of doctor itself.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import threading
from collections.abc import Iterator, Mapping
from math import ceil
from pathlib import Path

from msgspec import Struct, field
from msgspec.structs import replace

import hpc_elastic
from hpc_elastic.agent.health import GPU_SECONDS, GpuFacts, RoomFacts, gpus_from_json, judge_gpus, own_gpus
from hpc_elastic.agent.health_checks import memory_limits
from hpc_elastic.agent.worker_environment import enter_container
from hpc_elastic.base.clock import Clock
from hpc_elastic.base.host_facts import filesystem_type, module_command, source_command, source_environment
from hpc_elastic.base.text import clean_line, first_of
from hpc_elastic.doctor.checks import DoctorFinding, fold, ok, problem, problem_unless, warn_unless, warning
from hpc_elastic.launch.run_directory import why_not_shared
from hpc_elastic.run.spec import Container, Runtime
from hpc_elastic.slurm.client import SlurmClient, SubprocessRunner
from hpc_elastic.slurm.commands import JobId, SlurmError
from hpc_elastic.slurm.job_environment import JobEnvironment, JobEnvironmentError, in_job, names_text
from hpc_elastic.store.file_store import FileStore
from hpc_elastic.worker_api.preemption import preemption_notice
from hpc_elastic.workers.linux import oom_kill_count

_GATHER_LOOK_SECONDS = 0.01
_LONGEST_GATHER_PAUSE = 0.2


class ProbeSettings(Struct, frozen=True, kw_only=True):
    python: str
    """The workers' interpreter. The probes themselves use doctor's own, which has this package."""
    container: Container | None = None


class ProbeSite(Struct, kw_only=True):
    rank: int
    world_size: int
    node: str
    """Slurm's name; ``node1`` where this machine plays the nodes."""
    folder: Path
    """``doctor`` in the run directory: all nodes see it."""
    settings: ProbeSettings
    store: FileStore
    clock: Clock
    env: Mapping[str, str]
    stop: threading.Event = field(default_factory=threading.Event)

    def gather(self, name: str, value: str = "1", *, seconds: float = 60.0) -> dict[int, str]:
        """A `name` is used once. A rank that did not come in `seconds` is missing from the answer."""
        self.store.put_if_absent(f"{name}/{self.rank:05d}", value)
        deadline = self.clock.monotonic() + seconds
        found: dict[int, str] = {}
        invalidate_at, pause = 0.0, _GATHER_LOOK_SECONDS
        while len(found) < self.world_size:
            now = self.clock.monotonic()
            if now >= invalidate_at:
                self.store.invalidate(name)
                invalidate_at = now + 0.5
            new = [key for key in self.store.list(name) if key.isdecimal() and int(key) not in found]
            values = self.store.get_many([f"{name}/{key}" for key in new])
            found.update({int(key): text for key, text in zip(new, values, strict=True) if text is not None})
            if now >= deadline or (not new and self.clock.wait(self.stop, pause)):
                break
            pause = _GATHER_LOOK_SECONDS if new else min(_LONGEST_GATHER_PAUSE, 1.2 * pause)
        return found

    def barrier(self, name: str, *, seconds: float = 60.0) -> tuple[int, ...]:
        """Wait for all; the ranks that did not come in time are returned."""
        came = self.gather(name, seconds=seconds)
        return tuple(rank for rank in range(self.world_size) if rank not in came)


IMPORT_SECONDS = 300.0
"""Limit of one start of the interpreter with one import of torch."""
_MOST = 4
# Python 3.8 and later, the standard library alone: it runs in the workers' interpreter.
_LOOK = """
import json, time
facts = {"executable": sys.executable, "version": sys.version.split()[0]}
began = time.monotonic()
try:
    import torch
    facts["torch"] = str(torch.__version__)
    facts["seconds"] = time.monotonic() - began
except BaseException as error:
    facts["torch_error"] = "%s: %s" % (type(error).__name__, error)
sys.__stdout__.write("\\n" + json.dumps(facts) + "\\n")
"""


class PythonFacts(Struct, frozen=True, kw_only=True):
    executable: str = ""
    version: str = ""
    error: str = ""
    torch: str = ""
    torch_error: str = ""
    seconds: float = 0.0


class GpusFacts(Struct, frozen=True, kw_only=True):
    nvml: GpuFacts
    given: int | None = None
    """How many Slurm gave; None: there is no Slurm."""
    visible: str | None = None


def probe_python(site: ProbeSite) -> PythonFacts | None:
    site.barrier("python")
    return look_at_python(site.settings.python, site.env, cwd=os.getcwd(), container=site.settings.container)


def look_at_python(
    python: str, env: Mapping[str, str], *, cwd: str, container: Container | None = None, limit: float = IMPORT_SECONDS
) -> PythonFacts | None:
    """None: it is in an image that only Pyxis starts, in a step. `python`: a path, or a name in PATH, of the image."""
    if container is not None and container.image.runtime is Runtime.PYXIS:
        return None
    argv, environ = source_command(python, _LOOK), source_environment(env)
    if container is not None:
        has_nvidia = os.path.exists("/dev/nvidiactl")
        argv, environ = enter_container(container, argv, environ, local_rank=0, cwd=cwd, has_nvidia=has_nvidia)
    try:
        done = subprocess.run(argv, env=environ, cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return PythonFacts(error=f"{argv[0]} has not answered for {limit:g} s")
    except OSError as error:
        return PythonFacts(error=f"{error.filename or argv[0]}: {error.strerror or error}")
    names = ("executable", "version", "torch", "torch_error")
    try:
        found = json.loads(done.stdout.decode(errors="replace").strip().splitlines()[-1])
        texts = {name: clean_line(str(found.get(name, "")))[:300] for name in names}
        return PythonFacts(**texts, seconds=float(found.get("seconds", 0.0)))
    except (ValueError, IndexError, AttributeError):
        said = done.stderr.decode(errors="replace").strip().splitlines()
        how = f"ended with {done.returncode}" if done.returncode else "is no Python"
        # A runtime's own process number would make each node's reason another one.
        return PythonFacts(
            error=re.sub(r"\[\d+\]", "", clean_line(f"{argv[0]} {how}{f': {said[-1]}' if said else ''}"))[:300]
        )


def probe_gpus(site: ProbeSite) -> GpusFacts:
    env = site.env
    try:
        given = JobEnvironment.from_env(env).gpus if in_job(env) else None
    except JobEnvironmentError:
        given = None
    argv = module_command("hpc_elastic.agent.health", "print_gpus")
    try:
        done = subprocess.run(
            argv, env=dict(env), cwd="/", stdin=subprocess.DEVNULL, capture_output=True, timeout=GPU_SECONDS
        )
        nvml = gpus_from_json(done.stdout)
    except subprocess.TimeoutExpired:
        nvml = GpuFacts(error=f"it has not answered for {GPU_SECONDS:g} s")
    return GpusFacts(nvml=nvml, given=given, visible=env.get("CUDA_VISIBLE_DEVICES"))


def judge_pythons(
    pythons: Mapping[str, PythonFacts], container: Container | None, *, of: str = "nodes"
) -> Iterator[DoctorFinding]:
    """`of` is ``nodes``; or ``software`` for this host alone, which may lack what the nodes have."""
    check = f"{of}.{'python' if container is None else 'container'}"
    where = f"{container.image}: " if container is not None else ""
    failed = {node: python.error for node, python in pythons.items() if python.error}
    kinds = {node: f"Python {python.version} ({python.executable})" for node, python in pythons.items()}
    if failed:
        yield (problem if of == "nodes" else warning)(
            check, where + _by_value(failed), "workers can't be started there",
            "every node must have it, or the image and its runtime: --python PATH, --setup 'module load ...'",
        )  # fmt: skip
    elif pythons:
        yield warn_unless(
            len(set(kinds.values())) == 1, check, where + _by_value(kinds),
            "ranks run different programs: what works on one node may fail on another",
            "one environment on the shared filesystem, by --python PATH or --setup COMMAND",
        )  # fmt: skip
    elif container is not None and container.image.runtime is Runtime.PYXIS:
        yield warning(
            check, f"{where}not tried: srun alone starts it", "that it can't be started is seen at the start of a run",
            "hpc-elastic rehearse, on the cluster",
        )  # fmt: skip
    started = {node: python for node, python in pythons.items() if not python.error}
    if started:
        yield _torch(f"{of}.torch", started)


def _torch(check: str, pythons: Mapping[str, PythonFacts]) -> DoctorFinding:
    missing = {node: python.torch_error for node, python in pythons.items() if not python.torch}
    if missing:
        return warning(
            check, _by_value(missing), "scripts that train with it fail",
            "--python PATH, or --setup COMMAND that activates the environment that has it",
        )  # fmt: skip
    kinds = {node: f"torch {python.torch}" for node, python in pythons.items()}
    if len(set(kinds.values())) > 1:
        return problem(
            check, _by_value(kinds), "process groups of unlike versions hang or fail",
            "install one version into one environment on the shared filesystem",
        )  # fmt: skip
    longest, slowest = max((python.seconds, node) for node, python in pythons.items())
    return warn_unless(
        longest <= 30.0, check,
        f"{next(iter(kinds.values()))}, imported in {longest:.1f} s at most ({slowest})",
        "each start takes so long", "--start-method forkserver for restarts, or a filesystem nearer to the nodes",
    )  # fmt: skip


def judge_node_gpus(nodes: Mapping[str, GpusFacts]) -> Iterator[DoctorFinding]:
    if not any(each.given or each.nvml.devices for each in nodes.values()):
        if nodes:
            yield ok("gpu.count", "the job has no GPUs of NVIDIA")
        return
    own = {node: own_gpus(each.nvml.devices, given=each.given, visible=each.visible) for node, each in nodes.items()}
    kinds = {}
    for node, each in nodes.items():
        names = " and ".join(sorted({device.name for device in own[node] if device.name}))
        driver = f", driver {each.nvml.driver}" if each.nvml.driver else ""
        kinds[node] = f"{len(own[node]) or each.given or 0} × {names or 'GPU'}{driver}"
    yield warn_unless(
        len(set(kinds.values())) == 1, "gpu.count", _by_value(kinds),
        "the node with the fewest or the slowest sets the pace; unlike drivers fail on some nodes only",
        "--constraint, or a type in --gpus-per-node TYPE:N, for one kind of node",
    )  # fmt: skip
    unasked = [node for node, each in nodes.items() if not each.nvml.is_there]
    faults = {
        node: reason
        for node, each in nodes.items()
        if (reason := judge_gpus(each.nvml, given=each.given, visible=each.visible, least_errors=1).reason)
    }
    yield problem_unless(
        not faults, "gpu.errors",
        _by_value(faults) or (f"not known on {names_text(unasked)}: no NVML" if unasked else "NVML shows none"),
        "workers there fail, or are not started where the health check finds it",
        f"--exclude {names_text(faults)}, and a note to the site",
    )  # fmt: skip


def _by_value(values: Mapping[str, str]) -> str:
    """``3.11 on n[1-3], 3.9 on n4``: the most common value first."""
    nodes: dict[str, list[str]] = {}
    for node, value in values.items():
        nodes.setdefault(value, []).append(node)
    groups = sorted(nodes.items(), key=lambda item: -len(item[1]))
    return first_of([f"{value} on {names_text(names)}" for value, names in groups], _MOST)


_NOTICE_SECONDS = 45.0
_SLOWEST_SECONDS = 720.0
"""The longest time of the slowest node for the probes before: a first import of torch, for example."""


class JobMemoryFacts(Struct, frozen=True, kw_only=True):
    limit: str = ""
    """The memory's limit, for a reader; empty: the node's alone."""
    counts_oom_kills: bool = False


class NoticeFacts(Struct, frozen=True, kw_only=True):
    seconds: float | None = None
    """Seconds from the request, or from the last wait for the others before it, to the worker's notice, if it came."""
    error: str = ""


def probe_memory(site: ProbeSite) -> JobMemoryFacts | None:
    if not in_job(site.env):
        return None
    limits = [each.limited_by for each in sorted(memory_limits(), key=lambda each: each.free)]
    return JobMemoryFacts(limit=next(iter(limits), ""), counts_oom_kills=oom_kill_count() is not None)


def probe_notice(site: ProbeSite) -> NoticeFacts | None:
    if not in_job(site.env):
        return None
    site.barrier("before-notice", seconds=_SLOWEST_SECONDS)
    began = site.clock.monotonic()
    error = ""
    if site.rank == 0:
        job = JobId(site.env.get("SLURM_JOB_ID") or site.env["SLURM_JOBID"])
        try:
            SlurmClient(SubprocessRunner(site.env), site.clock, timeout=20.0).notify(job)
        except SlurmError as refusal:
            error = str(refusal)
    error = json.loads(site.gather("notice", json.dumps(error), seconds=30.0).get(0, '""'))
    if error:
        return NoticeFacts(error=error)
    while (waited := site.clock.monotonic() - began) < _NOTICE_SECONDS:
        if preemption_notice() is not None:
            return NoticeFacts(seconds=waited)
        site.clock.wait(site.stop, 0.1)
    return NoticeFacts()


def judge_job(memories: Mapping[str, JobMemoryFacts], notices: Mapping[str, NoticeFacts]) -> list[DoctorFinding]:
    return [
        *fold([(node, _memory(each)) for node, each in memories.items()]),
        *fold([(node, _notice(each)) for node, each in notices.items()]),
    ]


def _memory(memory: JobMemoryFacts) -> DoctorFinding:
    lacks = "" if memory.counts_oom_kills else ", and OOM kills are not counted"
    return warn_unless(
        bool(memory.limit) and not lacks, "nodes.memory", (memory.limit or "no limit of the job's memory") + lacks,
        "a worker out of memory takes others of the node with it, or its end is not explained",
        "--mem with what the workers need; ask the site about cgroups (ConstrainRAMSpace)",
    )  # fmt: skip


def _notice(notice: NoticeFacts) -> DoctorFinding:
    if notice.seconds is not None:
        return ok("nodes.signals", f"a signal to the batch script reached the workers within {ceil(notice.seconds)} s")
    return problem(
        "nodes.signals", notice.error or "a signal to the batch script did not reach the workers",
        "before a time limit or a preemption there is no time for a last checkpoint",
        "save often; ask the site whether scancel --signal --batch works on nodes",
    )  # fmt: skip


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
