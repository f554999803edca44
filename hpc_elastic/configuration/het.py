"""``--het``: further components of a het job, whose nodes are in the same run."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Any

from hpc_elastic.configuration import job_options
from hpc_elastic.configuration.option_table import Parsed, parse
from hpc_elastic.errors import UsageError
from hpc_elastic.slurm.node_range import parse_nodes
from hpc_elastic.slurm.sbatch import SbatchOptions, component_arguments

_OF_A_COMPONENT = (
    *("nodes", "partition", "account", "qos", "time", "cpus_per_task", "constraint", "exclude", "nodelist"),
    *("gres", "gpus_per_node", "mem", "reservation", "exclusive", "sbatch_args"),
)
_OF_THE_JOB = ("account", "qos", "time", "reservation")
"""Given once, they hold for every component that says nothing else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """One further component."""

    nodes: tuple[int, int]
    arguments: tuple[str, ...]
    """sbatch's."""


def het_components(parsed: Parsed) -> tuple[Component, ...]:
    """Each ``--het``'s.

    Raises:
        UsageError: one holds what no component can have.
    """
    options = tuple(option for option in job_options.sbatchs_own() if option.dest in _OF_A_COMPONENT)
    found = []
    for text in parsed.all("het"):
        try:
            own = parse(shlex.split(text), options, refused={}, env={})
        except (UsageError, ValueError) as error:
            raise UsageError(f"--het '{text}': {error}") from None
        if own.command or own.help:
            raise UsageError(
                f"--het '{text}': {' '.join(own.command) or '--help'}: give options of sbatch's, as in '-N 2 -p gpu'"
            )
        nodes = parse_nodes(own.get("nodes") or "1", option=f"--het '{text}': --nodes")
        values: dict[str, Any] = {dest: own.get(dest) or parsed.get(dest) for dest in _OF_THE_JOB}
        values |= {dest: own.get(dest) for dest in _OF_A_COMPONENT if dest not in (*_OF_THE_JOB, "sbatch_args")}
        component = SbatchOptions(
            **{**values, "nodes": job_options.allocated_nodes(nodes, 0)},
            requeue=job_options.wants_requeue(parsed),
            extra=own.all("sbatch_args"),
        )
        found.append(Component(nodes=nodes, arguments=tuple(component_arguments(component))))
    if found and parsed.get("array") is not None:
        raise UsageError("--het with --array: Slurm has no arrays of het jobs")
    return tuple(found)
