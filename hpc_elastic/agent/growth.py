"""Tells the coordinator of this node's checkpoints, while nodes wait to be taken in after one."""

from __future__ import annotations

from collections.abc import Collection

from hpc_elastic.agent.hang_watch import HangWatch
from hpc_elastic.clock import Clock
from hpc_elastic.heartbeat_record import CHECKPOINT
from hpc_elastic.light_dataclasses import dataclass
from hpc_elastic.rendezvous.growth import GrowPolicy
from hpc_elastic.rendezvous.participant import Participant
from hpc_elastic.rendezvous.state import RoundRecord, Status
from hpc_elastic.run_spec import RunSpec

LOOK_SECONDS = 1.0
"""Between two looks at the workers' heartbeats, while nodes wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointStatus:
    """What this node reports about a checkpoint."""

    round: int
    serial: int
    age: float | None
    """Seconds since it was complete; None: workers here are writing one."""

    def send(self, participant: Participant) -> None:
        """Report it to the coordinator through `participant`."""
        if self.age is None:
            participant.report_saving(self.round, self.serial)
        else:
            participant.report_saved(self.round, self.serial, self.age)


class CheckpointWatch:
    """One agent's. All methods are for its main thread, and none waits.

    In each period in which nodes wait, a node says at most three things: that its last checkpoint was so long ago, that
    it is writing one, and that this one is complete.
    """

    def __init__(self, watch: HangWatch, spec: RunSpec, *, clock: Clock) -> None:
        """Args:
        watch: Reads the workers' heartbeats.
        spec: Says whether anybody waits for a checkpoint, and at how many members no one is taken in.
        clock: The heartbeats'.
        """
        self._watch = watch
        self._is_asked_for = spec.grow == GrowPolicy.CHECKPOINT.value
        self._max_nodes = spec.max_nodes
        self._clock = clock
        self._round = -1
        self._serial = 0
        self._before: int | None = None
        """Checkpoints completed when this period began; None: it has yet to be looked at."""
        self._has_told_of_saving = False
        self._is_waiting = False
        self._due: float | None = None

    @property
    def due(self) -> float | None:
        """When `look` is to be called next, monotonic; None: there is nothing to look for."""
        return self._due

    def on_record(self, record: RoundRecord) -> None:
        """A newer record: does it say that nodes wait?"""
        if record.round != self._round:
            self._round, self._serial, self._is_waiting = record.round, 0, False
        waiting = record.status is Status.FINAL and record.waiting > 0 and len(record.members) < self._max_nodes
        if waiting and not self._is_waiting and self._is_asked_for:
            self._before, self._has_told_of_saving = None, False
            self._due = self._clock.monotonic()
        elif not waiting:
            self._due = None
        self._is_waiting = waiting

    def look(self, running: Collection[int]) -> CheckpointStatus | None:
        """Read the heartbeats if it is time to.

        Args:
            running: Local ranks whose worker has not ended.
        """
        now = self._clock.monotonic()
        if self._due is None or now < self._due:
            return None
        self._due = now + LOOK_SECONDS
        beats = self._watch.read()
        completed = sum(beat.checkpoints for beat in beats)
        age = max(0.0, now - max((beat.saved_at for beat in beats), default=0.0))
        if self._before is None:
            self._before = completed
            return self._completed(age) if completed else None
        if any(beat.section == CHECKPOINT and beat.local_rank in running for beat in beats):
            if self._has_told_of_saving:
                return None
            self._has_told_of_saving = True
            return CheckpointStatus(round=self._round, serial=self._serial, age=None)
        if completed > self._before:
            self._due = None
            return self._completed(age)
        return None

    def _completed(self, age: float) -> CheckpointStatus:
        status = CheckpointStatus(round=self._round, serial=self._serial, age=age)
        self._serial += 1
        return status
