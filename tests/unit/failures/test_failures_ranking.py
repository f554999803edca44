"""One ranking: the agent, the coordinator and the report name the same failure, as far as they know the same."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from msgspec.structs import replace

from hpc_elastic.agent.restart_policy import sum_up
from hpc_elastic.failures.ranking import Category, FailureClass
from hpc_elastic.failures.worker_failure import EvidenceSource, WorkerFailure
from hpc_elastic.rendezvous.proposals import first_failure
from hpc_elastic.report.history import WorkerEnd
from hpc_elastic.report.verdict import Cause, Confidence, Verdict
from tests.rigs.run_builder import decide_verdict

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


STOPPED = FailureClass.STOPPED_BY_US


@pytest.mark.parametrize(
    "classes",
    [three for three in itertools.product(FailureClass, repeat=3) if set(three) != {STOPPED}],
    ids=lambda c: "-".join(c),
)
def test_a_nodes_summary_and_the_report_name_the_same_failure(classes: tuple[FailureClass, ...]) -> None:
    failures = [failure(rank, at, one) for rank, (at, one) in enumerate(zip((2, 3, 1), classes, strict=True))]
    for order in itertools.permutations(failures):
        verdict = decide_verdict(order)
        assert verdict.failure is not None
        summary = sum_up(order, node=0, seconds=1.0)
        assert summary.message == f"rank {verdict.failure.global_rank}: ValueError: {verdict.failure.global_rank}"
        assert summary.failure_class == verdict.failure.failure_class.value


S = 1_000_000_000
BEGIN = 10**18


def printed(known: WorkerFailure, at: float, *, stopped: float = 0.0, caught: bool = False) -> WorkerFailure:
    """Printed and, where that is given, begun to be ended so many seconds after the beginning."""
    return replace(
        known,
        printed_ns=BEGIN + int(at * S),
        stopped_ns=BEGIN + int(stopped * S) if stopped else 0,
        stopped_by_agent=bool(stopped),
        is_caught=caught,
        signal="SIGTERM" if stopped else "",
    )


def cause_of(*failures: WorkerFailure, **facts: Any) -> Verdict:
    """The verdict, which a node's summary must agree with where it names a cause."""
    verdicts = [decide_verdict(order, **facts) for order in itertools.permutations(failures)]
    assert all(verdict == verdicts[0] for verdict in verdicts)
    own = [one for one in failures if not one.stopped_by_agent or one.is_own_cause]
    if verdicts[0].cause is Cause.WORKER and verdicts[0].failure in own:
        assert sum_up(own, node=0, seconds=1.0).message.startswith(f"rank {verdicts[0].failure.global_rank}:")
    return verdicts[0]


def test_what_was_printed_first_is_the_cause_and_not_what_ended_first() -> None:
    lives_on, next_one = printed(failure(0, 5, ROOT), 1.0), printed(failure(3, 2, ROOT), 1.9)
    assert cause_of(lives_on, next_one).failure is lives_on
    crashed = failure(2, 3, ROOT, raised=False, signal="SIGSEGV")
    assert cause_of(lives_on, crashed).failure is lives_on, "a crash is over when its process is"
    unknown = failure(1, 4, ROOT)
    assert cause_of(lives_on, next_one, unknown).failure is next_one, "one has no known time: all by their ends"
    assert cause_of(lives_on, printed(next_one, 1.03)).confidence is Confidence.TIE
    assert cause_of(lives_on, printed(next_one, 1.1)).confidence is Confidence.HIGH


def test_a_cause_that_a_stopped_rank_had_printed_is_a_cause() -> None:
    """It destroyed its group, which the others noticed, and was slow to end: the stop came before its own end."""
    slow, victim = printed(failure(2, 4, ROOT), 1.0, stopped=1.2), printed(failure(0, 1, SYMPTOM), 1.1)
    found = cause_of(slow, victim)
    assert (found.failure, found.confidence) == (slow, Confidence.LOW)
    own = printed(failure(3, 2, ROOT), 1.9)
    both = cause_of(slow, own, victim)
    assert (both.failure, both.confidence) == (slow, Confidence.LOW)
    assert both.candidates == (own,)
    # The same failure is the same where the stop came before it was printed, and counts as such again.
    first = printed(failure(0, 2, ROOT), 1.0)
    others = [replace(printed(failure(rank, 3, ROOT), 1.3, stopped=1.2), fingerprint="F0") for rank in (1, 2)]
    assert cause_of(first, *others).same_failure == (0, 1, 2)
    assert sum_up(others[:1], node=0, seconds=1.0).fingerprint == "F0"
    killed = failure(0, 5, ROOT, raised=False, signal="SIGKILL")
    assert sum_up([killed], node=0, seconds=1.0).fingerprint == "", "from outside, and no bug"


def test_a_stopped_ranks_symptom_is_none_but_a_symptom() -> None:
    victims = [printed(failure(rank, 1, SYMPTOM), 1.0, stopped=1.2 * (rank > 0)) for rank in range(3)]
    hosts = dict.fromkeys(range(4), "n1")
    found = cause_of(*victims, ranks=hosts)
    assert found.cause is Cause.UNKNOWN
    assert [suspect.rank for suspect in found.suspects] == [3]


def test_what_a_stop_provokes_is_noise() -> None:
    victim = printed(failure(0, 1, SYMPTOM), 1.1)
    noise = printed(failure(1, 2, ROOT), 1.21, stopped=1.2)
    found = cause_of(victim, noise, ranks={0: "n1", 1: "n1"})
    assert (found.cause, found.failure) == (Cause.UNKNOWN, victim)
    own = printed(failure(3, 2, ROOT), 1.9)
    assert cause_of(victim, noise, own).failure is own
    long_after = printed(failure(1, 3, ROOT), 2.4, stopped=1.2)
    last_resort = cause_of(victim, long_after)
    assert (last_resort.failure, last_resort.confidence) == (long_after, Confidence.LOW)
    assert cause_of(victim, long_after, own).failure is own


def test_a_caught_exception_of_a_stopped_rank_comes_after_all_else() -> None:
    """It was logged, and the rank went on: perhaps for a retry."""
    victim, logged = printed(failure(0, 3, SYMPTOM), 2.1), printed(failure(1, 3, ROOT), 1.0, stopped=2.2, caught=True)
    own = printed(failure(3, 3, ROOT), 2.0)
    assert cause_of(victim, logged, own).failure is own
    assert cause_of(victim, logged).confidence is Confidence.LOW
    left = WorkerEnd(rank=2, node=0, exitcode=0, ended_ns=BEGIN + S, ended_uptime_ns=0)
    found = cause_of(victim, logged, ends=[left])
    assert (found.cause, [suspect.rank for suspect in found.suspects]) == (Cause.UNKNOWN, [2, 1])


def test_a_cancelled_run_has_no_cause() -> None:
    """Ranks that are being ended lose each other."""
    stopped = [printed(failure(rank, 3, kind), 1.0, stopped=1.2) for rank, kind in enumerate((SYMPTOM, SYMPTOM))]
    caught = printed(failure(2, 3, ROOT), 1.0, stopped=1.2, caught=True)
    assert cause_of(*stopped, caught).cause is Cause.NONE


@pytest.mark.parametrize("classes", [*itertools.permutations([one for one in FailureClass if one is not ROOT], 2)])
def test_the_coordinator_puts_the_scripts_own_failure_first(classes: tuple[FailureClass, ...]) -> None:
    nodes = [sum_up([failure(i, 9 - i, one)], node=i, seconds=1) for i, one in enumerate((*classes, ROOT))]
    for order in itertools.permutations(nodes):
        assert first_failure(order).failure_class == ROOT.value
    known = sum_up([failure(0, 1, FailureClass.INFRASTRUCTURE)], node=0, seconds=1)
    undescribed = replace(known, failure_class="unknown", node=1)
    assert first_failure([undescribed, known]) is known, "no better than a symptom"


def test_a_failure_comes_back_from_its_event_without_its_texts() -> None:
    known = replace(failure(3, 1, FailureClass.HANG), round=2, local_rank=1, pid=9, exitcode=-6, ended_uptime_ns=5)
    # The report has the same kind of it where its evidence could not be written: the filesystem hung.
    known = replace(known, signal="SIGABRT", reason="crashed (SIGABRT)", category=Category.PLATFORM, node_suspect=True)
    back = WorkerFailure.from_event(known.to_event(), round=2, host="n1", node=0)
    assert back == replace(known, exception_type="", source=EvidenceSource.EVENT)


@pytest.mark.parametrize(
    "message",
    [
        "ConnectionResetError: [Errno 104] Connection reset by peer",
        "urllib.error.URLError: <urlopen error [Errno 111] Connection refused>",
        "http.client.RemoteDisconnected: Remote end closed connection without response",
        "EOFError",
        "ConnectionError: peer closed the connection",
    ],
)
def test_a_lost_connection_comes_after_an_end_that_was_seen_a_little_later(message: str) -> None:
    """The sockets of a process close before its agent sees its end."""
    second = 10**18 + 10**9
    lost = replace(failure(1, 1, ROOT), message=message, printed_ns=second - 40_000_000)
    ended = replace(failure(0, 1, ROOT, raised=False), message="Process failed with exitcode 3")
    verdict = decide_verdict([lost, ended])
    assert (verdict.failure, verdict.confidence) == (ended, Confidence.TIE)
    assert sum_up([lost, ended], node=0, seconds=1.0).message.startswith("rank 0:")
    alone = replace(lost, printed_ns=second - 400_000_000)
    assert decide_verdict([alone, ended]).failure is alone


def test_of_one_failure_on_several_ranks_the_earliest_time_that_is_shown_counts_and_it_is_certain() -> None:
    """One rank's output has no time: its end stands for it, and the others keep the times of their tracebacks."""
    one, other, last = (replace(failure(rank, 5, ROOT), fingerprint="F") for rank in (0, 1, 2))
    failures = [printed(one, 2.0, stopped=3.0), printed(other, 1.0, stopped=3.0), last]
    for order in itertools.permutations(failures):
        verdict = decide_verdict(order)
        assert verdict.failure is not None
        assert (verdict.failure.global_rank, verdict.confidence) == (1, Confidence.HIGH)
        assert verdict.evidence == "the same failure on 3 ranks (0-2); this one was seen first"
        assert sum_up(order, node=0, seconds=1.0).message == "rank 1: ValueError: 1"


@pytest.mark.parametrize(
    ("clocks", "cause"),
    [
        (((7, 0), (7, 3 * S)), 1),  # node 1's clock is 3 s ahead: its failure came 1 s before
        (((7, 0), (7, 0)), 0),
        (((7, 0), None), 0),  # not compared: the first of them, by node
        (((7, 0), (8, 3 * S)), 0),  # by the clocks of two coordinators: so, too
    ],
)
def test_the_restarts_reason_names_the_first_by_the_coordinators_clock(clocks: Any, cause: int) -> None:
    summaries = [
        sum_up(
            [replace(failure(node, 5 + 2 * node, ROOT), node=node, ended_uptime_ns=(5 + 2 * node) * S)],
            node=node,
            seconds=1.0,
            leader=leader,
        )
        for node, leader in enumerate(clocks)
    ]
    assert first_failure(summaries).node == cause


def test_the_time_of_a_traceback_is_taken_to_the_coordinators_clock_too() -> None:
    known = replace(printed(failure(0, 5, ROOT), 2.0), ended_uptime_ns=50 * S)
    summary = sum_up([known], node=0, seconds=1.0, leader=(3, 10 * S))
    assert (summary.clock, summary.ended_ns, summary.printed_ns, summary.raised) == (3, 40 * S, 37 * S, True)
    assert sum_up([known], node=0, seconds=1.0).clock == -1
