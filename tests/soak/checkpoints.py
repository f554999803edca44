"""A soak whose checkpoints go through the nodes: what must hold of them, whatever was done to the run."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpc_elastic.checkpoints.folders import committed_steps, read_index
from tests.soak.faults import Kind
from tests.soak.journal import Began

KINDS = (Kind.WORKER_KILLED, Kind.AGENT_KILLED, Kind.NODE_OFF, Kind.TIME_LIMIT, Kind.PREEMPTION, Kind.DISK_FULL)
Events = Sequence[Sequence[Mapping[str, Any]]]
"""Of each attempt."""


def options(work: Path, replicas: int) -> tuple[str, ...]:
    """Copies that take longer than the time between two saves, so that faults meet them."""
    folder = ("--checkpoint-dir", str(work / "saved"), "--checkpoint-local", "/dev/shm:64M")
    return (*folder, "--checkpoint-replicas", str(replicas), "--checkpoint-bandwidth", "500K")


def wrong_choices(events: Events, began: Sequence[Began]) -> Iterator[str]:
    """A round that continues from less than was committed, or ranks that do not begin where it was agreed."""
    chosen = {
        (attempt, event["round"]): event
        for attempt, found in enumerate(events)
        for event in found
        if event["event"] == "checkpoint_chosen"
    }
    for place, event in chosen.items():
        before = max((e["step"] for e in _committed(events) if e["t"] < event["t"]), default=-1)
        step = event.get("step")
        if (-1 if step is None else step) < before:
            yield f"round {place} continues from step {step}, and {before} was committed before"
    for one in began:
        if one.place not in chosen or one.step != (chosen[one.place].get("step") or 0):
            agreed = chosen.get(one.place, {}).get("step")
            yield f"rank {one.rank} of round {one.place} began at step {one.step}, and the nodes agreed on {agreed}"


def wrong_folder(saved: Path, events: Events, *, last: int) -> Iterator[str]:
    """A committed checkpoint that is not whole, a newest one that is not the last step, and leftovers."""
    steps = committed_steps(saved)
    if max(steps, default=-1) < max((event["step"] for event in _committed(events)), default=-1):
        yield f"{steps} are left of what was committed"
    if not steps or steps[-1] != last:
        yield f"the training ended at step {last}, and {steps} are committed"
    for step in steps:
        index = read_index(saved, step)
        for name, facts in index.files.items() if index is not None else ():
            data = (saved / f"step-{step}" / name).read_bytes()
            if (len(data), zlib.crc32(data)) != (facts.size, facts.crc):
                yield f"step {step}: {name} is not what its index says"
        if index is None:
            yield f"step {step} has no index"
    if left := sorted(name for name in os.listdir(saved) if name.startswith(".")):
        yield f"left in {saved}: {left}"


def _committed(events: Events) -> Iterator[Mapping[str, Any]]:
    return (event for found in events for event in found if event["event"] == "checkpoint_committed")
