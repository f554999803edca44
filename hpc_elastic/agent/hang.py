"""Pure decisions on whether a run hangs, and for which rank the others wait, over what the kernel shows.

A node stalls where each of its workers rests, by what the kernel counts of it, or runs and does not answer since some
thread holds the interpreter; the run hangs where all nodes stall for longer than it ever did before. Heartbeats are
judged in `heartbeat_watch`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from hpc_elastic.agent.heartbeat_watch import Hang
from hpc_elastic.base.text import duration, plural
from hpc_elastic.failures.ranking import Suspect
from hpc_elastic.run.activities import Activity
from hpc_elastic.run.suspicions import NodeStall, Source, StalledRank

HANG_FINGERPRINT = "hang:"
STOPPED_FINGERPRINT = "hang:stopped"
KERNEL_FINGERPRINT = "hang:kernel"
"""A worker sat in the kernel, where no signal reached it."""


def may_be_a_bug(fingerprint: str) -> bool:
    """A process that is stopped from outside, or a mount that hangs, is no bug in the script."""
    return bool(fingerprint) and fingerprint not in (STOPPED_FINGERPRINT, KERNEL_FINGERPRINT)


IDLE_CPU, IDLE_BYTES, IDLE_SWITCHES = 0.02, 16384.0, 1000.0
"""A worker is idle below this share of a core, and these numbers a second: a thread that looks at times is no work.
Each gloo group of a waiting process has one that looks 100 times a second, at 0.2 % of a core (torch 2.13); a monitor
that reads the machine's load (psutil, every 15 s) reads 1 to 2 KiB a second."""
_CPU_ROUNDING = 0.03
"""Seconds of CPU time by which a look may be wrong: the kernel counts in ticks of 0.01 s."""
LONGEST_FACTOR = 3.0
"""Multiple of the run's own longest pause so far that is no hang."""


class Counts(Struct, frozen=True, kw_only=True):
    cpu: float = 0.0
    bytes: int = 0
    """Read and written, in files and through TCP."""
    switches: int = 0
    beats: int = 0
    """Heartbeats or optimizer steps, which no kernel counts."""


class Stall(Struct, frozen=True, kw_only=True):
    """Times are the agent's monotonic clock."""

    at: float
    counts: Mapping[int, Counts]
    since: Mapping[int, float] = {}
    ended_at: float | None = None
    longest: float = 0.0

    @property
    def began(self) -> float | None:
        if not self.counts:
            return self.ended_at
        return max(self.since.values()) if len(self.since) == len(self.counts) else None


def next_stall(
    before: Stall, counts: Mapping[int, Counts], *, mute: Mapping[int, float], running: int, now: float
) -> Stall:
    """`mute`: since when a worker has not answered. `running` counts those in containers that have not come up, too."""
    seconds, since = now - before.at, {}
    for rank, count in counts.items():
        known = before.counts.get(rank)
        if known is None or count.beats != known.beats:
            continue
        if _is_idle(known, count, seconds):
            since[rank] = before.since.get(rank, before.at)
        elif rank in mute:
            since[rank] = max(mute[rank], before.since.get(rank, mute[rank]))
    ended_at = before.ended_at if before.ended_at is not None or running else before.at
    after = Stall(at=now, counts=counts, since=since, ended_at=ended_at, longest=before.longest)
    if running != len(counts):
        return replace(after, since={})
    if before.began is not None and after.began is None:
        return replace(after, longest=max(before.longest, before.at - before.began))
    return after


def _is_idle(before: Counts, now: Counts, seconds: float) -> bool:
    return (
        abs(now.cpu - before.cpu) < IDLE_CPU * seconds + _CPU_ROUNDING
        and abs(now.bytes - before.bytes) < IDLE_BYTES * seconds
        and abs(now.switches - before.switches) < IDLE_SWITCHES * seconds
    )


def limit_without_progress(longest: float, least: float) -> float:
    return max(least, LONGEST_FACTOR * longest)


def judge_run(
    stalls: Mapping[int, NodeStall | None], *, round_index: int, least: float, hosts: Mapping[int, str]
) -> Hang | None:
    """None where a node makes progress, or wrote nothing readable, and where all workers of all nodes have ended."""
    here = [stall for stall in stalls.values() if stall is not None and stall.round == round_index]
    ranks = sorted((rank for stall in here for rank in stall.ranks), key=lambda rank: rank.rank)
    if len(here) < len(stalls) or not ranks:
        return None
    # A pause of the run is one of each node's: a node that only waited for another one has had longer ones.
    seconds = min(stall.seconds for stall in here)
    if seconds < limit_without_progress(min(stall.longest for stall in here), least):
        return None
    reason = f"no rank of {len(ranks)} has made progress for {duration(seconds)}"
    if ended := len(hosts) - len(ranks):
        reason += f" ({plural(ended, 'other')} ended with 0)"
    if uses := [use for stall in here for use in stall.gpus]:
        reason += f", their GPUs are at {min(uses)}{f' to {max(uses)}' if max(uses) > min(uses) else ''} %"
    suspects = find_odd_ranks(ranks, hosts, have_others_ended=ended > 0)
    if suspects:
        first, more = suspects[0], len(suspects) - 1
        where = f" on {first.host}" if first.host else ""
        reason += f"; rank {first.rank}{where}: {first.why}" + (f"; {plural(more, 'other rank')} too" if more else "")
    return Hang(source=Source.KERNEL, reason=reason, ranks=tuple(suspect.rank for suspect in suspects), seconds=seconds)


def find_odd_ranks(
    ranks: Sequence[StalledRank], hosts: Mapping[int, str], *, have_others_ended: bool = False
) -> tuple[Suspect, ...]:
    """Without a majority of ranks that look alike, none is named, unless the others have ended."""
    from hpc_elastic.failures.collectives import compare_ranks  # not at an agent's start: `rounds.load`

    compared = compare_ranks(
        [Activity(rank=rank.rank, flight=rank.flight) for rank in ranks if rank.flight is not None], hosts=hosts
    )
    if compared.suspects:
        return compared.suspects
    for odd, why, most in (
        ([rank for rank in ranks if rank.flight is None], "it does not answer: ", 0.5),
        ([rank for rank in ranks if rank.is_stuck], "it is in state ", 0.5),
        ([rank for rank in ranks if not rank.waits], "it waits for no other process: ", 0.5),
        (ranks, "it has not ended: ", 1.0 if have_others_ended else 0.0),
    ):
        if odd and len(odd) <= most * len(ranks):
            return tuple(
                Suspect(rank=rank.rank, host=hosts.get(rank.rank, ""), why=f"{why}{rank.at or 'it is gone'}")
                for rank in odd
            )
    return ()
