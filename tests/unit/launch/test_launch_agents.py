"""What follows the end of an agent: another start, a trial, or a node that is given up and what is said of it."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from hpc_elastic.launch.agents import (
    FIRST_TRIAL,
    LONGEST_PAUSE,
    MAX_TRIALS,
    MESSAGE_SECONDS,
    RELAUNCHES_PER_NODE,
    AgentEnd,
    Agents,
    UnableNode,
    UnableNodes,
)
from hpc_elastic.run.paths import Outcome
from tests.rigs.event_pairs import log_into
from tests.rigs.fake_clock import FakeClock
from tests.rigs.supervisor_stage import Stage


class Dead:
    """A launcher of nodes without power: srun needs 11 s to find that."""

    hears_all_ends = False

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.tried: list[tuple[int, float]] = []
        self.ended: list[tuple[float, AgentEnd]] = []

    def launch(self) -> None: ...

    def relaunch(self, node: int) -> None:
        self.tried.append((node, self.clock.now))
        ended = AgentEnd(node=node, code=None, detail="launch failed", started=False)
        self.ended.append((self.clock.now + 11.0, ended))

    def due(self) -> float | None:
        return min((at for at, _ in self.ended), default=None)

    def take(self) -> list[AgentEnd]:
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
    log = log_into(events)
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


NOT_FOUND = "/usr/bin/env: '/x/python': No such file or directory"


def node(name: str, code: int | None = 127, message: str = NOT_FOUND) -> UnableNode:
    return UnableNode(name=name, code=code, detail="Killed" if code is None else f"code {code}", message=message)


def test_what_is_said_of_one_and_of_several() -> None:
    assert str(UnableNodes((), 3)) == ""
    assert str(UnableNodes((node("n3"),), 3)) == f"n3 could not run the agent: exit code 127: {NOT_FOUND}"
    assert node("n3", None, "").reason == "Killed"
    said = node("n3", 2, "hpc-elastic: error: n3: the run directory can't be read from this node: missing").reason
    assert said == "exit code 2: n3: the run directory can't be read from this node: missing"
    many = str(UnableNodes(tuple(node(f"n{number}") for number in range(2, 9)), 20))
    assert many.count("could not run the agent") == 4
    assert many.endswith("; 3 more nodes could not either")


@pytest.mark.parametrize(
    ("unable", "nodes", "says"),
    [
        ([node("n1"), node("n2")], 2, f"no node could run the agent: n1: exit code 127: {NOT_FOUND}"),
        ([node("n1"), node("n2")], 3, None),
        ([node("n2"), node("n3"), node("n4")], 4, "no node but the batch host could run the agent: n2: "),
        ([node("n3"), node("n4")], 4, None),
        ([node("n1"), node("n2", 126)], 2, None),
        ([node("n1", 2), node("n2", 2)], 2, f"every agent refused to start the workers (exit code 2: {NOT_FOUND})"),
        ([node("n1", 1), node("n2", 1)], 2, None),
        ([node("n1", -9), node("n2", -9)], 2, None),
        (
            [node("n1", 3, "slurmstepd-n1: error: TaskProlog failed status=3")] * 2,
            2,
            "no node could run the agent: n1:",
        ),
        ([node("n1")], 1, None),
        ([node("n1", 2)], 1, f"the agent refused to start the workers (exit code 2: {NOT_FOUND})"),
        ([], 1, None),
    ],
)
def test_all_nodes_alike_would_end_the_same_way(unable: list[UnableNode], nodes: int, says: str | None) -> None:
    """One node alone shows nothing of the others, but where the agent itself says that the run is not usable."""
    found = UnableNodes(tuple(unable), nodes)
    assert found.is_same_everywhere is (says is not None)
    assert str(found).startswith(says or "")


def no_agent_on(s: Stage, *nodes: int, code: int = 127) -> None:
    """What is started there ends before it is an agent."""
    start, relaunch = s.agents.launch, s.agents.relaunch

    def fail(index: int) -> None:
        s.agents.stand_in(index)
        s.agents.kill(index, code, detail=f"Exited with exit code {code}")

    def launch() -> None:
        start()
        for index in nodes:
            s.agents.of.pop(index).alive = False
            fail(index)

    def again(index: int) -> None:
        relaunch(index)
        if index in nodes:
            s.agents.of.pop(index).alive = False
            fail(index)

    s.agents.launch, s.agents.relaunch = launch, again  # type: ignore[method-assign]
    s.agents.messages = dict.fromkeys(nodes, NOT_FOUND)


@pytest.mark.parametrize(
    ("nodes", "retryable", "reason"),
    [
        ((1, 2), True, r"1 of at least 2 nodes are left.*; n1 could not run the agent: {}; n2 could not .*"),
        ((0, 1, 2), False, "no node could run the agent: n0: {}"),
    ],
    ids=["most nodes", "all nodes"],
)
def test_where_nodes_fail_alike_no_further_start_helps(
    s: Stage, nodes: tuple[int, ...], retryable: bool, reason: str
) -> None:
    no_agent_on(s, *nodes)
    result = s.run(10.0)
    assert (result.outcome, result.retryable) == (Outcome.TOO_FEW_NODES, retryable)
    assert re.fullmatch(reason.format(f"exit code 127: {NOT_FOUND}"), result.reason)
    assert s.agents.relaunched == []
    assert result.seconds < 3


def test_an_agent_that_took_part_is_started_again_as_often_as_ever_and_its_node_is_not_unable(s: Stage) -> None:
    s.agents.messages = {1: NOT_FOUND}
    deaths = [step for _ in range(RELAUNCHES_PER_NODE + 1) for step in (3.0, lambda: s.agents.kill(1))]
    s.run(*deaths, 10.0, s.done)
    (given_up,) = s.names("node_given_up")
    assert (given_up["cause"], given_up["reason"]) == ("died", "SIGKILL")
    assert len(s.agents.relaunched) == RELAUNCHES_PER_NODE


def test_a_second_start_that_works_makes_up_for_the_first(s: Stage) -> None:
    """A mount that came a moment late; and what dies after that has starts of its own."""
    no_agent_on(s, 2)
    relaunch = type(s.agents).relaunch

    def again(index: int) -> None:
        relaunch(s.agents, index)

    s.agents.relaunch = again  # type: ignore[method-assign]
    deaths = [step for _ in range(2) for step in (3.0, lambda: s.agents.kill(2))]
    assert s.run(3.0, *deaths, 3.0, s.done).outcome is Outcome.SUCCEEDED
    assert s.names("node_given_up") == []
    assert sorted(member.node for member in s.newest().members) == [0, 1, 2]


def test_the_message_may_come_after_the_end_that_it_explains(s: Stage) -> None:
    no_agent_on(s, 2, code=126)
    s.agents.messages.clear()
    s.run(MESSAGE_SECONDS / 2, lambda: s.agents.messages.update({2: "Permission denied"}), 5.0, s.done)
    (relaunched,) = s.names("agent_relaunched")
    assert relaunched["reason"] == "it ended: exit code 126: Permission denied"


def test_a_lost_node_that_is_back_without_its_mounts_is_tried_again_later(s: Stage) -> None:
    s.agents.hears_all_ends = False
    came: list[float] = []

    def power_on_without_mounts() -> None:
        s.agents.powerless.clear()
        relaunch = type(s.agents).relaunch

        def again(index: int) -> None:
            relaunch(s.agents, index)
            if not came:
                s.agents.of.pop(index).alive = False
                s.agents.stand_in(index)
                s.agents.kill(index, 127)

        s.agents.relaunch = again  # type: ignore[method-assign]

    def mount() -> None:
        came.append(s.world.clock.now)

    cut = (3.0, lambda: s.agents.cut_power(2), 20.0, power_on_without_mounts, 60.0, mount)
    assert s.run(*cut, 150.0, s.done).outcome is Outcome.SUCCEEDED
    assert s.names("node_given_up") == []
    assert 2 in {member.node for member in s.newest().members}
