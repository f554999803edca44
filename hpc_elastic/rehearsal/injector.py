"""Reaches the processes of a run on one machine: signals them, and sees which files they write."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from pathlib import Path

from hpc_elastic.base.waking import wait_readable
from hpc_elastic.rehearsal.saves import FileEvent, SaveWatch, WrittenNames
from hpc_elastic.workers import tree
from hpc_elastic.workers.tree import NODE_TAG_VARIABLE, TAG_VARIABLE, Environ, Proc

_BETWEEN_FILES_SECONDS = 0.2
"""After this time without more of it, a save is over."""
_SAVE_SECONDS = 3.0
_STOP_SECONDS = 1.0


class NotNow(Exception):
    """The fault can't be done to the run as it is; why."""


class Injector:
    """On the machine where the processes are; elsewhere a `RemoteInjector` does the same. For one thread."""

    def __init__(self, uid: str, folders: Sequence[Path], names: WrittenNames) -> None:
        """Args:
        uid: The run's.
        folders: In which it saves.
        names: What is known of the files that the script writes.
        """
        self._mark = f"{uid}:"
        self._watch: SaveWatch | None = None
        try:
            self._watch = SaveWatch(folders, names)
        except OSError:
            pass  # the kernel watches no more: faults that need it are left out
        self._unread: list[FileEvent] = []

    @property
    def sees_files(self) -> bool:
        return self._watch is not None

    def filenos(self) -> list[int]:
        """Readable when there is something to read."""
        return [] if self._watch is None else [self._watch.fd]

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def read_files(self) -> list[FileEvent]:
        """What was done to files since the last call, in its order. Of what was read only what had been saved."""
        self._look()
        found, self._unread = self._unread, []
        return found

    def _look(self) -> None:
        if self._watch is not None:
            self._unread += self._watch.read()

    # -- its processes ---------------------------------------------------------------------------------------------

    def of_node(self, key: str) -> list[Proc]:
        """All processes of a node (`tree.node_key`): its agent, what guards it, its workers."""
        mark = f"{self._mark}{key}"
        return tree.own_processes_where(
            lambda _, environ: (
                environ.get(NODE_TAG_VARIABLE) == mark or (environ.get(TAG_VARIABLE) or "").startswith(f"{mark}:")
            )
        )

    def all(self) -> list[Proc]:
        """All processes of the run but its supervisor."""
        return tree.own_processes_where(lambda _, environ: self._is_of_run(environ))

    def _is_of_run(self, environ: Environ) -> bool:
        return any((environ.get(name) or "").startswith(self._mark) for name in (NODE_TAG_VARIABLE, TAG_VARIABLE))

    def of_workers(self) -> list[Proc]:
        """The workers, and what they started."""
        return tree.own_processes_where(lambda _, environ: (environ.get(TAG_VARIABLE) or "").startswith(self._mark))

    # -- what is done to them --------------------------------------------------------------------------------------

    def signal(self, pid: int, number: int) -> None:
        """Signal a process of the run.

        Raises:
            NotNow: it is gone, or its number is another's by now; it has no handler for a signal beyond the usual ones.
        """
        proc = tree.look_at(pid)
        raw = tree.read_environments([pid]).get(pid)
        if proc is None or proc.is_dead or raw is None or not self._is_of_run(Environ(raw)):
            raise NotNow(f"process {pid} is gone")
        if number >= signal.SIGRTMIN and not _handles(pid, number):
            raise NotNow("it needs a worker in Python that was started by rehearse")
        if tree.kill_safely(proc, number) is not tree.Delivery.SENT:
            raise NotNow(f"process {pid} is gone")

    def signal_node(self, key: str, number: int) -> None:
        signal_all(self.of_node(key), number)

    def signal_workers(self, number: int) -> None:
        signal_all(self.of_workers(), number)

    def tear(self) -> str:
        """Stop the workers, and leave what they save just now half done.

        A rename leaves nothing half done. After one they go on for a moment, for a file may follow that is written in
        place; where none does, the save is left as it was before its last rename.

        Returns:
            What was left so; empty where the save is whole.
        """
        until = time.monotonic() + _SAVE_SECONDS
        is_over = False
        while True:
            self._stop_workers()
            self._look()
            if self._watch is None:
                return ""
            if torn := self._watch.tear():
                return torn
            if is_over or time.monotonic() > until:
                return self._watch.undo_rename()
            self.signal_workers(signal.SIGCONT)
            is_over = not self._is_saved_within(_BETWEEN_FILES_SECONDS)

    def _stop_workers(self) -> None:
        """And wait until they are: a process runs on for a moment after the signal was sent."""
        workers = self.of_workers()
        signal_all(workers, signal.SIGSTOP)
        until = time.monotonic() + _STOP_SECONDS
        while time.monotonic() < until and any(_runs(proc.pid) for proc in workers):
            time.sleep(0.001)

    def _is_saved_within(self, seconds: float) -> bool:
        deadline, known = time.monotonic() + seconds, len(self._unread)
        while (left := deadline - time.monotonic()) > 0:
            wait_readable(self.filenos(), left)
            self._look()
            if any(event.is_save for event in self._unread[known:]):
                return True
        return False


def signal_all(processes: Sequence[Proc], number: int) -> None:
    """Signal each; what has ended meanwhile is none to hit."""
    for proc in processes:
        tree.kill_safely(proc, number)


def _runs(pid: int) -> bool:
    proc = tree.look_at(pid)
    return proc is not None and proc.state in ("R", "S")


def _handles(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal."""
    try:
        with open(f"/proc/{pid}/status") as status:
            caught = next(int(line.split()[1], 16) for line in status if line.startswith("SigCgt:"))
    except (OSError, StopIteration):
        return False
    return bool(caught >> (number - 1) & 1)
