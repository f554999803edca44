"""The agent: its table walked with its effects, and whole agents interleaved, crashed after every single effect."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from hpc_elastic.agent.supervision import TRANSITIONS, Event, Phase
from hpc_elastic.errors import IllegalTransitionError
from hpc_elastic.rendezvous.state import Member, RoundRecord, Status
from hpc_elastic.run.option_values import GrowPolicy
from hpc_elastic.run.paths import Outcome
from hpc_elastic.run.spec import RendezvousSettings
from tests.rigs.agent_world import AgentNode, AgentWorld

SETTINGS = RendezvousSettings(
    min_nodes=1,
    max_nodes=2,
    expected_nodes=2,
    timeout=120,
    last_call_timeout=5,
    heartbeat_interval=1,
    heartbeat_ttl=5,
    poll_interval=1,
)
Patch = Callable[[object, str, object], None]


@pytest.fixture
def patch(monkeypatch: pytest.MonkeyPatch) -> Patch:
    return monkeypatch.setattr


# -- the table


class Lone:
    """One agent whose words and effects are written down, and not carried out."""

    def __init__(self, patch: Patch) -> None:
        self.effects: list[str] = []
        world = AgentWorld(SETTINGS, patch=patch)
        world.looks_to_health = 1
        world.on_effect = lambda node, where: self.effects.append(where)
        self.node = world.start(0)
        self.agent = self.node.agent
        me = Member(self.node.info.uid, 0, 1)
        self.record = RoundRecord(
            number=2, epoch="e", term=1, leader=me.uid, round=0, status=Status.FROZEN, members=(me,)
        )
        self.node.coordination.ask = self._ask  # type: ignore[method-assign]

    @property
    def claims(self) -> Lone:
        """The participant's claims are noted like its other requests."""
        return self

    def __getattr__(self, word: str) -> Callable[..., None]:
        if word.startswith("_"):
            raise AttributeError(word)
        return lambda *_: self.effects.append(word)

    def _ask(self, command: Callable[[Any], None]) -> None:
        command(self)

    def happens(self, *events: Event) -> list[str]:
        """Returns the effects of the last one."""
        for event in events:
            self.effects.clear()
            if event is Event.FINAL:
                self.record = replace(self.record, status=Status.FINAL, master="10.0.0.1 29500 1")
            self.agent.record = self.record
            self.agent._happens(event, "why")
        return self.effects


FIRST = (Event.FROZEN, Event.FINAL)
WAY_TO: dict[Phase, tuple[Event, ...]] = {
    Phase.JOINING: (),
    Phase.READY: FIRST[:1],
    Phase.RUNNING: FIRST,
    Phase.DONE: (*FIRST, Event.SUCCEEDED),
    Phase.STOPPING: (*FIRST, Event.NEWER_ROUND),
    Phase.LEAVING: (*FIRST, Event.CLOSED),
    Phase.ENDED: (Event.LEAVE,),
}
END_WORKERS = ["SIGTERM"]
EFFECTS: dict[tuple[Phase, Event], list[str]] = {
    (Phase.JOINING, Event.FROZEN): ["confirm"],
    (Phase.JOINING, Event.NEWER_ROUND): ["join"],
    (Phase.JOINING, Event.CLOSED): [],
    (Phase.JOINING, Event.LEAVE): [],
    (Phase.READY, Event.FINAL): ["before workers of round 0", "worker 0 of round 0"],
    (Phase.READY, Event.NEWER_ROUND): ["join"],
    (Phase.READY, Event.CLOSED): [],
    (Phase.READY, Event.LEAVE): [],
    (Phase.RUNNING, Event.FAILED): ["report_failure", *END_WORKERS],
    (Phase.RUNNING, Event.SUCCEEDED): ["report_done", *END_WORKERS],  # what they left running
    (Phase.RUNNING, Event.NEWER_ROUND): END_WORKERS,
    (Phase.RUNNING, Event.CLOSED): END_WORKERS,
    (Phase.RUNNING, Event.LEAVE): END_WORKERS,
    (Phase.DONE, Event.NEWER_ROUND): END_WORKERS,
    (Phase.DONE, Event.CLOSED): END_WORKERS,
    (Phase.DONE, Event.LEAVE): END_WORKERS,
    (Phase.STOPPING, Event.STOPPED): ["evidence", "join"],
    (Phase.STOPPING, Event.NEWER_ROUND): END_WORKERS,
    (Phase.STOPPING, Event.CLOSED): END_WORKERS,
    (Phase.STOPPING, Event.LEAVE): END_WORKERS,
    (Phase.LEAVING, Event.STOPPED): ["evidence"],
    (Phase.LEAVING, Event.NEWER_ROUND): END_WORKERS,
    (Phase.LEAVING, Event.CLOSED): END_WORKERS,
    (Phase.LEAVING, Event.LEAVE): END_WORKERS,
}


def test_every_row_of_the_table_has_effects_that_are_stated() -> None:
    assert EFFECTS.keys() == {(phase, event) for phase, row in TRANSITIONS.items() for event in row}


@pytest.mark.parametrize("event", Event)
@pytest.mark.parametrize("phase", Phase)
def test_every_phase_with_every_event(patch: Patch, phase: Phase, event: Event) -> None:
    lone = Lone(patch)
    lone.happens(*WAY_TO[phase])
    assert lone.agent.phase is phase
    if phase is Phase.ENDED:
        assert lone.happens(event) == []  # whatever comes late
        assert lone.agent.phase is Phase.ENDED
    elif event in TRANSITIONS[phase]:
        assert lone.happens(event) == EFFECTS[phase, event]
        assert lone.agent.phase is TRANSITIONS[phase][event]
    else:
        with pytest.raises(IllegalTransitionError) as caught:
            lone.happens(event)
        assert (caught.value.state, caught.value.event) == (phase.value, event.value)
        assert lone.effects == []
        assert lone.agent.phase is phase


@pytest.mark.parametrize(
    ("event", "phase", "effects"),
    [(Event.NEWER_ROUND, Phase.JOINING, ["evidence", "join"]), (Event.CLOSED, Phase.ENDED, ["evidence"])],
)
def test_where_nothing_is_left_to_be_ended_there_is_no_phase_between(
    patch: Patch, event: Event, phase: Phase, effects: list[str]
) -> None:
    lone = Lone(patch)
    lone.happens(*WAY_TO[Phase.DONE])
    for _ in range(4):
        lone.agent._handle_stop()
    assert lone.happens(event) == effects
    assert lone.agent.phase is phase


# -- two agents, one of which coordinates, crashed after every effect


class Story:
    """They meet; a worker fails; they meet again, and all workers end with 0. Who dies comes again, or does not."""

    def __init__(self, world: AgentWorld, *, comes_again: bool) -> None:
        self.world = world
        self._comes_again = comes_again
        self._has_failed = False
        self._died_at: float | None = None

    def goes_on(self) -> bool:
        """What happens next, if anything does now. Returns whether all is over."""
        world = self.world
        dead = [node for node in world.agents if not node.alive and node.code is None]
        if dead and self._comes_again and len(world.agents) == 2:
            self._died_at = self._died_at or world.clock.now
            if world.clock.now > self._died_at + 0.5:
                world.start(dead[0].index)
        if not world.everybody_runs():
            return world.is_over()
        record = world.newest()
        assert record is not None
        if not self._has_failed and record.round == 0:
            self._has_failed = True
            fails = [node for node in world.agents if node.alive and record.member(node.info.uid)][-1]
            assert fails.workers is not None
            fails.workers.break_down()
        elif record.round > 0:
            world.finish()
        return world.is_over()


@pytest.mark.parametrize("comes_again", [True, False])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_crash_after_any_single_effect(patch: Patch, victim: int, comes_again: bool) -> None:
    seen: set[str] = set()
    for effects in range(1000):
        world = AgentWorld(SETTINGS, patch=patch)
        world.on_effect = lambda node, where: seen.add(where.partition(" ")[0])
        nodes = [world.start(0), world.start(1)]
        nodes[victim].crash_after = effects
        story = Story(world, comes_again=comes_again)
        assert world.run(story.goes_on, seconds=200), f"node {victim} crashed after effect {effects}: {world.newest()}"
        assert world.processes == []
        has_crashed = nodes[victim].code is None
        assert {node.code for node in world.agents if node.code is not None} <= {0}, "who lived saw the end"
        assert world.succeeded(), world.newest()
        if not has_crashed:
            break
    assert effects > 25, "the story is too short to say anything"
    assert seen >= {"before", "after", "worker", "SIGTERM", "end", "evidence"}


def test_both_crash(patch: Patch) -> None:
    """One after the other, in any moment of the story; both come again."""
    for first in range(0, 40, 3):
        for second in range(0, 40, 5):
            world = AgentWorld(SETTINGS, patch=patch)
            nodes = [world.start(0), world.start(1)]
            nodes[0].crash_after, nodes[1].crash_after = first, second

            def goes_on(world: AgentWorld = world) -> bool:
                for index in range(2):
                    newest = world.newest_agent(index)
                    if not newest.alive and newest.code is None:
                        world.start(index)
                if world.everybody_runs(least=2):
                    world.finish()
                return world.is_over()

            assert world.run(goes_on, seconds=200), f"{first}, {second}: {world.newest()}"
            assert world.succeeded()


def test_the_budget_is_spent_on_workers_alone(patch: Patch) -> None:
    world = AgentWorld(SETTINGS, patch=patch, max_restarts=1)
    nodes = [world.start(0), world.start(1)]
    failed: set[int] = set()

    def goes_on() -> bool:
        record = world.newest()
        if record is not None and world.everybody_runs() and record.round not in failed:
            failed.add(record.round)
            assert nodes[1].workers is not None
            nodes[1].workers.break_down(f"failure {record.round}")
        return world.is_over()

    assert world.run(goes_on, seconds=100)
    record = world.newest()
    assert record is not None
    assert (record.outcome, record.retryable) == (Outcome.FAILED, True), "another attempt may end otherwise"
    assert "restarts exhausted (1 of 1 restarts used)" in record.reason
    assert failed == {0, 1}
    assert {node.code for node in nodes} == {1}


# -- growing, spares


def seats(world: AgentWorld) -> list[int]:
    record = world.newest()
    return [member.node for member in record.members] if record is not None else []


def started(patch: Patch, *nodes: int, sizes: dict[int, int] | None = None, **changes: Any) -> AgentWorld:
    world = AgentWorld(replace(SETTINGS, **changes), patch=patch, sizes=sizes)
    for index in nodes:
        world.start(index)
    return world


def blocks(world: AgentWorld) -> dict[int, list[int]]:
    """Node → global ranks that run there."""
    found: dict[int, list[int]] = {}
    for worker in world.processes:
        found.setdefault(worker.node, []).append(worker.rank)
    return found


def test_a_spare_takes_a_dead_nodes_place_with_its_rank_block(patch: Patch) -> None:
    world = started(patch, 0, 1, 2, 3, max_nodes=3, expected_nodes=4, sizes={0: 1, 1: 3, 2: 2, 3: 3})
    assert world.run(world.everybody_runs)
    assert blocks(world) == {0: [0], 1: [1, 2, 3], 2: [4, 5]}
    world.nodes[1].alive = False
    at = world.clock.now
    assert world.run(lambda: world.everybody_runs() and seats(world) == [0, 3, 2])
    assert blocks(world) == {0: [0], 3: [1, 2, 3], 2: [4, 5]}
    assert world.clock.now - at < SETTINGS.heartbeat_ttl + 3, "no last call"
    record = world.newest()
    assert record is not None
    assert (record.restarts_used, record.vacant) == (0, 0)
    assert [
        (fields["node"], fields["replaces_node"]) for _, event, fields in world.events if event == "node_replaced"
    ] == [(3, 1)]
    world.start(1)  # it comes back, and is a spare now
    assert world.run(lambda: (r := world.newest()) is not None and r.waiting == 1)
    assert seats(world) == [0, 3, 2]


@pytest.mark.parametrize("grow", GrowPolicy)
def test_a_late_node(patch: Patch, grow: GrowPolicy) -> None:
    world = started(patch, 0, 1, max_nodes=3, expected_nodes=3, grow=grow, grow_patience=60.0)
    assert world.run(world.everybody_runs)
    began = world.clock.now
    world.start(2)
    waits = lambda: (r := world.newest()) is not None and r.waiting == 1  # noqa: E731
    if grow is not GrowPolicy.NOW:
        assert world.run(waits)
        world.run(lambda: False, seconds=10)
        assert seats(world) == [0, 1]
    if grow is GrowPolicy.CHECKPOINT:
        world.agents[1].saved_at.append(world.clock.now)
        assert world.run(lambda: world.everybody_runs(least=3), seconds=8)
        assert world.clock.now < began + 40
    elif grow is GrowPolicy.NEVER:
        world.run(lambda: False, seconds=120)
        assert seats(world) == [0, 1]
        assert world.agents[0].workers is not None
        world.agents[0].workers.break_down()
    assert world.run(lambda: world.everybody_runs(least=3), seconds=20)
    assert seats(world) == [0, 1, 2]


def test_a_script_that_reports_no_checkpoint_is_interrupted_after_a_while(patch: Patch) -> None:
    world = started(patch, 0, 1, max_nodes=3, expected_nodes=3, grow=GrowPolicy.CHECKPOINT, grow_patience=60.0)
    assert world.run(world.everybody_runs)
    began = world.clock.now
    world.run(lambda: False, seconds=20)
    world.start(2)
    assert world.run(lambda: world.everybody_runs(least=3), seconds=100)
    assert 60 <= world.clock.now - began < 70


def test_an_earlier_checkpoint_is_known_when_somebody_comes(patch: Patch) -> None:
    """The script reports some, so the next one is waited for: from the last one, so long as patience lasts."""
    world = started(patch, 0, 1, max_nodes=3, expected_nodes=3, grow=GrowPolicy.CHECKPOINT, grow_patience=60.0)
    assert world.run(world.everybody_runs)
    world.run(lambda: False, seconds=100)
    world.agents[0].saved_at.append(world.clock.now)
    saved = world.clock.now
    world.run(lambda: False, seconds=30)
    world.start(2)
    assert world.run(lambda: world.everybody_runs(least=3), seconds=100)
    assert 60 <= world.clock.now - saved < 70


# -- anything at any time


@pytest.mark.parametrize("seed", range(40))
def test_random_failures_crashes_freezes_and_returns(patch: Patch, seed: int) -> None:
    rng = random.Random(seed)
    size = rng.randint(1, 4)
    spares = rng.randint(0, 1)
    settings = replace(
        SETTINGS,
        max_nodes=size,
        expected_nodes=size + spares,
        grow=rng.choice(list(GrowPolicy)),
        grow_patience=20.0,
        last_call_timeout=3,
    )
    sizes = {node: rng.randint(1, 3) for node in range(size + spares)}
    world = AgentWorld(settings, patch=patch, rng=rng, max_restarts=rng.randint(0, 6), sizes=sizes)
    for index in rng.sample(range(size + spares), rng.randint(1, size + spares)):
        world.start(index)
    trouble_ends = world.clock.now + 60

    def anything() -> bool:
        if world.is_over():
            return True
        calm = world.clock.now > trouble_ends
        for index in range(size + spares):
            agents = [node for node in world.agents if node.index == index]
            newest = agents[-1] if agents else None
            gone = newest is None or (not newest.alive and newest.code is None)
            if gone and (calm or rng.random() < 0.05):
                world.start(index)
            elif newest is not None and newest.alive:
                meddle(newest, rng, calm=calm)
        return calm and world.is_settled()

    assert world.run(anything, seconds=400, rng=rng), world.newest()

    def ends() -> bool:
        world.finish()
        return world.is_over()

    assert world.run(ends, seconds=100, rng=rng), world.newest()
    record = world.newest()
    assert record is not None
    assert record.outcome in (Outcome.SUCCEEDED, Outcome.FAILED, Outcome.TOO_FEW_NODES)
    while world.processes:
        world.check()  # the guardians take their time


def meddle(node: AgentNode, rng: random.Random, *, calm: bool) -> None:
    if calm:
        node.frozen = False
        return
    chance = rng.random()
    running = node.workers if node.agent.phase is Phase.RUNNING else None
    if chance < 0.004:
        node.alive = False
    elif chance < 0.008:
        node.frozen = True
    elif chance < 0.02:
        node.frozen = False
    elif chance < 0.03 and running is not None and running.started and not node.frozen:
        running.break_down(f"failure {rng.randint(0, 2)}")
    elif chance < 0.034 and running is not None and running.started and not node.frozen:
        running.finish()
    elif chance < 0.05:
        node.saved_at.append(node.world.clock.now)
