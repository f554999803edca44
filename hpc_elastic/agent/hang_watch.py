"""Watching one node's heartbeats: sleeps until one may be overdue, tells the run directory where the workers are."""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path
from typing import Any

from hpc_elastic.agent.hang import (
    HangVerdict,
    RankBeat,
    SectionTimeouts,
    describe_lagging,
    judge,
    lagging,
    learned_timeout,
    next_look,
)
from hpc_elastic.agent.heartbeats import HeartbeatFolder, RoundBeats
from hpc_elastic.base.clock import Clock, SystemClock
from hpc_elastic.base.file_executor import FileThread
from hpc_elastic.base.files import make_private_dir, write_json
from hpc_elastic.rendezvous.state import HangMark
from hpc_elastic.worker_api.heartbeat_record import VARIABLE, NoticeRecord

logger = logging.getLogger(__name__)

SUMMARY_SECONDS = 15.0
"""How often a node tells where its workers are, however fast their steps."""
HELD_UP_SECONDS = 5.0
"""An agent that wakes so much later than it asked for was stopped itself (a suspended job or node), and so were its
workers: nobody's silence counts."""
SUMMARY_VERSION = 1


class HangWatch:
    """One agent's. All methods are for its main thread, and none waits."""

    def __init__(
        self,
        *,
        folder: HeartbeatFolder,
        timeouts: SectionTimeouts,
        clock: Clock,
        files: FileThread,
        summary: Path | None = None,
        node: int = 0,
        host: str = "",
    ) -> None:
        """Args:
        folder: Where the workers' files are.
        timeouts: What was asked for.
        clock: Its monotonic clock must be the workers' (CLOCK_BOOTTIME).
        files: Writes the summary.
        summary: Its path in the run directory; None: none.
        node: Index of this node.
        host: Its name.
        """
        self._folder = folder
        self._timeouts = timeouts
        self._clock = clock
        self._files = files
        self._summary = summary
        self._head = {"version": SUMMARY_VERSION, "node": node, "host": host}
        self._beats: RoundBeats | None = None
        self._round = -1
        self._due: float | None = None
        self._summary_due = 0.0
        self._told: dict[str, Any] = {}
        self._is_writing = False
        self._notices = 0
        self._intervals = 0
        self._longest = 0.0
        self.verdict: HangVerdict | None = None
        """The round's, where this node gave one."""
        self.hung: dict[int, str] = {}
        """Local rank → why it counts as hung in this round."""

    def begin(self, round_index: int, *, first_rank: int, count: int) -> None:
        """A round's workers are about to be started."""
        now = self._clock.monotonic()
        self._round = round_index
        self.verdict = None
        self.hung = {}
        self._beats = RoundBeats(self._folder, round_index=round_index, first_rank=first_rank, count=count, now=now)
        self._summary_due = now + SUMMARY_SECONDS
        self._plan(now, range(count))

    def begin_again(self, local_rank: int) -> None:
        """Another process is about to be started in a worker's place."""
        if self._beats is not None:
            now = self._clock.monotonic()
            self._beats.begin_again(local_rank, now)
            self._due = now if self._due is not None else None

    def environment(self, local_rank: int) -> dict[str, str]:
        """What the worker must find in its environment."""
        path = self._beats.paths[local_rank] if self._beats is not None else ""
        return {VARIABLE: path}

    @property
    def due(self) -> float | None:
        """When `look` is to be called next, monotonic; None: no round is watched."""
        return self._due

    def look(self, running: Collection[int]) -> HangVerdict | None:
        """Read the heartbeats if it is time to.

        Args:
            running: Local ranks whose worker has not ended.

        Returns:
            The verdict, once, where workers hang.
        """
        now = self._clock.monotonic()
        if self._beats is None or self._due is None or now < self._due or self.verdict is not None:
            return None
        beats = self._beats.read(now)
        if now - self._due > HELD_UP_SECONDS:
            logger.info("held up for %.1f s: heartbeats count from now on", now - self._due)
            self._beats.renew(now)
            beats = self._beats.beats
        self._learn(beats)
        judged = [beat for beat in beats if beat.local_rank in running and self._beats.paths[beat.local_rank]]
        verdict = judge(judged, self._timeouts, now=now, learned=self._learned())
        if verdict is not None:
            self.verdict = verdict
            self.hung = dict(verdict.hung)
        if now >= self._summary_due or verdict is not None:
            self._summary_due = now + SUMMARY_SECONDS
            self._write_summary(beats, now)
        self._plan(now, running)
        return verdict

    def on_hang(self, mark: HangMark, running: Collection[int]) -> None:
        """Another node gave a verdict: are there workers here that its worker waits for?

        Args:
            mark: Where the hung worker stood.
            running: Local ranks whose worker has not ended.
        """
        if self._beats is None or self.verdict is not None:
            return
        now = self._clock.monotonic()
        beats = [beat for beat in self._beats.read(now) if beat.local_rank in running]
        behind = lagging(beats, step=mark.step, age=mark.age, now=now)
        self.hung = describe_lagging(behind, step=mark.step, now=now)

    def read(self) -> list[RankBeat]:
        """Every worker's last word now, by local rank."""
        return self._beats.read(self._clock.monotonic()) if self._beats is not None else []

    def deliver_notice(self, *, deadline: float, step: int) -> None:
        """Tell the round's workers that the job is going to be ended.

        Args:
            deadline: Monotonic: until then a checkpoint is waited for.
            step: As in `NoticeRecord`.
        """
        if self._beats is not None:
            self._notices += 1
            self._beats.write_notice(NoticeRecord(serial=self._notices, deadline_ns=int(deadline * 1e9), step=step))

    def refresh(self) -> list[RankBeat]:
        """Every worker's last word now, by local rank; also to the run directory where it is news."""
        if self._beats is None:
            return []
        now = self._clock.monotonic()
        beats = self._beats.read(now)
        self._learn(beats)
        self._write_summary(beats, now)
        return beats

    def beat(self, local_rank: int) -> RankBeat | None:
        """A worker's last word, as it was read last."""
        return self._beats.beats[local_rank] if self._beats is not None else None

    def last_step(self, local_rank: int) -> int | None:
        beat = self.beat(local_rank)
        return beat.step if beat is not None else None

    @property
    def furthest_step(self) -> int:
        """Of all workers here in this round, -1 for none."""
        steps = [beat.step for beat in self._beats.beats if beat.step is not None] if self._beats is not None else []
        return max(steps, default=-1)

    @property
    def mark(self) -> HangMark | None:
        """Of the hung worker here that is furthest behind; None: none hangs."""
        if self._beats is None or not self.hung:
            return None
        now = self._clock.monotonic()
        beats = [self._beats.beats[local_rank] for local_rank in self.hung]
        marks = [HangMark(-1 if beat.step is None else beat.step, beat.age(now)) for beat in beats]
        return min(marks, key=lambda mark: mark.lag)

    def told_ns(self, local_rank: int) -> int:
        """When a worker gave its last sign of life, by this host's wall clock."""
        beat = self.beat(local_rank)
        age = beat.age(self._clock.monotonic()) if beat is not None else 0.0
        return self._clock.time_ns() - int(age * 1e9)

    def rest(self) -> None:
        """Nobody is judged any more in this round; what is known of it stays."""
        self._due = None

    def end(self) -> None:
        """The round's workers are gone."""
        self._due = None
        if self._beats is not None:
            self._beats.remove()

    def close(self) -> None:
        """The agent ends."""
        self.end()
        self._folder.remove()

    def _learned(self) -> float | None:
        return learned_timeout(self._intervals, self._longest)

    def _learn(self, beats: Collection[RankBeat]) -> None:
        # The whole run's, on this node: a later round begins with what the earlier ones taught.
        self._intervals = max([self._intervals, *(beat.intervals for beat in beats)])
        self._longest = max([self._longest, *(beat.longest for beat in beats)])

    def _plan(self, now: float, running: Collection[int]) -> None:
        assert self._beats is not None
        beats = [beat for beat in self._beats.beats if beat.local_rank in running]
        due = next_look(beats, self._timeouts, now=now, learned=self._learned())
        self._due = self._summary_due if due is None else min(due, self._summary_due)

    def _write_summary(self, beats: Collection[RankBeat], now: float) -> None:
        if self._summary is None or not any(beat.count for beat in beats) or self._is_writing:
            return
        value = {
            **self._head,
            "round": self._round,
            "written_ns": self._clock.time_ns(),
            "ranks": [describe_beat(beat, now) for beat in beats],
        }
        self._is_writing = True  # no second one waits behind a mount that hangs
        self._files.post(lambda: self._write(value))

    def _write(self, value: dict[str, Any]) -> None:
        assert self._summary is not None
        try:
            make_private_dir(self._summary.parent)
            write_json(self._summary, value)
        except OSError as error:
            logger.debug("heartbeats could not be written: %s", error)
        finally:
            self._is_writing = False


def describe_beat(beat: RankBeat, now: float) -> dict[str, Any]:
    """For the summary and for events."""
    return {
        "rank": beat.rank,
        "local_rank": beat.local_rank,
        "step": beat.step,
        "section": beat.section,
        "age": round(beat.age(now), 3),
        "count": beat.count,
    }


def silent_watch() -> HangWatch:
    """Watches nobody: for an agent that was given no folder."""
    return HangWatch(
        folder=HeartbeatFolder(None), timeouts=SectionTimeouts(), clock=SystemClock(), files=FileThread(name="beats")
    )
