"""How workers that hang are ended, and what is known of them: how they stood, what they left and printed."""

from __future__ import annotations

from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from hpc_elastic.agent.hang_stop import (
    DelayedStop,
    HungWorker,
    WorkerSlot,
    describe_hang,
    observe_failure,
    observe_silent,
    read_stacks,
)
from hpc_elastic.agent.part import Condemned
from hpc_elastic.agent.restart_policy import may_be_a_bug
from hpc_elastic.agent.worker_evidence import StopRecord, WorkerEvidence
from hpc_elastic.failures.failure_text import Frame
from hpc_elastic.failures.ranking import Category, FailureClass
from hpc_elastic.failures.stacks import ProcessState, StackDump, ThreadStack, Whereabouts
from hpc_elastic.failures.worker_failure import WorkerFailure
from hpc_elastic.output.pump import HeldEnd
from hpc_elastic.run.paths import RankPaths
from hpc_elastic.run.progress import Doing
from hpc_elastic.workers.spawn import ExitStatus
from hpc_elastic.workers.stop import Stopped
from tests.rigs.agent_site import make_group_site
from tests.rigs.fake_clock import FakeClock

DUMP = """\
Fatal Python error: Aborted

Current thread 0x00007fe7e8a3f740 (most recent call first):
  File "/home/ann/train.py", line 12 in {function}
"""


def state(letter: str, *, children: tuple[Whereabouts, ...] = ()) -> ProcessState:
    words = {"S": "S (sleeping)", "T": "T (stopped)", "D": "D (disk sleep)"}[letter]
    main = Whereabouts(pid=7, name="python", state=words, wchan="somewhere")
    return ProcessState(pid=7, state=words, threads=(main,), thread_count=1, children=children)


def worker(folder: Path, *, stderr: str = "", of: ProcessState | None = None) -> HungWorker:
    paths = RankPaths(Path(mkdtemp(dir=folder)))
    paths.stderr.write_text(stderr)
    facts = WorkerFailure(
        attempt=0,
        round=0,
        host="n1",
        node=0,
        local_rank=0,
        global_rank=3,
        pid=7,
        exitcode=-6,
        ended_ns=5,
        ended_uptime_ns=3,
    )
    slot = WorkerSlot(0, 3, SimpleNamespace(), paths)  # type: ignore[arg-type]
    return HungWorker(slot=slot, facts=facts, state=of or state("S"), why="no heartbeat for 9.0 s")


def failure_of(hung: HungWorker) -> WorkerFailure:
    return describe_hang(hung, read_stacks(hung), last_heartbeat_ns=4)


def test_two_hangs_at_the_same_place_have_one_name_and_elsewhere_another(tmp_path: Path) -> None:
    here, again, there = (
        failure_of(worker(tmp_path, stderr=DUMP.format(function=function))) for function in ("load", "load", "save")
    )
    assert here.fingerprint == again.fingerprint != there.fingerprint
    assert here.fingerprint.startswith("hang:")
    assert may_be_a_bug(here.fingerprint)
    assert (here.failure_class, here.category) == (FailureClass.HANG, Category.WORKER)
    silent = failure_of(worker(tmp_path))
    assert (silent.ended_ns, silent.ended_uptime_ns) == (4, 2), "its last sign of life, by both clocks"


@pytest.mark.parametrize(
    ("letter", "stderr", "name", "category", "is_a_bug", "reason"),
    [
        ("T", DUMP.format(function="load"), "hang:stopped", Category.WORKER, False, "SIGSTOP not sent by hpc-elastic"),
        ("D", "", "hang:kernel", Category.INFRASTRUCTURE, False, "D (disk sleep) in somewhere"),
        ("D", DUMP.format(function="load"), "hang:", Category.WORKER, True, ""),  # it answers: for a moment only
    ],
)
def test_how_it_stood_names_it(
    tmp_path: Path, letter: str, stderr: str, name: str, category: Category, is_a_bug: bool, reason: str
) -> None:
    failure = failure_of(worker(tmp_path, stderr=stderr, of=state(letter)))
    assert failure.fingerprint.startswith(name)
    assert (failure.category, may_be_a_bug(failure.fingerprint)) == (category, is_a_bug)
    assert reason in failure.reason
    assert ("in load" in failure.traceback) is bool(stderr)


def test_a_child_that_hangs_is_told_of(tmp_path: Path) -> None:
    child = Whereabouts(pid=8, name="python", state="D (disk sleep)", wchan="request_wait_answer")
    hung = worker(tmp_path, of=state("D", children=(child,)))
    assert "its child 8 to begin its program, which sat in D (disk sleep) in request_wait" in failure_of(hung).reason
    assert "  child 8 python: D (disk sleep) in request_wait_answer" in hung.slot.paths.stacks.read_text()


def make_evidence(folder: Path, held: dict[int, HeldEnd] | None = None, *, world_size: int = 4) -> WorkerEvidence:
    inert: Any = SimpleNamespace(
        drained=lambda pid, seconds: True,
        last_step=lambda rank: 7,
        read=lambda *_: None,
        holds=lambda pid: pid in (held or {}),
        take_held=lambda pid: (held or {}).pop(pid, None),
    )
    layout = SimpleNamespace(first_rank=0, world_size=world_size)
    site = make_group_site(folder / "attempt-000", layout=layout, pump=inert, watch=inert)
    return WorkerEvidence(site, StopRecord(), inert)


def make_slot(evidence: WorkerEvidence, rank: int, exitcode: int, *, stopped: bool = False) -> WorkerSlot:
    paths = evidence.site.attempt.rank(0, rank)
    paths.root.mkdir(parents=True)
    ended = ExitStatus(exitcode=exitcode, core_dumped=False, observed_ns=5, observed_uptime_ns=5)
    process: Any = SimpleNamespace(pid=7 + rank)
    return WorkerSlot(rank, rank, process, paths, exit=ended, stopped_by_agent=stopped)


def test_a_worker_that_is_condemned_is_described_though_its_agent_ended_it(tmp_path: Path) -> None:
    """Whatever the reason: nothing but the class of the failure tells it from a hang."""
    evidence = make_evidence(tmp_path)
    slots = [make_slot(evidence, rank, -15, stopped=True) for rank in (0, 1)]
    why = "it holds 90 GiB, and 80 are its share"
    evidence.condemned = Condemned(reason=why, failure_class=FailureClass.ROOT, ranks={1: why})
    evidence.stop.began_ns = 4
    (found,) = evidence.describe(slots)
    assert (found.global_rank, found.message, found.failure_class) == (1, why, FailureClass.ROOT)
    assert not found.is_stopped
    assert slots[1].paths.error_file.exists()


CAUSE = 'Traceback (most recent call last):\n  File "train.py", line 7, in <module>\n    step()\nValueError: bad\n'
CONSEQUENCE = CAUSE.replace(
    "ValueError: bad",
    "RuntimeError: [/pytorch/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:3216",
)
DEEP = CAUSE.replace("ValueError", '  File "/site-packages/lib.py", line 1, in f\n    g()\n' * 30 + "ValueError")


@pytest.mark.parametrize(
    ("printed", "codes", "settings", "shown"),
    [
        pytest.param({0: CAUSE}, {0: 1}, {}, [CAUSE], id="cause"),
        pytest.param({0: CONSEQUENCE}, {0: 1}, {}, [], id="consequence"),
        pytest.param({0: CONSEQUENCE}, {0: 1}, {"world_size": 1}, [CONSEQUENCE], id="alone"),
        pytest.param({0: CAUSE, 1: CAUSE, 2: CONSEQUENCE}, {0: 1, 1: 1, 2: 1}, {}, [CAUSE], id="same on two"),
        pytest.param({0: CAUSE}, {0: 1}, {"is_elsewhere": True}, [], id="failed elsewhere first"),
        pytest.param({0: CAUSE}, {0: 0}, {}, [CAUSE], id="only logged"),
        pytest.param({0: CAUSE}, {0: -15}, {}, [], id="printed when stopped"),
    ],
)
def test_of_what_the_workers_printed_last_the_job_log_has_the_cause(
    tmp_path: Path, printed: dict[int, str], codes: dict[int, int], settings: dict[str, Any], shown: list[str]
) -> None:
    found: list[bytes] = []
    held = {7 + rank: HeldEnd(text.encode(), 0.0, found.append) for rank, text in printed.items()}
    evidence = make_evidence(tmp_path, held, world_size=settings.get("world_size", 4))
    slots = [make_slot(evidence, rank, code, stopped=code < 0) for rank, code in codes.items()]
    for slot in slots:
        slot.paths.stderr.write_text(printed[slot.global_rank])
    failures = evidence.describe(slots)
    evidence.show_causes(are_elsewhere="is_elsewhere" in settings)
    assert [text.decode() for text in found] == shown
    kept = [one.global_rank for one in failures if one.is_shown]
    assert kept == ([0] if codes[0] == 1 and (shown or "is_elsewhere" in settings) else [])
    assert not held


def test_of_a_long_traceback_the_job_log_has_the_users_line_and_the_end(tmp_path: Path) -> None:
    found: list[bytes] = []
    evidence = make_evidence(tmp_path, {7: HeldEnd(DEEP.encode(), 0.0, found.append)})
    slot = make_slot(evidence, 0, 1)
    slot.paths.stderr.write_text(DEEP)
    (failure,) = evidence.describe([slot])
    assert failure.is_shown
    evidence.show_causes(are_elsewhere=False)
    (text,) = found
    assert text.count(b"\n") <= 12
    assert b'File "train.py", line 7' in text
    assert text.endswith(b"ValueError: bad\n")


GONE = Stopped(exits={}, killed=0, left=(), seconds=0.0)


class Ends:
    """Stands for the `GroupStopper`."""

    def __init__(self) -> None:
        self.calls: list[object] = []

    def begin(self) -> None:
        self.calls.append("begin")

    def kill_now(self) -> None:
        self.calls.append("kill_now")

    def shorten(self, grace: float) -> None:
        self.calls.append(grace)

    def step(self) -> Stopped | float:
        return GONE


class Moment:
    def __init__(self) -> None:
        self.clock = FakeClock()
        self.ends = Ends()
        self.graces: list[float] = []
        self.is_over = False
        self.stopper = DelayedStop(is_over=lambda: self.is_over, then=self.then, grace=30.0, clock=self.clock)
        self.stopper.begin()

    def then(self, grace: float) -> Ends:
        self.graces.append(grace)
        return self.ends


def test_the_moment_ends_at_once_where_there_is_nothing_to_wait_for_or_a_cause_is_known_elsewhere() -> None:
    moment, other, killed = Moment(), Moment(), Moment()
    moment.is_over = True
    other.stopper.end_delay()
    killed.stopper.kill_now()
    assert moment.stopper.step() is other.stopper.step() is killed.stopper.step() is GONE
    assert (killed.graces, killed.ends.calls) == ([0.0], ["kill_now"])


def test_less_time_ends_the_moment_and_as_much_does_not() -> None:
    moment = Moment()
    moment.stopper.shorten(30.0)
    assert isinstance(moment.stopper.step(), float)
    moment.stopper.shorten(4.0)
    assert moment.stopper.step() is GONE
    assert moment.graces == [4.0]
    moment.stopper.shorten(2.0)
    assert moment.ends.calls == ["begin", 2.0]


def test_a_silent_rank_is_observed_with_its_line_of_the_source(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("def save():\n    with lock:\n        pass\n")
    frames = (Frame(file=str(script), line=2, function="save"),)
    dump = StackDump(threads=(ThreadStack(frames=frames, is_main=True),), text="")
    state = ProcessState(pid=7, threads=(Whereabouts(pid=7, name="python", state="S (sleeping)", syscall="futex"),))
    found = observe_silent(2, state, dump)
    assert (found.doing, found.at, found.line) == (Doing.LOCK, "train.py:2 save", "with lock:")
    gone = StackDump(
        threads=(ThreadStack(frames=(Frame(file="/gone.py", line=2, function="f"),), is_main=True),), text=""
    )
    assert observe_silent(2, state, gone).line == ""
    assert observe_silent(2, None, None).doing is Doing.UNKNOWN


def test_a_rank_that_waits_for_its_dataloader_shows_the_children_that_do_not_poll() -> None:
    """A worker of the DataLoader that has nothing to do polls: it is not the one that is waited for."""
    loader = Frame(file="/v/site-packages/torch/utils/data/dataloader.py", line=9, function="_try_get_data")
    dump = StackDump(
        threads=(ThreadStack(frames=(Frame(file="/u/t.py", line=3, function="f"), loader), is_main=True),), text=""
    )
    asleep = Whereabouts(pid=9, name="python", state="S (sleeping)", syscall="clock_nanosleep")
    idle = [Whereabouts(pid=pid, name="python", state="S (sleeping)", syscall="poll") for pid in (7, 8)]
    on_disk = Whereabouts(pid=10, name="python", state="D (disk sleep)", syscall="read", wchan="rpc_wait")
    found = observe_silent(2, ProcessState(pid=6, children=(*idle, asleep, on_disk)), dump)
    assert found.doing is Doing.LOADER
    assert found.children == (
        "its child process 10: D (disk sleep) in rpc_wait, system call read",
        "its child process 9: S (sleeping), system call clock_nanosleep",
        "its child process 7: S (sleeping), system call poll",
    )
    assert found.where.endswith("; ".join(("", *found.children)))


def test_a_peer_that_another_agent_may_have_ended_is_not_named() -> None:
    symptom = WorkerFailure(
        failure_class=FailureClass.SYMPTOM, message="Connection closed by peer [10.0.0.7]:41234", printed_ns=1000
    )
    for latest, peer in ((1000, "[10.0.0.7]:41234"), (999, "")):
        found = observe_failure(symptom, latest_ns=latest)
        assert found.peer == peer
    assert observe_failure(replace(symptom, failure_class=FailureClass.ROOT), latest_ns=1000) is None


def test_the_process_of_a_loader_shows_its_function() -> None:
    def dump(*functions: str) -> StackDump:
        path = {"_bootstrap": "/usr/lib/python3.11/multiprocessing/process.py", "get": "/usr/lib/python3.11/queue.py"}
        frames = tuple(Frame(file=path.get(one, f"/u/{one}.py"), line=4, function=one) for one in functions)
        return StackDump(threads=(ThreadStack(frames=frames, is_main=True),), text="")

    idle, busy = dump("main", "_bootstrap", "get"), dump("main", "_bootstrap", "fetch")
    whole = StackDump(threads=dump("main").threads, text="", children=(idle, busy, busy))
    assert observe_silent(0, None, whole).children == ("its child process: fetch.py:4 fetch",)
