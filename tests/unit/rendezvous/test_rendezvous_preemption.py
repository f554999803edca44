"""The job is going to be ended: what a notice is on disk, which step is agreed on, and what the coordinator commits."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from hpc_elastic.rendezvous.claims import read_claim
from hpc_elastic.rendezvous.proposals import Proposal, RequestsToAll, propose_notice
from hpc_elastic.rendezvous.state import (
    NodeFailure,
    PreemptionStatus,
    RoundEvent,
    RoundRecord,
    RunNotice,
    Status,
    agreed_step,
    seconds_to_save,
)
from hpc_elastic.run.paths import Outcome
from hpc_elastic.worker_api.records import NO_STEP
from tests.unit.rendezvous.test_rendezvous_coordinator import ALL, FINAL, SETTINGS, committed, decide, record, uid, view

NOTICE = RunNotice("SIGUSR2 on n0", 85.0)
HEEDS = PreemptionStatus(heeds=True, step=100, rate=10.0)


@pytest.mark.parametrize("wrong", [{}, {"heeds": "yes"}, {"heeds": True, "step": "x", "rate": 1}])
def test_rubbish_on_disk_is_refused(wrong: dict[str, object]) -> None:
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
    return decide(view(record(status, *ALL, notice=notice), **seen))


NOTED = dict.fromkeys(ALL, HEEDS)
AGREED = replace(NOTICE, step=141)
DEAF = dict.fromkeys(ALL, PreemptionStatus(heeds=False, step=5, rate=1.0))
BOOM = NodeFailure(node=3, fingerprint="F", failure_class="root", retryable=True, message="boom")
SILENT = "nid003 stopped its heartbeat"
PREEMPTED, SUCCEEDED = Outcome.PREEMPTED, Outcome.SUCCEEDED


@pytest.mark.parametrize("status", [Status.JOINABLE, Status.FROZEN])
def test_no_round_begins_any_more(status: Status) -> None:
    proposal = under(status, joined=ALL, acked=dict.fromkeys(ALL, ""))
    assert proposal.event is RoundEvent.CLOSE
    assert (proposal.record.outcome, proposal.record.retryable) == (Outcome.PREEMPTED, True)
    assert proposal.reason == "notice SIGUSR2 on n0; no worker was running"


def test_the_step_is_agreed_when_all_have_said_where_they_stand() -> None:
    assert under(noted=dict.fromkeys(ALL[:3], HEEDS)) is None
    step = 100 + 10 * int(SETTINGS.suspect_answer) + 1
    proposal = under(noted=NOTED)
    agreed = record(Status.FINAL, *ALL, notice=replace(NOTICE, step=step)).successor()
    assert (proposal.event, proposal.record) == (RoundEvent.AGREE, agreed)
    assert proposal.reason == "all workers save after step 141"
    late = under(noted={ALL[0]: HEEDS}, since_notice=5.0)
    assert late.event is RoundEvent.AGREE, "who says nothing is not waited for for ever"
    deaf = under(noted=DEAF, since_notice=1.2)
    assert deaf.event is RoundEvent.AGREE, "nor a script that heeds no notices"


def test_where_no_steps_are_told_each_saves_when_it_can() -> None:
    proposal = under(noted=dict.fromkeys(ALL, PreemptionStatus(heeds=True)))
    assert proposal.record.notice.step == NO_STEP
    assert proposal.record.notice.is_agreed
    assert "no worker reports its steps" in proposal.reason


def test_while_they_save_nothing_follows_whatever_else_happens() -> None:
    assert under(notice=AGREED, noted=NOTED, since_notice=20.0, kept=ALL[:3]) is None
    assert under(notice=AGREED, noted=NOTED, joined=(uid(4),), since_waiting=1000.0) is None
    assert under(Status.CLOSED) is None


@pytest.mark.parametrize(
    ("what", "seen", "outcome", "reason"),
    [
        ("all saved", {"kept": ALL, "since_notice": 41.3}, PREEMPTED, "; saved in 41 of 85 s (step 141)"),
        ("one is done and need not save", {"kept": ALL[:3], "done": ALL[3:]}, PREEMPTED, ""),
        (
            "the script checks for none",
            {"noted": DEAF, "since_notice": 1.2},
            PREEMPTED,
            "; the script does not check for it: not waiting",
        ),
        ("one is too late", {"kept": ALL[:3], "since_notice": 85.0}, PREEMPTED, "; nid003 had not saved after 85 s"),
        ("all were done anyway", {"done": ALL}, SUCCEEDED, ""),
        ("all were done because of it", {"done": ALL, "kept": ALL}, PREEMPTED, ""),
        ("all were done before it was known that none checks", {"noted": DEAF, "done": ALL}, SUCCEEDED, ""),
        ("a node is lost, the others are done", {"done": ALL[:3], "dead": ALL[3:]}, PREEMPTED, f"; then {SILENT}"),
        ("a node is done, then lost", {"done": ALL, "dead": ALL[3:]}, SUCCEEDED, ""),
        ("a worker fails", {"failures": {ALL[3]: BOOM}}, PREEMPTED, "; then boom on nid003"),
        ("a node is lost", {"dead": ALL[3:]}, PREEMPTED, f"; then {SILENT}"),
    ],
)
def test_how_an_attempt_ends_under_a_notice(what: str, seen: dict[str, Any], outcome: Outcome, reason: str) -> None:
    proposal = under(notice=AGREED, **{"noted": NOTED, **seen})
    assert (proposal.event, proposal.record.outcome) == (RoundEvent.CLOSE, outcome)
    assert proposal.reason.endswith(reason)
    assert proposal.reason.startswith("notice SIGUSR2 on n0") or not reason


def test_every_record_after_it_carries_the_notice() -> None:
    proposal = propose_notice(FINAL, NOTICE)
    assert proposal.event is RoundEvent.NOTICE
    assert (proposal.record.status, proposal.record.members) == (FINAL.status, FINAL.members)
    assert proposal.record.successor(waiting=1).notice == NOTICE


# -- a signal that an agent heard


def next_of(words: RequestsToAll, of: RoundRecord = FINAL, **more: float) -> Proposal:
    proposal = words.next(of, **more)
    assert proposal is not None
    return proposal


def test_a_signal_that_was_heard_is_on_disk_and_told_once() -> None:
    words = RequestsToAll()
    assert not words
    words.heard("SIGTERM on n1")
    words.heard("SIGTERM on n2")
    assert words
    proposal = next_of(words)
    assert (proposal.event, proposal.reason) == (RoundEvent.HEARD, "SIGTERM on n1")
    assert proposal.record == FINAL.successor(heard="SIGTERM on n1")
    assert words.next(proposal.record) is None
    assert not words, "the log says it"


@pytest.mark.parametrize(
    ("heard", "there"),
    [
        ("SIGUSR2 on n1", {"notice": NOTICE}),
        ("SIGTERM on n1", {"heard": "SIGTERM on n2"}),
        ("SIGTERM on n1", {"status": Status.CLOSED, "outcome": Outcome.CANCELLED}),
    ],
    ids=["a notice", "another's word", "the end"],
)
def test_nobody_tells_of_a_signal_when_all_know_more(heard: str, there: dict[str, Any]) -> None:
    words = RequestsToAll()
    words.heard(heard)
    assert words.next(replace(FINAL, **there)) is None
    assert not words


@pytest.mark.parametrize("first", ["", "SIGUSR2 on n2"])
def test_a_sigterm_after_a_notice_is_told_once_since_it_may_leave_less_time(first: str) -> None:
    words = RequestsToAll()
    words.heard("SIGUSR2 on n1")
    words.heard("SIGTERM on n1")
    words.heard("SIGTERM on n3")
    told = next_of(words, replace(FINAL, notice=NOTICE, heard=first))
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


@pytest.mark.parametrize(
    ("ends", "event", "reason"),
    [((Outcome.CANCELLED, Outcome.FAILED), RoundEvent.CLOSE, "CANCELLED"), ((), RoundEvent.NOTICE, NOTICE.reason)],
    ids=["an end", "a notice"],
)
def test_an_end_goes_before_a_notice_and_a_notice_before_a_signal(
    ends: tuple[Outcome, ...], event: RoundEvent, reason: str
) -> None:
    words = RequestsToAll()
    words.heard("SIGTERM on n1")
    words.give_notice(NOTICE)
    for outcome in ends:
        words.close(outcome, outcome.name)
    found = next_of(words)
    assert (found.event, found.record.outcome) == (event, ends[0] if ends else None)
    assert reason in found.reason


def test_no_round_begins_until_it_is_known_what_a_signal_means() -> None:
    """Workers that the signal itself has ended are not started anew for the moments that are left."""
    before = record(Status.JOINABLE, *ALL, heard="SIGTERM on n1")
    ready = committed(view(replace(before, heard=""), joined=ALL))
    assert ready.event is RoundEvent.FREEZE
    assert decide(view(before, joined=ALL, since_status=1.0)) is None
    late = committed(view(before, joined=ALL, since_status=6.5))
    assert late.event is RoundEvent.FREEZE, "nobody can say it"
