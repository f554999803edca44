"""Whether a worker hangs, and which one is behind it: pure decisions over heartbeats.

A worker is judged only by a timeout that the user gave, for the section that it is in. One node's agent judges its own
workers by one clock; across nodes only steps and *ages* are compared, never times.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from hpc_elastic.agent.heartbeats import RankBeat
from hpc_elastic.run.option_values import LEARNED_LEAST, SectionTimeouts
from hpc_elastic.worker_api.heartbeat_record import STEP

HANG_FINGERPRINT = "hang:"
"""What every hang's fingerprint begins with."""
STOPPED_FINGERPRINT = "hang:stopped"
"""Of a worker that was stopped from outside."""
KERNEL_FINGERPRINT = "hang:kernel"
"""Of a worker that sat in the kernel, where no signal reached it."""
LEARNED_INTERVALS = 20
"""So many times between two heartbeats must have been measured before a timeout is learned from them."""
LEARNED_FACTOR = 5.0
SLACK_SECONDS = 1.0
SLACK_SHARE = 0.1


class HangVerdict(Struct, frozen=True, kw_only=True):
    """Workers of this node hang."""

    culprit: RankBeat
    """The worker that is behind."""
    limit: float
    """The timeout that is over, seconds."""
    hung: Mapping[int, str]
    """Local rank → why, of the culprit and of those that look the same."""

    @property
    def reason(self) -> str:
        """One line for people."""
        return f"rank {self.culprit.rank} hangs: {self.hung[self.culprit.local_rank]}"


def describe_silence(beat: RankBeat, now: float, *, limit: float | None = None) -> str:
    """``no heartbeat for 92.0 s in section 'step' at step 1200 (timeout 60 s)``."""
    where = f" in section {beat.section!r}" if beat.section else ""
    step = f" at step {beat.step}" if beat.step is not None else ""
    timeout = f" (timeout {limit:g} s)" if limit is not None else ""
    return f"no heartbeat for {beat.age(now):.1f} s{where}{step}{timeout}"


def learned_timeout(intervals: int, longest: float) -> float | None:
    """The timeout for ``step`` that a run's own steps teach: five times the longest time between two heartbeats.

    Returns:
        At least 60 seconds; None (no worker is judged) before 20 were measured.
    """
    if intervals < LEARNED_INTERVALS:
        return None
    return max(LEARNED_LEAST, LEARNED_FACTOR * longest)


def limit_of(beat: RankBeat, timeouts: SectionTimeouts, *, learned: float | None = None) -> float | None:
    """Seconds without a heartbeat after which `beat`'s worker counts as hung; None: it is not judged."""
    if beat.section == STEP and timeouts.learns_step:
        return learned
    return timeouts.seconds.get(beat.section)


def judge(
    beats: Iterable[RankBeat], timeouts: SectionTimeouts, *, now: float, learned: float | None = None
) -> HangVerdict | None:
    """Decide whether workers of this node hang."""
    here = tuple(beats)
    silent: dict[int, tuple[RankBeat, float]] = {}
    for beat in here:
        limit = limit_of(beat, timeouts, learned=learned)
        if limit is not None and beat.age(now) >= limit:
            silent[beat.local_rank] = beat, limit
    if not silent:
        return None
    first, limit = min(silent.values(), key=lambda found: _lag(found[0]))
    if first.step is not None:
        behind = lagging(here, step=first.step, age=first.age(now), now=now)
        if behind:
            return HangVerdict(culprit=behind[0], limit=limit, hung=describe_lagging(behind, step=first.step, now=now))
    # A worker that is a step further waits for it.
    level = {
        rank: describe_silence(beat, now, limit=its)
        for rank, (beat, its) in silent.items()
        if _step(beat) <= _step(first)
    }
    return HangVerdict(culprit=first, limit=limit, hung=level)


def describe_lagging(behind: Sequence[RankBeat], *, step: int, now: float) -> dict[int, str]:
    """Why those at the head of `lagging` count as hung, by local rank."""
    return {
        beat.local_rank: f"{describe_silence(beat, now)}, while others are at step {step} and wait"
        for beat in behind
        if beat.step == behind[0].step
    }


def next_look(
    beats: Iterable[RankBeat], timeouts: SectionTimeouts, *, now: float, learned: float | None = None
) -> float | None:
    """When a worker may next be found to hang; None: never.

    Not later than the shortest timeout from now: a worker may be in another section by then.
    """
    shortest = timeouts.shortest
    if shortest is None:
        return None
    limits = ((beat, limit_of(beat, timeouts, learned=learned)) for beat in beats)
    return min([now + shortest, *(beat.at + limit for beat, limit in limits if limit is not None)])


def lagging(beats: Iterable[RankBeat], *, step: int, age: float, now: float) -> tuple[RankBeat, ...]:
    """Workers of this node that a silent worker, here or on another node, waits for.

    In a collective all wait for the worker that did not come, and the first whose time is over may be one that waits:
    by a shorter timeout, by milliseconds, or because the worker that hangs is in a section without any. That one is
    behind in steps and has been silent for about as long (less a second, or a tenth, in which reports are under way).

    Args:
        beats: This node's workers'.
        step: The silent one's last step.
        age: For how many seconds it had been silent.
        now: On the beats' clock.

    Returns:
        The furthest behind first. Never a worker that has reported no step: in many scripts one rank reports for all.
    """
    least = age - max(SLACK_SECONDS, SLACK_SHARE * age)
    behind = [beat for beat in beats if beat.step is not None and beat.step < step and beat.age(now) >= least]
    return tuple(sorted(behind, key=_lag))


def _step(beat: RankBeat) -> int:
    return -1 if beat.step is None else beat.step


def _lag(beat: RankBeat) -> tuple[int, float, int]:
    """Sorts the furthest behind first: by step, then by the time of the last heartbeat."""
    return _step(beat), beat.at, beat.rank


def may_be_a_bug(fingerprint: str) -> bool:
    """Whether the same failure again, without progress between, speaks against the script.

    A process that is stopped from outside, or a mount that hangs, is no bug in it, however often that happens.
    """
    return bool(fingerprint) and fingerprint not in (STOPPED_FINGERPRINT, KERNEL_FINGERPRINT)
