"""Reaches the processes of a run: signals them, and stops them while they write a checkpoint.

Which of the files that a script writes are checkpoints is known by how they were written before.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from msgspec import Struct, field

from hpc_elastic.base.codec import from_json, to_json
from hpc_elastic.base.host_facts import files_written_by, kernel_fields, module_command
from hpc_elastic.base.loop import wait_readable
from hpc_elastic.slurm.commands import JobId, srun_agents, submission_environment
from hpc_elastic.workers import tree
from hpc_elastic.workers.tree import NODE_TAG_VARIABLE, TAG_VARIABLE, Proc

_STOP_SECONDS = 1.0
_REFRESH_SECONDS = 1.0
"""Seconds until workers and folders are listed again without a write."""
_EVENT = struct.Struct("iIII")
_MODIFIED, _MOVED_HERE, _CREATED, _IS_FOLDER = 0x2, 0x80, 0x100, 0x40000000  # linux/inotify.h
NO_SAVE_CAUGHT = "no save was caught while a file was open: let it do more steps, or save more at once"
_STEP_SECONDS = 30.0


class NotNow(Exception):
    """The fault is impossible in the run's present state; why."""


class Injector:
    def __init__(self, uid: str, folders: Sequence[Path]) -> None:
        self._uid = uid
        self._folders = [Path(os.path.realpath(folder)) for folder in folders]

    def processes(self, key: str = "", *, names: Sequence[str] = (NODE_TAG_VARIABLE, TAG_VARIABLE)) -> list[Proc]:
        """`names`: the variables that mark them (`tree.node_key`); TAG_VARIABLE alone: workers and their children."""
        mark = f"{self._uid}:{key and f'{key}:'}"
        return tree.own_processes_where(
            lambda _, environ: any(f"{environ.get(name) or ''}:".startswith(mark) for name in names)
        )

    def signal(self, pid: int, number: int) -> float:
        """Returns when, by this machine's wall clock. Raises NotNow: it is gone, or has no handler for the signal."""
        proc = next((proc for proc in self.processes() if proc.pid == pid), None)
        if proc is None:
            raise NotNow(f"process {pid} is gone")
        caught = int(kernel_fields(f"/proc/{pid}/status").get("SigCgt", "0"), 16)
        if number >= signal.SIGRTMIN and not caught >> (number - 1) & 1:
            raise NotNow("it needs a worker in Python that was started by rehearse")
        now = time.time()
        if tree.kill_safely(proc, number) is not tree.Delivery.SENT:
            raise NotNow(f"process {pid} is gone")
        return now

    def signal_node(self, key: str, number: int) -> float:
        return signal_all(self.processes(key), number)

    def kill_in_save(self, names: FileNames, seconds: float) -> tuple[float, str]:
        """While the workers are stopped no file is opened and closed unseen. Raises NotNow."""
        files, until = SavedFiles(self._folders, names), time.monotonic() + seconds
        writes, workers, before = _Writes(self._folders), self.processes(names=(TAG_VARIABLE,)), None
        try:
            while time.monotonic() < until:
                signal_all(workers, signal.SIGSTOP)
                until_stopped = time.monotonic() + _STOP_SECONDS  # a process runs on for a moment after the signal
                while time.monotonic() < until_stopped and any(
                    (seen := tree.look_at(proc.pid)) is not None and seen.state in ("R", "S") for proc in workers
                ):
                    time.sleep(1e-4)
                writes.add_folders()
                workers = self.processes(names=(TAG_VARIABLE,))
                found = {(proc.pid, path) for proc in workers for path in files_written_by(proc.pid)}
                before = found if before is None else before & found
                for _, path in found - before:
                    if files.is_checkpoint(path):
                        return signal_all(workers, signal.SIGKILL), path.name
                for proc in workers:
                    with suppress(OSError):  # on a busy machine their saves then take longer than this process sleeps
                        os.setpriority(os.PRIO_PROCESS, proc.pid, 10)
                signal_all(workers, signal.SIGCONT)
                if not workers:
                    break
                writes.wait(files, min(_REFRESH_SECONDS, max(0.0, until - time.monotonic())))
            raise NotNow(NO_SAVE_CAUGHT)
        finally:
            writes.close()


class _Writes:
    """inotify's reports about files below some folders: on a shared filesystem, writes of this machine."""

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
        until = time.monotonic() + seconds
        while wait_readable([self._fd], max(0.0, until - time.monotonic())):
            data, start = os.read(self._fd, 1 << 16), 0
            while start < len(data):
                number, mask, _, length = _EVENT.unpack_from(data, start)
                name = os.fsdecode(data[start + _EVENT.size : start + _EVENT.size + length].rstrip(b"\0"))
                start += _EVENT.size + length
                if mask & _IS_FOLDER or files.is_checkpoint(self._watched.get(number, Path()) / name):
                    return

    def close(self) -> None:
        os.close(self._fd)


def signal_all(processes: Sequence[Proc], number: int) -> float:
    now = time.time()
    for proc in processes:
        tree.kill_safely(proc, number)
    return now


class _Answer(Struct, frozen=True, kw_only=True):
    at: float = 0.0
    name: str = ""
    refused: str = ""


class RemoteInjector:
    """The caller's end of an injector on a node. It also raises NotNow where the node does not answer."""

    def __init__(self, job: JobId, node: str, uid: str, *, env: Mapping[str, str], folders: Sequence[Path]) -> None:
        self._job = job
        self._node = node
        self._env = submission_environment(env)
        self._uid, self._folders = uid, tuple(map(str, folders))

    def signal(self, pid: int, number: int) -> float:
        return self._ask("signal", pid, number).at

    def signal_node(self, key: str, number: int) -> float:
        return self._ask("signal_node", key, number).at

    def kill_in_save(self, names: FileNames, seconds: float) -> tuple[float, str]:
        answer = self._ask("kill_in_save", to_json(names), seconds, seconds=seconds)
        return answer.at, answer.name

    def _ask(self, what: str, *arguments: object, seconds: float = 0.0) -> _Answer:
        cluster = [f"--clusters={self._job.cluster}"] if self._job.cluster else []
        request = json.dumps([self._uid, self._folders, what, *arguments])
        command = [*module_command("hpc_elastic.rehearsal.injector", "main"), request]
        try:
            done = subprocess.run(
                srun_agents(1, command, where=[self._node], extra=(*cluster, f"--jobid={self._job}", "--quiet")),
                env=self._env,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_STEP_SECONDS + seconds,
                start_new_session=True,
            )
            answer = from_json(_Answer, json.loads(done.stdout.splitlines()[-1]))
        except (subprocess.TimeoutExpired, ValueError, IndexError):
            raise NotNow(f"no step could be started on {self._node}") from None
        if answer.refused:
            raise NotNow(answer.refused)
        return answer


def main() -> NoReturn:
    """The process on the node; its argument is `RemoteInjector`'s request."""
    uid, folders, what, *arguments = json.loads(sys.argv[1])
    injector = Injector(uid, [Path(folder) for folder in folders])
    try:
        if what == "kill_in_save":
            names, seconds = arguments
            at, name = injector.kill_in_save(from_json(FileNames, names), seconds)
            answer = _Answer(at=at, name=name)
        else:
            answer = _Answer(at=(injector.signal if what == "signal" else injector.signal_node)(*arguments))
    except NotNow as reason:
        answer = _Answer(refused=str(reason))
    sys.stdout.write(json.dumps(to_json(answer)) + "\n")
    sys.exit(0)


_MOST_FOLDERS = 500
_LOOK_SECONDS = 0.2
_SMALL = 0.1
"""A file below this share of the largest one is no checkpoint, but a pointer to it, or metrics."""
_NOT_CHECKPOINTS = frozenset((".git", "__pycache__", ".venv", "node_modules"))


class FileNames(Struct, kw_only=True):
    """How files of each name are written, digits aside. It is learned from all runs of a rehearsal."""

    sizes: dict[str, int] = field(default_factory=dict)
    grown: dict[str, float] = field(default_factory=dict)
    """Seconds for which a file of the name grew: a log does for long, a checkpoint while it is written."""
    replaced: set[str] = field(default_factory=set)
    seconds: float = 0.0

    def is_checkpoint(self, name: str) -> bool:
        """An unknown file may be one: one still to be renamed mostly has the final name with more behind it."""
        known = [one for one in self.sizes if name.startswith(one)]
        largest = max((size for one, size in self.sizes.items() if not self._is_log(one)), default=0)
        return not known or any(self.sizes[one] >= _SMALL * largest and not self._is_log(one) for one in known)

    def _is_log(self, name: str) -> bool:
        return self.grown.get(name, 0.0) > 0.3 * self.seconds and name not in self.replaced


class SavedFiles:
    def __init__(self, folders: Sequence[Path], names: FileNames) -> None:
        self._folders = folders
        self._names = names
        self._seen: dict[Path, os.stat_result] = {}
        self._first: dict[Path, float] = {}
        self._next = 0.0
        self._began = time.monotonic()

    def is_checkpoint(self, path: Path) -> bool:
        name = self._name_of(path)
        return name is not None and self._names.is_checkpoint(name)

    def look(self) -> bool:
        """Look a few times a second; returns whether a file that may be a checkpoint was written since."""
        now = time.monotonic()
        if now < self._next:
            return False
        found = False
        self._names.seconds = max(self._names.seconds, now - self._began)
        for entry in (one for _, entries in folders_below(self._folders) for one in entries):
            with suppress(OSError):  # renamed meanwhile
                if entry.is_file(follow_symlinks=False):
                    found |= self._look_at(Path(entry.path), entry.stat(follow_symlinks=False), now)
        self._next = time.monotonic() + max(_LOOK_SECONDS, 10 * (time.monotonic() - now))
        return found

    def _look_at(self, path: Path, info: os.stat_result, now: float) -> bool:
        before, name = self._seen.get(path), self._name_of(path)
        if before is not None and _signs(before) == _signs(info):
            return False
        self._seen[path] = info
        if name is None:
            return False
        age = now - self._first.setdefault(path, now)
        self._names.sizes[name] = max(info.st_size, self._names.sizes.get(name, 0))
        if before is not None and before.st_ino == info.st_ino and info.st_size > before.st_size:
            self._names.grown[name] = max(age, self._names.grown.get(name, 0.0))
        elif before is not None:
            self._names.replaced.add(name)
        return self._names.is_checkpoint(name)

    def _name_of(self, path: Path) -> str | None:
        """``w/step-12.pt`` and ``w/step-18.pt`` alike, and the same in the folder of each run."""
        root = next((folder for folder in self._folders if path.is_relative_to(folder)), None)
        return None if root is None else re.sub(r"\d+", "#", str(path.relative_to(root)))


def folders_below(folders: Sequence[Path]) -> Iterator[tuple[Path, list[os.DirEntry[str]]]]:
    """These folders and those below, some hundred at most, with their entries."""
    waiting, count = list(folders), 0
    while waiting and count < _MOST_FOLDERS:
        folder, count = waiting.pop(), count + 1
        try:
            with os.scandir(folder) as entries:
                found = list(entries)
            below = [Path(one.path) for one in found if one.is_dir(follow_symlinks=False)]
        except OSError:
            continue
        yield folder, found
        waiting += [path for path in below if path.name not in _NOT_CHECKPOINTS]


def _signs(info: os.stat_result) -> tuple[int, int, int]:
    return info.st_ino, info.st_size, info.st_mtime_ns
