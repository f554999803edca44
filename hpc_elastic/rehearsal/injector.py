"""Reaches the processes of a run: signals them, and stops them while they write a checkpoint."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from msgspec import Struct

from hpc_elastic.base.codec import from_json, to_json
from hpc_elastic.base.host_facts import files_written_by, kernel_fields
from hpc_elastic.base.loop import wait_readable
from hpc_elastic.base.self_command import module_command
from hpc_elastic.rehearsal.saves import FileNames, SavedFiles, folders_below
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
