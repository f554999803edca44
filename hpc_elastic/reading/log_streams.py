"""Which outputs a run has, and which of them somebody asked for."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_elastic.log_times import STDERR, STDOUT
from hpc_elastic.reading.event_files import events_named
from hpc_elastic.run_paths import AttemptPaths, rank_index, round_index


@dataclass(frozen=True, slots=True)
class LogStream:
    """One worker's stdout or stderr in one round."""

    attempt: int
    round: int
    rank: int
    stream: int
    """`STDOUT` or `STDERR`."""
    path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundLayout:
    """Who was where in a round, as the agents told it."""

    nodes: Mapping[int, int]
    """Rank → node."""
    hosts: Mapping[int, str]
    """Node → host."""
    world_size: int
    """0: nobody told it."""


def round_numbers(attempt: AttemptPaths) -> list[int]:
    """The rounds that have a folder, ascending."""
    return sorted(index for name in _names(attempt.root) if (index := round_index(name)) is not None)


def rank_numbers(attempt: AttemptPaths, round_number: int) -> list[int]:
    """The ranks that have a folder in a round, ascending."""
    return sorted(rank for name in _names(attempt.round_dir(round_number)) if (rank := rank_index(name)) is not None)


def streams_of(
    attempt: AttemptPaths,
    round_number: int,
    *,
    wanted: Callable[[int], bool] = lambda rank: True,
    streams: tuple[int, ...] = (STDOUT, STDERR),
) -> list[LogStream]:
    """The outputs of a round, by rank, stdout first. Their files need not be there yet.

    Args:
        attempt: The attempt.
        round_number: The round.
        wanted: Of which ranks.
        streams: `STDOUT`, `STDERR` or both.
    """
    found = []
    for rank in rank_numbers(attempt, round_number):
        if wanted(rank):
            paths = attempt.rank(round_number, rank)
            for stream in streams:
                path = paths.stdout if stream == STDOUT else paths.stderr
                found.append(LogStream(attempt.number, round_number, rank, stream, path))
    return found


def read_layouts(attempt: AttemptPaths) -> dict[int, RoundLayout]:
    """Round → who was where, from the events. Rounds of which nobody told are not there."""
    nodes: dict[int, dict[int, int]] = {}
    sizes: dict[int, int] = {}
    hosts: dict[int, str] = {}
    for event in events_named(attempt, {"round_final"}):
        node, index = _whole(event.get("node")), _whole(event.get("round"))
        if node is None or index is None:
            continue
        hosts[node] = str(event.get("host"))
        ranks = event.get("ranks")
        for rank in map(_whole, ranks if isinstance(ranks, list) else ()):
            if rank is not None:
                nodes.setdefault(index, {})[rank] = node
        sizes[index] = max(sizes.get(index, 0), _whole(event.get("world_size")) or 0)
    return {
        index: RoundLayout(nodes=nodes.get(index, {}), hosts=hosts, world_size=sizes[index]) for index in sorted(sizes)
    }


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
