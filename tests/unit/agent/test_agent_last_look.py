"""A moment before silent ranks are ended, and what is known of them then."""

from __future__ import annotations

from pathlib import Path

from hpc_elastic.agent.hang_stop import DELAY_SECONDS, DelayedStop, observe_failure, observe_silent
from hpc_elastic.failures.failure_text import Frame
from hpc_elastic.failures.ranking import FailureClass
from hpc_elastic.failures.stacks import ProcessState, StackDump, ThreadStack, Whereabouts
from hpc_elastic.failures.worker_failure import WorkerFailure
from hpc_elastic.run.progress import Doing
from hpc_elastic.workers.stop import Stopped
from tests.rigs.fake_clock import FakeClock

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


def test_the_moment_ends_after_a_second() -> None:
    moment = Moment()
    assert isinstance(moment.stopper.step(), float)
    moment.clock.now += DELAY_SECONDS - 0.01
    assert isinstance(moment.stopper.step(), float)
    assert moment.graces == []
    moment.clock.now += 0.02
    assert moment.stopper.step() is GONE
    assert (moment.graces, moment.ends.calls) == ([30.0], ["begin"])


def test_the_moment_ends_at_once_where_there_is_nothing_to_wait_for_or_a_cause_is_known_elsewhere() -> None:
    moment, other = Moment(), Moment()
    moment.is_over = True
    other.stopper.end_delay()
    assert moment.stopper.step() is other.stopper.step() is GONE


def test_less_time_ends_the_moment_and_as_much_does_not() -> None:
    moment = Moment()
    moment.stopper.shorten(30.0)
    assert isinstance(moment.stopper.step(), float)
    moment.stopper.shorten(4.0)
    assert moment.stopper.step() is GONE
    assert moment.graces == [4.0]
    moment.stopper.shorten(2.0)
    assert moment.ends.calls == ["begin", 2.0]


def test_a_kill_gives_up_the_moment() -> None:
    moment = Moment()
    moment.stopper.kill_now()
    assert (moment.graces, moment.ends.calls) == ([0.0], ["kill_now"])
    assert moment.stopper.step() is GONE


def test_a_symptom_is_observed_and_no_other_failure() -> None:
    symptom = WorkerFailure(
        global_rank=3,
        failure_class=FailureClass.SYMPTOM,
        message="RuntimeError: Rank 2 failed to pass monitoredBarrier in 2000 ms",
        traceback=(
            "Traceback (most recent call last):\n"
            '  File "/me/train.py", line 8, in step\n    dist.monitored_barrier()\n'
            '  File "/v/site-packages/torch/distributed/distributed_c10d.py", line 99, in monitored_barrier\n'
            "    return pg.monitored_barrier()\n"
            "RuntimeError: Rank 2 failed to pass monitoredBarrier in 2000 ms"
        ),
    )
    found = observe_failure(symptom, latest_ns=0)
    assert found is not None
    assert (found.rank, found.call, found.at, found.names) == (3, "monitored_barrier", "train.py:8 step", (2,))
    assert observe_failure(WorkerFailure(failure_class=FailureClass.ROOT), latest_ns=0) is None


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
        assert found is not None
        assert found.peer == peer


def test_the_process_of_a_loader_shows_its_function() -> None:
    def dump(*functions: str) -> StackDump:
        path = {"_bootstrap": "/usr/lib/python3.11/multiprocessing/process.py", "get": "/usr/lib/python3.11/queue.py"}
        frames = tuple(Frame(file=path.get(one, f"/u/{one}.py"), line=4, function=one) for one in functions)
        return StackDump(threads=(ThreadStack(frames=frames, is_main=True),), text="")

    idle, busy = dump("main", "_bootstrap", "get"), dump("main", "_bootstrap", "fetch")
    whole = StackDump(threads=dump("main").threads, text="", children=(idle, busy, busy))
    assert observe_silent(0, None, whole).children == ("its child process: fetch.py:4 fetch",)
