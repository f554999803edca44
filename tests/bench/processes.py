"""What the benchmark knows about processes: found by a mark in their environment, so no other's are touched."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

MARK = "HPC_ELASTIC_BENCH"
_SOCKET_TABLES = ("tcp", "tcp6", "udp", "udp6", "unix")


@dataclass(frozen=True, slots=True)
class Process:
    """One process, told apart from a later one with the same pid."""

    pid: int
    started: int
    parent: int
    argv: tuple[str, ...]


def marked(mark: str) -> list[Process]:
    """All processes whose environment carries `mark`, zombies left out."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            if wanted not in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                continue
            process = look(int(name))
        except OSError:
            continue  # it ended, or it is another user's
        if process is not None:
            found.append(process)
    return found


def look(pid: int) -> Process | None:
    """The process that has this pid now; None where there is none, or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        argv = Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace").split("\0")
    except OSError:
        return None
    return None if stat[0] in "ZX" else Process(pid, int(stat[19]), int(stat[1]), tuple(argv[:-1]))


def lives(process: Process) -> bool:
    """Whether this very process is still there."""
    now = look(process.pid)
    return now is not None and now.started == process.started


def below(pid: int, among: list[Process]) -> list[Process]:
    """The processes of `among` that descend from `pid`, itself included."""
    tree = {pid}
    while True:
        wider = tree | {process.pid for process in among if process.parent in tree}
        if wider == tree:
            return [process for process in among if process.pid in tree]
        tree = wider


def resident_mib(pid: int) -> float | None:
    """VmRSS in MiB."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) / 1024
    except OSError:
        pass
    return None


def sockets_of(processes: list[Process]) -> set[str]:
    """The inodes of the sockets that these processes hold."""
    inodes = set()
    for process in processes:
        try:
            fds = os.listdir(f"/proc/{process.pid}/fd")
        except OSError:
            continue
        for fd in fds:
            try:
                target = os.readlink(f"/proc/{process.pid}/fd/{fd}")
            except OSError:
                continue
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    return inodes


def sockets_left(inodes: set[str]) -> set[str]:
    """Which of these sockets the kernel still has."""
    words: set[str] = set()
    for table in _SOCKET_TABLES:
        try:
            words.update(Path(f"/proc/net/{table}").read_text().split())
        except OSError:
            continue
    return inodes & words


def kill_marked(mark: str, *, within: float = 10.0) -> None:
    """End everything that carries `mark`, until nothing does."""
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        processes = marked(mark)
        if not processes:
            return
        for process in processes:
            try:
                os.kill(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        time.sleep(0.02)
