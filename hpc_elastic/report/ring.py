"""Restarts within the processes of a round, as the ring told its agents: the third ring, in the same report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpc_elastic.report.collect_values import integer, integer_or, text_of, whole_numbers
from hpc_elastic.report.fold import rank_ranges

_SHOWN = 3
_MOST_NAMED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RingRestart:
    """The function started again in the processes that were left, or a process gave up."""

    told_ns: int
    """When, by the node's clock."""
    node: int
    iteration: int
    """That began; of a process that gave up, the one that it was in."""
    seconds: float = 0.0
    """From the fault to the function's start."""
    world_size: int = 0
    interruptions: tuple[tuple[int, str], ...] = ()
    """Rank in the iteration before, and what happened there."""
    joined: tuple[int, ...] = ()
    """Ranks in the iteration before whose places fresh processes took."""
    gave_up: str = ""
    """Why no further restart was tried; empty: one was."""


def read_restart(event: Mapping[str, Any], when: int, node: int) -> RingRestart:
    """From an agent's event ``ring_restarted`` or ``ring_gave_up``; what is not as it should be is left out."""
    seconds = event.get("seconds")
    pairs = event.get("interruptions")
    found = []
    for pair in pairs if isinstance(pairs, list) else []:
        if isinstance(pair, list) and len(pair) == 2 and (rank := integer(pair[0])) is not None:
            found.append((rank, text_of(pair[1])[:64]))
    return RingRestart(
        told_ns=when,
        node=node,
        iteration=integer_or(integer(event.get("iteration")), 0),
        seconds=float(seconds) if isinstance(seconds, int | float) else 0.0,
        world_size=integer_or(integer(event.get("world_size")), 0),
        interruptions=tuple(found),
        joined=tuple(whole_numbers(event.get("joined"))),
        gave_up=(text_of(event.get("reason")) or "no reason was given") if event.get("event") == "ring_gave_up" else "",
    )


def describe_restart(restart: RingRestart) -> str:
    """One clause, as in ``iteration 2 after 0.12 s: EXCEPTION on rank 1``."""
    if restart.gave_up:
        return f"the in-process ring gave up: {restart.gave_up}"
    kinds: dict[str, list[int]] = {}
    for rank, kind in restart.interruptions:
        kinds.setdefault(kind, []).append(rank)
    named = [f"{kind} on rank{'s' * (len(ranks) > 1)} {rank_ranges(ranks)}" for kind, ranks in kinds.items()]
    told = "; ".join(named[:_MOST_NAMED]) or "a fault"
    fresh = f"; fresh process in place of rank{'s' * (len(restart.joined) > 1)} {rank_ranges(restart.joined)}"
    return f"iteration {restart.iteration} after {restart.seconds:.2f} s: {told}{fresh if restart.joined else ''}"


def ring_lines(restarts: Sequence[RingRestart], *, everything: bool) -> list[str]:
    """The last ones in their order, and how many there were. Several ranks that gave up in one iteration are one line.

    Args:
        restarts: Of one round, in the order of time.
        everything: Whether all are to be shown.
    """
    lines = list(dict.fromkeys(describe_restart(restart) for restart in restarts))
    if everything or len(lines) <= _SHOWN:
        return lines
    done = [restart for restart in restarts if not restart.gave_up]
    total = sum(restart.seconds for restart in done)
    return [f"{len(done)} restarts within the processes, {total:.2f} s in all; the last:", *lines[1 - _SHOWN :]]


def ring_json(restarts: Sequence[RingRestart]) -> list[dict[str, Any]]:
    """For report.json."""
    return [
        {
            "iteration": restart.iteration,
            "seconds": restart.seconds,
            "world_size": restart.world_size,
            "interruptions": [{"rank": rank, "interruption": kind} for rank, kind in restart.interruptions],
            "joined": list(restart.joined),
            "gave_up": restart.gave_up or None,
            "told_ns": restart.told_ns,
            "node": restart.node,
        }
        for restart in restarts
    ]
