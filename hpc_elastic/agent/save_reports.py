"""Reports about the workers' checkpoints: to nodes that wait to come in, and before a preemption."""

from __future__ import annotations

import logging
import signal
from collections.abc import Collection
from typing import TYPE_CHECKING

from msgspec import Struct

from hpc_elastic.agent.heartbeats import RankBeat
from hpc_elastic.agent.part import Part
from hpc_elastic.agent.supervision import Phase
from hpc_elastic.rendezvous.participant import Participant
from hpc_elastic.rendezvous.state import MEASURE_SECONDS, PreemptionStatus, RoundRecord, RunNotice, Status
from hpc_elastic.run.option_values import GrowPolicy
from hpc_elastic.worker_api.heartbeat_record import CHECKPOINT

if TYPE_CHECKING:
    from hpc_elastic.agent.local_workers import LocalWorkers
    from hpc_elastic.agent.node_agent import NodeAgent
    from hpc_elastic.agent.part import AgentSite

logger = logging.getLogger(__name__)

CHECKPOINT_LOOK_SECONDS = 1.0


class CheckpointStatus(Struct, frozen=True, kw_only=True):
    round: int
    serial: int
    age: float | None
    """Seconds since it was complete; None: workers here are writing one."""

    def send(self, participant: Participant) -> None:
        if self.age is None:
            participant.claims.report_saving(self.round, self.serial)
        else:
            participant.claims.report_saved(self.round, self.serial, self.age)


class CheckpointWatch(Part):
    """A node reports at most three things in each period in which nodes wait:
    how long ago its last checkpoint was, that it is writing one, and that this one is complete.
    """

    due: float | None = None

    def __init__(self, site: AgentSite) -> None:
        self._watch, self._ask, self._clock = site.watch, site.coordination.ask, site.clock
        self._is_asked_for = site.me.spec.grow is GrowPolicy.CHECKPOINT
        self._max_nodes = site.me.spec.max_nodes
        self._round = -1
        self._serial = 0
        self._before: int | None = None
        self._has_reported_saving = False
        self._is_waiting = False

    def on_record(self, record: RoundRecord, workers: LocalWorkers | None = None) -> None:
        if record.round != self._round:
            self._round, self._serial, self._is_waiting = record.round, 0, False
        waiting = record.status is Status.FINAL and record.waiting > 0 and len(record.members) < self._max_nodes
        if waiting and not self._is_waiting and self._is_asked_for:
            self._before, self._has_reported_saving = None, False
            self.due = self._clock.monotonic()
        elif not waiting:
            self.due = None
        self._is_waiting = waiting

    def look(self, agent: NodeAgent) -> None:
        status = self.read(agent.workers.running) if agent.workers and agent.phase is Phase.RUNNING else None
        if status is not None:
            self._ask(status.send)

    def read(self, running: Collection[int]) -> CheckpointStatus | None:
        now = self._clock.monotonic()
        if self.due is None or now < self.due:
            return None
        self.due = now + CHECKPOINT_LOOK_SECONDS
        beats = self._watch.read()
        completed = sum(beat.checkpoints for beat in beats)
        age = max(0.0, now - max((beat.saved_at for beat in beats), default=0.0))
        if self._before is None:
            self._before = completed
            return self._completed(age) if completed else None
        if any(beat.section == CHECKPOINT and beat.local_rank in running for beat in beats):
            if self._has_reported_saving:
                return None
            self._has_reported_saving = True
            return CheckpointStatus(round=self._round, serial=self._serial, age=None)
        if completed > self._before:
            self.due = None
            return self._completed(age)
        return None

    def _completed(self, age: float) -> CheckpointStatus:
        status = CheckpointStatus(round=self._round, serial=self._serial, age=age)
        self._serial += 1
        return status


PREEMPTION_LOOK_SECONDS = 0.2


class PreemptionReply(Struct, frozen=True, kw_only=True):
    round: int
    status: PreemptionStatus | None = None

    def send(self, participant: Participant) -> None:
        if self.status is not None:
            participant.claims.report_noted(self.round, self.status)
        else:
            participant.claims.report_kept(self.round)


def ended_by_notice(beat: RankBeat, *, is_signalled: bool) -> bool:
    """A worker that ended with 0 did so because of the notice, so its training is to continue later.

    `total` shows that it is complete; steps may be numbered from 1.
    """
    is_complete = beat.total is not None and beat.step is not None and beat.step >= beat.total
    return (is_signalled or beat.has_notice) and not is_complete


class PreemptionWatch(Part):
    due: float | None = None

    def __init__(self, site: AgentSite) -> None:
        self._watch, self._ask, self._clock = site.watch, site.coordination.ask, site.clock
        name = site.me.spec.preemption_signal
        self._signal = signal.Signals[name] if name else None
        self._notice: RunNotice | None = None
        self._round = -1
        self._deadline = 0.0
        self._began: tuple[float, list[RankBeat]] | None = None
        self._has_noted = False
        self._has_kept = False
        self._workers: LocalWorkers | None = None
        self._unsent: set[int] | None = None
        self._signalled: set[int] = set()
        self._explained: set[int] = set()

    def on_record(self, record: RoundRecord, workers: LocalWorkers | None) -> None:
        if record.notice is None or record.status is not Status.FINAL or record.notice == self._notice:
            return
        is_new = self._notice is None
        now = self._clock.monotonic()
        if is_new:
            self._round, self._deadline, self.due = record.round, now + record.notice.seconds, now
        elif not record.notice.is_given_as(self._notice):
            self._deadline = min(self._deadline, now + record.notice.seconds)
        self._notice = record.notice
        self._watch.deliver_notice(deadline=self._deadline, step=record.notice.step)
        if is_new and workers is not None and self._signal is not None:
            self._workers = workers
            self._send()

    def look(self, agent: NodeAgent) -> None:
        reply = self.read(agent.workers.running) if agent.workers and agent.phase is Phase.RUNNING else None
        if reply is not None:
            self._ask(reply.send)

    def on_success(self) -> None:
        if (reply := self.ended()) is not None:
            self._ask(reply.send)

    def read(self, running: Collection[int]) -> PreemptionReply | None:
        now = self._clock.monotonic()
        if self.due is None or now < self.due:
            return None
        self.due = now + PREEMPTION_LOOK_SECONDS
        beats = self._watch.read()
        self._send()
        if self._began is None:
            self._began = now, beats
        if not self._has_noted:
            began, before = self._began
            has_steps = any(beat.step is not None for beat in beats)
            if has_steps and now - began < MEASURE_SECONDS:
                return None
            self._has_noted = True
            return PreemptionReply(round=self._round, status=self._status(beats, before, now - began))
        if running and self._notice is not None and self._notice.is_agreed and self._have_saved(beats, running):
            return self._kept()
        return None

    def ended(self) -> PreemptionReply | None:
        if self._notice is None or self._has_kept:
            return None
        beats = self._watch.read()
        by_notice = [ended_by_notice(beat, is_signalled=beat.local_rank in self._signalled) for beat in beats]
        return self._kept() if any(by_notice) else None

    def _send(self) -> None:
        """A worker without a handler gets the signal when it has one."""
        if self._workers is None or self._signal is None:
            return
        speakers = {
            beat.local_rank: beat.pid
            for beat in self._watch.read()
            if self._unsent is None or beat.local_rank in self._unsent
        }
        is_first = self._unsent is None
        self._unsent = set(self._workers.send(self._signal, speakers)) if speakers else set()
        self._signalled |= speakers.keys() - self._unsent
        if self._unsent and is_first:
            ranks = ", ".join(str(beat.rank) for beat in self._watch.read() if beat.local_rank in self._unsent)
            logger.info("no process of rank %s catches %s: it is sent when one does", ranks, self._signal.name)

    def _kept(self) -> PreemptionReply:
        self._has_kept, self.due = True, None
        return PreemptionReply(round=self._round)

    def _polls_notice(self, beat: RankBeat) -> bool:
        return self._signal is not None or beat.asks_for_notices

    def _status(self, beats: Collection[RankBeat], before: Collection[RankBeat], seconds: float) -> PreemptionStatus:
        polls = any(map(self._polls_notice, beats))
        steps = [beat.step for beat in beats if beat.step is not None]
        if not steps:
            return PreemptionStatus(heeds=polls)
        then = [beat.step for beat in before if beat.step is not None]
        walked = max(steps) - max(then, default=max(steps))
        return PreemptionStatus(heeds=polls, step=max(steps), rate=max(0.0, walked / seconds) if seconds > 0 else 0.0)

    def _have_saved(self, beats: Collection[RankBeat], running: Collection[int]) -> bool:
        assert self._began is not None
        assert self._notice is not None
        before = {beat.local_rank: beat for beat in self._began[1]}
        awaited = [beat for beat in beats if beat.local_rank in running and self._polls_notice(beat)]
        missing = [beat for beat in awaited if not self._has_saved(beat, before[beat.local_rank])]
        for beat in missing:
            if beat.checkpoints <= before[beat.local_rank].checkpoints or beat.local_rank in self._explained:
                continue
            self._explained.add(beat.local_rank)
            holds = f"holds step {beat.saved_step}" if beat.saved_step is not None else "was reported without its step"
            logger.info("a checkpoint of rank %d %s: step %d is waited for", beat.rank, holds, self._notice.step)
        return not missing and any(map(self._polls_notice, beats))

    def _has_saved(self, beat: RankBeat, before: RankBeat) -> bool:
        assert self._notice is not None
        awaited: int | None = None  # any checkpoint counts that is complete after the notice
        if beat.step is not None and self._notice.step >= 0:
            # A worker that only heeds the signal does not know of the agreed step: it saves where the signal meets it.
            awaited = self._notice.step if beat.asks_for_notices else before.step
        is_far_enough = awaited is None or (beat.saved_step is not None and beat.saved_step >= awaited)
        return beat.checkpoints > before.checkpoints and is_far_enough
