from __future__ import annotations

import threading

from hpc_elastic.agent.metrics import RoundFigures
from hpc_elastic.agent.supervision import WorkerState
from tests.rigs.fake_clock import FakeClock


class Sink:
    def __init__(self) -> None:
        self.seen: list[tuple[str, float]] = []

    def put(self, name: str, value: float) -> None:
        self.seen.append((name, value))


def test_durations_and_states_are_told_once() -> None:
    sink, clock = Sink(), FakeClock()
    figures = RoundFigures(sink, role="trainer", clock=clock)
    assert figures.end("rendezvous") is None
    figures.begin("rendezvous")
    clock.wait(threading.Event(), 1.25)
    figures.begin("rendezvous")  # asked for again in the same wait
    clock.wait(threading.Event(), 0.25)
    assert figures.end("rendezvous") == 1.5
    assert figures.end("rendezvous") is None
    figures.enter(WorkerState.HEALTHY)
    figures.enter(WorkerState.HEALTHY)
    assert sink.seen == [("workers.trainer.rendezvous_seconds", 1.5), ("workers.trainer.healthy", 1)]
