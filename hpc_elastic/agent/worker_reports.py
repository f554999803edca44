"""Parts that pass on what workers report: of their checkpoints, and of their in-process restart group.

The coordinator gets reports of completed checkpoints, after which it may add nodes that wait, and before a preemption
of what is saved. The restart group restarts a function in the processes that are left: the agent starts a fresh process
in the place of a dead one, and leaves the others alone. Where that would not help, all workers start again.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from msgspec import Struct

from hpc_elastic.agent.heartbeats import RankBeat
from hpc_elastic.agent.part import Part
from hpc_elastic.agent.supervision import Phase
from hpc_elastic.errors import HpcElasticError
from hpc_elastic.rendezvous.participant import Participant
from hpc_elastic.rendezvous.state import MEASURE_SECONDS, PreemptionStatus, RoundRecord, RunNotice, Status
from hpc_elastic.run.agent_events import InProcessGaveUp, InProcessRestarted, WorkerReplaced
from hpc_elastic.run.events import Note
from hpc_elastic.run.option_values import GrowPolicy, RestartWith
from hpc_elastic.worker_api.records import (
    CHECKPOINT,
    RESTART_REPLACES,
    RESTART_REPORTS,
    RESTART_WAIT,
    RestartGroupEvent,
    RestartGroupReport,
    read_report,
)

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

    from hpc_elastic.agent.local_workers import DeadWorker, LocalWorkers
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


WAIT_SECONDS = 300.0
"""A fresh process comes to its restart group after Python's start and the script's imports, from a slow filesystem."""
_MOST_AT_ONCE = 1 << 16


def why_not_replaced(dead: DeadWorker, *, last: RestartGroupEvent | None, used: int, limit: int) -> str:
    """Empty where a fresh process is put in its place. `used`: replacements on this node in this round."""
    if last is None:
        return f"{dead} before it was in a wrapped call"
    if last is RestartGroupEvent.ENDED:
        return f"{dead} after its wrapped call"
    if last is RestartGroupEvent.GAVE_UP:
        return f"{dead}: the in-process restart group gave up"
    if used >= limit:
        return f"{dead}, and {used} of {limit} replacements in this round are used"
    return ""


class RestartGroupWatch(Part):
    def __init__(self, site: AgentSite) -> None:
        self._events, self._policy = site.events, site.me.spec.restart_policy
        self._limit = site.me.spec.max_restarts
        self._round = -1
        self._last: dict[int, RestartGroupEvent] = {}
        self._used: dict[int, int] = {}
        self._unread = b""
        self._path, self._fd = site.watch.pages.make_pipe("ring", "in-process restart can be reported")

    def watched(self) -> Collection[FileDescriptorLike]:
        return (self._fd,)

    def environment(self, given: Mapping[str, str]) -> dict[str, str]:
        """A wait that the user chose stays."""
        if not self._path:
            return {}
        found = {RESTART_REPORTS: self._path}
        if self._policy is RestartWith.IN_PROCESS:
            found[RESTART_WAIT] = given.get(RESTART_WAIT) or f"{WAIT_SECONDS:g}"
        return found

    def look(self, agent: NodeAgent) -> None:
        self.handle(agent.round)

    def handle(self, round_index: int) -> None:
        if self._fd < 0:
            return
        try:
            raw = os.read(self._fd, _MOST_AT_ONCE)
        except BlockingIOError:
            return
        *lines, self._unread = (self._unread + raw).split(b"\n")
        for raw_line in lines:
            if (line := read_report(raw_line)) is not None:
                self._take(line, round_index)

    def replace_dead(self, workers: LocalWorkers) -> bool:
        if self._policy is not RestartWith.IN_PROCESS:
            return False
        if workers.round != self._round:
            self._round, self._used = workers.round, {}
        self.handle(workers.round)
        dead = workers.dead
        for each in dead:
            last, used = self._last.get(each.pid), sum(self._used.values())
            if why := why_not_replaced(each, last=last, used=used, limit=self._limit):
                return self._refuse(each, why, workers.round)
        return all(self._replace(each, workers) for each in dead)

    def _replace(self, dead: DeadWorker, workers: LocalWorkers) -> bool:
        number = self._used.get(dead.local_rank, 0) + 1
        self._used[dead.local_rank] = number
        try:
            pid = workers.replace(dead.local_rank, {RESTART_REPLACES: str(number)})
        except (HpcElasticError, OSError) as error:
            return self._refuse(dead, f"{dead}, and no process can be started in its place: {error}", workers.round)
        reason = f"{dead}; {sum(self._used.values())} of {self._limit} replacements in this round are used"
        logger.warning("a fresh process takes its place: %s", reason)
        self._events.write(
            WorkerReplaced(
                round=workers.round,
                rank=dead.rank,
                local_rank=dead.local_rank,
                exitcode=dead.exitcode,
                old_pid=dead.pid,
                pid=pid,
                reason=reason,
            )
        )
        return True

    def _refuse(self, dead: DeadWorker, why: str, round_index: int) -> bool:
        logger.warning("not replaced: %s", why)
        text = f"round {round_index}: all workers are to start again"
        self._events.write(Note(subject="replacement_refused", text=text, reason=why, round=round_index))
        return False

    def _take(self, line: RestartGroupReport, round_index: int) -> None:
        if line.event is RestartGroupEvent.RESTARTED:
            kinds = ", ".join(f"{name} on rank {rank}" for rank, name in line.interruptions)
            logger.info(
                "the function starts again (iteration %d) after %.2f s: %s", line.iteration, line.seconds, kinds
            )
            self._events.write(
                InProcessRestarted(
                    round=round_index,
                    iteration=line.iteration,
                    seconds=line.seconds,
                    world_size=line.world_size,
                    active_world_size=line.active_world_size,
                    interruptions=line.interruptions,
                    joined=line.joined,
                    reason=kinds,
                )
            )
            return
        self._last[line.pid] = line.event
        if line.event is RestartGroupEvent.LEFT:
            text = f"round {round_index}: rank {line.rank} leaves the in-process restart group"
            self._events.write(Note(subject="ring_left", text=text, reason=line.reason, round=round_index))
        elif line.event is RestartGroupEvent.GAVE_UP:
            self._events.write(
                InProcessGaveUp(round=round_index, rank=line.rank, iteration=line.iteration, reason=line.reason)
            )
