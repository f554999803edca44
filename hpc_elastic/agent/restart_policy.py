"""The restart policy: whether failures are worth another round; and the reports that a node sends for that.

`RestartPolicy` is pure, and asked when the next round is frozen. `sum_up`, `early_failure` and `bare_failure` make the
one record (`NodeFailure`) of a node. `FailureReports` sends it: the bare fact at once, the evidence when the workers
have ended.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from hpc_elastic.agent.part import Condemned
from hpc_elastic.base.clock import uptime_ns
from hpc_elastic.base.text import ranks_text
from hpc_elastic.failures.classify import (
    NodeFailures,
    may_be_of_node,
    moment_after,
    nodes_apart,
    sum_up_node,
    wrong_input,
)
from hpc_elastic.failures.ranking import FailureClass, Ranking
from hpc_elastic.failures.worker_failure import WorkerFailure
from hpc_elastic.rendezvous.proposals import RestartDecision, first_failure
from hpc_elastic.rendezvous.state import KILLED, FailureMemory, HangMark, NodeFailure, RoundRecord, Status
from hpc_elastic.run.agent_events import (
    PlatformFailure,
    RanksObserved,
    RankStack,
    RankState,
    SharedThreadStack,
    StacksTaken,
)

if TYPE_CHECKING:
    from hpc_elastic.agent.heartbeat_watch import HeartbeatWatch
    from hpc_elastic.agent.heartbeats import RankBeat
    from hpc_elastic.agent.local_workers import LocalWorkers
    from hpc_elastic.agent.part import AgentSite
    from hpc_elastic.agent.rounds import ClockOffsetLog
    from hpc_elastic.failures.stacks import RankStacks
    from hpc_elastic.run.events import EventLog

logger = logging.getLogger(__name__)

HANG_FINGERPRINT = "hang:"
STOPPED_FINGERPRINT = "hang:stopped"
KERNEL_FINGERPRINT = "hang:kernel"
"""A worker sat in the kernel, where no signal reached it."""


def may_be_a_bug(fingerprint: str) -> bool:
    """A process that is stopped from outside, or a mount that hangs, is no bug in the script."""
    return bool(fingerprint) and fingerprint not in (STOPPED_FINGERPRINT, KERNEL_FINGERPRINT)


PROGRESS_SECONDS = 600.0
"""Workers that ran this long made progress, where neither steps nor `--restart-window` decide that."""


class RestartPolicy(Struct, frozen=True, kw_only=True):
    max_restarts: int
    max_same_failures: int
    """Give up after this many identical failures without progress. 0: never."""
    restart_window: float | None = None
    """Seconds that workers must have run for the whole budget to be there again; None: time does not refill it."""

    def decide_restart(self, record: RoundRecord, failures: Sequence[NodeFailure]) -> RestartDecision:
        """Decide about the failures of the round before `record`'s. Without any it is a change of members, and free."""
        memory = record.memory
        if not failures:
            return RestartDecision(go_on=True, restarts_used=record.restarts_used, reason="", memory=memory)
        cause = first_failure(failures)
        seconds, window = max(f.seconds for f in failures), self.restart_window
        refilled = bool(record.restarts_used) and window is not None and seconds >= window
        memory, limit = self._remember(memory, failures, cause)
        apart = _apart(record, failures)
        known = cause.failure_class != FailureClass.SYMPTOM.value
        after = cause.message if known else f"cause not known, first seen: {cause.message}"
        final = next((f for f in failures if not f.retryable), None)
        if final is not None and not apart:
            return _give_up(f"not retryable: {final.message}", memory)
        is_bug = self.max_same_failures and memory.times >= self.max_same_failures
        is_early = cause.fingerprint.startswith(KILLED)
        if is_bug and not apart and (is_early or not _is_of_one_node(record, failures, cause)):
            rule = "" if limit is None else f", each within {limit:g} s of the start (--restart-window)"
            rule = f", each within {EARLY_SECONDS:g} s of the start (--max-same-failures)" if is_early else rule
            is_root = cause.failure_class == FailureClass.ROOT.value and not is_early
            what = "this looks like a bug in the script" if is_root else "each start ends the same way"
            return _give_up(
                f"{what}: the same failure {memory.times} times in a row with no progress between{rule} "
                f"({cause.message})",
                memory,
            )
        used = 0 if refilled else record.restarts_used
        if used >= self.max_restarts:
            reason = f"restarts exhausted ({used} of {self.max_restarts} restarts used): {after}"
            return RestartDecision(go_on=False, reason=reason, memory=memory)
        left = f"{self.max_restarts - used - 1} left" + (
            f", refilled by {seconds:.0f} good seconds" if refilled else ""
        )
        return RestartDecision(
            go_on=True,
            restarts_used=used + 1,
            reason=f"restart {used + 1} of {self.max_restarts} ({left}) after: {after}",
            memory=memory,
            apart=apart,
        )

    def _remember(
        self, before: FailureMemory, failures: Sequence[NodeFailure], cause: NodeFailure
    ) -> tuple[FailureMemory, float | None]:
        """Returns the seconds that decided about progress, too, where steps did not."""
        step, counted = max(f.step for f in failures), max(f.counted_steps for f in failures)
        progress, limit = made_progress(
            step=step,
            before=before.step,
            counted=counted,
            counted_before=before.counted_steps,
            seconds=max(f.seconds for f in failures),
            window=self.restart_window,
        )
        same = may_be_a_bug(cause.fingerprint) and cause.fingerprint == before.fingerprint and not progress
        memory = FailureMemory(
            fingerprint=cause.fingerprint,
            times=before.times + 1 if same else (1 if cause.fingerprint else 0),
            step=max(step, before.step),
            counted_steps=counted,
        )
        return memory, limit


def _apart(record: RoundRecord, failures: Sequence[NodeFailure]) -> tuple[int, ...]:
    found = {member.node: NodeFailures(node=member.node, workers=member.local_world_size) for member in record.members}
    for one in failures:
        if one.node in found:
            passed, plain = one.failure_class == FailureClass.SYMPTOM.value, found[one.node]
            found[one.node] = replace(
                plain, alike=one.alike, fingerprint=one.fingerprint, waited=one.waited, passed=passed
            )
    return nodes_apart(found.values())


def _is_of_one_node(record: RoundRecord, failures: Sequence[NodeFailure], cause: NodeFailure) -> bool:
    """A read-only filesystem is one node's mount. All workers of a container that write to ``/results.txt`` have a
    wrong path: before the same failure counts again, the other nodes get a moment to show it (`may_wait`)."""
    alike = [one for one in failures if one.fingerprint == cause.fingerprint]
    is_infrastructure = cause.failure_class == FailureClass.INFRASTRUCTURE.value
    return is_infrastructure and len(record.members) > 1 and len(alike) == 1


def may_wait(failure: WorkerFailure, record: RoundRecord, *, max_restarts: int) -> bool:
    """The other nodes' workers get a delay to show whether a failure is its node's, where that delays no recovery."""
    if len(record.members) < 2 or not may_be_of_node(failure):
        return False
    is_again = failure.fingerprint == record.memory.fingerprint
    return not failure.retryable or is_again or record.restarts_used >= max_restarts


def _give_up(reason: str, memory: FailureMemory) -> RestartDecision:
    return RestartDecision(go_on=False, reason=reason, memory=memory, retryable=False)


def made_progress(
    *, step: int, before: int, seconds: float, window: float | None, counted: int = -1, counted_before: int = -1
) -> tuple[bool, float | None]:
    """Decide whether a failure came after progress since the last one: then it is not "the same again".

    `step` is the furthest that was reported by now, `before` at the last failure, -1 for none. Of steps that were
    counted, more than in the last failure's round are progress; of fewer it is not known where they began, and the
    seconds decide. Returns the seconds that decided it, too; None where steps did.
    """
    if step >= 0 and before >= 0:
        return step > before, None
    if counted >= counted_before >= 0:
        return counted > counted_before, None
    limit = PROGRESS_SECONDS if window is None else window
    return seconds >= limit, limit


EARLY_SECONDS = 1.0
"""A worker that is killed from outside so soon after each start is killed by what it does then."""
_FROM_OUTSIDE = {"SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGQUIT"}


def sum_up(
    failures: Sequence[WorkerFailure],
    *,
    node: int,
    seconds: float,
    step: int = -1,
    counted_steps: int = -1,
    hang: HangMark | None = None,
    workers: int = 0,
    leader: tuple[int, int] | None = None,
) -> NodeFailure:
    """`seconds`: until the first of them failed. `leader`: the coordinator's node, and by how many nanoseconds this
    host's clock is ahead of its; None: not known."""
    ranking = Ranking(failures, WorkerFailure.standing)
    first = ranking.first or ranking.all[0]
    is_hang = first.failure_class is FailureClass.HANG
    is_own = first.is_stopped or first.signal not in _FROM_OUTSIDE  # the agent's signal came after its exception
    step = max([step, *(f.last_step for f in failures if f.last_step is not None)])
    mark = ""
    if not is_own and seconds <= EARLY_SECONDS and step < 0 and counted_steps < 1:
        mark = KILLED
    counts = is_hang or mark or wrong_input(first) or (is_own and first.failure_class is FailureClass.ROOT)
    whole = sum_up_node(failures, node=node, workers=workers)
    has_time = leader is not None and first.ended_uptime_ns > 0
    clock, ahead_ns = leader if leader is not None and has_time else (-1, 0)
    began_ns = first.ended_uptime_ns - (first.ended_ns - first.printed_ns) if first.printed_ns else 0
    return NodeFailure(
        node=node,
        # A kill from outside is no bug in the script: it is "the same failure again" right after each start alone.
        fingerprint=f"{mark}{first.fingerprint}" if counts else "",
        failure_class=first.failure_class.value,
        retryable=all(f.retryable for f in failures),
        message=f"rank {first.global_rank}: {first.headline}",
        step=step,
        counted_steps=counted_steps,
        seconds=seconds,
        hang=hang if is_hang else None,
        alike=whole.alike if whole.fingerprint == first.fingerprint else 0,
        waited=whole.waited,
        clock=clock,
        ended_ns=first.ended_uptime_ns - ahead_ns if has_time else 0,
        printed_ns=began_ns - ahead_ns if has_time and began_ns else 0,
        raised=bool(first.exception_type),
        lost_connection=first.standing().lost_connection,
    )


def early_failure(reason: str, *, node: int, workers: LocalWorkers, watch: HeartbeatWatch) -> NodeFailure:
    hang = watch.mark
    return NodeFailure(
        node=node,
        fingerprint="",
        failure_class="hang" if hang is not None else "symptom" if workers.wants_look else "unknown",
        retryable=not workers.want_no_other_try,
        message=reason,
        step=watch.furthest_step,
        counted_steps=watch.counted_steps,
        seconds=workers.seconds,
        hang=hang,
    )


def bare_failure(message: str, failure_class: FailureClass, *, node: int, seconds: float) -> NodeFailure:
    """No worker of this node failed: a hang was declared for ranks elsewhere, or this package failed."""
    return NodeFailure(
        node=node, fingerprint="", failure_class=failure_class.value, retryable=True, message=message, seconds=seconds
    )


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
            now_ns = uptime_ns(site.clock)
            since = (now_ns - min(failure.ended_uptime_ns or now_ns for failure in own)) / 1e9
            summary = sum_up(
                own,
                node=site.info.node,
                seconds=max(0.0, seconds - since),
                step=site.watch.furthest_step,
                counted_steps=site.watch.counted_steps,
                hang=site.watch.mark,
                workers=workers.layout.local_world_size,
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


_STACK_GROUPS = 50


def log_stacks(
    events: EventLog, round_index: int, *, stacks: Mapping[int, RankStacks], beats: Sequence[RankBeat], now: float
) -> None:
    from hpc_elastic.agent.heartbeat_watch import describe_beat  # not in a supervisor, which has this policy too
    from hpc_elastic.failures.stacks import fold_ranks

    main = [(rank, found.main) for rank, found in sorted(stacks.items()) if found.main]
    others = [(rank, thread) for rank in sorted(stacks) for thread in dict.fromkeys(stacks[rank].others)]
    events.write(
        StacksTaken(
            round=round_index,
            groups=tuple(RankStack(ranks=ranks, stack=stack) for ranks, stack in fold_ranks(main)[:_STACK_GROUPS]),
            threads=tuple(
                SharedThreadStack(ranks=ranks, name=name, stack=stack)
                for ranks, (name, stack) in fold_ranks(others)[:_STACK_GROUPS]
            ),
            silent=tuple(sorted(rank for rank, found in stacks.items() if not found.main)),
            states=tuple(
                RankState(rank=rank, state=found.where) for rank, found in sorted(stacks.items()) if found.where
            ),
            beats=tuple(describe_beat(beat, now) for beat in beats),
        )
    )
