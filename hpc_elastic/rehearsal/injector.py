"""Reaches the processes of a run on one machine: signals them, and stops them while they write a checkpoint."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from hpc_elastic.rehearsal.saves import FileNames, SavedFiles, folders_below
from hpc_elastic.workers import tree
from hpc_elastic.workers.tree import NODE_TAG_VARIABLE, TAG_VARIABLE, Proc

_STOP_SECONDS = 1.0
_REFRESH_SECONDS = 1.0
"""Workers and folders are listed again after so long, and after each write."""
_EVENT = struct.Struct("iIII")
_MODIFIED, _MOVED_HERE, _CREATED, _IS_FOLDER = 0x2, 0x80, 0x100, 0x40000000
"""As linux/inotify.h has them."""
_NICE = 10
_SHORT_SECONDS = 1e-4
NO_SAVE_CAUGHT = "no save was caught while a file was open: let it do more steps, or save more at once"


class NotNow(Exception):
    """The fault can't be done to the run as it is; why."""


class Injector:
    """On the machine where the processes are; elsewhere a `RemoteInjector` does the same. For one thread."""

    def __init__(self, uid: str, folders: Sequence[Path]) -> None:
        """Args:
        uid: The run's.
        folders: In which the script saves.
        """
        self._uid = uid
        self._folders = [Path(os.path.realpath(folder)) for folder in folders]

    def processes(self, key: str = "", *, names: Sequence[str] = (NODE_TAG_VARIABLE, TAG_VARIABLE)) -> list[Proc]:
        """All processes of the run but its supervisor: agents, what guards them, workers.

        Args:
            key: Those of one node (`tree.node_key`).
            names: The marks by which they are known.
        """
        mark = f"{self._uid}:{key and f'{key}:'}"
        return tree.own_processes_where(
            lambda _, environ: any(f"{environ.get(name) or ''}:".startswith(mark) for name in names)
        )

    def _workers(self) -> list[Proc]:
        """The workers, and what they started."""
        return self.processes(names=(TAG_VARIABLE,))

    def signal(self, pid: int, number: int) -> float:
        """Signal a process of the run. Returns when, by this machine's wall clock.

        Raises:
            NotNow: it is gone, or its number is another's by now; it has no handler for a signal beyond the usual ones.
        """
        proc = next((proc for proc in self.processes() if proc.pid == pid), None)
        if proc is None:
            raise NotNow(f"process {pid} is gone")
        if number >= signal.SIGRTMIN and not _handles(pid, number):
            raise NotNow("it needs a worker in Python that was started by rehearse")
        now = time.time()
        if tree.kill_safely(proc, number) is not tree.Delivery.SENT:
            raise NotNow(f"process {pid} is gone")
        return now

    def signal_node(self, key: str, number: int) -> float:
        return signal_all(self.processes(key), number)

    def kill_in_save(self, names: FileNames, seconds: float) -> tuple[float, str]:
        """Kill the workers while one of them has a checkpoint open for writing.

        The kernel reports each write. All that takes time is done while the workers are stopped: on a busy machine,
        too, no file is opened and closed unseen meanwhile.

        Args:
            names: What is known of the files that it writes.
            seconds: How long to try.

        Returns:
            When, and the file's name.

        Raises:
            NotNow: no worker was caught so; or the kernel refuses to report writes.
        """
        files, until = SavedFiles(self._folders, names), time.monotonic() + seconds
        writes, workers, before = _Writes(self._folders), self._workers(), None
        try:
            while time.monotonic() < until:
                signal_all(workers, signal.SIGSTOP)
                _wait_stopped(workers)
                writes.add_folders()
                workers = self._workers()
                found = {(proc.pid, path) for proc in workers for path in _written_files(proc.pid)}
                before = found if before is None else before & found
                for _, path in found - before:
                    if files.is_checkpoint(path):
                        return signal_all(workers, signal.SIGKILL), path.name
                for proc in workers:
                    with suppress(OSError):  # on a busy machine their saves then take longer than this process sleeps
                        os.setpriority(os.PRIO_PROCESS, proc.pid, _NICE)
                signal_all(workers, signal.SIGCONT)
                if not workers:
                    break
                writes.wait(files, min(_REFRESH_SECONDS, max(0.0, until - time.monotonic())))
            raise NotNow(NO_SAVE_CAUGHT)
        finally:
            writes.close()


class _Writes:
    """What the kernel reports of files below some folders (inotify): on a shared filesystem, writes of this machine."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders
        self._watched: dict[int, Path] = {}
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise NotNow(f"files can't be watched: inotify: {os.strerror(ctypes.get_errno())}")

    def add_folders(self) -> None:
        for folder, _ in folders_below(self._folders):
            number = self._libc.inotify_add_watch(self._fd, os.fsencode(folder), _CREATED | _MODIFIED | _MOVED_HERE)
            self._watched[number] = folder

    def wait(self, files: SavedFiles, seconds: float) -> None:
        """Wait until a checkpoint is written, or a folder comes."""
        until = time.monotonic() + seconds
        while select.select([self._fd], [], [], max(0.0, until - time.monotonic()))[0]:
            data, start = os.read(self._fd, 1 << 16), 0
            while start < len(data):
                number, mask, _, length = _EVENT.unpack_from(data, start)
                name = os.fsdecode(data[start + _EVENT.size : start + _EVENT.size + length].rstrip(b"\0"))
                start += _EVENT.size + length
                if mask & _IS_FOLDER or files.is_checkpoint(self._watched.get(number, Path()) / name):
                    return

    def close(self) -> None:
        os.close(self._fd)


def _wait_stopped(workers: Sequence[Proc]) -> None:
    """A process runs on for a moment after the signal was sent."""
    until = time.monotonic() + _STOP_SECONDS
    while time.monotonic() < until and any(_runs(proc.pid) for proc in workers):
        time.sleep(_SHORT_SECONDS)


def _written_files(pid: int) -> Iterator[Path]:
    """Files that a process has open for writing, not for appending."""
    try:
        numbers = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return
    for number in numbers:
        try:
            path = os.readlink(f"/proc/{pid}/fd/{number}")
            if not path.startswith("/"):
                continue
            with open(f"/proc/{pid}/fdinfo/{number}") as info:
                flags = next(int(line.split()[1], 8) for line in info if line.startswith("flags:"))
        except (OSError, StopIteration):
            continue
        if flags & os.O_ACCMODE != os.O_RDONLY and not flags & os.O_APPEND:
            yield Path(path)


def signal_all(processes: Sequence[Proc], number: int) -> float:
    """Signal each; what has ended meanwhile is none to hit. Returns when."""
    now = time.time()
    for proc in processes:
        tree.kill_safely(proc, number)
    return now


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
