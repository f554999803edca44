"""Options → a `RunSpec` and what Slurm is asked for, for `submit`, `run` and Python programs.

``--template FILE`` is the user's own batch script, checked; its #SBATCH lines count below the command line.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from hpc_elastic.base.host_facts import module_command
from hpc_elastic.errors import UsageError
from hpc_elastic.options import job_options, worker_options
from hpc_elastic.options.sbatch import (
    IMPOSSIBLE,
    NO_HET_JOBS,
    RELIED_ON,
    SbatchOptions,
    check_possible,
    has_components,
    notice_grace,
    parse_array,
    sbatch_arguments,
    sbatch_line,
    sbatch_variables,
    split_option,
)
from hpc_elastic.options.table import Option, Parsed
from hpc_elastic.options.worker_options import current_directory
from hpc_elastic.run.index import DEFAULT_RUNS_DIR
from hpc_elastic.run.option_values import BadNodeSettings, StartMethod, StreamChoice
from hpc_elastic.run.spec import EntryKind, Entrypoint, RunSpec, new_run_id

PLACEHOLDERS = {
    "SBATCH_LINES": "the #SBATCH lines of the command line; on a line of its own, after those of the template",
    "COMMAND": "the supervisor's command, quoted for the shell; the script ends by exec of it",
    "RUN_DIR": "the run directory, quoted for the shell",
    "RUN_VARIABLES": "variables of a run; for `unset`, where a worker of another run submitted the script",
    "SHAPE_VARIABLES": "variables that overrule srun's flags; for `unset`, if the script calls srun itself",
}
_PLACEHOLDER = re.compile(r"@([A-Z_]+)@")
_SHELLS = ("sh", "bash", "dash", "ksh", "zsh")
_TRAP = re.compile(r"""trap\s+(?:''|"")\s+(?:\S+\s+)*(?:SIG)?USR2\b""")
_HARMLESS = re.compile(r"(?:set|trap|shopt|umask|:)(?:\s|\Z)")
_ARRAY = re.compile(r"(\w+)=\(\s*@COMMAND@\s*\)")
_SIGNAL = re.compile(r"--signal(?:=|\s+)(\S+)")


def check_template(text: str) -> list[str]:
    return list(_problems(text))


def _problems(text: str) -> Iterator[str]:
    lines = text.splitlines()
    shell = _shell(lines[0] if lines else "")
    if shell is None:
        yield "line 1 must name the shell, as in #!/bin/bash"
    elif shell not in _SHELLS:
        yield f"line 1 names {shell}; the script must be for bash or sh"
    if "\r" in text:
        yield "it has DOS line ends, which sbatch refuses; run dos2unix on it"
    known = ", ".join(f"@{name}@" for name in PLACEHOLDERS)
    for name in dict.fromkeys(_PLACEHOLDER.findall(text)):
        if name not in PLACEHOLDERS:
            yield f"@{name}@ is not a known placeholder; there are {known}"
    yield from _problems_of_lines(lines)
    yield from _problems_of_options(lines)


def _shell(line: str) -> str | None:
    if not line.startswith("#!"):
        return None
    names = [word.rpartition("/")[2] for word in line[2:].split() if not word.startswith("-")]
    return next((name for name in names if name != "env"), None)


def _problems_of_lines(lines: Sequence[str]) -> Iterator[str]:
    own = [number for number, line in enumerate(lines, 1) if line.startswith("#SBATCH")]
    lines = [line.strip() for line in lines]
    placed = [number for number, line in enumerate(lines, 1) if line == "@SBATCH_LINES@"]
    commands = [n for n, line in enumerate(lines, 1) if line and not line.startswith("#") and n not in placed]
    begin = commands[0] if commands else len(lines) + 1
    if not placed:
        yield "a line @SBATCH_LINES@ is missing: nothing of the command line would reach sbatch"
    elif placed[0] > begin:
        yield f"@SBATCH_LINES@ must stand before line {begin}, the first command: sbatch reads no further"
    late = [number for number in own if number > begin]
    if late:
        yield f"line {late[0]}: sbatch reads no #SBATCH line after the first command, on line {begin}"
    elif placed and own and own[-1] > placed[0]:
        yield (
            f"@SBATCH_LINES@ must stand after the template's own #SBATCH lines (line {own[-1]}), so that the command "
            "line wins"
        )
    traps = [number for number in commands if _TRAP.match(lines[number - 1])]
    if not traps:
        yield ("trap '' USR2 is missing: the notice before the time limit would end the shell, and the job with it")
    else:
        before = [n for n in commands if n < traps[0] and not _HARMLESS.match(lines[n - 1])]
        if before:
            yield f"trap '' USR2 must stand before line {before[0]}: a notice during that would end the job"
    text = "\n".join(lines[number - 1] for number in commands)
    meant = ["@COMMAND@", *(f'"${{{name}[@]}}"' for name in _ARRAY.findall(text))]
    starts = [part for part in re.split(r"&&|\|\||;|\n", text) if part.strip().startswith("exec ")]
    if "@COMMAND@" not in text:
        yield "@COMMAND@ is missing: the script would start no supervisor"
    elif not any(word in part for part in starts for word in meant):
        yield "the supervisor must be started with exec (exec @COMMAND@): signals go to the script's own process alone"


def _problems_of_options(lines: Sequence[str]) -> Iterator[str]:
    for number, line in enumerate(lines, 1):
        if not line.startswith("#SBATCH"):
            continue
        try:
            words = sbatch_words([line])
        except ValueError as error:
            yield f"line {number}: {str(error).lower()}"
            continue
        if has_components(words):
            yield f"line {number}: {NO_HET_JOBS}"
            continue
        for word in words:
            try:
                if word.startswith("-"):
                    check_possible(word, option=f"line {number}:")
            except UsageError as error:
                yield str(error)
        signal = _SIGNAL.search(" ".join(words))
        if signal and not re.match(r"B:(?:SIG)?USR2(?:@|\Z)", signal.group(1)):
            yield (
                f"line {number}: --signal={signal.group(1)}: the supervisor must get USR2, as in --signal=B:USR2@120"
            )


def sbatch_words(lines: Sequence[str]) -> list[str]:
    words: list[str] = []
    for line in lines:
        if line.startswith("#SBATCH"):
            words += shlex.split(line.removeprefix("#SBATCH"), comments=True)
    return words


def read_template(parsed: Parsed, cwd: Path, env: Mapping[str, str]) -> tuple[str | None, Parsed]:
    """The template's text (None without ``--template``), and the command line with what its #SBATCH lines add.

    As for sbatch, an option of the command line wins over a SBATCH_* variable, and that over a line of the script. A
    line of the script wins over a configuration file. Raises UsageError with every reason why a run can't work with it.
    """
    given = parsed.get("template")
    if given is None:
        return None, parsed
    try:
        text = (cwd / given).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UsageError(f"--template {given}: not UTF-8 text") from None
    except OSError as error:
        raise UsageError(f"--template {given} can't be read: {error.strerror}") from None
    problems = check_template(text)
    if problems:
        raise UsageError(f"--template {given}: {'; '.join(problems)}")
    values, sources = dict(parsed.values), dict(parsed.sources)
    for dest, (name, value) in asked_by(sbatch_words(text.splitlines())).items():
        # A configuration file, which is neither, stands below the script.
        is_given = parsed.source(dest, "").startswith(("-", "HPC_ELASTIC_", "PET_"))
        if not is_given and not any(variable in env for variable in sbatch_variables(dest)):
            values[dest] = (value,)
            sources[dest] = f"{given}: {name}"
    return text, replace(parsed, values=values, sources=sources)


def asked_by(words: Sequence[str]) -> dict[str, tuple[str, str]]:
    """`Option.dest` → name and value of what sbatch is asked for; unknown options stay in the script."""
    by_name: dict[str, Option] = {
        name: option for option in job_options.OPTIONS if option.sbatch for name in option.names
    }
    found: dict[str, tuple[str, str]] = {}
    rest = list(words)
    while rest:
        name, equals, value = split_option(rest.pop(0))
        option = by_name.get(name)
        if option is None:
            continue
        if option.metavar is None:
            value = option.constant
        elif not equals and not option.optional_value:
            value = rest.pop(0) if rest else ""
        if value or option.optional_value:
            found[option.dest] = (name, value)
    return found


ALL_OPTIONS = (*worker_options.OPTIONS, *job_options.OPTIONS)
"""The one table of the command line, the configuration files and the executor."""
REFUSED: Mapping[str, str] = {
    **{name: why for name, why in {**RELIED_ON, **IMPOSSIBLE}.items() if not why.startswith("see sbatch")},
    **worker_options.REFUSED,
    **{name: f"was removed: {instead}" for name, instead in worker_options.REMOVED.items()},
}
"""Options that will never be, torchrun's and sbatch's, with the reason and the way out."""
_NOT_IN_THE_SPEC = {"nodes": "1", "cluster": "auto", "runs_dir": f"./{DEFAULT_RUNS_DIR}"}


def default_of(option: Option) -> str | bool | None:
    if option.dest in _NOT_IN_THE_SPEC:
        return _NOT_IN_THE_SPEC[option.dest]
    if option.dest not in _FIELDS:
        return None
    entry = Entrypoint(kind=EntryKind.SCRIPT, target="")
    defaults = RunSpec(run_id="", uid="", name="", created_ns=0, entrypoint=entry, cwd="")
    value = getattr(defaults, _FIELDS[option.dest])
    if isinstance(value, bool):
        return value
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, (int, float)):
        return f"{value:g}" if abs(value) < 1e6 else str(value)
    return str(value) if value and isinstance(value, (str, StreamChoice, BadNodeSettings)) else None


_FIELDS = {
    **{option.dest: option.dest for option in ALL_OPTIONS if option.in_spec and option.dest != "run_id"},
    "grace": "signal_grace",
    "requeue": "requeue",
    "segment": "segment",
}
"""`Option.dest` → the field of `RunSpec` whose default is the option's."""


def cluster_here(asked: str, env: Mapping[str, str]) -> str:
    """``slurm`` or ``local`` for ``auto``, by whether there is an sbatch; anything else is what was asked for."""
    if asked != "auto":
        return asked
    return "slurm" if shutil.which("sbatch", path=env.get("PATH")) else "local"


def working_directory(parsed: Parsed, env: Mapping[str, str]) -> Path:
    """The workers' directory: absolute, by the name that all nodes know."""
    chosen = parsed.get("chdir")
    path = Path(os.path.normpath(current_directory(env) / (chosen or "")))
    if not path.is_dir():
        raise UsageError(f"--chdir {chosen}: no such folder")
    return path


def runs_directory(parsed: Parsed, cwd: Path) -> Path:
    return Path(os.path.normpath(cwd / (parsed.get("runs_dir") or DEFAULT_RUNS_DIR)))


def build_spec(
    parsed: Parsed, *, cluster: str, nodes: tuple[int, int], cwd: Path, env: Mapping[str, str], grace: int
) -> RunSpec:
    """The content of run.json; raises UsageError for a value that can't be right.

    `cluster` is ``slurm`` or ``local``, `nodes` the least and the most; `env` has sbatch's own variables.
    """
    entry = worker_options.entrypoint(parsed, cwd=cwd, interpreter=sys.executable)
    name = job_name(parsed, entry, env)
    fields = spec_fields(parsed)
    if cluster == "local":
        if fields.get("nproc_per_node") in ("auto", "gpu", "cpu") and not env.get("SLURM_JOB_ID"):
            fields["nproc_per_node"] = str(workers_here(fields["nproc_per_node"], env))
        _check_fits_here(parsed, nodes[1] + fields.get("spares", 0), fields.get("nproc_per_node", ""))
    site_disables_requeue = cluster == "slurm" and parsed.get("requeue") is None and "SBATCH_NO_REQUEUE" in env
    return RunSpec(
        **{"run_id": new_run_id(name), **fields},
        uid=os.urandom(16).hex(),
        name=name,
        created_ns=time.time_ns(),
        entrypoint=entry,
        cwd=str(cwd),
        cluster=cluster,
        min_nodes=nodes[0],
        max_nodes=nodes[1],
        segment=job_options.segment_nodes(parsed, nodes),
        virtual_local_rank=parsed.flag("virtual_local_rank"),
        wandb=parsed.flag("wandb"),
        requeue=job_options.wants_requeue(parsed) and not site_disables_requeue,
        signal_grace=grace,
    )


def spec_fields(parsed: Parsed) -> dict[str, Any]:
    """The fields of `RunSpec` that one option each gives; those that were not given are left out."""
    fields: dict[str, Any] = {}
    for option in ALL_OPTIONS:
        if option.in_spec and (value := parsed.value(option)) is not None:
            fields[option.dest] = value
    if passed_on := fields.get("signals_to_handle"):
        fields.setdefault("preemption_signal", passed_on[0])
    if fields.get("master_port") == 0:
        del fields["master_port"]  # torchrun's way to ask for a free one
    if "log_max_files" in fields and "log_max_size" not in fields:
        count = fields["log_max_files"]
        raise UsageError(f"--log-max-files {count}: nothing is rotated without a size; give --log-max-size too")
    if lone := [name for name in sorted(fields) if name.startswith("checkpoint_") and "checkpoint_dir" not in fields]:
        shown = f"--{lone[0].replace('_', '-')}"
        raise UsageError(f"{shown}: no checkpoint is copied without a place for it; give --checkpoint-dir DIR too")
    if "preload" in fields and fields.get("start_method") is not StartMethod.FORKSERVER:
        raise UsageError(
            f"--preload {','.join(fields['preload'])}: nothing is preloaded for fresh interpreters; "
            "give --start-method forkserver too"
        )
    if "worker_prefix" in fields and fields.get("start_method") is StartMethod.FORKSERVER:
        raise UsageError(
            f"--worker-prefix '{' '.join(fields['worker_prefix'])}': workers that are forks of one process have no "
            "command line to put it before; leave it out, or leave out --start-method forkserver"
        )
    if "container_image" in fields and fields.get("start_method") is StartMethod.FORKSERVER:
        raise UsageError(
            "--start-method forkserver: the fork server runs on the node, and these workers' Python is in the image; "
            "leave it out (each worker is then a fresh interpreter), or leave out --container-image"
        )
    return fields


_MOST_LOCAL_NODES, _MOST_LOCAL_WORKERS = 256, 1024


def _check_fits_here(parsed: Parsed, nodes: int, nproc: str) -> None:
    if nodes > _MOST_LOCAL_NODES:
        option = "spares" if nodes - job_options.spare_nodes(parsed) <= _MOST_LOCAL_NODES else "nodes"
        raise UsageError(
            f"{parsed.source(option, '')} {parsed.get(option)}: {nodes} nodes on this one machine; "
            f"it takes at most {_MOST_LOCAL_NODES} (for more: Slurm, with hpc-elastic submit)"
        )
    if nproc.isdigit() and nodes * int(nproc) > _MOST_LOCAL_WORKERS:
        raise UsageError(
            f"{parsed.source('nproc_per_node', '')} {nproc}: {nodes * int(nproc)} workers on this one machine; "
            f"it takes at most {_MOST_LOCAL_WORKERS} (for more: Slurm, with hpc-elastic submit)"
        )


_NVML_SECONDS = 20.0


def workers_here(
    asked: str,
    env: Mapping[str, str],
    *,
    count_gpus: Callable[[Mapping[str, str]], int | None] | None = None,
    devices: Path = Path("/dev"),
) -> int:
    """`count_gpus` returns None where the driver does not answer: its files in `devices` are counted then."""
    cpus = len(os.sched_getaffinity(0))
    if asked == "cpu":
        return cpus
    visible = env.get("CUDA_VISIBLE_DEVICES")
    there = (count_gpus or _ask_nvml)(env)
    if there is None:
        there = len(list(devices.glob("nvidia[0-9]*")))
    gpus = there if visible is None else _visible_of(visible, there)
    if asked == "gpu" and gpus == 0:
        seen = f"CUDA_VISIBLE_DEVICES={visible!r} leaves none of its {there}" if there else "NVML finds none"
        raise UsageError(
            f"--nproc-per-node gpu: this machine has no NVIDIA GPU for the workers ({seen}); "
            "give the number of workers, or auto for one for each CPU"
        )
    return gpus or cpus


def _visible_of(visible: str, there: int) -> int:
    """CUDA stops at the first entry that it can't use."""
    count = 0
    for entry in visible.split(","):
        name = entry.strip()
        if (name.isdigit() and int(name[:9]) < there) or name.startswith(("GPU-", "MIG-")):
            count += 1
        else:
            break
    return min(count, there) if "MIG-" not in visible else count


def _ask_nvml(env: Mapping[str, str]) -> int | None:
    try:
        ended = subprocess.run(
            module_command("hpc_elastic.agent.health", "print_gpus"),
            env=dict(env), cwd="/", stdin=subprocess.DEVNULL, capture_output=True, timeout=_NVML_SECONDS, check=True,
        )  # fmt: skip
        facts = json.loads(ended.stdout)
        return len(facts["devices"]) if facts["is_there"] and not facts["error"] else None
    except (OSError, subprocess.SubprocessError, ValueError, LookupError, TypeError):
        return None


def check_values(parsed: Parsed) -> None:
    """Raises UsageError for what can't be right of the options without a script."""
    nodes = job_options.asked_nodes(parsed)
    job_options.asked_cluster(parsed)
    job_options.segment_nodes(parsed, nodes)
    spec_fields(parsed)
    grace = job_options.notice_seconds(parsed)
    options = job_options.sbatch_options(parsed, nodes=nodes, job_name=parsed.get("job_name") or "run", grace=grace)
    for argument in sbatch_arguments(options):
        sbatch_line(argument)


def job_name(parsed: Parsed, entry: Entrypoint, env: Mapping[str, str]) -> str:
    given = parsed.get("job_name") or env.get("SBATCH_JOB_NAME")
    if given:
        return given
    if entry.kind is EntryKind.MODULE:
        return entry.target.rpartition(".")[2] or entry.target
    script = _script_in((entry.target, *entry.args)) if entry.kind is EntryKind.COMMAND else None
    name = os.path.basename(script or entry.target)
    return name.removesuffix(".py") or name or "run"


def _script_in(words: Sequence[str]) -> str | None:
    """The script, or a module's last name, that a wrapper's command line runs in the end: a container's, a shell's."""
    for place, word in enumerate(words):
        if word.endswith(".py") and not re.search(r"\s|=", word):
            return word
        before = os.path.basename(words[place - 1]) if place else ""
        if word == "-m" and re.fullmatch(r"python[0-9.]*", before) and words[place + 1 :]:
            return words[place + 1].rpartition(".")[2]
        if re.search(r"\s", word):  # what a shell is given to run
            try:
                found = _script_in(shlex.split(word))
            except ValueError:
                continue
            if found is not None:
                return found
    return None


class SlurmJob(Struct, frozen=True, kw_only=True):
    spec: RunSpec
    options: SbatchOptions
    tasks: tuple[int, ...] = ()
    template: str | None = None
    """The text of the user's own batch script, in place of ours."""
    asked_nodes: str = "--nodes 1"
    shared: bool = False
    """The user says that all nodes see the run directory, whatever it looks like."""


def slurm_job(parsed: Parsed, env: Mapping[str, str], *, array: str | None = None) -> SlurmJob:
    """The job that the options ask for, checked; `env` has sbatch's own variables.

    `array` is as for ``--array``, empty for none; None: as the options or sbatch's variable have it.
    """
    cwd = working_directory(parsed, env)
    template, parsed = read_template(parsed, cwd, env)
    nodes = job_options.asked_nodes(parsed)
    spec = build_spec(parsed, cluster="slurm", nodes=nodes, cwd=cwd, env=env, grace=job_options.notice_seconds(parsed))
    if array is None:
        array = parsed.get("array") or env.get("SBATCH_ARRAY_INX") or ""
    tasks = parse_array(array, option=parsed.source("array", "SBATCH_ARRAY_INX")) if array else ()
    options = job_options.sbatch_options(parsed, nodes=nodes, job_name=spec.name, grace=spec.signal_grace)
    chdir = spec.cwd if parsed.get("chdir") is not None else None
    options = replace(options, requeue=spec.requeue, array=array or None, chdir=chdir)
    arguments = tuple(sbatch_arguments(options))
    return SlurmJob(
        spec=replace(spec, array=array, signal_grace=notice_grace(options), sbatch_args=arguments),
        options=options,
        tasks=tasks,
        template=template,
        asked_nodes=f"{parsed.source('nodes', '--nodes')} {parsed.get('nodes') or 1}",
        shared=parsed.flag("allow_local_runs_dir"),
    )
