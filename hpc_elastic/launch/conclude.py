"""The end of an attempt, in one place: decision, result.json, the nodes, the report, the requeue.

From Slurm's signal on, and once the job is requeued, SIGKILL is KillWait away. So there are two orders: `in_order` asks
Slurm for the next attempt last, and writes again what that changed; `in_haste`, where Slurm's signal has come already,
asks first. This process may be killed between any two steps, and another (`batch`) may do them again: each step leaves
files that are true, and `JobRequeuer` asks Slurm first what is done already.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, TypeVar

from msgspec import Struct, field
from msgspec.structs import replace

from hpc_elastic.base.loop import FULL, FileExecutor, FilesystemHangsError, is_refusal
from hpc_elastic.errors import HpcElasticError
from hpc_elastic.launch.requeue import (
    A_BUG,
    AttemptResult,
    EligibleNodes,
    NextAttempt,
    RequeueAction,
    RequeueDecision,
    RequeueWay,
    decide_requeue,
    idle_attempts,
)
from hpc_elastic.launch.site import AttemptContext, JobCondition, Site
from hpc_elastic.rendezvous.membership import RESERVE
from hpc_elastic.run.control_events import AttemptEnded, AttemptRequeued, RequeueDecided, VerdictReached
from hpc_elastic.run.events import Note
from hpc_elastic.run.node_score import (
    Evidence,
    EvidenceKind,
    Exclusion,
    NodeRecord,
    NodeScore,
    choose_excluded,
    load_record,
    save_record,
    score_nodes,
)
from hpc_elastic.run.option_values import RequeueChoice, Scope
from hpc_elastic.run.paths import ExitCode, Outcome, RunPaths, StoredResult, load_result, outcome_text
from hpc_elastic.run.progress import OnSlowRank
from hpc_elastic.run.spec import RunSpec

if TYPE_CHECKING:
    from hpc_elastic.report.history import RunHistory
    from hpc_elastic.report.verdict import Verdict
    from hpc_elastic.report.write import ReportResult

logger = logging.getLogger(__name__)

REPORT_SECONDS = 120.0
HUNG_SECONDS = 5.0
"""A filesystem without any answer for this long is logged, and no more waited for while the user waits."""
FULL_SECONDS = 10.0
"""Time for room on a full disk, which nobody makes while an allocation waits."""
JOB_LOG = "hpc_elastic_job_log"

T = TypeVar("T")


def log_plain(text: str) -> None:
    logging.getLogger(JOB_LOG).info("%s", text)


def conclude(
    context: AttemptContext,
    result: AttemptResult,
    *,
    files: FileExecutor | None = None,
    is_hurried: Callable[[], bool] = lambda: False,
) -> RequeueDecision:
    disk = LastFiles(files or FileExecutor(), is_hurried=is_hurried, is_late=result.signal_number is not None)
    end = _End(context, result, disk)
    return end.in_haste() if result.signal_number is not None else end.in_order()


class _End:
    def __init__(self, context: AttemptContext, result: AttemptResult, disk: LastFiles) -> None:
        self._context = context
        self._result = result
        self._disk = disk
        self._next_job = ""
        self._is_removed = False
        spec, attempt, before = context.spec, context.attempt, None
        context.events.write(VerdictReached(outcome=result.outcome.value, reason=result.reason))
        if attempt.number:
            before = disk.do(lambda: load_result(context.paths.attempt(attempt.number - 1).result_json), None)
        self._idle = idle_attempts(before, spec, result)
        self._decision = decide_requeue(before, spec, attempt, result, idle=self._idle)
        self._write_decision()

    def in_order(self) -> RequeueDecision:
        nodes, history = self._judge()
        if self._is_removed and self._asks_slurm():
            self._give_up("the run directory was removed", ExitCode.NOT_RETRYABLE)
        self._finish(history)
        if not self._asks_slurm():
            return self._decision
        if self._context.site.ask(near=0.0).condition is JobCondition.ENDED:
            # Slurm requeues a cancelled job too, while it completes (seen on 22.05). And where it was cancelled in the
            # moment in which it began, its SIGTERM reached no process that could hear: only srun's failure is seen.
            self._give_up("the job was cancelled meanwhile", ExitCode.TERMINATED)
            self._finish(history)
        elif not self._requeue(nodes):
            self._finish(history)
        elif self._next_job:
            self._save()
        return self._decision

    def in_haste(self) -> RequeueDecision:
        if self._asks_slurm():
            self._requeue(NextNodes(), is_late=True)
        self._finish(self._judge(is_late=True)[1])
        return self._decision

    def _asks_slurm(self) -> bool:
        return self._decision.action is RequeueAction.REQUEUE and not self._result.requeued

    def _write_decision(self) -> None:
        decision, outcome = self._decision, self._result.outcome.value
        self._context.events.write(RequeueDecided(action=decision.action.value, reason=decision.reason))
        self._context.events.write(AttemptEnded(outcome=outcome, exit_code=decision.exit_code))

    def _give_up(self, why: str, exit_code: ExitCode) -> None:
        reason = f"{self._decision.reason}; but {why}"
        self._decision = RequeueDecision(action=RequeueAction.END, reason=reason, exit_code=int(exit_code))
        self._write_decision()

    def _requeue(self, nodes: NextNodes, *, is_late: bool = False) -> bool:
        spec = self._context.spec
        fixed = spec.min_nodes == spec.max_nodes
        plan = NextAttempt(
            way=RequeueWay.CHAIN if self._context.attempt.requeue_way == RequeueWay.CHAIN.value else RequeueWay.REQUEUE,
            delay=self._decision.delay,
            excluded=nodes.excluded,
            nodes=(spec.max_nodes, spec.max_nodes + spec.spares) if fixed and spec.spares else None,
            is_late=is_late,
            falls_back=spec.requeue_with is RequeueChoice.AUTO,
        )
        try:
            done = self._context.site.requeue(plan)
        except HpcElasticError as error:
            logger.error("the requeue failed: %s", error)
            again = f"to start it again: hpc-elastic requeue {self._context.paths.run_id}"
            self._give_up(f"the requeue failed: {error}; {again}", ExitCode.WORKERS_FAILED)
            return False
        logger.info("%s", done.summary)
        self._next_job = done.next_job
        job_id = done.next_job or self._context.attempt.job_id
        self._context.events.write(AttemptRequeued(job_id=job_id, reason=done.summary))
        return True

    def _save(self) -> bool:
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
            notice=self._result.notice,
        )

        def save() -> bool:
            (self._context.folder.store / RESERVE).unlink(missing_ok=True)
            stored.save(self._context.folder.result_json)
            return True

        try:
            return self._disk.do(save, False)
        except FileNotFoundError:
            if not self._is_removed:
                logger.error(
                    "%s was removed: neither the result nor a report can be written", self._context.folder.root
                )
            self._is_removed = True
        except OSError as error:
            logger.error("the result could not be written: %s", error)
        return True

    def _judge(self, *, is_late: bool = False) -> tuple[NextNodes, RunHistory | None]:
        if not self._save() or self._is_removed:
            return NextNodes(), None
        history = self._disk.do(self._history, None, answers=True)
        if history is None:
            return NextNodes(), None
        asks_slurm = not is_late and self._decision.action is RequeueAction.REQUEUE
        nodes = NextNodes()
        if self._context.attempt.cluster != "local":  # there, all nodes are this machine
            try:
                nodes = self._judge_nodes(history, asks_slurm=asks_slurm)
            except Exception as error:
                logger.exception("the nodes can't be judged: %s", error)
        history = replace(history, bad_nodes=nodes.bad)
        return nodes, replace(history, excluded=nodes.exclusion.nodes) if asks_slurm else history

    def _history(self) -> RunHistory | None:
        from hpc_elastic.report.collect import collect_run

        try:
            return collect_run(self._context.paths.root)
        except Exception as error:
            # A run directory that was removed is no defect of ours; anything else shows its traceback.
            logger.error("the run's history can't be read: %s", error, exc_info=not isinstance(error, OSError))
            return None

    def _judge_nodes(self, history: RunHistory, *, asks_slurm: bool) -> NextNodes:
        from hpc_elastic.report.write import node_evidence

        paths, spec, site = self._context.paths, self._context.spec, self._context.site
        now_ns = self._context.clock.time_ns()
        seen = node_evidence(history, attempt=self._context.attempt.number)
        is_cancelled = self._result.outcome is Outcome.CANCELLED or self._result.cancelled
        if any(one.round < 0 for one in seen) and (
            is_cancelled or (asks_slurm and site.ask(near=0.0).condition is JobCondition.ENDED)
        ):
            seen = tuple(one for one in seen if one.round >= 0)  # the cancel kept agents from starting
        if spec.slow_ranks is not OnSlowRank.EXCLUDE:
            seen = tuple(one for one in seen if one.kind is not EvidenceKind.SLOW)
        record = self._disk.do(lambda: keep_evidence(paths, seen, now_ns=now_ns), None)
        if record is None:
            return NextNodes()
        bug = self._result.fingerprint
        if bug and (not self._result.retryable or A_BUG in self._decision.reason):
            counts = (one for one in record.evidence if one.fingerprint != bug)
            record = replace(record, evidence=tuple(counts))
        eligible = None
        if asks_slurm and (record.excluded or next_nodes(record, spec, None, now_ns=now_ns).bad):
            eligible = site.eligible_nodes()
        nodes = checked(next_nodes(record, spec, eligible, now_ns=now_ns), site, paths, eligible)
        if eligible is not None and nodes.exclusion.nodes != record.excluded:
            # Before Slurm has the list: a node on it that is not known as ours would count as the user's for ever.
            kept = replace(load_record(paths.nodes_json), excluded=nodes.exclusion.nodes, saved_ns=now_ns)
            self._disk.do(lambda: save_record(paths.nodes_json, kept), None)
        if nodes.bad and eligible is not None:
            why = {one.node: one.why for one in nodes.bad}
            excluded = nodes.exclusion.nodes
            text = f"the next attempt excludes {', '.join(excluded)}" if excluded else "bad nodes stay"
            text += "".join(f"; {name} stays: {reason}" for name, reason in nodes.exclusion.spared)
            reason = "; ".join(f"{name}: {why[name]}" for name in excluded) or "none can be left out"
            self._context.events.write(Note(subject="nodes_judged", text=text, reason=reason))
        return nodes

    def _finish(self, history: RunHistory | None) -> None:
        is_reported = False

        def report() -> bool:
            nonlocal is_reported
            is_reported = self._report(history)
            return True

        if not (self._save() and (self._is_removed or self._disk.do(report, False, answers=True))):
            logger.error("%s does not answer: the report can't be written", self._context.folder.root)
        result, decision = self._result, self._decision
        ended = outcome_text(result.outcome.value, result.reason)
        if result.outcome is not Outcome.SUCCEEDED:
            ended = f"ended: {ended}{'' if is_reported else f' ({result.reason})'}"
        logger.info("attempt %d %s", self._context.attempt.number, ended)
        logger.info("%s: %s; exit code %d", decision.action.value, decision.reason, decision.exit_code)

    def _report(self, history: RunHistory | None) -> bool:
        try:
            decision = self._decision
            report = write_attempt_report(self._context, self._result, decision, history)
            log_plain(report.text)
            path = os.environ.get("TORCHELASTIC_ERROR_FILE")
            if decision.exit_code and path:
                now_ns = self._context.clock.time_ns()
                _pass_on(report.verdict, self._result, path, exit_code=decision.exit_code, now_ns=now_ns)
            return True
        except Exception as error:
            logger.exception("the report could not be made: %s", error)
            return False


def write_attempt_report(
    context: AttemptContext, result: AttemptResult, decision: RequeueDecision, history: RunHistory | None = None
) -> ReportResult:
    from hpc_elastic.report.write import write_report

    return write_report(
        context.paths.root,
        attempt=context.attempt.number,
        outcome=result.outcome.value,
        exit_code=decision.exit_code,
        decision=f"{decision.action.value}: {decision.reason}",
        history=history,
    )


def _pass_on(verdict: Verdict, result: AttemptResult, path: str, *, exit_code: int, now_ns: int) -> None:
    """Pass the first failure on to an outer scheduler, which has set TORCHELASTIC_ERROR_FILE."""
    from hpc_elastic.failures.error_file import read_error_file, write_summary
    from hpc_elastic.failures.error_handler import ErrorHandler
    from hpc_elastic.report.verdict import Cause

    failure = verdict.failure
    if failure is not None and failure.error_file and read_error_file(failure.error_file).found:
        ErrorHandler().dump_error_file(failure.error_file, failure.exitcode)
        return
    if result.outcome not in (Outcome.FAILED, Outcome.TOO_FEW_NODES):
        return  # it was asked to end, and no worker had failed
    known = verdict.lost_node is not None or failure is not None or verdict.cause is Cause.FILESYSTEM
    own: dict[str, object] = {"verdict": verdict.evidence, "reason": result.reason}
    if verdict.category is not None:
        own["category"] = verdict.category.value
    if verdict.lost_node is not None:
        own["host"] = verdict.lost_node.host
    write_summary(path, verdict.summary if known else result.reason, now_ns=now_ns, error_code=exit_code, own=own)


class NextNodes(Struct, frozen=True, kw_only=True):
    bad: tuple[NodeScore, ...] = ()
    exclusion: Exclusion = field(default_factory=Exclusion)
    excluded: tuple[str, ...] | None = None
    """The job's whole list, the user's own included; None: unchanged."""


def nodes_needed(spec: RunSpec) -> int:
    """The nodes that Slurm must have for the job to start: a fixed number includes the spares."""
    return spec.min_nodes if spec.min_nodes < spec.max_nodes else spec.max_nodes + spec.spares


def keep_evidence(paths: RunPaths, seen: Collection[Evidence], *, now_ns: int) -> NodeRecord:
    record = load_record(paths.nodes_json)
    if record.problem:
        logger.warning("%s %s: its records of nodes are lost", paths.nodes_json, record.problem)
    evidence = tuple(dict.fromkeys((*record.evidence, *seen)))
    record = NodeRecord(evidence=evidence, excluded=record.excluded, saved_ns=now_ns)
    if seen:
        save_record(paths.nodes_json, record)
    return record


def next_nodes(record: NodeRecord, spec: RunSpec, eligible: EligibleNodes | None, *, now_ns: int) -> NextNodes:
    """Decide which nodes the next attempt does without. `eligible` is None where unknown: nothing is changed then."""
    settings = spec.bad_nodes
    if settings.scope is Scope.OFF:
        return NextNodes()
    bad = tuple(one for one in score_nodes(record.evidence, now_ns=now_ns, hours=settings.hours) if one.is_bad)
    if eligible is None or not eligible.known:
        return NextNodes(bad=bad)
    users = set(eligible.excluded) - set(record.excluded)
    exclusion = choose_excluded(
        bad,
        known=eligible.known,
        usable=eligible.usable - users,
        need=nodes_needed(spec),
        required=eligible.required,
        share=settings.share,
    )
    wanted = tuple(sorted(users | set(exclusion.nodes)))
    return NextNodes(bad=bad, exclusion=exclusion, excluded=None if set(wanted) == set(eligible.excluded) else wanted)


def checked(nodes: NextNodes, site: Site, paths: RunPaths, eligible: EligibleNodes | None) -> NextNodes:
    """`nodes`, unless Slurm says that the job could never begin like that (for its constraints, say)."""
    if eligible is None or not nodes.exclusion.nodes or not nodes.excluded:
        return nodes
    why = site.why_not_without(paths, nodes.excluded)
    if why is None:
        return nodes
    spared = tuple((name, f"Slurm would have no nodes for the job: {why}") for name in nodes.exclusion.nodes)
    users = tuple(sorted(set(nodes.excluded) - set(nodes.exclusion.nodes)))
    return NextNodes(
        bad=nodes.bad,
        exclusion=Exclusion(spared=(*nodes.exclusion.spared, *spared)),
        excluded=None if set(users) == set(eligible.excluded) else users,
    )


class LastFiles(Struct, eq=False):
    files: FileExecutor
    is_hurried: Callable[[], bool]
    """The user has asked (again) for the end: a mount that hangs is not waited for then."""
    is_late: bool
    """A signal has ended the attempt: too little time for a mount that may never answer."""
    _has_refused: bool = False

    def do(self, action: Callable[[], T], otherwise: T, *, answers: bool = False) -> T:
        """Returns `otherwise` where the filesystem hangs. Where it `answers`, a long time means work."""
        is_stuck = self.files.stuck_for() > HUNG_SECONDS
        within = HUNG_SECONDS if is_stuck or (self.is_late and not answers) else REPORT_SECONDS
        began, refused_within = time.monotonic(), 0.0 if self._has_refused else within

        def is_waited_for(error: BaseException) -> bool:
            if not is_refusal(error) and not (isinstance(error, OSError) and error.errno in FULL):
                return False
            self._has_refused = True
            if isinstance(error, OSError) and error.errno in FULL and time.monotonic() - began > FULL_SECONDS:
                return False
            return not (self.is_hurried() and time.monotonic() - began > HUNG_SECONDS)

        try:
            done = self.files.do(
                action,
                within=within,
                unless=lambda: self.files.stuck_for() > HUNG_SECONDS and self.is_hurried(),
                again=is_waited_for,
                refused_within=refused_within,
            )
        except FilesystemHangsError:
            return otherwise
        self._has_refused = False
        return done
