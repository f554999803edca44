"""Whether a worker hangs, and which one is behind it: pure decisions over heartbeats.

A worker is judged only by a timeout that was asked for, for the section that it is in. One node's agent judges its own
workers by one clock; across nodes only steps and *ages* are compared, never times.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct, field

from hpc_elastic.errors import UsageError
from hpc_elastic.worker_api.heartbeat_record import NAME_LIMIT, SETUP, STEP, is_section_name

HANG_FINGERPRINT = "hang:"
"""What every hang's fingerprint begins with."""
STOPPED_FINGERPRINT = "hang:stopped"
"""Of a worker that somebody had stopped from outside."""
KERNEL_FINGERPRINT = "hang:kernel"
"""Of one that sat in the kernel, where no signal reached it."""
AUTO = "auto"
LEARNED_INTERVALS = 20
"""So many times between two heartbeats must have been measured before a timeout is learned from them."""
LEARNED_FACTOR = 5.0
LEARNED_LEAST = 60.0
"""Seconds: a learned timeout is never shorter."""
SLACK_SECONDS = 1.0
SLACK_SHARE = 0.1


class SectionTimeouts(Struct, frozen=True, kw_only=True):
    """What was asked for: seconds without a sign of life, by section."""

    seconds: Mapping[str, float] = field(default_factory=dict)
    learns_step: bool = False
    """The timeout of ``step`` is learned from the run's own steps."""

    def __bool__(self) -> bool:
        return bool(self.seconds) or self.learns_step

    @property
    def shortest(self) -> float | None:
        """No worker can hang for less and be judged; None where nobody is judged."""
        found = [*self.seconds.values(), *([LEARNED_LEAST] if self.learns_step else [])]
        return min(found, default=None)


class RankBeat(Struct, frozen=True, kw_only=True):
    """A worker's last sign of life, as its agent sees it."""

    rank: int
    local_rank: int
    section: str
    at: float
    """On the agent's monotonic clock; the worker's start where there was none yet."""
    step: int | None = None
    count: int = 0
    """0: it has never told anything."""
    intervals: int = 0
    longest: float = 0.0
    """Of the `intervals` times between two heartbeats in section ``step``, seconds."""
    pid: int = 0
    """Of the process that speaks for the worker; 0 where none does."""
    checkpoints: int = 0
    """How many it has completed in this round."""
    saved_at: float = 0.0
    """When the last of them was complete."""
    asks_for_notices: bool = False
    """Whether it has ever asked if there is a notice."""
    has_notice: bool = False
    """Whether it has found one."""

    def age(self, now: float) -> float:
        """Seconds since."""
        return max(0.0, now - self.at)


class HangVerdict(Struct, frozen=True, kw_only=True):
    """Workers of this node hang."""

    culprit: RankBeat
    """The one that is behind."""
    limit: float
    """The timeout that is over, seconds."""
    hung: Mapping[int, str]
    """Local rank → why, of the culprit and of those that can't be told from it."""

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


def parse_section_timeouts(text: str, *, option: str = "--section-timeouts") -> SectionTimeouts:
    """Read ``setup:900,step:60,checkpoint:300`` or ``step:auto``.

    Raises:
        UsageError: names the part that can't be right.
    """
    seconds: dict[str, float] = {}
    learns = False
    for part in text.split(","):
        name, colon, value = part.strip().partition(":")
        if not colon:
            raise UsageError(f"{option} {text}: {part!r} is not of the form section:seconds, as in step:60")
        if not is_section_name(name):
            raise UsageError(
                f"{option} {text}: {name!r} is no section's name; it has 1 to {NAME_LIMIT} letters, digits, _, - and ."
            )
        if name in seconds or (learns and name == STEP):
            raise UsageError(f"{option} {text}: section {name!r} is there twice")
        if value == AUTO:
            if name != STEP:
                raise UsageError(f"{option} {text}: only step:auto can be learned, not {part!r}; give it seconds")
            learns = True
            continue
        seconds[name] = _seconds(value, text, option)
    return SectionTimeouts(seconds=seconds, learns_step=learns)


def _seconds(value: str, text: str, option: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not 0 < number <= 1e8:
        raise UsageError(f"{option} {text}: {value!r} is not a number of seconds above 0")
    return number


def learned_timeout(intervals: int, longest: float) -> float | None:
    """The timeout for ``step`` that a run's own steps teach: five times the longest time between two heartbeats.

    Args:
        intervals: How many were measured.
        longest: The longest, seconds.

    Returns:
        At least 60 seconds; None (nobody is judged) before 20 were measured.
    """
    if intervals < LEARNED_INTERVALS:
        return None
    return max(LEARNED_LEAST, LEARNED_FACTOR * longest)


def limit_of(beat: RankBeat, timeouts: SectionTimeouts, *, learned: float | None = None) -> float | None:
    """Seconds without a sign of life after which `beat`'s worker counts as hung; None: it is not judged."""
    if beat.section == STEP and timeouts.learns_step:
        return learned
    return timeouts.seconds.get(beat.section)


def judge(
    beats: Iterable[RankBeat], timeouts: SectionTimeouts, *, now: float, learned: float | None = None
) -> HangVerdict | None:
    """Decide whether workers of this node hang.

    Args:
        beats: Of those that still run.
        timeouts: What was asked for.
        now: On the clock of the beats.
        learned: From `learned_timeout`.
    """
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
    # Who is a step further waits for it.
    level = {
        rank: describe_silence(beat, now, limit=its)
        for rank, (beat, its) in silent.items()
        if _step(beat) <= _step(first)
    }
    return HangVerdict(culprit=first, limit=limit, hung=level)


def describe_lagging(behind: Sequence[RankBeat], *, step: int, now: float) -> dict[int, str]:
    """Why those at the head of `lagging` count as hung: local rank → words."""
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

    In a collective all wait for the one that did not come, and the first whose time is over may be one that waits: by a
    shorter timeout, by milliseconds, or because the one that hangs is in a section without any. Who is behind in steps
    and has been silent for about as long (less a second, or a tenth, in which words are under way) is the one.

    Args:
        beats: This node's workers'.
        step: The silent one's last step.
        age: For how many seconds it had been silent.
        now: On the beats' clock.

    Returns:
        The furthest behind first. Never a worker that told no step so far: many scripts let one rank tell for all.
    """
    least = age - max(SLACK_SECONDS, SLACK_SHARE * age)
    behind = [beat for beat in beats if beat.step is not None and beat.step < step and beat.age(now) >= least]
    return tuple(sorted(behind, key=_lag))


def _step(beat: RankBeat) -> int:
    return -1 if beat.step is None else beat.step


def _lag(beat: RankBeat) -> tuple[int, float, int]:
    """The furthest behind first: by step, then whose heartbeat stopped first."""
    return _step(beat), beat.at, beat.rank


def setup_beat(*, rank: int, local_rank: int, started: float) -> RankBeat:
    """A worker that has told nothing yet."""
    return RankBeat(rank=rank, local_rank=local_rank, section=SETUP, at=started)


def may_be_a_bug(fingerprint: str) -> bool:
    """Whether the same failure again, without progress between, speaks against the script.

    Who stops a process from outside, or a mount that hangs, is no bug in it, however often it happens.
    """
    return bool(fingerprint) and fingerprint not in (STOPPED_FINGERPRINT, KERNEL_FINGERPRINT)
