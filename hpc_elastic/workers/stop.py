"""Signals to a worker group, and ending it, in small steps that an event loop can take.

SIGTERM goes to each rank's own process (`find_rank_processes`), which may be saving. What it has started gets SIGTERM
when it has ended, or shortly before the end of the grace. After the grace everything that is below the agent gets
SIGKILL, again and again, until nothing is left; as the agent is a subreaper, nothing can get out from below it. Its own
helpers (`excluding`, and anything in its own session) are not touched. Of a container only what is inside is signalled.

Which process of a worker's handles a signal is chosen by the kernel's masks of each. The worker that was started may be
a wrapper (``bash -c``, bubblewrap, a launcher) which a signal would end, while the script below it has a handler for
it. Or it is the client of a container's runtime, and the script is not even below it (`Inside`).
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from enum import Enum

from msgspec import Struct, field

from hpc_elastic.base.clock import Clock
from hpc_elastic.base.host_facts import kernel_fields
from hpc_elastic.errors import IllegalTransitionError
from hpc_elastic.workers import tree
from hpc_elastic.workers.spawn import ExitStatus, WorkerProcess, reap_orphans
from hpc_elastic.workers.tree import Delivery, Environ, Proc, TreeKiller

RUNTIME_SECONDS = 5.0
"""Time for a container's runtime to clean up, after the first SIGKILL to what is inside."""
INSIDE_VARIABLE = "HPC_ELASTIC_INSIDE"
"""The local rank, in a process that a container's runtime has started inside; the runtime itself does not have it."""


class Inside:
    """The processes inside the containers of a node's workers, and those of the runtime itself.

    podman's client and conmon report the script's end, and clean up after it; apptainer's starter waits for it. What
    these are sent ends the script's root under it, or they hand it on, so that the script gets it twice or not at all;
    and a process that the runtime prepares (``runc init``) becomes the script with the same pid: a signal before that
    is lost. So only what is inside is signalled: it has a mark in its environment.
    """

    def __init__(self, read: Callable[[Sequence[int]], Mapping[int, bytes]] = tree.read_environments) -> None:
        self._read = read
        self._known: dict[tuple[int, int], int] = {}
        self._scripts: dict[int, Proc] = {}

    def find(self, processes: Sequence[Proc]) -> dict[int, int]:
        """Map the pids inside, of living `processes`, parents first, to local ranks."""
        identities = {proc.pid: (proc.pid, proc.starttime) for proc in processes}
        self._known = {identity: self._known[identity] for identity in identities.values() if identity in self._known}
        environments = self._read([pid for pid, identity in identities.items() if identity not in self._known])
        found: dict[int, int] = {}
        for proc in processes:
            rank = self._known.get(identities[proc.pid], found.get(proc.ppid))
            mark = Environ(environments.get(proc.pid, b"")).get(INSIDE_VARIABLE) if rank is None else None
            if mark is not None and mark.isdecimal():
                rank = int(mark)
            if rank is not None:
                found[proc.pid] = self._known[identities[proc.pid]] = rank
        return found

    def scripts(self, processes: Sequence[Proc]) -> dict[int, Proc]:
        """The first process inside each container, by local rank. Arguments as of `find`."""
        found = self.find(processes)
        first: dict[int, Proc] = {}
        for proc in processes:
            if proc.pid in found and proc.ppid not in found:
                first.setdefault(found[proc.pid], proc)
        self._scripts |= first
        return first

    def has_ended(self, local_rank: int) -> bool:
        return local_rank in self._scripts and not tree.lives(self._scripts[local_rank])


class SignalMasks(Struct, frozen=True, kw_only=True):
    caught: int
    ignored: int
    blocked: int
    """Its main thread's: what it reads by ``sigwait`` or a signalfd is blocked."""
    inner_pid: int
    """Its pid as the process itself sees it, in its own pid namespace."""

    def catches(self, number: int) -> bool:
        return bool((self.caught | self.blocked) >> (number - 1) & 1)


def read_masks(pid: int) -> SignalMasks | None:
    try:
        fields = kernel_fields(f"/proc/{pid}/status")
        return SignalMasks(
            caught=int(fields["SigCgt"], 16),
            ignored=int(fields["SigIgn"], 16),
            blocked=int(fields["SigBlk"], 16),
            inner_pid=int(fields.get("NSpid", str(pid)).split()[-1]),
        )
    except (ValueError, LookupError):
        return None


def acts_on(number: int, pid: int) -> bool:
    """Tell whether the process `pid` catches or ignores a signal; True where that is not known."""
    known = read_masks(pid)
    return known is None or bool((known.caught | known.ignored) >> (number - 1) & 1)


def send_to_handler(pid: int, number: int, *, speaker: int) -> bool:
    root = tree.look_at(pid)
    if root is None or root.is_dead:
        return False
    below = tree.descendants(pid)
    masks = {proc.pid: known for proc in (root, *below) if (known := read_masks(proc.pid)) is not None}
    receivers = choose_receivers(root, below, masks, number=number, speaker=speaker)
    return Delivery.SENT in [tree.kill_safely(proc, number) for proc in receivers]


def choose_receivers(
    root: Proc, below: Sequence[Proc], masks: Mapping[int, SignalMasks], *, number: int, speaker: int
) -> list[Proc]:
    """Choose the processes of one worker to which a signal is sent that asks it to save. Pure.

    The root where it catches the signal; else the process that sends the heartbeats (`speaker`: its pid in its own
    namespace, 0 where none does); else on each branch the first process that does. Empty where no process catches it:
    the signal would end them. `below`: all below the root, parents first.
    """
    catching = {pid for pid, known in masks.items() if known.catches(number)}
    if root.pid in catching:
        return [root]
    catchers = [proc for proc in below if proc.pid in catching and not proc.is_dead]
    heard = [proc for proc in catchers if speaker > 0 and masks[proc.pid].inner_pid == speaker]
    if heard:
        return heard[:1]
    return _first_on_branches(below, {proc.pid for proc in catchers})


def choose_rank_processes(
    root: Proc, below: Sequence[Proc], masks: Mapping[int, SignalMasks], *, speaker: int, pythons: Collection[int]
) -> list[Proc]:
    """Choose the processes of one worker that get SIGTERM before what they have started does. Pure.

    The process that sends the heartbeats; else the root where it is one of the `pythons`; else on each branch the first
    one that is, or catches the signal. Beside it the root where that catches the signal, as a shell's trap does. Empty:
    none is known to be the script, and all get the signal at once.
    """
    catching = {pid for pid, known in masks.items() if known.catches(signal.SIGTERM)}
    if root.pid in catching & set(pythons):
        return [root]
    known = (proc for proc in (root, *below) if proc.pid in masks)
    first = [proc for proc in known if speaker > 0 and masks[proc.pid].inner_pid == speaker][:1]
    if not first:
        first = [root] if root.pid in pythons else _first_on_branches(below, catching | set(pythons))
    return [root, *first] if root.pid in catching and first else first


def find_rank_processes(root: Proc, below: Sequence[Proc], *, speaker: int) -> list[Proc]:
    masks = {proc.pid: known for proc in (root, *below) if (known := read_masks(proc.pid)) is not None}
    pythons = {proc.pid for proc in (root, *below) if is_python(proc.pid)}
    return choose_rank_processes(root, below, masks, speaker=speaker, pythons=pythons)


def is_python(pid: int) -> bool:
    try:
        return os.path.basename(os.readlink(f"/proc/{pid}/exe")).startswith("python")
    except OSError:
        return False


def _first_on_branches(below: Sequence[Proc], pids: Collection[int]) -> list[Proc]:
    first: list[Proc] = []
    covered: set[int] = set()
    for proc in below:
        if proc.ppid in covered:
            covered.add(proc.pid)
        elif proc.pid in pids and not proc.is_dead:
            first.append(proc)
            covered.add(proc.pid)
    return first


logger = logging.getLogger(__name__)

_KILL_BOUND_S = 5.0
ORPHAN_SECONDS = 5.0
"""Grace for what outlived a worker that had ended before."""
_MOST_ORPHANS = 8
_LAST_SHARE, _LAST_SECONDS = 0.1, 3.0
"""Before the grace ends: for what a rank that still runs has started."""
_FIRST_LOOK_S = 0.03
_LONGEST_LOOK_S = 0.5
_KILL_FIRST_LOOK_S = 0.002
_KILL_LONGEST_LOOK_S = 0.1
_ORPHAN_LOOKS = 100


class Survivor(Struct, frozen=True, kw_only=True):
    pid: int
    name: str
    state: str
    why: str


class Stopped(Struct, frozen=True, kw_only=True):
    exits: Mapping[int, ExitStatus]
    """Pid → exit. A worker in `left` has none, and was not released."""
    killed: int
    """Processes that SIGTERM did not end and SIGKILL was sent to."""
    left: tuple[Survivor, ...]
    """Processes to log, and to pass as `excluding` from now on: else the next stop waits for them again."""
    seconds: float
    orphans: tuple[str, ...] = ()
    """Name and pid of some that outlived a worker which had ended before, and were ended."""


class _Phase(Enum):
    NEW = "new"
    GRACE = "grace"
    KILL = "kill"
    DONE = "done"


class _Progress(Struct):
    phase: _Phase = _Phase.NEW
    began: float = 0.0
    deadline: float = 0.0
    next_look: float = 0.0
    interval: float = _FIRST_LOOK_S
    signalled: set[tuple[int, int]] = field(default_factory=set)
    held: dict[int, list[Proc]] = field(default_factory=dict)
    """Root of a worker → its rank's processes, which alone have got SIGTERM."""
    roots: set[tuple[int, int]] = field(default_factory=set)
    orphans: dict[int, str] = field(default_factory=dict)
    outlived: set[int] = field(default_factory=set)
    groups: set[int] = field(default_factory=set)
    """Process groups of which all members have got SIGTERM: what joins one later is the script's own way to end."""
    sent_kill: bool = False
    runtimes_until: float = 0.0
    killed: set[tuple[int, int]] = field(default_factory=set)
    refused: set[int] = field(default_factory=set)
    killer: TreeKiller = field(default_factory=TreeKiller)


class GroupStopper:
    """Call `begin` once, then `step` when it asks for it and whenever a process has ended. Main thread only."""

    def __init__(
        self,
        workers: Sequence[WorkerProcess],
        *,
        grace: float,
        clock: Clock,
        excluding: AbstractSet[int] = frozenset(),
        kill_bound: float = _KILL_BOUND_S,
        inside: Inside | None = None,
        speakers: Mapping[int, int] | None = None,
    ) -> None:
        """`workers`: those included that have ended already. `excluding`: pids that are left alone with all below them.

        `speakers`: pid of a worker, or of the first process in its container → pid, in its own namespace, of the
        process that sends its heartbeats. What still runs `kill_bound` seconds after SIGKILL is left.
        """
        self._workers = tuple(workers)
        self._grace = grace
        self._clock = clock
        self._excluding = frozenset(excluding)
        self._kill_bound = kill_bound
        self._inside = inside
        self._speakers = speakers or {}
        self._own_session = os.getsid(0)
        self._state = _Progress()

    def begin(self) -> None:
        """Send SIGTERM, and SIGCONT so that a stopped process gets it. The grace runs from now."""
        if self._state.phase is not _Phase.NEW:
            raise IllegalTransitionError(state=self._state.phase.value, event="begin")
        now = self._clock.monotonic()
        self._state = _Progress(
            phase=_Phase.GRACE, began=now, deadline=now + max(0.0, self._grace), next_look=now + _FIRST_LOOK_S
        )
        left = self._left_below()
        ended = {worker.pid: status for worker in self._workers if (status := worker.poll()) is not None}
        self._state.outlived = set(ended)
        for proc in left:  # most end at once by the signal, before the first look
            if (status := ended.get(proc.sid)) is not None and status.exitcode == 0:
                self._note_orphan(proc)
        if self._inside is not None:
            self._signal_inside(left, self._inside)
            return
        roots = {proc.pid: proc for proc in left}
        for worker in self._workers:
            root = roots.get(worker.pid)
            if root is None or not self._hold(root, left, self._speakers.get(worker.pid, 0)):
                worker.signal_group(signal.SIGTERM)
                worker.signal_group(signal.SIGCONT)
                self._state.groups.add(worker.pid)

    def _hold(self, root: Proc, left: Sequence[Proc], speaker: int) -> bool:
        first = find_rank_processes(root, tree.subtree({proc.pid: proc for proc in left}, (root.pid,)), speaker=speaker)
        for proc in first:
            tree.kill_safely(proc, signal.SIGTERM)
            tree.kill_safely(proc, signal.SIGCONT)
        if first:
            self._state.held[root.pid] = first
            self._state.signalled |= {(proc.pid, proc.starttime) for proc in first}
        return bool(first)

    def _release(self, now: float) -> None:
        for root, first in list(self._state.held.items()):
            if now >= self._release_at or not any(map(tree.lives, first)):
                del self._state.held[root]  # each that is left is a stray from now on

    @property
    def _release_at(self) -> float:
        grace = self._state.deadline - self._state.began
        return self._state.deadline - min(_LAST_SECONDS, _LAST_SHARE * grace)

    @property
    def sent_kill(self) -> bool:
        """SIGKILL was sent to workers: before, a worker that it ended was killed by another."""
        return self._state.sent_kill

    def kill_now(self) -> None:
        state = self._state
        if state.phase is _Phase.NEW:
            state.began = self._clock.monotonic()
        if state.phase in (_Phase.NEW, _Phase.GRACE):
            self._enter_kill(self._clock.monotonic())

    def shorten(self, grace: float) -> None:
        """Have the grace end at most `grace` seconds from now. It never gets longer; without effect once it is over."""
        state = self._state
        if state.phase is _Phase.NEW:
            self._grace = min(self._grace, grace)
        elif state.phase is _Phase.GRACE:
            state.deadline = min(state.deadline, self._clock.monotonic() + max(0.0, grace))

    def step(self) -> Stopped | float:
        state = self._state
        if state.phase in (_Phase.NEW, _Phase.DONE):
            raise IllegalTransitionError(state=state.phase.value, event="step")
        if not self._is_anything_left():
            return self._finish(())
        now = self._clock.monotonic()
        if state.phase is _Phase.GRACE and now >= state.deadline:
            self._enter_kill(now)
        if state.phase is _Phase.KILL and now >= state.deadline:
            return self._finish(self._survivors())
        if now >= state.next_look:
            left = self._left_below()
            self._release(now)
            if state.phase is _Phase.KILL:
                self._kill(left, now)
            elif self._inside is not None:
                self._signal_inside(left, self._inside)
            else:
                self._signal_strays(left)
            longest = _KILL_LONGEST_LOOK_S if state.phase is _Phase.KILL else _LONGEST_LOOK_S
            state.next_look = now + state.interval
            if state.held and now < self._release_at:
                state.next_look = min(state.next_look, self._release_at)
            state.interval = min(longest, state.interval * 1.5)
        return max(0.0, min(state.deadline, state.next_look) - now)

    def _is_anything_left(self) -> bool:
        ended = {worker.pid for worker in self._workers if worker.poll() is not None}
        known = self._excluding | {worker.pid for worker in self._workers}
        reap_orphans(known)
        # No child, no descendant (`tree.children`): the whole tree is looked at only where there is one.
        for pid in tree.children(os.getpid()):
            if pid in ended or pid in self._excluding:
                continue
            proc = tree.look_at(pid)
            if proc is not None and proc.sid != self._own_session:
                return True
        return False

    def _left_below(self) -> list[Proc]:
        below = tree.descendants(os.getpid(), excluding=self._excluding)
        return [proc for proc in below if not proc.is_dead and proc.sid != self._own_session]

    def _signal_strays(self, left: Sequence[Proc]) -> None:
        held, is_late = set(self._state.held), self._clock.monotonic() >= self._state.began + ORPHAN_SECONDS
        for proc in left:
            if proc.pid in held or proc.ppid in held:
                held.add(proc.pid)
                continue
            if proc.sid in self._state.outlived:
                self._note_orphan(proc)
                if is_late:
                    self._state.killed.add((proc.pid, proc.starttime))
                    tree.kill_safely(proc, signal.SIGKILL)
            identity = (proc.pid, proc.starttime)
            if proc.pgid not in self._state.groups and identity not in self._state.signalled:
                self._state.signalled.add(identity)
                tree.kill_safely(proc, signal.SIGTERM)
                tree.kill_safely(proc, signal.SIGCONT)

    def _note_orphan(self, proc: Proc) -> None:
        orphans = self._state.orphans
        if not orphans:
            logger.info("%s (pid %d) outlived its worker, and gets %g s", proc.name, proc.pid, ORPHAN_SECONDS)
        if proc.pid not in orphans and len(orphans) < _MOST_ORPHANS:
            orphans[proc.pid] = f"{proc.name} (pid {proc.pid})"

    def _signal_inside(self, left: Sequence[Proc], inside: Inside) -> None:
        found = inside.find(left)
        own = [proc for proc in left if proc.pid in found]
        for root in (proc for proc in own if proc.ppid not in found):
            identity = (root.pid, root.starttime)
            if identity not in self._state.roots:
                self._state.roots.add(identity)
                self._hold(root, own, self._speakers.get(root.pid, 0))
        self._signal_strays(own)
        self._state.groups |= {root.pgid for root in own if root.ppid not in found and root.pid not in self._state.held}

    def _enter_kill(self, now: float) -> None:
        state = self._state
        state.phase = _Phase.KILL
        state.sent_kill = True
        state.runtimes_until = now + RUNTIME_SECONDS if self._inside is not None else now
        state.deadline = state.runtimes_until + self._kill_bound
        state.interval = _KILL_FIRST_LOOK_S
        state.next_look = now

    def _kill(self, left: Sequence[Proc], now: float) -> None:
        spares = self._inside is not None and now < self._state.runtimes_until
        if self._inside is not None and spares:
            found = self._inside.find(left)
            left = [proc for proc in left if proc.pid in found]
        number = self._state.killer.next_signal(left)
        for worker in self._workers if not spares else ():
            worker.signal_group(number)  # whole groups at once: no fork slips through
        for proc in left:
            self._state.killed.add((proc.pid, proc.starttime))
            if tree.kill_safely(proc, number) is Delivery.REFUSED:
                self._state.refused.add(proc.pid)
        if not spares:
            self._signal_orphans(number)

    def _signal_orphans(self, number: signal.Signals) -> None:
        """SIGKILL what was forked after the look above. Such orphans are the agent's children, for which only the agent
        waits: their pids can't be reused meanwhile."""
        known: set[int] = set()
        for _ in range(_ORPHAN_LOOKS):
            new = set(tree.main_children(os.getpid()) or ()) - known - self._excluding
            if not new:
                return
            known |= new
            for pid in new:
                try:
                    if os.getsid(pid) != self._own_session:
                        os.kill(pid, number)
                except (ProcessLookupError, PermissionError):
                    continue

    def _survivors(self) -> tuple[Survivor, ...]:
        found = []
        for proc in self._left_below():
            if proc.pid in self._state.refused:
                why = "it belongs to another user"
            elif proc.state == "D":
                why = "it sits in an uninterruptible system call (a hung mount or device?)"
            else:
                why = "it did not end on SIGKILL"
            found.append(Survivor(pid=proc.pid, name=proc.name, state=proc.state, why=why))
        return tuple(found)

    def _finish(self, left: tuple[Survivor, ...]) -> Stopped:
        exits = {worker.pid: status for worker in self._workers if (status := worker.release()) is not None}
        self._state.phase = _Phase.DONE
        return Stopped(
            exits=exits,
            killed=len(self._state.killed),
            left=left,
            seconds=self._clock.monotonic() - self._state.began,
            orphans=tuple(self._state.orphans.values()),
        )
