"""What one node of the doctor's job wrote: raw facts, judged where all of them are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct, field

from hpc_elastic.base import codec
from hpc_elastic.base.files import Unreadable, ask_about
from hpc_elastic.doctor.file_probe import FileFacts
from hpc_elastic.doctor.job_probe import JobFacts, NoticeFacts
from hpc_elastic.doctor.network_probe import NetworkFacts
from hpc_elastic.doctor.software_probe import NodeGpus, SoftwareFacts

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
    software: SoftwareFacts | None = None
    gpus: NodeGpus | None = None
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
