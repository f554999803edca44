"""How long the parts of a restart took, by a run's events and the files that its workers read; which is longest."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from hpc_elastic.rehearsal.faults import Kind
from hpc_elastic.rehearsal.journal import Place
from hpc_elastic.rehearsal.judge import InjectionSeen, Parts
from hpc_elastic.run.event_reader import EventLine

_ADVICE = {
    "stop": "a shorter --shutdown-timeout, for scripts that do nothing at SIGTERM; for hangs, shorter "
    "--section-timeouts",
    "rendezvous": "a shorter heartbeat_ttl (--rdzv-conf), where nodes were lost; "
    "hpc-elastic logs --events shows the meeting",
    "start": "--start-method forkserver: workers are forks of a process that has imported",
    "imports": "--start-method forkserver imports once on each node",
    "load": "checkpoints on local disks, or loaded in parallel by all ranks",
    "step": "the compiler's cache kept between starts, and less warm-up",
}
_MUCH = 0.2
"""Of a restart."""
NAMES = {
    "stop": "found and stopped",
    "rendezvous": "rendezvous",
    "start": "workers' start",
    "imports": "imports",
    "load": "load",
    "step": "first step",
}
"""Field of `Parts` → its title."""


def restart_parts(
    lines: Sequence[EventLine], loads: Sequence[tuple[float, Path]], *, at: float, after: Place, trained_at: float
) -> Parts:
    """Split the time from a fault to the first step after it. Seconds of this machine's wall clock.

    Args:
        lines: The run's events, of nodes on this machine.
        loads: When files that were written before were opened or closed by a reader.
        at: When the fault was done.
        after: The round that trained on.
        trained_at: When its first step was done.
    """

    def times(name: str) -> list[float]:
        return [
            line.written_ns / 1e9
            for line in lines
            if line.name == name and (line.attempt, line.value.get("round")) == after
        ]

    final, started = times("round_final"), times("workers_started")
    if not final or not started or min(final) < at:
        return Parts()
    stopped = [
        line.written_ns / 1e9
        for line in lines
        if line.name in ("workers_stopped", "worker_failed", "attempt_ended")
        and at <= line.written_ns / 1e9 <= min(final)
    ]
    stop = max(stopped, default=at)
    ran = max(started)
    reads = [moment for moment, _ in loads if ran <= moment <= trained_at]
    opened = min(max(min(reads), ran), trained_at) if reads else trained_at
    closed = min(max(max(reads), opened), trained_at) if reads else trained_at
    return Parts(
        stop=stop - at,
        rendezvous=max(0.0, max(final) - stop),
        start=max(0.0, ran - max(final)),
        imports=max(0.0, opened - ran),
        load=closed - opened if reads else None,
        step=trained_at - closed if reads else None,
    )


def advise(injections: Sequence[InjectionSeen]) -> list[str]:
    """What would shorten the restarts, a line for each part that takes much of one, the longest first."""
    middles: dict[str, float] = {}
    waited = (Kind.DISK_FULL,)  # a restart waits for room, and no option shortens that
    parts = [injection.parts for injection in injections if injection.fault.kind not in waited]
    for name in NAMES:
        seen = [value for one in parts if (value := getattr(one, name)) is not None]
        if seen:
            middles[name] = median(seen)
    total = sum(middles.values())
    long = sorted((name for name in middles if middles[name] > _MUCH * total), key=lambda name: -middles[name])
    return [
        f"long part of a restart: {NAMES[name]}, {middles[name]:.1f} s in the middle ({middles[name] / total:.0%}); "
        f"what would shorten it: {_ADVICE[name]}"
        for name in long
    ]
