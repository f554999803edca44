"""At most one attempt's workers run: agents of one attempt, and the supervisor of the next, at any moment and crashed
after every write. The guarantee is docs/explanation/when-something-dies.md's."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from hpc_elastic.launch.supersede import AgentState, EarlierAttempt
from hpc_elastic.rendezvous.schedule import poll_intervals
from hpc_elastic.rendezvous.state import Status
from hpc_elastic.run.paths import Outcome
from tests.model.test_agent_model import SETTINGS as AGENT_SETTINGS
from tests.model.test_agent_model import meddle
from tests.rigs.agent_world import AgentWorld
from tests.rigs.rendezvous_world import Crash, GatedStore

SETTINGS = replace(AGENT_SETTINGS, max_nodes=3, expected_nodes=3)
Patch = Callable[[object, str, object], None]


@pytest.fixture
def patch(monkeypatch: pytest.MonkeyPatch) -> Patch:
    return monkeypatch.setattr


def supersede(world: AgentWorld, rng: random.Random, *, crash_after: int | None = None) -> bool:
    """The next attempt's supervisor takes over. Returns whether it went on, and was not crashed by then.

    Slurm reaches no node: silence is all that is known of an agent that does not deregister.
    """
    effects = 0

    def gate(where: str) -> None:
        nonlocal effects
        effects += 1
        if crash_after is not None and effects > crash_after:
            raise Crash(where)

    earlier = EarlierAttempt(
        store=GatedStore(world.store, gate), run_id="model", intervals=poll_intervals(world.settings), clock=world.clock
    )
    try:
        earlier.supersede(f"99999-next-{rng.getrandbits(63):016x}-0000", "superseded by attempt 1 on n9")
        if crash_after is not None:
            raise Crash("later")
        waiting = {AgentState.ALIVE, AgentState.AWAITED}
        while waiting & set(earlier.look().values()):
            world.run(lambda: False, seconds=0.2, tick=0.25, rng=rng)
    except Crash:
        return False
    return True


def check_that_none_trains(world: AgentWorld) -> None:
    frozen = {node.info.uid for node in world.agents if node.alive and node.frozen}
    left = [worker for worker in world.processes if worker.agent not in frozen]
    assert not left, f"two attempts train at once: {left}"
    saving = [node.index for node in world.agents if node.alive and node.frozen and node.lease_until >= world.clock.now]
    assert not saving, f"nodes {saving} thaw, and their workers may save beside the next attempt"


@pytest.mark.parametrize("seed", range(60))
def test_no_worker_of_an_attempt_runs_once_the_next_one_goes_on(patch: Patch, seed: int) -> None:
    rng = random.Random(seed)
    size = rng.randint(1, 4)
    settings = replace(SETTINGS, max_nodes=size, expected_nodes=size)
    world = AgentWorld(settings, patch=patch, rng=rng, max_restarts=rng.randint(0, 4))
    for index in range(size):
        world.start(index)

    def anything() -> bool:
        for node in world.agents:
            if node.alive:
                meddle(node, rng, calm=False)
        index = rng.randrange(size)
        if rng.random() < 0.1 and not world.newest_agent(index).alive:
            world.start(index)
        return False

    world.run(anything, seconds=rng.uniform(0, 30), rng=rng)
    for _ in range(rng.randint(0, 3)):  # one supervisor after the other dies while it takes over
        supersede(world, rng, crash_after=rng.randint(0, 6))
        world.run(anything, seconds=rng.uniform(0, 3), rng=rng)
    assert supersede(world, rng)
    check_that_none_trains(world)
    record = world.newest()
    assert record is not None
    assert record.status is Status.CLOSED
    # Nothing that comes back, or comes late, trains: not an agent that thaws, and not one that starts now.
    for node in world.agents:
        node.frozen = False
    world.run(lambda: False, seconds=5, rng=rng)
    world.start(rng.randrange(size))
    world.run(lambda: False, seconds=5, rng=rng)
    for _ in range(20):
        world.check()
    assert not world.processes
    assert not any(node.alive for node in world.agents)


@pytest.mark.parametrize("crash_after", range(8))
def test_a_supervisor_that_dies_while_it_takes_over_leaves_it_to_the_next_one(patch: Patch, crash_after: int) -> None:
    world = AgentWorld(SETTINGS, patch=patch)
    for index in range(3):
        world.start(index)
    assert world.run(world.everybody_runs)
    rng = random.Random(0)
    supersede(world, rng, crash_after=crash_after)
    assert supersede(world, rng)
    check_that_none_trains(world)
    record = world.newest()
    assert record is not None
    assert record.outcome is Outcome.SUPERSEDED
