"""Whether all workers stand still, by what the kernel counts: the decisions, and the watch."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from hpc_elastic.agent import suspicion
from hpc_elastic.agent.health import GpuDevice, GpuFacts
from hpc_elastic.agent.suspicion import Counts, Rest, SuspicionWatch, judge_nodes, limit_of, next_rest, read_counts
from hpc_elastic.base import codec
from hpc_elastic.base.file_executor import FileExecutor
from hpc_elastic.errors import UsageError
from hpc_elastic.failures.flight_dump import rank_of_name, read_dump, tail_of
from hpc_elastic.rendezvous.state import Member
from hpc_elastic.run.suspicions import HangSettings, NodeRest, OnHang, RestingRank, Suspicion, parse_hangs
from tests.rigs.fake_clock import FakeClock

DATA = Path(__file__).parents[2] / "data" / "flight_recorder"


def rest_after(*looks: dict[int, Counts]) -> Rest:
    """A look a minute."""
    rest = None
    for number, counts in enumerate(looks):
        rest = next_rest(rest, counts, 60.0 * number)
    assert rest is not None
    return rest


NONE, BUSY = Counts(), Counts(cpu=50.0)


@pytest.mark.parametrize(
    ("looks", "since"),
    [
        ([{0: NONE}], None),
        ([{0: NONE}, {0: NONE}], None),  # it has never worked
        ([{0: NONE}, {0: BUSY}], None),
        ([{0: NONE}, {0: BUSY}, {0: BUSY}], 60.0),
        ([{0: NONE}, {0: BUSY}, {0: BUSY}, {0: BUSY}], 60.0),
        ([{0: NONE, 1: NONE}, {0: BUSY, 1: BUSY}, {0: BUSY, 1: Counts(cpu=52)}], None),  # one works
        ([{0: NONE, 1: NONE}, {0: BUSY, 1: BUSY}, {0: BUSY}], None),  # one has ended
        ([{0: NONE}, {0: BUSY}, {0: Counts(cpu=50.5)}], 60.0),  # a thread that looks now and then
        ([{0: NONE}, {0: BUSY}, {0: Counts(cpu=50, bytes=1 << 20)}], None),  # it reads
        ([{0: NONE}, {0: BUSY}, {0: Counts(cpu=50.6, switches=20_000)}], 60.0),  # three gloo groups that wait
        ([{0: NONE}, {0: BUSY}, {0: Counts(cpu=50, switches=60_000)}], None),
        ([{0: NONE}, {0: BUSY}, {0: Counts(cpu=20)}], None),  # a child of it has ended
    ],
)
def test_workers_rest_that_did_work_and_do_none(looks: list[dict[int, Counts]], since: float | None) -> None:
    assert rest_after(*looks).since == since


def test_the_runs_own_pauses_make_the_limit_longer() -> None:
    looks = [{0: Counts(cpu=cpu)} for cpu in (0, 50, 50, 50, 50, 100, 100)]
    rest = rest_after(*looks)
    assert (rest.longest, rest.since) == (180.0, 300.0)
    assert limit_of(rest, 300.0) == 540.0
    assert limit_of(rest, 900.0) == 900.0


def test_this_process_is_counted_with_its_children() -> None:
    before = read_counts({0: os.getpid()})[0]
    assert before.cpu > 0
    sum(range(5_000_000))
    (Path("/proc/self/stat")).read_bytes()
    after = read_counts({0: os.getpid()})[0]
    assert after.cpu > before.cpu
    assert after.bytes > before.bytes
    assert read_counts({0: 2**22 + 1})[0] == Counts()


HOSTS = {0: "n0", 1: "n0", 2: "n1", 3: "n1"}


def node_rests(*, flights: bool) -> dict[int, NodeRest | None]:
    ends = {
        rank_of_name(path.name): tail_of([read_dump(path.read_bytes(), rank=rank_of_name(path.name))])
        for path in DATA.glob("gloo_2.13_never_?")
    }
    return {
        node: NodeRest(
            round=2,
            seconds=310.0 + node,
            ranks=tuple(RestingRank(rank=rank, flight=ends[rank] if flights else None) for rank in ranks),
        )
        for node, ranks in ((0, (0, 1)), (1, (2, 3)))
    }


def judged(rests: dict[int, NodeRest | None]) -> Suspicion | None:
    return judge_nodes(rests, round_index=2, hosts=HOSTS, now_ns=7)


def test_where_all_nodes_rest_the_run_seems_to_hang_and_the_dumps_name_the_rank() -> None:
    found = judged(node_rests(flights=True))
    assert found is not None
    assert found.ranks == (2,)
    assert found.reason.startswith(
        "no rank of 4 has done anything for 5 min 10 s; rank 2 on n1: it never entered all_reduce #6 of group"
    )
    assert judged(node_rests(flights=False)) == Suspicion(
        round=2, source=found.source, reason="no rank of 4 has done anything for 5 min 10 s", written_ns=7
    )


def test_a_rank_that_alone_does_not_answer_is_named() -> None:
    """Stopped, or in a call that holds the interpreter: it can't dump, and the others wait."""
    rests = node_rests(flights=True)
    stopped = RestingRank(rank=2, at="T (stopped)")
    assert rests[1] is not None
    rests[1] = replace(rests[1], ranks=(stopped, rests[1].ranks[1]))
    found = judged(rests)
    assert found is not None
    assert found.ranks == (2,)
    assert found.reason.endswith("; rank 2 on n1: it does not answer: T (stopped)")
    rests[0] = NodeRest(round=2, seconds=310.0, ranks=(RestingRank(rank=0), RestingRank(rank=1)))
    found = judged(rests)
    assert found is not None
    assert found.ranks == (), "most do not answer"


@pytest.mark.parametrize("other", [None, NodeRest(round=1, seconds=400.0)])
def test_a_node_that_works_or_rested_in_another_round_keeps_the_run_above_suspicion(other: NodeRest | None) -> None:
    assert judged({**node_rests(flights=True), 1: other}) is None


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("observe", HangSettings()),
        ("act", HangSettings(action=OnHang.ACT)),
        ("act:600", HangSettings(action=OnHang.ACT, least=600.0)),
        ("observe:1.5", HangSettings(least=1.5)),
    ],
)
def test_what_the_option_means(text: str, settings: HangSettings) -> None:
    assert parse_hangs(text) == settings


@pytest.mark.parametrize("text", ["", "no", "act:", "act:0", "act:x", "act:nan", "act:1e99"])
def test_what_it_does_not_mean(text: str) -> None:
    with pytest.raises(UsageError, match="--hangs"):
        parse_hangs(text)


class Workers(SimpleNamespace):
    """What is needed of `LocalWorkers`."""

    def __init__(self) -> None:
        layout = SimpleNamespace(group_rank=0, first_rank=0)
        super().__init__(running_pids={0: 2**22 + 1}, layout=layout, asked=0)

    def ask_for_dumps(self) -> None:
        self.asked += 1

    def read_dumps(self) -> dict[int, Any]:
        return {}


class Steps:
    """A watch whose worker works until it is said to rest."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock, self.workers, self.cpu, self.pace = FakeClock(), Workers(), 0.0, 30.0
        self.files = FileExecutor(name="test")
        monkeypatch.setattr(suspicion, "read_counts", lambda pids: {rank: Counts(cpu=self.cpu) for rank in pids})
        self.watch = SuspicionWatch(folder, HangSettings(), node=0, names=["n0"], clock=self.clock, files=self.files)
        self.record: Any = SimpleNamespace(round=0, members=[Member("u", 0, 1)])

    def until(self, is_there: Callable[[Suspicion | None], bool], looks: int) -> Suspicion | None:
        for _ in range(looks):
            assert self.watch.due is not None
            self.clock.wait(threading.Event(), self.watch.due - self.clock.monotonic())
            self.cpu += self.pace
            found = self.watch.look(self.workers, self.record)
            self.files.do(lambda: None, within=20.0)
            if is_there(found):
                return found
        return None


def test_a_run_that_stands_still_is_suspected_once_and_no_more_when_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(tmp_path / "suspicions", monkeypatch)
    steps.watch.begin(0)
    assert steps.until(lambda found: found is not None, 20) is None
    steps.pace = 0.0
    found = steps.until(lambda found: found is not None, 20)
    assert found is not None
    assert found.reason.startswith("no rank of 1 has done anything for 5 min")
    assert codec.load(tmp_path / "suspicions" / "now.json", Suspicion) == found
    assert steps.workers.asked == 1
    assert steps.until(lambda found: found is not None, 20) is None

    steps.pace = 30.0
    steps.until(lambda _: False, 3)
    assert not list((tmp_path / "suspicions").iterdir())
    steps.watch.end()
    assert steps.watch.due is None


def test_the_answers_of_the_workers_are_no_work_while_another_node_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other node looks later: this one asks its workers again, each time at a cost, and goes on resting."""
    steps = Steps(tmp_path / "suspicions", monkeypatch)
    steps.watch = SuspicionWatch(
        tmp_path / "suspicions", HangSettings(), node=0, names=["n0", "n1"], clock=steps.clock, files=steps.files
    )
    steps.record.members = [Member("u", 0, 1), Member("v", 1, 1)]
    began = steps.clock.monotonic()
    monkeypatch.setattr(steps.workers, "ask_for_dumps", lambda: setattr(steps, "cpu", steps.cpu + 20.0))
    steps.watch.begin(0)
    steps.until(lambda _: False, 3)
    steps.pace = 0.0
    assert steps.until(lambda found: found is not None, 14) is None
    codec.save(tmp_path / "suspicions" / "node-00001.json", NodeRest(round=0, seconds=400.0))
    found = steps.until(lambda found: found is not None, 8)
    assert found is not None
    assert steps.clock.monotonic() - began < 15 * 60


@pytest.mark.parametrize(
    ("gpus", "shown"),
    [((100, 100), ", their GPUs are at 100 %"), ((0, 100), ", their GPUs are at 0 to 100 %"), ((), "")],
)
def test_how_busy_the_gpus_are_is_shown(gpus: tuple[int, ...], shown: str) -> None:
    rests = {0: NodeRest(round=2, seconds=310.0, gpus=gpus)}
    found = judge_nodes(rests, round_index=2, hosts=HOSTS, now_ns=7)
    assert found is not None
    assert found.reason == f"no rank of 0 has done anything for 5 min 10 s{shown}"


@pytest.mark.parametrize(("memory_use", "is_suspected"), [(1, True), (40, False), (None, True)])
def test_workers_that_wait_for_a_gpu_at_work_do_not_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory_use: int | None, is_suspected: bool
) -> None:
    steps = Steps(tmp_path / "suspicions", monkeypatch)
    device = GpuDevice(index=0, use=100, memory_use=memory_use)
    asked: list[int] = []

    def look_at_gpus(take: Callable[[GpuFacts], None]) -> None:
        asked.append(1)
        take(GpuFacts(devices=(device,)))

    steps.watch = SuspicionWatch(
        tmp_path / "suspicions",
        HangSettings(),
        node=0,
        names=["n0"],
        clock=steps.clock,
        files=steps.files,
        look_at_gpus=look_at_gpus,
    )
    steps.watch.begin(0)
    assert steps.until(lambda found: found is not None, 5) is None
    assert not asked  # not while they work
    steps.pace = 0.0
    found = steps.until(lambda found: found is not None, 30)
    assert asked
    assert (found is not None) is is_suspected
    if found is not None:
        assert ", their GPUs are at 100 %" in found.reason
