"""Whether nodes that wait come into a healthy round, and what members say about checkpoints meanwhile."""

from __future__ import annotations

import itertools

import pytest
from msgspec.structs import replace

from hpc_elastic.rendezvous.claims import ClaimKind, claim_key, read_claims
from hpc_elastic.rendezvous.growth import GrowthFacts, GrowthSigns, decide_growth
from hpc_elastic.run.option_values import GrowPolicy
from tests.rigs.memory_store import MemoryStore

NEVER_SAVED = float("inf")
HEALTHY = GrowthFacts(
    newcomers=1,
    spares=0,
    free=1,
    vacant=0,
    since_final=60.0,
    since_waiting=10.0,
    since_saved=NEVER_SAVED,
    is_saving=False,
)


def takes_in(policy: GrowPolicy = GrowPolicy.CHECKPOINT, **facts: object) -> bool:
    return decide_growth(replace(HEALTHY, **facts), policy, patience=300.0, answer=4.0).takes_in


@pytest.mark.parametrize(
    ("policy", "facts", "expected"),
    [
        (GrowPolicy.NOW, {}, True),
        (GrowPolicy.NEVER, {}, False),
        (GrowPolicy.NEVER, {"since_saved": 5.0, "since_final": 900.0}, False),
        (GrowPolicy.CHECKPOINT, {}, False),
        (GrowPolicy.CHECKPOINT, {"since_saved": 5.0}, True),
        (GrowPolicy.CHECKPOINT, {"since_saved": 5.0, "is_saving": True}, False),  # the others still write theirs
        (GrowPolicy.CHECKPOINT, {"since_saved": 1.0}, False),  # or may, and have not said so yet
        (GrowPolicy.CHECKPOINT, {"since_saved": 12.0}, False),  # that one was before anybody waited
        (GrowPolicy.CHECKPOINT, {"since_final": 301.0}, True),  # a script that reports none
        (GrowPolicy.CHECKPOINT, {"since_final": 301.0, "is_saving": True}, True),  # one that never ends
        (GrowPolicy.CHECKPOINT, {"since_final": 301.0, "since_waiting": 1.0}, False),  # who saved has yet to answer
        (GrowPolicy.CHECKPOINT, {"since_final": 900.0, "since_saved": 299.0}, False),
        (GrowPolicy.CHECKPOINT, {"since_final": 900.0, "since_saved": 301.0}, True),
    ],
)
def test_a_healthy_round(policy: GrowPolicy, facts: dict[str, object], expected: bool) -> None:
    assert takes_in(policy, **facts) is expected


@pytest.mark.parametrize("policy", GrowPolicy)
def test_who_replaces_a_lost_node_comes_in_at_once(policy: GrowPolicy) -> None:
    assert takes_in(policy, vacant=1, since_waiting=0.0)
    assert takes_in(policy, vacant=1, newcomers=0, spares=1, since_waiting=0.0)
    assert not takes_in(policy, vacant=1, newcomers=0)


@pytest.mark.parametrize("policy", GrowPolicy)
def test_at_max_and_as_a_spare_a_node_waits(policy: GrowPolicy) -> None:
    for since_saved, since_final in itertools.product((5.0, NEVER_SAVED), (1.0, 9999.0)):
        assert not takes_in(policy, free=0, since_saved=since_saved, since_final=since_final)
        assert not takes_in(policy, newcomers=0, spares=1, since_saved=since_saved, since_final=since_final)


ROUND = 3


class Signs:
    """A coordinator's look at what others say."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.signs = GrowthSigns(self.store)

    def says(self, uid: str, kind: ClaimKind, serial: int, value: str = "{}") -> None:
        assert self.store.put_if_absent(claim_key(ROUND, kind, uid, serial=str(serial)), value)

    def look(self, now: float, *, waiting: bool = True, round_index: int = ROUND) -> tuple[float, float, bool]:
        self.signs.look(round_index, read_claims(self.store, round_index), waiting=waiting, now=now)
        return self.signs.since_waiting, self.signs.since_saved, self.signs.is_saving


def test_times_run_from_the_first_look_that_saw_somebody_wait() -> None:
    signs = Signs()
    assert signs.look(100.0, waiting=False) == (0.0, NEVER_SAVED, False)
    assert signs.look(110.0) == (0.0, NEVER_SAVED, False)
    assert signs.look(115.0) == (5.0, NEVER_SAVED, False)
    assert signs.look(116.0, waiting=False)[0] == 0.0
    assert signs.look(120.0)[0] == 0.0


def test_a_checkpoint_is_as_old_as_its_node_says_and_grows_older_here() -> None:
    signs = Signs()
    signs.look(100.0)
    signs.says("a", ClaimKind.SAVED, 0, '{"age":40.0}')
    assert signs.look(101.0)[1] == 40.0
    signs.says("b", ClaimKind.SAVED, 0, '{"age":0.5}')
    signs.says("c", ClaimKind.SAVED, 0, '{"age":90}')
    assert signs.look(110.0)[1] == 0.5
    assert signs.look(113.0)[1] == 3.5
    signs.signs.paused_for(10.0)
    assert signs.look(123.0)[1] == 3.5, "time for which this process was held up counts for nobody"
    assert signs.look(123.0)[0] == 13.0


def test_a_node_that_writes_a_checkpoint_is_waited_for_until_it_is_complete() -> None:
    signs = Signs()
    signs.look(100.0)
    signs.says("a", ClaimKind.SAVING, 0)
    signs.says("b", ClaimKind.SAVED, 0, '{"age":0}')
    assert signs.look(101.0)[2]
    signs.says("a", ClaimKind.SAVED, 0, '{"age":0}')
    assert not signs.look(102.0)[2]
    signs.says("a", ClaimKind.SAVING, 1)
    assert signs.look(103.0)[2]


def test_another_round_begins_with_nothing() -> None:
    signs = Signs()
    signs.says("a", ClaimKind.SAVING, 0)
    signs.says("b", ClaimKind.SAVED, 0, "damaged")
    assert signs.look(100.0) == (0.0, 0.0, True)
    assert signs.look(150.0, round_index=ROUND + 1) == (0.0, NEVER_SAVED, False)
