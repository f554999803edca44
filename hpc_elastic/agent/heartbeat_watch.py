"""The workers' heartbeats on one node: read when it is time to, judged by the sections' timeouts, and written to the
run directory now and then.

One node's agent judges its own workers by one clock; across nodes only steps and *ages* are compared, never times.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from msgspec import Struct

from hpc_elastic.agent.heartbeats import FOLDER_VARIABLE, HeartbeatFolder, RankBeat, RoundBeats, StepPace, is_seen_by
from hpc_elastic.agent.part import save_if_possible
from hpc_elastic.base import codec
from hpc_elastic.base.clock import Clock
from hpc_elastic.base.loop import FileExecutor
from hpc_elastic.rendezvous.schedule import Lease
from hpc_elastic.rendezvous.state import HangMark
from hpc_elastic.run import progress
from hpc_elastic.run.option_values import LEARNED_LEAST, SectionTimeouts
from hpc_elastic.run.progress import NodeHeartbeats, Progress, ProgressSource, RankHeartbeat, Source
from hpc_elastic.worker_api.records import SETUP, STEP, VARIABLE, NoticeRecord
from hpc_elastic.workers.tree import descendants

logger = logging.getLogger(__name__)

MOST_MARKED = 16
SUMMARY_SECONDS = 15.0
FIRST_SUMMARY_SECONDS = 5.0
PAUSED_SECONDS = 5.0
"""An agent that wakes so much later than it asked for was stopped itself (a suspended job or node), and so were its
workers: no silence counts."""
LEARNED_INTERVALS = 20
"""Least number of times between two heartbeats from which a timeout is learned."""
LEARNED_FACTOR = 5.0
SLACK_SECONDS = 1.0
SLACK_SHARE = 0.1


class Hang(Struct, frozen=True, kw_only=True):
    source: Source
    reason: str
    ranks: tuple[int, ...] = ()
    """Global ranks that the others wait for; empty: not known."""
    seconds: float = 0.0
    """How long there was no progress; for a section's timeout, the timeout."""
    hung: Mapping[int, str] = {}
    """Local rank → why, of the workers here that hang and look the same."""
    may_be_rest: bool = False
    """Nothing shows that ranks wait for each other: never acted on."""


def describe_silence(beat: RankBeat, now: float, *, limit: float | None = None) -> str:
    """Returns ``no heartbeat for 92.0 s in section 'step' at step 1200 (timeout 60 s)``."""
    where = f" in section {beat.section!r}" if beat.section else ""
    step = f" at step {beat.step}" if beat.step is not None else ""
    timeout = f" (timeout {limit:g} s)" if limit is not None else ""
    return f"no heartbeat for {beat.age(now):.1f} s{where}{step}{timeout}"


def learned_timeout(intervals: int, longest: float) -> float | None:
    return None if intervals < LEARNED_INTERVALS else max(LEARNED_LEAST, LEARNED_FACTOR * longest)


def limit_of(beat: RankBeat, timeouts: SectionTimeouts, *, learned: float | None = None) -> float | None:
    if beat.section == STEP and timeouts.learns_step:
        return learned
    return timeouts.seconds.get(beat.section)


def judge(
    beats: Iterable[RankBeat], timeouts: SectionTimeouts, *, now: float, learned: float | None = None
) -> Hang | None:
    here = tuple(beats)
    limits = ((beat, limit_of(beat, timeouts, learned=learned)) for beat in here)
    silent = [(beat, limit) for beat, limit in limits if limit is not None and beat.age(now) >= limit]
    if not silent:
        return None
    first, limit = min(silent, key=lambda found: _lag(found[0]))
    step = -1 if first.step is None else first.step
    if behind := lagging(here, step=step, age=first.age(now), now=now):
        hung, first = describe_lagging(behind, step=step, now=now), behind[0]
    else:  # a worker that is a step further waits for it
        level = [found for found in silent if found[0].step is None or found[0].step <= step]
        hung = {beat.local_rank: describe_silence(beat, now, limit=its) for beat, its in level}
    reason = f"rank {first.rank} hangs: {hung[first.local_rank]}"
    return Hang(source=Source.HEARTBEAT, reason=reason, ranks=(first.rank,), seconds=limit, hung=hung)


def describe_lagging(behind: Sequence[RankBeat], *, step: int, now: float) -> dict[int, str]:
    return {
        beat.local_rank: f"{describe_silence(beat, now)}, while others are at step {step} and wait"
        for beat in behind
        if beat.step == behind[0].step
    }


def next_look(
    beats: Iterable[RankBeat], timeouts: SectionTimeouts, *, now: float, learned: float | None = None
) -> float | None:
    """Not later than the shortest timeout from now: a worker may be in another section by then."""
    if timeouts.shortest is None:
        return None
    limits = ((beat, limit_of(beat, timeouts, learned=learned)) for beat in beats)
    return min([now + timeouts.shortest, *(beat.at + limit for beat, limit in limits if limit is not None)])


def lagging(beats: Iterable[RankBeat], *, step: int, age: float, now: float) -> tuple[RankBeat, ...]:
    """Workers of this node, the furthest behind first, for which one waits that is silent at `step` for `age`. In a
    collective all wait for the worker that did not come: it is behind in steps, and has been silent for about as long
    (less a second, or a tenth, in which reports are under way). Never one that has reported no step: in many scripts
    one rank reports for all."""
    least = age - max(SLACK_SECONDS, SLACK_SHARE * age)
    behind = [beat for beat in beats if beat.step is not None and beat.step < step and beat.age(now) >= least]
    return tuple(sorted(behind, key=_lag))


def _lag(beat: RankBeat) -> tuple[int, float, int]:
    return -1 if beat.step is None else beat.step, beat.at, beat.rank


class HeartbeatWatch:
    def __init__(
        self,
        *,
        folder: HeartbeatFolder,
        timeouts: SectionTimeouts,
        clock: Clock,
        files: FileExecutor,
        summary: Path | None = None,
        node: int = 0,
        host: str = "",
        furthest_before: int = -1,
        lease: Lease | None = None,
    ) -> None:
        """`clock` must be the workers' (CLOCK_BOOTTIME). `furthest_before`: of the attempt before; -1: none."""
        self.pages, self._timeouts, self._clock, self._files = folder, timeouts, clock, files
        self._summary, self._node, self._host = summary, node, host
        self._lease = lease
        self._beats = RoundBeats(folder, round_index=-1, first_rank=0, count=0, now=0.0)
        self._pace = StepPace()
        self._is_counted = False
        """The kernel's counts of the round's workers are known, and `_idle_since`, since when all are idle."""
        self._idle_since: float | None = None
        self._has_steps = False
        """A step of any round is known: then its collectives are no progress."""
        self._round = -1
        self._furthest_before = furthest_before
        """The furthest step of all rounds before this one; -1 also where the steps go back by themselves."""
        self._awaits_first_step = True
        self._awaited: dict[str, float] = {}
        """A section with a timeout that no worker here has entered in the run → its seconds, until that is logged."""
        self._began = 0.0
        self.due: float | None = None
        self._summary_due = 0.0
        self._is_writing, self._is_first_write = False, True
        self._notices = self._intervals = 0
        self._longest = 0.0
        self.verdict: Hang | None = None
        self.declared: HangMark | None = None
        self._pids: dict[int, int] = {}
        self._unseen: set[int] = set()
        self.hung: dict[int, str] = {}

    @property
    def is_round_over(self) -> bool:
        """The others went on without this node: its workers get no grace."""
        return self._lease is not None and self._lease.is_over

    def begin(self, round_index: int, *, first_rank: int, count: int) -> None:
        self._began = now = self._clock.monotonic()
        self._furthest_before = max(self._furthest_before, self.furthest_step)
        self._awaits_first_step = first_rank == 0
        if self._round < 0 and first_rank == 0:
            self._awaited = self._timeouts.by_section
        self._round = round_index
        self.verdict = self.declared = self._idle_since = None
        self._is_counted, self.hung, self._unseen = False, {}, set()
        self._beats = RoundBeats(self.pages, round_index=round_index, first_rank=first_rank, count=count, now=now)
        if self._lease is not None:
            self._lease.begin(round_index, self._beats.write_lease)
        self._pace = StepPace()
        self._summary_due = now + FIRST_SUMMARY_SECONDS
        self._plan(now, range(count))

    def begin_again(self, local_rank: int) -> None:
        now = self._clock.monotonic()
        self._beats.begin_again(local_rank, now)
        self.due = now if self.due is not None else None

    def environment(self, local_rank: int) -> dict[str, str]:
        return {VARIABLE: self._beats.paths[local_rank]}

    def note_pid(self, local_rank: int, pid: int) -> None:
        """A worker whose processes don't see its page can send nothing, and is not judged."""
        self._pids[local_rank] = pid

    def look(self, running: Collection[int]) -> Hang | None:
        now = self._clock.monotonic()
        if self.due is None or now < self.due or self.verdict is not None:
            return None
        beats = self._beats.read(now)
        if now - self.due > PAUSED_SECONDS:
            logger.info("this agent was paused for %.1f s: heartbeat timeouts start again", now - self.due)
            self._beats.renew(now)
            beats = self._beats.beats
        self._learn(beats)
        reachable = (beat for beat in beats if self._beats.paths[beat.local_rank])
        judged = [beat for beat in reachable if beat.local_rank in running and beat.local_rank not in self._unseen]
        self._note_awaited(beats, now)
        learned = learned_timeout(self._intervals, self._longest)
        verdict = judge(judged, self._timeouts, now=now, learned=learned)
        if verdict is not None and self._find_unseen(verdict.hung):
            judged = [beat for beat in judged if beat.local_rank not in self._unseen]
            verdict = judge(judged, self._timeouts, now=now, learned=learned)
        if verdict is not None:
            self.verdict, self.hung = verdict, dict(verdict.hung)
        if now >= self._summary_due or verdict is not None:
            self._summary_due = now + SUMMARY_SECONDS
            self._write_summary(beats, now)
        self._plan(now, running)
        return verdict

    def _note_awaited(self, beats: Collection[RankBeat], now: float) -> None:
        entered = [beat.sections for beat in beats]
        if None in entered:
            self._awaited = {}  # too many to know
        for name, seconds in list(self._awaited.items()):
            if any(name in (names or ()) for names in entered) or name == SETUP:
                del self._awaited[name]
            elif now >= self._began + seconds:
                del self._awaited[name]
                call = f'`with hpc_elastic.section("{name}"):` around that part'
                call = "hpc_elastic.heartbeat(step=step) in each step" if name == STEP else call
                logger.warning(
                    "no worker here has entered section %r in %.0f s: its timeout (--section-timeouts) watches nothing "
                    "so far; put %s of the script", name, seconds, call,
                )  # fmt: skip

    def _find_unseen(self, hung: Iterable[int]) -> bool:
        before = len(self._unseen)
        for rank in hung:
            beat, path = self._beats.beats[rank], self._beats.paths[rank]
            if beat.count or rank not in self._pids:
                continue
            pid = self._pids[rank]
            if not is_seen_by([pid, *(proc.pid for proc in descendants(pid))], path):
                self._unseen.add(rank)
                logger.warning(
                    "rank %d can send no heartbeats, and is not judged: %s is not there for it (a container with a "
                    "/dev/shm of its own?); mount it, or choose a folder with %s",
                    beat.rank, os.path.dirname(path), FOLDER_VARIABLE,
                )  # fmt: skip
        return len(self._unseen) > before

    def declare(self, found: Hang, running: Collection[int]) -> None:
        own = {beat.rank: beat.local_rank for beat in self._beats.beats if beat.local_rank in running}
        ranks = found.ranks or tuple(own)
        self.hung = {own[rank]: found.reason for rank in ranks if rank in own}
        self.declared = HangMark(-1, found.seconds, ranks[:MOST_MARKED])

    def on_hang(self, mark: HangMark, running: Collection[int]) -> None:
        """Another node found a hang: note the workers here that it names, or that its worker waits for."""
        if self.verdict is not None or self.declared is not None:
            return
        now = self._clock.monotonic()
        beats = [beat for beat in self._beats.read(now) if beat.local_rank in running]
        if mark.ranks:
            why = f"no progress for {mark.age:.0f} s"
            if len(mark.ranks) == 1:
                why += ", and the other ranks wait for it"
            self.hung = {beat.local_rank: why for beat in beats if beat.rank in mark.ranks}
        else:
            behind = lagging(beats, step=mark.step, age=mark.age, now=now)
            self.hung = describe_lagging(behind, step=mark.step, now=now)

    def read(self) -> list[RankBeat]:
        return self._beats.read(self._clock.monotonic())

    def deliver_notice(self, *, deadline: float, step: int) -> None:
        """Write to the round's workers that the job is going to be ended; arguments as in `NoticeRecord`, monotonic."""
        self._notices += 1
        self._beats.write_notice(NoticeRecord(serial=self._notices, deadline_ns=int(deadline * 1e9), step=step))

    def refresh(self) -> list[RankBeat]:
        now = self._clock.monotonic()
        beats = self._beats.read(now)
        self._learn(beats)
        self._write_summary(beats, now)
        return beats

    def progress(self) -> Progress | None:
        return self._describe(self.read(), self._clock.monotonic()) if self._beats.beats else None

    def note_idle(self, since: float | None) -> None:
        """The summary is written as this changes: a worker which sends nothing costs no file again and again."""
        is_new = not self._is_counted or (since is None) is not (self._idle_since is None)
        self._is_counted, self._idle_since = True, since
        if is_new:
            self._write_summary(self._beats.beats, self._clock.monotonic(), has_changed=True)

    def beat(self, local_rank: int) -> RankBeat | None:
        return self._beats.beats[local_rank] if self._beats.beats else None

    def last_step(self, local_rank: int) -> int | None:
        beat = self.beat(local_rank)
        return beat.step if beat is not None else None

    @property
    def furthest_step(self) -> int:
        """-1: no step is known."""
        return max((beat.step for beat in self._beats.beats if beat.step is not None), default=-1)

    @property
    def counted_steps(self) -> int:
        """The same of what was counted, from 1 in each round; of collectives, where they are all that a worker did."""
        collectives = [beat for beat in self._beats.beats if beat.is_final and not self._has_steps]
        found = [beat for beat in self._beats.beats if beat.source is ProgressSource.OPTIMIZER] or collectives
        return max((beat.counted_steps or 0 for beat in found), default=-1)

    @property
    def mark(self) -> HangMark | None:
        if self.declared is not None:
            return self.declared
        now, beats = self._clock.monotonic(), [beat for beat in self._beats.beats if beat.local_rank in self.hung]
        marks = (HangMark(-1 if beat.step is None else beat.step, beat.age(now)) for beat in beats)
        return min(marks, key=lambda mark: mark.lag, default=None)

    def last_heartbeat_ns(self, local_rank: int) -> int:
        beat = self.beat(local_rank)
        age = beat.age(self._clock.monotonic()) if beat is not None else 0.0
        return self._clock.time_ns() - int(age * 1e9)

    def stop_judging(self) -> None:
        self.due = None

    def end(self) -> None:
        self.due = None
        if self._lease is not None:
            self._lease.end()
        self._beats.remove()

    def close(self) -> None:
        self.end()
        self.pages.remove()

    def _learn(self, beats: Collection[RankBeat]) -> None:
        # The whole run's, on this node: a later round begins with what the earlier ones taught.
        self._intervals = max([self._intervals, *(beat.intervals for beat in beats)])
        self._longest = max([self._longest, *(beat.longest for beat in beats)])
        self._has_steps |= any(beat.source in progress.STEPS for beat in beats)
        first = min((beat.first_step for beat in beats if beat.first_step is not None), default=None)
        if self._awaits_first_step and first is not None:
            self._awaits_first_step = False
            if begun_again := progress.describe_begun_again(first, self._furthest_before):
                logger.warning("%s", begun_again)

    def _plan(self, now: float, running: Collection[int]) -> None:
        beats = [beat for beat in self._beats.beats if beat.local_rank in running]
        dues = [self._summary_due, *(self._began + seconds for seconds in self._awaited.values())]
        look = next_look(beats, self._timeouts, now=now, learned=learned_timeout(self._intervals, self._longest))
        self.due = min([*dues, look] if look is not None else dues)

    def _describe(self, beats: Collection[RankBeat], now: float) -> Progress:
        resting = None if not self._is_counted else 0.0 if self._idle_since is None else now - self._idle_since
        return describe_progress(beats, now, now_ns=self._clock.time_ns(), resting=resting)

    def _write_summary(self, beats: Collection[RankBeat], now: float, *, has_changed: bool = False) -> None:
        self._pace.add(beats, now)
        if self._summary is None or self._is_writing or not (has_changed or any(beat.changes for beat in beats)):
            return
        pace = self._pace.steps_per_second
        value = NodeHeartbeats(
            node=self._node,
            host=self._host,
            round=self._round,
            written_ns=self._clock.time_ns(),
            steps_per_second=None if pace is None else round(pace, 4),
            total=max((beat.total for beat in beats if beat.total is not None), default=None),
            loss=next((beat.loss for beat in beats if beat.loss is not None), None),
            progress=self._describe(beats, now),
            ranks=tuple(describe_beat(beat, now) for beat in beats),
        )
        self._is_writing = True  # no second one waits behind a mount that hangs
        self._files.post(partial(self._write, self._summary, value))

    def _write(self, path: Path, value: NodeHeartbeats) -> None:
        before = codec.load(path, NodeHeartbeats) if self._is_first_write else None
        try:
            if isinstance(before, NodeHeartbeats):
                # A killed agent's: no event has what the workers of its last round did.
                os.replace(path, path.with_name(f"{path.stem}-round-{before.round:05d}.json"))
            self._is_first_write = False
            save_if_possible(path, value)
        except OSError as error:
            logger.debug("%s could not be moved: %s", path, error)
        finally:
            self._is_writing = False


def describe_progress(
    beats: Collection[RankBeat], now: float, *, now_ns: int, resting: float | None = None
) -> Progress:
    entered = [beat.sections for beat in beats]
    sections = None
    if None not in entered:
        sections = tuple(sorted({SETUP, *(name for names in entered for name in names or ())}))
    for source in (ProgressSource.HEARTBEAT, *progress.COUNTED):
        found = [beat for beat in beats if beat.source is source]
        if found := [beat for beat in found if beat.first_step is not None or beat.counted_steps]:
            break
    else:
        return Progress(sections=sections, resting=resting)
    best = max(found, key=lambda beat: (-1 if beat.step is None else beat.step, beat.counted_steps or 0, -beat.rank))
    return Progress(
        sections=sections,
        first_step=best.first_step,
        first_ns=now_ns - int((now - best.first_at) * 1e9),
        step=-1 if best.step is None else best.step,
        step_ns=now_ns - int((now - best.stepped_at) * 1e9),
        counted_steps=best.counted_steps or 0,
        counts=best.source,
        resting=resting,
        checkpoint_seconds=round(max(beat.checkpoint_seconds for beat in beats), 3),
        checkpoints=max(beat.checkpoints for beat in beats),
        longest_step=round(max(beat.longest for beat in beats), 3),
        redone_seconds=round(best.redone_seconds, 3),
    )


def describe_beat(beat: RankBeat, now: float) -> RankHeartbeat:
    return RankHeartbeat(
        rank=beat.rank,
        local_rank=beat.local_rank,
        step=beat.step,
        counted_steps=beat.counted_steps,
        source=beat.source,
        section=beat.section,
        age=round(now - beat.stepped_at if beat.source is ProgressSource.COLLECTIVES else beat.age(now), 3),
        count=beat.count,
        saved_step=beat.saved_step,
        saved_age=round(max(0.0, now - beat.saved_at), 3) if beat.checkpoints else None,
    )
