"""An agent as a child of this process, started so that no filesystem can hold up who starts it.

`subprocess` waits until the child has closed what it inherited, and a file on a mount that hangs is never closed. So
this is `os.posix_spawn`, which waits for the program to be loaded, and no longer: descriptors are closed by the kernel
afterwards (all of Python's are close-on-exec).

Agents as processes on this machine: the same agents, store and supervisor, without Slurm.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence

from hpc_elastic.base.waking import wait_readable
from hpc_elastic.launch.site import AgentEnded
from hpc_elastic.workers import tree
from hpc_elastic.workers.tags import JOB_VARIABLE, NODE_TAG_VARIABLE


class AgentProcess:
    """One agent. For the main thread: it ends when the thread that started it does (``--launcher-pid``)."""

    def __init__(self, argv: Sequence[str], *, env: Mapping[str, str], umask: int) -> None:
        """Start it, as the leader of a session of its own, with no input.

        Args:
            argv: Its command, with the program's whole path.
            env: Its whole environment.
            umask: Its own.

        Raises:
            OSError: it could not be started.
        """
        own = os.umask(umask)
        try:
            self.pid = os.posix_spawn(
                argv[0],
                list(argv),
                dict(env),
                file_actions=[(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0), *_closing()],
                setsid=True,
                setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],  # which Python ignores for itself
            )
        finally:
            os.umask(own)
        self._code: int | None = None

    def poll(self) -> int | None:
        """How it ended, as `subprocess` has it; None while it runs."""
        if self._code is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # somebody else waited for it: an unknown end never passes for success
                self._code = 255
                return self._code
            if pid == self.pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def send_signal(self, number: signal.Signals) -> None:
        """Nothing happens where it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


def _closing() -> list[tuple[int, int]]:
    """What this process was itself started with, beyond the standard streams, and would hand on."""
    actions = []
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        try:
            if fd > 2 and os.get_inheritable(fd):
                actions.append((os.POSIX_SPAWN_CLOSE, fd))
        except OSError:
            pass  # the listing's own
    return actions


logger = logging.getLogger(__name__)

HUNG_DEAD_SECONDS = 0.5
"""An agent that has ended but for a thread that a mount holds counts as ended after that."""
HUNG_LOOK_SECONDS = 1.0
"""Between two looks for such agents: no event tells of them."""
KILL_SECONDS = 5.0
"""How long what was sent SIGKILL may take to be gone (D state)."""
LOOK_SECONDS = 0.02

AgentCommand = Callable[[int], Sequence[str]]
"""Node index → the agent's argument list."""


class LocalLauncher:
    """One process per node, each in a session of its own: a terminal's Ctrl-C reaches the supervisor alone.

    For the main thread: an agent ends when the thread that started it does (``--launcher-pid``).
    """

    def __init__(
        self, nodes: int, command: AgentCommand, *, environment: Callable[[int], Mapping[str, str]], umask: int
    ) -> None:
        """Args:
        nodes: How many agents.
        command: What to run for a node.
        environment: The agent's whole environment.
        umask: The user's, which the agent hands on to the workers.
        """
        self._nodes = nodes
        self._command = command
        self._environment = environment
        self._umask = umask
        self._agents: dict[int, tuple[int, AgentProcess]] = {}
        """pidfd → node, process."""
        self._failed: list[AgentEnded] = []
        self._dead_since: dict[int, float] = {}
        self._has_killed = False
        self._looked_at = time.monotonic()

    def launch(self) -> None:
        for node in range(self._nodes):
            self.relaunch(node)

    @property
    def hears_all_ends(self) -> bool:
        return True  # they are our children

    def relaunch(self, node: int) -> None:
        try:
            process = AgentProcess(self._command(node), env=self._environment(node), umask=self._umask)
        except OSError as error:
            self._failed.append(AgentEnded(node=node, code=None, detail=str(error), started=False))
            return
        self._agents[os.pidfd_open(process.pid)] = (node, process)

    def filenos(self) -> list[int]:
        return list(self._agents)

    def due(self) -> float | None:
        if self._failed:
            return self._looked_at
        dead = [since + HUNG_DEAD_SECONDS for since in self._dead_since.values()]
        return min([self._looked_at + HUNG_LOOK_SECONDS, *dead]) if self._agents else None

    def take(self) -> list[AgentEnded]:
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
            ended.append(AgentEnded(node=node, code=code, detail=describe_code(code)))
        return ended

    def _is_hung_dead(self, pid: int) -> bool:
        """Whether an agent has ended but for a thread that a mount holds: the kernel lets nobody wait for it then."""
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
        """Until the guardians of killed agents have done their work: who waits for us expects nothing to be left."""
        marks = {self._environment(node).get(NODE_TAG_VARIABLE) for node in range(self._nodes)} - {None}
        job = self._environment(0).get(JOB_VARIABLE)  # a job that a worker submitted may carry the mark, too
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


def describe_code(code: int | None) -> str:
    """``exit code 3``, ``SIGKILL``, or ``unknown``."""
    if code is None:
        return "unknown"
    if code < 0:
        try:
            return signal.Signals(-code).name
        except ValueError:
            return f"signal {-code}"
    return f"exit code {code}"
