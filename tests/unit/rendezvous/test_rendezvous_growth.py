"""What members say about checkpoints while nodes wait."""

from __future__ import annotations

from hpc_elastic.rendezvous.claims import ClaimKind, claim_key, read_claims
from hpc_elastic.rendezvous.cluster_view import GrowthSigns
from tests.rigs.memory_store import MemoryStore

NEVER_SAVED = float("inf")
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
