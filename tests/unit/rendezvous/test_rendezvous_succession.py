"""Which process finishes a closed attempt: exactly one, the supervisor where Slurm confirms its node."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from hpc_elastic.rendezvous.claims import goodbye_key
from hpc_elastic.rendezvous.failure_detector import FailureDetector
from hpc_elastic.rendezvous.membership import NodeInfo, Peers
from hpc_elastic.rendezvous.schedule import poll_intervals
from hpc_elastic.rendezvous.state import RoundRecord, Status
from hpc_elastic.rendezvous.succession import END_ASKED, END_PATIENCE, END_TURN, END_UNCONFIRMED, Ending, claim_end
from hpc_elastic.run.events import RunEvent
from hpc_elastic.run.paths import Outcome
from hpc_elastic.run.spec import RendezvousSettings
from tests.rigs.event_pairs import pair_of
from tests.rigs.fake_clock import FakeClock
from tests.rigs.memory_store import MemoryStore

INTERVALS = poll_intervals(RendezvousSettings())
CLOSED = RoundRecord(
    number=9, epoch="e", term=1, leader="x", round=0, status=Status.CLOSED, outcome=Outcome.FAILED, lost=(2,)
)


class Heard:
    def __init__(self) -> None:
        self.events: list[tuple[str, Mapping[str, Any]]] = []

    def on_event(self, event: RunEvent) -> None:
        self.events.append(pair_of(event))

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.events]


class Stage:
    def __init__(self) -> None:
        self.store = MemoryStore()
        self.clock = FakeClock()
        self.detector = FailureDetector(self.store, RendezvousSettings(), INTERVALS, self.clock)

    def ending(self, uid: str) -> tuple[Ending, Heard]:
        heard = Heard()
        return Ending(self.store, uid, heard, self.clock), heard

    def peers(self, node: int, start: int = 1) -> Peers:
        uid = f"{node:05d}-n{node}-{start:016x}-0000" if node >= 0 else "99999-boss-0000000000000001-0000"
        info = NodeInfo(uid=uid, node=node, host=f"n{node}", local_world_size=1, addresses=())
        peers = Peers(self.store, info, None)
        peers.announce()
        return peers


def test_the_supervisor_claims_the_end_and_the_agents_leave_it_to_it() -> None:
    stage = Stage()
    boss, heard_boss = stage.ending("boss")
    agent, heard = stage.ending("a")
    agent.begin(0, confirmed=True)
    agent.step_of_agent()
    assert heard.names == []
    assert agent.look_interval(INTERVALS, observes=False) is not None
    boss.may_claim()
    boss.step_of_supervisor(CLOSED, stage.peers(0), stage.detector)
    agent.step_of_agent()
    assert heard.events == [("end_claimed", {"by": "boss"})]
    assert agent.look_interval(INTERVALS, observes=False) is None
    assert heard_boss.names == ["end_claimed"]


@pytest.mark.parametrize("comes_back", [False, True], ids=["Slurm has not confirmed its node", "it may claim too late"])
def test_a_supervisor_that_may_not_claim_the_end_leaves_it_open(comes_back: bool) -> None:
    stage = Stage()
    boss, heard = stage.ending("boss")
    boss.step_of_supervisor(CLOSED, peers := stage.peers(0), stage.detector)
    assert heard.names == []
    assert claim_end(stage.store, "a")
    if comes_back:
        boss.may_claim()
    for _ in range(2):
        boss.step_of_supervisor(CLOSED, peers, stage.detector)
    assert heard.events == [("end_taken_over", {"by": "a", "reason": ""})]


def test_a_supervisor_that_waits_for_slurms_answer_is_waited_for_longer() -> None:
    """A controller that is slow to answer must not make a job's end an agent's, who can only cancel the job."""
    stage = Stage()
    boss, _ = stage.ending("boss")
    agent, heard = stage.ending("a")
    agent.begin(0, confirmed=True)
    boss.announce_claim()
    boss.step_of_supervisor(CLOSED, stage.peers(0), stage.detector)
    stage.clock.now += END_ASKED - 0.1
    for _ in range(3):
        agent.step_of_agent()
    assert heard.names == []
    stage.clock.now += 0.2
    agent.step_of_agent()
    assert heard.names == ["end_unclaimed"]


def test_without_a_supervisor_each_agent_gets_its_turn_and_one_claim_settles_it() -> None:
    stage = Stage()
    (first, heard_first), (second, heard_second) = stage.ending("a"), stage.ending("b")
    first.begin(0, confirmed=True)
    second.begin(1, confirmed=True)
    for passed, names in (
        (END_PATIENCE - 0.1, ([], [])),
        (0.2, (["end_unclaimed"], [])),
        (END_TURN, (["end_unclaimed"], ["end_unclaimed"])),
    ):
        stage.clock.now += passed
        for ending in (second, first):
            ending.step_of_agent()
        assert (heard_first.names, heard_second.names) == names
    assert claim_end(stage.store, "a")
    assert claim_end(stage.store, "a")
    assert not claim_end(stage.store, "b")
    third, heard = stage.ending("c")
    third.begin(1, confirmed=True)
    stage.clock.now += END_PATIENCE + END_TURN + 0.1
    third.step_of_agent()
    assert heard.events == [("end_claimed", {"by": "a"})], "an end that was claimed meanwhile is left alone"


def test_the_supervisors_time_runs_while_the_agents_workers_end_and_the_last_resort_waits_longer() -> None:
    stage = Stage()
    agent, heard = stage.ending("a")
    agent.step_of_agent()
    stage.clock.now += END_PATIENCE
    agent.begin(0, confirmed=True)
    agent.step_of_agent()
    assert heard.names == ["end_unclaimed"]
    agent.begin(0, confirmed=False)
    stage.clock.now += END_UNCONFIRMED - END_PATIENCE - 0.1
    agent.step_of_agent()
    assert heard.names == ["end_unclaimed"]
    stage.clock.now += 0.2
    agent.step_of_agent()
    assert heard.names == ["end_unclaimed", "end_unclaimed"]


def test_the_supervisor_hears_once_when_the_last_living_agent_has_gone() -> None:
    stage = Stage()
    boss, heard = stage.ending("boss")
    peers = stage.peers(0)
    for node, start in ((1, 1), (1, 2), (2, 1)):  # node 1's first agent was replaced, node 2 is lost
        stage.peers(node, start)
    stage.store.put_if_absent(goodbye_key("00000-n0-0000000000000001-0000"), "bye")
    boss.step_of_supervisor(CLOSED, peers, stage.detector)
    assert "agents_departed" not in heard.names
    stage.store.put_if_absent(goodbye_key("00001-n1-0000000000000002-0000"), "bye")
    for _ in range(3):
        boss.step_of_supervisor(CLOSED, peers, stage.detector)
    assert heard.names == ["agents_departed"]
    assert boss.look_interval(INTERVALS, observes=True) == INTERVALS.stride
