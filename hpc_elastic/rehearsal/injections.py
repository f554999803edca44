"""Does faults to a run, and undoes those that last."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from msgspec import Struct, field

from hpc_elastic.rehearsal.faults import NATURES, Fault, Kind, Need
from hpc_elastic.rehearsal.injector import Injector, NotNow
from hpc_elastic.rehearsal.journal import Place
from hpc_elastic.rehearsal.live_run import PLANT_SIGNAL, LiveRun
from hpc_elastic.rehearsal.members import Worker
from hpc_elastic.rehearsal.remote_injector import RemoteInjector
from hpc_elastic.workers.tree import node_key

SAVE_SECONDS = 60.0
"""How long a save is waited for that a fault is to interrupt."""
LATE_SECONDS = 2.0
"""How long the others may go on without the rank that is held up."""
SMALL_DISK = 1 << 30


class Injection(Struct, kw_only=True):
    """A fault that was done. Times in seconds by this machine's wall clock."""

    fault: Fault
    at: float
    before: Place
    """The round that trained."""
    what: str = ""
    """What it hit."""
    undo_at: float | None = None
    """When what lasts is to be undone; None: nothing is."""
    keep_up: Callable[[], None] = field(default=lambda: None)
    """Called again and again until then."""
    undo: Callable[[], None] = field(default=lambda: None)
    killed_at_end: bool = False
    """The end that a notice announces is still to come."""


_SIGNALS = {
    Kind.WORKER_KILLED: signal.SIGKILL,
    Kind.WORKER_SEGFAULT: signal.SIGSEGV,
    Kind.WORKER_HANG: signal.SIGSTOP,
    Kind.WORKER_EXCEPTION: PLANT_SIGNAL,
}


def send(
    kind: Kind, worker: Worker, injector: Injector | RemoteInjector, *, agents: Mapping[int, int], cluster: str
) -> str:
    """Do a fault that is a signal to processes of one machine. Returns what it hit.

    Args:
        kind: Which.
        worker: The one that it hits, or whose node or agent.
        injector: Reaches that machine.
        agents: Node → the process of its agent.
        cluster: The run's.

    Raises:
        NotNow: There is nothing to hit.
    """
    if kind is Kind.NODE_KILLED:
        injector.signal_node(node_key(cluster, worker.node), signal.SIGKILL)
        return worker.host
    if kind is Kind.AGENT_KILLED:
        if worker.node not in agents:
            raise NotNow(f"the agent on {worker.host} is gone")
        injector.signal(agents[worker.node], signal.SIGKILL)
        return f"agent on {worker.host}"
    injector.signal(worker.pid, _SIGNALS[kind])
    return f"rank {worker.rank} on {worker.host}"


class RunInjector:
    """What does faults to one run that this process has started."""

    def __init__(self, run: LiveRun) -> None:
        self._run = run
        self._does: dict[Kind, Callable[[Injection], None]] = {
            Kind.SAVING_KILLED: self._kill_while_saving,
            Kind.LATE_RANK: self._kill_late,
            Kind.TIME_LIMIT: lambda injection: self._announce(injection, self._run.notice),
            Kind.PREEMPTION: lambda injection: self._announce(injection, self._run.preempt),
            Kind.REQUEUE: lambda injection: self._run.restart(),
            Kind.DISK_FULL: self._fill_disk,
        }

    def missing(self, kind: Kind) -> Need | None:
        """What a fault needs that this run has not."""
        spec = self._run.spec
        lacks = {
            Need.SECOND_NODE: spec.max_nodes + spec.spares < 2,
            Need.SECOND_RANK: len(self._run.members.workers()) < 2 or not self._sees_files,
            Need.SAVES: not self._sees_files,
            Need.SMALL_DISK: _free(str(self._run.paths.root)) > SMALL_DISK,
            Need.CLUSTER_ROOT: True,
        }
        return next((need for need in NATURES[kind].needs if lacks.get(need)), None)

    @property
    def _sees_files(self) -> bool:
        return any(injector.sees_files for injector in self._run.injectors())

    def do(self, fault: Fault, before: Place) -> Injection:
        """Do it now.

        Raises:
            NotNow: The run is not as the fault needs it.
        """
        injection = Injection(fault=fault, at=time.time(), before=before)
        does = self._does.get(fault.kind)
        if does is not None:
            does(injection)
            return injection
        workers = self._run.members.workers()
        if not workers:
            raise NotNow("no worker runs")
        worker = workers[int(fault.pick * len(workers))]
        injector = self._run.injector_of(worker.node)
        injection.at = time.time()
        injection.what = send(
            fault.kind, worker, injector, agents=self._run.members.agents(), cluster=self._run.spec.cluster
        )
        return injection

    def end_announced(self, injection: Injection) -> None:
        """What a notice has announced: the job ends, and begins again; where it has not done so by itself."""
        if not self._run.is_in_attempt(injection.before[0]):
            return
        try:
            self._run.restart()
        except NotNow:
            pass  # it has just ended

    def _announce(self, injection: Injection, notice: Callable[[], None]) -> None:
        notice()
        injection.undo_at = time.time() + self._run.spec.signal_grace
        injection.killed_at_end = True

    def _fill_disk(self, injection: Injection) -> None:
        path = self._run.paths.root.parent / ".rehearsal-fills-the-disk"
        take_all_space(path)
        injection.undo_at = time.time() + injection.fault.seconds
        injection.keep_up = lambda: take_all_space(path)
        injection.undo = lambda: path.unlink(missing_ok=True)
        injection.what = str(path.parent)

    # -- while a checkpoint is written -----------------------------------------------------------------------------

    def _kill_while_saving(self, injection: Injection) -> None:
        saved = self._wait_save(SAVE_SECONDS)
        if saved is None:
            raise NotNow(Need.SAVES.value)
        injector, path = saved
        torn = injector.tear()
        injection.at = time.time()
        self._kill_workers()
        injection.what = torn or f"after {path.name}"

    def _kill_late(self, injection: Injection) -> None:
        workers = self._run.members.workers()
        if len(workers) < 2:
            raise NotNow(Need.SECOND_RANK.value)
        late = workers[1 + int(injection.fault.pick * (len(workers) - 1))]
        injector = self._run.injector_of(late.node)
        injector.signal(late.pid, signal.SIGSTOP)
        saved = self._wait_save(LATE_SECONDS)
        if saved is None:
            # The ranks meet in every step, and none saves without it: so just before the last file of the next save.
            injector.signal(late.pid, signal.SIGCONT)
            self._kill_while_saving(injection)
            injection.what = f"nothing was saved without rank {late.rank}, so in the next save: {injection.what}"
            return
        time.sleep(0.1)  # the others complete what they save without it
        injection.at = time.time()
        self._kill_workers()
        injection.what = f"rank {late.rank} held up; the others had written {saved[1].name}"

    def _kill_workers(self) -> None:
        for injector in self._run.injectors():
            try:
                injector.signal_workers(signal.SIGKILL)
            except NotNow:
                pass  # its node is gone; the others' workers are hit

    def _wait_save(self, seconds: float) -> tuple[Injector | RemoteInjector, Path] | None:
        """Where the next save was seen first, and its file; None where none comes."""
        self._run.read()
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self._run.wait(min(left, 0.2))
            for injector in self._run.injectors():
                saves = [event.path for event in self._run.read_files(injector) if event.is_save]
                if saves:
                    return injector, saves[-1]
            if self._run.poll() is not None:
                break
        return None


def take_all_space(path: Path) -> None:
    """Have this file take what is free on its filesystem, to the last block.

    Again and again while the disk is to be full: a script that begins a file anew gives its blocks back, and on a disk
    of many users others take them before it writes.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        most, block = 1 << 26, os.fstatvfs(fd).f_frsize
        while (size := min(_free(str(path)), most)) >= block:
            try:
                os.posix_fallocate(fd, os.fstat(fd).st_size, size)
            except OSError:
                most = size // 2  # not all that is free can be had: others write too, and a tmpfs gives all or nothing
    finally:
        os.close(fd)


def _free(path: str) -> int:
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize
