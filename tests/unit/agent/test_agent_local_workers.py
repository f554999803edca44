"""What a node tells the coordinator about its workers' failures."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from hpc_elastic.agent.local_workers import LocalWorkers, _Slot
from hpc_elastic.agent.restart_policy import sum_up
from hpc_elastic.failures.ranking import FailureClass
from hpc_elastic.failures.worker_failure import WorkerFailure
from hpc_elastic.run.paths import AttemptPaths
from hpc_elastic.workers.spawn import ExitStatus
from tests.rigs.fake_clock import FakeClock

ROOT, SYMPTOM, MACHINE = FailureClass.ROOT, FailureClass.SYMPTOM, FailureClass.INFRASTRUCTURE


def failed(
    rank: int,
    ended: int,
    failure_class: FailureClass = ROOT,
    *,
    signal: str = "",
    retryable: bool = True,
    step: int | None = None,
) -> WorkerFailure:
    return WorkerFailure(
        global_rank=rank,
        ended_ns=ended,
        failure_class=failure_class,
        signal=signal,
        message=f"failure of {rank}\nand more",
        fingerprint=f"F{rank}",
        retryable=retryable,
        last_step=step,
    )


def test_one_failure_is_told_by_rank_and_first_line() -> None:
    summary = sum_up([failed(5, 1)], node=2, seconds=7.5)
    assert (summary.node, summary.message, summary.fingerprint) == (2, "rank 5: failure of 5", "F5")
    assert (summary.failure_class, summary.retryable, summary.step, summary.seconds) == ("root", True, -1, 7.5)


@pytest.mark.parametrize(
    ("failures", "rank"),
    [
        ([failed(0, 30), failed(1, 10), failed(2, 20)], 1),
        ([failed(0, 10, SYMPTOM), failed(1, 90)], 1),
        ([failed(0, 10, SYMPTOM), failed(1, 90, MACHINE)], 1),
        ([failed(1, 10, MACHINE), failed(0, 90)], 1),
        ([failed(0, 10, MACHINE), failed(1, 10)], 1),
        ([failed(0, 90, SYMPTOM), failed(1, 10, SYMPTOM)], 1),
    ],
    ids=[
        "the first",
        "a root before symptoms",
        "the machine before symptoms",
        "the earliest cause",
        "at one time the script's",
        "symptoms",
    ],
)
def test_the_strongest_and_then_the_first_is_told(failures: list[WorkerFailure], rank: int) -> None:
    assert sum_up(failures, node=0, seconds=1.0).message.startswith(f"rank {rank}:")


@pytest.mark.parametrize("signal", ["SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGQUIT"])
def test_a_kill_from_outside_never_counts_as_the_scripts_own_failure(signal: str) -> None:
    summary = sum_up([failed(0, 1, signal=signal)], node=0, seconds=1.0)
    assert summary.fingerprint == ""
    assert summary.failure_class == "root"


@pytest.mark.parametrize("signal", ["SIGSEGV", "SIGABRT", "SIGFPE", "SIGBUS", ""])
def test_a_crash_is_the_scripts_own(signal: str) -> None:
    assert sum_up([failed(0, 1, signal=signal)], node=0, seconds=1.0).fingerprint == "F0"


@pytest.mark.parametrize("failure_class", [SYMPTOM, MACHINE])
def test_what_is_not_the_scripts_own_has_no_fingerprint(failure_class: FailureClass) -> None:
    summary = sum_up([failed(0, 1, failure_class)], node=0, seconds=1.0)
    assert (summary.fingerprint, summary.failure_class) == ("", failure_class.value)


def test_one_that_must_not_be_tried_again_decides_for_all() -> None:
    assert sum_up([failed(0, 1), failed(1, 2, SYMPTOM, retryable=False)], node=0, seconds=1.0).retryable is False


def test_the_furthest_step_of_any_counts() -> None:
    assert sum_up([failed(0, 1, step=3), failed(1, 2, step=0), failed(2, 3)], node=0, seconds=1.0).step == 3
    assert sum_up([failed(0, 1, step=0)], node=0, seconds=1.0).step == 0


class _TickingClock(FakeClock):
    """Each look at it is a second later."""

    def time_ns(self) -> int:
        self.now += 1
        return super().time_ns()


class _Ended:
    """A process whose end is noticed when it is asked."""

    def __init__(self, pid: int, clock: _TickingClock) -> None:
        self.pid = pid
        self._clock = clock

    def poll(self) -> ExitStatus:
        now = self._clock.time_ns()
        return ExitStatus(exitcode=self.pid, core_dumped=False, observed_ns=now, observed_uptime_ns=now)


def test_whom_one_look_finds_ended_are_told_with_one_time() -> None:
    clock = _TickingClock()
    workers = object.__new__(LocalWorkers)
    workers._clock = clock
    workers._slots = [_Slot(rank, rank, _Ended(rank, clock), None) for rank in (1, 2)]  # type: ignore[arg-type]
    assert workers.poll()
    first, second = (slot.exit for slot in workers._slots)
    assert first is not None
    assert second is not None
    assert (first.exitcode, second.exitcode) == (1, 2)
    assert (first.observed_ns, first.observed_uptime_ns) == (second.observed_ns, second.observed_uptime_ns)
    assert not workers.poll()


@pytest.mark.parametrize(("retryable", "fingerprint"), [(True, ""), (False, "start:OSError")])
def test_what_this_node_lacks_to_start_workers_is_no_bug_in_the_script(retryable: bool, fingerprint: str) -> None:
    workers = object.__new__(LocalWorkers)
    workers._clock = FakeClock()
    workers._slots = []
    workers._files = SimpleNamespace(post=lambda action: None)  # type: ignore[assignment]
    attempt = AttemptPaths(Path("/r/attempt-000"))
    workers._place = SimpleNamespace(attempt=attempt, host="n0", node=0)  # type: ignore[assignment]
    workers.round = 3
    workers.layout = SimpleNamespace(first_rank=4, local_world_size=2)  # type: ignore[assignment]
    found = workers.describe_start_failure(OSError(24, "Too many open files"), retryable=retryable)
    assert (found.global_rank, found.retryable) == (4, retryable)
    assert sum_up([found], node=0, seconds=0.0).fingerprint == fingerprint
