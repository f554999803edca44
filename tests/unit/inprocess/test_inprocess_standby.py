"""The standby stores: who has one, who may go on there, and who must not."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from hpc_elastic.base.codec import dumps, loads
from hpc_elastic.inprocess import standby as module
from hpc_elastic.inprocess.sockets import detect_silence
from hpc_elastic.inprocess.standby import MET, Arrival, Meeting, Refuge, Standby, decide, is_candidate, knock, may_stay
from hpc_elastic.inprocess.state import InternalError
from hpc_elastic.inprocess.store import PrefixStore

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    ("environ", "candidates"),
    [
        ({"WORLD_SIZE": "2"}, [1]),
        ({"WORLD_SIZE": "8"}, [1, 2, 3]),
        ({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}, [1, 2, 3]),
        ({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}, [4]),
        ({"WORLD_SIZE": "40", "LOCAL_WORLD_SIZE": "8"}, [8, 16, 24]),
        ({"WORLD_SIZE": "11", "SLURM_STEP_TASKS_PER_NODE": "4(x2),3"}, [4, 8]),
        ({"WORLD_SIZE": "8", "TORCHELASTIC_USE_AGENT_STORE": "True"}, []),
    ],
)
def test_each_of_the_next_nodes_has_one(environ: dict[str, str], candidates: list[int]) -> None:
    ranks = range(int(environ["WORLD_SIZE"]))
    assert [rank for rank in ranks if is_candidate({**environ, "RANK": str(rank)})] == candidates


def arrival(rank: int, **other: Any) -> Arrival:
    given = {"iteration": 3, "world_size": 4, "has_returned": False, "is_certain": True}
    return Arrival(initial_rank=rank, **{**given, **other})


def test_those_who_came_go_on_after_the_last_iteration_that_any_knows() -> None:
    met = decide([arrival(3), arrival(1, iteration=4)])
    assert met == Meeting(iteration=5, present=(1, 3))
    assert loads(Meeting, dumps(met)) == met
    assert loads(Arrival, dumps(arrival(2))) == arrival(2)


def test_where_the_server_is_silent_only_a_majority_goes_on() -> None:
    silent = [arrival(rank, is_certain=False) for rank in range(4)]
    assert "others may go on" in decide(silent[:2]).objection
    assert not decide(silent[:3]).objection
    assert not decide([silent[0], arrival(1)]).objection, "one of them was refused: the server is dead"


@pytest.mark.parametrize("world_size", [2, 3, 4, 7, 8])
def test_of_two_parts_of_a_ring_at_most_one_goes_on(world_size: int) -> None:
    both = 0
    for gone in range(1, world_size):
        at_standby = [arrival(rank, world_size=world_size, is_certain=False) for rank in range(gone)]
        stays, goes_on = may_stay(silent=gone, left=world_size - gone), not decide(at_standby).objection
        assert not (stays and goes_on)
        both += stays or goes_on
    assert both == world_size - 1, "wherever the ranks are cut, one part goes on"


def test_nobody_runs_again_where_others_may_have_returned() -> None:
    done = [arrival(rank, has_returned=True) for rank in range(4)]
    assert "can't be known" in decide(done[:3]).objection
    assert not decide(done).objection, "all are here: none has returned"
    assert not decide([*done[:2], arrival(2)]).objection, "rank 2 was in the function: the call was not over"


@pytest.fixture
def server() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def refusing() -> Iterator[tuple[str, int]]:
    with socket.socket() as bound:  # not listening; nobody else gets the port
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()


def refuge(rank: int, primary: tuple[str, int], *standbys: tuple[str, int], **other: Any) -> Refuge:
    given = {"timeout": timedelta(seconds=60), "silence": 60.0, "patience": 60.0}
    places = [Standby(initial_rank=1 + n, host=host, port=port) for n, (host, port) in enumerate(standbys)]
    assert [loads(Standby, dumps(place)) for place in places] == places
    return Refuge(name="call0", initial_rank=rank, server=primary, left=places, **{**given, **other})


def test_all_that_live_meet_at_the_first_standby_that_does_not_refuse(
    server: dist.TCPStore, refusing: tuple[str, int]
) -> None:
    found: dict[int, Meeting] = {}

    def come(rank: int) -> None:
        mine = refuge(rank, refusing, refusing, ("127.0.0.1", server.port))
        found[rank] = mine.meet(iteration=2, world_size=2, has_returned=False)
        assert mine.move_in()[2].initial_rank == 2

    threads = [threading.Thread(target=come, args=(rank,)) for rank in (3, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == dict.fromkeys((3, 5), Meeting(iteration=3, present=(3, 5)))


def test_who_has_lost_the_store_alone_ends(
    server: dist.TCPStore, monkeypatch: pytest.MonkeyPatch, refusing: tuple[str, int]
) -> None:
    monkeypatch.setattr(module, "_DYING_SECONDS", 0)
    alone = refuge(1, ("127.0.0.1", server.port), ("127.0.0.1", server.port))
    for _ in range(2):
        with pytest.raises(InternalError, match="alone has lost"):
            alone.flee()
    with pytest.raises(InternalError, match="all its standbys are"):
        refuge(1, refusing, refusing).flee()


def test_no_other_standby_is_taken_than_one_that_is_silent(
    server: dist.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "knock", lambda address, _: None if address[0] == "silent" else knock(address, 1))
    lost = refuge(1, ("silent", 1), ("silent", 2), ("127.0.0.1", server.port))
    with pytest.raises(InternalError, match="the standby at silent is silent"):
        lost.flee()
    with pytest.raises(InternalError):
        lost.flee()
    few = refuge(1, ("silent", 1), ("127.0.0.1", server.port), silence=0.0)
    with pytest.raises(InternalError, match="only 1 of 2 ranks are here"):
        few.meet(iteration=0, world_size=2, has_returned=False)


def test_who_comes_late_ends(server: dist.TCPStore, refusing: tuple[str, int]) -> None:
    PrefixStore("call0", server).set(MET, dumps(Meeting(iteration=1, present=(2, 3))))
    with pytest.raises(InternalError, match="went on without this rank"):
        refuge(1, refusing, ("127.0.0.1", server.port)).meet(iteration=0, world_size=4, has_returned=False)


def test_a_silent_node_ends_its_connections(server: dist.TCPStore) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as other:
        detect_silence(server.port, 30)
        assert other.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert other.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 10
        assert other.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000
