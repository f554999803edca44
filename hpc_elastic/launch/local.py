"""``--cluster local``: the whole run on this machine, requeues included. The same agents, store and supervisor.

A thread that waits for a dead mount can keep its process, and the shell that waits for it, in the kernel's table. So
the supervisor runs in a child (`run_behind_front`): the front touches no file, so it can always end.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from hpc_elastic.base.clock import RunClock
from hpc_elastic.base.loop import wait_readable
from hpc_elastic.launch.agents import AgentEnd, agent_command, describe_code, node_mark
from hpc_elastic.launch.requeue import NextAttempt, RequeueAction, Requeued
from hpc_elastic.launch.run_attempt import load_run, log_to_stdout, run_attempt
from hpc_elastic.launch.site import JobCondition, Site, SlurmAnswer, attempt_facts
from hpc_elastic.run.paths import AttemptInfo, RunPaths
from hpc_elastic.run.spec import RunSpec
from hpc_elastic.workers import linux, tree
from hpc_elastic.workers.linux import SignalQueue, leave_hung_threads, output_pipes
from hpc_elastic.workers.tree import JOB_VARIABLE, NODE_TAG_VARIABLE

RELAYED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
UNREADY_SECONDS = 4.0
"""Time for a child that supervises no run yet to end after a signal: it only reads and makes files."""
LAST_SECONDS = 1.0
"""Time for the child to be gone after it has reported the run's end."""
_LOOK_SECONDS = 2.0
"""Interval of looks at the child: no event reports that it ended but for a thread that a mount holds."""
_LOOK_CLOSELY_SECONDS = 0.5
_READY = b"r"


def run_behind_front(work: Callable[[Callable[[], None]], int], *, what: str) -> int:
    """Run `work` in a child of this process; before the first thread starts. Returns the exit code, when it is over.

    Args:
        work: Called in the child with a function to call once it handles signals itself; returns the exit code. Its
            exceptions come out of this call, in the child.
        what: The files that it begins with, for the message where they do not answer.
    """
    pipes = output_pipes()
    read_end, write_end = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    front = os.getpid()
    signal.pthread_sigmask(signal.SIG_BLOCK, RELAYED)  # none is lost between the fork and the handlers
    child = os.fork()
    if child == 0:
        os.close(read_end)
        os.setpgid(0, 0)  # the terminal's Ctrl-C reaches the front alone, which hands it on
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        linux.set_parent_death_signal(signal.SIGHUP)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, RELAYED)
        if os.getppid() != front:
            return 128 + signal.SIGHUP
        code = work(lambda: _write(write_end, _READY))
        sys.stdout.flush()
        _write(write_end, b"%d\n" % code)
        leave_hung_threads(code, pipes)
    os.close(write_end)
    # Close files while their filesystem answers: the kernel asks it too when it closes them at a process' end.
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for fd in {0, 1, 2} - set(pipes):
        os.dup2(null, fd)
    os.close(null)
    return _Front(child, read_end, what).wait()


def _write(fd: int, message: bytes) -> None:
    with suppress(OSError):  # the front was killed
        os.write(fd, message)


class _Front:
    def __init__(self, child: int, pipe: int, what: str) -> None:
        self._child = child
        self._pipe = pipe
        self._what = what
        self._is_ready = False
        self._code: int | None = None
        self._asked: tuple[float, signal.Signals] | None = None
        self._interrupts = 0
        self._dead_since: float | None = None
        self._signals = SignalQueue([*linux.not_ignored(RELAYED), signal.SIGCHLD])

    def wait(self) -> int:
        while True:
            if (status := self._status()) is not None:
                return status
            watched = [self._signals.fileno(), *([self._pipe] if self._pipe >= 0 else [])]
            ready = wait_readable(watched, self._patience())
            for number in self._signals.take():
                if number is signal.SIGCHLD:
                    continue
                with suppress(ProcessLookupError):
                    linux.relay_signal(self._child, number, sender=self._signals.sender_pid(number))
                if number in _ENDING and self._asked is None:
                    self._asked = (time.monotonic(), number)
                self._interrupts += number is signal.SIGINT
            if self._pipe in ready:
                self._hear()

    def _patience(self) -> float:
        found = _LOOK_SECONDS if self._asked is None else _LOOK_CLOSELY_SECONDS
        if self._dead_since is not None:
            found = min(found, self._dead_since + LAST_SECONDS - time.monotonic())
        if self._asked is not None and not self._is_ready:
            found = min(found, self._asked[0] + UNREADY_SECONDS - time.monotonic())
        return max(0.0, found)

    def _hear(self) -> None:
        message = os.read(self._pipe, 64)
        if not message:
            os.close(self._pipe)
            self._pipe = -1
            return
        self._is_ready = True
        code = message.removeprefix(_READY).strip()
        if code.isdigit():
            self._code = int(code)
            self._dead_since = time.monotonic()

    def _status(self) -> int | None:
        pid, status = os.waitpid(self._child, os.WNOHANG)
        if pid == self._child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
        now = time.monotonic()
        if self._asked is not None and not self._is_ready and now - self._asked[0] >= UNREADY_SECONDS:
            self._print(f"{self._what} does not answer; nothing was started")
            os.kill(self._child, signal.SIGKILL)
            return 128 + self._asked[1]
        if self._interrupts > 2:
            self._print("third Ctrl-C: not waiting any longer; the agents end by themselves")
            os.kill(self._child, signal.SIGKILL)
            return 128 + signal.SIGINT
        if self._code is None:
            proc = tree.look_at(self._child)
            if proc is not None and not proc.is_dead:
                self._dead_since = None
                return None
        self._dead_since = self._dead_since or now
        if now - self._dead_since < LAST_SECONDS:
            return None
        return self._code if self._code is not None else 1

    def _print(self, text: str) -> None:
        os.write(2, f"hpc-elastic: {text}\n".encode("utf-8", "surrogateescape"))


logger = logging.getLogger(__name__)

HUNG_DEAD_SECONDS = 0.5
"""An agent that ended, but for a thread that a mount holds, counts as ended after this."""
HUNG_LOOK_SECONDS = 1.0
KILL_SECONDS = 5.0
LOOK_SECONDS = 0.02


class AgentProcess:
    """One agent as a child of this process, in a session of its own. For the main thread (``--launcher-pid``).

    `subprocess` waits until the child has closed what it inherited, and a file on a mount that hangs is never closed.
    `os.posix_spawn` waits only for the program to be loaded: the kernel closes Python's descriptors afterwards.
    """

    def __init__(self, argv: Sequence[str], *, env: Mapping[str, str], umask: int) -> None:
        own = os.umask(umask)
        try:
            self.pid = os.posix_spawn(
                argv[0],
                list(argv),
                dict(env),
                file_actions=[(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0), *_closing()],
                setsid=True,
                setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],  # which Python ignores for itself
                setsigmask=(),
            )
        finally:
            os.umask(own)
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # another thread waited for it: an unknown end never passes for success
                self._code = 255
                return self._code
            if pid == self.pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def _closing() -> list[tuple[int, int]]:
    actions = []
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        with suppress(OSError):  # the listing's own is closed by now
            if fd > 2 and os.get_inheritable(fd):
                actions.append((os.POSIX_SPAWN_CLOSE, fd))
    return actions


class LocalLauncher:
    hears_all_ends = True  # they are our children

    def __init__(self, starts: Sequence[tuple[Sequence[str], Mapping[str, str]]], *, umask: int) -> None:
        """`starts`: for each node the agent's command, by the program's whole path, and environment."""
        self._starts = starts
        self._umask = umask
        self._agents: dict[int, tuple[int, AgentProcess]] = {}
        self._failed: list[AgentEnd] = []
        self.unlaunched: Mapping[int, str] = {}
        self._dead_since: dict[int, float] = {}
        self._has_killed = False
        self._looked_at = time.monotonic()

    def launch(self) -> None:
        for node in range(len(self._starts)):
            self.relaunch(node)

    def relaunch(self, node: int) -> None:
        argv, env = self._starts[node]
        try:
            process = AgentProcess(argv, env=env, umask=self._umask)
        except OSError as error:
            self._failed.append(AgentEnd(node=node, code=None, detail=str(error), started=False))
            return
        self._agents[os.pidfd_open(process.pid)] = (node, process)

    def filenos(self) -> list[int]:
        return list(self._agents)

    def due(self) -> float | None:
        if self._failed:
            return self._looked_at
        dead = [since + HUNG_DEAD_SECONDS for since in self._dead_since.values()]
        return min([self._looked_at + HUNG_LOOK_SECONDS, *dead]) if self._agents else None

    def take(self) -> list[AgentEnd]:
        ended, self._failed = self._failed, []
        self._looked_at = time.monotonic()
        for fd in list(self._agents):
            node, process = self._agents[fd]
            code = process.poll()
            if code is None and not self._is_hung_dead(process.pid):
                continue
            os.close(fd)
            del self._agents[fd]
            self._dead_since.pop(process.pid, None)
            ended.append(AgentEnd(node=node, code=code, detail=describe_code(code)))
        return ended

    def _is_hung_dead(self, pid: int) -> bool:
        proc = tree.look_at(pid)
        if proc is None or not (proc.is_dead or (self._has_killed and proc.state == "D")):
            self._dead_since.pop(pid, None)
            return False
        return time.monotonic() - self._dead_since.setdefault(pid, time.monotonic()) >= HUNG_DEAD_SECONDS

    def last_message(self, node: int) -> str:
        return ""  # agents print where this process does

    def running(self) -> bool:
        return bool(self._agents)

    def terminate(self) -> None:
        for _, process in self._agents.values():
            process.send_signal(signal.SIGTERM)

    def end(self, *, within: float) -> None:
        if self._agents:
            self.terminate()
            self._wait_all(within)
            for _, process in self._agents.values():
                process.send_signal(signal.SIGKILL)  # its guardian ends what it leaves
            self._has_killed = True
            self._wait_all(KILL_SECONDS)
        self._wait_for_leftovers(KILL_SECONDS)

    def _wait_for_leftovers(self, seconds: float) -> None:
        marks = {env.get(NODE_TAG_VARIABLE) for _, env in self._starts} - {None}
        job = self._starts[0][1].get(JOB_VARIABLE)  # a job that a worker submitted may carry the mark, too
        began = time.monotonic()
        while left := tree.own_processes_where(
            lambda _, environ: environ.get(NODE_TAG_VARIABLE) in marks and environ.get(JOB_VARIABLE) == job
        ):
            waited = time.monotonic() - began
            if waited > seconds or (waited > HUNG_DEAD_SECONDS and all(proc.state == "D" for proc in left)):
                for proc in left:
                    why = " (a mount that hangs holds it)" if proc.state == "D" else ""
                    logger.error("process %d (%s) of this run is still there%s", proc.pid, proc.name, why)
                return
            time.sleep(LOOK_SECONDS)

    def _wait_all(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._agents and (left := deadline - time.monotonic()) > 0:
            wait_readable(self._agents, min(left, 0.1))
            self.take()


class LocalSite(Site):
    def __init__(
        self, env: Mapping[str, str], *, umask: int, limit_is_near: Callable[[], bool] = lambda: False
    ) -> None:
        self._env = dict(env)
        self.umask = umask
        self._limit_is_near = limit_is_near

    def facts(self, spec: RunSpec) -> AttemptInfo:
        armed = spec.requeue and spec.max_requeues > 0
        return attempt_facts(
            cluster="local",
            nodes=tuple(f"node{index}" for index in range(spec.max_nodes + spec.spares)),
            requeue_armed=armed,
            requeue_reason="" if armed else "--no-requeue or --max-requeues 0 was given",
        )

    def launcher(self, spec: RunSpec, paths: RunPaths, attempt: AttemptInfo) -> LocalLauncher:
        pid = str(os.getpid())
        starts = [
            (
                agent_command(paths, attempt.number, "--node", str(node), "--launcher-pid", pid),
                {**self._env, NODE_TAG_VARIABLE: node_mark(spec, "local", node)},
            )
            for node in range(len(attempt.nodes))
        ]
        return LocalLauncher(starts, umask=self.umask)

    def ask(self, *, near: float) -> SlurmAnswer:
        # A look without a notice (near 0) finds nothing: this machine ends no job by itself.
        is_near = near > 0 and self._limit_is_near()
        return SlurmAnswer(JobCondition.NEAR_LIMIT if is_near else JobCondition.NO_SLURM)

    def requeue(self, plan: NextAttempt) -> Requeued:
        return Requeued(summary="the next attempt starts at once")


def run_local(
    run_dir: Path,
    *,
    ready: Callable[[], None] = lambda: None,
    limit_is_near: Callable[[], bool] = lambda: False,
) -> int:
    """Run to the end, through requeues. Returns the run's exit code. Raises UsageError.

    Args:
        ready: Called once no signal is lost on a filesystem that hangs.
        limit_is_near: Whether a notice of now means that the attempt is out of time.
    """
    umask = os.umask(0o077)
    signals = SignalQueue([signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2, signal.SIGCHLD])
    close_output = log_to_stdout()
    paths, spec = load_run(run_dir)
    ready()
    site = LocalSite(os.environ, umask=umask, limit_is_near=limit_is_near)
    while True:
        decision = run_attempt(paths, spec, site, clock=RunClock(), signals=signals)
        if decision.action is not RequeueAction.REQUEUE:
            break
    close_output()
    return decision.exit_code


def main() -> NoReturn:
    """``RUN_DIR``: supervise a run that another process has made: its next attempt, and those after it."""
    sys.exit(run_local(Path(sys.argv[1])))
