"""The doctor's own job: its run, its worker on each node, the facts that these write, and their judgement."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from msgspec import Struct, field
from msgspec.structs import replace

from hpc_elastic.agent.health import GPU_SECONDS
from hpc_elastic.base import codec
from hpc_elastic.base.clock import SystemClock
from hpc_elastic.base.files import Unreadable, ask_about, make_private_dir
from hpc_elastic.base.host_facts import module_command
from hpc_elastic.doctor import host, network
from hpc_elastic.doctor.findings import DoctorFinding, ProbeSettings, ProbeSite, fold, ok, problem
from hpc_elastic.doctor.host import IMPORT_SECONDS, FileFacts, GpusFacts, JobMemoryFacts, NoticeFacts, PythonFacts
from hpc_elastic.doctor.network import BandwidthFacts, NetworkFacts
from hpc_elastic.options import job_options
from hpc_elastic.options.run_request import SlurmJob, build_spec, runs_directory, slurm_job, working_directory
from hpc_elastic.options.table import Parsed
from hpc_elastic.run.node_score import load_record
from hpc_elastic.run.option_values import GrowPolicy
from hpc_elastic.run.paths import RunPaths, UnreadableAttemptError, load_attempt, load_newest_result
from hpc_elastic.run.spec import Container, RunSpec
from hpc_elastic.slurm.job_environment import names_text
from hpc_elastic.store.file_store import FileStore
from hpc_elastic.worker_api.preemption import preemption_notice

NAME = "doctor"
_ENDING = ".node.json"
DOCTOR_TAKEN = frozenset(
    (
        *job_options.AS_GIVEN,
        *("partition", "account", "qos", "time", "exclude", "gpus_per_node", "sbatch_args", "srun_args", "profile"),
        *("cluster", "runs_dir", "allow_local_runs_dir", "chdir", "python", "setup", "setup_timeout", "rdzv_conf"),
        *("master_addr", "container_image", "container_mounts", "container_workdir", "container_env", "container_args"),
        *("grace", "shutdown_timeout"),
    )
)
"""`Option.dest` of the options of ``submit`` that it takes."""
PARTS: Mapping[str, tuple[Callable[[ProbeSite], Any], float]] = {
    "memory": (host.probe_memory, 60.0),
    "files": (host.probe_files, 240.0),
    "network": (network.probe_network, 180.0),
    "python": (host.probe_python, IMPORT_SECONDS + 60.0),
    "bandwidth": (network.probe_bandwidth, 200.0),
    "gpus": (host.probe_gpus, GPU_SECONDS + 15.0),
    "notice": (host.probe_notice, 800.0),  # last: the job ends with it
}
"""Fields of `ProbedNode`: the probe, and its time limit in seconds."""


class ProbedNode(Struct, kw_only=True):
    node: str
    rank: int = 0
    files: FileFacts | None = None
    memory: JobMemoryFacts | None = None
    network: NetworkFacts | None = None
    bandwidth: BandwidthFacts | None = None
    notice: NoticeFacts | None = None
    python: PythonFacts | None = None
    gpus: GpusFacts | None = None
    failed: dict[str, str] = field(default_factory=dict)
    unfinished: str = ""
    """The part that was being probed when this was written; empty: all are done."""


class ProbeJob(Struct, frozen=True, kw_only=True):
    spec: RunSpec
    runs_dir: Path
    """A folder below the one for runs, so that `hpc-elastic list` does not show it."""
    settings: ProbeSettings
    slurm: SlurmJob | None = None
    """The same spec as a job; None: on this machine."""

    @property
    def paths(self) -> RunPaths:
        return RunPaths(self.runs_dir / self.spec.run_id)


def _folder(paths: RunPaths) -> Path:
    # The probes write their facts here.
    return paths.root / "doctor"


def plan_job(parsed: Parsed, *, cluster: str, env: Mapping[str, str]) -> ProbeJob:
    # Not this interpreter's name alone: --setup would put its own interpreter in that place.
    command = ("/usr/bin/env", *module_command("hpc_elastic.doctor.node_job", "main"))
    values = {
        "job_name": (NAME,), "no_python": ("1",), "nproc_per_node": ("1",), "requeue": ("0",), "max_requeues": ("0",),
        "max_restarts": ("0",), "health_checks": ("none",),
    }  # fmt: skip
    if "SBATCH_TIMELIMIT" not in env:
        values["time"] = ("20",)
    asked = replace(parsed, command=command, values={**values, **parsed.values, "grace": ("60",)})
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
    own = sys.executable if spec.container is None else "python3"
    settings = ProbeSettings(python=parsed.get("python") or own, container=spec.container)
    args = (*spec.entrypoint.args, str(_folder(RunPaths(runs_dir / spec.run_id))), codec.dumps(settings))
    spec = replace(
        spec,
        # The agents would serve the workers' store by the workers' interpreter, which is yet to be tried.
        entrypoint=replace(spec.entrypoint, args=args, python=sys.executable),
        min_nodes=1,  # facts of the nodes that come are better than none
        grow=GrowPolicy.NEVER,
        rdzv_conf={"last_call_timeout": 60.0, **spec.rdzv_conf},
        container_image=None,
    )
    slurm = replace(slurm, spec=spec) if slurm is not None else None
    return ProbeJob(spec=spec, runs_dir=runs_dir, settings=settings, slurm=slurm)


def probe_node(site: ProbeSite) -> ProbedNode:
    facts, path = ProbedNode(node=site.node, rank=site.rank), site.folder / f"{site.node}{_ENDING}"
    for name, (probe, seconds) in PARTS.items():
        print(f"doctor: {name}", flush=True)
        facts.unfinished = name
        codec.save(path, facts)
        found = _bounded(probe, site, seconds)
        if isinstance(found, str):
            facts.failed[name] = found
        else:
            setattr(facts, name, found)
    facts.unfinished = ""
    codec.save(path, facts)
    return facts


def _bounded(probe: Callable[[ProbeSite], Any], site: ProbeSite, seconds: float) -> Any:
    # A text is the reason why the probe failed. One that hangs is left to its thread.
    outcome: list[Any] = []

    def work() -> None:
        try:
            outcome.append(probe(site))
        except Exception as error:
            outcome.append(f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    return outcome[0] if outcome else f"no end after {seconds:g} s"


def open_site(folder: Path, settings: str, env: Mapping[str, str]) -> ProbeSite:
    """Open this worker's place, by the variables of each worker and the JSON of `ProbeSettings`."""
    rank, clock = int(env["GROUP_RANK"]), SystemClock()
    make_private_dir(folder)
    # A round that follows a lost node has keys of its own.
    root = folder / f"store-{env['HPC_ELASTIC_ATTEMPT']}-{env['TORCHELASTIC_RESTART_COUNT']}"
    return ProbeSite(
        rank=rank,
        world_size=int(env["GROUP_WORLD_SIZE"]),
        node=env.get("SLURMD_NODENAME") or f"node{rank}",
        folder=folder,
        settings=codec.loads(ProbeSettings, settings),
        store=FileStore(root, clock=clock),
        clock=clock,
        env=env,
    )


def main() -> NoReturn:
    preemption_notice()  # from now on the agent knows that this worker takes notices
    probe_node(open_site(Path(sys.argv[1]), sys.argv[2], os.environ))
    sys.stdout.flush()
    os._exit(0)  # a probe may hang in a mount


def collect(paths: RunPaths) -> tuple[tuple[str, ...], dict[str, ProbedNode], str]:
    """The job's nodes, empty where it never began; their facts; and the known reason why some are missing."""
    begun = paths.begun_attempts()
    if not begun:
        return (), {}, ""
    try:
        attempt = load_attempt(begun[-1].attempt_json)
    except UnreadableAttemptError as error:
        return (), {}, str(error)
    ask_about(_folder(paths))
    read = {node: codec.load(_folder(paths) / f"{node}{_ENDING}", ProbedNode) for node in attempt.nodes}
    facts = {node: each for node, each in read.items() if not isinstance(each, Unreadable)}
    left = unfinished(attempt.nodes, facts)
    known = (item.why for item in load_record(paths.nodes_json).evidence if item.node in left)
    why = ", ".join(filter(None, dict.fromkeys(known)))
    if not why and (stored := load_newest_result(paths)) is not None:
        why = f"{stored.outcome.replace('_', ' ')}: {stored.reason}"
    return attempt.nodes, facts, why


def unfinished(nodes: Sequence[str], facts: Mapping[str, ProbedNode]) -> dict[str, str]:
    texts = {node: f"stopped while it probed {each.unfinished}" for node, each in facts.items() if each.unfinished}
    return {node: texts.get(node, "wrote nothing") for node in nodes if node in texts or node not in facts}


def judge_nodes(
    nodes: Sequence[str], facts: Mapping[str, ProbedNode], *, why: str = "", container: Container | None = None
) -> list[DoctorFinding]:
    """`why` is the reason for missing facts, or how the job ended; `container` is the workers' image."""

    def part(name: str) -> dict[str, Any]:
        return {node: found for node, each in facts.items() if (found := getattr(each, name)) is not None}

    return [
        *_came(nodes, facts, f": {why}" if why else ""),
        *host.judge_files(part("files")),
        *host.judge_job(part("memory"), part("notice")),
        *network.judge_network(part("network")),
        *network.judge_bandwidth(part("bandwidth")),
        *(host.judge_pythons(part("python"), container) if facts else ()),
        *host.judge_node_gpus(part("gpus")),
    ]


def _came(nodes: Sequence[str], facts: Mapping[str, ProbedNode], why: str) -> Iterator[DoctorFinding]:
    means, way_out = "a run would not have those nodes", "see the job's log and report; leave nodes out with --exclude"
    texts = unfinished(nodes, facts)
    if not nodes:
        yield problem("nodes.job", f"it did not run on any node{why}", "a run would not begin", way_out)
    elif not texts:
        yield ok("nodes.job", f"agents and workers ran on {names_text(nodes)}")
    yield from fold([(node, problem("nodes.job", text + why, means, way_out)) for node, text in texts.items()])
    yield from fold([
        (node, problem("nodes.probes", f"{part}: {text}", "what it checks is not known there", "try it on that node"))
        for node, each in facts.items()
        for part, text in each.failed.items()
    ])  # fmt: skip
