"""Progress of a round's workers: by their heartbeats, or by the growth of their logs.

Ages compare this host's wall clock with the writers': for people, not for decisions.
"""

from __future__ import annotations

import os
from pathlib import Path

from msgspec import Struct

from hpc_elastic.base import codec
from hpc_elastic.base.files import Unreadable
from hpc_elastic.rendezvous.state import RoundRecord
from hpc_elastic.run.heartbeats import COUNTED, NodeHeartbeats, ProgressSource, RankHeartbeat
from hpc_elastic.run.paths import AttemptPaths

_MOST_RANKS_LOOKED_AT = 64


class StepStatus(Struct, frozen=True, kw_only=True):
    """Ages in seconds."""

    least: int
    most: int
    behind: tuple[int, ...]
    """Ranks at `least`, unless all are there."""
    ranks: int
    told_seconds: float
    heartbeat_seconds: float | None = None
    steps_per_second: float | None = None
    """The slowest node's, over the last minute; None: not known yet."""
    total: int | None = None
    seconds_to_end: float | None = None
    loss: float | None = None
    """The lowest reporting rank's last one."""
    checkpoint_seconds: float | None = None
    checkpoint_step: int | None = None
    source: ProgressSource


class OutputStatus(Struct, frozen=True, kw_only=True):
    bytes: int
    silent_seconds: float | None
    """None: none has printed yet."""
    newest_rank: int | None
    silent_ranks: int
    ranks: int
    """Number of ranks looked at: of a large run 64, evenly chosen."""


def read_steps(attempt: AttemptPaths, record: RoundRecord, *, now_ns: int) -> tuple[StepStatus | None, float | None]:
    known: dict[ProgressSource, dict[int, int]] = {}
    resting: list[float] = []
    paces: list[float] = []
    totals: list[int] = []
    losses: list[float] = []
    saved: list[tuple[float, RankHeartbeat]] = []
    newest, heard = 0, None
    for member in record.members:
        found = codec.load(attempt.heartbeats(member.node), NodeHeartbeats)
        if isinstance(found, Unreadable) or found.round != record.round:
            continue
        age = max(0.0, (now_ns - found.written_ns) / 1e9)
        for beat in found.ranks:
            source = ProgressSource.HEARTBEAT if beat.step is not None else beat.source
            step = beat.counted_steps if beat.step is None else beat.step
            if step is not None and source is not ProgressSource.UNKNOWN:  # an earlier version named no source
                known.setdefault(source, {})[beat.rank] = step
        if found.progress is not None and found.progress.resting is not None:
            resting.append(found.progress.resting and found.progress.resting + age)
        saved += [(age + beat.saved_age, beat) for beat in found.ranks if beat.saved_age is not None]
        ages = [age + beat.age for beat in found.ranks if beat.count or beat.counted_steps]
        heard = min([*ages, *([heard] if heard is not None else [])], default=None)
        paces += [found.steps_per_second] if found.steps_per_second is not None else []
        totals += [found.total] if found.total is not None else []
        losses += [found.loss] if found.loss is not None else []
        newest = max(newest, found.written_ns)
    at_rest = min(resting) if resting and len(resting) == len(record.members) else None
    if not known:
        return None, at_rest
    source = min(known, key=[ProgressSource.HEARTBEAT, *COUNTED].index)
    steps = known[source]
    least, most = min(steps.values()), max(steps.values())
    pace, total = min(paces, default=None), max(totals, default=None)
    status = StepStatus(
        least=least,
        most=most,
        behind=tuple(sorted(rank for rank, step in steps.items() if step == least)) if least < most else (),
        ranks=len(steps),
        source=source,
        told_seconds=round(max(0.0, (now_ns - newest) / 1e9), 1),
        heartbeat_seconds=None if heard is None else round(heard, 1),
        steps_per_second=pace,
        total=total,
        seconds_to_end=round(max(0, total - least) / pace, 1) if pace and total is not None else None,
        loss=losses[0] if losses else None,
        checkpoint_seconds=round(min(age for age, _ in saved), 1) if saved else None,
        checkpoint_step=max((beat.saved_step for _, beat in saved if beat.saved_step is not None), default=None),
    )
    return status, at_rest


def read_output(attempt: AttemptPaths, record: RoundRecord, *, now_ns: int) -> OutputStatus:
    world = sum(member.local_world_size for member in record.members)
    step = max(1, -(-world // _MOST_RANKS_LOOKED_AT))
    written, newest, silent, looked = 0, (0, -1), 0, 0
    for rank in range(0, world, step):
        paths = attempt.rank(record.round, rank)
        sizes = [found for path in (paths.stdout, paths.stderr) if (found := _size(path)) is not None]
        looked += 1
        size = sum(found[0] for found in sizes)
        written += size
        silent += not size
        if size:
            newest = max(newest, (max(when for size, when in sizes if size), rank))
    has_printed = newest[1] >= 0
    return OutputStatus(
        bytes=written,
        silent_seconds=round(max(0.0, (now_ns - newest[0]) / 1e9), 1) if has_printed else None,
        newest_rank=newest[1] if has_printed else None,
        silent_ranks=silent,
        ranks=looked,
    )


def _size(path: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns
