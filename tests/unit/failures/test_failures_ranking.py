"""One ranking: the agent, the coordinator and the report name the same failure, as far as they know the same."""

from __future__ import annotations

import itertools

import pytest
from msgspec.structs import replace

from hpc_elastic.agent.restart_policy import sum_up
from hpc_elastic.failures.ranking import FailureClass
from hpc_elastic.failures.worker_failure import EvidenceSource, WorkerFailure
from hpc_elastic.rendezvous.coordinator import first_failure
from hpc_elastic.report.verdict import decide_verdict

ROOT, SYMPTOM = FailureClass.ROOT, FailureClass.SYMPTOM


def failure(rank: int, at: int, failure_class: FailureClass, *, raised: bool = True, signal: str = "") -> WorkerFailure:
    return WorkerFailure(
        host="n1",
        node=0,
        global_rank=rank,
        ended_ns=10**18 + at * 10**9,
        failure_class=failure_class,
        exception_type="ValueError" if raised else "",
        message=f"ValueError: {rank}",
        fingerprint=f"F{rank}",
        last_step=7 - rank,
        signal=signal,
    )


@pytest.mark.parametrize("classes", [*itertools.product(FailureClass, repeat=3)], ids=lambda c: "-".join(c))
def test_a_nodes_summary_and_the_report_name_the_same_failure(classes: tuple[FailureClass, ...]) -> None:
    failures = [failure(rank, at, one) for rank, (at, one) in enumerate(zip((2, 3, 1), classes, strict=True))]
    for order in itertools.permutations(failures):
        verdict = decide_verdict(order)
        assert verdict.failure is not None
        summary = sum_up(order, node=0, seconds=1.0)
        assert summary.message == f"rank {verdict.failure.global_rank}: ValueError: {verdict.failure.global_rank}"
        assert summary.failure_class == verdict.failure.failure_class.value


def test_what_the_agent_ended_without_an_exception_is_no_cause() -> None:
    ended = failure(0, 1, FailureClass.STOPPED_BY_US, raised=False, signal="SIGTERM")
    assert decide_verdict([ended]).failure is None
    later = failure(1, 2, SYMPTOM)
    assert decide_verdict([ended, later]).failure is later


@pytest.mark.parametrize("classes", [*itertools.permutations([one for one in FailureClass if one is not ROOT], 2)])
def test_the_coordinator_puts_the_scripts_own_failure_first(classes: tuple[FailureClass, ...]) -> None:
    nodes = [sum_up([failure(i, 9 - i, one)], node=i, seconds=1) for i, one in enumerate((*classes, ROOT))]
    for order in itertools.permutations(nodes):
        assert first_failure(order).failure_class == ROOT.value


def test_a_failure_that_is_not_described_yet_is_no_better_than_a_symptom() -> None:
    known = sum_up([failure(0, 1, FailureClass.INFRASTRUCTURE)], node=0, seconds=1)
    assert first_failure([replace(known, failure_class="unknown", node=1), known]) is known


def test_a_failure_comes_back_from_its_event_without_its_texts() -> None:
    known = replace(failure(3, 1, FailureClass.HANG), round=2, local_rank=1, pid=9, exitcode=-6, ended_uptime_ns=5)
    back = WorkerFailure.from_event(known.to_event(), round=2, host="n1", node=0)
    assert back == replace(known, exception_type="", source=EvidenceSource.EVENT)
