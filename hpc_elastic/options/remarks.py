"""The plan of a run in a few lines, and its probable mistakes.

A refusal is a `UsageError`; a remark is one line, after which the run goes on: what it is about may be meant.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from hpc_elastic.base.self_command import ask_interpreter
from hpc_elastic.base.text import plural
from hpc_elastic.errors import UsageError
from hpc_elastic.options.sbatch import SbatchOptions
from hpc_elastic.options.table import Option, Parsed
from hpc_elastic.run.spec import EntryKind, RunSpec, Runtime

_LAUNCHERS = ("torchrun", "deepspeed", "mpirun", "mpiexec", "horovodrun", "srun")
_LAUNCHING_MODULES = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")
_ASK_SECONDS = 5.0


def plan_text(spec: RunSpec, run_dir: Path, options: SbatchOptions | None = None) -> str:
    """Nodes and workers, what they run, where, what happens at a failure; without `options` on this machine."""
    nodes = str(spec.max_nodes) if spec.min_nodes == spec.max_nodes else f"{spec.min_nodes}-{spec.max_nodes}"
    nodes += f" and {plural(spec.spares, 'spare')}" if spec.spares else ""
    nodes += f", for each task of --array {spec.array}" if spec.array else ""
    number = spec.nproc_per_node
    workers = f"workers on each: as many as it has {number.upper()}s"
    if number.isdigit():
        workers = f"{plural(int(number), 'worker')} on each"
    elif number == "auto":
        workers = "workers on each: as many as Slurm gave it GPUs, else 1"
    where = "this machine"
    if options is not None:
        partition = f"partition {options.partition}" if options.partition else "the default partition"
        limit = f"time limit {options.time}" if options.time else "the partition's time limit"
        where = f"Slurm, {partition}, {limit}"
    restarts = f"up to {plural(spec.max_restarts, 'restart')} within the job" if spec.max_restarts else "no restart"
    has_requeues = spec.requeue and spec.max_requeues
    requeues = f", then up to {plural(spec.max_requeues, 'requeue')}" if has_requeues else "; no requeue"
    rows = (
        ("nodes", f"{nodes}; {workers}"),
        ("runs", spec.command),
        ("where", f"{where}, in {spec.cwd}"),
        *([("around it", spec.around)] if spec.around else []),
        ("on failure", restarts + requeues),
        ("run directory", str(run_dir)),
    )
    return "".join(f"{label:<16}{text}\n" for label, text in rows)


def remarks(parsed: Parsed, spec: RunSpec, options: Sequence[Option], *, env: Mapping[str, str]) -> Iterator[str]:
    by_name = {name: option for option in options for name in option.names if name.startswith("--")}
    for word in parsed.command[1:]:
        option = by_name.get(word.partition("=")[0].replace("_", "-")) if word.startswith("--") else None
        if option is not None and option.dest not in parsed.values:
            yield (
                f"{word.partition('=')[0]} comes after {parsed.command[0]}, so it is an argument of the script; "
                f"if it is meant for hpc-elastic, write it before {parsed.command[0]}"
            )
    export = parsed.get("export")
    names = [name.partition("=")[0] for name in (export or "").split(",")]
    if export is not None and not any(name in ("ALL", "NONE", "NIL") for name in names):
        yield (
            f"{parsed.source('export', '--export')} {export}: Slurm then keeps everything else of your environment "
            f"(PATH, a conda environment) from the job; to add to it write ALL,{export}"
        )
    if "--no-requeue" in parsed.all("sbatch_args"):
        yield (
            "--sbatch-arg --no-requeue: the job can't be requeued, so the run would go on in follow-on jobs; "
            "where no further attempt is wanted, give --no-requeue itself"
        )
    if nested := _nested_launcher(spec):
        yield (
            f"{nested} starts workers of its own inside each worker here; give its script to hpc-elastic instead, "
            "or add --nproc-per-node 1 if that is meant"
        )
    yield from _container(parsed, spec, env)
    yield from _interpreter(parsed, spec, env)
    if spec.health_check:
        program = spec.health_check[0]
        if _found(program, spec, env) is None:
            yield from _missing(f"{parsed.source('health_check', '--health-check')} {program}", program, spec)


def _found(program: str, spec: RunSpec, env: Mapping[str, str]) -> str | None:
    return shutil.which(os.path.join(spec.cwd, program) if "/" in program else program, path=env.get("PATH"))


def _nested_launcher(spec: RunSpec) -> str:
    entry = spec.entrypoint
    if entry.kind is EntryKind.MODULE:
        return f"python -m {entry.target}" if entry.target in _LAUNCHING_MODULES else ""
    name = os.path.basename(entry.target)
    if name in _LAUNCHERS or (name == "accelerate" and entry.args[:1] == ("launch",)):
        return name
    words = (entry.target, *entry.args[:2])
    is_module = name.startswith("python") and words[1:2] == ("-m",) and words[2:3] and words[2] in _LAUNCHING_MODULES
    return f"python -m {words[2]}" if is_module else ""


def _container(parsed: Parsed, spec: RunSpec, env: Mapping[str, str]) -> Iterator[str]:
    container = spec.container
    if container is None:
        for dest in ("container_mounts", "container_workdir", "container_env", "container_args"):
            if (given := parsed.get(dest)) is not None:
                name = parsed.source(dest, dest)
                raise UsageError(f"{name} {given}: the workers run in no container; give --container-image too")
        return
    runtime, image = container.image.runtime, container.image.image
    option = f"{parsed.source('container_image', '--container-image')} {parsed.get('container_image')}"
    if runtime is Runtime.PYXIS and spec.cluster == "local":
        raise UsageError(f"{option}: Pyxis starts containers in Slurm's steps alone; use hpc-elastic submit")
    if runtime is Runtime.CHARLIECLOUD and (mount := next((m for m in container.mounts if m.read_only), None)):
        raise UsageError(
            f"{parsed.source('container_mounts', '--container-mounts')} {parsed.get('container_mounts')}: charliecloud "
            f"can't mount {mount.source} read-only; leave out :ro"
        )
    if image.startswith(("/", ".")) and not (path := Path(spec.cwd, image)).exists():
        where = f"{path} does not exist"
        if spec.cluster == "local" or path.is_relative_to(spec.cwd):
            raise UsageError(f"{option}: {where}")
        yield f"{option}: {where} on this host; every node of the job must have it"
    if shutil.which(runtime.program, path=env.get("PATH")) is None:
        if spec.cluster == "local":
            raise UsageError(f"{option}: {runtime.program} is not in PATH; install {runtime.value}, or load its module")
        yield f"{option}: {runtime.program} is not in PATH on this host; every node of the job must have it"


def _interpreter(parsed: Parsed, spec: RunSpec, env: Mapping[str, str]) -> Iterator[str]:
    given = parsed.get("python")
    if given is None or spec.entrypoint.kind is EntryKind.COMMAND or spec.container is not None:
        return
    option = f"{parsed.source('python', '--python')} {given}"
    found = _found(given, spec, env)
    if found is None:
        yield from _missing(option, given, spec)
        return
    said = ask_interpreter(found, "print(sys.version_info[0])", seconds=_ASK_SECONDS)
    # None: a slow filesystem, or a binary for the nodes' processors. The nodes find out.
    if said is not None and not said.strip().isdigit():
        raise UsageError(f"{option}: not a Python interpreter ({found} -c does not run Python code)")


def _missing(option: str, program: str, spec: RunSpec) -> Iterator[str]:
    """A bare name, or a path outside of the working directory, may exist on the nodes alone."""
    path = Path(spec.cwd, program)
    where = f"in {spec.cwd}" if "/" in program else "in PATH"
    if path.exists() and "/" in program:
        why = "is a folder" if path.is_dir() else f"is not executable; run: chmod +x {program}"
        raise UsageError(f"{option}: {why}")
    if spec.cluster == "local" or ("/" in program and path.is_relative_to(spec.cwd)):
        raise UsageError(f"{option}: no such program {where}")
    yield f"{option}: there is no such program on this host; every node of the job must have it"
