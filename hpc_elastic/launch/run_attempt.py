"""One attempt from its directory to its report, on whichever site: the supervisor's frame."""

from __future__ import annotations

import atexit
import logging
import math
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from hpc_elastic import __version__
from hpc_elastic.agent.hang import HANG_FINGERPRINT, may_be_a_bug
from hpc_elastic.agent.meeting import prepare_meeting, rendezvous_settings
from hpc_elastic.agent.restart_policy import RestartPolicy, made_progress
from hpc_elastic.agent.signals import SignalQueue
from hpc_elastic.attempt import AttemptInfo
from hpc_elastic.clock import Clock
from hpc_elastic.errors import HpcElasticError
from hpc_elastic.events import EventLog
from hpc_elastic.file_thread import FilesystemHangsError, FileThread
from hpc_elastic.launch.attempt_result import AttemptResult
from hpc_elastic.launch.attempts import claim_attempt
from hpc_elastic.launch.output import JobOutput, say
from hpc_elastic.launch.result import StoredResult, load_result
from hpc_elastic.launch.signal_desk import SignalDesk
from hpc_elastic.launch.signal_table import SlurmWord
from hpc_elastic.launch.site import Site, SiteFacts
from hpc_elastic.launch.supervisor import Supervisor
from hpc_elastic.outcome import ExitCode, Outcome
from hpc_elastic.rendezvous.coordination import Coordination
from hpc_elastic.rendezvous.participant import OBSERVER_NODE
from hpc_elastic.rendezvous.uid import new_uid
from hpc_elastic.requeue import RequeueAction, RequeueDecision, RequeueFacts, decide_requeue
from hpc_elastic.run_paths import AttemptPaths, RunPaths
from hpc_elastic.run_spec import RunSpec
from hpc_elastic.store.ring_secret import read_secret

if TYPE_CHECKING:
    from hpc_elastic.failures.worker_failure import WorkerFailure

logger = logging.getLogger(__name__)

REPORT_SECONDS = 120.0
"""For the report of an attempt: of a large run, on a slow filesystem."""
HUNG_SECONDS = 5.0
"""Without any answer: it is said so, and not waited for any more where somebody waits for us."""
_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

T = TypeVar("T")


class FilesystemSilentError(HpcElasticError):
    """An attempt was to end before it could be begun, since the run directory does not answer."""

    template = "{path} has not answered for {seconds:.0f} s: nothing was started; is its filesystem there (df {path})?"


def run_attempt(paths: RunPaths, spec: RunSpec, site: Site, *, clock: Clock, signals: SignalQueue) -> RequeueDecision:
    """Run one attempt to its end: report written and printed, requeue decided and, where decided, done.

    Raises:
        HpcElasticError, OSError: it could not even be begun.
    """
    # From here on this thread touches no file of the run: `files` does, which may hang.
    files = FileThread(clock=clock)

    def on_disk(action: Callable[[], T]) -> T:
        try:
            return files.do(action, within=math.inf, unless=lambda: signals.holds(_ENDING_SIGNALS))
        except FilesystemHangsError:
            raise FilesystemSilentError(path=paths.root, seconds=files.stuck_for()) from None

    try:
        return _run_attempt(paths, spec, site, clock=clock, signals=signals, files=files, on_disk=on_disk)
    except FilesystemSilentError as error:
        logger.error("%s", error)
        number = next((n for n in signals.take() if n in _ENDING_SIGNALS), signal.SIGTERM)
        return RequeueDecision(action=RequeueAction.END, reason=str(error), exit_code=128 + number)


class _OnDisk(Protocol):
    def __call__(self, action: Callable[[], T]) -> T: ...


def _run_attempt(
    paths: RunPaths,
    spec: RunSpec,
    site: Site,
    *,
    clock: Clock,
    signals: SignalQueue,
    files: FileThread,
    on_disk: _OnDisk,
) -> RequeueDecision:
    facts = site.facts(spec)
    attempt_paths = on_disk(lambda: claim_attempt(paths))
    attempt = AttemptInfo(
        number=attempt_paths.number,
        cluster=facts.cluster,
        nodes=facts.nodes,
        batch_host=os.uname().nodename,
        started_ns=clock.time_ns(),
        job_id=facts.job_id,
        restart_count=facts.restart_count,
        requeue_armed=facts.requeue_armed,
        requeue_reason=facts.requeue_reason,
        kill_wait=facts.kill_wait,
        versions=_versions(facts),
    )
    on_disk(lambda: attempt.save(attempt_paths.attempt_json))
    _say_head(paths, spec, attempt, attempt_paths)
    uid = new_uid(99999, f"supervisor-{attempt.batch_host}", clock)
    events = EventLog(
        attempt_paths.events,
        role="supervisor",
        host=attempt.batch_host,
        node=OBSERVER_NODE,
        uid=uid[-21:],
        clock=clock,
        files=files,
    )
    events.write(
        "attempt_started",
        attempt=attempt.number,
        job_id=attempt.job_id,
        nodes=list(attempt.nodes),
        requeue_armed=attempt.requeue_armed,
        requeue_reason=attempt.requeue_reason,
    )
    supervisor = Supervisor(
        attempt=attempt,
        launcher=site.launcher(spec, paths, attempt),
        coordination=on_disk(lambda: _observe(paths, spec, attempt, attempt_paths, uid, clock)),
        signals=signals,
        events=events,
        clock=clock,
        shutdown_timeout=spec.shutdown_timeout,
        desk=SignalDesk(
            lambda near: site.ask(near=near),
            grace=float(spec.signal_grace),
            kill_wait=attempt.kill_wait,
            events=events,
            clock=clock,
        ),
    )
    result = supervisor.run()
    if supervisor.superseded:
        logger.warning("an agent has seen to the end of this attempt, since this host could not be reached")
        return RequeueDecision(action=RequeueAction.END, reason="seen to elsewhere", exit_code=1)
    decision = conclude(
        paths,
        spec,
        site,
        attempt,
        result,
        events,
        files=files,
        is_hurried=lambda: signals.holds({signal.SIGINT}),
        is_told_to_end=lambda: signals.holds(_ENDING_SIGNALS),
    )
    events.close(within=HUNG_SECONDS)
    return decision


def conclude(
    paths: RunPaths,
    spec: RunSpec,
    site: Site,
    attempt: AttemptInfo,
    result: AttemptResult,
    events: EventLog,
    *,
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

    def finish(decision: RequeueDecision) -> None:
        def save() -> bool:
            _save_result(attempt_paths, result, decision)
            return True

        def report() -> bool:
            _report(attempt, paths, result, decision)
            return True

        if not (on_disk(save, False) and on_disk(report, False, answers=True)):
            logger.error("%s does not answer: the report can't be written", attempt_paths.root)
        _say_end(attempt, result, decision)

    events.write("verdict", outcome=result.outcome.value, reason=result.reason)
    before = None
    if attempt.number:
        before = on_disk(lambda: load_result(paths.attempt(attempt.number - 1).result_json), None)
    decision = _decide(before, spec, attempt, result)
    events.write("requeue_decision", action=decision.action.value, reason=decision.reason)
    events.write("attempt_ended", outcome=result.outcome.value, exit_code=decision.exit_code)
    # Written before the job is requeued: from then on Slurm's SIGKILL is KillWait away. Where it is already, the job
    # comes first.
    is_late = result.signal_number is not None
    if not is_late:
        finish(decision)
    if decision.action is RequeueAction.REQUEUE and not result.requeued:
        cancelled = is_told_to_end() and site.ask(near=0.0).word is SlurmWord.ENDED
        requeued = _not_requeued(decision) if cancelled else _requeue(site, decision)
        if requeued != decision:
            decision = requeued
            events.write("requeue_decision", action=decision.action.value, reason=decision.reason)
            events.write("attempt_ended", outcome=result.outcome.value, exit_code=decision.exit_code)
            if not is_late:
                finish(decision)
    if is_late:
        finish(decision)
    return decision


def _observe(
    paths: RunPaths, spec: RunSpec, attempt: AttemptInfo, attempt_paths: AttemptPaths, uid: str, clock: Clock
) -> Coordination:
    """The supervisor's seat in the rendezvous: it looks, is rung, and may close the run."""
    policy = RestartPolicy(max_restarts=0, max_same_failures=0)  # never asked: it never coordinates
    return prepare_meeting(
        spec=spec,
        attempt=attempt,
        store=attempt_paths.store,
        secret=read_secret(paths.secret) if rendezvous_settings(spec, attempt).doorbell else b"",
        uid=uid,
        node=OBSERVER_NODE,
        host=attempt.batch_host,
        local_world_size=0,
        settle=policy.settle,
        clock=clock,
    ).coordination


def _decide(before: StoredResult | None, spec: RunSpec, attempt: AttemptInfo, result: AttemptResult) -> RequeueDecision:
    same = before is not None and may_be_a_bug(result.fingerprint) and before.fingerprint == result.fingerprint
    progress = made_progress(
        step=result.step,
        before=before.step if before is not None else -1,
        seconds=result.seconds,
        window=spec.restart_window,
    )
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
        )
    )


def _requeue(site: Site, decision: RequeueDecision) -> RequeueDecision:
    try:
        logger.info("%s", site.requeue())
    except HpcElasticError as error:
        logger.error("the requeue failed: %s", error)
        reason = f"{decision.reason}; but the requeue failed: {error}"
        return RequeueDecision(action=RequeueAction.END, reason=reason, exit_code=int(ExitCode.WORKERS_FAILED))
    return decision


def _not_requeued(decision: RequeueDecision) -> RequeueDecision:
    reason = f"{decision.reason}; but the job was cancelled meanwhile"
    return RequeueDecision(action=RequeueAction.END, reason=reason, exit_code=int(ExitCode.TERMINATED))


def _save_result(attempt_paths: AttemptPaths, result: AttemptResult, decision: RequeueDecision) -> None:
    stored = StoredResult(
        outcome=result.outcome.value,
        reason=result.reason,
        exit_code=decision.exit_code,
        action=decision.action.value,
        decision=decision.reason,
        fingerprint=result.fingerprint,
        step=result.step,
    )
    try:
        stored.save(attempt_paths.result_json)
    except OSError as error:
        logger.error("the result could not be written: %s", error)


def _report(attempt: AttemptInfo, paths: RunPaths, result: AttemptResult, decision: RequeueDecision) -> None:
    """Write the report. A failure of it never hides the result."""
    try:
        from hpc_elastic.report.write import write_report

        report = write_report(
            paths.root,
            attempt=attempt.number,
            outcome=result.outcome.value,
            exit_code=decision.exit_code,
            decision=f"{decision.action.value}: {decision.reason}",
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


def _versions(facts: SiteFacts) -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {"hpc_elastic": __version__, "python": ".".join(str(part) for part in sys.version_info[:3])}
    if facts.version:
        found["slurm"] = facts.version
    try:
        found["torch"] = version("torch")
    except PackageNotFoundError:
        pass  # another interpreter's, or none
    return found


def _say_head(paths: RunPaths, spec: RunSpec, attempt: AttemptInfo, attempt_paths: AttemptPaths) -> None:
    """The first lines of the job log: what a person who opens it needs to find everything else."""
    versions = ", ".join(f"{name} {value}" for name, value in attempt.versions.items())
    asked = "" if spec.min_nodes == spec.max_nodes else f" ({spec.min_nodes}-{spec.max_nodes})"
    spares = max(0, len(attempt.nodes) - spec.max_nodes)
    asked += f", {spares} of them spare{'s' if spares > 1 else ''}" if spares else ""
    nodes = f"{len(attempt.nodes)} node{'s' if len(attempt.nodes) > 1 else ''}{asked}"
    where = f"job {attempt.job_id}" if attempt.job_id else "this machine"
    armed = "yes" if attempt.requeue_armed else f"no, because {attempt.requeue_reason}"
    lines = [
        f"run {spec.run_id}, attempt {attempt.number}, {where}, {nodes}: {_shortened(attempt.nodes)}",
        f"command: {spec.entrypoint}",
        f"versions: {versions}",
        f"run directory: {paths.root}",
        f"rank logs: {attempt_paths.root}/round-*/rank-*/{{stdout,stderr}}.log",
        f"restarts: {spec.max_restarts} per attempt; requeues: {spec.max_requeues}; requeue armed: {armed}",
        f"stopping workers: SIGTERM, SIGKILL after {spec.shutdown_timeout:g} s"
        + (f" ({attempt.kill_wait:g} s less a reserve where Slurm ends the job)" if attempt.kill_wait else ""),
        f"when it has ended: hpc-elastic report {paths.root}",
    ]
    for line in lines:
        say(f"[hpc-elastic] {line}")


def _shortened(nodes: tuple[str, ...]) -> str:
    from hpc_elastic.slurm.hostlist import compress

    return compress(nodes)


def log_to_stdout() -> JobOutput:
    """The supervisor's messages go where the workers' do: the job log. What waits is written at the process' end."""
    output = JobOutput()
    atexit.register(output.close)
    return output


def load_run(run_dir: Path) -> tuple[RunPaths, RunSpec]:
    """The run that a directory holds.

    Raises:
        UsageError: it is not visible from this host, or no run directory.
    """
    from hpc_elastic.errors import UsageError
    from hpc_elastic.run_spec import UnreadableRunError, load_run_spec

    paths = RunPaths(run_dir.absolute())
    try:
        return paths, load_run_spec(paths.run_json)
    except UnreadableRunError as error:
        raise UsageError(
            f"{os.uname().nodename}: no run can be read at {run_dir}: {error}; "
            "it must lie on a filesystem that this host shares with the one where it was submitted (--runs-dir)"
        ) from None
