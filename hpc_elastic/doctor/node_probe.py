"""The worker of the doctor's job, one on each node: measures, and writes what it found. Nothing is judged here.

It runs by doctor's own interpreter, as the agents do; what is asked of the workers' interpreter is asked in a process.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from msgspec import Struct, field

from hpc_elastic.agent.health import GPU_SECONDS
from hpc_elastic.base import codec
from hpc_elastic.base.clock import SystemClock
from hpc_elastic.base.files import Unreadable, ask_about
from hpc_elastic.doctor.files import FileFacts, probe_files
from hpc_elastic.doctor.job import JobFacts, NoticeFacts, probe_job, probe_notice
from hpc_elastic.doctor.network import NetworkFacts, probe_network
from hpc_elastic.doctor.probe_site import ProbeSettings, ProbeSite
from hpc_elastic.doctor.software import IMPORT_SECONDS, GpusFacts, PythonFacts, probe_gpus, probe_python
from hpc_elastic.store.file_store import FileStore
from hpc_elastic.worker_api.preemption import preemption_notice

SETTINGS = "settings.json"
_ALL_COME_SECONDS = 60.0
_ENDING = ".node.json"


class NodeFacts(Struct, kw_only=True):
    """One node's. A part is None where its probe failed, or was not reached."""

    node: str
    rank: int = 0
    host: str = ""
    """What the host calls itself."""
    files: FileFacts | None = None
    slurm: JobFacts | None = None
    network: NetworkFacts | None = None
    notice: NoticeFacts | None = None
    python: PythonFacts | None = None
    gpus: GpusFacts | None = None
    failed: Mapping[str, str] = field(default_factory=dict)
    """Part → why there is none."""
    unfinished: str = ""
    """The part that was being probed when this was written; empty: all are done."""


def save_facts(folder: Path, facts: NodeFacts) -> None:
    """Write them, or what is there of them so far."""
    codec.save(folder / f"{facts.node}{_ENDING}", facts)


def load_facts(folder: Path, nodes: Sequence[str]) -> dict[str, NodeFacts]:
    """Those of `nodes` that wrote any which can be read."""
    ask_about(folder)
    found = {node: codec.load(folder / f"{node}{_ENDING}", NodeFacts) for node in nodes}
    return {node: facts for node, facts in found.items() if not isinstance(facts, Unreadable)}


class Part(Struct, frozen=True):
    """One probe: its field in `NodeFacts`, and how long it may take."""

    name: str
    probe: Callable[[ProbeSite], Any]
    seconds: float


PARTS = (
    Part("slurm", probe_job, 60.0),
    Part("files", probe_files, 240.0),
    Part("network", probe_network, 300.0),
    Part("python", probe_python, IMPORT_SECONDS + 60.0),
    Part("gpus", probe_gpus, GPU_SECONDS + 15.0),
    Part("notice", probe_notice, 800.0),  # last: the job ends with it
)


def open_site(folder: Path, env: Mapping[str, str]) -> ProbeSite:
    """This worker's place, by the variables that each worker has.

    Raises:
        OSError: the settings can't be read.
    """
    rank, clock = int(env["GROUP_RANK"]), SystemClock()
    settings = codec.load(folder / SETTINGS, ProbeSettings)
    if isinstance(settings, Unreadable):
        raise OSError(f"{folder / SETTINGS}: {settings}")
    # A round that follows a lost node has keys of its own.
    root = folder / f"store-{env['HPC_ELASTIC_ATTEMPT']}-{env['TORCHELASTIC_RESTART_COUNT']}"
    return ProbeSite(
        rank=rank,
        world_size=int(env["GROUP_WORLD_SIZE"]),
        node=env.get("SLURMD_NODENAME") or f"node{rank}",
        folder=folder,
        settings=settings,
        store=FileStore(root, clock=clock),
        clock=clock,
        env=env,
    )


def probe_node(site: ProbeSite) -> NodeFacts:
    """Measure all parts, one after the other, and write what is known before each, and at the end."""
    facts = NodeFacts(node=site.node, rank=site.rank, host=socket.gethostname(), unfinished="hosts")
    save_facts(site.folder, facts)
    came = site.gather("hosts", site.node, seconds=_ALL_COME_SECONDS)
    site.hosts = tuple(came.get(rank, "") for rank in range(site.world_size))
    failed: dict[str, str] = {}
    for part in PARTS:
        print(f"doctor: {part.name}", flush=True)
        facts.unfinished = part.name
        save_facts(site.folder, facts)
        found = _bounded(part, site)
        if isinstance(found, str):
            failed[part.name] = found
            facts.failed = failed
        else:
            setattr(facts, part.name, found)
    facts.unfinished = ""
    save_facts(site.folder, facts)
    return facts


def _bounded(part: Part, site: ProbeSite) -> Any:
    """What the probe found; a text: why it found nothing. One that hangs is left to its thread."""
    outcome: list[Any] = []

    def work() -> None:
        try:
            outcome.append(part.probe(site))
        except Exception as error:
            outcome.append(f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=work, name=part.name, daemon=True)
    thread.start()
    thread.join(part.seconds)
    return outcome[0] if outcome else f"no end after {part.seconds:g} s"


def main() -> NoReturn:
    """``FOLDER``: probe this node."""
    preemption_notice()  # from now on the agent knows that this worker takes notices
    probe_node(open_site(Path(sys.argv[1]), os.environ))
    sys.stdout.flush()
    os._exit(0)  # a probe may hang in a mount
