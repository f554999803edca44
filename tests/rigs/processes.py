"""What a test sees of processes from outside, in /proc: their family, state, cost and sockets."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hpc_elastic.workers.guardian import GUARDIAN_NAME
from hpc_elastic.workers.tree import read_environments


@dataclass(frozen=True, slots=True)
class Process:
    """One process, told apart from a later one with the same pid."""

    pid: int
    started: int
    parent: int
    argv: tuple[str, ...]
    environ: Mapping[str, str]

    def lives(self) -> bool:
        now = _look(self.pid, b"")
        return now is not None and now.started == self.started

    def __str__(self) -> str:
        return f"{self.pid} ({' '.join(self.argv)[-120:]})"


def bare_environ() -> dict[str, str]:
    """This process' environment without what Slurm, torch and this project read of it."""
    return {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "PET_", "TORCH", "HPC_"))}


def all_processes() -> list[Process]:
    """All that live and whose environment may be read."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    # Another test's mount may hang, and hold up who looks into a program that is being loaded there.
    environments = read_environments(pids, _environment)
    found = (_look(pid, raw) for pid, raw in environments.items())
    return [process for process in found if process is not None]


def marked(variable: str, value: str) -> list[Process]:
    """All with this variable in the environment that they were started with."""
    return [process for process in all_processes() if process.environ.get(variable) == value]


def _environment(pid: int) -> bytes | None:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes() + b"\0"
    except OSError:
        return None


def _look(pid: int, environment: bytes) -> Process | None:
    try:
        words = _stat(pid)
        argv = Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace").split("\0")
    except OSError:
        return None
    if words[0] in "ZX":
        return None
    raw = environment.decode("utf-8", "replace")
    environ = dict(item.split("=", 1) for item in raw.split("\0") if "=" in item)
    return Process(pid, int(words[19]), int(words[1]), tuple(argv[:-1]), environ)


def _stat(pid: int) -> list[str]:
    """/proc/PID/stat from its third field, the state, on."""
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()


def state_of(pid: int) -> str:
    """The kernel's letter, X for a process that is gone."""
    try:
        return _stat(pid)[0]
    except OSError:
        return "X"


def is_alive(pid: int) -> bool:
    """Whether `pid` names a process that has not ended; a zombie has."""
    return state_of(pid) not in "ZX"


def below(pid: int, among: Iterable[Process]) -> list[Process]:
    """The processes of `among` that descend from `pid`, which is not one of them."""
    everybody, tree = list(among), {pid}
    while wider := {p.pid for p in everybody if p.parent in tree} - tree:
        tree |= wider
    return [p for p in everybody if p.pid in tree - {pid}]


def children(pid: int) -> list[int]:
    """The children of the main thread."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def guardian_of(agent: int) -> int:
    return next(pid for pid in children(agent) if Path(f"/proc/{pid}/comm").read_text().strip() == GUARDIAN_NAME)


def cost(pid: int) -> tuple[float, int]:
    """CPU seconds and voluntary context switches, of all threads. (utime and stime are whole ticks: too coarse.)"""
    cpu, wakes = 0, 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        cpu += int((task / "schedstat").read_text().split()[0])
        wakes += int((task / "status").read_text().partition("\nvoluntary_ctxt_switches:")[2].split()[0])
    return cpu / 1e9, wakes


def resident_mb(pid: int, *, peak: bool = False) -> float:
    """Megabytes (10^6 bytes) that are resident, or the most that ever were."""
    name = "VmHWM:" if peak else "VmRSS:"
    return int(Path(f"/proc/{pid}/status").read_text().partition(name)[2].split()[0]) * 1024 / 1e6


def sockets_of(pids: Iterable[int]) -> set[str]:
    """The inodes of the sockets that these processes hold."""
    inodes = set()
    for pid in pids:
        try:
            for fd in os.listdir(f"/proc/{pid}/fd"):
                target = os.readlink(f"/proc/{pid}/fd/{fd}")
                if target.startswith("socket:["):
                    inodes.add(target[8:-1])
        except OSError:
            continue  # it has ended
    return inodes


def sockets_left(inodes: set[str]) -> set[str]:
    """Those of these sockets that the kernel still has."""
    words: set[str] = set()
    for table in ("tcp", "tcp6", "udp", "udp6", "unix"):
        try:
            words.update(Path(f"/proc/net/{table}").read_text().split())
        except OSError:
            continue
    return inodes & words


@contextmanager
def deaths_of(pids: Iterable[int]) -> Iterator[Callable[[float], dict[int, float]]]:
    """Watch processes from before they die, whoever's children they are: the moments are the kernel's.

    Yields:
        A function of the seconds to wait; it returns pid → when, by CLOCK_MONOTONIC, of those that died.
    """
    watched = {os.pidfd_open(pid): pid for pid in pids}
    poll = select.poll()
    for fd in watched:
        poll.register(fd, select.POLLIN)

    def deaths(within: float) -> dict[int, float]:
        found: dict[int, float] = {}
        deadline = time.monotonic() + within
        while len(found) < len(watched) and (left := deadline - time.monotonic()) > 0:
            for fd, _ in poll.poll(left * 1000):
                found[watched[fd]] = time.monotonic()
                poll.unregister(fd)
        return found

    try:
        yield deaths
    finally:
        for fd in watched:
            os.close(fd)


def kill_all(pids: Iterable[int]) -> None:
    """SIGKILL each; one that is gone already is fine."""
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def kill_marked(variable: str, value: str) -> None:
    """SIGKILL every process with this variable in its environment, until there is none."""
    deadline = time.monotonic() + 10.0
    while time.monotonic() < deadline:
        if not (left := marked(variable, value)):
            return
        kill_all(process.pid for process in left)
        time.sleep(0.02)
