"""What the kernel counts of workers and all that they started: CPU time, bytes, context switches. Cumulative."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence

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
    """Look once at the process table.

    Args:
        pids: Local rank → the worker's pid.

    Returns:
        By local rank, without the heartbeats.
    """
    processes, moved = tree.all_processes(), moved_bytes()
    return {
        rank: _sum(
            _counts_of(each, moved, proc) for each in (pid, *(below.pid for below in tree.subtree(processes, (pid,))))
        )
        for rank, pid in pids.items()
    }


def _counts_of(pid: int, moved: Mapping[int, int], proc: str) -> Counts:
    """One process' counts; zeros where it is gone."""
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
        return Counts(cpu=sum(map(int, words[11:15])) / _TICKS, bytes=size, switches=switches)
    except (OSError, ValueError, IndexError):
        return Counts()


def _numbers(path: str, names: Sequence[str]) -> int:
    with open(path, encoding="ascii", errors="replace") as file:
        lines = (line.partition(":") for line in file)
        return sum(int(value) for name, _, value in lines if name in names)


def _sum(counts: Iterable[Counts]) -> Counts:
    found = list(counts)
    return Counts(
        cpu=sum(one.cpu for one in found),
        bytes=sum(one.bytes for one in found),
        switches=sum(one.switches for one in found),
    )
