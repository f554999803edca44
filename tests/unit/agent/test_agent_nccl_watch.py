"""When NCCL's counts are a suspicion."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpc_elastic.agent import hang_detector, nccl_watch
from hpc_elastic.agent.hang_detector import Counts, HangDetector
from hpc_elastic.agent.heartbeat_watch import Hang
from hpc_elastic.agent.nccl_watch import NcclStall, NcclWatch, StallFound, judge_stall
from hpc_elastic.base import codec
from hpc_elastic.base.loop import FileExecutor
from hpc_elastic.failures.peers import Communicator, Launches, RasReport
from hpc_elastic.rendezvous.state import Member
from hpc_elastic.run.progress import AwaitedCall, FlightTail, Source, Suspicion, TailTrack
from tests.rigs.agent_site import hang_site
from tests.rigs.fake_clock import FakeClock
from tests.rigs.fake_ras import FakeRas
from tests.rigs.fake_workers import IdleWorkers, started

HOSTS = {0: "n0", 1: "n0", 2: "n1", 3: "n1"}


def world(*launched: int, name: str = "world", missing: tuple[int, ...] = (), kind: str = "AllReduce") -> Communicator:
    """A communicator whose ranks have launched so often."""
    found: dict[int, list[int]] = {}
    for rank, count in enumerate(launched):
        if rank not in missing:
            found.setdefault(count, []).append(rank)
    levels = tuple(Launches(count, len(ranks), tuple(ranks)) for count, ranks in sorted(found.items(), reverse=True))
    processes = {rank: ("10.0.0.1" if rank < 2 else "10.0.0.2", 100 + rank) for rank in range(len(launched))}
    return Communicator(name=name, size=len(launched), levels={kind: levels}, missing=missing, processes=processes)


def after(*answers: list[Communicator], beats: list[int] | None = None) -> StallFound | None:
    """An answer a minute; what the last one shows."""
    stall = NcclStall()
    for number, comms in enumerate(answers):
        report = RasReport(communicators=tuple(comms))
        stall = stall.then(report, beats=beats[number] if beats else 0, now=60.0 * number)
    return judge_stall(stall, report, least=300.0, hosts=HOSTS, pids={})


WORKS = [[world(n, n, n, n)] for n in range(3)]
STANDS = [[world(9, 9, 9, 9)]]
DIFFERS = [[world(9, 9, 8, 9)]]


PAUSED = [*WORKS, *STANDS * 4, [world(10, 10, 10, 10)]]
"""For 3 minutes."""


@pytest.mark.parametrize(
    ("answers", "beats", "is_suspicion"),
    [
        ([*WORKS, *STANDS * 5], None, False),
        (STANDS * 6, None, True),  # a hang in the first collective, before anything was seen
        ([[world(n, n, n, n)] for n in range(20)], None, False),
        ([*PAUSED, *[[world(11, 11, 11, 11)]] * 9], None, False),
        ([*PAUSED, *[[world(11, 11, 11, 11)]] * 12], None, True),  # a longer pause than any before
        ([[world(n, n, n - 1, n)] for n in range(1, 20)], None, False),  # one is behind, and goes on
        ([*WORKS, *DIFFERS * 5], None, False),
        ([[world(5, 5, 5, 5), world(n, n, name="tp")] for n in range(20)], None, False),
        ([[world(n, n, n, n), world(5, 4, name="p2p", kind="SendRecv")] for n in range(20)], None, False),
        # Heartbeats say that ranks work which launch nothing.
        ([*WORKS, *STANDS * 9], list(range(12)), False),
        ([*WORKS, *STANDS * 9], [5] * 12, True),
    ],
)
def test_what_is_a_suspicion(answers: list[list[Communicator]], beats: list[int] | None, is_suspicion: bool) -> None:
    assert (after(*answers, beats=beats) is not None) is is_suspicion


def test_ranks_that_differ_in_the_same_way_for_long() -> None:
    found = after(*WORKS, *DIFFERS * 6)
    assert found == StallFound(
        since=180.0,
        hang=Hang(
            source=Source.NCCL,
            reason="NCCL has made no progress for 5 min 00 s: "
            "rank 2 on n1 has launched AllReduce up to #8, 3 others up to #9",
            ranks=(2,),
            seconds=300.0,
        ),
    )


def test_a_group_of_some_ranks_is_named_by_the_ranks_of_the_run() -> None:
    tp = Communicator(
        name="tp",
        size=2,
        levels={"AllGather": (Launches(7, 1, (0,)), Launches(6, 1, (1,)))},
        processes={0: ("10.0.0.2", 102), 1: ("10.0.0.2", 103)},
    )
    found = after(*[[world(n, n, n, n), tp] for n in range(7)])
    assert found.hang.ranks == (3,)
    assert "rank 3 on n1 has launched AllGather up to #6, 1 other up to #7" in found.hang.reason
    alone = after(*[[tp]] * 7)  # the ranks of this run share no communicator: only the process is known
    assert alone.hang.ranks == ()
    assert "rank 1 of 2 (process 103 on 10.0.0.2) has launched AllGather up to #6" in alone.hang.reason


def test_two_that_do_not_answer_are_both_named() -> None:
    found = after(*WORKS, *[[world(9, 9, 9, 9, missing=(1, 3))]] * 6)
    assert found.hang.ranks == (1, 3)
    assert "rank 1 on n0 does not answer NCCL's RAS: its process is stopped or gone; rank 3 on n1" in found.hang.reason


@pytest.fixture(autouse=True)
def ranks_that_wait_for_a_gpu_in_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = itertools.count()
    counts = lambda pids: {rank: Counts(cpu=100.0 * next(cpu)) for rank in pids}  # noqa: E731
    monkeypatch.setattr(hang_detector, "read_counts", counts)


class Scene:
    """A watch of a run of 4 ranks on 2 nodes, and the server that it asks."""

    def __init__(self, folder: Path, server: FakeRas | None, *, group_rank: int = 0) -> None:
        self.clock, self.workers, self.folder = FakeClock(), IdleWorkers(group_rank=group_rank, answers=False), folder
        files = self.files = FileExecutor(name="test")
        address = f"127.0.0.1:{server.address[1]}" if server is not None else ""
        self.nccl = NcclWatch(address, run_uid="run", least=300.0, clock=self.clock)
        site = hang_site(folder, ["n0", "n1"], clock=self.clock, files=files)
        self.watch = HangDetector(site, nccl=self.nccl, gpus=None, environment={})
        self.record: Any = SimpleNamespace(round=0, members=[Member("u", 0, 2), Member("v", 1, 2)])
        self.idle = 0
        self.watch.on_start(started(0, 1))

    def minutes(self, count: float) -> list[Hang]:
        found, end = [], self.clock.monotonic() + 60.0 * count
        while self.clock.monotonic() < end:
            assert self.watch.due is not None
            wait = min(self.watch.due, end) - self.clock.monotonic()
            self.idle = self.idle + 1 if wait <= 0 else 0
            assert self.idle < 5, "the agent's loop would spin"
            self.clock.wait(threading.Event(), wait)
            found.append(self.watch.judge(self.workers, self.record))
            self.nccl._thread.do(lambda: None, within=30.0)
            self.files.do(lambda: None, within=30.0)
        return [each for each in found if each is not None]

    @property
    def shown(self) -> Suspicion | None:
        path = self.folder / "now.json"
        return codec.load(path, Suspicion) if path.exists() else None  # type: ignore[return-value]


def as_json(*launched: int) -> str:
    ranks = ",".join(
        f'{{"rank": {rank}, "host": "10.0.0.1", "pid": {100 + rank}, "collective_counts": {{"AllReduce": {count}}}}}'
        for rank, count in enumerate(launched)
    )
    return f'{{"nccl_version": "2.29.1", "communicators": [{{"size": {len(launched)}, "ranks": [{ranks}]}}]}}'


def test_a_straggler_is_a_suspicion_once_and_none_when_it_goes_on(tmp_path: Path) -> None:
    counts = [1, 1, 1, 1]
    with FakeRas(lambda: as_json(*counts)) as server:
        scene = Scene(tmp_path / "suspicions", server)
        assert scene.minutes(3) == []
        counts[:] = [9, 9, 8, 9]
        (found,) = scene.minutes(10)
        assert (found.source, found.ranks) == (Source.NCCL, (2,))
        assert (scene.shown.reason, scene.shown.ranks) == (found.reason, (2,))
        assert "rank 2 on n1 has launched AllReduce up to #8, 3 others up to #9" in found.reason
        assert not scene.workers.asked
        assert 10 <= server.asked.count("VERBOSE STATUS") <= 14  # once a minute
        counts[:] = [10, 10, 10, 10]
        assert scene.minutes(2) == []
        assert scene.shown is None
        scene.watch.before_stop()
        assert scene.watch.due is None


@pytest.mark.parametrize("done", [None, 0, 1])
def test_dumps_show_whether_all_hang_or_rest(tmp_path: Path, done: int | None) -> None:
    """``done``: whether the last collective in the dumps is completed; None: there are no dumps."""
    counts = [1, 1, 1, 1]
    with FakeRas(lambda: as_json(*counts)) as server:
        scene = Scene(tmp_path / "suspicions", server)
        if done is not None:
            track = TailTrack(group="0", sequences=(9,), calls=(0,), done=(done,))
            scene.workers.dumps = {0: FlightTail(calls=(AwaitedCall(name="all_reduce", group="0"),), tracks=(track,))}
        scene.minutes(2)
        counts[:] = [9, 9, 9, 9]
        found = scene.minutes(15)
        assert scene.workers.asked == [0]
        even = "all 4 ranks have launched the same collectives of NCCL, and none for 5 min 00 s"
        reasons = {
            None: [f"{even}: they all hang, or do without"],
            0: [f"{even}; rank 0 waits in all_reduce #9 of group 0"],
            1: [],
        }
        assert [each.reason for each in found] == reasons[done]
        assert [each.may_be_rest for each in found] == [True] * (done is None) + [False] * (done == 0)


def test_another_run_s_answer_counts_for_nothing_and_is_not_asked_for_long(tmp_path: Path) -> None:
    with FakeRas(lambda: as_json(*[9] * 7, 8)) as server:
        scene = Scene(tmp_path / "suspicions", server)
        assert scene.minutes(20) == []
        assert server.asked.count("VERBOSE STATUS") == 3


@pytest.mark.parametrize(("group_rank", "version"), [(1, (2, 29, 1)), (0, (2, 28, 6))])
def test_only_the_node_of_group_rank_0_asks_and_no_older_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group_rank: int, version: tuple[int, ...]
) -> None:
    monkeypatch.setattr(nccl_watch, "nccl_version", lambda pid: version)
    with FakeRas(lambda: as_json(1, 1, 1, 1)) as server:
        Scene(tmp_path / "suspicions", server, group_rank=group_rank).minutes(3)
        assert server.asked == []
