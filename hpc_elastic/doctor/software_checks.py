"""Judges what the nodes' software and GPUs mean for a run, from what was measured on each. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from hpc_elastic.agent.health import GpuDevice, judge_gpus, own_gpus
from hpc_elastic.base.text import duration, first_of, plural
from hpc_elastic.doctor.findings import Finding, ok, problem, warning
from hpc_elastic.doctor.node_facts import NodeFacts
from hpc_elastic.doctor.software_probe import NodeGpus, PythonFacts, SoftwareFacts, shown_environment
from hpc_elastic.run.container import Container
from hpc_elastic.slurm.notation import names_text

_SLOW_IMPORT = 30.0
_SLOW_NODE = 3.0
"""So many times the other nodes' import is slow."""
_OLD_ERROR = 7 * 24 * 3600.0
_MOST = 4
"""Names that one line shows."""
_OF_THE_JOB = (
    *("SLURM", "SBATCH_", "SRUN_", "PMI", "PRTE_", "HPC_ELASTIC_", "TORCHELASTIC_", "TORCH_", "PET_"),
    *("XDG_SESSION", "DBUS_", "SSH_", "KRB5", "LC_", "LS_COLORS"),
)
_OF_THE_WORKER = frozenset(
    (
        *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK"),
        *("ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"),
        *("ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ZE_AFFINITY_MASK", "ENVIRONMENT", "HOSTNAME", "HOST"),
        *("PWD", "OLDPWD", "SHLVL", "_", "TERM", "COLUMNS", "LINES", "DISPLAY", "WINDOWID", "XAUTHORITY", "TMPDIR"),
        *("NCCL_RAS_ADDR", "PYTHONFAULTHANDLER"),
    )
)
"""Variables that differ by their nature: between nodes, or between a shell and a job."""
_DECISIVE = (
    *("PATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "CONDA_PREFIX", "CUDA_HOME"),
    *("LOADEDMODULES", "HOME"),
)
"""They decide which programs, packages and libraries a script gets."""

# -- software ------------------------------------------------------------------------------------------------------


def judge_software(
    facts: Mapping[str, NodeFacts], *, shell: Mapping[str, str], container: Container | None
) -> list[Finding]:
    """The interpreter, its packages, torch, the environment and the GPUs of nodes, alike or not.

    Args:
        facts: By node.
        shell: The environment of the process that submitted.
        container: In which the workers run; None: on the host.
    """
    software = {node: each.software for node, each in facts.items() if each.software is not None}
    gpus = {node: each.gpus for node, each in facts.items() if each.gpus is not None}
    return [*_software(software, shell, container), *_gpus(gpus)]


def _software(
    nodes: Mapping[str, SoftwareFacts], shell: Mapping[str, str], container: Container | None
) -> Iterator[Finding]:
    if not nodes:
        return
    pythons = {node: facts.python for node, facts in nodes.items() if facts.python is not None}
    if pythons:
        yield from _pythons(pythons, container)
    else:
        yield warning(
            "nodes.container", f"{container.image if container else 'the image'} was not tried: srun alone starts it",
            "that it can't be started is seen at the start of a run", "hpc-elastic rehearse, on the cluster",
        )  # fmt: skip
    yield _between_nodes({node: facts.environment for node, facts in nodes.items()})
    yield _against_shell({node: facts.environment for node, facts in nodes.items()}, shell)


def _pythons(pythons: Mapping[str, PythonFacts], container: Container | None) -> Iterator[Finding]:
    yield _start(pythons, container)
    started = {node: python for node, python in pythons.items() if not python.error}
    if any(python.packages for python in started.values()):
        yield _packages(started)
    if started:
        yield _torch(started)


def _start(pythons: Mapping[str, PythonFacts], container: Container | None) -> Finding:
    """Does the workers' interpreter start everywhere, and is it one?"""
    where = f"{container.image}: " if container is not None else ""
    check = "nodes.container" if container is not None else "nodes.python"
    failed = {node: python.error for node, python in pythons.items() if python.error}
    if failed:
        is_there = "every node must have the runtime (--setup 'module load ...') and the image, the image --python"
        return problem(
            check, where + _by_value(failed), "workers can't be started there",
            is_there if container is not None else "--python with a path that every node has, or --setup COMMAND",
        )  # fmt: skip
    kinds = {node: f"Python {python.version} ({python.executable})" for node, python in pythons.items()}
    if len(set(kinds.values())) > 1:
        return warning(
            check, where + _by_value(kinds), "ranks run different programs: what works on one node may fail on another",
            "one environment on the shared filesystem, by --python PATH or --setup COMMAND",
        )  # fmt: skip
    return ok(check, f"{where}{next(iter(kinds.values()))} on {_all(kinds)}")


def _packages(pythons: Mapping[str, PythonFacts]) -> Finding:
    names = sorted({name for python in pythons.values() for name in python.packages}, key=str.lower)
    differing = []
    for name in names:
        versions = {node: python.packages.get(name, "missing") for node, python in pythons.items()}
        if len(set(versions.values())) > 1:
            differing.append(f"{name} {_by_value(versions)}")
    if differing:
        return warning(
            "nodes.packages", first_of(differing, _MOST, noun="package"),
            "ranks may not understand each other's pickles and checkpoints, or fail on some nodes only",
            "install into one environment on the shared filesystem",
        )  # fmt: skip
    return ok("nodes.packages", f"{plural(len(names), 'package')}, of the same versions on all nodes")


def _torch(pythons: Mapping[str, PythonFacts]) -> Finding:
    missing = {node: python.torch_error for node, python in pythons.items() if not python.torch}
    if missing:
        return warning(
            "nodes.torch", _by_value(missing), "scripts that train with it fail",
            "--python PATH, or --setup COMMAND that activates the environment that has it",
        )  # fmt: skip
    kinds = {node: _torch_text(python) for node, python in pythons.items()}
    if len(set(kinds.values())) > 1:
        return problem(
            "nodes.torch", _by_value(kinds), "process groups of unlike versions hang or fail",
            "install one version into one environment on the shared filesystem",
        )  # fmt: skip
    first = sorted((python.first_import, node) for node, python in pythons.items())
    again = max(python.next_import for python in pythons.values())
    (middle, _), (longest, slowest) = first[(len(first) - 1) // 2], first[-1]
    times = f"imported in {longest:.1f} s at first, again in {again:.1f} s"
    what = next(iter(kinds.values()))
    if again > _SLOW_IMPORT:
        return warning(
            "nodes.torch", f"{what}, {times}", "each restart of the workers takes so long", "--start-method forkserver"
        )  # fmt: skip
    if longest > _SLOW_IMPORT:
        return warning(
            "nodes.torch", f"{what}, {times} (on {slowest})", "the first start takes so long, also on each new node",
            "put the environment on a filesystem nearer to the nodes",
        )  # fmt: skip
    if longest > _SLOW_NODE * middle and longest - middle > _SLOW_NODE:
        return warning(
            "nodes.torch", f"{what}, imported in {longest:.1f} s on {slowest}, in {middle:.1f} s on others",
            "all nodes wait for the slowest at each start", f"look at {slowest}, or leave it out: --exclude {slowest}",
        )  # fmt: skip
    return ok("nodes.torch", f"{what}, {times}")


def _torch_text(python: PythonFacts) -> str:
    built = f"CUDA {python.cuda}" if python.cuda else "CPUs"
    return f"torch {python.torch} for {built}{f', NCCL {python.nccl}' if python.nccl else ''}"


def _between_nodes(environments: Mapping[str, Mapping[str, str]]) -> Finding:
    names = sorted({name for environment in environments.values() for name in environment if not _is_own(name)})
    differing = []
    for name in names:
        values = {node: environment.get(name) for node, environment in environments.items()}
        if len(set(values.values())) > 1:
            shown = {node: _value(value) for node, value in values.items()}
            differing.append(name if len(set(shown.values())) == 1 else f"{name} is {_by_value(shown)}")
    if differing:
        return warning(
            "nodes.environment", f"differs between nodes: {first_of(differing, _MOST, noun='variable')}",
            "ranks may find other programs and libraries, or choose other network interfaces",
            "set them in --setup, which is run on every node",
        )  # fmt: skip
    return ok("nodes.environment", f"{plural(len(names), 'variable')} of the same value on all nodes")


def _against_shell(environments: Mapping[str, Mapping[str, str]], shell: Mapping[str, str]) -> Finding:
    """Did what is loaded and activated in this shell reach the workers?"""
    here = shown_environment(shell)
    there = next(iter(environments.values()))
    names = sorted(name for name in {*here, *there} if not _is_own(name) and here.get(name) != there.get(name))
    lost = [name for name in names if name not in there]
    set_there = [name for name in names if name not in here]
    changed = [name for name in names if name in here and name in there]
    others = ", ".join(
        f"{words} {first_of(found, _MOST, noun='variable')}"
        for words, found in (("without", lost), ("changed", changed), ("added", set_there))
        if found
    )
    decisive = [name for name in _DECISIVE if name in lost or (name in changed and not _is_extended(name, here, there))]
    if decisive:
        details = [
            f"{name} is {_value(there.get(name))} there, {_value(here.get(name))} here" for name in decisive[:_MOST]
        ]
        return warning(
            "nodes.shell", "; ".join(details), "workers get other programs, packages or libraries than this shell",
            "--setup with what you load and activate here; or sbatch's --export as by default (ALL)",
        )  # fmt: skip
    return ok("nodes.shell", f"as in this shell{f', but {others}' if others else ''}")


def _is_extended(name: str, here: Mapping[str, str], there: Mapping[str, str]) -> bool:
    """Whether a list of folders has all that it has here, in this order, and some more."""
    mine = [part for part in here[name].split(":") if part]
    more = iter(there[name].split(":"))
    return name.endswith(("PATH", "MODULES", "PRELOAD")) and all(part in more for part in mine)


def _is_own(name: str) -> bool:
    return name in _OF_THE_WORKER or name.startswith(_OF_THE_JOB) or name.startswith("BASH_FUNC_")


def _value(value: str | None) -> str:
    if value is None:
        return "not set"
    if value.startswith("sha256:"):
        return "another value"
    return value if len(value) <= 60 else f"{value[:28]}...{value[-28:]}"


# -- GPUs ----------------------------------------------------------------------------------------------------------


def _gpus(nodes: Mapping[str, NodeGpus]) -> Iterator[Finding]:
    """Are they there, alike, fit, at full speed, and near to the job's CPUs?"""
    if not any(facts.given or facts.has_devices or facts.nvml.devices for facts in nodes.values()):
        if nodes:
            yield ok("gpu.count", "the job has no GPUs of NVIDIA")
        return
    own = {
        node: own_gpus(facts.nvml.devices, given=facts.given, visible=facts.visible) for node, facts in nodes.items()
    }
    without = [node for node, facts in nodes.items() if not facts.nvml.is_there]
    if without:
        yield warning(
            "gpu.nvml", f"no libnvidia-ml.so.1 on {names_text(without)}", "a broken GPU is found by its failures alone",
            "ask the site for the libraries of NVIDIA's driver on the nodes",
        )  # fmt: skip
    else:
        yield ok("gpu.nvml", "answers on all nodes")
    yield _gpu_kinds(nodes, own)
    if len(without) < len(nodes):
        yield _gpu_errors(nodes)
        yield _clocks(own)
    if any(facts.has_devices for facts in nodes.values()):
        yield _driver_log(nodes)
        yield _gpu_binding(nodes)


def _gpu_kinds(nodes: Mapping[str, NodeGpus], own: Mapping[str, Sequence[GpuDevice]]) -> Finding:
    kinds = {}
    for node, facts in nodes.items():
        names = sorted({device.name for device in own[node] if device.name})
        driver = f", driver {facts.nvml.driver}" if facts.nvml.driver else ""
        kinds[node] = f"{len(own[node]) or facts.given or 0} × {' and '.join(names) or 'GPU'}{driver}"
    if len(set(kinds.values())) > 1:
        return warning(
            "gpu.count", _by_value(kinds),
            "the node with the fewest or the slowest sets the pace; unlike drivers fail on some nodes only",
            "--constraint, or a type in --gpus-per-node TYPE:N, for one kind of node",
        )  # fmt: skip
    return ok("gpu.count", f"{next(iter(kinds.values()))} on {_all(kinds)}")


def _gpu_errors(nodes: Mapping[str, NodeGpus]) -> Finding:
    reasons = {
        node: judge_gpus(facts.nvml, given=facts.given, visible=facts.visible, least_errors=1).reason
        for node, facts in nodes.items()
    }
    faults = {node: reason for node, reason in reasons.items() if reason}
    if faults:
        return problem(
            "gpu.errors", _by_value(faults), "workers there fail, or are not started where the health check finds it",
            f"--exclude {names_text(faults)}, and a note to the site",
        )  # fmt: skip
    return ok("gpu.errors", "NVML reports none")


def _driver_log(nodes: Mapping[str, NodeGpus]) -> Finding:
    texts = {
        node: ", ".join(
            f"{error.says} {duration(error.ago)} ago" for error in facts.driver_errors if error.ago < _OLD_ERROR
        )
        for node, facts in nodes.items()
    }
    recent = {node: text for node, text in texts.items() if text}
    if recent:
        return warning(
            "gpu.xid", _by_value(recent), "the GPU may fail again",
            f"--exclude {names_text(recent)}, and a note to the site",
        )  # fmt: skip
    unread = {node: facts.log_error for node, facts in nodes.items() if facts.log_error}
    if unread:
        return ok("gpu.xid", f"not known: the kernel's log can't be read ({_by_value(unread)})")
    return ok("gpu.xid", "the kernel's logs have none of the last week that makes a GPU suspect")


def _clocks(own: Mapping[str, Sequence[GpuDevice]]) -> Finding:
    slowed = {
        node: ", ".join(f"GPU {device.index} by {' and '.join(device.slowed)}" for device in devices if device.slowed)
        for node, devices in own.items()
    }
    slowed = {node: text for node, text in slowed.items() if text}
    if slowed:
        return warning(
            "gpu.clocks", f"slowed: {_by_value(slowed)}", "all ranks wait for the slowest GPU at each step",
            f"--exclude {names_text(slowed)}, and a note to the site (cooling, power)",
        )  # fmt: skip
    return ok("gpu.clocks", "no GPU is slowed by heat or its power supply")


def _gpu_binding(nodes: Mapping[str, NodeGpus]) -> Finding:
    far = {node: ", ".join(facts.far) for node, facts in nodes.items() if facts.far}
    if far:
        return warning(
            "gpu.binding", f"the job has no CPU of the NUMA node of GPU {_by_value(far)}",
            "copies between host and GPU cross the sockets", "--gres-flags=enforce-binding, more CPUs, or --exclusive",
        )  # fmt: skip
    return ok("gpu.binding", "the job has CPUs near to each GPU")


# -- text ----------------------------------------------------------------------------------------------------------


def _by_value(values: Mapping[str, str]) -> str:
    """``3.11 on n[1-3], 3.9 on n4``: the most common value first."""
    nodes: dict[str, list[str]] = {}
    for node, value in values.items():
        nodes.setdefault(value, []).append(node)
    groups = sorted(nodes.items(), key=lambda item: -len(item[1]))
    return first_of([f"{value} on {names_text(names)}" for value, names in groups], _MOST)


def _all(nodes: Mapping[str, object]) -> str:
    return f"all {len(nodes)} nodes" if len(nodes) > 1 else next(iter(nodes))
