from __future__ import annotations

import itertools
from dataclasses import replace

from hpc_elastic.failures.classify import Category, FailureClass
from hpc_elastic.failures.worker_failure import WorkerFailure
from hpc_elastic.report.history import NodeLoss, RankWord
from hpc_elastic.report.verdict import Cause, ClockBounds, Confidence, decide_verdict
from tests.rigs.run_builder import GLOO, START_NS, make_failure


def symptom(rank: int, at: float, **more: object) -> WorkerFailure:
    return make_failure(rank, at=at, exception=f"RuntimeError: {GLOO.format(rank=rank)}", **more)  # type: ignore[arg-type]


def root(rank: int, at: float, exception: str = "ValueError: bad", **more: object) -> WorkerFailure:
    return make_failure(rank, at=at, exception=exception, **more)  # type: ignore[arg-type]


def lost(node: int, at: float, age: float = 0.0) -> NodeLoss:
    return NodeLoss(round=0, node=node, host=f"n{node + 1}", seen_ns=START_NS + int(at * 1e9), age=age)


def test_nothing() -> None:
    verdict = decide_verdict([])
    assert (verdict.cause, verdict.failure) == (Cause.NONE, None)
    assert verdict.retryable


def test_class_comes_before_time() -> None:
    """A victim's evidence may be older than the culprit's: a killed rank writes none, its agent does."""
    failures = [symptom(0, 1.0), symptom(1, 1.1), root(2, 9.0)]
    for order in itertools.permutations(failures):
        verdict = decide_verdict(order)
        assert verdict.failure is failures[2]
        assert verdict.cause is Cause.WORKER
        assert verdict.confidence is Confidence.HIGH
        assert verdict.evidence == (
            "the only failure that is not a consequence of another one; 2 others are consequences"
        )


def test_the_only_failure() -> None:
    assert decide_verdict([root(0, 1.0)]).evidence == "the only failure"


def test_the_first_of_several_by_time() -> None:
    verdict = decide_verdict([root(0, 5.8, "KeyError: 'x'"), root(1, 5.0), root(2, 7.0, "OSError: y"), symptom(3, 1.0)])
    assert verdict.failure is not None
    assert verdict.failure.global_rank == 1
    assert verdict.evidence.startswith("first of 3 different failures, 0.800 s before the next (rank 0 on n1)")
    assert [failure.global_rank for failure in verdict.candidates] == [0, 2]


def test_the_same_failure_on_all_ranks_is_no_tie() -> None:
    verdict = decide_verdict([root(rank, 5.0 + rank / 1000, f"ValueError: bad batch {rank}") for rank in range(8)])
    assert verdict.confidence is Confidence.HIGH
    assert verdict.same_failure == tuple(range(8))
    assert verdict.evidence == "the same failure on 8 ranks (0-7); this one was seen first"
    assert verdict.candidates == ()


def test_a_tie_is_said_to_be_one() -> None:
    verdict = decide_verdict([root(0, 5.0), root(1, 5.09, "KeyError: 'x'")])
    assert verdict.confidence is Confidence.TIE
    assert "rank 1 on n2" in verdict.evidence
    assert "100 ms between hosts" in verdict.evidence
    # Beyond the clocks' resolution it is none.
    assert decide_verdict([root(0, 5.0), root(1, 5.2, "KeyError: 'x'")]).confidence is Confidence.HIGH
    # One host's clock tells them apart …
    near = [root(0, 5.0, host="n1"), root(1, 5.09, "KeyError: 'x'", host="n1")]
    assert decide_verdict(near).confidence is Confidence.HIGH
    # … but not at any price, and measured bounds count.
    tight = [root(0, 5.0, host="n1"), root(1, 5.001, "KeyError: 'x'", host="n1")]
    assert "2 ms on one host" in decide_verdict(tight).evidence
    assert decide_verdict(near, clocks=ClockBounds(same_host_ns=10**9)).confidence is Confidence.TIE


def test_only_symptoms_are_not_taken_for_a_cause() -> None:
    verdict = decide_verdict([symptom(1, 2.0), symptom(0, 1.0)])
    assert verdict.cause is Cause.UNKNOWN
    assert verdict.confidence is Confidence.NONE
    assert verdict.failure is not None
    assert verdict.failure.global_rank == 0
    assert verdict.evidence.startswith("not known: 2 failures, and each reads like the consequence of another")


def test_where_all_that_failed_are_symptoms_the_silent_rank_is_named() -> None:
    hosts = {0: "n1", 1: "n1", 2: "n2", 3: "n2"}
    verdict = decide_verdict([symptom(0, 1.0), symptom(1, 1.0), symptom(3, 1.1)], ranks=hosts)
    assert verdict.confidence is Confidence.NONE
    assert "Look at rank 2 on n2, which did not fail" in verdict.evidence
    both = decide_verdict([symptom(0, 1.0), symptom(2, 1.0)], ranks=hosts)
    assert "Look at ranks 1,3 on n1, n2, which did not fail" in both.evidence
    assert "Look at" not in decide_verdict([symptom(rank, 1.0) for rank in hosts], ranks=hosts).evidence


def test_our_own_failure_is_told_before_its_consequences() -> None:
    gone = replace(lost(0, 5.0), broke="the workers' TCPStore is gone")
    verdict = decide_verdict([symptom(0, 5.1), symptom(1, 5.2)], lost_nodes=[gone])
    assert (verdict.category, verdict.confidence) == (Category.PLATFORM, Confidence.HIGH)
    assert verdict.summary == "the workers' TCPStore is gone (on n1)"
    assert verdict.evidence.endswith("2 failures elsewhere are its consequence")
    assert decide_verdict([root(1, 4.0)], lost_nodes=[gone]).evidence.endswith(
        "after it, the workers' TCPStore is gone"
    )


def test_who_had_printed_the_same_when_it_was_ended_is_counted() -> None:
    ended = root(2, 1.1, exitcode=-15, stopped_by_agent=True)
    verdict = decide_verdict([root(1, 1.0), ended])
    assert verdict.same_failure == (1, 2)
    assert verdict.evidence.startswith("the same failure on 2 ranks (1-2)")


def test_an_exception_that_was_logged_before_a_stop_is_no_cause() -> None:
    """Without anybody who felt it: a preempted run whose worker had caught one."""
    assert decide_verdict([root(2, 9.0, exitcode=-15, stopped_by_agent=True)]).cause is Cause.NONE


def test_what_was_ended_by_us_is_no_cause() -> None:
    stopped = [make_failure(rank, at=rank, exitcode=-15, stopped_by_agent=True) for rank in range(3)]
    verdict = decide_verdict(stopped)
    assert verdict.cause is Cause.NONE
    assert verdict.evidence == "all 3 were ended by this job itself"
    assert decide_verdict([*stopped, root(5, 9.0)]).failure == root(5, 9.0)


def test_a_worker_that_hung_after_its_exception_is_likely_the_cause() -> None:
    hung = root(2, 9.0, exitcode=-15, stopped_by_agent=True)
    verdict = decide_verdict([symptom(0, 1.0), symptom(1, 1.0), hung])
    assert verdict.failure is hung
    assert verdict.confidence is Confidence.LOW
    assert "this job ended it" in verdict.evidence


def test_a_lost_node_is_the_cause_of_what_the_others_say() -> None:
    verdict = decide_verdict([symptom(0, 30.0), symptom(1, 30.1)], lost_nodes=[lost(2, 33.0, age=3.2)])
    assert verdict.cause is Cause.NODE
    assert verdict.category is Category.INFRASTRUCTURE
    assert verdict.lost_node is not None
    assert verdict.lost_node.host == "n3"
    assert verdict.failure is None
    assert verdict.summary == "node n3 was lost"
    assert verdict.evidence == "no sign of it for 3.2 s; 2 failures elsewhere are its consequence"


def test_an_agent_that_died_is_our_own_failure() -> None:
    verdict = decide_verdict([symptom(0, 30.0)], lost_nodes=[replace(lost(2, 29.9), agent_only=True)])
    assert verdict.category is Category.PLATFORM
    assert verdict.summary == "the agent on n3 died"
    assert verdict.retryable


def test_the_first_of_two_lost_nodes() -> None:
    verdict = decide_verdict([], lost_nodes=[lost(3, 40.0, age=5.0), lost(1, 39.0, age=1.0)])
    assert verdict.lost_node is not None
    assert verdict.lost_node.node == 3
    assert "lost too: n2" in verdict.evidence


def test_a_worker_that_failed_before_a_node_was_lost_is_the_cause() -> None:
    verdict = decide_verdict([root(0, 10.0), symptom(1, 10.1)], lost_nodes=[lost(2, 33.0, age=3.0)])
    assert verdict.cause is Cause.WORKER
    assert verdict.evidence.endswith("node n3 was lost after it")


def test_a_worker_that_failed_after_a_node_was_lost_is_not() -> None:
    verdict = decide_verdict([root(0, 31.0)], lost_nodes=[lost(2, 33.0, age=3.0)])
    assert verdict.cause is Cause.NODE
    assert verdict.confidence is Confidence.HIGH
    near = decide_verdict([root(0, 30.05)], lost_nodes=[lost(2, 33.0, age=3.0)])
    assert near.confidence is Confidence.TIE
    assert "rank 0 on n1 failed at about the same time" in near.evidence


def test_an_oom_kill_is_a_cause_of_its_own() -> None:
    verdict = decide_verdict([symptom(0, 1.0), make_failure(1, at=1.1, exitcode=-9, oom_kills=1)])
    assert verdict.category is Category.INFRASTRUCTURE
    assert verdict.failure is not None
    assert verdict.failure.global_rank == 1


def test_93_on_any_rank_is_obeyed() -> None:
    assert decide_verdict([root(0, 1.0), root(1, 2.0, "KeyError: 'x'")]).retryable
    assert not decide_verdict([root(0, 1.0), make_failure(1, at=2.0, exitcode=93)]).retryable
    assert not decide_verdict([root(0, 1.0, "SyntaxError: invalid syntax")]).retryable


# -- hangs


def hang(rank: int, at: float, step: int | None) -> WorkerFailure:
    return replace(make_failure(rank, at=at), failure_class=FailureClass.HANG, last_step=step, message="hang: silent")


def word(rank: int, step: int | None) -> RankWord:
    return RankWord(rank=rank, node=0, step=step, section="step", age=60.0, told_ns=START_NS)


def test_of_those_that_hang_the_furthest_behind_is_the_cause() -> None:
    words = [word(0, 8), word(1, 8), word(2, 7), word(3, None)]
    for order in itertools.permutations([hang(0, 1.0, 8), hang(1, 2.0, 8), hang(2, 3.0, 7), symptom(3, 70.0)]):
        verdict = decide_verdict(order, words=words)
        assert verdict.failure is not None
        assert verdict.failure.global_rank == 2
        assert verdict.confidence is Confidence.HIGH
        assert verdict.evidence == (
            "furthest behind: 2 other ranks had got to step 8; 1 failure elsewhere is its consequence"
        )
        assert {failure.global_rank for failure in verdict.candidates} == {0, 1}


def test_at_the_same_step_it_is_not_certain_and_said_so() -> None:
    verdict = decide_verdict([hang(0, 2.0, 8), hang(1, 1.0, 8)], words=[word(0, 8), word(1, 8)])
    assert verdict.failure is not None
    assert verdict.failure.global_rank == 1
    assert verdict.confidence is Confidence.LOW
    assert "rank 0 hung at the same step" in verdict.evidence


def test_one_that_never_got_to_a_step_is_behind_all() -> None:
    verdict = decide_verdict([hang(0, 1.0, 3), hang(1, 2.0, None)], words=[word(0, 3)])
    assert verdict.failure is not None
    assert verdict.failure.global_rank == 1
    assert decide_verdict([hang(5, 1.0, 3)]).evidence == "the only one that gave no sign of life"


def test_an_exception_before_the_silence_is_the_cause() -> None:
    verdict = decide_verdict([root(0, 1.0), hang(1, 2.0, 3)])
    assert verdict.failure is not None
    assert verdict.failure.global_rank == 0
