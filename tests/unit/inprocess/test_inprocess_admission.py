"""Who takes which place: properties of the decision, and the two sides over a store."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from hpc_elastic.base.codec import dumps, loads
from hpc_elastic.inprocess import replacement
from hpc_elastic.inprocess.replacement import Admission, Admissions, ReplacementProcess, admission, is_enough
from hpc_elastic.inprocess.state import InternalError, State
from hpc_elastic.inprocess.store import PrefixStore, StoreMixin

pytestmark = pytest.mark.torch


class HashStore(StoreMixin, dist.HashStore):  # type: ignore[misc, unused-ignore]
    pass


@given(
    world_size=st.integers(1, 40),
    dead=st.sets(st.integers(0, 39)),
    unknown=st.sets(st.integers(0, 39)),
    came=st.lists(st.integers(0, 39), unique=True, max_size=50),
)
def test_every_replacement_has_a_place_of_its_own_and_its_own_one_where_it_is_free(
    world_size: int, dead: set[int], unknown: set[int], came: list[int]
) -> None:
    terminated = {rank: None if rank in unknown else rank for rank in dead if rank < world_size}
    requests = {f"u{number}": rank for number, rank in enumerate(came)}
    found = admission(iteration=1, world_size=world_size, terminated=terminated, requests=requests)
    places = list(found.places.values())
    assert sorted(found.places) == sorted(requests)
    assert len(set(places)) == len(places)
    # The living keep theirs; what is empty, taken and alive is everything from 0 on.
    alive = set(range(world_size)) - set(terminated)
    assert not alive & set(places)
    assert sorted([*alive, *places, *found.empty]) == list(range(found.world_size))
    assert found.world_size > world_size or set(places) <= set(terminated)
    if found.world_size > world_size:
        assert not found.empty
    for uid, initial_rank in requests.items():
        if terminated.get(initial_rank, -1) == initial_rank:
            assert found.places[uid] == initial_rank
    assert loads(Admission, dumps(found)) == found


@pytest.mark.parametrize(
    ("active", "terminated", "requests", "enough"),
    [(4, 0, 0, True), (4, 1, 0, False), (4, 1, 1, True), (3, 1, 0, True), (3, 2, 0, False), (3, 2, 1, True)],
)
def test_spares_or_fresh_processes_are_enough(active: int, terminated: int, requests: int, enough: bool) -> None:
    found = is_enough(world_size=4, active_world_size=active, terminated=terminated, requests=requests)
    assert found is enough


def advanced(*, world_size: int = 3) -> State:
    state = State()
    state.world_size = state.active_world_size = world_size
    state.advance()
    return state


def test_the_first_decision_holds_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    base = PrefixStore("call", HashStore())
    ended = PrefixStore(0, base)
    ended.set_initial_rank(2, 2)
    fresh = ReplacementProcess(2, uid="me")
    StoreMixin.append_item(base, replacement.JOINERS, "me 2")
    first = Admissions(base, wait=60).admit(advanced(), ended, {2})
    assert first == Admission(iteration=1, world_size=3, places={"me": 2}, empty=())
    StoreMixin.append_item(base, replacement.JOINERS, "late 1")
    assert Admissions(base, wait=60).admit(advanced(), ended, {2}) == first
    assert fresh.wait_for_place(base, patience=1) == first
    # Who has a place, or was withdrawn, is not given another one.
    state = advanced()
    state.advance()
    StoreMixin.append_item(base, replacement.WITHDRAWN, "late")
    again = Admissions(base, wait=0).admit(state, PrefixStore(1, base), {0})
    assert (again.places, again.empty) == ({}, (0,))


def test_nobody_is_waited_for_longer_than_said(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(replacement.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(replacement.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    base = PrefixStore("call", HashStore())
    found = Admissions(base, wait=60).admit(advanced(), PrefixStore(0, base), {1})
    assert (found.world_size, found.empty) == (3, (1,))
    assert 60 <= now[0] < 61


@pytest.mark.parametrize("how", ["over", "silent"])
def test_a_replacement_whose_restart_group_is_gone_stops_waiting(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    now = [0.0]
    monkeypatch.setattr(replacement.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(replacement.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    base: Any = PrefixStore("call", HashStore())
    if how == "over":
        Admissions(base, wait=1).finish()
        assert ReplacementProcess(0).wait_for_place(base, patience=5) is None
        return
    with pytest.raises(InternalError, match="has shown no life for 5 s"):
        ReplacementProcess(0).wait_for_place(base, patience=5)
    assert 5 <= now[0] < 6
