"""Reports of the workers' failures: the bare fact at once, the evidence when the workers have ended."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from hpc_elastic.agent.part import Condemned
from hpc_elastic.agent.restart_policy import bare_failure, early_failure, may_wait, sum_up
from hpc_elastic.agent.rounds import ClockOffsetLog, log_stacks
from hpc_elastic.base.clock import uptime_ns
from hpc_elastic.base.text import ranks_text
from hpc_elastic.failures.classify import moment_after
from hpc_elastic.failures.ranking import FailureClass
from hpc_elastic.rendezvous.state import Status
from hpc_elastic.run.agent_events import PlatformFailure, RanksObserved

if TYPE_CHECKING:
    from hpc_elastic.agent.heartbeats import RankBeat
    from hpc_elastic.agent.local_workers import LocalWorkers
    from hpc_elastic.agent.part import AgentSite
    from hpc_elastic.rendezvous.state import NodeFailure, RoundRecord

logger = logging.getLogger(__name__)


class FailureReports:
    def __init__(self, site: AgentSite, clock_offsets: ClockOffsetLog) -> None:
        self._site = site
        self._clock_offsets = clock_offsets
        self.platform_failure = ""
        self._last_beats: tuple[list[RankBeat], float] = ([], 0.0)
        self._unwritten: list[Callable[[], object]] = []
        self._ended: LocalWorkers | None = None

    def on_failure(self, workers: LocalWorkers, reason: str) -> None:
        failure = early_failure(reason, node=self._site.info.node, workers=workers, watch=self._site.watch)
        index = workers.round
        self._site.coordination.ask(lambda participant: participant.claims.report_failure(index, failure))

    def grace_for_peers(self, workers: LocalWorkers, record: RoundRecord | None) -> float | None:
        """Seconds for which the other workers go on, so that it shows whether a failure is this node's alone."""
        if record is None or len(record.members) < 2 or (failure := workers.look_at_failure()) is None:
            return None
        if not may_wait(failure, record, max_restarts=self._site.me.spec.max_restarts):
            return None
        workers.begin_grace()
        seconds = moment_after(workers.seconds)
        logger.info("%s: may be this node's: the other workers go on for %.1f s", failure.headline, seconds)
        return seconds

    def on_condemned(self, workers: LocalWorkers, found: Condemned) -> None:
        workers.condemn(found)
        if not found.ranks and found.failure_class is FailureClass.INFRASTRUCTURE:
            self.platform_failure = found.reason
            logger.error("%s", found.reason)
            self._site.events.write(PlatformFailure(round=workers.round, reason=found.reason))

    def before_stop(self, workers: LocalWorkers, record: RoundRecord | None) -> None:
        site = self._site
        self._last_beats = site.watch.refresh(), site.clock.monotonic()
        if record is not None and record.hang is not None and record.round == workers.round + 1:
            site.watch.on_hang(record.hang, workers.running)  # a worker elsewhere hangs: for which here?
            workers.condemn(Condemned(reason="a hang", failure_class=FailureClass.HANG, ranks=site.watch.hung))
        elif record is not None and record.symptoms and record.round == workers.round + 1:
            workers.look_first()
        site.watch.stop_judging()  # the workers are ended from here on: no hang is looked for

    def on_end(self, workers: LocalWorkers, record: RoundRecord | None) -> None:
        site, index, seconds = self._site, workers.round, workers.seconds
        failures = workers.describe_failures()
        self._unwritten += workers.evidence.unwritten
        for failure in failures:
            site.events.write(failure.to_event())
        own = [failure for failure in failures if not failure.is_stopped or failure.is_own_cause]
        summary: NodeFailure | None = None
        if own:
            mark = site.watch.mark
            count = workers.layout.local_world_size
            now_ns = uptime_ns(site.clock)
            since = (now_ns - min(failure.ended_uptime_ns or now_ns for failure in own)) / 1e9
            summary = sum_up(
                own,
                node=site.info.node,
                seconds=max(0.0, seconds - since),
                step=site.watch.furthest_step,
                counted_steps=site.watch.counted_steps,
                hang=mark,
                workers=count,
                leader=self._clock_offsets.ahead_of_leader,
            )
        elif (mark := site.watch.declared) is not None:
            # Declared here, for ranks of another node, which report what they left.
            message = f"{ranks_text(mark.ranks)} made no progress for {mark.age:.0f} s"
            summary = bare_failure(message, FailureClass.SYMPTOM, node=site.info.node, seconds=seconds)
        elif self.platform_failure:
            summary = bare_failure(
                self.platform_failure, FailureClass.INFRASTRUCTURE, node=site.info.node, seconds=seconds
            )
        if workers.took_stacks:
            beats, now = self._last_beats
            log_stacks(site.events, index, stacks=workers.evidence.stacks, beats=beats, now=now)
        if workers.evidence.activities:
            self._write_observed(workers)
        site.watch.end()
        self._ended = workers
        self.on_record(record)
        if summary is not None:
            site.coordination.ask(lambda participant: participant.claims.sum_up_failures(index, summary))

    def on_record(self, record: RoundRecord | None) -> None:
        """It is known for whose failure the last round ended: one node shows it."""
        if self._ended is None or record is None or record.status is Status.JOINABLE:
            return
        if record.round > self._ended.round or record.status is Status.CLOSED:
            self._ended.show_causes(record.reason)
            self._ended = None

    def on_break_elsewhere(self, workers: LocalWorkers, record: RoundRecord | None) -> None:
        """All here had ended with 0. A symptom elsewhere may name a rank of this node by its address."""
        if record is None or not record.symptoms or record.round != workers.round + 1:
            return
        if workers.sockets.ranks:
            self._write_observed(workers)

    def _write_observed(self, workers: LocalWorkers) -> None:
        self._site.events.write(
            RanksObserved(
                round=workers.round,
                ranks=tuple(workers.evidence.activities),
                network=workers.sockets.network,
                sockets=workers.sockets.ranks,
            )
        )

    def begin(self) -> None:
        self.platform_failure = ""
        self.write_again()

    def write_again(self) -> None:
        for write in self._unwritten:
            self._site.files.post(write)
        self._unwritten.clear()
