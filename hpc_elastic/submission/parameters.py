"""The executor's parameters: submitit's names and Slurm's, and every option of ``hpc-elastic submit`` by its own. Pure.

They become the command line's options, and so have the same meaning, defaults, layers and checks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from hpc_elastic.errors import UsageError
from hpc_elastic.options.job_options import SBATCH_VARIABLES
from hpc_elastic.options.resolve import resolve
from hpc_elastic.options.run_request import ALL_OPTIONS
from hpc_elastic.options.table import Option, Parsed, nearest, texts_of
from hpc_elastic.options.worker_options import current_directory, removal

GENERIC = (
    "name", "timeout_min", "mem_gb", "nodes", "cpus_per_task", "gpus_per_node", "tasks_per_node", "stderr_to_stdout",
)  # fmt: skip
"""submitit's own, which any executor takes without a prefix."""

_SYNONYMS = {
    "name": "job_name",
    "timeout_min": "time",
    "mem_gb": "mem",
    "tasks_per_node": "ntasks_per_node",
    "nproc_per_node": "ntasks_per_node",
    "grace": "signal_delay_s",
    "num_gpus": "gpus_per_node",
}
_GIVEN_AS = {"ntasks_per_node": "nproc_per_node", "signal_delay_s": "grace", "gpus_per_task": "gpus_per_node"}
_AS_SBATCH_ARGUMENT = ("cpus_per_gpu", "mem_per_gpu", "mem_per_cpu", "wckey")
_OWN = (
    "min_nodes", "ntasks_per_node", "signal_delay_s", "gpus_per_task", "array_parallelism", "setup", "teardown",
    "stderr_to_stdout", "additional_parameters", "srun_args", "use_srun", "restart_on", "cluster",
    "max_num_timeout", "allow_local_runs_dir",
)  # fmt: skip
_NOT_HERE = frozenset(
    (
        "module", "no_python", "start_method", "python", "wait", "follow", "dry_run", "array", "output",
        "error", "runs_dir", "run_id", "chdir", "cluster", "nproc_per_node", "grace", "signal", "preemption_signal",
    )
)  # fmt: skip
"""Options of the command line that an executor has no use for, or has another name for."""

_LEFT_OUT = tuple(sorted(_NOT_HERE - {"python", "chdir", "cluster", "nproc_per_node", "grace"}))
_OPTION_OF = {option.dest: option for option in ALL_OPTIONS}
NAMES = frozenset(
    {dest for dest in _OPTION_OF if dest not in _NOT_HERE} | {*GENERIC, *_SYNONYMS, *_OWN, *_AS_SBATCH_ARGUMENT}
)

RESTART_ON = ("all", "infrastructure", "never")
DEFAULT_MINUTES = 5
DEFAULT_SIGNAL_DELAY = 90
DEFAULT_PARALLELISM = 256
_CLUSTERS = ("auto", "slurm", "local", "debug")


class UnknownParameterError(UsageError, ValueError, NameError, TypeError):
    """There is no such parameter. (submitit raises ValueError, or NameError, or in a constructor TypeError for it.)"""


def unknown(name: str) -> UnknownParameterError:
    if (why := removal(name)) is not None:
        return UnknownParameterError(f"{name} {why}")
    found = nearest(name, {known.replace("_", "-") for known in NAMES})
    hint = "; what sbatch has besides goes into additional_parameters"
    if found is not None:
        hint = f"; did you mean {found.replace('-', '_')}?"
    return UnknownParameterError(f"the executor has no parameter {name}{hint}")


def normalized(given: Mapping[str, Any]) -> dict[str, Any]:
    """The later one of two names for the same counts. None is "not given". Raises UsageError."""
    found: dict[str, Any] = {}
    for name, value in given.items():
        if name not in NAMES:
            raise unknown(name)
        if value is None:
            continue
        if name == "mem_gb":
            value = _memory(value)
        found[_SYNONYMS.get(name, name)] = value
    _check(found)
    return found


def _check(found: Mapping[str, Any]) -> None:
    if not found.get("use_srun", True):
        raise UsageError("use_srun=False: the agents are started with srun, one on each node; leave it out")
    policy = found.get("restart_on", "all")
    if policy not in RESTART_ON:
        raise UsageError(f"restart_on={policy!r}: give one of {', '.join(RESTART_ON)}")
    if found.get("cluster", "auto") not in _CLUSTERS:
        raise UsageError(f"cluster={found['cluster']!r}: give one of {', '.join(_CLUSTERS)}")
    for name in ("setup", "teardown"):
        lines = found.get(name, ())
        if isinstance(lines, str) or not all(isinstance(line, str) for line in lines):
            raise UsageError(f"{name}={lines!r}: give a list of shell commands")
    for name in ("max_num_timeout", "signal_delay_s", "array_parallelism"):
        value = found.get(name, 1)
        least = 0 if name == "max_num_timeout" else 1
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise UsageError(f"{name}={value!r}: give a whole number from {least}")


def parsed_options(parameters: Mapping[str, Any], *, job_name: str, env: Mapping[str, str], slurm: bool) -> Parsed:
    """sbatch's own variables count with `slurm`; `job_name` is the default. Raises UsageError."""
    values: dict[str, tuple[str, ...]] = {}
    sources: dict[str, str] = {}
    for name, option, value in _options(parameters):
        texts = _texts(name, option, value)
        if texts:
            values[option.dest] = (*values.get(option.dest, ()), *texts) if option.repeatable else texts
            sources[option.dest] = f"{name} ="
    given = Parsed(values=values, sources=sources, command=("hpc_elastic.submission.worker",))
    here = current_directory(env)
    resolved = resolve(
        given, ALL_OPTIONS, env=env, here=here, left_out=_LEFT_OUT, yields=SBATCH_VARIABLES if slurm else None
    ).parsed
    found = dict(resolved.values)
    found.setdefault("time", (str(DEFAULT_MINUTES),))
    found.setdefault("grace", (str(DEFAULT_SIGNAL_DELAY),))
    found.setdefault("nproc_per_node", ("1",))
    found.setdefault("job_name", (job_name,))
    found["module"] = ("1",)
    return replace(resolved, values=found)


def _options(found: Mapping[str, Any]) -> Iterator[tuple[str, Option, Any]]:
    tasks = found.get("ntasks_per_node", 1)
    per_task = max(1, tasks) if isinstance(tasks, int) else 1
    for name, value in found.items():
        if name in _AS_SBATCH_ARGUMENT:
            yield name, _OPTION_OF["sbatch_args"], [f"--{name.replace('_', '-')}={value}"]
        elif name == "time":
            yield name, _OPTION_OF["time"], _minutes(value)
        elif name in _GIVEN_AS or (name in _OPTION_OF and name not in {"nodes", *_NOT_HERE}):
            if isinstance(value, int) and name in ("cpus_per_task", "gpus_per_task"):
                value *= per_task  # submitit's tasks are our workers; Slurm's task is an agent, one on each node
            elif isinstance(value, int) and name == "ntasks_per_node":
                value = per_task
            yield name, _OPTION_OF[_GIVEN_AS.get(name, name)], value
    nodes = _nodes(found)
    if nodes is not None:
        yield "nodes", _OPTION_OF["nodes"], nodes
    yield from _additional(found.get("additional_parameters") or {})
    yield from _restarts(found)


def _additional(given: Mapping[str, Any]) -> Iterator[tuple[str, Option, Any]]:
    for key, value in given.items():
        dest = key.replace("-", "_")
        source = f"additional_parameters {key}"
        if dest in _OPTION_OF and dest not in ("sbatch_args", "signal", "output", "error", "array"):
            yield source, _OPTION_OF[dest], value
        else:
            flag = f"--{key.replace('_', '-')}"
            yield source, _OPTION_OF["sbatch_args"], [flag if value is True else f"{flag}={value}"]


def _restarts(found: Mapping[str, Any]) -> Iterator[tuple[str, Option, Any]]:
    policy = found.get("restart_on", "all")
    if policy == "never":
        for dest in ("max_restarts", "max_requeues"):
            yield "restart_on", _OPTION_OF[dest], 0
    elif "max_num_timeout" in found and "max_requeues" not in found:
        yield "max_num_timeout", _OPTION_OF["max_requeues"], max(3, found["max_num_timeout"])


def _nodes(found: Mapping[str, Any]) -> str | None:
    nodes, least = found.get("nodes"), found.get("min_nodes")
    if isinstance(nodes, Sequence) and not isinstance(nodes, str):
        nodes = "-".join(map(str, nodes))
    if least is None:
        return None if nodes is None else str(nodes)
    return str(least) if nodes is None else f"{least}-{str(nodes).replace(':', '-').rpartition('-')[2]}"


def _texts(name: str, option: Option, value: Any) -> tuple[str, ...]:
    if option.dest == "requeue" and isinstance(value, bool):
        return ("1" if value else "0",)
    is_many = isinstance(value, Mapping | Sequence) and not isinstance(value, str)
    if option.repeatable and not is_many:
        value = [str(value)]
    elif isinstance(value, Mapping) and not option.repeatable:
        mark = ":" if option.dest == "section_timeouts" else "="
        value = ",".join(f"{key}{mark}{item}" for key, item in value.items())
    elif is_many and not option.repeatable:
        value = ",".join(map(str, value))
    return texts_of(option, value, called=name)


def _minutes(value: Any) -> str:
    """submitit counts minutes; a text is sbatch's."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if value <= 0:
        raise UsageError(f"timeout_min={value}: give minutes, more than 0")
    seconds = max(1, round(value * 60))
    return str(seconds // 60) if seconds % 60 == 0 else f"{seconds // 60}:{seconds % 60:02d}"


def _memory(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise UsageError(f"mem_gb={value!r}: give gigabytes, as a number")
    return f"{int(value)}G" if value == int(value) else f"{int(value * 1024)}M"
