"""The agent's entry point: ``hpc-elastic agent --run-dir DIR --attempt N [--node K]``. Puts a `NodeAgent` together."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from msgspec import Struct

from hpc_elastic import __version__
from hpc_elastic.agent.ending import CrashGuard
from hpc_elastic.agent.heartbeat_watch import HeartbeatWatch
from hpc_elastic.agent.heartbeats import HeartbeatFolder, open_folder
from hpc_elastic.agent.identity import (
    AgentIdentity,
    RunDirectoryRefusedError,
    local_world_size,
    parse_options,
    patiently,
    prepare_session,
    rendezvous_settings,
)
from hpc_elastic.agent.metrics import open_metrics
from hpc_elastic.agent.node_agent import NodeAgent
from hpc_elastic.agent.part import AgentSite, make_parts
from hpc_elastic.agent.store_server import StoreServer
from hpc_elastic.base.clock import Clock, RunClock
from hpc_elastic.base.loop import FileExecutor
from hpc_elastic.errors import UsageError, describe_error, where_raised
from hpc_elastic.output.job_log import JobLog
from hpc_elastic.output.pump import LogPump, log_losses
from hpc_elastic.rendezvous.proposals import RestartDecision
from hpc_elastic.rendezvous.schedule import Lease
from hpc_elastic.rendezvous.state import NodeFailure, RoundRecord
from hpc_elastic.run.agent_events import AgentFailed, AgentStarted, StartRefused
from hpc_elastic.run.events import EventLog
from hpc_elastic.run.option_values import Std
from hpc_elastic.run.paths import REFUSED_CODE
from hpc_elastic.store.notifier import read_secret
from hpc_elastic.worker_api.records import QUESTIONS
from hpc_elastic.workers.guardian import kill_stale_processes, start_guardian
from hpc_elastic.workers.linux import SignalQueue, leave_hung_threads, output_pipes, set_parent_death_signal
from hpc_elastic.workers.spawn import prepare_agent_process
from hpc_elastic.workers.tree import TAG_VARIABLE

logger = logging.getLogger(__name__)

CLOSE_LOGS_SECONDS = 5.0
EVENTS_TOGETHER_SECONDS = 0.2
METRICS_SECONDS = 0.5
LAST_WRITES_SECONDS = 1.0
_MOST_LINES = 40
HUNG_LOGS_SECONDS = 1.0
"""The same where the filesystem has shown that it does not answer."""


def agent_main(argv: Sequence[str]) -> int:
    inherited = prepare_agent_process()
    pipes = output_pipes()
    options = parse_options(argv)
    if options.launcher_pid is not None:
        # Under Slurm the step ends with the job; on this machine nothing else would end a run whose launcher is gone,
        # by SIGKILL too.
        set_parent_death_signal(signal.SIGHUP)
        if os.getppid() != options.launcher_pid:
            return 128 + signal.SIGHUP
    clock = RunClock()
    try:
        me = AgentIdentity.read(options, inherited, clock)
        settings = rendezvous_settings(me.spec, me.attempt)
        secret = patiently(lambda: read_secret(me.run.secret), clock) if settings.doorbell else b""
    except RunDirectoryRefusedError as refused:
        print(f"hpc-elastic agent: error: {refused}", file=sys.stderr, flush=True)
        return REFUSED_CODE
    folder = open_folder(f"{me.spec.uid}.{me.tag.node_key}.{me.short_uid}", me.env)
    guardian = start_guardian(
        me.tag,
        remove=[str(path) for path in (folder.path, me.checkpoint_folder) if path is not None],
        stopped_limit=settings.silence_until_lost,
        still_takes_part=lambda: me.takes_part(clock),
    )
    left = kill_stale_processes(me.tag, clock=clock)

    # From here on this thread touches no file of the run: `files` does, which may hang.
    files = FileExecutor(clock=clock)
    signals = SignalQueue([signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2, signal.SIGCHLD])
    signals.hear_as(signal.SIGUSR2, me.spec.signals_to_handle)
    output = _Output.open(me, clock, files)
    for proc in left:
        logger.error("process %d (%s) of an earlier agent here does not end; it may hold devices", proc.pid, proc.name)
    try:
        site = _make_site(me, secret, folder, output, clock=clock, files=files)
        parts = make_parts(site)
    except UsageError as refused:
        output.events.write(StartRefused(reason=str(refused)))
        output.events.close(within=CLOSE_LOGS_SECONDS)
        raise
    metrics_files = FileExecutor(name="metrics", clock=clock)  # their disk may be another one, and hang on its own
    crash = CrashGuard()
    agent = NodeAgent(
        site,
        parts,
        signals=signals,
        guardian_pid=guardian.pid,
        were_workers_ended=guardian.has_ended_workers,
        crash=crash,
        loader=FileExecutor(name="load", clock=clock),
        metrics=open_metrics(
            me.spec.metrics,
            labels={"host": me.host, "node": str(me.node), "run": me.spec.run_id},
            post=metrics_files.post,
        ),
    )
    crash.watch_threads(site.coordination.fail)
    try:
        code = agent.run()
    except BaseException as failed:
        output.end_crashed(crash, failed, pipes)
    if site.notifier is not None:
        site.notifier.log_rejections()
    is_clean = not agent.hangs and not any(part.is_stuck for part in agent.parts)
    is_clean = output.close(is_clean)
    if me.spec.metrics:
        is_clean &= metrics_files.settle(METRICS_SECONDS)
    is_clean &= output.job_log.close(CLOSE_LOGS_SECONDS if is_clean else HUNG_LOGS_SECONDS)
    guardian.release()
    if not is_clean:
        leave_hung_threads(code, pipes)
    return code


def _make_site(
    me: AgentIdentity, secret: bytes, folder: HeartbeatFolder, output: _Output, *, clock: Clock, files: FileExecutor
) -> AgentSite:
    spec, at = me.spec, me.paths
    worker_count = local_world_size(spec.nproc_per_node, me.env)
    cpus: Sequence[frozenset[int]] = ()
    if spec.numa_binding is not None:
        from hpc_elastic.agent.numa_binding import bind_agent  # most runs do without

        cpus = bind_agent(spec.numa_binding, me.env, worker_count, files)

    def decide_restart(record: RoundRecord, failures: Sequence[NodeFailure]) -> RestartDecision:
        from hpc_elastic.agent.restart_policy import RestartPolicy  # `rounds.load` has imported it by then

        policy = RestartPolicy(
            max_restarts=spec.max_restarts,
            max_same_failures=spec.max_same_failures,
            restart_window=spec.restart_window,
        )
        return policy.decide_restart(record, failures)

    lease = Lease(
        clock, uid=me.uid, node=me.node, questions=folder.make_pipe(QUESTIONS, "checkpoint can be committed safely")[1]
    )
    session = prepare_session(
        spec=spec,
        attempt=me.attempt,
        store=at.store,
        secret=secret,
        uid=me.uid,
        node=me.node,
        host=me.host,
        local_world_size=worker_count,
        decide_restart=decide_restart,
        clock=clock,
        lease=lease,
    )
    return AgentSite(
        me=me,
        info=session.info,
        environ={key: value for key, value in me.env.items() if key != "TORCHELASTIC_ERROR_FILE"},
        clock=clock,
        files=files,
        events=output.events,
        pump=output.pump,
        coordination=session.coordination,
        notifier=session.notifier,
        watch=HeartbeatWatch(
            folder=folder,
            timeouts=spec.section_timeouts,
            clock=clock,
            files=files,
            summary=at.heartbeats(me.node),
            node=me.node,
            host=me.host,
            furthest_before=me.furthest_before,
            lease=lease,
        ),
        store_server=StoreServer(
            spec.host_python,
            log_path=at.root / f"store-host-{me.node:05d}.log",
            environ={**me.env, TAG_VARIABLE: str(me.tag)},
            files=files,
        ),
        cpus=cpus,
    )


class _Output(Struct, frozen=True, kw_only=True):
    me: AgentIdentity
    clock: Clock
    files: FileExecutor
    job_log: JobLog
    pump: LogPump
    events: EventLog

    @classmethod
    def open(cls, me: AgentIdentity, clock: Clock, files: FileExecutor) -> _Output:
        job_log = JobLog(1)
        root = logging.getLogger("hpc_elastic")
        root.setLevel(logging.INFO)
        root.addHandler(_JobLogHandler(job_log, me.host))
        root.propagate = False
        filters = {Std.OUT: me.spec.duplicate_stdout_filters, Std.ERR: me.spec.duplicate_stderr_filters}
        pump = LogPump(
            host=me.host,
            clock=clock,
            job_log=job_log,
            limit=me.spec.log_limit,
            node=me.node,
            duplicate_filters=filters,
        )
        events = EventLog(
            me.paths.events,
            role="agent",
            host=me.host,
            node=me.node,
            uid=me.short_uid,
            clock=clock,
            files=files,
            together=EVENTS_TOGETHER_SECONDS,
        )
        events.write(AgentStarted(pid=os.getpid(), version=__version__))
        return cls(me=me, clock=clock, files=files, job_log=job_log, pump=pump, events=events)

    def end_crashed(self, crash: CrashGuard, error: BaseException, pipes: Sequence[int]) -> NoReturn:
        me = self.me

        def write_lines() -> None:
            self.job_log.write_line(
                f"[{me.host}] error: the agent itself failed: {describe_error(error)}; ending its workers"
            )
            import traceback

            for line in "".join(traceback.format_exception(error)).splitlines()[-_MOST_LINES:]:
                self.job_log.write_line(f"[{me.host}] {line}")

        def write_error_file() -> None:
            from hpc_elastic.failures.error_file import write_own_failure

            path = me.paths.agent_error_file(me.node)
            write_own_failure(path, error, role="agent", host=me.host, now_ns=self.clock.time_ns())

        steps: list[Callable[[], object]] = [
            lambda: self.events.write(AgentFailed(error=describe_error(error), where=where_raised(error))),
            write_lines,
            lambda: self.job_log.close(HUNG_LOGS_SECONDS),
            lambda: self.events.close(within=LAST_WRITES_SECONDS),
            lambda: self.files.do(write_error_file, within=LAST_WRITES_SECONDS),
        ]
        crash.end(steps, pipes)

    def close(self, is_clean: bool) -> bool:
        is_clean &= self.pump.close(CLOSE_LOGS_SECONDS if is_clean else HUNG_LOGS_SECONDS)
        log_losses(self.events, self.pump)
        self.events.close(within=CLOSE_LOGS_SECONDS if is_clean else HUNG_LOGS_SECONDS)
        return is_clean & self.files.settle(0.0)


class _JobLogHandler(logging.Handler):
    def __init__(self, job_log: JobLog, host: str) -> None:
        super().__init__()
        self._job_log = job_log
        self._host = host

    def emit(self, record: logging.LogRecord) -> None:
        level = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        self._job_log.write_line(f"[{self._host}] {level}{self.format(record)}")
