"""One attempt from its directory to its report, on whichever site: the supervisor's frame."""

from __future__ import annotations

import atexit
import logging
import math
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from hpc_elastic import __version__
from hpc_elastic.agent.identity import prepare_session, rendezvous_settings
from hpc_elastic.agent.restart_policy import RestartPolicy
from hpc_elastic.base.clock import Clock
from hpc_elastic.base.host_facts import ask_interpreter
from hpc_elastic.base.loop import FileExecutor, FilesystemHangsError, is_refusal
from hpc_elastic.errors import HpcElasticError, UsageError
from hpc_elastic.failures.error_file import write_own_failure
from hpc_elastic.launch.conclude import HUNG_SECONDS, JOB_LOG, conclude, log_plain
from hpc_elastic.launch.hooks import BatchCommands, end_with_commands
from hpc_elastic.launch.requeue import RequeueAction, RequeueDecision, RequeueWay
from hpc_elastic.launch.run_directory import claim_attempt, forget_attempt, give_way, slurm_job_ids
from hpc_elastic.launch.site import AttemptContext, JobWatch, SignalResolver, Site, supervisor_events
from hpc_elastic.launch.supersede import EarlierAttempts, EndClaim, StartInterruptedError
from hpc_elastic.launch.supervisor import Supervisor
from hpc_elastic.output.job_log import JobLog
from hpc_elastic.rendezvous.coordination import Coordination
from hpc_elastic.rendezvous.membership import reserve_room
from hpc_elastic.rendezvous.participant import OBSERVER_NODE
from hpc_elastic.rendezvous.state import OBSERVER_PLACE, new_uid
from hpc_elastic.run.control_events import AttemptStarted
from hpc_elastic.run.fold import fold_run
from hpc_elastic.run.paths import AttemptInfo, AttemptPaths, LocalSupervisor, RunPaths
from hpc_elastic.run.spec import EntryKind, Entrypoint, RunSpec, UnreadableRunError, load_run_spec
from hpc_elastic.slurm.job_environment import compress
from hpc_elastic.store.file_store import FileStore
from hpc_elastic.store.notifier import read_secret
from hpc_elastic.workers.linux import SignalQueue, output_pipes
from hpc_elastic.workers.tree import look_at

logger = logging.getLogger(__name__)

_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

BEGIN_SECONDS = 120.0
"""Time to wait for a filesystem that refuses, as an agent waits for it before a round."""

_MOST_BYTES = 16 << 20
FOLD_SECONDS = 20.0
"""Time for the files of a run that is over, while its allocation waits; what is left stays where it is."""
LATE_FOLD_SECONDS = 3.0
_JOB_LOG_SECONDS = 2.0
_READ_SECONDS = 1e6
"""A terminal, or a reader at a pipe's other end, takes its time."""
T = TypeVar("T")


class FilesystemSilentError(HpcElasticError):
    template = "{path} has not answered for {seconds:.0f} s: nothing was started; is its filesystem there (df {path})?"


def run_attempt(paths: RunPaths, spec: RunSpec, site: Site, *, clock: Clock, signals: SignalQueue) -> RequeueDecision:
    signals.hear_as(signal.SIGUSR2, spec.signals_to_handle)
    try:
        return _AttemptRun(paths, spec, site, clock, signals, FileExecutor(clock=clock)).run()
    except (FilesystemSilentError, StartInterruptedError) as error:
        logger.error("%s", error)
        number = next((n for n in signals.take() if n in _ENDING_SIGNALS), signal.SIGTERM)
        return RequeueDecision(action=RequeueAction.END, reason=str(error), exit_code=128 + number)


class _AttemptRun(Struct, eq=False):
    _paths: RunPaths
    _spec: RunSpec
    _site: Site
    _clock: Clock
    _signals: SignalQueue
    _files: FileExecutor

    def run(self) -> RequeueDecision:
        paths, spec, site, clock = self._paths, self._spec, self._site, self._clock
        facts = site.facts(spec)
        attempt = self._on_disk(lambda: self._begin(facts))
        folder = paths.attempt(attempt.number)
        _log_head(paths, spec, attempt, folder)
        uid = new_uid(OBSERVER_PLACE, f"supervisor-{attempt.batch_host}", clock)
        events = supervisor_events(folder, host=attempt.batch_host, uid=uid, clock=clock, files=self._files)
        events.write(
            AttemptStarted(
                attempt=attempt.number,
                job_id=attempt.job_id,
                nodes=attempt.nodes,
                requeue_armed=attempt.requeue_armed,
                requeue_reason=attempt.requeue_reason,
            )
        )
        context = AttemptContext(paths=paths, spec=spec, site=site, attempt=attempt, events=events, clock=clock)
        earlier = EarlierAttempts(context, uid)
        try:
            earlier.end(self._on_disk, is_interrupted=lambda: self._signals.holds(_ENDING_SIGNALS))
        except StartInterruptedError:
            self._files.post(lambda: forget_attempt(paths, folder))
            raise
        launcher = site.launcher(spec, paths, attempt)
        coordination = self._on_disk(lambda: self._observe(attempt, folder, uid))
        self._files.post(lambda: reserve_room(FileStore(folder.store, clock=clock)))
        self._files.settle(1.0)  # nothing is half written where the supervisor dies as the agents start
        commands = BatchCommands(context)
        supervisor = Supervisor(
            attempt=attempt,
            launcher=launcher,
            coordination=coordination,
            signals=self._signals,
            events=events,
            clock=clock,
            shutdown_timeout=spec.shutdown_timeout,
            flush_seconds=spec.flush_seconds,
            resolver=SignalResolver(
                lambda near: site.ask(near=near),
                grace=float(spec.signal_grace),
                kill_wait=attempt.kill_wait,
                events=events,
                clock=clock,
            ),
            end_claim=EndClaim(site.allocation, coordination.ask, clock=clock),
            job_watch=JobWatch(site.job_nodes, events=events, clock=clock) if facts.cluster == "slurm" else None,
            on_record=commands.on_record,
        )
        try:
            result = supervisor.run()
        except Exception as error:
            if isinstance(error, HpcElasticError) and not launcher.running():
                raise  # nothing could be started
            supervisor.fail(error, keep=partial(self._keep, error, attempt, folder))
            result = supervisor.result()
        if supervisor.superseded:
            logger.warning(
                "another process of this run has finished this attempt, or goes on with the run; this one ends"
            )
            return RequeueDecision(action=RequeueAction.END, reason="finished by another process", exit_code=1)

        def is_hurried() -> bool:
            return self._signals.holds({signal.SIGINT})

        decision = conclude(context, result, files=self._files, is_hurried=is_hurried)
        end_with_commands(commands, result, decision, files=self._files, is_hurried=is_hurried)
        events.close(within=HUNG_SECONDS)
        if decision.action is RequeueAction.END and not launcher.running() and not self._files.stuck_for():
            self._fold(within=LATE_FOLD_SECONDS if result.signal_number is not None else FOLD_SECONDS)
        return decision

    def _fold(self, *, within: float) -> None:
        by = self._clock.monotonic() + within

        def is_late() -> bool:
            return self._clock.monotonic() > by or self._signals.holds(_ENDING_SIGNALS)

        try:
            self._files.do(lambda: fold_run(self._paths, is_late=is_late), within=within + HUNG_SECONDS)
        except OSError as error:
            logger.info("the run's files stay as they are: %s", error)

    def _on_disk(self, action: Callable[[], T]) -> T:
        try:
            return self._files.do(
                action,
                within=math.inf,
                unless=lambda: self._signals.holds(_ENDING_SIGNALS),
                again=is_refusal,
                refused_within=BEGIN_SECONDS,
            )
        except FilesystemHangsError:
            raise FilesystemSilentError(path=self._paths.root, seconds=self._files.stuck_for()) from None

    def _begin(self, facts: AttemptInfo) -> AttemptInfo:
        folder = claim_attempt(self._paths)
        give_way(
            self._paths,
            folder,
            job_id=facts.job_id,
            restart_count=facts.restart_count,
            is_running=self._site.is_running,
            clock=self._clock,
        )
        (own,) = facts.slurm_job_ids or ("",)
        supervisor = None
        if facts.cluster == "local" and (this := look_at(os.getpid())) is not None:
            root = os.path.realpath(self._paths.root)
            supervisor = LocalSupervisor(pid=this.pid, starttime=this.starttime, run_dir=root)
        attempt = replace(
            facts,
            number=folder.number,
            batch_host=os.uname().nodename,
            started_ns=self._clock.time_ns(),
            slurm_job_ids=slurm_job_ids(self._paths, folder.number, own),
            supervisor=supervisor,
            versions=_versions(facts.versions, self._spec.entrypoint if self._spec.container is None else None),
        )
        attempt.save(folder.attempt_json)
        return attempt

    def _observe(self, attempt: AttemptInfo, folder: AttemptPaths, uid: str) -> Coordination:
        spec = self._spec
        policy = RestartPolicy(max_restarts=0, max_same_failures=0)  # never asked: it never coordinates
        return prepare_session(
            spec=spec,
            attempt=attempt,
            store=folder.store,
            secret=read_secret(self._paths.secret) if rendezvous_settings(spec, attempt).doorbell else b"",
            uid=uid,
            node=OBSERVER_NODE,
            host=attempt.batch_host,
            local_world_size=0,
            decide_restart=policy.decide_restart,
            clock=self._clock,
        ).coordination

    def _keep(self, error: Exception, attempt: AttemptInfo, folder: AttemptPaths) -> None:
        path, now_ns = folder.supervisor_error_file, self._clock.time_ns()
        self._files.do(
            lambda: write_own_failure(path, error, role="supervisor", host=attempt.batch_host, now_ns=now_ns),
            within=HUNG_SECONDS,
        )


_ASK_VERSIONS = """
print("python", ".".join(map(str, sys.version_info[:3])))
from importlib.metadata import version
print("torch", version("torch"))
"""
_ASK_SECONDS = 5.0


def _versions(site: Mapping[str, str], entry: Entrypoint | None) -> dict[str, str]:
    """`entry` is None for workers in a container, whose interpreter is not on this host."""
    python = _interpreter(entry)
    if python == sys.executable:
        from importlib.metadata import PackageNotFoundError, version

        asked = {"python": ".".join(map(str, sys.version_info[:3]))}
        with suppress(PackageNotFoundError):
            asked["torch"] = version("torch")
    else:
        said = ask_interpreter(python, _ASK_VERSIONS, seconds=_ASK_SECONDS) if python else None
        lines = (line.partition(" ") for line in (said or "").splitlines())
        asked = {key: value for key, _, value in lines if key in ("python", "torch")}
    return {"hpc_elastic": __version__, **{key: asked[key] for key in ("python",) if key in asked}, **site, **asked}


def _interpreter(entry: Entrypoint | None) -> str:
    if entry is None or entry.kind is not EntryKind.COMMAND:
        return entry.python if entry is not None else ""
    words = (entry.target, *entry.args)
    return next((word for word in words if re.fullmatch(r"python[0-9.]*", os.path.basename(word))), "")


def _log_head(paths: RunPaths, spec: RunSpec, attempt: AttemptInfo, attempt_paths: AttemptPaths) -> None:
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
        f"run {spec.run_id}, attempt {attempt.number}, {where}, {nodes}: {compress(attempt.nodes)}",
        f"command: {spec.command}",
        *([f"around the workers: {spec.around}"] if spec.around else []),
        f"versions: {versions}",
        f"run directory: {paths.root}",
        f"rank logs: hpc-elastic logs {paths.root} (files: {attempt_paths.root.name}/round-*/rank-*/,"
        f" when the run is over {attempt_paths.root.name}/{attempt_paths.output.name})",
        f"restarts: {spec.max_restarts} per attempt; requeues: {spec.max_requeues}; requeue enabled: {armed}",
        f"stopping workers: SIGTERM, SIGKILL after {spec.shutdown_timeout:g} s"
        + (f" ({attempt.kill_wait:g} s less a reserve where Slurm ends the job)" if attempt.kill_wait else ""),
        f"when it has ended: hpc-elastic report {paths.root}",
    ]
    for line in lines:
        log_plain(f"[hpc-elastic] {line}")


class _Handler(logging.Handler):
    def __init__(self, job_log: JobLog) -> None:
        super().__init__()
        self._job_log = job_log

    def emit(self, record: logging.LogRecord) -> None:
        self._job_log.write_line(self.format(record))


def log_to_stdout() -> Callable[[], bool]:
    """Send this process' messages to the job log through a queue, since stdout may be a file on a mount that hangs.

    The function that is returned, and called at the process' end, writes what waits, in bounded time.
    """
    job_log = JobLog(1, total_bytes=_MOST_BYTES, source_bytes=_MOST_BYTES)
    handlers = {"hpc_elastic": _Handler(job_log), JOB_LOG: _Handler(job_log)}
    handlers["hpc_elastic"].setFormatter(logging.Formatter("[hpc-elastic] %(message)s"))
    for name, handler in handlers.items():
        logger = logging.getLogger(name)
        logger.setLevel(logging.INFO)
        logger.addHandler(handler)
        logger.propagate = False
    seconds = _READ_SECONDS if 1 in output_pipes() else _JOB_LOG_SECONDS

    def close() -> bool:
        for name, handler in handlers.items():
            logging.getLogger(name).removeHandler(handler)
        return job_log.close(seconds)

    atexit.register(close)
    return close


def load_run(run_dir: Path) -> tuple[RunPaths, RunSpec]:
    paths = RunPaths(run_dir.absolute())
    try:
        return paths, load_run_spec(paths.run_json)
    except UnreadableRunError as error:
        raise UsageError(
            f"{os.uname().nodename}: no run can be read at {run_dir}: {error}; "
            "it must lie on a filesystem that this host shares with the one where it was submitted (--runs-dir)"
        ) from None
