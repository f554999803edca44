"""What an agent measures of its own rounds, for the metrics' sink and the event log."""

from __future__ import annotations

from hpc_elastic.agent.metrics import MetricSink
from hpc_elastic.agent.worker import WorkerState
from hpc_elastic.clock import Clock


class RoundFigures:
    """Durations in seconds by this node's monotonic clock; the agent says when what begins and ends."""

    def __init__(self, sink: MetricSink, *, role: str, clock: Clock) -> None:
        self._sink = sink
        self._role = role
        self._clock = clock
        self._began: dict[str, float] = {}
        self._state: WorkerState | None = None

    def begin(self, what: str) -> None:
        """`what` begins now, where it has not begun already."""
        self._began.setdefault(what, self._clock.monotonic())

    def end(self, what: str) -> float | None:
        """`what` ends now. Returns its seconds, rounded to milliseconds; None where it had not begun."""
        began = self._began.pop(what, None)
        if began is None:
            return None
        seconds = round(self._clock.monotonic() - began, 3)
        self.put(f"{what}_seconds", seconds)
        return seconds

    def enter(self, state: WorkerState) -> None:
        """The worker group is in `state`; said again, it tells nothing."""
        if state is not self._state:
            self._state = state
            self.put(state.name.lower(), 1)

    def put(self, what: str, value: float) -> None:
        """One figure under ``workers.<role>.<what>``."""
        self._sink.put(f"workers.{self._role}.{what}", value)
