"""What a node reports of its workers' failures: the bare fact at once, the evidence when the workers have ended."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from hpc_elastic.agent.restart_policy import early_failure, hang_elsewhere, may_wait, platform_failure, sum_up
from hpc_elastic.agent.round_events import ClockOffsetLog, log_failure, log_stacks
from hpc_elastic.base.clock import uptime_ns
from hpc_elastic.failures.contrast import moment_after
from hpc_elastic.run.agent_events import HangFound, HangSuspected, PlatformFailure, RanksObserved
from hpc_elastic.run.suspicions import OnHang, Source

if TYPE_CHECKING:
    from hpc_elastic.agent.context import AgentContext
    from hpc_elastic.agent.hang import Hang
    from hpc_elastic.agent.heartbeats import RankBeat
    from hpc_elastic.agent.local_workers import LocalWorkers
    from hpc_elastic.rendezvous.state import NodeFailure, RoundRecord

logger = logging.getLogger(__name__)


class FailureReports:
    """One agent's: to the events, and through the coordination to the coordinator. All methods are for its main
    thread."""

    def __init__(self, context: AgentContext, clock_offsets: ClockOffsetLog) -> None:
        self._context = context
        self._clock_offsets = clock_offsets
        self.platform_failure = ""
        """What of this package failed in this round."""
        self._last_beats: tuple[list[RankBeat], float] = ([], 0.0)
        """The workers' last heartbeats before they were ended, and when they were read."""
        self._unwritten: list[Callable[[], object]] = []
        """Evidence of failures that the filesystem refused."""

    def on_start_failure(self, workers: LocalWorkers, error: Exception) -> None:
        """A worker could not be started."""
        logger.error("the workers could not be started: %s", error)
        failure = workers.describe_start_failure(error)
        log_failure(self._context.events, failure)
        summary = sum_up([failure], node=self._context.info.node, seconds=0.0)
        index = workers.round
        self._context.coordination.ask(lambda participant: participant.claims.report_failure(index, summary))
        self._context.coordination.ask(lambda participant: participant.claims.sum_up_failures(index, summary))

    def on_failure(self, workers: LocalWorkers, reason: str) -> None:
        """Report the bare fact at once, so that all nodes stop; the evidence follows when the workers have ended."""
        failure = early_failure(reason, node=self._context.info.node, workers=workers, watch=self._context.watch)
        index = workers.round
        self._context.coordination.ask(lambda participant: participant.claims.report_failure(index, failure))

    def moment_for(self, workers: LocalWorkers, record: RoundRecord | None) -> float | None:
        """For how many seconds the other workers go on, so that it shows whether a failure is this node's alone; None:
        they need not."""
        if record is None or len(record.members) < 2 or (failure := workers.look_at_failure()) is None:
            return None
        if not may_wait(failure, record, max_restarts=self._context.spec.max_restarts):
            return None
        workers.begin_moment()
        seconds = moment_after(workers.seconds)
        logger.info("%s: may be this node's: the other workers go on for %.1f s", failure.headline, seconds)
        return seconds

    def on_hang(self, workers: LocalWorkers, found: Hang) -> bool:
        """Report a hang. Returns whether the round is to be ended for it: then the workers here leave their stacks."""
        context = self._context
        if found.source is Source.HEARTBEAT:
            logger.error("%s", found.reason)
            context.events.write(HangFound(round=workers.round, limit=found.seconds, reason=found.reason))
        else:
            acts = context.spec.hangs.action is OnHang.ACT and not found.may_be_rest
            way_out = "" if acts or found.may_be_rest else " (nothing is ended; --hangs act starts the workers again)"
            logger.warning("the run seems to hang: %s%s", found.reason, way_out)
            context.events.write(
                HangSuspected(round=workers.round, source=found.source.value, ranks=found.ranks, reason=found.reason)
            )
            if not acts:
                return False
            context.watch.declare(found, workers.running)
        workers.take_stacks_first()
        return True

    def on_platform_failure(self, round_index: int, reason: str) -> None:
        """Something of this package has failed, and not the workers."""
        self.platform_failure = reason
        logger.error("%s", reason)
        self._context.events.write(PlatformFailure(round=round_index, reason=reason))

    def before_stop(self, workers: LocalWorkers, record: RoundRecord | None) -> None:
        """Read what running workers did last; those that are to leave their stacks do so before they are ended."""
        context = self._context
        self._last_beats = context.watch.refresh(), context.clock.monotonic()
        if record is not None and record.hang is not None and record.round == workers.round + 1:
            context.watch.on_hang(record.hang, workers.running)  # a worker elsewhere hangs: for which here?
            workers.take_stacks_first()
        elif record is not None and record.symptoms and record.round == workers.round + 1:
            workers.look_first()
        self.rest()

    def rest(self) -> None:
        """The workers are ended from here on: no hang is looked for."""
        self._context.watch.rest()
        self._context.hangs.end()

    def on_end(self, workers: LocalWorkers) -> None:
        """All of the group are gone: write and report the evidence."""
        context, index, seconds = self._context, workers.round, workers.seconds
        failures = workers.describe_failures()
        self._unwritten += workers.evidence.unwritten
        for failure in failures:
            log_failure(context.events, failure)
        own = [failure for failure in failures if not failure.is_stopped or failure.is_own_cause]
        summary: NodeFailure | None = None
        if own:
            mark = context.watch.mark
            count = workers.layout.local_world_size
            now_ns = uptime_ns(context.clock)
            since = (now_ns - min(failure.ended_uptime_ns or now_ns for failure in own)) / 1e9
            summary = sum_up(
                own,
                node=context.info.node,
                seconds=max(0.0, seconds - since),
                step=context.watch.furthest_step,
                counted_steps=context.watch.counted_steps,
                hang=mark,
                workers=count,
                leader=self._clock_offsets.ahead_of_leader,
            )
        elif (mark := context.watch.declared) is not None:
            # Declared here, for ranks of another node, which report what they left.
            summary = hang_elsewhere(mark, node=context.info.node, seconds=seconds)
        elif self.platform_failure:
            summary = platform_failure(self.platform_failure, node=context.info.node, seconds=seconds)
        if workers.took_stacks:
            beats, now = self._last_beats
            log_stacks(context.events, index, stacks=workers.evidence.stacks, beats=beats, now=now)
        if workers.evidence.activities:
            self._write_observed(workers)
        context.watch.end()
        if summary is not None:
            context.coordination.ask(lambda participant: participant.claims.sum_up_failures(index, summary))

    def on_break_elsewhere(self, workers: LocalWorkers | None, record: RoundRecord | None) -> None:
        """All here had ended with 0. Where nothing but symptoms is known of the others, one may name a rank of this
        node by its address."""
        if workers is None or record is None or not record.symptoms or record.round != workers.round + 1:
            return
        if workers.sockets.ranks:
            self._write_observed(workers)

    def _write_observed(self, workers: LocalWorkers) -> None:
        self._context.events.write(
            RanksObserved(
                round=workers.round,
                ranks=tuple(workers.evidence.activities),
                network=workers.sockets.network,
                sockets=workers.sockets.ranks,
            )
        )

    def write_again(self) -> None:
        """The filesystem takes files again, or never will."""
        for write in self._unwritten:
            self._context.files.post(write)
        self._unwritten.clear()
