"""``hpc_elastic.launch(fn, …)``: a function on several workers of this machine, from a notebook or a script.

The vocabulary is that of torch's ``LaunchConfig`` (2.4 to 2.13) and ``elastic_launch``: nothing that a configuration
has is dropped in silence. It is looked at by its attributes; torch is not imported. What the workers do is the
executor's.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from hpc_elastic.errors import UsageError
from hpc_elastic.run.spec import Entrypoint
from hpc_elastic.submission.call import program_of

_ELSEWHERE: tuple[tuple[str, Any, str], ...] = (
    ("log_line_prefix_template", None, "lines have [host:rank] before them here"),
    ("metrics_cfg", None, "give launch metrics=…"),
    ("event_log_handler", "null", "events are kept in the run directory (hpc-elastic events)"),
)
"""Name, torch's default, and what there is in its place."""
_DEFAULT_TIMEOUT = 900
"""Seconds for the rendezvous: torch writes it down where none was given."""


def torch_parameters(config: object, taken: frozenset[str]) -> dict[str, Any]:
    """What a configuration says, as `launch` takes it.

    Args:
        config: torch's, or one with the same attributes.
        taken: The attributes that are taken as they are.

    Raises:
        UsageError: it says something that there is nothing for here.
    """
    given = {name: getattr(config, name) for name in sorted(taken) if hasattr(config, name)}
    for name, default, advice in _ELSEWHERE:
        value = getattr(config, name, default)
        if value and value != default:
            raise UsageError(f"LaunchConfig {name}={value!r}: {advice}; leave it out")
    if mode := getattr(getattr(config, "numa_options", None), "affinity_mode", None):
        given["numa_binding"] = mode.value  # torch sets them by itself where it sees GPUs
    for name in ("virtual_local_rank", "signals_to_handle"):
        if value := getattr(config, name, None):
            given[name] = value
    given.update(_logs(getattr(config, "logs_specs", None)))
    for name in ("duplicate_stdout_filters", "duplicate_stderr_filters"):
        if texts := getattr(config, name, None):
            given[name] = [text.replace(",", ",,") for text in texts]
    if given.get("role") == "default_role":
        del given["role"]  # torch's name for none
    conf = dict(given.get("rdzv_configs") or {})
    if hasattr(config, "logs_specs") and conf.get("timeout") == _DEFAULT_TIMEOUT:
        del conf["timeout"]
        given["rdzv_configs"] = conf
    return given


def _logs(specs: object) -> dict[str, Any]:
    """Of torch's ``DefaultLogsSpecs``."""
    found: dict[str, Any] = {}
    folder = getattr(specs, "_root_log_dir", None)
    made_by_torch = os.path.join(tempfile.gettempdir(), "torchelastic_")
    if folder and folder != os.devnull and not str(folder).startswith(made_by_torch):
        found["log_dir"] = str(folder)
    for name in ("redirects", "tee"):
        text = _streams(getattr(specs, f"_{name}", None))
        if text:
            found[name] = text
    ranks = getattr(specs, "_local_ranks_filter", None)
    if ranks is not None:
        found["local_ranks_filter"] = sorted(ranks)
    return found


def _streams(value: Any) -> str:
    """torch's ``Std``, or one for each local rank: ``3``, ``0:1,1:3``; empty: none."""
    if isinstance(value, Mapping):
        return ",".join(f"{rank}:{int(streams)}" for rank, streams in sorted(value.items()) if streams)
    return str(int(value)) if value else ""


_LOOK_SECONDS = 0.2
_LAUNCHER_SECONDS = 60.0
_NO_PLACE = "not needed: nodes find each other through files in the run directory; leave it out"
_NO_ADDRESS = "a node's address is found by itself; leave it out"
_REFUSED = {"rdzv_endpoint": _NO_PLACE, "rdzv_backend": _NO_PLACE, "local_addr": _NO_ADDRESS}
_HARMLESS = {"rdzv_backend": ("", "etcd", "static", "c10d"), "rdzv_endpoint": ("",), "local_addr": (None,)}
"""torch's own defaults, which say nothing."""


class LaunchConfig(Struct, kw_only=True):
    """torch's, as far as it says something here. torch's own is taken in its place."""

    min_nodes: int = 1
    max_nodes: int = 1
    nproc_per_node: int = 1
    run_id: str = ""
    """Part of the job's name."""
    role: str = "default"
    rdzv_endpoint: str = ""
    rdzv_backend: str = ""
    rdzv_configs: Mapping[str, Any] = field(default_factory=dict)
    rdzv_timeout: int = -1
    """Seconds; -1: the default."""
    max_restarts: int = 3
    monitor_interval: float = 5.0
    start_method: str = "spawn"
    """Accepted: workers are always new processes."""
    local_addr: str | None = None
    shutdown_timeout: int = 30
    log_dir: str | None = None
    """Where the run directory is made; None: a temporary folder, removed when all went well."""


_TAKEN = frozenset(LaunchConfig.__struct_fields__)


def launch(
    fn: Callable[..., Any] | str | os.PathLike[str] | Entrypoint,
    *args: Any,
    config: Any = None,
    cluster: str = "local",
    show_output: bool = True,
    **options: Any,
) -> dict[int, Any]:
    """Call ``fn(*args)`` on every worker, and wait.

    Args:
        fn: Any function: of a notebook, a lambda, a closure. Or what torch's `elastic_launch` runs, too: the path of a
            script (``train.py``), a command (`sys.executable`), a module's name; or an `Entrypoint`, which says which.
        args: Its arguments. (For named ones: functools.partial.) Those of a script are turned into text.
        config: A `LaunchConfig`, this one or torch's.
        cluster: ``local``: agents on this machine; ``slurm``: a job; ``debug``: one call in this process.
        show_output: Print what the workers print, with their rank in front, while it runs.
        options: Fields of `LaunchConfig`, and parameters of `ElasticExecutor`.

    Returns:
        What it returned, by global rank; None for a script, a module or a command.

    Raises:
        ElasticJobFailedError: it failed; the cause is what it raised.
        UsageError: a value that can't be right.
    """
    from hpc_elastic.submission.executor import ElasticExecutor

    function = fn if callable(fn) else program_of(fn)
    parameters = _parameters(config, options)
    log_dir = parameters.pop("log_dir", None)
    with _folder(log_dir, cluster) as folder:
        executor = ElasticExecutor(folder, cluster=cluster)
        executor.update_parameters(**parameters)
        job = executor.submit(function, *args)
        if cluster == "debug":
            return {0: job.result()}
        try:
            _watch(job, show=show_output)
            results = job.results()
        except KeyboardInterrupt:
            job.cancel(check=False)
            job.wait()
            raise
        if log_dir is None:
            _wait_for_launcher(job)
        return dict(enumerate(results))


@contextmanager
def _folder(log_dir: str | None, cluster: str) -> Iterator[Path]:
    """For the run directory. Where none was given it is a temporary one, which stays where a run has failed in it: the
    error names it."""
    if log_dir is not None or cluster == "slurm":
        yield Path(log_dir or "runs")
        return
    temporary = tempfile.TemporaryDirectory(prefix="hpc-elastic-", ignore_cleanup_errors=True)
    try:
        yield Path(temporary.name)
    except Exception:
        if cluster == "debug" or not os.listdir(temporary.name):
            temporary.cleanup()
        else:
            temporary._finalizer.detach()  # type: ignore[attr-defined]
        raise
    temporary.cleanup()


def _parameters(config: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """The executor's, from torch's names and its own."""
    given: dict[str, Any] = {}
    if config is not None:
        given = torch_parameters(config, _TAKEN)
    given.update(options)
    for name, why in _REFUSED.items():
        value = given.pop(name, None)
        if value is not None and value not in _HARMLESS[name]:
            raise UsageError(f"{name}={value!r}: {why}")
    given.pop("start_method", None)
    run_id = given.pop("run_id", "")
    if run_id and run_id != "none":
        given.setdefault("name", run_id)
    timeout = given.pop("rdzv_timeout", -1)
    conf = dict(given.pop("rdzv_configs", None) or {})
    if timeout is not None and timeout >= 0:
        conf["timeout"] = timeout
    if conf:
        given.setdefault("rdzv_conf", conf)
    if "min_nodes" in given or "max_nodes" in given:
        least = given.pop("min_nodes", 1)
        given.setdefault("nodes", (least, given.pop("max_nodes", least)))
        given.pop("max_nodes", None)
    given.setdefault("timeout_min", "UNLIMITED")
    return given


def _watch(job: Any, *, show: bool) -> None:
    """Until it ends; the job log meanwhile, as far as it is the workers'."""
    shown = 0
    is_over = False
    while not is_over:
        is_over = job.done()
        if show:
            text = job.log()
            end = text.rfind("\n") + 1
            lines = [line for line in text[shown:end].splitlines() if _is_a_workers(line)]
            sys.stdout.write("".join(f"{line}\n" for line in lines))
            sys.stdout.flush()
            shown = end
        if not is_over:
            time.sleep(_LOOK_SECONDS)


def _is_a_workers(line: str) -> bool:
    """``[node0:3] …``."""
    head, bracket, _ = line.partition("]")
    return bool(bracket) and head.startswith("[") and head.rpartition(":")[2].isdigit()


def _wait_for_launcher(job: Any) -> None:
    """Results are there before the run's last messages, and a folder can't be removed while these are written."""
    from hpc_elastic.submission import local_process

    deadline = time.monotonic() + _LAUNCHER_SECONDS
    while local_process.lives(job.paths.run) and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
