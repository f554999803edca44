"""Participants of one rendezvous, interleaved and crashed after every single write, on a fake clock."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from hpc_elastic.rendezvous.state import OBSERVER_PLACE, NodeFailure, Status
from hpc_elastic.run.paths import Outcome
from hpc_elastic.run.spec import RendezvousSettings
from tests.rigs.rendezvous_world import Node, World

SETTINGS = RendezvousSettings(
    min_nodes=2,
    max_nodes=3,
    expected_nodes=3,
    timeout=120,
    last_call_timeout=5,
    heartbeat_interval=1,
    heartbeat_ttl=5,
    poll_interval=1,
)


def started(settings: RendezvousSettings = SETTINGS) -> World:
    world = World(settings)
    for index in range(settings.expected_nodes):
        world.start(index)
    return world


def failure(node: int) -> NodeFailure:
    return NodeFailure(node=node, fingerprint="E", failure_class="root", retryable=True, message="E: boom")


def test_all_nodes_meet_in_node_order() -> None:
    world = started()
    assert world.run(world.all_running_in_one_round)
    record = world.newest()
    assert record is not None
    assert [m.node for m in record.members] == [0, 1, 2]
    assert record.round == 0
    assert record.master == "n0:1"
    assert world.clock.now < 1010, "nobody waits for a last call when all are here"


def test_min_nodes_start_after_the_last_call() -> None:
    world = World(SETTINGS)
    world.start(1)
    world.start(2)
    assert world.run(world.all_running_in_one_round)
    record = world.newest()
    assert record is not None
    assert [m.node for m in record.members] == [1, 2]
    assert 1005 <= world.clock.now <= 1012


def test_too_few_nodes_end_with_the_missing_named() -> None:
    world = World(SETTINGS)
    world.start(1)
    assert world.run(lambda: (r := world.newest()) is not None and r.status is Status.CLOSED, seconds=400)
    record = world.newest()
    assert record is not None
    assert record.outcome is Outcome.TOO_FEW_NODES
    assert "0,2" in record.reason


@pytest.mark.parametrize("lives", [True, False])
def test_too_few_nodes_wait_for_the_last_call_only_while_somebody_could_start_an_agent(lives: bool) -> None:
    """The batch host is dead, with its supervisor: nobody waits for a node that nobody can bring."""
    settings = replace(SETTINGS, min_nodes=3, last_call_timeout=60)
    world = started(settings)
    supervisor = world.start(OBSERVER_PLACE)
    assert world.run(world.all_running_in_one_round)
    world.run(lambda: False, seconds=20)
    died = world.clock.now
    world.nodes[0].alive = False
    supervisor.alive = lives
    assert world.run(lambda: (r := world.newest()) is not None and r.status is Status.CLOSED, seconds=200)
    record = world.newest()
    assert record is not None
    assert record.outcome is Outcome.TOO_FEW_NODES
    assert ("no supervisor answers" in record.reason) is not lives
    if lives:
        assert world.clock.now - died >= 60
    else:
        assert world.clock.now - died < 20


def test_one_that_a_living_supervisor_brings_back_is_taken_in() -> None:
    world = started(replace(SETTINGS, min_nodes=3, last_call_timeout=60))
    world.start(OBSERVER_PLACE)
    assert world.run(world.all_running_in_one_round)
    world.nodes[0].alive = False
    world.run(lambda: False, seconds=30)
    world.start(0)
    assert world.run(world.all_running_in_one_round)


def test_a_failure_leads_to_the_next_round_on_all_nodes_and_costs_one_restart() -> None:
    world = started()
    assert world.run(world.all_running_in_one_round)
    world.nodes[1].participant.claims.report_failure(0, failure(1))
    world.nodes[2].participant.claims.report_failure(0, failure(2))
    assert world.run(lambda: world.all_running_in_one_round() and world.newest().round == 1)  # type: ignore[union-attr]
    record = world.newest()
    assert record is not None
    assert record.restarts_used == 1
    assert [m.node for m in record.members] == [0, 1, 2]


def test_a_dead_node_shrinks_the_round_free_of_charge_and_a_new_agent_gets_its_slot_back() -> None:
    world = started()
    assert world.run(world.all_running_in_one_round)
    world.nodes[0].alive = False  # coordinator and first slot in one
    assert world.run(lambda: world.all_running_in_one_round() and world.newest().round == 1)  # type: ignore[union-attr]
    record = world.newest()
    assert record is not None
    assert [m.node for m in record.members] == [1, 2]
    assert record.restarts_used == 0
    assert record.lost == (0,)
    world.start(0)
    assert world.run(lambda: world.all_running_in_one_round() and len(world.newest().members) == 3)  # type: ignore[union-attr]
    record = world.newest()
    assert record is not None
    assert sorted(m.node for m in record.members) == [0, 1, 2]


def test_a_restarted_agent_of_the_coordinators_node_takes_over_at_once() -> None:
    world = started()
    assert world.run(world.all_running_in_one_round)
    at = world.clock.now
    world.nodes[0].alive = False
    world.start(0)
    assert world.run(lambda: world.all_running_in_one_round() and world.newest().round == 1)  # type: ignore[union-attr]
    record = world.newest()
    assert record is not None
    assert [m.node for m in record.members] == [0, 1, 2]
    assert world.clock.now - at < 4, "nobody waited for the dead agent's heartbeat to run out"


def test_done_on_all_nodes_closes_with_success() -> None:
    world = started()
    assert world.run(world.all_running_in_one_round)
    for node in world.nodes:
        node.participant.claims.report_done(0)
    assert world.run(lambda: world.newest().status is Status.CLOSED)  # type: ignore[union-attr]
    assert world.newest().outcome is Outcome.SUCCEEDED  # type: ignore[union-attr]


def test_a_node_that_dies_after_its_work_is_done_holds_nobody_up() -> None:
    world = started()
    assert world.run(world.all_running_in_one_round)
    world.nodes[2].participant.claims.report_done(0)
    world.run(lambda: False, seconds=2)
    world.nodes[2].alive = False
    world.run(lambda: False, seconds=10)
    assert world.newest().round == 0  # type: ignore[union-attr]
    for node in world.nodes[:2]:
        node.participant.claims.report_done(0)
    assert world.run(lambda: world.newest().status is Status.CLOSED)  # type: ignore[union-attr]
    assert world.newest().outcome is Outcome.SUCCEEDED  # type: ignore[union-attr]


def test_a_node_that_comes_when_the_first_are_done_restarts_nobody() -> None:
    """Those that wait at the exit barrier would do again what they have done."""
    world = World(RendezvousSettings(**{**_as_dict(SETTINGS), "min_nodes": 2, "expected_nodes": 3}))
    world.start(0)
    world.start(1)
    assert world.run(world.all_running_in_one_round)
    world.nodes[1].participant.claims.report_done(0)
    world.run(lambda: False, seconds=2)
    world.start(2)
    assert world.run(lambda: world.newest().waiting == 1)  # type: ignore[union-attr]
    world.run(lambda: False, seconds=10)
    assert world.newest().round == 0  # type: ignore[union-attr]
    world.nodes[0].participant.claims.report_done(0)
    assert world.run(lambda: world.newest().status is Status.CLOSED)  # type: ignore[union-attr]
    assert world.newest().outcome is Outcome.SUCCEEDED  # type: ignore[union-attr]
    assert world.newest().round == 0  # type: ignore[union-attr]


def test_extra_nodes_wait_and_take_a_lost_ones_slot() -> None:
    world = World(RendezvousSettings(**{**_as_dict(SETTINGS), "expected_nodes": 4, "min_nodes": 3}))
    for index in range(4):
        world.start(index)
    assert world.run(world.all_running_in_one_round)
    assert [m.node for m in world.newest().members] == [0, 1, 2]  # type: ignore[union-attr]
    assert world.run(lambda: world.newest().waiting == 1)  # type: ignore[union-attr]
    world.nodes[1].alive = False
    assert world.run(lambda: world.all_running_in_one_round() and world.newest().round >= 1)  # type: ignore[union-attr]
    assert [m.node for m in world.newest().members] == [0, 3, 2]  # type: ignore[union-attr]


def test_a_frozen_coordinator_wakes_up_deposed_and_comes_back() -> None:
    world = started()
    assert world.run(world.all_running_in_one_round)
    world.nodes[0].frozen = True
    assert world.run(lambda: world.all_running_in_one_round() and world.newest().round == 1)  # type: ignore[union-attr]
    world.nodes[0].frozen = False
    assert world.run(lambda: world.all_running_in_one_round() and len(world.newest().members) == 3)  # type: ignore[union-attr]


def test_everybody_frozen_at_once_evicts_nobody() -> None:
    world = started()
    assert world.run(world.all_running_in_one_round)
    number = world.newest().number  # type: ignore[union-attr]
    world.clock.now += 60
    world.run(lambda: False, seconds=20)
    assert world.newest().number == number  # type: ignore[union-attr]


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_crash_after_any_single_write_stops_nobody_else(victim: int) -> None:
    effects = 0
    while True:
        world = started()
        world.nodes[victim].crash_after = effects
        ended = world.run(lambda world=world: _scenario(world), seconds=200)
        assert ended, f"node {victim} crashed after effect {effects}: {world.newest()}"
        if world.nodes[victim].alive:
            break  # it never came to that effect: all are covered
        effects += 1
    assert effects > 8, "the scenario is too short to say anything"


def _scenario(world: World) -> bool:
    """Meet, fail once on node 1 (or the lowest that lives), meet again."""
    record = world.newest()
    if record is None or not world.all_running_in_one_round():
        return False
    if any(r.round > 0 and r.status is Status.FINAL and r.restarts_used > 0 for r in world.history.values()):
        return True
    teller = next(n for n in reversed(world.live()) if record.member(n.info.uid))
    teller.participant.claims.report_failure(record.round, failure(teller.index))
    return False


@pytest.mark.parametrize("way", ["polled", "beats", "driven, no packets", "driven"])
@pytest.mark.parametrize("seed", range(60))
def test_random_crashes_freezes_and_returns(seed: int, way: str) -> None:
    """Stepped at each tick, or as the thread does it, where most notifications are lost; each case comes again by its
    seed."""
    rng = random.Random(seed)
    beats, driven = way in ("beats", "driven"), way.startswith("driven")
    size = rng.randint(2, 6)
    settings = RendezvousSettings(
        **{
            **_as_dict(SETTINGS),
            "min_nodes": rng.randint(1, size),
            "max_nodes": size,
            "expected_nodes": size,
            "timeout": 100000,
            "last_call_timeout": 1000,
        }
    )
    world = World(settings, beats=beats, driven=driven, loses=lambda: rng.random() < 0.7)
    if beats and rng.random() < 0.5:
        world.cut = {(rng.randrange(size), rng.randrange(size)) for _ in range(rng.randrange(4))}
    for index in range(size):
        world.start(index)

    def interleave(node: Node, where: str) -> None:
        # Others run between any two writes of this one.
        others = [n for n in world.live() if n is not node]
        if others and rng.random() < 0.2:
            world.on_effect = lambda node, where: None
            try:
                rng.choice(others).step()
            finally:
                world.on_effect = interleave

    world.on_effect = interleave
    for _ in range(12):
        world.run(lambda: False, seconds=rng.uniform(0.5, 8), tick=rng.choice([0.05, 0.25, 1.0]), rng=rng)
        event = rng.random()
        node = rng.choice(world.nodes)
        if event < 0.35 and node.alive:
            node.crash_after = node.effects + rng.randint(0, 3)
        elif event < 0.5 and node.alive:
            node.frozen = not node.frozen
        elif event < 0.75 and node.running_round is not None and node.alive and not node.frozen:
            node.participant.claims.report_failure(node.running_round, failure(node.index))
        else:
            gone = [n for n in range(size) if not any(o.alive and o.index == n for o in world.nodes)]
            if gone:
                world.start(rng.choice(gone))
    for node in world.nodes:
        node.frozen = False
        node.crash_after = None
    for index in range(size):
        if not any(n.alive and n.index == index for n in world.nodes):
            world.start(index)

    def whole() -> bool:
        return world.all_running_in_one_round() and len(world.newest().members) == size  # type: ignore[union-attr]

    assert world.run(whole, seconds=300, rng=rng), f"seed {seed}: {world.newest()}"


SLOW_LEASE = RendezvousSettings(
    **{
        **{name: getattr(SETTINGS, name) for name in RendezvousSettings.__struct_fields__},
        "heartbeat_interval": 30,
        "heartbeat_ttl": 100,
    }
)
"""With beats: the files alone would need minutes to miss a node."""


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_node_that_falls_silent_is_asked_and_then_out_in_ten_seconds(victim: int) -> None:
    world = World(SLOW_LEASE, beats=True)
    for index in range(3):
        world.start(index)
    assert world.run(world.all_running_in_one_round)
    world.run(lambda: False, seconds=3)
    at = world.clock.now
    world.nodes[victim].alive = False
    assert world.run(lambda: world.all_running_in_one_round() and world.newest().round == 1, seconds=60)  # type: ignore[union-attr]
    assert world.clock.now - at <= 10
    assert world.newest().lost == (victim,)  # type: ignore[union-attr]
    assert [event for _, event, _ in world.events].count("nodes_asked") == 1


def test_the_coordinator_and_another_node_may_die_at_once() -> None:
    world = World(RendezvousSettings(**{**_as_dict(SLOW_LEASE), "max_nodes": 4, "expected_nodes": 4}), beats=True)
    for index in range(4):
        world.start(index)
    assert world.run(world.all_running_in_one_round)
    world.run(lambda: False, seconds=3)
    at = world.clock.now
    world.nodes[0].alive = world.nodes[2].alive = False
    assert world.run(lambda: world.all_running_in_one_round() and world.newest().round >= 1, seconds=60)  # type: ignore[union-attr]
    assert world.clock.now - at <= 12
    assert [m.node for m in world.newest().members] == [1, 3]  # type: ignore[union-attr]


@pytest.mark.parametrize("victim", [1, 2, 3])
def test_who_died_with_the_coordinator_is_missed_with_it_whoever_looks_first(victim: int) -> None:
    """Only who has asked knows who else has not answered: it is to take over, and not who happens to look before it."""
    for moment in range(10):
        world = World(
            RendezvousSettings(**{**_as_dict(SLOW_LEASE), "max_nodes": 4, "expected_nodes": 4}), beats=True, driven=True
        )
        for index in range(4):
            world.start(index)
        assert world.run(world.all_running_in_one_round)
        world.run(lambda: False, seconds=3 + 0.13 * moment)
        at = world.clock.now
        world.nodes[0].alive = world.nodes[victim].alive = False
        alive = sorted({1, 2, 3} - {victim})
        assert world.run(lambda: [m.node for m in world.newest().members] == alive, seconds=60)  # type: ignore[union-attr]  # noqa: B023
        assert world.run(world.all_running_in_one_round, seconds=60)
        assert world.clock.now - at <= 10


def test_who_is_dead_is_asked_once_while_the_others_are_too_few_to_go_on() -> None:
    world = World(
        RendezvousSettings(**{**_as_dict(SLOW_LEASE), "min_nodes": 3, "max_nodes": 4, "expected_nodes": 4}), beats=True
    )
    for index in range(4):
        world.start(index)
    assert world.run(world.all_running_in_one_round)
    world.run(lambda: False, seconds=3)
    world.nodes[2].alive = False
    world.run(lambda: False, seconds=1)
    world.nodes[3].alive = False
    world.run(lambda: world.newest().status is Status.CLOSED, seconds=60)  # type: ignore[union-attr]
    assert world.newest().outcome is Outcome.TOO_FEW_NODES  # type: ignore[union-attr]
    assert [event for _, event, _ in world.events].count("nodes_asked") <= 3


@pytest.mark.parametrize("cut", [(1, 0), (0, 1), (2, 0), (0, 2)])
def test_a_node_whose_packets_are_lost_in_one_direction_stays_in(cut: tuple[int, int]) -> None:
    world = World(SLOW_LEASE, beats=True)
    for index in range(3):
        world.start(index)
    assert world.run(world.all_running_in_one_round)
    world.run(lambda: False, seconds=3)
    world.cut = {cut}
    world.run(lambda: False, seconds=120)
    record = world.newest()
    assert record is not None
    assert (record.round, record.status) == (0, Status.FINAL)
    assert record.suspects == ()
    assert record.term == 1, "the coordinator has answered: nobody takes its place"
    assert record.number <= 6
    assert record.number < 12, "nobody is asked again and again"


def test_a_cut_network_evicts_nobody_while_the_files_move() -> None:
    world = World(SLOW_LEASE, beats=True)
    for index in range(3):
        world.start(index)
    assert world.run(world.all_running_in_one_round)
    world.run(lambda: False, seconds=3)
    world.cut = {(a, b) for a in range(3) for b in range(3)}
    world.run(lambda: False, seconds=120)
    assert world.newest().round == 0  # type: ignore[union-attr]


def test_everybody_frozen_at_once_evicts_nobody_with_beats_either() -> None:
    world = World(SLOW_LEASE, beats=True)
    for index in range(3):
        world.start(index)
    assert world.run(world.all_running_in_one_round)
    world.run(lambda: False, seconds=3)
    world.clock.now += 60
    world.run(lambda: False, seconds=30)
    assert world.newest().round == 0  # type: ignore[union-attr]


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_crash_after_any_single_write_stops_nobody_else_with_rare_heartbeats(victim: int) -> None:
    """As above, driven as by their threads and in touch: only who is asked shows by the files that it lives."""
    effects = 0
    while True:
        world = World(SETTINGS, beats=True, driven=True)
        for index in range(3):
            world.start(index)
        world.nodes[victim].crash_after = effects
        ended = world.run(lambda world=world: _scenario(world), seconds=200)
        assert ended, f"node {victim} crashed after effect {effects}: {world.newest()}"
        if world.nodes[victim].alive:
            break
        effects += 1
    assert effects > 8, "the scenario is too short to say anything"


def in_touch(nodes: int = 3, **more: float) -> World:
    """Driven by their threads, running, and hearing each other."""
    settings = RendezvousSettings(**{**_as_dict(SETTINGS), "max_nodes": nodes, "expected_nodes": nodes, **more})
    world = World(settings, beats=True, driven=True)
    for index in range(nodes):
        world.start(index)
    assert world.run(world.all_running_in_one_round)
    world.run(lambda: False, seconds=5)
    return world


def beaten(world: World, node: int) -> str | None:
    return world.store.get(f"hb/{world.nodes[node].info.uid}")


def test_who_is_heard_rewrites_its_heartbeat_rarely_and_stays_in() -> None:
    world = in_touch()
    number = world.newest().number  # type: ignore[union-attr]
    seen, at = set(), world.clock.now
    while world.clock.now < at + 300:
        seen.add(beaten(world, 1))
        world.run(lambda: False, seconds=1)
    assert len(seen) <= 300 / 30 + 2
    assert world.newest().number == number  # type: ignore[union-attr]


@pytest.mark.parametrize("cut", [(1, 0), (0, 1)])
def test_who_is_not_heard_any_more_goes_back_to_frequent_heartbeats(cut: tuple[int, int]) -> None:
    """Long before they would be missed; in either direction."""
    world = in_touch()
    world.cut = {cut}
    world.run(lambda: False, seconds=8)
    seen = set()
    for _ in range(20):
        seen.add(beaten(world, 1))
        world.run(lambda: False, seconds=1)
    assert len(seen) >= 15
    record = world.newest()
    assert record is not None
    assert (record.round, record.suspects, record.lost) == (0, (), ())


def test_a_network_that_comes_and_goes_puts_nobody_out() -> None:
    world = in_touch(4)
    rng = random.Random(1)
    for _ in range(40):
        world.cut = {(rng.randrange(4), rng.randrange(4)) for _ in range(rng.randrange(8))}
        world.run(lambda: False, seconds=rng.uniform(0.5, 12))
    record = world.newest()
    assert record is not None
    assert (record.round, record.lost) == (0, ())


def test_a_member_that_was_frozen_past_its_lease_comes_back_as_one() -> None:
    world = in_touch()
    world.nodes[1].frozen = True
    assert world.run(lambda: world.all_running_in_one_round() and world.newest().lost == (1,), seconds=60)  # type: ignore[union-attr]
    world.nodes[1].frozen = False
    assert world.run(lambda: world.all_running_in_one_round() and len(world.newest().members) == 3, seconds=60)  # type: ignore[union-attr]


def test_a_coordinator_that_was_frozen_commits_nothing_as_one() -> None:
    world = in_touch()
    world.nodes[0].frozen = True
    assert world.run(lambda: world.all_running_in_one_round() and len(world.newest().members) == 2, seconds=60)  # type: ignore[union-attr]
    term = world.newest().term  # type: ignore[union-attr]
    world.nodes[0].frozen = False
    assert world.run(lambda: world.all_running_in_one_round() and len(world.newest().members) == 3, seconds=60)  # type: ignore[union-attr]
    assert world.newest().term == term  # type: ignore[union-attr]
    assert world.newest().leader != world.nodes[0].info.uid  # type: ignore[union-attr]


def test_a_lost_notification_is_made_up_for_by_the_next_beat() -> None:
    world = in_touch()
    world.loses = lambda: True
    world.nodes[0].participant.claims.report_failure(0, failure(0))
    world.nodes[0].notified = True
    at = world.clock.now
    assert world.run(lambda: all(node.participant.record.round == 1 for node in world.nodes), seconds=30)  # type: ignore[union-attr]
    assert world.clock.now - at <= 1.5


def test_a_hung_filesystem_under_the_coordinator_is_noticed_though_its_beats_go_on() -> None:
    world = in_touch()
    hung = world.nodes[0]
    hung.step = lambda **_: 0.0  # type: ignore[method-assign]
    assert world.run(lambda: world.newest().leader != hung.info.uid, seconds=60)  # type: ignore[union-attr]


def _as_dict(settings: RendezvousSettings) -> dict[str, float]:
    return {name: getattr(settings, name) for name in RendezvousSettings.__struct_fields__}


@pytest.mark.parametrize(("cut", "least", "most"), [(False, 28, 33), (True, 57, 64)])
def test_a_coordinator_looks_half_as_often_where_all_hear_each_other(cut: bool, least: int, most: int) -> None:
    """A look at the claims is what a sleeping agent's CPU goes into; whoever is silent has it look as often as ever."""
    world = World(RendezvousSettings(min_nodes=3, max_nodes=3, expected_nodes=3), beats=True, driven=True)
    for index in range(3):
        world.start(index)
    assert world.run(world.all_running_in_one_round, tick=0.05)
    if cut:  # in one direction: that node does not hear the coordinator, which hears it
        world.cut = {(0, 2)}
    world.run(lambda: False, seconds=10, tick=0.05)
    looks = []
    plain = world.store.list

    def counted(folder: str) -> list[str]:
        if folder == "round/000000":
            looks.append(world.clock.now)
        return plain(folder)

    world.store.list = counted  # type: ignore[method-assign]
    world.run(lambda: False, seconds=60, tick=0.05)
    record = world.newest()
    assert record is not None
    assert record.round == 0
    assert least <= len(looks) <= most


@pytest.mark.parametrize("phase", [0.0, 0.3, 0.6, 0.9, 1.2, 1.5, 1.8])
def test_a_silence_is_noticed_as_soon_however_calm_it_was(phase: float) -> None:
    settings = RendezvousSettings(min_nodes=2, max_nodes=3, expected_nodes=3)
    world = World(settings, beats=True, driven=True)
    for index in range(3):
        world.start(index)
    assert world.run(world.all_running_in_one_round, tick=0.05)
    world.run(lambda: False, seconds=10 + phase, tick=0.05)
    world.nodes[2].alive = False
    died = world.clock.now
    assert world.run(lambda: bool(world.newest().suspects), tick=0.05)  # type: ignore[union-attr]
    stride = settings.poll_interval
    assert world.clock.now - died <= settings.beat_silence + stride + 0.2
