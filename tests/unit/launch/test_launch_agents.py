"""When an agent is started on trial on a node that the run has lost, and Slurm has not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hpc_elastic.launch.agents import FIRST_TRIAL, LONGEST_PAUSE, MAX_TRIALS, Agents
from hpc_elastic.launch.site import AgentEnded
from tests.rigs.fake_clock import FakeClock


class Dead:
    """A launcher of nodes without power: srun needs 11 s to find that."""

    hears_all_ends = False

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.tried: list[tuple[int, float]] = []
        self.ended: list[tuple[float, AgentEnded]] = []

    def launch(self) -> None: ...

    def relaunch(self, node: int) -> None:
        self.tried.append((node, self.clock.now))
        ended = AgentEnded(node=node, code=None, detail="launch failed", started=False)
        self.ended.append((self.clock.now + 11.0, ended))

    def due(self) -> float | None:
        return min((at for at, _ in self.ended), default=None)

    def take(self) -> list[AgentEnded]:
        taken = [ended for at, ended in self.ended if at <= self.clock.now]
        self.ended = [(at, ended) for at, ended in self.ended if at > self.clock.now]
        return taken


def record(*members: int, lost: tuple[int, ...] = ()) -> Any:
    return SimpleNamespace(members=[SimpleNamespace(node=node) for node in members], lost=lost)


def run(agents: Agents, clock: FakeClock, until: float = 1e9) -> None:
    while (due := agents.due()) is not None and due <= until:
        clock.now = due
        agents.step()


def world() -> tuple[FakeClock, Dead, list[tuple[str, dict[str, Any]]], Agents]:
    clock = FakeClock()
    launcher, events = Dead(clock), list[tuple[str, dict[str, Any]]]()
    log = SimpleNamespace(write=lambda event, **fields: events.append((event, fields)))
    agents = Agents(launcher, ("n0", "n1", "n2"), ask=lambda _: None, events=log, clock=clock)  # type: ignore[arg-type]
    agents.on_record(record(0, 1, 2))
    return clock, launcher, events, agents


def test_the_pauses_grow_and_at_some_time_it_is_given_up() -> None:
    clock, launcher, events, agents = world()
    began = clock.now
    agents.on_record(record(0, 2, lost=(1,)))
    run(agents, clock)
    pauses = [
        after - before - 11.0 for (_, before), (_, after) in zip(launcher.tried, launcher.tried[1:], strict=False)
    ]
    assert launcher.tried[0] == (1, began + FIRST_TRIAL)
    assert pauses == sorted(pauses)
    assert (len(pauses), pauses[0], pauses[-1]) == (MAX_TRIALS - 1, 2 * FIRST_TRIAL, LONGEST_PAUSE)
    assert 300 < clock.now - began < 1200
    assert events[-1][0] == "node_given_up"


def test_a_node_that_is_back_and_lost_again_begins_anew() -> None:
    clock, launcher, _, agents = world()
    agents.on_record(record(2, lost=(0, 1)))
    run(agents, clock, clock.now + 60.0)
    launcher.tried.clear()
    launcher.ended.clear()
    agents.on_record(record(1, 2, lost=(0,)))
    agents.on_record(record(2, lost=(0, 1)))
    lost_at = clock.now
    run(agents, clock, lost_at + FIRST_TRIAL)
    assert (1, lost_at + FIRST_TRIAL) in launcher.tried


def test_a_node_that_never_came_and_a_run_that_ends_are_no_loss() -> None:
    clock, launcher, _, agents = world()
    agents.on_record(record(0, 1, lost=(7,)))
    agents.on_record(record(0, 2, lost=(1,)))
    agents.stop_relaunching()
    run(agents, clock)
    assert launcher.tried == []
