"""Handlers whose coordinator goes: the others, also one that only waits, go on without it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_elastic.rendezvous.state import RendezvousTimeoutError
from tests.rigs.rendezvous_handlers import HandlerRig
from tests.rigs.waiting import until


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[HandlerRig]:
    rig = HandlerRig(tmp_path)
    yield rig
    rig.end()


def test_a_node_that_only_waits_takes_over(rig: HandlerRig) -> None:
    one = rig.make(1, 1)
    rig.meet(one)
    waiting = rig.start(rig.make(1, 1))
    until(lambda: one.num_nodes_waiting() == 1)
    assert one.shutdown()
    assert waiting.result(30).world_size == 1


def test_nodes_that_gave_up_are_not_waited_for(rig: HandlerRig) -> None:
    with pytest.raises(RendezvousTimeoutError):
        rig.make(2, timeout=0.5).next_rendezvous()
    rounds = rig.meet(rig.make(2), rig.make(2))
    assert {found.world_size for found in rounds} == {2}


def test_nodes_that_leave_one_by_one_close_it_too(rig: HandlerRig) -> None:
    one, other = rig.make(1, 2, last_call_timeout=5.0), rig.make(1, 2, last_call_timeout=5.0)
    rig.meet(one, other)
    assert one.shutdown()
    until(other.round_is_over)
    assert not other.is_closed()
    assert rig.meet(other)[0].world_size == 1
    assert other.shutdown()
    assert other.is_closed()
