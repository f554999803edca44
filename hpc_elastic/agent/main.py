"""The agent's entry point: ``hpc-elastic agent --run-dir DIR --attempt N [--node K]``. Puts a `NodeAgent` together."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from msgspec import Struct

from hpc_elastic import __version__
from hpc_elastic.agent.context import AgentContext
from hpc_elastic.agent.ending import LAST_WRITES_SECONDS, CrashGuard
from hpc_elastic.agent.fork_server_states import NoForkServer
from hpc_elastic.agent.hang import HangWatch
from hpc_elastic.agent.health import HealthPlan
from hpc_elastic.agent.health_checks import HealthChecks, HealthSite
from hpc_elastic.agent.heartbeats import open_folder
from hpc_elastic.agent.metrics import RoundFigures, open_metrics
from hpc_elastic.agent.node_agent import NodeAgent
from hpc_elastic.agent.rendezvous_session import (
    claim_start_number,
    local_world_size,
    prepare_session,
    rendezvous_settings,
)
from hpc_elastic.agent.restart_group import RestartGroupWatch
from hpc_elastic.agent.restart_policy import RestartPolicy
from hpc_elastic.agent.store_server import StoreServer, torch_available
from hpc_elastic.agent.suspicion import SuspicionWatch
from hpc_elastic.agent.worker_evidence import Place
from hpc_elastic.base.clock import Clock, RunClock, SystemClock
from hpc_elastic.base.file_executor import FileExecutor, is_refusal
from hpc_elastic.base.host_facts import LOOPBACK
from hpc_elastic.base.outcome import REFUSED_CODE
from hpc_elastic.errors import HpcElasticError, UnreadableFileError, UsageError
from hpc_elastic.failures.error_file import write_own_failure
from hpc_elastic.output.job_log import JobLog
from hpc_elastic.output.pump import LogPump, log_losses
from hpc_elastic.rendezvous.state import new_uid
from hpc_elastic.run.agent_events import AgentStarted, StartRefused
from hpc_elastic.run.attempt import AttemptInfo, load_attempt
from hpc_elastic.run.events import EventLog
from hpc_elastic.run.option_values import (
    StartMethod,
    shown_in_job_log,
)
from hpc_elastic.run.paths import AttemptPaths, RunPaths
from hpc_elastic.run.spec import RunSpec, load_run_spec
from hpc_elastic.slurm.job_environment import JobEnvironment, in_job
from hpc_elastic.store.notifier import read_secret
from hpc_elastic.workers import linux
from hpc_elastic.workers.guardian import kill_stale_processes, start_guardian
from hpc_elastic.workers.linux import SignalQueue, leave_hung_threads, output_pipes
from hpc_elastic.workers.spawn import Inherited, prepare_agent_process
from hpc_elastic.workers.tree import JOB_VARIABLE, TAG_VARIABLE, Tag, node_key

logger = logging.getLogger(__name__)

CLOSE_LOGS_SECONDS = 5.0
READ_AGAIN_SECONDS = (0.1, 0.2, 0.4, 0.8, 1.6, *[3.2] * 36)
"""Pauses before the run directory is read again after a fault of its filesystem: two minutes in all, as the health
check waits for it before a round."""
METRICS_SECONDS = 0.5
HUNG_LOGS_SECONDS = 1.0
"""The same where the filesystem has shown that it does not answer."""

T = TypeVar("T")


def agent_main(argv: Sequence[str]) -> int:
    """Run the agent of this node. Returns its exit code; 2 where the run can't be read from here."""
    inherited = prepare_agent_process()
    pipes = output_pipes()
    options = _parse(argv)
    if options.launcher_pid is not None and not _end_with(options.launcher_pid):
        return 128 + signal.SIGHUP
    clock = RunClock()
    try:
        me = _Identity.read(options, inherited, clock)
        settings = rendezvous_settings(me.spec, me.attempt)
        secret = _patiently(lambda: read_secret(me.run.secret), clock) if settings.doorbell else b""
    except _RefusedError as refused:
        print(f"hpc-elastic agent: error: {refused}", file=sys.stderr, flush=True)
        return REFUSED_CODE
    spec, at = me.spec, me.paths
    folder = open_folder(f"{spec.uid}.{me.tag.node_key}.{me.short_uid}", me.env)
    guardian = start_guardian(
        me.tag, remove=str(folder.path) if folder.path is not None else None, stopped_limit=settings.silence_until_lost
    )
    left = kill_stale_processes(me.tag, clock=clock)

    # From here on this thread touches no file of the run: `files` does, which may hang.
    files = FileExecutor(clock=clock)
    signals = SignalQueue([signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2, signal.SIGCHLD])
    job_log = JobLog(1)
    root = logging.getLogger("hpc_elastic")
    root.setLevel(logging.INFO)
    root.addHandler(_JobLogHandler(job_log, me.host))
    root.propagate = False
    for proc in left:
        logger.error("process %d (%s) of an earlier agent here does not end; it may hold devices", proc.pid, proc.name)
    pump = LogPump(host=me.host, clock=clock, job_log=job_log, limit=spec.log_limit, node=me.node)
    events = EventLog(at.events, role="agent", host=me.host, node=me.node, uid=me.short_uid, clock=clock, files=files)
    events.write(AgentStarted(pid=os.getpid(), version=__version__))

    try:
        worker_count = local_world_size(spec.nproc_per_node, me.env)
    except UsageError as refused:
        events.write(StartRefused(reason=str(refused)))
        events.close(within=CLOSE_LOGS_SECONDS)
        raise
    policy = RestartPolicy(
        max_restarts=spec.max_restarts,
        max_same_failures=spec.max_same_failures,
        restart_window=spec.restart_window,
        restart_steps=spec.restart_steps,
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
    )
    restart_group = RestartGroupWatch(folder=folder, events=events, policy=spec.restart_policy, limit=spec.max_restarts)
    worker_env = {key: value for key, value in me.env.items() if key != "TORCHELASTIC_ERROR_FILE"}
    worker_env.update(restart_group.environment(me.env))
    store_server = StoreServer(
        spec.host_python,
        log_path=at.root / f"store-host-{me.node:05d}.log",
        environ={**me.env, TAG_VARIABLE: str(me.tag)},
        files=files,
    )
    health = _health_checks(
        me, worker_env, session.info.addresses, is_refused_alone=session.coordination.is_refused_alone
    )
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
            torch_available=lambda: torch_available(spec.host_python),
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
            ),
            files=files,
            health=health,
            restart_group=restart_group,
            crash=crash,
            fork_server=fork_server,
            figures=RoundFigures(metrics, role=spec.role, clock=clock),
            suspicions=SuspicionWatch(
                at.suspicions, spec.hangs, node=me.node, names=me.attempt.nodes, clock=clock, files=files
            ),
            watch=HangWatch(
                folder=folder,
                timeouts=spec.section_timeouts,
                clock=clock,
                files=files,
                summary=at.heartbeats(me.node),
                node=me.node,
                host=me.host,
            ),
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


class _Identity(Struct, frozen=True, kw_only=True):
    """Which agent of which run this is."""

    spec: RunSpec
    attempt: AttemptInfo
    run: RunPaths
    paths: AttemptPaths
    node: int
    host: str
    uid: str
    tag: Tag
    env: dict[str, str]
    inherited: Inherited

    @property
    def short_uid(self) -> str:
        """A part of `uid` for names of files."""
        return self.uid[-21:]

    @classmethod
    def read(cls, options: _Options, inherited: Inherited, clock: Clock) -> _Identity:
        """Read the run directory, and find this node in it.

        Raises:
            UsageError: it can't be read from here, or knows no such node.
            _RefusedError: its filesystem refuses.
        """
        run = RunPaths(Path(options.run_dir))
        paths = run.attempt(options.attempt)
        env = dict(os.environ)
        spec, attempt = _load(run, options.attempt, clock)
        node = _node_index(attempt, options.node, env)
        host = attempt.nodes[node]
        try:
            start = claim_start_number(paths.store, node, clock=clock)
        except OSError as error:
            raise _RefusedError(host=host, why=error) from None
        uid = new_uid(node, host, clock, start=start)
        return cls(
            spec=spec,
            attempt=attempt,
            run=run,
            paths=paths,
            node=node,
            host=host,
            uid=uid,
            tag=Tag(
                run_uid=spec.uid,
                node_key=node_key(attempt.cluster, node),
                agent_uid=uid,
                jobs=frozenset((*filter(None, [env.get(JOB_VARIABLE)]), *attempt.slurm_job_ids)),
            ),
            env=env,
            inherited=inherited,
        )


def _health_checks(
    me: _Identity, worker_env: Mapping[str, str], addresses: Sequence[str], *, is_refused_alone: Callable[[], bool]
) -> HealthChecks:
    spec = me.spec
    return HealthChecks(
        HealthPlan(
            limits=spec.health_checks,
            command=spec.health_check,
            command_seconds=spec.health_check_timeout,
        ),
        HealthSite(
            probe=me.paths.health_probe(me.node, me.short_uid),
            environ={
                **worker_env,
                TAG_VARIABLE: str(me.tag),
                "HPC_ELASTIC_RUN_DIR": str(me.run.root),
                "HPC_ELASTIC_ATTEMPT": str(me.attempt.number),
                "HPC_ELASTIC_NODE": str(me.node),
                "HPC_ELASTIC_HOST": me.host,
            },
            cwd=spec.cwd,
            inherited=me.inherited,
            addresses=tuple(address for address in addresses if address != LOOPBACK),
            is_refused_alone=is_refused_alone,
            gpus_given=JobEnvironment.from_env(me.env).node.gpus if in_job(me.env) else None,
        ),
        clock=SystemClock(),  # it judges the wall clock as that is now
    )


class _Options(Struct, frozen=True, kw_only=True):
    run_dir: str
    attempt: int
    node: int | None
    launcher_pid: int | None


def _parse(argv: Sequence[str]) -> _Options:
    """Read the options, which launchers of this package alone give (users start agents with ``agent SCRIPT``)."""
    given = dict(zip(argv[::2], argv[1::2], strict=False))
    numbers = {name: value for name, value in given.items() if name != "--run-dir"}
    is_complete = {"--run-dir", "--attempt"} <= given.keys() <= {"--run-dir", "--attempt", "--node", "--launcher-pid"}
    if not is_complete or 2 * len(given) != len(argv) or not all(value.isdecimal() for value in numbers.values()):
        raise UsageError(
            f"agent {' '.join(argv)}: give --run-dir DIR --attempt N, and where there is no SLURMD_NODENAME --node K"
        )
    return _Options(
        run_dir=given["--run-dir"],
        attempt=int(given["--attempt"]),
        node=int(given["--node"]) if "--node" in given else None,
        launcher_pid=int(given["--launcher-pid"]) if "--launcher-pid" in given else None,
    )


def _end_with(launcher_pid: int) -> bool:
    """Get a SIGHUP when the launcher dies, by SIGKILL too. Returns whether it is still there.

    Under Slurm the step ends with the job; on this machine nothing else would end a run whose launcher is gone.
    """
    linux.set_parent_death_signal(signal.SIGHUP)
    return os.getppid() == launcher_pid


class _RefusedError(HpcElasticError):
    """The filesystem has refused the run directory for longer than an agent waits."""

    template = "{host}: the filesystem refuses the run directory: {why}"


def _patiently(action: Callable[[], T], clock: Clock) -> T:
    """Carry out `action`, which reads or writes the run directory, and again where its filesystem refuses.

    Raises:
        _RefusedError: it refuses for too long.
        Exception: what `action` raises otherwise.
    """
    for pause in (*READ_AGAIN_SECONDS, None):
        try:
            return action()
        except (UnreadableFileError, OSError) as error:
            may_pass = error.may_pass if isinstance(error, UnreadableFileError) else is_refusal(error)
            if not may_pass:
                raise
            if pause is None:
                raise _RefusedError(host=os.uname().nodename, why=error) from None
        clock.wait(threading.Event(), pause)
    raise AssertionError("the last try returns or raises")


def _load(paths: RunPaths, number: int, clock: Clock) -> tuple[RunSpec, AttemptInfo]:
    try:
        return _patiently(
            lambda: (load_run_spec(paths.run_json), load_attempt(paths.attempt(number).attempt_json)), clock
        )
    except UnreadableFileError as error:
        raise UsageError(
            f"{os.uname().nodename}: the run directory can't be read from this node: {error}; "
            "it must lie on a filesystem that all nodes share (--runs-dir)"
        ) from None


def _node_index(attempt: AttemptInfo, given: int | None, env: dict[str, str]) -> int:
    if given is not None:
        if not 0 <= given < len(attempt.nodes):
            raise UsageError(f"--node {given}: this attempt has nodes 0 to {len(attempt.nodes) - 1}")
        return given
    name = env.get("SLURMD_NODENAME", "")
    if name not in attempt.nodes:
        raise UsageError(
            f"SLURMD_NODENAME={name!r} is none of this attempt's nodes ({', '.join(attempt.nodes)}); "
            "give --node, or start the agent with srun in the job's allocation"
        )
    return attempt.nodes.index(name)


class _JobLogHandler(logging.Handler):
    """Through the job log's queue: the agent's own stdout may be stuck, and its loop must never be."""

    def __init__(self, job_log: JobLog, host: str) -> None:
        super().__init__()
        self._job_log = job_log
        self._host = host

    def emit(self, record: logging.LogRecord) -> None:
        level = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        self._job_log.write_line(f"[{self._host}] {level}{self.format(record)}")
