"""Whether a run makes progress, by what the kernel counts and by who answers: the decisions, and the detector."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from hpc_elastic.agent import hang_detector
from hpc_elastic.agent.hang_detector import Counts, HangDetector, Stall, judge_run, next_stall, read_counts
from hpc_elastic.agent.health import GpuDevice, GpuFacts
from hpc_elastic.agent.heartbeat_watch import Hang
from hpc_elastic.agent.nccl_watch import NcclWatch, limit_without_progress
from hpc_elastic.base import codec
from hpc_elastic.base.loop import FileExecutor
from hpc_elastic.errors import UsageError
from hpc_elastic.failures.flight_dump import rank_of_name, read_dump, tail_of
from hpc_elastic.rendezvous.state import Member
from hpc_elastic.run.progress import HangSettings, NodeStall, OnHang, StalledRank, Suspicion, parse_hangs
from hpc_elastic.workers import tree
from tests.rigs.agent_site import hang_site
from tests.rigs.fake_clock import FakeClock
from tests.rigs.fake_workers import IdleWorkers, started

DATA = Path(__file__).parents[2] / "data" / "flight_recorder"


def stall_after(*looks: dict[int, Counts], mute: dict[int, float] | None = None, running: int | None = None) -> Stall:
    """A look a minute, the first a minute after the start."""
    stall = Stall(at=0.0, counts=dict.fromkeys(looks[0], Counts()))
    for number, counts in enumerate(looks, 1):
        count = len(counts) if running is None else running
        stall = next_stall(stall, counts, mute=mute or {}, running=count, now=60.0 * number)
    return stall


NONE, BUSY = Counts(), Counts(cpu=50.0)


@pytest.mark.parametrize(
    ("looks", "began"),
    [
        ([{0: BUSY}], None),
        ([{0: NONE}], 0.0),  # it has done nothing since it was started
        ([{0: Counts(cpu=4)}, {0: Counts(cpu=4)}], 60.0),  # hung 13 s after the start, before the first look
        ([{0: Counts(cpu=4.8)}, {0: Counts(cpu=9.6)}], None),  # 8 % of a core is work
        ([{0: BUSY}, {0: BUSY}, {0: BUSY}], 60.0),
        ([{0: BUSY, 1: BUSY}, {0: BUSY, 1: Counts(cpu=52)}], None),  # one works
        ([{0: BUSY, 1: BUSY}, {0: BUSY}], 60.0),  # the one that is left has done nothing
        ([{0: BUSY}, {0: Counts(cpu=50.5)}], 60.0),  # a thread that looks now and then
        ([{0: BUSY}, {0: Counts(cpu=50, bytes=1 << 20)}], None),  # it reads
        ([{0: BUSY}, {0: Counts(cpu=50.2, bytes=100_000)}], 60.0),  # a monitor reads /proc
        ([{0: BUSY}, {0: Counts(cpu=50.6, switches=20_000)}], 60.0),  # three gloo groups that wait
        ([{0: BUSY}, {0: Counts(cpu=50, switches=60_000)}], None),
        ([{0: BUSY}, {0: Counts(cpu=20)}], None),  # a child of it has ended
        ([{0: BUSY}, {0: Counts(cpu=50, beats=3)}], None),  # its GPU works: its optimizer steps
    ],
)
def test_a_node_stalls_where_no_worker_does_anything(looks: list[dict[int, Counts]], began: float | None) -> None:
    assert stall_after(*looks).began == began


def test_a_worker_that_runs_and_does_not_answer_stalls() -> None:
    """A C loop holds the interpreter; the other rank waits for it."""
    looks = [{0: Counts(cpu=50 * n), 1: BUSY} for n in range(1, 6)]
    assert stall_after(*looks).began is None
    assert stall_after(*looks, mute={0: 61.5}).began == 61.5
    steps = [{0: Counts(cpu=50 * n, beats=n), 1: BUSY} for n in range(1, 6)]
    assert stall_after(*steps, mute={0: 61.5}).began is None, "it steps"


def test_a_node_whose_workers_have_all_ended_stalls_from_their_end_on() -> None:
    assert stall_after({0: BUSY}, {}, {}, {}).began == 60.0
    assert stall_after({0: BUSY}, {0: BUSY}, {0: BUSY}, running=2).began is None, "a container has not come up"


def test_the_runs_own_pauses_make_the_limit_longer() -> None:
    stall = stall_after(*({0: Counts(cpu=cpu)} for cpu in (50, 50, 50, 50, 100, 100)))
    assert (stall.longest, stall.began) == (180.0, 300.0)
    assert limit_without_progress(stall.longest, 300.0) == 540.0
    assert limit_without_progress(stall.longest, 900.0) == 900.0


def test_this_process_is_counted_with_its_children() -> None:
    before = read_counts({0: os.getpid()})[0]
    assert before.cpu > 0
    sum(range(5_000_000))
    (Path("/proc/self/stat")).read_bytes()
    after = read_counts({0: os.getpid()})[0]
    assert after.cpu > before.cpu
    assert after.bytes > before.bytes
    subprocess.run([sys.executable, "-S", "-c", "sum(range(10_000_000))"], check=True)
    assert read_counts({0: os.getpid()})[0].cpu > after.cpu + 0.05, "a child that has come and gone"
    assert read_counts({0: 2**22 + 1})[0] == Counts()


def test_what_runs_below_a_process_is_found_by_either_way(monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["sh", "-c", "sleep 100 & echo $!; wait"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as shell:
        try:
            assert shell.stdout is not None
            sleep, me = int(shell.stdout.readline()), os.getpid()
            found = tree.below([me, shell.pid])
            assert {shell.pid, sleep} <= set(found[me])
            assert found[shell.pid] == [sleep]
            monkeypatch.setattr(tree, "main_children", lambda pid: None)
            assert tree.below([shell.pid]) == {shell.pid: [sleep]}, "without CONFIG_PROC_CHILDREN"
        finally:
            os.killpg(shell.pid, signal.SIGKILL)


HOSTS = {0: "n0", 1: "n0", 2: "n1", 3: "n1"}


def node_stalls(*, flights: bool) -> dict[int, NodeStall | None]:
    ends = {
        rank_of_name(path.name): tail_of([read_dump(path.read_bytes(), rank=rank_of_name(path.name))])
        for path in DATA.glob("gloo_2.13_never_?")
    }
    return {
        node: NodeStall(
            round=2,
            seconds=310.0 + node,
            ranks=tuple(StalledRank(rank=rank, flight=ends[rank] if flights else None) for rank in ranks),
        )
        for node, ranks in ((0, (0, 1)), (1, (2, 3)))
    }


def judged(stalls: dict[int, NodeStall | None]) -> Hang | None:
    return judge_run(stalls, round_index=2, least=300.0, hosts=HOSTS)


def test_where_all_nodes_stall_the_run_hangs_and_the_dumps_name_the_rank() -> None:
    found = judged(node_stalls(flights=True))
    assert (found.ranks, found.seconds) == ((2,), 310.0)
    assert found.reason.startswith(
        "no rank of 4 has made progress for 5 min 10 s; rank 2 on n1: it never entered all_reduce #6 of group"
    )
    without = judged(node_stalls(flights=False))
    assert (without.ranks, without.reason) == ((), "no rank of 4 has made progress for 5 min 10 s")


def test_a_rank_that_alone_does_not_answer_is_named() -> None:
    """Stopped, or in a call that holds the interpreter: it can't dump, and the others wait."""
    stalls = node_stalls(flights=True)
    stopped = StalledRank(rank=2, at="T (stopped)")
    stalls[1] = replace(stalls[1], ranks=(stopped, stalls[1].ranks[1]))
    found = judged(stalls)
    assert found.ranks == (2,)
    assert found.reason.endswith("; rank 2 on n1: it does not answer: T (stopped)")
    stalls[0] = NodeStall(round=2, seconds=310.0, ranks=(StalledRank(rank=0), StalledRank(rank=1)))
    found = judged(stalls)
    assert found.ranks == (), "most do not answer"


WAITS = tuple(StalledRank(rank=rank, waits=True) for rank in range(3))


@pytest.mark.parametrize(
    ("ranks", "named"),
    [
        ((*WAITS, StalledRank(rank=3, waits=True)), ()),
        ((*WAITS, StalledRank(rank=3, waits=True, is_stuck=True)), (3,)),
        ((*WAITS, StalledRank(rank=3)), (3,)),
        ((WAITS[0], StalledRank(rank=1)), (1,)),
        ((StalledRank(rank=0), StalledRank(rank=1)), ()),  # no majority waits
    ],
)
def test_without_dumps_the_kernel_names_the_rank_that_is_stopped_or_waits_for_no_other(
    ranks: tuple[StalledRank, ...], named: tuple[int, ...]
) -> None:
    hosts = {rank.rank: "n0" for rank in ranks}
    found = judge_run({0: NodeStall(round=2, seconds=310.0, ranks=ranks)}, round_index=2, least=300.0, hosts=hosts)
    assert found.ranks == named


def test_a_node_whose_workers_have_ended_hides_no_hang_elsewhere() -> None:
    stalls = {**node_stalls(flights=True), 0: NodeStall(round=2, seconds=305.0)}
    found = judged(stalls)
    assert found.reason.startswith("no rank of 2 has made progress for 5 min 05 s (2 others ended with 0)")
    stalls = {**node_stalls(flights=False), 0: NodeStall(round=2, seconds=305.0)}
    found = judged(stalls)
    assert found.ranks == (2, 3), "those that have not ended"
    assert judged({0: NodeStall(round=2, seconds=305.0)}) is None, "all have ended"


def test_only_a_pause_of_all_nodes_makes_the_limit_longer() -> None:
    """Node 1 has waited 20 minutes for an evaluation on node 0."""
    stalls = node_stalls(flights=False)
    stalls[1] = replace(stalls[1], longest=1200.0)
    assert judged(stalls) is not None
    stalls[0] = replace(stalls[0], longest=110.0)
    assert judged(stalls) is None


def test_a_node_that_stalled_in_another_round_shows_no_hang() -> None:
    assert judged({**node_stalls(flights=True), 1: NodeStall(round=1, seconds=400.0)}) is None


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


class Steps:
    """A detector whose worker works until `pace` is 0."""

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, *, names: str = "a", ras: str = "", **settings: Any
    ) -> None:
        self.clock, self.workers, self.cpu, self.pace = FakeClock(), IdleWorkers(), 0.0, 30.0
        self.folder, self.files = folder, FileExecutor(name="test")

        def count(pids: Iterable[int]) -> dict[int, Counts]:
            return {rank: Counts(cpu=self.cpu) for rank in pids}

        monkeypatch.setattr(hang_detector, "read_counts", count)
        site = hang_site(folder, names, clock=self.clock, files=self.files)
        self.watch = site.watch
        nccl = NcclWatch(ras, run_uid="", least=HangSettings().least, clock=self.clock)
        self.detector = HangDetector(site, nccl=nccl, **{"gpus": None, "environment": {}, **settings})
        members = [Member(name, node, 1) for node, name in enumerate(names)]
        self.record: Any = SimpleNamespace(round=0, members=members)
        self.detector.on_start(started(0, 1))

    def until(self, is_there: Callable[[Hang | None], bool], looks: int) -> Hang | None:
        for _ in range(looks):
            self.clock.wait(threading.Event(), self.detector.due - self.clock.monotonic())
            self.cpu += self.pace + self.workers.cost
            self.workers.cost = 0.0
            found = self.detector.judge(self.workers, self.record)
            self.files.do(lambda: None, within=20.0)
            if is_there(found):
                return found
        return None

    def until_hang(self, looks: int) -> Hang | None:
        return self.until(lambda found: found is not None, looks)


@pytest.fixture
def steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Steps]:
    return lambda **settings: Steps(tmp_path / "suspicions", monkeypatch, **settings)


def test_an_agent_that_wakes_reads_no_page_before_it_asks_nccl(
    steps: Callable[..., Steps], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It wakes every few seconds, with a worker's page for each of maybe 200 workers."""
    run, reads = steps(ras="127.0.0.1:9"), []
    monkeypatch.setattr(run.watch, "read", lambda: reads.append(run.clock.monotonic()) or [])
    began = run.clock.monotonic()
    for _ in range(5):
        assert run.detector.judge(run.workers, run.record) is None
        run.clock.wait(threading.Event(), 0.5)
    assert not reads
    run.until(lambda _: run.clock.monotonic() >= began + 65.0, 20)
    assert reads


def test_a_hang_is_found_once_and_goes_when_the_workers_go_on(steps: Callable[..., Steps]) -> None:
    run = steps()
    assert run.until_hang(20) is None
    run.pace = 0.0
    found = run.until_hang(20)
    assert found.reason.startswith("no rank of 1 has made progress for 5 min")
    assert codec.load(run.folder / "now.json", Suspicion).reason == found.reason
    assert run.until_hang(20) is None
    assert run.workers.asked == [0], "a rank that has given its dump is not asked again"

    run.pace = 30.0
    run.until(lambda _: False, 3)
    assert not list(run.folder.iterdir())
    run.detector.before_stop()
    assert run.detector.due is None


@pytest.mark.parametrize("left", [[], [1]])
def test_a_worker_that_ends_while_its_dump_is_awaited_ends_no_agent(
    steps: Callable[..., Steps], left: list[int]
) -> None:
    run = steps()
    run.workers.running_pids, run.workers.running = {0: 2**22 + 1, 1: 2**22 + 2}, [0, 1]
    run.detector.on_start(started(0, 2))
    run.pace = 0.0
    assert run.until(lambda _: bool(run.workers.asked), 20) is None
    run.workers.running_pids, run.workers.running = dict.fromkeys(left, 2**22 + 2), left
    assert run.until_hang(2) is None


def test_an_agent_that_was_stopped_itself_finds_no_hang_for_it(steps: Callable[..., Steps]) -> None:
    """A suspended job: for an hour nobody has done anything."""
    run = steps()
    run.until(lambda _: False, 3)
    run.clock.wait(threading.Event(), 3600.0)
    run.pace = 0.0
    assert run.until_hang(5) is None
    assert run.until_hang(5) is not None


def test_a_node_that_looks_later_is_waited_for(steps: Callable[..., Steps]) -> None:
    run = steps(names="ab")
    began = run.clock.monotonic()
    run.until(lambda _: False, 3)
    run.pace = 0.0
    assert run.until_hang(12) is None
    codec.save(run.folder / "node-00001.json", NodeStall(round=0, seconds=400.0, ranks=(StalledRank(rank=1),)))
    assert run.until_hang(8) is not None
    assert run.clock.monotonic() - began < 15 * 60


@pytest.mark.parametrize(
    ("gpus", "shown"),
    [((100, 100), ", their GPUs are at 100 %"), ((0, 100), ", their GPUs are at 0 to 100 %"), ((), "")],
)
def test_how_busy_the_gpus_are_is_shown(gpus: tuple[int, ...], shown: str) -> None:
    stalls = {0: NodeStall(round=2, seconds=310.0, gpus=gpus, ranks=(StalledRank(rank=0),))}
    found = judge_run(stalls, round_index=2, least=300.0, hosts={0: "n0"})
    assert found.reason == f"no rank of 1 has made progress for 5 min 10 s{shown}"


@pytest.mark.parametrize(("memory_use", "is_hang"), [(1, True), (40, False), (None, True)])
def test_workers_that_wait_for_a_gpu_at_work_do_not_hang(
    steps: Callable[..., Steps], memory_use: int | None, is_hang: bool
) -> None:
    device = GpuDevice(index=0, use=100, memory_use=memory_use)
    asked: list[int] = []

    def look_at_gpus(take: Callable[[GpuFacts], None]) -> None:
        asked.append(1)
        take(GpuFacts(devices=(device,)))

    run = steps(gpus=SimpleNamespace(look_at_gpus=look_at_gpus))
    assert run.until_hang(5) is None
    assert not asked  # not while they work
    run.pace = 0.0
    found = run.until_hang(30)
    assert asked
    assert (found is not None) is is_hang
    if found is not None:
        assert ", their GPUs are at 100 %" in found.reason
