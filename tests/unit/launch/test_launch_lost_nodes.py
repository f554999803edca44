"""When an agent is started on trial on a node that the run has lost."""

from __future__ import annotations

from hpc_elastic.launch.agents import FIRST_TRIAL, LONGEST_PAUSE, MAX_TRIALS, LostNodes


def test_a_lost_node_is_tried_once_it_has_had_the_time_to_come_back_by_itself() -> None:
    lost = LostNodes()
    assert lost.next_at() is None
    lost.see({2}, now=10.0)
    assert lost.next_at() == 10.0 + FIRST_TRIAL
    assert lost.due(10.0 + FIRST_TRIAL - 0.1) == []
    lost.see({2}, now=12.0)
    assert lost.due(10.0 + FIRST_TRIAL) == [2]
    assert lost.is_on_trial(2)
    assert (lost.next_at(), lost.due(1000.0)) == (None, []), "not while an agent may be on its way, or runs there"


def test_the_pauses_grow_and_at_some_time_it_is_not_tried_any_more() -> None:
    lost, now, pauses = LostNodes(), 0.0, []
    lost.see({1}, now=now)
    while (at := lost.next_at()) is not None:
        assert lost.due(at) == [1]
        now = at + 11.0  # srun needs as long to find that a node is dead
        if (pause := lost.failed(1, now=now)) is not None:
            pauses.append(pause)
    assert pauses == sorted(pauses)
    assert (len(pauses), pauses[0], pauses[-1]) == (MAX_TRIALS - 1, 2 * FIRST_TRIAL, LONGEST_PAUSE)
    assert 300 < now < 1200


def test_a_node_that_is_back_and_lost_again_begins_anew() -> None:
    lost = LostNodes()
    lost.see({0, 1}, now=0.0)
    assert lost.due(FIRST_TRIAL) == [0, 1]
    lost.failed(0, now=5.0)
    lost.see({0}, now=6.0)
    assert not lost.is_on_trial(1)
    lost.see({0, 1}, now=7.0)
    assert lost.due(7.0 + FIRST_TRIAL) == [1], "node 0 was put off for longer"
