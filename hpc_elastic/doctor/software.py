"""A node's software and GPUs: the workers' interpreter, torch, and NVML's view. The probes, and their judges."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator, Mapping

from msgspec import Struct

from hpc_elastic.agent.health import GPU_SECONDS, GpuFacts, judge_gpus, own_gpus
from hpc_elastic.agent.health_gpu import from_json
from hpc_elastic.agent.worker_environment import enter_container
from hpc_elastic.base.self_command import module_command, source_command, source_environment
from hpc_elastic.base.text import clean_line, first_of
from hpc_elastic.doctor.findings import DoctorFinding, ok, problem, problem_unless, warn_unless, warning
from hpc_elastic.doctor.probe_site import ProbeSite
from hpc_elastic.run.spec import Container, Runtime
from hpc_elastic.slurm.job_environment import JobEnvironment, JobEnvironmentError, in_job
from hpc_elastic.slurm.notation import names_text

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
    argv = module_command("hpc_elastic.agent.health_gpu", "main")
    try:
        done = subprocess.run(
            argv, env=dict(env), cwd="/", stdin=subprocess.DEVNULL, capture_output=True, timeout=GPU_SECONDS
        )
        nvml = from_json(done.stdout)
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
