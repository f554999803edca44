"""The supervisor itself has failed, by a defect or for want of memory: the attempt ends all the same, with its report.

Were the exception just let go, the batch script would end, and Slurm the job with it: no verdict, no report, no
requeue.

One attempt from its directory to its report, on whichever site: the supervisor's frame.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

from hpc_elastic import __version__
from hpc_elastic.agent.rendezvous_session import prepare_session, rendezvous_settings
from hpc_elastic.agent.restart_policy import RestartPolicy
from hpc_elastic.base.clock import Clock
from hpc_elastic.base.file_executor import FilesystemHangsError, FileThread, is_refusal
from hpc_elastic.base.outcome import Outcome
from hpc_elastic.errors import HpcElasticError, describe_error, where_raised
from hpc_elastic.failures.error_file import write_own_failure
from hpc_elastic.launch.attempts import claim_attempt, forget_attempt, give_way, slurm_job_ids
from hpc_elastic.launch.conclude import conclude
from hpc_elastic.launch.job_watch import EndClaim, JobWatch
from hpc_elastic.launch.output import HUNG_SECONDS, JobOutput, log_plain
from hpc_elastic.launch.requeue import RequeueAction, RequeueDecision, RequeueWay
from hpc_elastic.launch.signals import SignalResolver
from hpc_elastic.launch.site import Launcher, Site, SiteFacts
from hpc_elastic.launch.supersede import EarlierAttempts
from hpc_elastic.launch.supervisor import END_RESERVE, Supervisor
from hpc_elastic.rendezvous.coordination import Coordination
from hpc_elastic.rendezvous.participant import OBSERVER_NODE
from hpc_elastic.rendezvous.state import OBSERVER_PLACE, new_uid
from hpc_elastic.run.attempt import AttemptInfo
from hpc_elastic.run.events import EventLog
from hpc_elastic.run.paths import AttemptPaths, RunPaths
from hpc_elastic.run.spec import RunSpec
from hpc_elastic.store.notifier import read_secret
from hpc_elastic.workers.linux import SignalQueue

logger = logging.getLogger(__name__)


class SupervisorFailedError(HpcElasticError):
    """What it raised, with the place."""

    template = "the supervisor itself failed: {error} ({where})"


def end_after(
    error: Exception,
    supervisor: Supervisor,
    *,
    attempt: AttemptInfo,
    paths: AttemptPaths,
    launcher: Launcher,
    coordination: Coordination,
    events: EventLog,
    files: FileThread,
    clock: Clock,
    shutdown_timeout: float,
) -> None:
    """Leave evidence, and have the agents end their workers. Then `supervisor.result` tells the rest. Never raises.

    Args:
        error: What ended `supervisor.run`.
        supervisor: The one that failed.
        attempt: The attempt.
        paths: Its files.
        launcher: Ends the agents.
        coordination: Closes the run, if it still can.
        events: The supervisor's.
        files: Touches the files.
        clock: For the error file's time.
        shutdown_timeout: The workers' grace, in seconds.
    """
    failure = SupervisorFailedError(error=describe_error(error), where=where_raised(error))
    supervisor.failure = failure
    logger.error("%s; the workers are ended", failure, exc_info=error)
    host = attempt.batch_host
    node = attempt.nodes.index(host) if host in attempt.nodes else 0

    index = supervisor.record.round if supervisor.record is not None else 0

    def keep() -> None:
        path = paths.supervisor_error_file
        write_own_failure(path, error, role="supervisor", host=host, now_ns=clock.time_ns())

    steps: list[Callable[[], object]] = [
        lambda: events.write("platform_failure", round=index, node=node, host=host, reason=str(failure)),
        lambda: coordination.ask(lambda participant: participant.close(Outcome.FAILED, str(failure))),
        lambda: files.do(keep, within=HUNG_SECONDS),
        lambda: launcher.end(within=shutdown_timeout + END_RESERVE),
        lambda: coordination.stop(within=HUNG_SECONDS),
    ]
    for step in steps:
        try:
            step()
        except Exception as problem:  # it may fail for the same reason; the next one may not
            logger.error("after that: %s", problem)


_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

BEGIN_SECONDS = 120.0
"""How long a filesystem that refuses is waited for before an attempt, as an agent waits for it before a round."""

T = TypeVar("T")


class FilesystemSilentError(HpcElasticError):
    """An attempt was to end before it could be begun, since the run directory does not answer."""

    template = "{path} has not answered for {seconds:.0f} s: nothing was started; is its filesystem there (df {path})?"


class StartInterruptedError(HpcElasticError):
    """An attempt was to end while it still waited for an earlier one to end."""

    template = "interrupted while an earlier attempt was ending on {nodes}: nothing was started"


def run_attempt(paths: RunPaths, spec: RunSpec, site: Site, *, clock: Clock, signals: SignalQueue) -> RequeueDecision:
    """Run one attempt to its end: report written and printed, requeue decided and, where decided, done.

    Raises:
        HpcElasticError, OSError: it could not even be begun.
    """
    # From here on this thread touches no file of the run: `files` does, which may hang.
    files = FileThread(clock=clock)

    def on_disk(action: Callable[[], T]) -> T:
        try:
            return files.do(
                action,
                within=math.inf,
                unless=lambda: signals.holds(_ENDING_SIGNALS),
                again=is_refusal,
                refused_within=BEGIN_SECONDS,
            )
        except FilesystemHangsError:
            raise FilesystemSilentError(path=paths.root, seconds=files.stuck_for()) from None

    try:
        return _run_attempt(paths, spec, site, clock=clock, signals=signals, files=files, on_disk=on_disk)
    except (FilesystemSilentError, StartInterruptedError) as error:
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
    attempt = on_disk(lambda: _begin(paths, site, facts, clock))
    attempt_paths = paths.attempt(attempt.number)
    _log_head(paths, spec, attempt, attempt_paths)
    uid = new_uid(OBSERVER_PLACE, f"supervisor-{attempt.batch_host}", clock)
    events = _open_events(attempt, attempt_paths, uid, clock, files)
    _end_earlier(
        EarlierAttempts(paths, spec, attempt, uid=uid, site=site, events=events, clock=clock),
        on_disk,
        clock=clock,
        is_interrupted=lambda: signals.holds(_ENDING_SIGNALS),
        undo=lambda: files.post(lambda: forget_attempt(paths, attempt_paths)),
    )
    launcher = site.launcher(spec, paths, attempt)
    coordination = on_disk(lambda: _observe(paths, spec, attempt, attempt_paths, uid, clock))
    supervisor = Supervisor(
        attempt=attempt,
        launcher=launcher,
        coordination=coordination,
        signals=signals,
        events=events,
        clock=clock,
        shutdown_timeout=spec.shutdown_timeout,
        job_watch=JobWatch(site.job_nodes, events=events, clock=clock) if facts.cluster == "slurm" else None,
        resolver=SignalResolver(
            lambda near: site.ask(near=near),
            grace=float(spec.signal_grace),
            kill_wait=attempt.kill_wait,
            events=events,
            clock=clock,
        ),
        end_claim=EndClaim(site.allocation, coordination.ask, clock=clock),
    )
    try:
        result = supervisor.run()
    except Exception as error:
        if isinstance(error, HpcElasticError) and not launcher.running():
            raise  # nothing could be started
        end_after(
            error,
            supervisor,
            attempt=attempt,
            paths=attempt_paths,
            launcher=launcher,
            coordination=coordination,
            events=events,
            files=files,
            clock=clock,
            shutdown_timeout=spec.shutdown_timeout,
        )
        result = supervisor.result()
    if supervisor.superseded:
        logger.warning("another process of this run has finished this attempt, or goes on with the run; this one ends")
        return RequeueDecision(action=RequeueAction.END, reason="finished by another process", exit_code=1)
    decision = conclude(
        paths,
        spec,
        site,
        attempt,
        result,
        events,
        clock=clock,
        files=files,
        is_hurried=lambda: signals.holds({signal.SIGINT}),
    )
    events.close(within=HUNG_SECONDS)
    return decision


def _end_earlier(
    earlier: EarlierAttempts,
    on_disk: _OnDisk,
    *,
    clock: Clock,
    is_interrupted: Callable[[], bool],
    undo: Callable[[], None],
) -> None:
    """Wait until no worker of an earlier attempt runs any more.

    Raises:
        StartInterruptedError: a signal came first; `undo` has been called.
        EarlierAttemptRunsError: one does not end.
        OSError: the run directory was removed, say; a filesystem that refuses was asked again by `on_disk`.
    """
    is_over = on_disk(earlier.supersede)
    while not is_over:
        if is_interrupted():
            undo()
            raise StartInterruptedError(nodes=", ".join(earlier.awaited_nodes))
        clock.wait(threading.Event(), earlier.look_seconds)
        is_over = on_disk(earlier.look)


def _begin(paths: RunPaths, site: Site, facts: SiteFacts, clock: Clock) -> AttemptInfo:
    """Claim the next attempt's directory, and write down what the attempt is."""
    attempt_paths = claim_attempt(paths)
    give_way(
        paths,
        attempt_paths,
        job_id=facts.job_id,
        restart_count=facts.restart_count,
        is_running=site.is_running,
        clock=clock,
    )
    attempt = AttemptInfo(
        number=attempt_paths.number,
        cluster=facts.cluster,
        nodes=facts.nodes,
        batch_host=os.uname().nodename,
        started_ns=clock.time_ns(),
        job_id=facts.job_id,
        slurm_job_ids=slurm_job_ids(paths, attempt_paths.number, facts.slurm_job_id),
        restart_count=facts.restart_count,
        requeue_armed=facts.requeue_armed,
        requeue_reason=facts.requeue_reason,
        requeue_way=facts.requeue_way.value,
        kill_wait=facts.kill_wait,
        versions=_versions(facts),
    )
    attempt.save(attempt_paths.attempt_json)
    return attempt


def _open_events(
    attempt: AttemptInfo, attempt_paths: AttemptPaths, uid: str, clock: Clock, files: FileThread
) -> EventLog:
    """The supervisor's log, with the attempt's first event in it."""
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
    return events


def _observe(
    paths: RunPaths, spec: RunSpec, attempt: AttemptInfo, attempt_paths: AttemptPaths, uid: str, clock: Clock
) -> Coordination:
    """The supervisor's seat in the rendezvous: it looks, is notified, and may close the run."""
    policy = RestartPolicy(max_restarts=0, max_same_failures=0)  # never asked: it never coordinates
    return prepare_session(
        spec=spec,
        attempt=attempt,
        store=attempt_paths.store,
        secret=read_secret(paths.secret) if rendezvous_settings(spec, attempt).doorbell else b"",
        uid=uid,
        node=OBSERVER_NODE,
        host=attempt.batch_host,
        local_world_size=0,
        decide_restart=policy.decide_restart,
        clock=clock,
    ).coordination


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


def _log_head(paths: RunPaths, spec: RunSpec, attempt: AttemptInfo, attempt_paths: AttemptPaths) -> None:
    """The first lines of the job log: what a person who opens it needs to find everything else."""
    versions = ", ".join(f"{name} {value}" for name, value in attempt.versions.items())
    asked = "" if spec.min_nodes == spec.max_nodes else f" ({spec.min_nodes}-{spec.max_nodes})"
    spares = max(0, len(attempt.nodes) - spec.max_nodes)
    asked += f", {spares} of them spare{'s' if spares > 1 else ''}" if spares else ""
    nodes = f"{len(attempt.nodes)} node{'s' if len(attempt.nodes) > 1 else ''}{asked}"
    where = f"job {attempt.job_id}" if attempt.job_id else "this machine"
    armed = "no, because " if not attempt.requeue_armed else "yes" if not attempt.requeue_reason else "yes, "
    if attempt.requeue_armed and attempt.requeue_way == RequeueWay.CHAIN.value:
        armed = "yes, by a follow-on job: "
    armed += attempt.requeue_reason
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
        log_plain(f"[hpc-elastic] {line}")


def _shortened(nodes: tuple[str, ...]) -> str:
    from hpc_elastic.slurm.notation import compress

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
    from hpc_elastic.run.spec import UnreadableRunError, load_run_spec

    paths = RunPaths(run_dir.absolute())
    try:
        return paths, load_run_spec(paths.run_json)
    except UnreadableRunError as error:
        raise UsageError(
            f"{os.uname().nodename}: no run can be read at {run_dir}: {error}; "
            "it must lie on a filesystem that this host shares with the one where it was submitted (--runs-dir)"
        ) from None
