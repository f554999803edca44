from __future__ import annotations

import itertools
from typing import Any

import pytest
from msgspec.structs import replace

from hpc_elastic.failures.origin import OWN_WATCHDOG
from hpc_elastic.failures.ranking import OBSERVED_NS, Category, FailureClass, Suspect
from hpc_elastic.failures.worker_failure import WorkerFailure
from hpc_elastic.report.clocks import SUPERVISOR, Clocks, ClocksBuilder
from hpc_elastic.report.history import NodeLoss, RankStatus, WorkerEnd
from hpc_elastic.report.verdict import Cause, Confidence, Verdict, of_several
from hpc_elastic.run.event_reader import event_line
from hpc_elastic.run.progress import Activity, Doing
from tests.rigs.run_builder import GLOO, START_NS, UPTIME_NS, decide_verdict, make_failure

MS = 1_000_000


def symptom(rank: int, at: float, **more: object) -> WorkerFailure:
    return make_failure(rank, at=at, exception=f"RuntimeError: {GLOO.format(rank=rank)}", **more)  # type: ignore[arg-type]


def root(rank: int, at: float, exception: str = "ValueError: bad", **more: object) -> WorkerFailure:
    return make_failure(rank, at=at, exception=exception, **more)  # type: ignore[arg-type]


def lost(node: int, at: float, age: float = 0.0, observer: int | None = 0) -> NodeLoss:
    seen = START_NS + int(at * 1e9)
    return NodeLoss(round=0, node=node, host=f"n{node + 1}", seen_ns=seen, age=age, observer=observer)


def compared(*ahead: float, bound_ms: float = 1.0) -> Clocks:
    """What nodes have told: how far their clocks are ahead of n1's, in seconds; both kinds of them."""
    builder = ClocksBuilder()
    line: dict[str, Any] = {"event": "attempt_started", "role": "supervisor", "node": -1, "host": "n1", "t": START_NS}
    builder.take(event_line(line))
    for node, seconds in enumerate((0.0, *ahead)):
        line = {
            "event": "clock_offset",
            "role": "agent",
            "node": node,
            "host": f"n{node + 1}",
            "reference": 0,
            "offset_ns": int(seconds * 1e9),
            "bound_ns": int(bound_ms * MS) if node else 0,
            "uptime_ns": UPTIME_NS + int((seconds + 5) * 1e9),
            "wall_ns": START_NS + int((seconds + 5) * 1e9),
        }
        builder.take(event_line(line))
    return builder.build()


FOUR = {rank: f"n{rank + 1}" for rank in range(4)}
NODES = compared(0.0, 0.0, 0.0)
"""Four nodes whose clocks agree, as was measured."""


def named(verdict: Verdict) -> int | None:
    """The rank whose failure is the cause, or is shown for want of one."""
    return verdict.failure and verdict.failure.global_rank


def ahead(failure: WorkerFailure, seconds: float) -> WorkerFailure:
    """As a node tells it whose clocks are so far ahead."""
    shift = int(seconds * 1e9)
    uptime = failure.ended_uptime_ns + shift
    return replace(failure, ended_ns=failure.ended_ns + shift, ended_uptime_ns=uptime)


def test_nothing_and_the_only_failure() -> None:
    verdict = decide_verdict([])
    assert (verdict.cause, verdict.failure, verdict.retryable) == (Cause.NONE, None, True)
    assert decide_verdict([root(0, 1.0)]).evidence == "the only failure"


@pytest.mark.parametrize(("later", "cause"), [(0.19, 1), (0.6, 0)])
def test_of_two_within_the_clocks_resolution_a_lost_connection_is_the_consequence(later: float, cause: int) -> None:
    """An agent on a busy node sees its worker's SIGKILL late; the script raises an exception of what that closed."""
    clocks = compared(0.0, bound_ms=250.0)
    failures = [
        root(0, 5.0, "ConnectionError: peer closed the connection"),
        make_failure(1, at=5.0 + later, exitcode=-9),
    ]
    verdict = decide_verdict(failures, clocks=clocks)
    assert verdict.failure is failures[cause]
    assert (verdict.confidence is Confidence.TIE) is bool(cause)


def test_class_comes_before_time() -> None:
    """A victim's evidence may be older than the culprit's: a killed rank writes none, its agent does."""
    failures = [symptom(0, 1.0), symptom(1, 1.1), root(2, 9.0)]
    for order in itertools.permutations(failures):
        verdict = decide_verdict(order)
        assert verdict.failure is failures[2]
        assert (verdict.cause, verdict.confidence) == (Cause.WORKER, Confidence.HIGH)
        assert verdict.evidence == (
            "the only failure that is not a consequence of another one; 2 others are consequences"
        )


def test_the_first_of_several_by_time() -> None:
    failures = [root(0, 5.8, "KeyError: 'x'"), root(1, 5.0), root(2, 7.0, "OSError: y"), symptom(3, 1.0)]
    verdict = decide_verdict(failures, clocks=NODES)
    assert named(verdict) == 1
    assert verdict.confidence is Confidence.HIGH
    assert verdict.evidence.startswith(
        "first of 3 different failures, 0.800 s before the next (rank 0 on n1; clocks known to within 1 ms)"
    )
    assert verdict.resolution_ns == MS + 2 * OBSERVED_NS
    assert [failure.global_rank for failure in verdict.candidates] == [0, 2]


def test_the_same_failure_on_all_ranks_is_no_tie() -> None:
    failures = [root(rank, 5.0 + rank / 1000, f"ValueError: bad batch {rank}") for rank in range(7)]
    failures.append(root(7, 5.1, "ValueError: bad batch 7", exitcode=-15, stopped_by_agent=True))
    verdict = decide_verdict(failures)
    assert (verdict.confidence, verdict.candidates) == (Confidence.HIGH, ())
    assert verdict.same_failure == tuple(range(8)), "who had printed the same when it was ended, too"
    assert verdict.evidence == "the same failure on 8 ranks (0-7); this one was seen first"


def test_the_true_first_is_named_whatever_the_wall_clocks_say() -> None:
    """n2's clocks are an hour ahead, n3's two hours behind: the last failure has the earliest stamp."""
    clocks = compared(3600.0, -7200.0)
    first, second, third = (
        ahead(root(1, 5.0), 3600.0),
        root(0, 5.1, "KeyError: 'x'"),
        ahead(root(2, 5.2, "OSError: y"), -7200.0),
    )
    assert third.ended_ns < second.ended_ns < first.ended_ns
    for order in itertools.permutations([first, second, third]):
        verdict = decide_verdict(order, clocks=clocks)
        assert verdict.failure is first
        assert (verdict.confidence, verdict.candidates) == (Confidence.HIGH, (second, third))
    told_by_events_alone = [replace(failure, ended_uptime_ns=0) for failure in (third, second, first)]
    verdict = decide_verdict(told_by_events_alone, clocks=clocks)
    assert named(verdict) == 1


def test_a_tie_is_said_to_be_one() -> None:
    near = [root(0, 5.0), root(1, 5.01, "KeyError: 'x'")]
    verdict = decide_verdict(near, clocks=NODES)
    assert verdict.confidence is Confidence.TIE
    assert verdict.evidence == (
        "not certain: rank 1 on n2 failed too, in another way, within the clocks' resolution (22 ms between hosts)"
    )
    # Beyond the clocks' resolution it is none; it grows with the bounds, and with time.
    later = [root(0, 5.0), root(1, 5.03, "KeyError: 'x'")]
    assert decide_verdict(later, clocks=NODES).confidence is Confidence.HIGH
    assert decide_verdict(later, clocks=compared(0.0, bound_ms=12)).confidence is Confidence.TIE
    # A clock that was set by minutes between two comparisons: nobody takes 40 s for a clock's resolution.
    apart = decide_verdict([root(0, 5.0), root(1, 45.0, "KeyError: 'x'")], clocks=compared(0.0, bound_ms=45_000))
    assert "failed too, in another way, 40.0 s apart by clocks that are known to within" in apart.evidence
    much_later = [root(0, 105.0), root(1, 105.03, "KeyError: 'x'")]
    assert decide_verdict(much_later, clocks=NODES).confidence is Confidence.TIE


def test_of_one_node_the_order_is_known_without_any_comparison() -> None:
    near = [root(0, 5.0, per_node=2), root(1, 5.01, "KeyError: 'x'", per_node=2)]
    verdict = decide_verdict(near)
    assert verdict.confidence is Confidence.HIGH
    assert verdict.evidence == "first of 2 different failures, 0.010 s before the next (rank 1 on n1)"
    # One agent reads one end after the other, though.
    tight = [root(0, 5.0, per_node=2), root(1, 5.001, "KeyError: 'x'", per_node=2)]
    assert decide_verdict(tight).confidence is Confidence.TIE
    assert decide_verdict(tight).evidence == (
        "not certain: rank 1 on n1 failed too, in another way, within the clocks' resolution (2 ms on one host)"
    )
    # A wall clock that was set between the two disturbs nothing.
    stepped = [near[0], replace(near[1], ended_ns=near[1].ended_ns - 3600 * 10**9)]
    verdict = decide_verdict(stepped, clocks=compared())
    assert named(verdict) == 0
    assert verdict.confidence is Confidence.HIGH


def test_of_nodes_that_nobody_compared_the_order_is_not_known_and_said_so() -> None:
    far = [root(0, 5.0), root(1, 65.0, "KeyError: 'x'")]
    verdict = decide_verdict(far)
    assert verdict.confidence is Confidence.TIE
    assert verdict.evidence == (
        "not certain: rank 1 on n2 failed too, in another way, and its clock was not compared with n1's "
        "(by the clocks as they are, 60.0 s later)"
    )
    assert verdict.resolution_ns is None
    mixed = decide_verdict([*far, root(2, 5.005, "OSError: y"), root(5, 7.0, "EOFError: z")], clocks=compared(0.0, 0.0))
    assert mixed.confidence is Confidence.TIE
    assert "rank 2 on n3 failed too, in another way, within the clocks' resolution" in mixed.evidence
    assert "rank 5 on n6 failed too, in another way, and its clock was not compared" in mixed.evidence
    assert "rank 1" not in mixed.evidence, "that was later, and is known to be"


def test_every_verdict_on_a_worker_has_the_same_ending() -> None:
    """Whatever made it the cause, what follows from it is told in one way."""
    hung = replace(root(0, 1.0), failure_class=FailureClass.HANG, last_step=1, retryable=False)
    talking = root(0, 1.0, exitcode=-15, stopped_by_agent=True)
    verdicts = [
        decide_verdict([replace(root(0, 1.0), retryable=False)]),
        decide_verdict([hung]),
        decide_verdict([replace(talking, retryable=False), symptom(1, 1.0)]),
    ]
    found = [(v.cause, v.category, v.fingerprint, v.same_failure, v.retryable) for v in verdicts]
    assert found == [(Cause.WORKER, Category.WORKER, root(0, 1.0).fingerprint, (0,), False)] * 3
    assert not decide_verdict([symptom(0, 1.0), make_failure(1, at=2.0, exitcode=93)]).retryable


def test_where_all_that_failed_are_symptoms_the_silent_rank_is_named() -> None:
    hosts = {0: "n1", 1: "n1", 2: "n2", 3: "n2"}
    verdict = decide_verdict([symptom(1, 2.0), symptom(0, 1.0), symptom(3, 1.1)], ranks=hosts)
    assert (verdict.cause, verdict.confidence, named(verdict)) == (Cause.UNKNOWN, Confidence.NONE, 0)
    assert verdict.evidence.startswith("not known: 3 failures, and each reads like the consequence of another")
    assert "Look at rank 2 on n2, which did not fail" in verdict.evidence
    both = decide_verdict([symptom(0, 1.0), symptom(2, 1.0)], ranks=hosts)
    assert "Look at ranks 1,3 on n1, n2, which did not fail" in both.evidence
    assert "Look at" not in decide_verdict([symptom(rank, 1.0) for rank in hosts], ranks=hosts).evidence


def ended(rank: int, at: float, *, exitcode: int = 0, stopped: bool = False, logged: str = "") -> WorkerEnd:
    own = int(at * 1e9)
    return WorkerEnd(rank, rank, exitcode, START_NS + own, UPTIME_NS + own, stopped, logged)


def test_a_rank_that_ended_with_0_before_the_symptoms_is_the_one_to_look_at() -> None:
    failures = [symptom(0, 5.0), symptom(3, 5.1)]
    verdict = decide_verdict(failures, ranks=FOUR, ends=[ended(1, 2.0, logged="KeyError: 'x'")], clocks=NODES)
    assert (verdict.cause, verdict.confidence) == (Cause.UNKNOWN, Confidence.NONE)
    why = "it ended with 0 3.0 s before; logged just before: KeyError: 'x'"
    assert verdict.suspects == (Suspect(rank=1, host="n2", why=why),)
    assert f"Look at rank 1 on n2: {why}. Shown" in verdict.evidence
    both = decide_verdict(failures, ranks=FOUR, ends=[ended(1, 4.0), ended(2, 3.0)], clocks=NODES)
    assert [suspect.rank for suspect in both.suspects] == [2, 1]
    assert "Look at ranks 1-2 on n3, n2, rank 2 first: it ended with 0 2.0 s before" in both.evidence


def test_an_end_with_0_that_explains_nothing_is_no_suspect() -> None:
    """It came long after the symptoms, or the agent had begun to end that group, or it was no 0."""
    ends = [ended(1, 11.0), ended(2, 2.0, stopped=True), ended(3, 4.0, exitcode=1)]
    verdict = decide_verdict([symptom(0, 5.0)], ranks=FOUR, ends=ends, clocks=NODES)
    assert [(suspect.rank, suspect.why) for suspect in verdict.suspects] == [(2, "it hung, was late, or ended early")]
    with_a_cause = decide_verdict([symptom(0, 5.0), root(3, 5.1)], ranks=FOUR, ends=[ended(1, 2.0)], clocks=NODES)
    assert with_a_cause.suspects == ()
    near = decide_verdict([symptom(0, 5.0)], ranks=FOUR, ends=[ended(1, 5.01)], clocks=NODES)
    assert near.suspects == (Suspect(rank=1, host="n2", why="it ended with 0 at about the same time"),)


def test_an_end_with_0_soon_after_the_symptoms_explains_them_where_nothing_else_does() -> None:
    """The sockets of a process are closed, and the others have printed that, before it has ended."""
    failures = [symptom(0, 5.0), symptom(3, 5.0)]
    verdict = decide_verdict(failures, ranks=FOUR, ends=[ended(1, 6.0)], clocks=NODES)
    why = "it ended with 0 at about the same time (seen 1.0 s later)"
    assert verdict.suspects == (Suspect(rank=1, host="n2", why=why),)
    odd = decide_verdict(failures, ranks=FOUR, ends=[ended(1, 6.0)], activities=[waits(0), sleeps(2)], clocks=NODES)
    assert [suspect.rank for suspect in odd.suspects] == [2, 1]


def waits(rank: int) -> Activity:
    return Activity(rank=rank, doing=Doing.COLLECTIVE, call="all_reduce", at="train.py:9 step", failed=True)


def sleeps(rank: int) -> Activity:
    return Activity(rank=rank, doing=Doing.SLEEP, at="data.py:4 fetch")


WHY = "it was asleep (data.py:4 fetch) while the others waited in all_reduce"


def test_the_rank_in_no_collective_is_the_one_to_look_at() -> None:
    failures = [symptom(rank, 5.0) for rank in (0, 2)]
    activities = [waits(0), sleeps(1), waits(2)]
    verdict = decide_verdict(failures, ranks=FOUR, activities=activities, clocks=NODES)
    assert verdict.suspects == (Suspect(rank=1, host="n2", why=WHY),), "rank 3 is silent, and nothing is known of it"
    both = decide_verdict(failures, ranks=FOUR, activities=activities, ends=[ended(3, 2.0)], clocks=NODES)
    assert [suspect.rank for suspect in both.suspects] == [3, 1], "what is certain comes first"


def test_a_silent_rank_is_named_with_what_it_did_and_not_where_it_waits_with_the_others() -> None:
    failures = [symptom(0, 5.0), symptom(2, 5.0)]
    same = replace(waits(1), failed=False)
    verdict = decide_verdict(failures, ranks=FOUR, activities=[waits(0), same, waits(2)], clocks=NODES)
    assert [suspect.rank for suspect in verdict.suspects] == [3]
    alone = decide_verdict(failures, ranks=FOUR, activities=[replace(same, call="recv")], clocks=NODES)
    assert alone.suspects[0].why == "it did not fail; it was in recv (train.py:9 step)"


def test_a_watchdog_of_the_scripts_own_is_a_likely_cause_where_no_other_rank_stands_out() -> None:
    own = replace(symptom(0, 5.0), reason=OWN_WATCHDOG.says)
    alone = decide_verdict([own, symptom(2, 5.1)], ranks=FOUR, activities=[waits(2)], clocks=NODES)
    assert (alone.cause, alone.confidence) == (Cause.WORKER, Confidence.LOW)
    assert alone.failure is own
    other = decide_verdict([own, symptom(2, 5.1)], ranks=FOUR, activities=[waits(2), sleeps(3)], clocks=NODES)
    assert (other.cause, [suspect.rank for suspect in other.suspects][:1]) == (Cause.UNKNOWN, [3])


WAITED = (
    'Traceback (most recent call last):\n  File "/home/ann/train.py", line 3, in <module>\n    {line}\n'
    "TimeoutError: no part within 3 s"
)


def test_ranks_that_gave_up_waiting_alike_may_have_waited_for_the_one_that_did_not_fail() -> None:

    def waited(*ranks: int, line: str = "raise TimeoutError(text)") -> Verdict:
        text = WAITED.format(line=line)
        failures = [replace(root(rank, 5.0, "TimeoutError: no part within 3 s"), traceback=text) for rank in ranks]
        return decide_verdict(failures, ranks=FOUR, clocks=NODES)

    assert waited(0, 2, 3).confidence is Confidence.LOW
    assert "it gave up waiting, and rank 1 did not fail: look there, too" in waited(0, 2, 3).evidence
    assert waited(0).confidence is Confidence.LOW
    assert waited(0, 1, 2, 3).confidence is Confidence.HIGH
    assert waited(0, line="answer = server.get()").confidence is Confidence.HIGH


def test_ranks_that_fail_alike_after_one_ended_with_0_may_have_lost_it() -> None:
    alike = [root(rank, 5.0, "TrainingFailed: sync failed") for rank in (0, 2, 3)]
    verdict = decide_verdict(alike, ends=[ended(1, 4.5)], clocks=NODES)
    assert verdict.confidence is Confidence.LOW
    assert "Look at rank 1: it ended with 0 0.500 s before" in verdict.evidence
    assert decide_verdict(alike[:1], ends=[ended(1, 4.5)], clocks=NODES).confidence is Confidence.HIGH
    assert decide_verdict(alike, ends=[ended(1, 60.0)], clocks=NODES).confidence is Confidence.HIGH


def test_what_all_ranks_have_in_common_is_said_and_no_rank_is_named() -> None:
    activities = [replace(waits(rank), doing=Doing.STORE, clients=(4, 5)) for rank in (0, 2)]
    verdict = decide_verdict(
        [symptom(0, 5.0), symptom(2, 5.0)], ranks=FOUR, activities=activities, ends=[ended(1, 2.0)], clocks=NODES
    )
    assert verdict.suspects == ()
    assert "4 of 5 ranks had connected to the store" in verdict.evidence


def test_our_own_failure_is_told_before_its_consequences() -> None:
    gone = replace(lost(0, 5.0), broke="the workers' TCPStore is gone")
    verdict = decide_verdict([symptom(0, 5.1), symptom(1, 5.2)], lost_nodes=[gone])
    assert (verdict.category, verdict.confidence) == (Category.PLATFORM, Confidence.HIGH)
    assert verdict.summary == "the workers' TCPStore is gone (on n1)"
    assert verdict.evidence.endswith("2 failures elsewhere are its consequence")
    before = decide_verdict([root(1, 4.0)], lost_nodes=[gone], clocks=NODES)
    assert before.evidence.endswith("after it, the workers' TCPStore is gone")


def test_what_was_ended_by_us_is_no_cause() -> None:
    stopped = [make_failure(rank, at=rank, exitcode=-15, stopped_by_agent=True) for rank in range(3)]
    verdict = decide_verdict(stopped)
    assert (verdict.cause, verdict.evidence) == (Cause.NONE, "all 3 were ended by this job itself")
    assert decide_verdict([*stopped, root(5, 9.0)]).failure == root(5, 9.0)
    # An exception that was logged before the stop, without anybody who felt it: a preempted run.
    hung = root(2, 9.0, exitcode=-15, stopped_by_agent=True)
    assert decide_verdict([hung]).cause is Cause.NONE
    late = decide_verdict([symptom(0, 1.0), symptom(1, 1.0), hung])
    assert (late.failure, late.confidence) == (hung, Confidence.LOW), "likely the cause"
    assert "this job ended it" in late.evidence


def test_a_lost_node_is_the_cause_of_what_the_others_say() -> None:
    verdict = decide_verdict([symptom(0, 30.0), symptom(1, 30.1)], lost_nodes=[lost(2, 33.0, age=3.2)])
    assert (verdict.cause, verdict.category, verdict.failure) == (Cause.NODE, Category.INFRASTRUCTURE, None)
    assert (verdict.lost_node, verdict.summary) == (lost(2, 33.0, age=3.2), "node n3 was lost")
    assert verdict.evidence == "no heartbeat for 3.2 s; 2 failures elsewhere are its consequence"
    young = replace(lost(2, 33.0, age=0.8), detail="its step ended, srun: Node failure on n3")
    assert decide_verdict([], lost_nodes=[young]).evidence == "its step ended, srun: Node failure on n3"
    two = decide_verdict([], lost_nodes=[lost(3, 40.0, age=5.0), lost(1, 39.0, age=1.0)])
    assert two.lost_node == lost(3, 40.0, age=5.0), "the first of them"
    assert "lost too: n2" in two.evidence
    died = decide_verdict([symptom(0, 30.0)], lost_nodes=[replace(lost(2, 29.9), agent_only=True)])
    assert (died.category, died.summary, died.retryable) == (Category.PLATFORM, "the agent on n3 died", True)


def test_a_worker_that_failed_before_a_node_was_lost_is_the_cause() -> None:
    failures = [root(0, 10.0), symptom(1, 10.1)]
    verdict = decide_verdict(failures, lost_nodes=[lost(2, 33.0, age=3.0)], clocks=NODES)
    assert (verdict.cause, verdict.confidence) == (Cause.WORKER, Confidence.HIGH)
    assert verdict.evidence.endswith("node n3 was lost after it")
    verdict = decide_verdict(failures, lost_nodes=[lost(2, 33.0, age=3.0, observer=None)], clocks=NODES)
    assert verdict.confidence is Confidence.TIE
    assert "n3 was lost too; the clocks were not compared" in verdict.evidence


def test_a_worker_that_failed_after_a_node_was_lost_is_not() -> None:
    def told(at: float, observer: int | None = 1) -> Verdict:
        return decide_verdict([root(0, at)], lost_nodes=[lost(2, 33.0, age=3.0, observer=observer)], clocks=NODES)

    verdict = told(31.5)
    assert (verdict.cause, verdict.confidence) == (Cause.NODE, Confidence.HIGH)
    near = told(30.9)
    assert near.confidence is Confidence.TIE, "it may have lived until its next sign was due"
    assert "rank 0 on n1 failed at about the same time" in near.evidence
    unknown = told(31.5, observer=None)
    assert unknown.confidence is Confidence.TIE
    assert "rank 0 on n1 failed too, by a clock that was not compared" in unknown.evidence
    assert told(31.5, observer=SUPERVISOR).confidence is Confidence.HIGH, "which runs on n1"


def test_a_lost_node_is_placed_by_its_observers_clock() -> None:
    """The coordinator's clock is an hour behind: the loss seems to come long before the failure, and came after it."""
    clocks = compared(-3600.0)
    loss = lost(2, 33.0 - 3600.0, age=3.0, observer=1)
    verdict = decide_verdict([root(0, 20.0)], lost_nodes=[loss], clocks=clocks)
    assert (verdict.cause, verdict.confidence) == (Cause.WORKER, Confidence.HIGH)


def test_93_on_any_rank_is_obeyed() -> None:
    assert decide_verdict([root(0, 1.0), root(1, 2.0, "KeyError: 'x'")]).retryable
    assert not decide_verdict([root(0, 1.0), make_failure(1, at=2.0, exitcode=93)]).retryable
    assert not decide_verdict([root(0, 1.0, "SyntaxError: invalid syntax")]).retryable


# -- hangs


def hang(rank: int, at: float, step: int | None) -> WorkerFailure:
    return replace(make_failure(rank, at=at), failure_class=FailureClass.HANG, last_step=step, message="hang: silent")


def word(rank: int, step: int | None) -> RankStatus:
    return RankStatus(rank=rank, node=0, step=step, section="step", age=60.0, reported_ns=START_NS)


def test_of_those_that_hang_the_furthest_behind_is_the_cause() -> None:
    statuses = [word(0, 8), word(1, 8), word(2, 7), word(3, None)]
    for order in itertools.permutations([hang(0, 1.0, 8), hang(1, 2.0, 8), hang(2, 3.0, 7), symptom(3, 70.0)]):
        verdict = decide_verdict(order, rank_statuses=statuses)
        assert named(verdict) == 2
        assert verdict.confidence is Confidence.HIGH
        assert verdict.evidence == (
            "furthest behind: 2 other ranks had got to step 8; 1 failure elsewhere is its consequence"
        )
        assert {failure.global_rank for failure in verdict.candidates} == {0, 1}


def test_at_the_same_step_it_is_not_certain_and_said_so() -> None:
    verdict = decide_verdict([hang(0, 2.0, 8), hang(1, 1.0, 8)], rank_statuses=[word(0, 8), word(1, 8)])
    assert named(verdict) == 1
    assert verdict.confidence is Confidence.LOW
    assert "rank 0 hung at the same step" in verdict.evidence
    without = decide_verdict([hang(0, 2.0, None), hang(1, 1.0, None)])
    assert "rank 0 hung too: which one" in without.evidence


def test_one_that_never_got_to_a_step_is_behind_all() -> None:
    assert named(decide_verdict([hang(0, 1.0, 3), hang(1, 2.0, None)], rank_statuses=[word(0, 3)])) == 1
    assert decide_verdict([hang(5, 1.0, 3)]).evidence == "the only rank without progress"
    assert named(decide_verdict([root(0, 1.0), hang(1, 2.0, 3)])) == 0, "an exception before the silence"
    brought = decide_verdict([replace(hang(0, 1.0, step=4), stopped_ns=START_NS)])
    assert (brought.cause, brought.confidence) == (Cause.WORKER, Confidence.HIGH), "it follows from no stop it brought"


def test_among_ranks_that_hang_at_one_step_the_odd_one_out_is_the_cause() -> None:
    failures = [hang(0, 1.0, step=4), hang(2, 1.5, step=4)]
    activities = [replace(waits(0), failed=False), replace(waits(1), failed=False), sleeps(2)]
    verdict = decide_verdict(failures, activities=activities)
    assert verdict.failure is failures[1]
    assert (verdict.confidence, verdict.evidence) == (Confidence.HIGH, f"the odd one out: {WHY}")
    # One that waits alone may be right: the others do not come to its collective.
    alone = [replace(waits(0), failed=False), sleeps(1), sleeps(2)]
    verdict = decide_verdict(failures, activities=alone)
    assert verdict.failure is failures[0]
    assert verdict.confidence is Confidence.LOW


def test_an_odd_one_that_nobody_judged_is_to_be_looked_at() -> None:
    """It sends no heartbeats; the one that does waits for it."""
    activities = [replace(waits(0), failed=False), sleeps(1), replace(waits(2), failed=False)]
    verdict = decide_verdict([hang(0, 1.0, step=4)], activities=activities, ranks={0: "n1", 1: "n2", 2: "n3"})
    assert (verdict.cause, verdict.confidence) == (Cause.UNKNOWN, Confidence.NONE)
    assert [suspect.rank for suspect in verdict.suspects] == [1]
    assert verdict.evidence == f"not known: ranks hung at step 4. Look at rank 1 on n2: {WHY}"
    # A suspicion that counts as a hang, in a script without steps.
    silent = decide_verdict([hang(0, 1.0, step=None)], activities=activities, ranks={0: "n1", 1: "n2", 2: "n3"})
    assert silent.evidence == f"not known: ranks hung together. Look at rank 1 on n2: {WHY}"


def test_the_only_one_is_said_only_where_all_ranks_send_heartbeats() -> None:
    alone = decide_verdict([hang(0, 1.0, step=4)], ranks={0: "n1", 1: "n2"})
    assert (alone.confidence, alone.evidence) == (Confidence.LOW, "only 1 rank of 2 sent heartbeats")
    quiet = decide_verdict([hang(0, 1.0, 8)], rank_statuses=[word(0, 8), word(1, 8)])
    assert quiet.confidence is Confidence.LOW
    assert quiet.evidence == "rank 1 gave no heartbeat for as long, in sections without a timeout"
    lives = decide_verdict([hang(0, 1.0, 8)], rank_statuses=[word(0, 8), replace(word(1, 8), age=0.5)])
    assert (lives.confidence, lives.evidence) == (Confidence.HIGH, "the only rank without progress")


def _in(rank: int, call: str = "all_reduce", **changes: Any) -> Activity:
    return Activity(rank=rank, doing=Doing.COLLECTIVE, call=call, at="train.py:7", **changes)


def test_a_rank_that_most_others_have_left_behind_is_the_odd_one() -> None:
    """It calls a collective more than the others, who had come to the end."""
    failures = [symptom(1, 5.0)]
    for late in (-0.2, 0.4):
        ends = [ended(rank, 5.0 + late) for rank in (0, 2, 3)]
        verdict = decide_verdict(failures, ends=ends, activities=[_in(1, failed=True)], ranks=FOUR, clocks=NODES)
        assert verdict.cause is Cause.UNKNOWN
        assert [(one.rank, one.why) for one in verdict.suspects] == [
            (1, "it was in all_reduce (train.py:7) when the 3 others had ended with 0: they do not call that")
        ]
    verdict = decide_verdict(failures, ends=ends[:2], activities=[_in(1, failed=True)], ranks=FOUR, clocks=NODES)
    assert [one.rank for one in verdict.suspects] == [0, 2], "half of them ended: either side may be wrong"


def test_a_rank_that_ended_with_0_is_the_one_for_which_the_others_hang() -> None:
    hung = [hang(rank, 5.0, step=3) for rank in (0, 1, 3)]
    activities = [_in(rank) for rank in (0, 1, 3)]
    verdict = decide_verdict(hung, ends=[ended(2, 6.0)], activities=activities, ranks=FOUR, clocks=NODES)
    assert (verdict.cause, verdict.confidence) == (Cause.UNKNOWN, Confidence.NONE)
    assert [(one.rank, one.why) for one in verdict.suspects] == [
        (2, "it had ended with 0, 1.0 s after the last heartbeat of rank 0")
    ]
    computing = [*activities[:2], Activity(rank=3, doing=Doing.CODE, at="train.py:9")]
    verdict = decide_verdict(hung, ends=[ended(2, 6.0)], activities=computing, ranks=FOUR, clocks=NODES)
    assert 2 not in [one.rank for one in verdict.suspects], "rank 3 waits for no rank"
    most = [ended(rank, 6.0) for rank in (1, 2, 3)]
    verdict = decide_verdict(hung[:1], ends=most, activities=activities[:1], ranks=FOUR, clocks=NODES)
    assert verdict.cause is Cause.WORKER


def test_several_suspects_read_as_several() -> None:
    assert of_several("it never entered all_reduce #7, which the 2 others wait in; its last there was barrier #6") == (
        "they never entered all_reduce #7, which the 2 others wait in; their last there was barrier #6"
    )
    assert of_several("it has completed barrier #7, which rank 0 waits in") == (
        "they have completed barrier #7, which rank 0 waits in"
    )
    assert of_several("it ended with 0 3.0 s before; it was asleep") == (
        "they ended with 0 3.0 s before; they were asleep"
    )
