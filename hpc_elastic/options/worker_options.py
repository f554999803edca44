"""torchrun's options, with torchrun's names and PET_* variables: how the workers run."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpc_elastic.agent.hang import parse_section_timeouts
from hpc_elastic.agent.health import parse_health_checks, parse_health_command
from hpc_elastic.agent.metrics import metrics_from_option
from hpc_elastic.errors import UsageError
from hpc_elastic.options.rendezvous_settings import GrowPolicy, RendezvousSettings, settings_from_conf
from hpc_elastic.options.table import Option, Parsed
from hpc_elastic.options.worker_values import parse_local_ranks, parse_std_streams
from hpc_elastic.run.log_pieces import parse_count, parse_size
from hpc_elastic.run.spec import EntryKind, Entrypoint
from hpc_elastic.worker_api.restart_group import RestartWith

GROUP = "workers"
_MOST_WORKERS = 4096
"""On one node. Beyond it, somebody's figure has a digit too many, and the node would fork until it stands still."""
_SHELL = re.compile(rb"#!\s*(?:\S*/env\s+)?(?:\S*/)?(?:ba|da|z|k|c|tc)?sh(?:\s|$)")

OPTIONS = (
    Option(
        group=GROUP, names=("--nproc-per-node",), dest="nproc_per_node", metavar="N|auto|gpu|cpu",
        env="PET_NPROC_PER_NODE",
        help="workers on each node; auto (the default): the GPUs that Slurm gave, else 1",
    ),
    Option(
        group=GROUP, names=("--max-restarts",), dest="max_restarts", metavar="N", env="PET_MAX_RESTARTS",
        help="how often the workers may be started again in one attempt of the job, wherever they failed (default 3)",
    ),
    Option(
        group=GROUP, names=("--restart-policy",), dest="restart_policy", metavar="processes|in-process",
        help="when a worker ends badly: all start again (the default); or, in a script that uses "
        "hpc_elastic.inprocess, a fresh process takes its place, --max-restarts times on a node, and the others stay",
    ),
    Option(
        group=GROUP, names=("--max-requeues",), dest="max_requeues", metavar="N",
        help="attempts of the job after the first one (default 3)",
    ),
    Option(
        group=GROUP, names=("--max-same-failures",), dest="max_same_failures", metavar="N",
        help="the same failure so often with no progress between is a bug, not tried again (default 2; 0: never)",
    ),
    Option(
        group=GROUP, names=("--restart-window",), dest="restart_window", metavar="SECONDS",
        help="workers that ran this long have all of --max-restarts again (default: time does not refill it)",
    ),
    Option(
        group=GROUP, names=("--restart-steps",), dest="restart_steps", metavar="N",
        help="N steps (hpc_elastic.heartbeat) beyond the last failure refill --max-restarts (default: they do not)",
    ),
    Option(
        group=GROUP, names=("--grow",), dest="grow", metavar="checkpoint|now|never",
        help="when a node that comes late is taken into a run smaller than MAX: after the next checkpoint that the "
        "script reports, at once where it reported none for 5 minutes (the default); at once; or not before the "
        "next restart",
    ),
    Option(
        group=GROUP, names=("--preemption-signal",), dest="preemption_signal", metavar="NAME",
        help="sent to the workers, as in USR1, when the job is about to end and they may save "
        "(default: none; hpc_elastic.should_checkpoint tells them)",
    ),
    Option(
        group=GROUP, names=("--section-timeouts",), dest="section_timeouts", metavar="NAME:SECONDS,...",
        help="seconds without hpc_elastic.heartbeat that make a hang, by section, as in "
        "setup:900,step:60,checkpoint:300; step:auto learns from the steps (default: nobody is judged)",
    ),
    Option(
        group=GROUP, names=("--health-checks",), dest="health_checks", metavar="NAME[=LIMIT],...|none",
        help="what a node must pass before it joins a round: tmp=SIZE, shm=SIZE, memory=SIZE, shared=SECONDS, "
        "clock=SECONDS, gpu=ERRORS; default for all (the default)",
    ),
    Option(
        group=GROUP, names=("--health-check",), dest="health_check", metavar="COMMAND",
        executes=True,
        help="a check of your own, run on each node before it joins a round: exit code 0, or the node leaves the run",
    ),
    Option(
        group=GROUP, names=("--health-check-timeout",), dest="health_check_timeout", metavar="SECONDS",
        help="how long --health-check may take; then it counts as failed (default 30)",
    ),
    Option(
        group=GROUP, names=("--metrics",), dest="metrics", metavar="jsonl:FILE|prometheus:FILE.prom",
        help="where each agent writes its figures; {host} in FILE is the node's name (default: nowhere)",
    ),
    Option(
        group=GROUP, names=("-m", "--module"), dest="module", env="PET_MODULE",
        executes=True,
        help="the script is a module's name, as for python -m",
    ),
    Option(
        group=GROUP, names=("--no-python",), dest="no_python", env="PET_NO_PYTHON",
        executes=True,
        help="the script is a command, not for Python",
    ),
    Option(
        group=GROUP, names=("--run-path",), dest="run_path", env="PET_RUN_PATH",
        help="accepted as in torchrun: a script always runs as __main__",
    ),
    Option(
        group=GROUP, names=("--python",), dest="python", metavar="PATH", path=True,
        executes=True,
        help="the workers' interpreter (default: the one that runs this command)",
    ),
    Option(
        group=GROUP, names=("--role",), dest="role", metavar="NAME", env="PET_ROLE",
        help="the workers' role (default: default)",
    ),
    Option(
        group=GROUP, names=("-r", "--redirects"), dest="redirects", metavar="STREAMS", env="PET_REDIRECTS",
        help="workers' streams that go to their files only: 0, 1 (stdout), 2 (stderr), 3, or 0:3,1:1 by local rank",
    ),
    Option(
        group=GROUP, names=("--tee",), dest="tee", metavar="STREAMS", env="PET_TEE",
        help="streams that go to the job log all the same (torchrun's -t, which is sbatch's time limit here)",
    ),
    Option(
        group=GROUP, names=("--local-ranks-filter",), dest="local_ranks_filter", metavar="RANKS",
        env="PET_LOCAL_RANKS_FILTER",
        help="only these local ranks reach the job log, as in 0,1",
    ),
    Option(
        group=GROUP, names=("--log-max-size",), dest="log_max_size", metavar="SIZE",
        help="rotate a worker's stdout.log or stderr.log at this size, as in 1G (default: never, however long)",
    ),
    Option(
        group=GROUP, names=("--log-max-files",), dest="log_max_files", metavar="N",
        help="with --log-max-size: keep so many pieces of each, the first and the latest (default 5)",
    ),
    Option(
        group=GROUP, names=("--shutdown-timeout",), dest="shutdown_timeout", metavar="SECONDS",
        env="PET_SHUTDOWN_TIMEOUT",
        help="from SIGTERM to SIGKILL when workers are stopped (default 30)",
    ),
    Option(
        group=GROUP, names=("--monitor-interval",), dest="monitor_interval", metavar="SECONDS",
        env="PET_MONITOR_INTERVAL",
        help="the fallback's poll interval; workers are watched by events (default 5)",
    ),
    Option(
        group=GROUP, names=("--rdzv-conf",), dest="rdzv_conf", metavar="KEY=VALUE,...", env="PET_RDZV_CONF",
        help="timeout, last_call_timeout, heartbeat_interval, heartbeat_ttl, poll_interval, doorbell, grow_patience",
    ),
    Option(
        group=GROUP, names=("--master-addr",), dest="master_addr", metavar="ADDRESS", env="PET_MASTER_ADDR",
        help="MASTER_ADDR for the workers, instead of the address that another node reached",
    ),
    Option(
        group=GROUP, names=("--master-port",), dest="master_port", metavar="PORT", env="PET_MASTER_PORT",
        help="MASTER_PORT for the workers, instead of a free one",
    ),
    Option(
        group=GROUP, names=("--start-method",), dest="start_method", metavar="METHOD", env="PET_START_METHOD",
        help="accepted as in torchrun: scripts are always executed, never forked",
    ),
)  # fmt: skip

_NOTHING_TO_POINT_AT = "there is nothing to point at: nodes meet through files in the run directory; leave it out"
REFUSED: Mapping[str, str] = {
    "--rdzv-backend": _NOTHING_TO_POINT_AT,
    "--rdzv-endpoint": _NOTHING_TO_POINT_AT,
    "--standalone": "not needed: a run is always alone in its run directory; leave it out",
    "--node-rank": "not needed: Slurm says which node is which; leave it out",
    "--machine-rank": "not needed: Slurm says which node is which; leave it out",
    "--multi-gpu": "not needed: each worker is told its rank; leave it out",
    "--mixed-precision": "this starts workers only: set it in the script, as in Accelerator(mixed_precision='bf16')",
    "--local-addr": "not needed: a node's address is found and tried from another node; leave it out",
    "--numa-binding": "not supported yet; leave it out",
    "--logs-specs": "not supported: each worker has its own files in the run directory",
    "--event-log-handler": "not supported: events are in the run directory",
    "--signals-to-handle": "not supported: SIGTERM, SIGINT, SIGHUP and SIGUSR2 are handled",
    "--log-line-prefix-template": "not supported: lines begin with [host:rank]",
}


def entrypoint(parsed: Parsed, *, cwd: Path, interpreter: str) -> Entrypoint:
    """What every worker runs.

    Args:
        parsed: The command line.
        cwd: What a script's relative path is relative to.
        interpreter: Where none was given.

    Raises:
        UsageError: no script, or one that does not exist or can't be read.
    """
    if not parsed.command:
        raise UsageError("no script was given; write it after the options, as in --nodes 4 train.py --lr 0.1")
    target, args = parsed.command[0], parsed.command[1:]
    module, command = parsed.flag("module"), parsed.flag("no_python")
    if module and command:
        raise UsageError("--module and --no-python can't both be: a module is run by Python")
    if not target:
        raise UsageError("the script's name is empty")
    kind = EntryKind.MODULE if module else EntryKind.COMMAND if command else EntryKind.SCRIPT
    if kind is EntryKind.SCRIPT:
        _check_script(target, cwd)
    elif kind is EntryKind.COMMAND and "/" in target:
        _check_command(target, cwd)
    return Entrypoint(kind=kind, target=target, args=tuple(args), python=parsed.get("python") or interpreter)


def worker_fields(parsed: Parsed) -> dict[str, Any]:
    """The fields of `RunSpec` that these options give; those that were not given are left out.

    Raises:
        UsageError: a value that can't be right; it is named as the user named it.
    """
    fields: dict[str, Any] = {"tee": "0"}  # torchrun's: nothing is hidden, so nothing need be shown again
    nproc = parsed.get("nproc_per_node")
    if nproc is not None:
        fields["nproc_per_node"] = _nproc(nproc, parsed.source("nproc_per_node", ""))
    for dest in ("max_restarts", "max_requeues", "max_same_failures"):
        _put(fields, dest, _whole(parsed, dest, least=0, most=1_000_000))
    _put(fields, "restart_steps", _whole(parsed, "restart_steps", least=1, most=1_000_000_000))
    _put(fields, "grow", _one_of(parsed, "grow", [policy.value for policy in GrowPolicy]))
    _put(fields, "restart_policy", _one_of(parsed, "restart_policy", [policy.value for policy in RestartWith]))
    timeouts = parsed.get("section_timeouts")
    if timeouts is not None:
        parse_section_timeouts(timeouts, option=parsed.source("section_timeouts", ""))
        fields["section_timeouts"] = timeouts
    _put_health(fields, parsed)
    _put(fields, "master_port", _whole(parsed, "master_port", least=0, most=65535) or None)
    for dest in ("restart_window", "shutdown_timeout"):
        _put(fields, dest, _seconds(parsed, dest, zero=True))
    _put(fields, "monitor_interval", _seconds(parsed, "monitor_interval", zero=False))
    for dest in ("role", "master_addr"):
        _put(fields, dest, parsed.get(dest))
    for dest in ("redirects", "tee"):
        text = parsed.get(dest)
        if text is not None:
            parse_std_streams(text, option=parsed.source(dest, ""))
            fields[dest] = text
    fields.update(_log_limit(parsed))
    _put(fields, "preemption_signal", _signal(parsed))
    ranks = parsed.get("local_ranks_filter")
    if ranks is not None:
        fields["local_ranks_filter"] = parse_local_ranks(ranks, option=parsed.source("local_ranks_filter", ""))
    conf = parsed.get("rdzv_conf")
    if conf is not None:
        fields["rdzv_conf"] = _conf(conf, parsed.source("rdzv_conf", ""))
    return fields


def _log_limit(parsed: Parsed) -> dict[str, int]:
    size, count = parsed.get("log_max_size"), parsed.get("log_max_files")
    fields = {}
    if size is not None:
        fields["log_max_size"] = parse_size(size, option=parsed.source("log_max_size", ""))
    if count is not None:
        fields["log_max_files"] = parse_count(count, option=parsed.source("log_max_files", ""))
        if size is None:
            raise UsageError(f"--log-max-files {count}: nothing is rotated without a size; give --log-max-size too")
    return fields


def _put_health(fields: dict[str, Any], parsed: Parsed) -> None:
    checks, command, metrics = (parsed.get(dest) for dest in ("health_checks", "health_check", "metrics"))
    if checks is not None:
        parse_health_checks(checks, option=parsed.source("health_checks", ""))
    if command is not None:
        parse_health_command(command, option=parsed.source("health_check", ""))
    if metrics is not None:
        metrics_from_option(metrics, labels={})
    _put(fields, "health_checks", checks)
    _put(fields, "health_check", command)
    _put(fields, "health_check_timeout", _seconds(parsed, "health_check_timeout", zero=False))
    _put(fields, "metrics", metrics)


def _put(fields: dict[str, Any], dest: str, value: object) -> None:
    if value is not None:
        fields[dest] = value


def _nproc(text: str, option: str) -> str:
    if text in ("auto", "gpu", "cpu") or (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= _MOST_WORKERS):
        return text
    raise UsageError(f"{option} {text}: give a number of workers from 1 to {_MOST_WORKERS}, or auto, gpu or cpu")


def _signal(parsed: Parsed) -> str | None:
    text = parsed.get("preemption_signal")
    if text is None:
        return None
    name = text.upper() if text.upper().startswith("SIG") else f"SIG{text.upper()}"
    if name not in signal.Signals.__members__ or name in ("SIGKILL", "SIGSTOP"):
        raise UsageError(f"--preemption-signal {text}: give a signal that a program can handle, as in USR1")
    return name


def _one_of(parsed: Parsed, dest: str, names: Sequence[str]) -> str | None:
    text = parsed.get(dest)
    if text is not None and text not in names:
        raise UsageError(f"{parsed.source(dest, '')} {text}: give one of {', '.join(names)}")
    return text


def _whole(parsed: Parsed, dest: str, *, least: int, most: int) -> int | None:
    text = parsed.get(dest)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and least <= int(text[:9]) <= most):
        raise UsageError(f"{parsed.source(dest, '')} {text}: give a whole number from {least} to {most}")
    return int(text)


def _seconds(parsed: Parsed, dest: str, *, zero: bool) -> float | None:
    text = parsed.get(dest)
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not (0 <= seconds < 1e9 and (zero or seconds > 0)):
        raise UsageError(f"{parsed.source(dest, '')} {text}: give seconds, {'0 or more' if zero else 'more than 0'}")
    return seconds


def _conf(text: str, option: str) -> dict[str, str]:
    conf: dict[str, str] = {}
    for item in filter(None, text.split(",")):
        key, equals, value = item.partition("=")
        if not (equals and key and value):
            raise UsageError(f"{option} {text}: {item!r} is not of the form key=value")
        conf[key.strip()] = value.strip()
    settings_from_conf(conf, RendezvousSettings())
    return conf


def _check_script(target: str, cwd: Path) -> None:
    path = cwd / target
    if path.is_dir():
        raise UsageError(f"{target} is a folder, not a script; for a module use --module")
    try:
        with open(path, "rb") as file:
            start = file.read(80)
    except FileNotFoundError:
        hint = "; a module is run with --module, a command with --no-python" if "/" not in target else ""
        raise UsageError(f"the script {target} does not exist in {cwd}{hint}") from None
    except OSError as error:
        raise UsageError(f"the script {target} can't be read: {error.strerror}") from None
    # A .py may begin with the shell's lines that look for a Python, and be Python all the same.
    if path.suffix != ".py" and _SHELL.match(start):
        raise UsageError(
            f"{target} is a shell script, and a script is run by Python; give the Python script that it starts, "
            "or have it run as it is with --no-python"
        )


def _check_command(target: str, cwd: Path) -> None:
    import os

    path = cwd / target
    if not path.exists():
        raise UsageError(f"the command {target} does not exist in {cwd}")
    if path.is_dir() or not os.access(path, os.X_OK):
        raise UsageError(f"the command {target} is not executable; run: chmod +x {target}")
