"""torch's ``LaunchConfig`` (2.4 to 2.13) in `launch`'s own words: nothing that it says is dropped in silence. Pure.

It is looked at by its attributes; torch is not imported.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Mapping
from typing import Any

from hpc_elastic.errors import UsageError

logger = logging.getLogger(__name__)

_ELSEWHERE: tuple[tuple[str, Any, str], ...] = (
    ("log_line_prefix_template", None, "lines have [host:rank] before them here"),
    ("metrics_cfg", None, "give launch metrics=…"),
    ("event_log_handler", "null", "events are kept in the run directory (hpc-elastic events)"),
    ("signals_to_handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT", "the agents' signals are not a matter of choice here"),
    ("duplicate_stdout_filters", None, "hpc-elastic logs shows what is asked for"),
    ("duplicate_stderr_filters", None, "hpc-elastic logs shows what is asked for"),
    ("virtual_local_rank", False, "LOCAL_RANK is a worker's place on its node here"),
)
"""Name, torch's default, and what there is in its place."""
_DEFAULT_TIMEOUT = 900
"""Seconds for the rendezvous: torch writes it down where nobody gave one."""


def words_of(config: object, taken: frozenset[str]) -> dict[str, Any]:
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
    if getattr(config, "numa_options", None) is not None:  # torch sets them by itself where it sees GPUs
        logger.warning("LaunchConfig numa_options: not supported; workers have the CPUs that their agent has")
    given.update(_logs(getattr(config, "logs_specs", None)))
    if given.get("role") == "default_role":
        del given["role"]  # torch's word for none
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
