"""The restart policy: whether failures are worth another round. Pure; asked when the next round is frozen.

`sum_up`, `early_failure` and `bare_failure` make the one record (`NodeFailure`) that a node sends for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from hpc_elastic.failures.classify import NodeFailures, may_be_of_node, nodes_apart, sum_up_node, wrong_input
from hpc_elastic.failures.ranking import FailureClass, Ranking
from hpc_elastic.failures.worker_failure import WorkerFailure
from hpc_elastic.rendezvous.restart import RestartDecision, first_failure
from hpc_elastic.rendezvous.state import KILLED, FailureMemory, HangMark, NodeFailure, RoundRecord

if TYPE_CHECKING:
    from hpc_elastic.agent.heartbeat_watch import HeartbeatWatch
    from hpc_elastic.agent.local_workers import LocalWorkers

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
