"""What the kernel counts of workers and all that they started: CPU time, bytes, context switches. Cumulative."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from msgspec import Struct

from hpc_elastic.workers import tree
from hpc_elastic.workers.sockets import moved_bytes, socket_inodes

_TICKS = os.sysconf("SC_CLK_TCK")
_THREADS = 64


class Counts(Struct, frozen=True, kw_only=True):
    """One worker's counts, with those of all that it has started."""

    cpu: float = 0.0
    """Seconds, of all threads."""
    bytes: int = 0
    """Read and written, in files and through TCP."""
    switches: int = 0
    """Context switches."""
    beats: int = 0
    """Heartbeats or optimizer steps, which no kernel counts."""


def read_counts(pids: Mapping[int, int], *, proc: str = "/proc") -> dict[int, Counts]:
    """Look once at the process table, for workers' pids by local rank. Their heartbeats are not in it."""
    processes, moved = tree.all_processes(), moved_bytes()
    found = {}
    for rank, pid in pids.items():
        below = (process.pid for process in tree.subtree(processes, (pid,)))
        each = [_counts_of(one, moved, proc) for one in (pid, *below)]
        cpu, size, switches = (sum(values) for values in zip(*each, strict=True))
        found[rank] = Counts(cpu=cpu, bytes=int(size), switches=int(switches))
    return found


def _counts_of(pid: int, moved: Mapping[int, int], proc: str) -> tuple[float, int, int]:
    """CPU time, bytes and switches of one process; zeros where it is gone."""
    folder, switches = f"{proc}/{pid}", 0
    try:
        with open(f"{folder}/stat", "rb") as file:
            words = file.read().rpartition(b")")[2].split()
        for thread in os.listdir(f"{folder}/task")[:_THREADS]:
            switches += _numbers(
                f"{folder}/task/{thread}/status", ("voluntary_ctxt_switches", "nonvoluntary_ctxt_switches")
            )
        size = _numbers(f"{folder}/io", ("rchar", "wchar", "read_bytes"))
        size += sum(moved.get(inode, 0) for inode in socket_inodes(pid, proc))
        # Its own and that of children which have ended: a script may start many short programs.
        return sum(map(int, words[11:15])) / _TICKS, size, switches
    except (OSError, ValueError, IndexError):
        return 0.0, 0, 0


def _numbers(path: str, names: Sequence[str]) -> int:
    with open(path, encoding="ascii", errors="replace") as file:
        lines = (line.partition(":") for line in file)
        return sum(int(value) for name, _, value in lines if name in names)
