"""Which process of a worker's handles a signal: the kernel's masks of each, and the choice among them.

The worker that was started may be a wrapper (``bash -c``, bubblewrap, a launcher) which a signal would end, while the
script below it has a handler for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from hpc_elastic.workers.tree import Delivery, Proc, descendants, kill_safely, look_at


class SignalMasks(Struct, frozen=True, kw_only=True):
    """What ``/proc/<pid>/status`` has about a process' signals."""

    caught: int
    ignored: int
    blocked: int
    """By its main thread: what it reads by ``sigwait`` or a signalfd is blocked."""
    inner_pid: int
    """Its pid as the process itself sees it, in its own pid namespace."""

    def catches(self, number: int) -> bool:
        """Whether the process has a handler for a signal, or waits for it."""
        return bool((self.caught | self.blocked) >> (number - 1) & 1)


def read_masks(pid: int) -> SignalMasks | None:
    """The masks of the process `pid`; None where they can't be read."""
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
            lines = (line.partition(":") for line in file)
            fields = {key: value.split() for key, _, value in lines if key.startswith(("Sig", "NSpid"))}
        return SignalMasks(
            caught=int(fields["SigCgt"][0], 16),
            ignored=int(fields["SigIgn"][0], 16),
            blocked=int(fields["SigBlk"][0], 16),
            inner_pid=int(fields.get("NSpid", [str(pid)])[-1]),
        )
    except (OSError, ValueError, LookupError):
        return None


def acts_on(number: int, pid: int) -> bool:
    """Whether a signal does not end the process `pid`, which catches or ignores it; True where that is not known."""
    known = read_masks(pid)
    return known is None or bool((known.caught | known.ignored) >> (number - 1) & 1)


def send_to_handler(pid: int, number: int, *, speaker: int) -> bool:
    """Signal what `choose_receivers` chooses of a worker that runs.

    Returns:
        Whether a process has got it, or the worker is gone. False: none catches it.
    """
    root = look_at(pid)
    if root is None or root.is_dead:
        return True
    below = descendants(pid)
    masks = {proc.pid: known for proc in (root, *below) if (known := read_masks(proc.pid)) is not None}
    receivers = choose_receivers(root, below, masks, number=number, speaker=speaker)
    return Delivery.SENT in [kill_safely(proc, number) for proc in receivers]


def choose_receivers(
    root: Proc, below: Sequence[Proc], masks: Mapping[int, SignalMasks], *, number: int, speaker: int
) -> list[Proc]:
    """Choose the processes of one worker to which a signal is sent that asks it to save. Pure.

    Args:
        root: The process that the agent started.
        below: All below it, parents first.
        masks: By pid, as far as they could be read.
        number: The signal.
        speaker: The pid of the process that sends the worker's heartbeats, in its own namespace; 0 where none does.

    Returns:
        The root where it catches the signal; else the process that sends the heartbeats; else on each branch the first
        process that does. (What it forked, a data loader's workers for one, has inherited its handlers.) Empty where
        no process catches it: the signal would end them.
    """
    catching = {pid for pid, known in masks.items() if known.catches(number)}
    if root.pid in catching:
        return [root]
    catchers = [proc for proc in below if proc.pid in catching and not proc.is_dead]
    heard = [proc for proc in catchers if speaker > 0 and masks[proc.pid].inner_pid == speaker]
    if heard:
        return heard[:1]
    first: list[Proc] = []
    covered: set[int] = set()
    for proc in below:
        if proc.ppid in covered:
            covered.add(proc.pid)
        elif proc in catchers:
            first.append(proc)
            covered.add(proc.pid)
    return first
