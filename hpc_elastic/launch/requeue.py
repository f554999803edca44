"""The requeue: decided with reasons, by pure functions, and carried out, once and with patience.

`JobRequeuer` queues the next attempt: the job requeued, or a follow-on job submitted. A process may be killed between
any two of its calls, and another may do them again (an agent, where the batch host does not answer): so each try first
asks Slurm whether it is done already.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from hpc_elastic.agent.restart_policy import HANG_FINGERPRINT, made_progress, may_be_a_bug
from hpc_elastic.base.clock import Clock
from hpc_elastic.base.loop import repeat
from hpc_elastic.rendezvous.state import RoundRecord
from hpc_elastic.run.option_values import RequeueChoice
from hpc_elastic.run.paths import AttemptInfo, ExitCode, Outcome, StoredResult
from hpc_elastic.run.spec import RunSpec
from hpc_elastic.slurm.client import SlurmClient
from hpc_elastic.slurm.commands import (
    JobId,
    JobNotPendingError,
    RequeueDisabledError,
    SlurmError,
    SlurmPermissionError,
    SlurmUnavailableError,
)
from hpc_elastic.slurm.job_environment import compress
from hpc_elastic.slurm.job_state import JobPhase, JobState

logger = logging.getLogger(__name__)

BACK_OFF_SECONDS = 60.0
"""Delay after two attempts in a row without progress; it doubles with each further one."""
MOST_BACK_OFF_SECONDS = 1800.0


class RequeueAction(str, Enum):
    REQUEUE = "requeue"
    END = "end"


class RequeueWay(str, Enum):
    REQUEUE = "requeue"
    ALLOW = "allow"
    """``scontrol requeue`` after the owner has set Requeue=1: the site's default is 0."""
    CHAIN = "chain"
    """A follow-on job in the same run directory, which depends on this one's end."""
    NONE = "none"


class Arming(Struct, frozen=True):
    way: RequeueWay
    reason: str = ""


def decide_arming(
    spec: RunSpec,
    state: JobState | None,
    *,
    can_chain: bool,
    site_allows: bool = True,
    problem: str = "",
    missing: str = "",
) -> Arming:
    """`state` is None where Slurm has no record of the job, or could not be asked."""
    own_script = "the batch script is not one that hpc-elastic submit made"
    if not (spec.requeue and spec.max_requeues > 0):
        return Arming(RequeueWay.NONE, "--no-requeue or --max-requeues 0 was given")
    if state is not None and not state.is_batch:
        return Arming(RequeueWay.NONE, "this is an allocation of salloc's, and Slurm requeues batch jobs only")
    if spec.requeue_with is RequeueChoice.CHAIN:
        if can_chain:
            return Arming(RequeueWay.CHAIN, "--requeue-with chain was given")
        return Arming(RequeueWay.NONE, f"--requeue-with chain: {own_script}")
    if missing:
        return Arming(RequeueWay.NONE, missing)
    if problem:
        return Arming(RequeueWay.REQUEUE, f"not verified: {problem}")
    if state is None:
        return Arming(RequeueWay.NONE, "Slurm does not know this job")
    if state.requeue:
        return Arming(RequeueWay.REQUEUE)
    why = "this job was submitted with --no-requeue" if site_allows else "the site has JobRequeue=0"
    if spec.requeue_with is RequeueChoice.AUTO and can_chain:
        return Arming(RequeueWay.CHAIN, f"this job may not be requeued: {why}")
    if not site_allows:
        return Arming(RequeueWay.ALLOW, why)
    return Arming(RequeueWay.NONE, f"{why}, or the site's rules say so")


def back_off(idle: int) -> float:
    if idle < 2:
        return 0.0
    return min(MOST_BACK_OFF_SECONDS, BACK_OFF_SECONDS * 2.0 ** min(idle - 2, 30))


class AttemptResult(Struct, frozen=True, kw_only=True):
    outcome: Outcome
    reason: str
    retryable: bool
    signal_number: int | None = None
    fingerprint: str = ""
    """The script's failure that ended it, if any."""
    step: int = -1
    """The furthest step reported by then, -1 for none."""
    seconds: float = 0.0
    requeued: bool = False
    """Slurm has put the job back into the queue itself."""
    cancelled: bool = False
    """The job was cancelled after the attempt had been given up for another reason."""
    notice: str = ""


def closed_result(record: RoundRecord, outcome: Outcome, *, signal_number: int | None = None) -> AttemptResult:
    return AttemptResult(
        outcome=outcome,
        reason=record.reason,
        retryable=record.retryable,
        signal_number=signal_number,
        # What an earlier round of it failed by is no reason where a notice, or lost nodes, ended it.
        fingerprint=record.memory.fingerprint if outcome is Outcome.FAILED else "",
        step=record.memory.step,
    )


A_BUG = "a bug in the script?"
_MADE_ROOM = (Outcome.PREEMPTED, Outcome.TIMED_OUT)


class RequeueDecision(Struct, frozen=True, kw_only=True):
    action: RequeueAction
    reason: str
    exit_code: int
    delay: float = 0.0


def idle_attempts(before: StoredResult | None, spec: RunSpec, result: AttemptResult) -> int:
    is_first_step = result.step >= 0 and (before is None or before.step < 0)
    if result.outcome in _MADE_ROOM or is_first_step or _made_progress(before, spec, result)[0]:
        return 0
    return 1 + (before.idle if before is not None else 0)


def _made_progress(before: StoredResult | None, spec: RunSpec, result: AttemptResult) -> tuple[bool, float | None]:
    step = before.step if before is not None else -1
    return made_progress(step=result.step, before=step, seconds=result.seconds, window=spec.restart_window)


def decide_requeue(
    before: StoredResult | None, spec: RunSpec, attempt: AttemptInfo, result: AttemptResult, *, idle: int = 0
) -> RequeueDecision:
    """`before` is None for the first attempt, or where its end is unknown."""
    if result.outcome is Outcome.SUCCEEDED:
        return _end("the run succeeded", ExitCode.OK)
    code, why = _exit_code(result), result.reason
    if result.outcome is Outcome.CANCELLED:
        return _end(f"the run was cancelled ({why})", code)
    if result.outcome is Outcome.SUPERSEDED:
        return _end(f"the run goes on in a later attempt ({why})", code)
    if result.cancelled:
        return _end(f"the job was cancelled meanwhile ({why})", code)
    if result.requeued:
        reason = f"Slurm itself has put the job back into the queue: {why}"
        return RequeueDecision(action=RequeueAction.REQUEUE, reason=reason, exit_code=ExitCode.REQUEUED)
    if result.signal_number is not None and result.outcome not in _MADE_ROOM:
        return _end(f"a signal ended the job meanwhile ({why})", code)
    if not result.retryable:
        return _end(f"another attempt would end the same way: {why}", code)
    is_same = before is not None and may_be_a_bug(result.fingerprint) and before.fingerprint == result.fingerprint
    is_progress, limit = _made_progress(before, spec, result)
    if is_same and spec.max_same_failures and not is_progress:
        rule = "" if limit is None else f" (it ended within {limit:g} s: --restart-window)"
        reason = f"the attempt before ended by the same failure, with no progress since{rule}: {A_BUG}"
        return _end(reason, code)
    if attempt.number >= spec.max_requeues:
        return _end(f"{attempt.number} of {spec.max_requeues} requeues used", code)
    if not attempt.requeue_armed:
        return _end(f"requeue is not enabled: {attempt.requeue_reason}", code)
    left = spec.max_requeues - attempt.number - 1
    delay = 0.0 if attempt.cluster == "local" else back_off(idle)
    later = f", in {delay:.0f} s since {idle} attempts in a row made no progress" if delay else ""
    return RequeueDecision(
        action=RequeueAction.REQUEUE,
        reason=f"requeue {attempt.number + 1} of {spec.max_requeues} ({left} left{later}): {why}",
        exit_code=ExitCode.REQUEUED,
        delay=delay,
    )


def _end(reason: str, code: int) -> RequeueDecision:
    return RequeueDecision(action=RequeueAction.END, reason=reason, exit_code=int(code))


def _exit_code(result: AttemptResult) -> int:
    if result.signal_number is not None:
        return 128 + result.signal_number
    if result.outcome in (Outcome.CANCELLED, *_MADE_ROOM):
        return ExitCode.TERMINATED
    if result.fingerprint.startswith(HANG_FINGERPRINT):
        return ExitCode.HANG
    return ExitCode.WORKERS_FAILED if result.retryable else ExitCode.NOT_RETRYABLE


CONTROLLER_PATIENCE = 1800.0
"""Time to wait for a controller that does not answer; meanwhile no other job could get the nodes."""
CONTROLLER_RETRY = 5.0
UPDATE_PATIENCE = 30.0
"""The same for calls after the requeue, when this process has KillWait left to live."""
UPDATE_RETRY = 0.5
GONE_SECONDS = 4.0
"""Time for a requeued job to be gone after its processes. Slurm then resets a begin time that has passed to its
own delay (seen on 22.05).
"""
GONE_WITH_EPILOG = 28.0
"""The same where the site runs an epilog on each node."""


class NextAttempt(Struct, frozen=True, kw_only=True):
    way: RequeueWay = RequeueWay.REQUEUE
    delay: float = 0.0
    excluded: tuple[str, ...] | None = None
    """The job's whole list; empty: none; None: unchanged."""
    is_late: bool = False
    """Slurm ends this process in KillWait: no retries."""
    script: Path | None = None
    nodes: tuple[int, int] | None = None
    """Nodes to train on, and the same with the spares, where both are fixed and differ: a drained spare is not waited
    for. None: unchanged.
    """
    falls_back: bool = True
    placement: tuple[str, ...] = ()


class EligibleNodes(Struct, frozen=True, kw_only=True):
    known: frozenset[str]
    usable: frozenset[str]
    """Neither down nor drained; busy ones count."""
    required: frozenset[str] = frozenset()
    excluded: tuple[str, ...] = ()


def eligible_nodes(client: SlurmClient, job: JobId) -> EligibleNodes | None:
    try:
        state = client.job_state(job)
        if state is None:
            return None
        partitions = client.partitions(state.partition)
    except SlurmError as error:
        logger.warning("the partition's nodes can't be asked for: %s", error)
        return None
    return EligibleNodes(
        known=frozenset().union(*(part.names for part in partitions)),
        usable=frozenset().union(*(part.usable_names for part in partitions)),
        required=frozenset(state.required),
        excluded=state.excluded,
    )


class Requeued(Struct, frozen=True, kw_only=True):
    summary: str
    next_job: str = ""
    """The follow-on job's id; empty: the same job runs again."""


class JobRequeuer(Struct, eq=False):
    client: SlurmClient
    clock: Clock
    job: JobId
    restart_count: int
    """This execution's; a higher one means that the job has been requeued."""
    array_task: str | None = None
    has_epilog: bool | None = None
    """None: not asked yet."""

    def carry_out(self, plan: NextAttempt) -> Requeued:
        # Slurm's SIGTERM comes milliseconds after it took the requeue, and reaches the command that asked for it too:
        # what is ignored here is ignored there. (Seen on 22.05: scontrol died of it, and the requeue held.)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        gone = self._gone_seconds()
        if plan.way is RequeueWay.CHAIN:
            return self._chain(plan)
        try:
            self._patiently(self._requeue)
        except (RequeueDisabledError, SlurmPermissionError) as error:
            if plan.script is None or not plan.falls_back:
                raise
            logger.warning("%s; submitting a follow-on job instead", error)
            return self._chain(plan)
        return Requeued(summary=f"job {self.job} is requeued{self._prepare(plan, gone)}")

    def _requeue(self) -> None:
        if self._is_requeued():
            logger.info("job %s is requeued already", self.job)
            return
        try:
            self.client.requeue(self.job)
        except SlurmUnavailableError:
            raise
        except SlurmError:
            if not self._is_requeued():
                raise

    def _state(self) -> JobState | None:
        try:
            return self.client.job_state(self.job)
        except SlurmUnavailableError:
            raise
        except SlurmError:
            return None

    def _is_requeued(self) -> bool:
        # Slurm counts the restart when it requeues; a job that pends has been requeued in any case, since this one ran.
        state = self._state()
        return state is not None and (state.restarts > self.restart_count or state.phase is JobPhase.PENDING)

    def _gone_seconds(self) -> float:
        if self.has_epilog is None:
            try:
                self.has_epilog = self.client.config().has_epilog
            except SlurmError:
                return GONE_SECONDS
        return GONE_WITH_EPILOG if self.has_epilog else GONE_SECONDS

    def _prepare(self, plan: NextAttempt, gone: float) -> str:
        """Exclude nodes first, then let it begin: in the other order it could begin on them."""
        summary = ""
        patience = 0.0 if plan.is_late else UPDATE_PATIENCE
        if plan.excluded is not None:
            summary += self._exclude(plan.excluded, patience)
        summary += self._resize(plan, patience)
        problem = self._update(lambda: self.client.start_now(self.job, delay=max(plan.delay, gone)), patience)
        if problem is None:
            when = f"in {plan.delay:.0f} s" if plan.delay else "when this attempt is gone"
            summary += f" and may begin {when}"
        else:
            summary += f"; it begins after Slurm's own delay of about two minutes, which can't be waived: {problem}"
        return summary

    def _exclude(self, nodes: tuple[str, ...], patience: float) -> str:
        problem = self._update(lambda: self.client.exclude_nodes(self.job, nodes), patience)
        if problem is None:
            return f" without {compress(nodes)}" if nodes else ""
        if not nodes:
            return f"; its excluded nodes stay: {problem}"
        logger.warning("job %s may get nodes that were to be left out: %s", self.job, problem)
        return f" (not without {compress(nodes)}: {problem})"

    def _resize(self, plan: NextAttempt, patience: float) -> str:
        asked = self._nodes_to_ask(plan)
        if asked is None:
            return ""
        (least, most), why = asked
        problem = self._update(lambda: self.client.set_num_nodes(self.job, least, most), patience)
        if problem is not None:
            return f" (not with fewer spares, which are not up: {problem})" if why else ""
        return f" {why}" if why else ""

    def _nodes_to_ask(self, plan: NextAttempt) -> tuple[tuple[int, int], str] | None:
        """Returns the range, and why it is not all; empty: it is. Busy nodes are up."""
        if plan.nodes is None or plan.is_late:
            return None
        eligible = eligible_nodes(self.client, self.job)
        if eligible is None:
            return None
        excluded = set(eligible.excluded if plan.excluded is None else plan.excluded)
        names, up = eligible.known - excluded, eligible.usable - excluded
        if not names:
            return None
        train, with_spares = plan.nodes
        if len(up) >= with_spares:
            return (with_spares, with_spares), ""
        gone = sorted(names - up)
        why = f"with {train} to {with_spares} nodes"
        return (
            plan.nodes,
            f"{why} ({compress(gone)} {'is' if len(gone) == 1 else 'are'} drained or down)" if gone else why,
        )

    def _update(self, action: Callable[[], None], patience: float) -> str | None:
        def again(error: BaseException) -> bool:
            if patience <= 0 or not isinstance(error, SlurmUnavailableError | JobNotPendingError):
                return False
            try:
                state = self.client.job_state(self.job)
            except SlurmError:
                return True
            # Not pending: the requeue is on its way, or it runs again already, and then it stays so.
            return state is not None and (state.phase is not JobPhase.RUNNING or state.restarts <= self.restart_count)

        try:
            repeat(action, again=again, within=patience, clock=self.clock, longer=lambda last: UPDATE_RETRY)
        except SlurmError as error:
            return str(error)
        return None

    def _chain(self, plan: NextAttempt) -> Requeued:
        script = plan.script
        if script is None:
            raise SlurmError(
                what="submitting a follow-on job", why="the batch script is not one that hpc-elastic submit made"
            )
        found: list[str] = []
        excluded = plan.excluded or ()

        def submit() -> None:
            nonlocal excluded
            waiting = self.client.dependents(self.job, uid=os.getuid())
            if waiting:
                logger.info("job %s waits for the end of job %s already", waiting[0], self.job)
                found.append(waiting[0])
                return
            if plan.excluded is None:  # the follow-on job would not have by itself what this one was given later
                state = self._state()
                excluded = () if state is None else state.excluded
            asked = self._nodes_to_ask(plan)
            now = replace(plan, excluded=excluded, nodes=asked[0] if asked is not None else None)
            extra = follow_on_arguments(self.job, now, array_task=self.array_task)
            found.append(str(self.client.submit(str(script), extra=extra)))

        self._patiently(submit)
        without = f", without {compress(excluded)}" if excluded else ""
        later = f", in {plan.delay:.0f} s" if plan.delay else ""
        if self.array_task is not None and "_" not in found[0]:
            found[0] += f"_{self.array_task}"
        summary = f"job {found[0]} goes on when job {self.job} has ended{later}{without}"
        return Requeued(summary=summary, next_job=found[0])

    def _patiently(self, action: Callable[[], None]) -> None:
        is_logged = False

        def again(error: BaseException) -> bool:
            # The controller restarts, or is overrun: the job would be lost for what passes in minutes.
            nonlocal is_logged
            if not isinstance(error, SlurmUnavailableError):
                return False
            if not is_logged:
                logger.warning("%s; trying again for up to %.0f s", error, CONTROLLER_PATIENCE)
            is_logged = True
            return True

        repeat(action, again=again, within=CONTROLLER_PATIENCE, clock=self.clock, longer=lambda last: CONTROLLER_RETRY)


def follow_on_arguments(job: JobId, plan: NextAttempt, *, array_task: str | None = None) -> Sequence[str]:
    """sbatch's arguments before the script, which win over the script's own lines."""
    arguments = [f"--dependency=afterany:{job}", f"--begin=now+{plan.delay:.0f}" if plan.delay else "--begin=now"]
    arguments += plan.placement
    if array_task is not None:
        arguments.append(f"--array={array_task}")
    if plan.excluded:
        arguments.append(f"--exclude={compress(plan.excluded)}")
    if plan.nodes is not None:
        arguments.append(f"--nodes={plan.nodes[0]}-{plan.nodes[1]}")
    return arguments
