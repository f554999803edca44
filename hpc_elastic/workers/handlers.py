"""Chooses which process of a worker's handles a signal, by the kernel's masks of each.

The worker that was started may be a wrapper (``bash -c``, bubblewrap, a launcher) which a signal would end, while the
script below it has a handler for it. Or it is the client of a container's runtime, and the script is not even below it
(`Inside`).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Collection, Mapping, Sequence

from msgspec import Struct

from hpc_elastic.base.host_facts import kernel_fields
from hpc_elastic.workers import tree
from hpc_elastic.workers.tree import Delivery, Environ, Proc

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
