"""The doctor's own job: which run it is, what its nodes have written, and what that means."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from hpc_elastic.base import codec
from hpc_elastic.base.self_command import module_command
from hpc_elastic.doctor.files import judge_files
from hpc_elastic.doctor.findings import Finding, fold, ok, problem
from hpc_elastic.doctor.job import judge_job
from hpc_elastic.doctor.network import judge_network
from hpc_elastic.doctor.node_probe import SETTINGS, NodeFacts, load_facts
from hpc_elastic.doctor.probe_site import ProbeSettings
from hpc_elastic.doctor.software import judge_node_gpus, judge_pythons
from hpc_elastic.options import job_options
from hpc_elastic.options.run_request import (
    SlurmJob,
    build_spec,
    runs_directory,
    slurm_job,
    spec_fields,
    working_directory,
)
from hpc_elastic.options.table import Parsed
from hpc_elastic.run.attempt import UnreadableAttemptError, load_attempt, load_newest_result
from hpc_elastic.run.container import Container
from hpc_elastic.run.node_records import load_record
from hpc_elastic.run.option_values import GrowPolicy
from hpc_elastic.run.paths import RunPaths
from hpc_elastic.run.spec import RunSpec
from hpc_elastic.slurm.notation import names_text

NAME = "doctor"
_MINUTES = "20"
_GRACE = "60"
_LAST_CALL = 60.0
"""Seconds for which a node that has not come is waited for, before the others begin without it."""
TAKEN = frozenset(
    (
        *("partition", "account", "qos", "time", "cpus_per_task", "constraint", "exclude", "nodelist", "gres"),
        *("gpus_per_node", "mem", "reservation", "exclusive", "begin", "export", "sbatch_args", "srun_args", "profile"),
        *("cluster", "runs_dir", "allow_local_runs_dir", "chdir", "python", "setup", "setup_timeout", "rdzv_conf"),
        *("master_addr", "container_image", "container_mounts", "container_workdir", "container_env", "container_args"),
        *("grace", "shutdown_timeout"),
    )
)
"""`Option.dest` of those of ``submit`` that it takes, for its job or to compare with; ``--nodes`` is its own: a file's
is meant for runs."""


class ProbeJob(Struct, frozen=True, kw_only=True):
    """A run that is to be made: one probe on each node."""

    spec: RunSpec
    runs_dir: Path
    """Below the one for runs, so that `hpc-elastic list` does not show it."""
    settings: ProbeSettings
    slurm: SlurmJob | None = None
    """With the same spec; None: on this machine."""

    @property
    def paths(self) -> RunPaths:
        return RunPaths(self.runs_dir / self.spec.run_id)

    def fill(self) -> None:
        """Write into its run directory what the probes read."""
        probe_folder(self.paths).mkdir(mode=0o700)
        codec.save(probe_folder(self.paths) / SETTINGS, self.settings)


def probe_folder(paths: RunPaths) -> Path:
    """Where the probes' facts are."""
    return paths.root / "doctor"


def probe_settings(parsed: Parsed) -> ProbeSettings:
    """The workers' interpreter, and the container that it is in.

    Raises:
        UsageError: a value that can't be right.
    """
    given = spec_fields(parsed)
    image = given.get("container_image")
    container = None
    if image is not None:
        names = ("mounts", "workdir", "env", "args")
        rest = {name: given[f"container_{name}"] for name in names if f"container_{name}" in given}
        container = Container(image=image, **rest)
    own = sys.executable if container is None else "python3"
    return ProbeSettings(python=parsed.get("python") or own, container=container)


def plan_job(parsed: Parsed, *, cluster: str, env: Mapping[str, str]) -> ProbeJob:
    """What the options ask for.

    Args:
        parsed: The command line, with the options of `TAKEN`.
        cluster: ``slurm`` or ``local``.
        env: For sbatch's own variables.

    Raises:
        UsageError: a value that can't be right.
    """
    # Not by this interpreter's name alone: --setup would put the one of its own in that place.
    command = ("/usr/bin/env", *module_command("hpc_elastic.doctor.node_probe", "main"))
    values = {
        "job_name": (NAME,), "no_python": ("1",), "nproc_per_node": ("1",), "requeue": ("0",), "max_requeues": ("0",),
        "max_restarts": ("0",), "health_checks": ("none",),
    }  # fmt: skip
    if "SBATCH_TIMELIMIT" not in env:
        values["time"] = (_MINUTES,)
    asked = replace(parsed, command=command, values={**values, **parsed.values, "grace": (_GRACE,)})
    cwd = working_directory(parsed, env)
    runs_dir = runs_directory(parsed, cwd) / NAME
    slurm = slurm_job(asked, env, array="") if cluster == "slurm" else None
    if slurm is not None:
        spec = slurm.spec
    else:
        spec = build_spec(
            asked, cluster="local", nodes=job_options.asked_nodes(parsed), cwd=cwd, env=env,
            grace=job_options.notice_seconds(asked),
        )  # fmt: skip
    folder = probe_folder(RunPaths(runs_dir / spec.run_id))
    settings = probe_settings(parsed)
    spec = replace(
        spec,
        # The agents would serve the workers' store by the workers' interpreter, which is yet to be tried.
        entrypoint=replace(spec.entrypoint, args=(*spec.entrypoint.args, str(folder)), python=sys.executable),
        min_nodes=1,  # facts of the nodes that come are better than none
        grow=GrowPolicy.NEVER,
        rdzv_conf={"last_call_timeout": _LAST_CALL, **spec.rdzv_conf},
        container_image=None,
    )
    slurm = replace(slurm, spec=spec) if slurm is not None else None
    return ProbeJob(spec=spec, runs_dir=runs_dir, settings=settings, slurm=slurm)


class Collected(Struct, frozen=True, kw_only=True):
    """What became of the job."""

    nodes: tuple[str, ...]
    """That it had; empty: it never began."""
    facts: dict[str, NodeFacts]
    why: str = ""
    """Why nodes are missing in `facts`, or have not finished; or how the newest attempt ended."""
    kill_wait: float | None = None
    """Slurm's, in seconds."""

    @property
    def is_whole(self) -> bool:
        """Whether there were nodes, and all have finished."""
        return bool(self.nodes) and not any(_is_open(self.facts.get(node)) for node in self.nodes)


def _is_open(facts: NodeFacts | None) -> bool:
    return facts is None or bool(facts.unfinished)


def collect(paths: RunPaths) -> Collected:
    """Read what the nodes have written."""
    begun = paths.begun_attempts()
    if not begun:
        return Collected(nodes=(), facts={})
    try:
        attempt = load_attempt(begun[-1].attempt_json)
    except UnreadableAttemptError as error:
        return Collected(nodes=(), facts={}, why=str(error))
    stored = load_newest_result(paths)
    facts = load_facts(probe_folder(paths), attempt.nodes)
    known = (item.why for item in load_record(paths.nodes_json).evidence if _is_open(facts.get(item.node)))
    why = ", ".join(filter(None, dict.fromkeys(known)))
    if not why and stored is not None:
        why = f"{stored.outcome.replace('_', ' ')}: {stored.reason}"
    return Collected(nodes=attempt.nodes, facts=facts, why=why, kill_wait=attempt.kill_wait)


def judge_nodes(found: Collected, *, ended: str = "", container: Container | None = None) -> list[Finding]:
    """What the nodes' facts mean for a run.

    Args:
        found: What they wrote.
        ended: How the job ended, where it is not known from `found`.
        container: In which the workers run; None: on the host.
    """
    facts = found.facts
    why = "" if found.is_whole else found.why or ended
    pythons = {node: each.python for node, each in facts.items() if each.python is not None}
    return [
        *_came(facts, found.nodes, why),
        *judge_files({node: each.files for node, each in facts.items() if each.files is not None}),
        *judge_job(
            {node: each.slurm for node, each in facts.items() if each.slurm is not None},
            {node: each.notice for node, each in facts.items() if each.notice is not None},
            kill_wait=found.kill_wait,
        ),
        *judge_network({node: each.network for node, each in facts.items() if each.network is not None}),
        *judge_pythons(pythons, container),
        *judge_node_gpus({node: each.gpus for node, each in facts.items() if each.gpus is not None}),
    ]


def _came(facts: Mapping[str, NodeFacts], nodes: tuple[str, ...], ended: str) -> Iterator[Finding]:
    why = f": {ended}" if ended else ""
    missing = [node for node in nodes if node not in facts]
    if missing or not nodes:
        yield problem(
            "nodes.job", f"nothing came from {names_text(missing) if missing else 'any node'}{why}",
            "a run would not have those nodes, or not begin at all",
            "see the job's log and report in its run directory; leave the nodes out with --exclude",
        )  # fmt: skip
    stopped = {node: each.unfinished for node, each in facts.items() if each.unfinished}
    means, way_out = "what it would check is not known there", "see the job's log and report in its run directory"
    yield from fold([
        (node, problem("nodes.job", f"stopped while it probed {part}{why}", means, way_out))
        for node, part in stopped.items()
    ])  # fmt: skip
    if nodes and not missing and not stopped:
        yield ok("nodes.job", f"agents and workers ran on {names_text(nodes)}")
    yield from fold([
        (node, problem("nodes.probes", f"{part}: {text}", "what it checks is not known there", "try it on that node"))
        for node, each in facts.items()
        for part, text in each.failed.items()
    ])  # fmt: skip
