"""Measures the software of one host: the workers' interpreter, the environment that reached this process, the GPUs.

What may hang or crash runs in a process of its own: the interpreter (on the host or in the container that was asked
for, through the command line with which an agent starts a worker there) and NVML.
"""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from hpc_elastic.agent.container import enter_container
from hpc_elastic.agent.health import GPU_SECONDS, GpuFacts
from hpc_elastic.agent.health_gpu import from_json
from hpc_elastic.agent.numa_binding import Machine, read_machine
from hpc_elastic.base.digests import sha256
from hpc_elastic.base.self_command import module_command, source_command
from hpc_elastic.base.text import clean_line
from hpc_elastic.doctor.probe_site import ProbeSite
from hpc_elastic.failures.patterns import find_pattern
from hpc_elastic.run.container import Container, Runtime
from hpc_elastic.slurm.job_environment import JobEnvironment, JobEnvironmentError, in_job

IMPORT_SECONDS = 300.0
"""For one start of the interpreter with one import of torch."""
_NVIDIA = "/dev/nvidiactl"
_KERNEL_LOG = Path("/dev/kmsg")
_RECORD_BYTES = 8192
"""The kernel gives one record a time, and none to a smaller buffer (Documentation/ABI/testing/dev-kmsg)."""
_SHOWN = (
    *("PATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "CONDA_PREFIX", "HOME"),
    *("TMPDIR", "LOADEDMODULES", "CUDA_HOME", "CUDA_VISIBLE_DEVICES", "LANG", "USER"),
)
_SHOWN_PREFIXES = ("NCCL_", "GLOO_", "UCX_", "FI_", "OMPI_", "MKL_", "KMP_")
"""Variables whose values a finding may show. Of the others, which may be secrets, a digest is kept."""
# Python 3.8 and later, the standard library alone: it runs in the workers' interpreter.
_LOOK = """
import json, time
facts = {"executable": sys.executable, "version": sys.version.split()[0]}
began = time.monotonic()
try:
    import torch
    facts["torch"] = str(torch.__version__)
    facts["seconds"] = time.monotonic() - began
    facts["cuda"] = str(torch.version.cuda or getattr(torch.version, "hip", None) or "")
    facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version())) if facts["cuda"] else ""
except BaseException as error:
    key = "nccl_error" if "torch" in facts else "torch_error"
    facts[key] = "%s: %s" % (type(error).__name__, error)
try:
    from importlib.metadata import distributions
    facts["packages"] = {str(each.metadata["Name"]): str(each.version) for each in distributions()}
except Exception as error:
    facts["packages"] = {}
sys.__stdout__.write("\\n" + json.dumps(facts) + "\\n")
"""

_PID = re.compile(r"\[\d+\]")
_TEXTS = ("executable", "version", "torch", "torch_error", "cuda", "nccl")


class PythonFacts(Struct, frozen=True, kw_only=True):
    """The workers' interpreter, as a process of its own found it."""

    executable: str = ""
    version: str = ""
    error: str = ""
    """Why it can't be started (or the container not); empty: it can."""
    packages: Mapping[str, str] = field(default_factory=dict)
    """Distribution → version."""
    torch: str = ""
    """Its version; empty: it can't be imported."""
    torch_error: str = ""
    cuda: str = ""
    """That torch was built for (or ROCm); empty: for CPUs."""
    nccl: str = ""
    first_import: float = 0.0
    """Seconds of ``import torch``: with its files as they lay, on this host's disk cache or not."""
    next_import: float = 0.0
    """The same in another process, right after it: its files are in the cache now."""


class SoftwareFacts(Struct, frozen=True, kw_only=True):
    """What a worker on this node has."""

    python: PythonFacts | None = None
    """None: it is in an image that Pyxis starts, in a step of its own alone."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """As it reached this process: the values of some variables, of the others a digest."""


class DriverError(Struct, frozen=True, kw_only=True):
    """An Xid in the kernel's log."""

    says: str
    ago: float
    """Seconds since the last one of its number."""


class NodeGpus(Struct, frozen=True, kw_only=True):
    """The GPUs that this process' job has on this node."""

    nvml: GpuFacts
    given: int | None = None
    """How many Slurm gave; None: there is no Slurm."""
    visible: str | None = None
    """CUDA_VISIBLE_DEVICES."""
    far: tuple[str, ...] = ()
    """GPUs whose NUMA node has no CPU of this job."""
    has_devices: bool = False
    """Whether NVIDIA's driver is loaded here."""
    driver_errors: tuple[DriverError, ...] = ()
    """Of the kernel's log, those that make the hardware suspect."""
    log_error: str = ""
    """Why the kernel's log can't be read."""


# -- the interpreter and the environment ---------------------------------------------------------------------------


def probe_software(site: ProbeSite) -> SoftwareFacts:
    """What a worker of this run has on this node. All nodes start the interpreter at once, as those of a run do."""
    site.barrier("software")
    environment, container = shown_environment(site.env), site.settings.container
    if container is not None and container.image.runtime is Runtime.PYXIS:
        return SoftwareFacts(environment=environment)
    python = look_at_python(site.settings.python, site.env, cwd=os.getcwd(), container=container)
    return SoftwareFacts(python=python, environment=environment)


def look_at_python(
    python: str,
    env: Mapping[str, str],
    *,
    cwd: str,
    container: Container | None = None,
    seconds: float = IMPORT_SECONDS,
) -> PythonFacts:
    """Start an interpreter twice and have it import torch.

    Args:
        python: Its path, or a name in PATH; in a container, that of the image.
        env: The workers'.
        cwd: The run's working directory.
        container: Where it runs, by another runtime than Pyxis; None: on this host.
        seconds: For each of the two.
    """
    argv, environ = source_command(python, _LOOK), dict(env)
    if container is not None:
        has_nvidia = os.path.exists(_NVIDIA)
        argv, environ = enter_container(container, argv, env, local_rank=0, cwd=cwd, has_nvidia=has_nvidia)
    first = _start(argv, environ, seconds, cwd=cwd)
    if isinstance(first, str):
        return PythonFacts(error=first)
    again = _start(argv, environ, seconds, cwd=cwd) if first.get("torch") else first
    imports = [float(each.get("seconds", 0.0)) for each in (first, again) if not isinstance(each, str)]
    texts = {name: clean_line(str(first.get(name, "")))[:300] for name in _TEXTS}
    packages = first.get("packages")
    return PythonFacts(
        **texts,
        packages={str(name): str(version) for name, version in packages.items()} if isinstance(packages, dict) else {},
        first_import=imports[0],
        next_import=imports[-1],
    )


def _start(argv: Sequence[str], env: Mapping[str, str], seconds: float, *, cwd: str) -> dict[str, Any] | str:
    """What one start printed, or why there was none."""
    try:
        done = subprocess.run(
            argv, env=dict(env), cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return f"{argv[0]} has not answered for {seconds:g} s"
    except OSError as error:
        return f"{error.filename or argv[0]}: {error.strerror or error}"
    lines = done.stdout.decode(errors="replace").strip().splitlines()
    try:
        found = json.loads(lines[-1])
        return found if isinstance(found, dict) else f"{argv[0]} is no Python"
    except (ValueError, IndexError):
        said = done.stderr.decode(errors="replace").strip().splitlines()
        how = f"ended with {done.returncode}" if done.returncode else "is no Python"
        # A runtime's own number of its process would make one reason of each node another.
        return _PID.sub("", clean_line(f"{argv[0]} {how}{f': {said[-1]}' if said else ''}"))[:300]


def shown_environment(env: Mapping[str, str]) -> dict[str, str]:
    """The variables, with the values of those that are no secrets, and a digest of the others'."""
    return {
        name: value if _is_shown(name) else f"sha256:{sha256(value.encode(errors='replace')).hex()[:16]}"
        for name, value in env.items()
    }


def _is_shown(name: str) -> bool:
    return name in _SHOWN or name.startswith(_SHOWN_PREFIXES)


# -- GPUs ----------------------------------------------------------------------------------------------------------


def probe_gpus(site: ProbeSite) -> NodeGpus:
    """Ask Slurm's variables, NVML, the kernel's topology and its log."""
    env = site.env
    try:
        given = JobEnvironment.from_env(env).node.gpus if in_job(env) else None
    except JobEnvironmentError:
        given = None
    text, log_error = read_kernel_log(_KERNEL_LOG)
    return NodeGpus(
        nvml=_ask_nvml(env),
        given=given,
        visible=env.get("CUDA_VISIBLE_DEVICES"),
        far=far_gpus(read_machine(env, os.sched_getaffinity(0))),
        has_devices=os.path.exists(_NVIDIA),
        driver_errors=driver_errors(text, uptime=time.monotonic()),
        log_error=log_error,
    )


def _ask_nvml(env: Mapping[str, str]) -> GpuFacts:
    argv = module_command("hpc_elastic.agent.health_gpu", "main")
    try:
        done = subprocess.run(
            argv, env=dict(env), cwd="/", stdin=subprocess.DEVNULL, capture_output=True, timeout=GPU_SECONDS
        )
    except subprocess.TimeoutExpired:
        return GpuFacts(error=f"it has not answered for {GPU_SECONDS:g} s")
    except OSError as error:
        return GpuFacts(error=error.strerror or str(error))
    return from_json(done.stdout)


def far_gpus(machine: Machine) -> tuple[str, ...]:
    """Those on a NUMA node of which the job has no CPU."""
    return tuple(gpu.bus_id for gpu in machine.gpus if gpu.node is not None and gpu.node not in machine.nodes)


def driver_errors(log: str, *, uptime: float) -> tuple[DriverError, ...]:
    """The Xids that make a GPU or its node suspect; what a script did to its GPU by itself is left out.

    Args:
        log: Records of /dev/kmsg: ``PRIORITY,NUMBER,MICROSECONDS,FLAGS;TEXT``.
        uptime: Seconds on the clock of the records.
    """
    found: dict[str, float] = {}
    for line in log.splitlines():
        head, _, text = line.partition(";")
        pattern = find_pattern(text) if "xid (" in text.lower() else None
        stamp = head.split(",")[2:3]
        if pattern is not None and pattern.node_suspect and stamp and stamp[0].isdecimal():
            found[pattern.says] = uptime - int(stamp[0]) / 1e6
    return tuple(DriverError(says=says, ago=max(0.0, ago)) for says, ago in found.items())


def read_kernel_log(path: Path) -> tuple[str, str]:
    """What the kernel has kept since its start; and why that can't be read (many sites let root alone)."""
    found: list[bytes] = []
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        return "", f"{path}: {error.strerror or error}"
    try:
        while record := os.read(handle, _RECORD_BYTES):
            found.append(record)
    except OSError as error:  # EAGAIN: that was the last one
        if error.errno not in (errno.EAGAIN, errno.EPIPE):
            return "", f"{path}: {error.strerror or error}"
    finally:
        os.close(handle)
    return b"".join(found).decode(errors="replace"), ""
