"""From options to what Slurm is to be asked for: what the command line and the executor have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from hpc_elastic.configuration import job_options
from hpc_elastic.configuration.het import het_components
from hpc_elastic.configuration.option_table import Parsed
from hpc_elastic.configuration.run_request import build_spec, notice_seconds, working_directory
from hpc_elastic.configuration.template import read_template
from hpc_elastic.run_spec import RunSpec
from hpc_elastic.slurm.array import parse_array
from hpc_elastic.slurm.node_range import parse_nodes
from hpc_elastic.slurm.sbatch import SbatchOptions, notice_grace, sbatch_arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmJob:
    """A job that is to be: the run, and sbatch's options for it."""

    spec: RunSpec
    options: SbatchOptions
    tasks: tuple[int, ...] = ()
    """Of an array."""
    template: str | None = None
    """The text of the user's own batch script, in place of ours."""
    asked_nodes: str = "--nodes 1"
    """As the user gave them, for messages."""
    shared: bool = False
    """The user says that all nodes see the run directory, whatever it looks like."""


def slurm_job(parsed: Parsed, env: Mapping[str, str], *, array: str | None = None) -> SlurmJob:
    """What the options ask for, checked.

    Args:
        parsed: The options, of all layers.
        env: For sbatch's own variables.
        array: The tasks, as for ``--array``, empty for none; None: as the options or sbatch's variable have it.

    Raises:
        UsageError: a value that can't be right, a template under which no run can work …
    """
    cwd = working_directory(parsed, env)
    template, parsed = read_template(parsed, cwd, env)
    asked = parsed.get("nodes") or "1"
    nodes = parse_nodes(asked, option=parsed.source("nodes", "--nodes"))
    components = het_components(parsed)
    all_nodes = (nodes[0] + sum(part.nodes[0] for part in components), nodes[1] + sum(p.nodes[1] for p in components))
    spec = build_spec(parsed, cluster="slurm", nodes=all_nodes, cwd=cwd, env=env, grace=notice_seconds(parsed))
    if array is None:
        array = parsed.get("array") or env.get("SBATCH_ARRAY_INX") or ""
    tasks = parse_array(array, option=parsed.source("array", "SBATCH_ARRAY_INX")) if array else ()
    options = job_options.sbatch_options(parsed, nodes=nodes, job_name=spec.name, grace=spec.signal_grace)
    options = replace(
        options,
        requeue=spec.requeue,
        array=array or None,
        components=tuple(component.arguments for component in components),
    )
    if parsed.get("chdir") is not None:
        options = replace(options, extra=(f"--chdir={spec.cwd}", *options.extra))
    arguments = (*sbatch_arguments(options), *(word for part in options.components for word in ("hetjob", *part)))
    return SlurmJob(
        spec=replace(spec, array=array, signal_grace=notice_grace(options), sbatch_args=arguments),
        options=options,
        tasks=tasks,
        template=template,
        asked_nodes=f"{parsed.source('nodes', '--nodes')} {asked}",
        shared=parsed.flag("allow_local_runs_dir"),
    )
