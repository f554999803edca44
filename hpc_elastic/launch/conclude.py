"""What is to be done when an attempt has ended: verdict, report, bad nodes, and the requeue where it is decided."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec.structs import replace

from hpc_elastic.base.clock import Clock
from hpc_elastic.base.file_executor import FileThread
from hpc_elastic.base.outcome import ExitCode, Outcome
from hpc_elastic.errors import HpcElasticError
from hpc_elastic.launch.attempt_result import AttemptResult
from hpc_elastic.launch.bad_nodes import NextNodes, judge_nodes
from hpc_elastic.launch.next_step import decide_next, idle_attempts
from hpc_elastic.launch.output import LastFiles, log_plain
from hpc_elastic.launch.requeue import RequeueAction, RequeueDecision, RequeueWay
from hpc_elastic.launch.requeue_job import NextAttempt
from hpc_elastic.launch.signals import JobCondition
from hpc_elastic.launch.site import Site
from hpc_elastic.options.job_options import RequeueChoice
from hpc_elastic.run.attempt import AttemptInfo
from hpc_elastic.run.events import EventLog
from hpc_elastic.run.paths import RunPaths
from hpc_elastic.run.result import StoredResult, load_result
from hpc_elastic.run.spec import RunSpec

if TYPE_CHECKING:
    from hpc_elastic.report.history import RunHistory
    from hpc_elastic.report.verdict import Verdict

logger = logging.getLogger(__name__)


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
    """
    disk = LastFiles(files or FileThread(), is_hurried=is_hurried, is_late=result.signal_number is not None)
    end = _End(paths, spec, site, attempt, result, events, clock=clock, disk=disk)
    return end.in_haste() if result.signal_number is not None else end.in_order()


class _End:
    """The end of one attempt: the steps, in the two orders in which they are taken.

    From Slurm's signal on, and once the job is requeued, SIGKILL is KillWait away. So all is written before that, the
    verdict first of all; where the signal has come already, the job comes first.
    """

    def __init__(
        self,
        paths: RunPaths,
        spec: RunSpec,
        site: Site,
        attempt: AttemptInfo,
        result: AttemptResult,
        events: EventLog,
        *,
        clock: Clock,
        disk: LastFiles,
    ) -> None:
        self._paths = paths
        self._folder = paths.attempt(attempt.number)
        self._spec = spec
        self._site = site
        self._attempt = attempt
        self._result = result
        self._events = events
        self._clock = clock
        self._disk = disk
        self._next_job = ""
        self._is_removed = False
        """Whether the attempt's folder is gone: another attempt would find no run either."""
        before = None
        events.write("verdict", outcome=result.outcome.value, reason=result.reason)
        if attempt.number:
            before = disk.do(lambda: load_result(paths.attempt(attempt.number - 1).result_json), None)
        self._idle = idle_attempts(before, spec, result)
        self._decision = decide_next(before, spec, attempt, result, idle=self._idle)
        self._write_decision()

    def in_order(self) -> RequeueDecision:
        """Write, then requeue; and write again what the requeue changed. Returns the decision that holds then."""
        nodes, history = self._judge()
        if self._is_removed and self._is_asked_of_slurm():
            self._give_up("the run directory was removed", ExitCode.NOT_RETRYABLE)
        self._finish(history)
        if not self._is_asked_of_slurm():
            return self._decision
        if self._site.ask(near=0.0).condition is JobCondition.ENDED:
            # Slurm requeues a cancelled job too, while it completes (seen on 22.05). And where it was cancelled in the
            # moment in which it began, its SIGTERM reached nobody who could hear: all that is seen is srun's failure.
            self._give_up("the job was cancelled meanwhile", ExitCode.TERMINATED)
            self._finish(history)
        elif not self._requeue(nodes):
            self._finish(history)
        elif self._next_job:
            self._save()
        return self._decision

    def in_haste(self) -> RequeueDecision:
        """Requeue, then write. Returns the decision that holds then."""
        if self._is_asked_of_slurm():
            self._requeue(NextNodes(), is_late=True)
        self._finish(self._judge(asks_slurm=False)[1])
        return self._decision

    def _is_asked_of_slurm(self) -> bool:
        return self._decision.action is RequeueAction.REQUEUE and not self._result.requeued

    def _write_decision(self) -> None:
        decision, outcome = self._decision, self._result.outcome.value
        self._events.write("requeue_decision", action=decision.action.value, reason=decision.reason)
        self._events.write("attempt_ended", outcome=outcome, exit_code=decision.exit_code)

    def _judge(self, *, asks_slurm: bool = True) -> tuple[NextNodes, RunHistory | None]:
        """Look at the nodes. Returns whom the next attempt does without, and the history with that in it."""
        if not self._save() or self._is_removed:
            return NextNodes(), None
        history = self._disk.do(lambda: _history(self._paths), None, answers=True)
        if history is None:
            return NextNodes(), None
        asks_slurm = asks_slurm and self._decision.action is RequeueAction.REQUEUE
        nodes = judge_nodes(
            self._paths,
            self._spec,
            self._site,
            self._attempt,
            history,
            self._events,
            clock=self._clock,
            disk=self._disk,
            asks_slurm=asks_slurm,
        )
        history = replace(history, bad_nodes=nodes.bad)
        return nodes, replace(history, excluded=nodes.exclusion.nodes) if asks_slurm else history

    def _requeue(self, nodes: NextNodes, *, is_late: bool = False) -> bool:
        """Have it done. Returns whether it was: a decision that can't be carried out is one to end."""
        spec = self._spec
        fixed = spec.min_nodes == spec.max_nodes
        plan = NextAttempt(
            way=RequeueWay.CHAIN if self._attempt.requeue_way == RequeueWay.CHAIN.value else RequeueWay.REQUEUE,
            delay=self._decision.delay,
            excluded=nodes.excluded,
            nodes=(spec.max_nodes, spec.max_nodes + spec.spares) if fixed and spec.spares else None,
            is_late=is_late,
            falls_back=spec.requeue_with == RequeueChoice.AUTO.value,
        )
        try:
            done = self._site.requeue(plan)
        except HpcElasticError as error:
            logger.error("the requeue failed: %s", error)
            again = f"to start it again: hpc-elastic requeue {self._paths.run_id}"
            self._give_up(f"the requeue failed: {error}; {again}", ExitCode.WORKERS_FAILED)
            return False
        logger.info("%s", done.words)
        self._events.write("requeued", job_id=done.next_job or self._attempt.job_id, reason=done.words)
        self._next_job = done.next_job
        return True

    def _give_up(self, why: str, exit_code: ExitCode) -> None:
        reason = f"{self._decision.reason}; but {why}"
        self._decision = RequeueDecision(action=RequeueAction.END, reason=reason, exit_code=int(exit_code))
        self._write_decision()

    def _finish(self, history: RunHistory | None) -> None:
        """Write result and report, and say them."""

        def report() -> bool:
            _report(self._attempt, self._paths, self._result, self._decision, history, now_ns=self._clock.time_ns())
            return True

        if not (self._save() and (self._is_removed or self._disk.do(report, False, answers=True))):
            logger.error("%s does not answer: the report can't be written", self._folder.root)
        _log_end(self._attempt, self._result, self._decision)

    def _save(self) -> bool:
        """Write result.json. Returns whether the filesystem answered."""
        stored = StoredResult(
            outcome=self._result.outcome.value,
            reason=self._result.reason,
            exit_code=self._decision.exit_code,
            action=self._decision.action.value,
            decision=self._decision.reason,
            fingerprint=self._result.fingerprint,
            step=self._result.step,
            idle=self._idle,
            next_job=self._next_job,
        )

        def save() -> bool:
            stored.save(self._folder.result_json)
            return True

        try:
            return self._disk.do(save, False)
        except FileNotFoundError:
            if not self._is_removed:
                logger.error("%s was removed: neither the result nor a report can be written", self._folder.root)
            self._is_removed = True
        except OSError as error:
            logger.error("the result could not be written: %s", error)
        return True


def _history(paths: RunPaths) -> RunHistory | None:
    """Everything that happened; None where it can't be read: the attempt ends all the same."""
    from hpc_elastic.report.collect import collect_run

    try:
        return collect_run(paths.root)
    except Exception as error:
        # A run directory that somebody removed is no defect of ours; anything else shows its traceback.
        logger.error("the run's history can't be read: %s", error, exc_info=not isinstance(error, OSError))
        return None


def _report(
    attempt: AttemptInfo,
    paths: RunPaths,
    result: AttemptResult,
    decision: RequeueDecision,
    history: RunHistory | None,
    *,
    now_ns: int,
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
        log_plain(report.text)
        if decision.exit_code and os.environ.get("TORCHELASTIC_ERROR_FILE"):
            _pass_on(report.verdict, result, exit_code=decision.exit_code, now_ns=now_ns)
    except Exception as error:
        logger.exception("the report could not be made: %s", error)


def _pass_on(verdict: Verdict, result: AttemptResult, *, exit_code: int, now_ns: int) -> None:
    """Hand the first failure to whoever started us with TORCHELASTIC_ERROR_FILE set: an outer scheduler sees it too."""
    from hpc_elastic.failures.error_file import read_error_file, write_summary
    from hpc_elastic.failures.error_handler import ErrorHandler

    failure = verdict.failure
    if failure is not None and failure.error_file and read_error_file(failure.error_file).found:
        ErrorHandler().dump_error_file(failure.error_file, failure.exitcode)
        return
    if result.outcome not in (Outcome.FAILED, Outcome.TOO_FEW_NODES):
        return  # it was told to end, and no worker had failed
    known = verdict.lost_node is not None or failure is not None or bool(verdict.what)
    own: dict[str, object] = {"verdict": verdict.evidence, "reason": result.reason}
    if verdict.category is not None:
        own["category"] = verdict.category.value
    if verdict.lost_node is not None:
        own["host"] = verdict.lost_node.host
    write_summary(
        os.environ["TORCHELASTIC_ERROR_FILE"],
        verdict.summary if known else result.reason,
        now_ns=now_ns,
        error_code=exit_code,
        own=own,
    )


def _log_end(attempt: AttemptInfo, result: AttemptResult, decision: RequeueDecision) -> None:
    word = "succeeded" if result.outcome is Outcome.SUCCEEDED else f"ended: {result.outcome.value} ({result.reason})"
    logger.info("attempt %d %s", attempt.number, word)
    logger.info("%s: %s; exit code %d", decision.action.value, decision.reason, decision.exit_code)
