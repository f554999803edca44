"""The guardian: a tiny process that ends what an agent leaves behind when it dies, by SIGKILL too.

It is forked when the agent starts, and waits at a socket whose other end only the agent has. At the end of file the
agent is dead: the guardian ends every process of the run's job here that carries the agent's tag, with all below them,
and removes the agent's node-local folder. At a clean end the agent writes to the socket, and the guardian just leaves.
The workers of an agent that is stopped (SIGSTOP) are ended too, once the others go on without it: then the guardian
writes to the socket first. A process that cleared its environment is found by the last snapshot of the children.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import NoReturn

from hpc_elastic.base.clock import Clock, Staleness, SystemClock, pause
from hpc_elastic.base.loop import wait_readable
from hpc_elastic.workers import linux, tree
from hpc_elastic.workers.stop import RUNTIME_SECONDS, Inside
from hpc_elastic.workers.tree import NODE_TAG_VARIABLE, TAG_VARIABLE, Environ, Proc, Tag, TreeKiller

GUARDIAN_NAME = "hpc-el-guardian"
_IGNORED = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGPIPE,
    signal.SIGTSTP,
)
_BOUND_S = 10.0
_STALE_BOUND_S = 5.0
_LOOK_S = 0.02
_LOOK_AT_AGENT_S = 3.0
_GUARDIANS_OWN_TIME_S = 1.0
_QUESTION_S = 1.0
_LEAVE = b"."
_ENDED = b"!"


class Guardian:
    """The agent's handle. `pid` belongs into every `excluding` of the agent's."""

    def __init__(self, *, pid: int, control_fd: int) -> None:
        self.pid = pid
        self._control_fd = control_fd

    def release(self, *, timeout: float = 1.0) -> bool:
        """Have it leave, with nothing ended and nothing removed. False: it has not gone in time, and still will."""
        if self._control_fd >= 0:
            with contextlib.suppress(OSError):  # it is gone: it was killed
                os.write(self._control_fd, _LEAVE)
            os.close(self._control_fd)
            self._control_fd = -1
        return _wait_for_child(self.pid, timeout) is not None

    def has_ended_workers(self) -> bool:
        """It has ended this agent's workers, since the agent was stopped, after the last such call."""
        try:
            return self._control_fd >= 0 and bool(os.read(self._control_fd, 64))
        except OSError:
            return False  # most often there is nothing to read


def start_guardian(
    tag: Tag,
    *,
    remove: Sequence[str] = (),
    stopped_limit: float | None = None,
    still_takes_part: Callable[[], bool] = lambda: False,
) -> Guardian:
    """Fork the guardian. Call it before the agent starts a thread or opens files: it is a copy of the agent as it is.

    Args:
        tag: What it ends when this process dies, however that happens.
        remove: Node-local folders of the agent's, removed with all that is in them at the same time.
        stopped_limit: When this process has been stopped (SIGSTOP) for so many seconds, the other nodes may have gone
            on without its workers, and these are ended. None: never.
        still_takes_part: Whether the others have not: then they are not ended. Asked in a process of its own, which may
            fail or hang.
    """
    if threading.active_count() > 1:
        raise RuntimeError(
            "start_guardian must come before the first thread: a fork copies the locks that threads hold"
        )
    agent = os.getpid()
    # Close-on-exec: a worker that held the agent's end would keep the guardian waiting.
    read_end, write_end = (end.detach() for end in socket.socketpair())
    os.set_blocking(write_end, False)
    if gc.isenabled():
        gc.collect()
    gc.freeze()  # keep the collector from touching, and so copying, every page that the two share
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        pid = os.fork()
        if pid == 0:
            _be_guardian(agent, read_end, tag, remove, stopped_limit, still_takes_part)
    except OSError:
        os.close(write_end)
        raise
    finally:
        os.close(read_end)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return Guardian(pid=pid, control_fd=write_end)


def _be_guardian(
    agent: int,
    read_end: int,
    tag: Tag,
    remove: Sequence[str],
    stopped_limit: float | None,
    still_takes_part: Callable[[], bool],
) -> NoReturn:
    try:
        gc.disable()
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, signal.SIG_IGN if number in _IGNORED else signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.setsid()
        os.chdir("/")
        with contextlib.suppress(OSError), open("/proc/self/comm", "w") as name:
            name.write(GUARDIAN_NAME)
        # Nothing of the agent's may stay open: srun waits for the end of file on stdout and stderr.
        high = os.dup(read_end) if read_end < 3 else read_end
        null = os.open("/dev/null", os.O_RDWR)
        for fd in range(3):
            os.dup2(null, fd)
        if high != 3:
            os.dup2(high, 3, inheritable=False)
        linux.close_from(4)
        children = ChildSnapshot(agent, leave_out=(os.getpid(),))
        if _agent_died(agent, 3, tag, stopped_limit, still_takes_part, children):
            end_tagged(tag, clock=SystemClock(), children=children)
            import shutil  # only here: it costs as much as all the rest

            for folder in remove:
                shutil.rmtree(folder, ignore_errors=True)
    finally:
        os._exit(0)


def _agent_died(
    agent: int,
    control: int,
    tag: Tag,
    stopped_limit: float | None,
    still_takes_part: Callable[[], bool],
    children: ChildSnapshot,
) -> bool:
    clock = SystemClock()
    longest = pause = _LOOK_AT_AGENT_S if stopped_limit is None else min(_LOOK_AT_AGENT_S, stopped_limit * 3 / 8)
    watch = StoppedWatch(limit=stopped_limit or float("inf"), longest_gap=2 * longest + 0.5)
    try:
        # The second way to see its death, should another process hold the pipe's other end by mistake.
        pidfd = linux.pidfd_open(agent)
    except OSError:
        return True
    if os.getppid() != agent:
        return True
    watched = [control, -1 if pidfd is None else pidfd]
    ended: frozenset[int] | None = None
    while not wait_readable(watched, pause):
        # A thread that a hung mount holds keeps a dead agent's descriptors open, and its pidfd quiet.
        proc = tree.look_at(agent)
        if proc is None or proc.is_dead:
            return True
        children.look()
        pause = longest / 4 if proc.state == _STOPPED else longest
        stays_stopped = watch.look(proc.state, clock.monotonic())
        stays_stopped = stays_stopped and (ended is not None or not _is_true(still_takes_part))
        if stays_stopped and ended != children.pids:  # once: a stopped agent starts no more
            with contextlib.suppress(OSError):  # it has just died
                os.write(control, _ENDED)
            end_tagged(tag, clock=clock, children=children, only_while=lambda: _is_stopped(agent))
        ended = children.pids if stays_stopped else None
    os.set_blocking(control, False)
    try:
        return os.read(control, 1) != _LEAVE
    except OSError:
        return True  # nothing is there; or it died before it read what was written to it


def _is_true(question: Callable[[], bool]) -> bool:
    """A process of its own finds so in time: a look at files may never return."""
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if question() else 1)
        finally:
            os._exit(1)
    status = _wait_for_child(pid, _QUESTION_S)
    if status is None:
        os.kill(pid, signal.SIGKILL)
    return status == 0


def _is_stopped(pid: int) -> bool:
    proc = tree.look_at(pid)
    return proc is not None and proc.state == _STOPPED


def end_tagged(
    tag: Tag,
    *,
    clock: Clock,
    bound: float = _BOUND_S,
    children: ChildSnapshot | None = None,
    only_while: Callable[[], bool] = lambda: True,
) -> list[Proc]:
    """`only_while` is asked after each look and before anything is ended: an agent that goes on has workers of its next
    round, which carry the same tag. Returns what still runs after `bound` seconds (D state).
    """
    inside = Inside()
    began_inside: float | None = None

    def is_own(proc: Proc, environ: Environ) -> bool:
        return tag.is_own_worker(environ, lambda: tree.cgroup_job(proc.pid))

    def find(elapsed: float) -> _Found:
        nonlocal began_inside
        marked = {proc.pid: proc for proc in tree.own_processes_where(is_own)}
        if children is not None:
            marked |= {proc.pid: proc for proc in children.remnants()}
        found = _with_descendants(list(marked.values()), protected={os.getpid()})
        if inner := inside.find(found):
            began_inside = elapsed if began_inside is None else began_inside
        if began_inside is None or elapsed - began_inside > RUNTIME_SECONDS:
            return found, []
        return [proc for proc in found if proc.pid in inner], [proc for proc in found if proc.pid not in inner]

    return _end_until_none(find, clock=clock, bound=bound, trust_first_look=False, only_while=only_while)


def kill_stale_processes(tag: Tag, *, clock: Clock, bound: float = _STALE_BOUND_S) -> list[Proc]:
    """Kill what earlier incarnations of this node's agent left running, a stopped or stuck agent itself included.

    A new agent calls it before it joins. Only processes of this run's own jobs on this node are touched, and neither
    this process, its ancestors nor its children. Returns what still runs after `bound` seconds (D state).
    """
    me = tree.look_at(os.getpid())
    born = (me.starttime, me.pid) if me is not None else (0, 0)

    def is_stale(proc: Proc, environ: Environ) -> bool:
        worker_tag = environ.get(TAG_VARIABLE)
        if worker_tag is not None:
            is_marked = tag.is_of_other_incarnation(worker_tag)
        else:
            # Of two agents that start at once the younger ends the older one, never the other way round.
            is_marked = environ.get(NODE_TAG_VARIABLE) == tag.node and (proc.starttime, proc.pid) < born
        return is_marked and tag.is_in_own_job(environ, lambda: tree.cgroup_job(proc.pid))

    def find(elapsed: float) -> _Found:
        marked = tree.own_processes_where(is_stale)
        if not marked:
            return [], []
        processes = tree.all_processes()
        protected = tree.ancestors(processes, os.getpid())
        protected |= {proc.pid for proc in tree.subtree(processes, (os.getpid(),))}
        strangers = _with_descendants(marked, protected=protected)
        # An old guardian clears up after its agent by itself, the agent's folder too; it gets a moment for that.
        waited_for = [p for p in strangers if p.name == GUARDIAN_NAME and elapsed < _GUARDIANS_OWN_TIME_S]
        return [p for p in strangers if p not in waited_for], waited_for

    return _end_until_none(find, clock=clock, bound=bound, trust_first_look=True)


_Found = tuple[list[Proc], list[Proc]]  # what to end, and what will end by itself


def _with_descendants(roots: Sequence[Proc], *, protected: AbstractSet[int]) -> list[Proc]:
    # A protected root's other descendants are left alone: they are our siblings.
    roots = [proc for proc in roots if proc.pid not in protected]
    if not roots:
        return []
    below = tree.subtree(tree.all_processes(), {proc.pid for proc in roots}, excluding=protected)
    return [proc for proc in (*roots, *below) if not proc.is_dead]


def _end_until_none(
    find: Callable[[float], _Found],
    *,
    clock: Clock,
    bound: float,
    trust_first_look: bool,
    only_while: Callable[[], bool] = lambda: True,
) -> list[Proc]:
    killer = TreeKiller()
    began = clock.monotonic()
    empty_looks = 1 if trust_first_look else 0
    while True:
        elapsed = clock.monotonic() - began
        doomed, waited_for = find(elapsed)
        if not only_while():
            return []
        if doomed or waited_for:
            empty_looks = 0
            if elapsed > bound:
                return doomed + waited_for
        else:
            # Two looks: a chain of short-lived parents can hide its end from one pass over the process table.
            empty_looks += 1
            if empty_looks >= 2:
                return []
        number = killer.next_signal(doomed)
        for proc in doomed:
            tree.kill_safely(proc, number)
        pause(clock, _LOOK_S)


def _wait_for_child(pid: int, timeout: float) -> int | None:
    try:
        pidfd = linux.pidfd_open(pid)
    except OSError:
        pidfd = None
    try:
        wait_readable([-1 if pidfd is None else pidfd], timeout)  # without a pidfd just the wait: a kernel before 5.3
        ended, status = os.waitpid(pid, os.WNOHANG)
        return status if ended == pid else None
    except ChildProcessError:
        return 0
    finally:
        if pidfd is not None:
            os.close(pidfd)


class ChildSnapshot:
    """A process that has cleared its environment was in a worker's session, or had become the agent's own child."""

    def __init__(self, agent: int, *, leave_out: Iterable[int] = ()) -> None:
        self._agent = agent
        self._leave_out = frozenset(leave_out)
        own = tree.look_at(agent)
        self._own_session = own.sid if own is not None else -1
        self._children: dict[int, Proc] = {}

    def look(self) -> None:
        pids = tree.main_children(self._agent)
        if pids is None:
            return  # it is dying, or this kernel has no such file
        seen: dict[int, Proc] = {}
        for pid in pids:
            known = self._children.get(pid)
            if known is None and pid not in self._leave_out:
                known = tree.look_at(pid)
            # In the agent's own session are commands that it runs itself; a fork that is no session's yet, too.
            if known is not None and known.sid != self._own_session:
                seen[pid] = known
        self._children = seen

    @property
    def pids(self) -> frozenset[int]:
        """The children at the last look, ended ones included."""
        return frozenset(self._children)

    def remnants(self) -> list[Proc]:
        """A pid or session that has got another meaning since is not taken for one."""
        # In a session of a child's own can be none but its descendants.
        leaders = {child.sid: child.starttime for child in self._children.values() if child.sid == child.pid}
        known = {(child.pid, child.starttime) for child in self._children.values()}
        processes = tree.all_processes()
        found = []
        for proc in processes.values():
            if proc.is_dead or proc.pid in self._leave_out:
                continue
            began = leaders.get(proc.sid)
            leader = processes.get(proc.sid)
            is_member = began is not None and proc.starttime >= began and (leader is None or leader.starttime == began)
            if is_member or (proc.pid, proc.starttime) in known:
                found.append(proc)
        return found


_STOPPED = "T"


class StoppedWatch:
    """Sees that an agent stays stopped: the others go on, and its workers must not run beside theirs. Pure."""

    def __init__(self, *, limit: float, longest_gap: float) -> None:
        """`limit`: seconds. After more than `longest_gap` between two looks the guardian was stopped itself (the whole
        job was suspended): that time does not count."""
        self._limit = limit
        self._is_stopped = Staleness[str](longest_gap=longest_gap)

    def look(self, state: str, now: float) -> bool:
        """Take a look in, by ps' state (a debugger's ``t`` does not count); True: its workers are to be ended."""
        is_stopped = state == _STOPPED
        return self._is_stopped.observe("agent", is_stopped, now) >= self._limit and is_stopped
