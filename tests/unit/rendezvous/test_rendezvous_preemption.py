"""The job is going to be ended: what a notice is on disk, which step is agreed on, and what the coordinator commits."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from hpc_elastic.base import codec
from hpc_elastic.base.outcome import Outcome
from hpc_elastic.rendezvous.claims import read_claim
from hpc_elastic.rendezvous.coordinator import next_proposal
from hpc_elastic.rendezvous.preemption import (
    PreemptionStatus,
    RunNotice,
    agreed_step,
    seconds_to_save,
)
from hpc_elastic.rendezvous.proposals import RequestsToAll, propose_notice
from hpc_elastic.rendezvous.state import NodeFailure, RoundEvent, Status, decode_record
from hpc_elastic.worker_api.heartbeat_record import NO_STEP
from tests.unit.rendezvous.test_rendezvous_coordinator import ALL, FINAL, SETTINGS, DecideRestart, record, uid, view

NOTICE = RunNotice("SIGUSR2 on n0", 85.0)
HEEDS = PreemptionStatus(heeds=True, step=100, rate=10.0)


def test_what_is_on_disk_reads_back_and_rubbish_is_refused() -> None:
    with_notice = replace(FINAL, notice=replace(NOTICE, step=7))
    assert decode_record(with_notice.number, with_notice.to_json(), run_id="r") == with_notice
    assert read_claim(PreemptionStatus, codec.dumps(HEEDS)) == HEEDS
    for wrong in ({}, {"heeds": "yes"}, {"heeds": True, "step": "x", "rate": 1}):
        assert read_claim(PreemptionStatus, json.dumps(wrong)) is None


@pytest.mark.parametrize(
    ("given_seconds", "shutdown", "expected"),
    [(120, 30, 85), (120, 600, 75), (9, 30, 5.1), (1, 30, 1), (0, 0, 1)],
)
def test_what_remains_is_enough_to_end_the_workers(given_seconds: float, shutdown: float, expected: float) -> None:
    assert seconds_to_save(given_seconds, shutdown_timeout=shutdown) == pytest.approx(expected)


words = st.builds(
    PreemptionStatus, heeds=st.booleans(), step=st.integers(NO_STEP, 10**9), rate=st.floats(0, 1000, allow_nan=False)
)


@given(st.lists(words, min_size=1, max_size=20), st.floats(0, 60))
def test_no_worker_has_passed_the_step_when_it_hears_of_it(told: list[PreemptionStatus], spread: float) -> None:
    step = agreed_step(told, spread=spread)
    if all(word.step == NO_STEP for word in told):
        assert step == NO_STEP
    for word in told:
        if word.step >= 0:
            assert step > word.step + word.rate * spread - 1e-3
            assert step >= word.step + 1


def under(status: Status = Status.FINAL, notice: RunNotice = NOTICE, **seen: Any) -> Any:
    return next_proposal(view(record(status, *ALL, notice=notice), **seen), SETTINGS, DecideRestart())


NOTED = dict.fromkeys(ALL, HEEDS)
AGREED = replace(NOTICE, step=141)


@pytest.mark.parametrize("status", [Status.JOINABLE, Status.FROZEN])
def test_no_round_begins_any_more(status: Status) -> None:
    proposal = under(status, joined=ALL, acked=dict.fromkeys(ALL, ""))
    assert proposal.event is RoundEvent.CLOSE
    assert (proposal.record.outcome, proposal.record.retryable) == (Outcome.PREEMPTED, True)
    assert proposal.reason == "notice SIGUSR2 on n0; no worker was running"


def test_the_step_is_agreed_when_all_have_said_where_they_stand() -> None:
    assert under(noted=dict.fromkeys(ALL[:3], HEEDS)) is None
    proposal = under(noted=NOTED)
    assert proposal.event is RoundEvent.AGREE
    assert proposal.record.status is Status.FINAL
    assert proposal.record.notice == replace(NOTICE, step=100 + 10 * int(SETTINGS.suspect_answer) + 1)
    assert proposal.reason == "all workers save after step 141"


def test_who_says_nothing_is_not_waited_for_for_ever() -> None:
    proposal = under(noted={ALL[0]: HEEDS}, since_notice=5.0)
    assert proposal.event is RoundEvent.AGREE


def test_where_no_steps_are_told_each_saves_when_it_can() -> None:
    proposal = under(noted=dict.fromkeys(ALL, PreemptionStatus(heeds=True)))
    assert proposal.record.notice.step == NO_STEP
    assert proposal.record.notice.is_agreed
    assert "no worker reports its steps" in proposal.reason


def test_while_they_save_nothing_follows_whatever_else_happens() -> None:
    assert under(notice=AGREED, noted=NOTED, since_notice=20.0, kept=frozenset(ALL[:3])) is None
    assert under(notice=AGREED, noted=NOTED, joined=(uid(4),), since_waiting=1000.0) is None


def test_when_all_have_saved_the_attempt_is_over() -> None:
    proposal = under(notice=AGREED, noted=NOTED, kept=frozenset(ALL), since_notice=41.3)
    assert (proposal.event, proposal.record.outcome) == (RoundEvent.CLOSE, Outcome.PREEMPTED)
    assert proposal.reason == "notice SIGUSR2 on n0; saved in 41 of 85 s (step 141)"


def test_a_node_that_is_done_need_not_have_saved() -> None:
    proposal = under(notice=AGREED, noted=NOTED, kept=frozenset(ALL[:3]), done=frozenset(ALL[3:]))
    assert proposal.record.outcome is Outcome.PREEMPTED


def test_a_script_that_heeds_no_notices_is_not_waited_for() -> None:
    noted = dict.fromkeys(ALL, PreemptionStatus(heeds=False, step=5, rate=1.0))
    assert under(noted=noted, since_notice=1.2).event is RoundEvent.AGREE
    proposal = under(notice=AGREED, noted=noted, since_notice=1.2)
    assert proposal.record.outcome is Outcome.PREEMPTED
    assert "does not check for it" in proposal.reason


def test_who_is_too_late_is_named() -> None:
    proposal = under(notice=AGREED, noted=NOTED, kept=frozenset(ALL[:3]), since_notice=85.0)
    assert proposal.record.outcome is Outcome.PREEMPTED
    assert proposal.reason == "notice SIGUSR2 on n0; nid003 had not saved after 85 s"


def test_workers_that_were_ready_anyway_have_succeeded() -> None:
    assert under(notice=AGREED, noted=NOTED, done=frozenset(ALL)).record.outcome is Outcome.SUCCEEDED
    ended_because_of_it = under(notice=AGREED, noted=NOTED, done=frozenset(ALL), kept=frozenset(ALL))
    assert ended_because_of_it.record.outcome is Outcome.PREEMPTED


def test_workers_that_were_ready_before_it_was_known_that_none_checks_for_it_have_succeeded() -> None:
    noted = dict.fromkeys(ALL, PreemptionStatus(heeds=False, step=5, rate=1.0))
    proposal = under(notice=AGREED, noted=noted, done=frozenset(ALL))
    assert proposal.record.outcome is Outcome.SUCCEEDED


def test_a_node_that_is_lost_under_it_did_not_succeed_with_the_others() -> None:
    proposal = under(notice=AGREED, noted=NOTED, done=frozenset(ALL[:3]), dead=frozenset(ALL[3:]))
    assert proposal.record.outcome is Outcome.PREEMPTED
    assert proposal.reason == "notice SIGUSR2 on n0; then nid003 stopped its heartbeat"
    both = under(notice=AGREED, noted=NOTED, done=frozenset(ALL), dead=frozenset(ALL[3:]))
    assert both.record.outcome is Outcome.SUCCEEDED


def test_a_failure_or_a_loss_meanwhile_ends_it_at_once() -> None:
    failed = NodeFailure(node=3, fingerprint="F", failure_class="root", retryable=True, message="boom")
    proposal = under(notice=AGREED, noted=NOTED, failures={ALL[3]: failed})
    assert (proposal.record.outcome, proposal.reason) == (
        Outcome.PREEMPTED,
        "notice SIGUSR2 on n0; then boom on nid003",
    )
    proposal = under(notice=AGREED, noted=NOTED, dead=frozenset(ALL[3:]))
    assert proposal.reason == "notice SIGUSR2 on n0; then nid003 stopped its heartbeat"


def test_after_the_end_nothing_follows() -> None:
    assert under(Status.CLOSED) is None


def test_every_record_after_it_carries_the_notice() -> None:
    proposal = propose_notice(FINAL, NOTICE)
    assert proposal.event is RoundEvent.NOTICE
    assert (proposal.record.status, proposal.record.members) == (FINAL.status, FINAL.members)
    assert proposal.record.successor(waiting=1).notice == NOTICE


# -- a signal that an agent heard


def test_a_signal_that_was_heard_is_on_disk_and_told_once() -> None:
    words = RequestsToAll()
    assert not words
    words.heard("SIGTERM on n1")
    words.heard("SIGTERM on n2")
    assert words
    proposal = words.next(FINAL)
    assert proposal is not None
    assert (proposal.event, proposal.record.heard, proposal.reason) == (
        RoundEvent.HEARD,
        "SIGTERM on n1",
        "SIGTERM on n1",
    )
    assert proposal.record.status is Status.FINAL
    assert decode_record(proposal.record.number, proposal.record.to_json(), run_id="r") == proposal.record
    assert words.next(proposal.record) is None
    assert not words, "the log says it"


@pytest.mark.parametrize("known", ["a notice", "another's word", "the end"])
def test_nobody_tells_of_a_signal_when_all_know_more(known: str) -> None:
    words = RequestsToAll()
    words.heard("SIGUSR2 on n1" if known == "a notice" else "SIGTERM on n1")
    there = {
        "a notice": replace(FINAL, notice=NOTICE),
        "another's word": replace(FINAL, heard="SIGTERM on n2"),
        "the end": replace(FINAL, status=Status.CLOSED, outcome=Outcome.CANCELLED),
    }[known]
    assert words.next(there) is None
    assert not words


@pytest.mark.parametrize("first", ["", "SIGUSR2 on n2"])
def test_a_sigterm_after_a_notice_is_told_once_since_it_may_leave_less_time(first: str) -> None:
    words = RequestsToAll()
    words.heard("SIGUSR2 on n1")
    words.heard("SIGTERM on n1")
    words.heard("SIGTERM on n3")
    told = words.next(replace(FINAL, notice=NOTICE, heard=first))
    assert told is not None
    assert (told.event, told.record.heard, told.record.notice) == (RoundEvent.HEARD, "SIGTERM on n1", NOTICE)
    assert words.next(told.record) is None
    words.heard("SIGTERM on n1")
    assert words.next(told.record) is None, "its grace is over: that is told by who ends the job"


@pytest.mark.parametrize(
    ("seconds", "since", "is_told"), [(20.0, 0.0, True), (84.5, 0.0, False), (20.0, 64.5, False), (85.0, 10.0, False)]
)
def test_a_second_notice_is_told_where_it_leaves_less_time(seconds: float, since: float, is_told: bool) -> None:
    words = RequestsToAll()
    words.give_notice(RunNotice("later", 99.0))
    words.give_notice(RunNotice("sooner", seconds, left=seconds + 5))
    words.give_notice(RunNotice("last", 98.0))
    told = words.next(replace(FINAL, notice=AGREED), noticed_for=since)
    if not is_told:
        assert told is None
        assert not words
        return
    assert told is not None
    assert told.event is RoundEvent.NOTICE
    assert told.record.notice == RunNotice("sooner", seconds, step=AGREED.step, left=seconds + 5), "the step stays"
    assert told.record.notice.is_given_as(RunNotice("sooner", seconds, left=seconds + 5))
    assert not told.record.notice.is_given_as(NOTICE)
    assert words.next(told.record, noticed_for=0.0) is None


def test_an_end_goes_before_a_notice_and_a_notice_before_a_signal() -> None:
    words = RequestsToAll()
    words.heard("SIGTERM on n1")
    words.give_notice(NOTICE)
    words.close(Outcome.CANCELLED, "first")
    words.close(Outcome.FAILED, "second")
    closing = words.next(FINAL)
    assert closing is not None
    assert (closing.record.status, closing.record.outcome, closing.reason) == (
        Status.CLOSED,
        Outcome.CANCELLED,
        "first",
    )
    other = RequestsToAll()
    other.heard("SIGTERM on n1")
    other.give_notice(NOTICE)
    notice = other.next(FINAL)
    assert notice is not None
    assert notice.event is RoundEvent.NOTICE


def test_no_round_begins_until_it_is_known_what_a_signal_means() -> None:
    """Workers that the signal itself has ended are not started anew for the moments that are left."""
    before = record(Status.JOINABLE, *ALL, heard="SIGTERM on n1")
    ready = next_proposal(view(replace(before, heard=""), joined=ALL), SETTINGS, DecideRestart())
    assert ready is not None
    assert ready.event is RoundEvent.FREEZE
    assert next_proposal(view(before, joined=ALL, since_status=1.0), SETTINGS, DecideRestart()) is None
    late = next_proposal(view(before, joined=ALL, since_status=6.5), SETTINGS, DecideRestart())
    assert late is not None
    assert late.event is RoundEvent.FREEZE, "nobody can say it"
