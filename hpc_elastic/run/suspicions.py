"""The suspicion that a run hangs: what follows from it, and what nodes write of it into ``suspicions/``."""

from __future__ import annotations

from enum import Enum

from msgspec import Struct

from hpc_elastic.errors import UsageError
from hpc_elastic.run.flight_tail import FlightTail


class OnHang(str, Enum):
    """What a suspicion leads to."""

    OBSERVE = "observe"
    """It is reported, in the job log and by `status`."""
    ACT = "act"
    """It is a hang: the workers leave their stacks, and are started again."""


class HangSettings(Struct, frozen=True, kw_only=True):
    """``--hangs``: what follows when all workers stand still."""

    action: OnHang = OnHang.OBSERVE
    least: float = 300.0
    """Seconds for which all must have stood still, at least."""


def parse_hangs(text: str, option: str = "--hangs") -> HangSettings:
    """``observe``, ``act``, ``act:600``."""
    name, colon, value = text.strip().partition(":")
    try:
        action = OnHang(name)
    except ValueError:
        raise UsageError(f"{option} {text}: give observe or act, or with seconds of rest, as in act:600") from None
    if not colon:
        return HangSettings(action=action)
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0.0
    if not 1 <= seconds <= 1e8:
        raise UsageError(f"{option} {text}: {value!r} is not a number of seconds from 1 on")
    return HangSettings(action=action, least=seconds)


class Source(str, Enum):
    """What a suspicion comes from."""

    KERNEL = "kernel"
    """All workers of all nodes stand still, by what the kernel counts of them."""
    NCCL = "nccl"
    """By NCCL's RAS ranks don't answer, or counts of collectives differ and stand still, or stand still on all."""


class RestingRank(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A worker that stands still."""

    rank: int
    at: str = ""
    """What the kernel says of its main process."""
    flight: FlightTail | None = None
    """Its last collectives, where it dumped torch's flight recorder."""


class NodeRest(Struct, frozen=True, kw_only=True):
    """``suspicions/node-<index>.json``: all workers of the node have stood still for too long."""

    round: int
    seconds: float
    """For how long, when this was written."""
    ranks: tuple[RestingRank, ...] = ()
    gpus: tuple[int, ...] = ()
    """Percent of the time in which a kernel ran on each of its GPUs, by NVML; empty: not known."""


class Suspicion(Struct, frozen=True, kw_only=True):
    """``suspicions/now.json``: the run seems to hang. It goes when its workers go on."""

    round: int
    source: Source
    reason: str
    """One line, with the culprit where one is known."""
    ranks: tuple[int, ...] = ()
    """The ranks that the others wait for; empty: not known."""
    written_ns: int = 0
    """By the wall clock of the node of group rank 0."""
    may_be_rest: bool = False
    """All ranks have launched the same, and nothing shows that they wait for each other: never acted on."""
