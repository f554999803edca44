"""The agent's entry point: ``hpc-elastic agent --run-dir DIR --attempt N [--node K]``. Puts a `NodeAgent` together."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence

from hpc_elastic import __version__
from hpc_elastic.agent.context import AgentContext
from hpc_elastic.agent.ending import LAST_WRITES_SECONDS, CrashGuard
from hpc_elastic.agent.fork_server_states import NoForkServer
from hpc_elastic.agent.hang_detector import HangDetector
from hpc_elastic.agent.health import HealthPlan
from hpc_elastic.agent.health_checks import HealthChecks, HealthSite
from hpc_elastic.agent.heartbeat_watch import HeartbeatWatch
from hpc_elastic.agent.heartbeats import open_folder
from hpc_elastic.agent.identity import AgentIdentity, RunDirectoryRefusedError, end_with, parse_options, patiently
from hpc_elastic.agent.metrics import RoundFigures, open_metrics
from hpc_elastic.agent.nccl_ras import ADDRESS_VARIABLE, ENABLE_VARIABLE, choose_address
from hpc_elastic.agent.nccl_watch import NcclWatch
from hpc_elastic.agent.node_agent import NodeAgent
from hpc_elastic.agent.numa_binding import READ_SECONDS, bind_workers, describe_binding, read_machine
from hpc_elastic.agent.rendezvous_session import local_world_size, prepare_session, rendezvous_settings
from hpc_elastic.agent.restart_group import RestartGroupWatch
from hpc_elastic.agent.restart_policy import RestartPolicy
from hpc_elastic.agent.setup import NoSetup, Setup
from hpc_elastic.agent.store_server import StoreServer, torch_available
from hpc_elastic.agent.worker_evidence import Place
from hpc_elastic.base.clock import RunClock, SystemClock
from hpc_elastic.base.file_executor import FileExecutor
from hpc_elastic.base.host_facts import LOOPBACK
from hpc_elastic.base.outcome import REFUSED_CODE
from hpc_elastic.errors import UsageError
from hpc_elastic.failures.error_file import write_own_failure
from hpc_elastic.output.job_log import JobLog
from hpc_elastic.output.pump import LogPump, log_losses
from hpc_elastic.rendezvous.lease import Lease
from hpc_elastic.run.agent_events import AgentStarted, StartRefused
from hpc_elastic.run.events import EventLog
from hpc_elastic.run.option_values import StartMethod, Std, shown_in_job_log
from hpc_elastic.slurm.job_environment import JobEnvironment, in_job
from hpc_elastic.store.notifier import read_secret
from hpc_elastic.worker_api.heartbeat_record import QUESTIONS
from hpc_elastic.workers.guardian import kill_stale_processes, start_guardian
from hpc_elastic.workers.linux import SignalQueue, leave_hung_threads, output_pipes
from hpc_elastic.workers.spawn import prepare_agent_process
from hpc_elastic.workers.tree import TAG_VARIABLE

logger = logging.getLogger(__name__)

CLOSE_LOGS_SECONDS = 5.0
METRICS_SECONDS = 0.5
HUNG_LOGS_SECONDS = 1.0
"""The same where the filesystem has shown that it does not answer."""


def agent_main(argv: Sequence[str]) -> int:
    """Run the agent of this node. Returns its exit code; 2 where the run can't be read from here."""
    inherited = prepare_agent_process()
    pipes = output_pipes()
    options = parse_options(argv)
    if options.launcher_pid is not None and not end_with(options.launcher_pid):
        return 128 + signal.SIGHUP
    clock = RunClock()
    try:
        me = AgentIdentity.read(options, inherited, clock)
        settings = rendezvous_settings(me.spec, me.attempt)
        secret = patiently(lambda: read_secret(me.run.secret), clock) if settings.doorbell else b""
    except RunDirectoryRefusedError as refused:
        print(f"hpc-elastic agent: error: {refused}", file=sys.stderr, flush=True)
        return REFUSED_CODE
    spec, at = me.spec, me.paths
    folder = open_folder(f"{spec.uid}.{me.tag.node_key}.{me.short_uid}", me.env)
    guardian = start_guardian(
        me.tag,
        remove=str(folder.path) if folder.path is not None else None,
        stopped_limit=settings.silence_until_lost,
        still_takes_part=lambda: me.takes_part(clock),
    )
    left = kill_stale_processes(me.tag, clock=clock)

    # From here on this thread touches no file of the run: `files` does, which may hang.
    files = FileExecutor(clock=clock)
    signals = SignalQueue([signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2, signal.SIGCHLD])
    signals.hear_as(signal.SIGUSR2, spec.signals_to_handle)
    job_log = JobLog(1)
    root = logging.getLogger("hpc_elastic")
    root.setLevel(logging.INFO)
    root.addHandler(_JobLogHandler(job_log, me.host))
    root.propagate = False
    for proc in left:
        logger.error("process %d (%s) of an earlier agent here does not end; it may hold devices", proc.pid, proc.name)
    filters = {Std.OUT: spec.duplicate_stdout_filters, Std.ERR: spec.duplicate_stderr_filters}
    pump = LogPump(
        host=me.host, clock=clock, job_log=job_log, limit=spec.log_limit, node=me.node, duplicate_filters=filters
    )
    events = EventLog(at.events, role="agent", host=me.host, node=me.node, uid=me.short_uid, clock=clock, files=files)
    events.write(AgentStarted(pid=os.getpid(), version=__version__))

    try:
        worker_count = local_world_size(spec.nproc_per_node, me.env)
        cpus = _bind(me, worker_count, files)
    except UsageError as refused:
        events.write(StartRefused(reason=str(refused)))
        events.close(within=CLOSE_LOGS_SECONDS)
        raise
    policy = RestartPolicy(
        max_restarts=spec.max_restarts,
        max_same_failures=spec.max_same_failures,
        restart_window=spec.restart_window,
    )
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
        decide_restart=policy.decide_restart,
        clock=clock,
        lease=lease,
    )
    restart_group = RestartGroupWatch(folder=folder, events=events, policy=spec.restart_policy, limit=spec.max_restarts)
    worker_env = {key: value for key, value in me.env.items() if key != "TORCHELASTIC_ERROR_FILE"}
    worker_env.update(restart_group.environment(me.env))
    if ras_address := choose_address(worker_env):
        worker_env[ADDRESS_VARIABLE] = ras_address
    store_server = StoreServer(
        spec.host_python,
        log_path=at.root / f"store-host-{me.node:05d}.log",
        environ={**me.env, TAG_VARIABLE: str(me.tag)},
        files=files,
    )
    health = _health_checks(
        me, worker_env, session.info.addresses, is_refused_alone=session.coordination.is_refused_alone
    )
    site = me.setup_site(worker_env, files=files, clock=clock, events=events)
    setup = Setup(spec, site) if spec.setup else NoSetup()
    metrics_files = FileExecutor(name="metrics", clock=clock)  # their disk may be another one, and hang on its own
    labels = {"host": me.host, "node": str(me.node), "run": spec.run_id}
    metrics = open_metrics(spec.metrics, labels=labels, post=metrics_files.post)
    crash = CrashGuard()
    fork_server = NoForkServer()
    if spec.start_method is StartMethod.FORKSERVER:
        from hpc_elastic.agent.fork_server import fork_server_for  # an agent of fresh interpreters does without

        fork_server = fork_server_for(
            spec,
            environ=worker_env,
            local_world_size=session.info.local_world_size,
            inherited=inherited,
            folder=folder.path,
            paths=at,
            node=me.node,
            tag=str(me.tag),
            clock=clock,
            files=files,
            write_event=events.write,
        )
    watch = HeartbeatWatch(
        folder=folder,
        timeouts=spec.section_timeouts,
        clock=clock,
        files=files,
        summary=at.heartbeats(me.node),
        node=me.node,
        host=me.host,
        furthest_before=me.furthest_before,
        lease=lease,
    )
    agent = NodeAgent(
        AgentContext(
            spec=spec,
            attempt=me.attempt,
            place=Place(attempt=at, host=me.host, node=me.node),
            info=session.info,
            tag=str(me.tag),
            run_dir=str(me.run.root),
            environ=worker_env,
            inherited=inherited,
            clock=clock,
            coordination=session.coordination,
            notifier=session.notifier,
            pump=pump,
            store_server=store_server,
            torch_available=lambda: torch_available(setup.change.command([spec.host_python])[0]),
            events=events,
            signals=signals,
            shown=lambda local_rank, rank: shown_in_job_log(
                local_rank,
                rank,
                redirects=spec.redirects,
                tee=spec.tee,
                only_local_ranks=spec.local_ranks_filter,
                only_ranks=spec.job_log_ranks,
            ),
            helpers=lambda: (
                {
                    guardian.pid,
                    *(server.pid for server in (store_server, fork_server) if server.pid),
                }
                | health.pids
                | setup.pids
            ),
            were_workers_ended=guardian.has_ended_workers,
            files=files,
            health=health,
            setup=setup,
            restart_group=restart_group,
            crash=crash,
            cpus=cpus,
            fork_server=fork_server,
            figures=RoundFigures(metrics, role=spec.role, clock=clock),
            hangs=HangDetector(
                at.suspicions,
                spec.hangs,
                node=me.node,
                names=me.attempt.nodes,
                clock=clock,
                files=files,
                watch=watch,
                nccl=NcclWatch(
                    "" if worker_env.get(ENABLE_VARIABLE) == "0" else worker_env.get(ADDRESS_VARIABLE, ""),
                    run_uid=spec.uid,
                    least=spec.hangs.least,
                    clock=clock,
                ),
                look_at_gpus=health.look_at_gpus,
            ),
            watch=watch,
        )
    )
    crash.watch_threads(session.coordination.fail)
    try:
        code = agent.run()
    except BaseException as failed:
        error = failed  # whose own name is gone once this block is left

        def write_error_file() -> None:
            path = at.agent_error_file(me.node)
            write_own_failure(path, error, role="agent", host=me.host, now_ns=clock.time_ns())

        crash.end(
            error,
            events=events,
            write_line=lambda line: job_log.write_line(f"[{me.host}] {line}"),
            flush=lambda: job_log.close(HUNG_LOGS_SECONDS),
            write_error_file=lambda: files.do(write_error_file, within=LAST_WRITES_SECONDS),
            pipes=pipes,
        )
    if session.notifier is not None:
        session.notifier.log_rejections()
    is_clean = not agent.hangs and not health.is_stuck
    is_clean &= pump.close(CLOSE_LOGS_SECONDS if is_clean else HUNG_LOGS_SECONDS)
    log_losses(events, pump)
    events.close(within=CLOSE_LOGS_SECONDS if is_clean else HUNG_LOGS_SECONDS)
    is_clean &= files.settle(0.0)
    if spec.metrics:
        is_clean &= metrics_files.settle(METRICS_SECONDS)
    is_clean &= job_log.close(CLOSE_LOGS_SECONDS if is_clean else HUNG_LOGS_SECONDS)
    guardian.release()
    if not is_clean:
        leave_hung_threads(code, pipes)
    return code


def _bind(me: AgentIdentity, workers: int, files: FileExecutor) -> tuple[frozenset[int], ...]:
    """The CPUs of each worker, by local rank; none: they have those of this process.

    Raises:
        UsageError: ``--numa-binding exclusive``, and there are too few.
    """
    if (binding := me.spec.numa_binding) is None:
        return ()
    try:
        machine = files.do(lambda: read_machine(me.env, os.sched_getaffinity(0)), within=READ_SECONDS)
    except (OSError, ValueError) as error:
        logger.warning("--numa-binding %s: nothing is bound, /sys can't be read: %s", binding.value, error)
        return ()
    bound = bind_workers(binding, machine, workers)
    logger.info("%s", describe_binding(binding, bound))
    return tuple(one.cpus for one in bound)


def _health_checks(
    me: AgentIdentity,
    worker_env: Mapping[str, str],
    addresses: Sequence[str],
    *,
    is_refused_alone: Callable[[], bool],
) -> HealthChecks:
    spec = me.spec
    environ = me.command_environment(worker_env)
    return HealthChecks(
        HealthPlan(
            limits=spec.health_checks,
            command=spec.health_check,
            command_seconds=spec.health_check_timeout,
        ),
        HealthSite(
            probe=me.paths.health_probe(me.node, me.short_uid),
            environ=environ,
            cwd=spec.cwd,
            inherited=me.inherited,
            addresses=tuple(address for address in addresses if address != LOOPBACK),
            is_refused_alone=is_refused_alone,
            gpus_given=JobEnvironment.from_env(me.env).node.gpus if in_job(me.env) else None,
        ),
        clock=SystemClock(),  # it judges the wall clock as that is now
    )


class _JobLogHandler(logging.Handler):
    """Through the job log's queue: the agent's own stdout may be stuck, and its loop must never be."""

    def __init__(self, job_log: JobLog, host: str) -> None:
        super().__init__()
        self._job_log = job_log
        self._host = host

    def emit(self, record: logging.LogRecord) -> None:
        level = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        self._job_log.write_line(f"[{self._host}] {level}{self.format(record)}")
