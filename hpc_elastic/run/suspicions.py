"""``--hangs``, and the files that nodes write into ``suspicions/`` while their workers make no progress."""

from __future__ import annotations

from enum import Enum

from msgspec import Struct

from hpc_elastic.errors import UsageError
from hpc_elastic.run.activities import FlightTail
from hpc_elastic.run.option_values import number_of


class OnHang(str, Enum):
    OBSERVE = "observe"
    """It is reported: in the job log, by `status` and in the report."""
    ACT = "act"
    """The workers leave their stacks, and are started again."""


class HangSettings(Struct, frozen=True, kw_only=True):
    action: OnHang = OnHang.OBSERVE
    least: float = 300.0
    """Seconds without progress that are never a hang."""


def parse_hangs(text: str, option: str = "--hangs") -> HangSettings:
    name, colon, value = text.strip().partition(":")
    try:
        action = OnHang(name)
    except ValueError:
        raise UsageError(
            f"{option} {text}: give observe or act, or with seconds without progress, as in act:600"
        ) from None
    if not colon:
        return HangSettings(action=action)
    seconds = number_of(value)
    if not 1 <= seconds <= 1e8:
        raise UsageError(f"{option} {text}: {value!r} is not a number of seconds from 1 on")
    return HangSettings(action=action, least=seconds)


class Source(str, Enum):
    HEARTBEAT = "heartbeat"
    """A worker sent no heartbeat, and its optimizer did no step, for its section's timeout."""
    KERNEL = "kernel"
    """No worker of any node makes progress: each rests by the kernel's counts, or does not answer."""
    NCCL = "nccl"
    """NCCL's RAS shows ranks that don't answer, or counts of collectives that differ or stand still on all."""


class StalledRank(Struct, frozen=True, kw_only=True, omit_defaults=True):
    rank: int
    at: str = ""
    """The kernel's state of its main process."""
    waits: bool = False
    """Its main thread is in a system call in which a process waits for another one."""
    is_stuck: bool = False
    """It is stopped, or sits in the kernel."""
    flight: FlightTail | None = None


class NodeStall(Struct, frozen=True, kw_only=True):
    """``suspicions/node-<index>.json``: no worker of the node has made progress for as long as ``--hangs`` allows."""

    round: int
    seconds: float
    longest: float = 0.0
    """The node's longest such time in this attempt that ended by itself, seconds."""
    ranks: tuple[StalledRank, ...] = ()
    """Empty: all workers here have ended with 0."""
    gpus: tuple[int, ...] = ()
    """Percent of the time in which a kernel ran on each of its GPUs, by NVML; empty: unknown."""


class Suspicion(Struct, frozen=True, kw_only=True):
    """``suspicions/now.json``: the run hangs, or seems to. Removed when its workers continue."""

    round: int
    source: Source
    reason: str
    """One line, with the culprit where one is known."""
    ranks: tuple[int, ...] = ()
    written_ns: int = 0
    """Wall clock of the node of group rank 0."""
    seconds: float = 0.0
    """Length of the time without progress then."""
    may_be_rest: bool = False
    """All ranks have launched the same, and nothing shows that they wait for each other: never acted on."""
