"""`LocalElasticAgent`: workers as processes of this node, for use from a Python program.

It shares with ``hpc-elastic agent`` how processes are started, watched, ended and described (`local_workers`). It lives
in the user's process, so it changes no umask, handles no signal, and touches no child that does not carry its own tag.
"""

from __future__ import annotations

import logging
import os
import resource
import secrets
import shutil
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hpc_elastic.agent.elastic_agent import EXIT_BARRIER_SECONDS, SimpleElasticAgent
from hpc_elastic.agent.function_call import FunctionCall
from hpc_elastic.agent.heartbeat_watch import HeartbeatWatch
from hpc_elastic.agent.heartbeats import open_folder
from hpc_elastic.agent.local_workers import LocalWorkers
from hpc_elastic.agent.metrics import MetricSink
from hpc_elastic.agent.part import Condemned, GroupSite
from hpc_elastic.agent.supervision import RunResult, WorkerGroup, WorkerSpec, WorkerState
from hpc_elastic.agent.worker_environment import RoundFacts, WorkerSettings, worker_environment
from hpc_elastic.base.clock import Clock, RunClock, pause
from hpc_elastic.base.files import make_private_dir
from hpc_elastic.base.loop import FileExecutor, seconds_until, wait_readable
from hpc_elastic.errors import UsageError
from hpc_elastic.failures.ranking import FailureClass
from hpc_elastic.output.job_log import JobLog
from hpc_elastic.output.pump import LogPump
from hpc_elastic.run.log_pieces import PieceLimit
from hpc_elastic.run.option_values import (
    SectionTimeouts,
    Std,
    parse_section_timeouts,
    parse_std_streams,
    shown_in_job_log,
)
from hpc_elastic.run.paths import AttemptPaths
from hpc_elastic.run.spec import EntryKind, Entrypoint
from hpc_elastic.workers import linux, tree
from hpc_elastic.workers.spawn import Inherited, candidates
from hpc_elastic.workers.stop import Stopped
from hpc_elastic.workers.tree import TAG_VARIABLE, Tag

logger = logging.getLogger(__name__)

_CLOSE_LOGS_SECONDS = 5.0


class LocalElasticAgent(SimpleElasticAgent):
    """Runs one node's workers as processes. `run` is to be called from the main thread.

    Output goes to files under `log_dir`, and, by `redirects`, `tee` and `local_ranks_filter` as torchrun has them, to
    this process' stdout with a prefix. When this process dies, the workers get SIGKILL; what they have started
    themselves does not. Workers may report their steps with `hpc_elastic.heartbeat`, and one that is silent for longer
    than `section_timeouts` allows fails with the stacks of this node's workers as evidence.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        *,
        log_dir: str | os.PathLike[str] | None = None,
        redirects: str = "0",
        tee: str = "0",
        local_ranks_filter: tuple[int, ...] | None = None,
        log_limit: PieceLimit | None = None,
        shutdown_timeout: float = 30.0,
        section_timeouts: str = "",
        env: Mapping[str, str] | None = None,
        exit_barrier_timeout: float = EXIT_BARRIER_SECONDS,
        metrics: MetricSink | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Args:
        spec: What to run.
        log_dir: For logs and error files; a temporary one by default, kept where the workers failed.
        redirects: ``3`` or ``0:3,1:1``: streams that stay out of stdout.
        tee: The same: streams that go there all the same.
        local_ranks_filter: Only these local ranks reach stdout; None: all.
        log_limit: When the workers' output files are rotated; None: never.
        shutdown_timeout: Seconds from SIGTERM to SIGKILL.
        section_timeouts: As ``--section-timeouts`` has it, ``setup:900,step:60``: seconds without a heartbeat that make
            a hang; empty: no worker is judged. Each agent judges its own workers.
        env: The workers' environment, beside their ranks; this process' own by default.
        exit_barrier_timeout: Seconds that this node waits for the others when its workers are done.
        metrics: Where figures go.
        clock: For waits and times.

        Raises:
            UsageError: a value that makes no sense, a script or a command that is not there, or a function that
                can't be handed over.
        """
        clock = clock or RunClock()
        super().__init__(spec, exit_barrier_timeout=exit_barrier_timeout, metrics=metrics, clock=clock)
        kept = parse_std_streams(redirects, option="redirects")
        shown = parse_std_streams(tee, option="tee")
        self._shown: Callable[[int, int], Std] = lambda local_rank, rank: shown_in_job_log(
            local_rank, rank, redirects=kept, tee=shown, only_local_ranks=local_ranks_filter
        )
        self._local_clock = clock
        self._log_limit = log_limit
        self._shutdown_timeout = shutdown_timeout
        self._env = dict(os.environ if env is None else env)
        self._env.pop("TORCHELASTIC_ERROR_FILE", None)  # the workers get their own
        _refuse_what_is_not_there(spec.entrypoint, self._env)
        self._call = FunctionCall(spec.entrypoint, spec.args) if callable(spec.entrypoint) else None
        self._temporary = log_dir is None
        self.log_dir = Path(tempfile.mkdtemp(prefix="hpc-elastic-") if log_dir is None else log_dir).absolute()
        self._tag = Tag(run_uid=secrets.token_hex(16), node_key="library", agent_uid=secrets.token_hex(4))
        self._host = socket.gethostname()
        self._files = FileExecutor(name="worker files")
        self._timeouts = (
            parse_section_timeouts(section_timeouts, option="section_timeouts")
            if section_timeouts
            else SectionTimeouts()
        )
        self._watch: HeartbeatWatch
        self._workers: LocalWorkers | None = None
        self._job_log: JobLog | None = None
        self._pump: LogPump | None = None

    def run(self, role: str = "default") -> RunResult:
        if threading.current_thread() is not threading.main_thread():
            raise UsageError("LocalElasticAgent.run must be called from the main thread: workers end with the thread")
        make_private_dir(self.log_dir)
        self._job_log = JobLog(1)
        host, clock = self._host, self._local_clock
        self._pump = LogPump(host=host, clock=clock, job_log=self._job_log, limit=self._log_limit)
        self._watch = HeartbeatWatch(
            folder=open_folder(self._tag.agent_uid + self._tag.run_uid, self._env),
            timeouts=self._timeouts,
            clock=clock,
            files=self._files,
            host=host,
        )
        was_subreaper = linux.is_child_subreaper()
        linux.set_child_subreaper()
        failed = True
        try:
            result = super().run(role)
            failed = result.is_failed()
            return result
        finally:
            if not was_subreaper:
                linux.set_child_subreaper(on=False)
            self._watch.close()
            self._pump.close(_CLOSE_LOGS_SECONDS)
            self._pump.take_losses()
            self._job_log.close(_CLOSE_LOGS_SECONDS)
            if self._call is not None:
                self._call.close()
            if self._temporary and not failed:
                shutil.rmtree(self.log_dir, ignore_errors=True)

    def _start_workers(self, group: WorkerGroup) -> Mapping[int, Any]:
        assert self._pump is not None
        assert group.layout is not None
        spec, run_id = group.spec, group.spec.handler.get_run_id()
        facts = RoundFacts(
            spec=WorkerSettings(run_id=run_id, role=spec.role, max_restarts=spec.max_restarts),
            layout=group.layout,
            round=group.round,
            master_addr=group.master_addr or "",
            master_port=group.master_port or 0,
            agent_store=False,
            run_dir=str(self.log_dir),
            attempt=0,
            tag=str(self._tag),
        )
        umask = os.umask(0o077)
        os.umask(umask)
        self._workers = LocalWorkers(
            GroupSite(
                attempt=AttemptPaths(self.log_dir),
                host=self._host,
                node=0,
                round=group.round,
                layout=group.layout,
                clock=self._local_clock,
                files=self._files,
                pump=self._pump,
                watch=self._watch,
            ),
            inherited=Inherited(umask=umask, core_limit=resource.getrlimit(resource.RLIMIT_CORE), subreaper=True),
            shown=self._shown,
            excluding=lambda: (
                set(tree.children(os.getpid())) - {p.pid for p in tree.tagged(TAG_VARIABLE, str(self._tag))}
            ),
        )

        def environment(local_rank: int, error_file: str) -> dict[str, str]:
            env = worker_environment(self._env, facts, local_rank=local_rank, error_file=error_file)
            worker = group.workers[local_rank]
            env["ROLE_RANK"], env["ROLE_WORLD_SIZE"] = str(worker.role_rank), str(worker.role_world_size)
            return env

        self._workers.start(self._argv(group), environment, cwd=os.getcwd())
        return dict(enumerate(self._workers.pids))

    def _argv(self, group: WorkerGroup) -> list[str]:
        entrypoint = group.spec.entrypoint
        if self._call is not None:
            return self._call.argv(sys.executable, round_index=group.round)
        if isinstance(entrypoint, Entrypoint):
            return entrypoint.argv()
        args = [str(arg) for arg in group.spec.args]
        if str(entrypoint).endswith(".py"):
            return [sys.executable, "-u", str(entrypoint), *args]
        return [str(entrypoint), *args]

    def _wait_for_news(self, group: WorkerGroup, seconds: float) -> None:
        fds = self._workers.watched() if self._workers is not None else []
        news = getattr(group.spec.handler, "fileno", None)
        if news is not None:
            fds.append(news())
        wait_readable(fds, seconds_until([self._watch.due], self._local_clock, most=seconds))

    def _monitor_workers(self, group: WorkerGroup) -> RunResult:
        workers = self._workers
        assert workers is not None
        workers.poll()
        if workers.failed:
            return self._failed(workers)
        if workers.succeeded:
            return RunResult(WorkerState.SUCCEEDED, self._returned(group))
        verdict = self._watch.look(workers.running)
        if verdict is None:
            return RunResult(WorkerState.HEALTHY)
        logger.error("%s", verdict.reason)
        workers.condemn(Condemned(reason=verdict.reason, failure_class=FailureClass.HANG, ranks=self._watch.hung))
        self._end(workers)
        return self._failed(workers)

    def _failed(self, workers: LocalWorkers) -> RunResult:
        failures = {failure.global_rank: failure for failure in workers.describe_failures()}
        workers.show_causes("")
        return RunResult(WorkerState.FAILED, failures=failures)

    def _returned(self, group: WorkerGroup) -> dict[int, Any]:
        if self._call is None:
            return {}
        found = {}
        for worker in group.workers:
            try:
                found[worker.global_rank] = self._call.result(round_index=group.round, local_rank=worker.local_rank)
            except OSError:
                found[worker.global_rank] = None  # it left by os._exit(0), before there was anything to hand back
        return found

    def _stop_workers(self, group: WorkerGroup) -> None:
        workers, self._workers = self._workers, None
        if workers is None:
            return
        if self._pump is not None:
            self._pump.take_losses()  # which writes them to the job log
        self._end(workers)
        self._watch.end()

    def _end(self, workers: LocalWorkers) -> None:
        self._watch.refresh()
        self._watch.stop_judging()
        workers.begin_stop(grace=self._shutdown_timeout)
        while not isinstance(result := workers.step_stop(), Stopped):
            pause(self._local_clock, result)
        for survivor in result.left:
            logger.error("process %d (%s) is still there: %s", survivor.pid, survivor.name, survivor.why)


def _refuse_what_is_not_there(entrypoint: object, env: Mapping[str, str]) -> None:
    """Before any other node is waited for. Raises `UsageError`. (A module is the workers' Python's to find.)"""
    target, kind = entrypoint, None
    if isinstance(entrypoint, Entrypoint):
        target, kind = entrypoint.target, entrypoint.kind
    if callable(target) or kind is EntryKind.MODULE:
        return
    name = str(target)
    is_script = kind is EntryKind.SCRIPT or (kind is None and name.endswith(".py"))
    if any(os.path.exists(path) for path in ([name] if is_script else candidates(name, env))):
        return
    if not is_script and "/" not in name:
        raise UsageError(f"WorkerSpec: entrypoint={name!r}: no such command in PATH")
    raise UsageError(f"WorkerSpec: entrypoint={name!r} is not there (looked from {os.getcwd()})")
