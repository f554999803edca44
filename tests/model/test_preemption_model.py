"""A notice among participants: it holds from when it is given, and the attempt always ends, whoever dies on the way."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from hpc_elastic.rendezvous.state import PreemptionStatus, RoundRecord, RunNotice, Status
from hpc_elastic.run.paths import Outcome
from tests.model.test_rendezvous_model import SETTINGS, failure, started
from tests.rigs.rendezvous_world import Crash, Node, World


def training() -> World:
    world = started()
    assert world.run(world.all_running_in_one_round)
    return world


def newest(world: World) -> RoundRecord:
    found = world.newest()
    assert found is not None
    return found


def is_over(world: World) -> bool:
    return newest(world).status is Status.CLOSED


class CrashAtWrite:
    """A world's ``on_effect``: a node dies at its write number `at`, counted from 0."""

    def __init__(self, victim: int, at: int) -> None:
        self.is_reached = False
        self._victim = victim
        self._left = at

    def __call__(self, node: Node, where: str) -> None:
        if node.index != self._victim or not node.alive:
            return
        if self._left == 0:
            node.alive, self.is_reached = False, True
            raise Crash
        self._left -= 1


def play_along(world: World, *, from_step: int = 50) -> None:
    """Each node's agent: says where its workers stand, and a while later that they have saved."""
    for node in world.live():
        record = node.participant.record
        if record is None or record.notice is None or record.status is not Status.FINAL:
            continue
        said = getattr(node, "said", set())
        if "noted" not in said:
            word = PreemptionStatus(heeds=True, step=from_step + node.index, rate=2.0)
            node.participant.claims.report_noted(record.round, word)
            node.said = said | {"noted"}  # type: ignore[attr-defined]
        elif record.notice.is_agreed and "kept" not in said:
            node.participant.claims.report_kept(record.round)
            node.said = said | {"kept"}  # type: ignore[attr-defined]


def play_until_over(world: World) -> bool:
    def over() -> bool:
        play_along(world)
        return is_over(world)

    return world.run(over)


def test_the_first_notice_holds_and_the_workers_run_on() -> None:
    world = training()
    world.nodes[2].participant.to_all.give_notice(RunNotice("SIGTERM on n2", 60.0))
    assert world.run(lambda: newest(world).notice is not None)
    world.nodes[1].participant.to_all.give_notice(RunNotice("SIGUSR2 on n1", 99.0))
    world.run(lambda: False, seconds=10)
    assert newest(world).notice.reason == "SIGTERM on n2"  # type: ignore[union-attr]
    assert newest(world).status is Status.FINAL


@pytest.mark.parametrize("giver", [0, 1, 2])
@pytest.mark.parametrize("is_agreed", [False, True])
def test_a_notice_that_leaves_less_time_takes_its_place(giver: int, is_agreed: bool) -> None:
    world = training()
    began = world.clock.now
    world.nodes[2].participant.to_all.give_notice(RunNotice("SIGUSR2 on n2", 90.0))
    if is_agreed:
        for node in world.live():
            node.participant.claims.report_noted(0, PreemptionStatus(heeds=True, step=50, rate=2.0))
    assert world.run(lambda: (n := newest(world).notice) is not None and n.is_agreed is is_agreed, seconds=20)
    step = newest(world).notice.step  # type: ignore[union-attr]
    world.run(lambda: False, seconds=5)
    world.nodes[giver].participant.to_all.give_notice(RunNotice("SIGTERM on n0", 12.0))
    world.run(lambda: False, seconds=3)
    world.nodes[(giver + 1) % 3].participant.to_all.give_notice(RunNotice("a third", 60.0))
    assert world.run(lambda: is_over(world))
    last = newest(world)
    assert last.notice is not None
    assert last.reason.startswith("notice SIGTERM on n0; ")
    assert "had not saved after 12 s" in last.reason
    assert 12.0 < world.clock.now - began < 40.0
    assert not is_agreed or last.notice.step == step, "some may have saved after it"


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_crash_while_a_notice_is_shortened_gives_nobody_more_time(victim: int) -> None:
    at, reached = 0, True
    while reached:
        world, crash = training(), CrashAtWrite(victim, at)
        world.nodes[1].participant.to_all.give_notice(RunNotice("SIGUSR2 on n1", 300.0))
        assert world.run(lambda world=world: newest(world).notice is not None)  # type: ignore[misc]
        world.on_effect = crash
        began = world.clock.now
        for node in world.nodes:
            node.participant.to_all.give_notice(RunNotice("SIGTERM", 20.0))
        assert world.run(lambda world=world: is_over(world))  # type: ignore[misc]
        assert world.clock.now - began < 60.0, f"node {victim} crashed at its write {at}"
        assert newest(world).outcome is Outcome.PREEMPTED
        at, reached = at + 1, crash.is_reached
    assert at > 3, "the crashes hit something"


def test_all_agree_on_one_step_that_none_has_passed() -> None:
    world = training()
    world.nodes[1].participant.to_all.give_notice(RunNotice("SIGUSR2 on n1", 60.0))
    assert play_until_over(world)
    last = newest(world)
    assert last.outcome is Outcome.PREEMPTED
    assert last.notice is not None
    assert last.notice.step > 52
    assert "saved in" in last.reason
    agreed = {r.notice.step for r in world.history.values() if r.notice is not None and r.notice.is_agreed}
    assert len(agreed) == 1


def test_the_time_is_over_and_nobody_has_saved() -> None:
    world = training()
    world.nodes[0].participant.to_all.give_notice(RunNotice("SIGUSR2 on n0", 30.0))
    began = world.clock.now
    assert world.run(lambda: is_over(world))
    assert 29.0 < world.clock.now - began < 35.0
    assert "had not saved after 30 s" in newest(world).reason


def test_a_notice_while_nodes_meet_ends_the_attempt_at_once() -> None:
    world = training()
    world.nodes[0].participant.claims.report_failure(0, failure(0))
    assert world.run(lambda: newest(world).status is Status.JOINABLE)
    world.nodes[1].participant.to_all.give_notice(RunNotice("SIGUSR2 on n1", 60.0))
    assert world.run(lambda: is_over(world), seconds=10)
    assert newest(world).outcome is Outcome.PREEMPTED


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_crash_after_any_single_write_holds_up_nobody(victim: int) -> None:
    """The attempt ends as preempted: with the checkpoint, or without where a node has died before it was complete."""
    at, reached = 0, True
    while reached:
        world, crash = training(), CrashAtWrite(victim, at)
        world.on_effect = crash
        world.nodes[1].participant.to_all.give_notice(RunNotice("SIGUSR2 on n1", 60.0))
        if victim == 1:
            world.nodes[2].participant.to_all.give_notice(RunNotice("SIGUSR2 on n1", 60.0))
        assert play_until_over(world), f"node {victim} crashed at its write {at}"
        assert newest(world).outcome is Outcome.PREEMPTED
        at, reached = at + 1, crash.is_reached
    assert at > 3, "the crashes hit something"


def test_a_coordinator_that_is_frozen_in_the_notice_commits_nothing_when_it_wakes() -> None:
    world = training()
    world.nodes[1].participant.to_all.give_notice(RunNotice("SIGUSR2 on n1", 60.0))
    assert world.run(lambda: newest(world).notice is not None)
    world.nodes[0].frozen = True
    assert play_until_over(world)
    number = newest(world).number
    world.nodes[0].frozen = False
    world.run(lambda: False, seconds=20)
    assert newest(world).number == number
    assert SETTINGS.heartbeat_ttl < 60


def all_know(world: World) -> bool:
    return all(node.participant.record.heard for node in world.live())  # type: ignore[union-attr]


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_signal_that_all_hear_is_told_once_whoever_dies_of_it(victim: int) -> None:
    """And each that is left reads it: the supervisor among them."""
    at, reached = 0, True
    while reached:
        world, crash = training(), CrashAtWrite(victim, at)
        world.on_effect = crash
        for node in world.nodes:
            node.participant.to_all.heard(f"SIGTERM on n{node.index}")
        assert world.run(lambda world=world: all_know(world))  # type: ignore[misc]
        told = {record.heard for record in world.history.values() if record.heard}
        assert len(told) == 1
        world.on_effect = lambda node, where: None
        survivor = next(node for node in world.live() if node.index != victim)
        survivor.participant.to_all.give_notice(RunNotice("SIGTERM (preemption)", 60.0))
        assert play_until_over(world), f"node {victim} crashed at its write {at}"
        assert newest(world).outcome is Outcome.PREEMPTED
        at, reached = at + 1, crash.is_reached


def test_a_worker_that_wants_no_other_attempt_has_its_way_also_in_a_notice() -> None:
    """By the exit code 93, say, since its job has been out of time too often."""
    world = training()
    world.nodes[1].participant.to_all.give_notice(RunNotice("SIGUSR2 on n1", 60.0))
    assert world.run(lambda: newest(world).notice is not None)
    world.nodes[2].participant.claims.report_failure(0, replace(failure(2), retryable=False))
    assert world.run(lambda: is_over(world), seconds=10)
    assert newest(world).outcome is Outcome.PREEMPTED
    assert not newest(world).retryable


def test_another_failure_in_a_notice_is_requeued() -> None:
    world = training()
    world.nodes[1].participant.to_all.give_notice(RunNotice("SIGUSR2 on n1", 60.0))
    assert world.run(lambda: newest(world).notice is not None)
    world.nodes[2].participant.claims.report_failure(0, failure(2))
    assert world.run(lambda: is_over(world), seconds=10)
    assert newest(world).retryable
