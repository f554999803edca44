"""What is to be done when an attempt has ended: verdict, report, bad nodes, and the requeue where it is decided."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from hpc_elastic.agent.hang import HANG_FINGERPRINT, may_be_a_bug
from hpc_elastic.agent.restart_policy import made_progress
from hpc_elastic.attempt import AttemptInfo
from hpc_elastic.clock import Clock
from hpc_elastic.errors import HpcElasticError
from hpc_elastic.events import EventLog
from hpc_elastic.file_thread import FilesystemHangsError, FileThread
from hpc_elastic.launch.attempt_result import AttemptResult
from hpc_elastic.launch.bad_nodes import NextNodes, checked, keep_evidence, next_nodes
from hpc_elastic.launch.output import say
from hpc_elastic.launch.requeue_job import NextAttempt
from hpc_elastic.launch.result import StoredResult, load_result
from hpc_elastic.launch.signal_table import SlurmWord
from hpc_elastic.launch.site import Site
from hpc_elastic.node_records import NodeRecord, load_record, save_record
from hpc_elastic.outcome import ExitCode, Outcome
from hpc_elastic.requeue import (
    RequeueAction,
    RequeueChoice,
    RequeueDecision,
    RequeueFacts,
    RequeueWay,
    decide_requeue,
)
from hpc_elastic.run_paths import AttemptPaths, RunPaths
from hpc_elastic.run_spec import RunSpec

if TYPE_CHECKING:
    from hpc_elastic.failures.worker_failure import WorkerFailure
    from hpc_elastic.report.history import RunHistory

logger = logging.getLogger(__name__)

REPORT_SECONDS = 120.0
"""For the report of an attempt: of a large run, on a slow filesystem."""
HUNG_SECONDS = 5.0
"""Without any answer: it is said so, and not waited for any more where somebody waits for us."""

T = TypeVar("T")


def conclude(
    paths: RunPaths,
    spec: RunSpec,
    site: Site,
    attempt: AttemptInfo,
    result: AttemptResult,
    events: EventLog,
    *,
    clock: Clock,
    files: FileThread | None = None,
    is_hurried: Callable[[], bool] = lambda: False,
    is_told_to_end: Callable[[], bool] = lambda: False,
) -> RequeueDecision:
    """What is to be done when an attempt has ended: verdict, report, and the requeue where it is decided.

    Args:
        paths: The run's.
        spec: What was asked for.
        site: For the requeue.
        attempt: The attempt.
        result: How it ended.
        events: Its log.
        clock: For the age of what speaks against nodes.
        files: Touches the files; in bounded time, since the user waits for the end.
        is_hurried: Whether the user has asked (again) for the end: a mount that hangs is not waited for then.
        is_told_to_end: Whether a signal has come since the attempt has ended: the job may have been cancelled.
    """
    hand = files or FileThread()
    attempt_paths = paths.attempt(attempt.number)

    def on_disk(action: Callable[[], T], otherwise: T, *, answers: bool = False) -> T:
        """`answers`: the filesystem has just answered, so what takes long is work."""
        # Who was told to end by a signal has little time, and does not spend it on a mount that may never answer.
        short = hand.stuck_for() > HUNG_SECONDS or (result.signal_number is not None and not answers)
        try:
            within = HUNG_SECONDS if short else REPORT_SECONDS
            return hand.do(action, within=within, unless=lambda: hand.stuck_for() > HUNG_SECONDS and is_hurried())
        except FilesystemHangsError:
            return otherwise

    def save(decision: RequeueDecision, next_job: str = "") -> bool:
        def act() -> bool:
            _save_result(attempt_paths, result, decision, idle=idle, next_job=next_job)
            return True

        return on_disk(act, False)

    def judge(decision: RequeueDecision, *, asks_slurm: bool = True) -> tuple[NextNodes, RunHistory | None]:
        """Look at the nodes. Returns whom the next attempt does without, and the history with that in it."""
        if not save(decision):
            return NextNodes(), None
        history = on_disk(lambda: _history(paths), None, answers=True)
        if history is None:
            return NextNodes(), None
        asks_slurm = asks_slurm and decision.action is RequeueAction.REQUEUE
        nodes = _judge_nodes(
            paths, spec, site, attempt, history, events, clock=clock, on_disk=on_disk, asks_slurm=asks_slurm
        )
        history = replace(history, bad_nodes=nodes.bad)
        return nodes, replace(history, excluded=nodes.exclusion.nodes) if asks_slurm else history

    def finish(decision: RequeueDecision, history: RunHistory | None, next_job: str = "") -> None:
        def report() -> bool:
            _report(attempt, paths, result, decision, history)
            return True

        if not (save(decision, next_job) and on_disk(report, False, answers=True)):
            logger.error("%s does not answer: the report can't be written", attempt_paths.root)
        _say_end(attempt, result, decision)

    events.write("verdict", outcome=result.outcome.value, reason=result.reason)
    before = None
    if attempt.number:
        before = on_disk(lambda: load_result(paths.attempt(attempt.number - 1).result_json), None)
    idle = _idle(before, spec, result)
    decision = _decide(before, spec, attempt, result, idle=idle)
    events.write("requeue_decision", action=decision.action.value, reason=decision.reason)
    events.write("attempt_ended", outcome=result.outcome.value, exit_code=decision.exit_code)
    # From Slurm's signal on, and once the job is requeued, SIGKILL is KillWait away. So all is written before that, the
    # verdict first of all; where the signal has come already, the job comes first.
    is_late = result.signal_number is not None
    nodes, history = NextNodes(), None
    if not is_late:
        nodes, history = judge(decision)
        finish(decision, history)
    next_job = ""
    if decision.action is RequeueAction.REQUEUE and not result.requeued:
        cancelled = is_told_to_end() and site.ask(near=0.0).word is SlurmWord.ENDED
        if cancelled:
            requeued = _not_requeued(decision)
        else:
            requeued, next_job = _requeue(site, attempt, decision, nodes, events, spec, is_late=is_late)
        if requeued != decision:
            decision = requeued
            events.write("requeue_decision", action=decision.action.value, reason=decision.reason)
            events.write("attempt_ended", outcome=result.outcome.value, exit_code=decision.exit_code)
            if not is_late:
                finish(decision, history)
        elif next_job:
            save(decision, next_job)
    if is_late:
        finish(decision, judge(decision, asks_slurm=False)[1], next_job)
    return decision


def _history(paths: RunPaths) -> RunHistory | None:
    """Everything that happened; None where it can't be read: the attempt ends all the same."""
    from hpc_elastic.report.collect import collect_run

    try:
        return collect_run(paths.root)
    except Exception as error:
        logger.exception("the run's history can't be read: %s", error)
        return None


def _judge_nodes(
    paths: RunPaths,
    spec: RunSpec,
    site: Site,
    attempt: AttemptInfo,
    history: RunHistory,
    events: EventLog,
    *,
    clock: Clock,
    on_disk: Callable[[Callable[[], NodeRecord | None], None], NodeRecord | None],
    asks_slurm: bool,
) -> NextNodes:
    """Keep what the attempt tells against nodes, and decide whom the next one does without. Never raises.

    `asks_slurm`: whether there is a next one, whose list of excluded nodes is to be made.
    """
    if attempt.cluster == "local":
        return NextNodes()  # they are all this machine
    from hpc_elastic.report.node_evidence import node_evidence

    try:
        seen = node_evidence(history, attempt=attempt.number)
        now_ns = clock.time_ns()
        record = on_disk(
            lambda: keep_evidence(
                paths, spec, seen, attempt=attempt.number, cluster=site.cluster_name, now_ns=now_ns, env=os.environ
            ),
            None,
        )
        if record is None:
            return NextNodes()
        eligible = None
        if asks_slurm and (record.excluded or next_nodes(record, spec, None, now_ns=now_ns).bad):
            eligible = site.eligible_nodes()
        nodes = checked(next_nodes(record, spec, eligible, now_ns=now_ns), site, paths, eligible)
        if eligible is not None and nodes.exclusion.nodes != record.excluded:
            # Before Slurm has the list: a node on it that is not known as ours would count as the user's for ever.
            kept = replace(load_record(paths.nodes_json), excluded=nodes.exclusion.nodes, saved_ns=now_ns)
            on_disk(lambda: save_record(paths.nodes_json, kept), None)
        if nodes.bad and eligible is not None:
            why = {one.node: one.why for one in nodes.bad}
            events.write(
                "nodes_judged",
                excluded=list(nodes.exclusion.nodes),
                reason="; ".join(f"{name}: {why[name]}" for name in nodes.exclusion.nodes) or "none can be left out",
                spared=[{"node": name, "reason": reason} for name, reason in nodes.exclusion.spared],
            )
        return nodes
    except Exception as error:
        logger.exception("bad nodes can't be told from good ones: %s", error)
        return NextNodes()


def _made_progress(before: StoredResult | None, spec: RunSpec, result: AttemptResult) -> bool:
    return made_progress(
        step=result.step,
        before=before.step if before is not None else -1,
        seconds=result.seconds,
        window=spec.restart_window,
    )


def _idle(before: StoredResult | None, spec: RunSpec, result: AttemptResult) -> int:
    """How many attempts in a row, this one included, ended by a failure without progress."""
    is_first_step = result.step >= 0 and (before is None or before.step < 0)
    made_room = result.outcome in (Outcome.PREEMPTED, Outcome.TIMED_OUT)
    if made_room or is_first_step or _made_progress(before, spec, result):
        return 0
    return 1 + (before.idle if before is not None else 0)


def _decide(
    before: StoredResult | None, spec: RunSpec, attempt: AttemptInfo, result: AttemptResult, *, idle: int = 0
) -> RequeueDecision:
    same = before is not None and may_be_a_bug(result.fingerprint) and before.fingerprint == result.fingerprint
    progress = _made_progress(before, spec, result)
    return decide_requeue(
        RequeueFacts(
            outcome=result.outcome,
            reason=result.reason,
            retryable=result.retryable,
            attempt=attempt.number,
            max_requeues=spec.max_requeues,
            armed=attempt.requeue_armed,
            armed_reason=attempt.requeue_reason,
            same_as_before=same and not progress,
            signal_number=result.signal_number,
            requeued=result.requeued,
            cancelled=result.cancelled,
            hang=result.fingerprint.startswith(HANG_FINGERPRINT),
            idle=0 if attempt.cluster == "local" else idle,
        )
    )


def _requeue(
    site: Site,
    attempt: AttemptInfo,
    decision: RequeueDecision,
    nodes: NextNodes,
    events: EventLog,
    spec: RunSpec,
    *,
    is_late: bool,
) -> tuple[RequeueDecision, str]:
    """Have it done. Returns the decision that holds then, and the follow-on job's id, if there is one."""
    plan = NextAttempt(
        way=RequeueWay.CHAIN if attempt.requeue_way == RequeueWay.CHAIN.value else RequeueWay.REQUEUE,
        delay=decision.delay,
        excluded=nodes.excluded,
        is_late=is_late,
        falls_back=spec.requeue_with == RequeueChoice.AUTO.value,
    )
    try:
        done = site.requeue(plan)
    except HpcElasticError as error:
        logger.error("the requeue failed: %s", error)
        reason = f"{decision.reason}; but the requeue failed: {error}"
        ended = RequeueDecision(action=RequeueAction.END, reason=reason, exit_code=int(ExitCode.WORKERS_FAILED))
        return ended, ""
    logger.info("%s", done.words)
    events.write("requeued", job_id=done.next_job or attempt.job_id, reason=done.words)
    return decision, done.next_job


def _not_requeued(decision: RequeueDecision) -> RequeueDecision:
    reason = f"{decision.reason}; but the job was cancelled meanwhile"
    return RequeueDecision(action=RequeueAction.END, reason=reason, exit_code=int(ExitCode.TERMINATED))


def _save_result(
    attempt_paths: AttemptPaths, result: AttemptResult, decision: RequeueDecision, *, idle: int, next_job: str
) -> None:
    stored = StoredResult(
        outcome=result.outcome.value,
        reason=result.reason,
        exit_code=decision.exit_code,
        action=decision.action.value,
        decision=decision.reason,
        fingerprint=result.fingerprint,
        step=result.step,
        idle=idle,
        next_job=next_job,
    )
    try:
        stored.save(attempt_paths.result_json)
    except OSError as error:
        logger.error("the result could not be written: %s", error)


def _report(
    attempt: AttemptInfo,
    paths: RunPaths,
    result: AttemptResult,
    decision: RequeueDecision,
    history: RunHistory | None,
) -> None:
    """Write the report. A failure of it never hides the result."""
    try:
        from hpc_elastic.report.write import write_report

        report = write_report(
            paths.root,
            attempt=attempt.number,
            outcome=result.outcome.value,
            exit_code=decision.exit_code,
            decision=f"{decision.action.value}: {decision.reason}",
            history=history,
        )
        say(report.text)
        if decision.exit_code and os.environ.get("TORCHELASTIC_ERROR_FILE"):
            _pass_on(report.verdict.failure)
    except Exception as error:
        logger.exception("the report could not be made: %s", error)


def _pass_on(failure: WorkerFailure | None) -> None:
    """Hand the first failure to whoever started us with TORCHELASTIC_ERROR_FILE set: an outer scheduler sees it too."""
    from hpc_elastic.failures.error_handler import ErrorHandler

    if failure is not None and failure.error_file:
        ErrorHandler().dump_error_file(failure.error_file, failure.exitcode)
    else:
        logger.info("no worker left an error file that could be passed on")


def _say_end(attempt: AttemptInfo, result: AttemptResult, decision: RequeueDecision) -> None:
    word = "succeeded" if result.outcome is Outcome.SUCCEEDED else f"ended: {result.outcome.value} ({result.reason})"
    logger.info("attempt %d %s", attempt.number, word)
    logger.info("%s: %s; exit code %d", decision.action.value, decision.reason, decision.exit_code)
