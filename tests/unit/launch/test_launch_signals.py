"""What signals mean: the table, real Slurms' records, when Slurm is asked, and what is made of its answer."""

from __future__ import annotations

import itertools
import signal
import time
from typing import Any

import pytest

from hpc_elastic.launch.site import (
    EARLY_NOTICE,
    SILENT_RETRY,
    Heard,
    HeardBy,
    JobCondition,
    Meaning,
    SignalDecision,
    SignalResolver,
    SlurmAnswer,
    call_of,
    decide_signal,
)
from hpc_elastic.launch.slurm_site import slurm_answer
from hpc_elastic.run.paths import Outcome
from hpc_elastic.slurm.job_state import JobState, parse_show_job
from tests.rigs.event_pairs import log_into_dicts
from tests.rigs.fake_clock import FakeClock

W, BATCH, AGENTS = JobCondition, HeardBy.BATCH, HeardBy.AGENTS
GRACE, KILL_WAIT, LEFT = 120.0, 30.0, 17.0
SAVES = True

# (what was heard, by whom or both, what Slurm says) → (meaning, whether workers may save, seconds, outcome)
ROWS = [
    (Heard.NOTICE, None, W.RUNNING, Meaning.REQUEUE, SAVES, GRACE, Outcome.PREEMPTED),
    (Heard.NOTICE, None, W.NO_SLURM, Meaning.REQUEUE, SAVES, GRACE, Outcome.PREEMPTED),
    (Heard.NOTICE, None, W.SILENT, Meaning.LIMIT, SAVES, GRACE, Outcome.PREEMPTED),
    (Heard.NOTICE, None, W.NEAR_LIMIT, Meaning.LIMIT, SAVES, LEFT, Outcome.PREEMPTED),
    (Heard.NOTICE, None, W.PREEMPTING, Meaning.PREEMPT, SAVES, LEFT, Outcome.PREEMPTED),
    (Heard.NOTICE, None, W.PREEMPTED, Meaning.PREEMPT, False, KILL_WAIT, Outcome.PREEMPTED),
    (Heard.NOTICE, None, W.TIME_LIMIT, Meaning.LIMIT, False, KILL_WAIT, Outcome.TIMED_OUT),
    (Heard.NOTICE, None, W.REQUEUED, Meaning.REQUEUE, False, KILL_WAIT, Outcome.PREEMPTED),
    (Heard.NOTICE, None, W.ENDED, Meaning.CANCEL, False, KILL_WAIT, Outcome.CANCELLED),
    (Heard.END, None, W.RUNNING, Meaning.CANCEL, False, KILL_WAIT, Outcome.CANCELLED),
    (Heard.END, None, W.NO_SLURM, Meaning.CANCEL, False, KILL_WAIT, Outcome.CANCELLED),
    (Heard.END, BATCH, W.NEAR_LIMIT, Meaning.CANCEL, False, KILL_WAIT, Outcome.CANCELLED),
    (Heard.END, AGENTS, W.NEAR_LIMIT, Meaning.LIMIT, SAVES, LEFT, Outcome.PREEMPTED),
    (Heard.END, BATCH, W.SILENT, Meaning.CANCEL, False, KILL_WAIT, Outcome.CANCELLED),
    (Heard.END, AGENTS, W.SILENT, Meaning.PREEMPT, SAVES, GRACE, Outcome.PREEMPTED),
    (Heard.END, None, W.PREEMPTING, Meaning.PREEMPT, SAVES, LEFT, Outcome.PREEMPTED),
    (Heard.END, None, W.PREEMPTED, Meaning.PREEMPT, False, KILL_WAIT, Outcome.PREEMPTED),
    (Heard.END, None, W.TIME_LIMIT, Meaning.LIMIT, False, KILL_WAIT, Outcome.TIMED_OUT),
    (Heard.END, None, W.REQUEUED, Meaning.REQUEUE, False, KILL_WAIT, Outcome.PREEMPTED),
    (Heard.END, None, W.ENDED, Meaning.CANCEL, False, KILL_WAIT, Outcome.CANCELLED),
    *(
        (Heard.INTERRUPT, None, condition, Meaning.CANCEL, False, KILL_WAIT, Outcome.CANCELLED)
        for condition in JobCondition
    ),
    (Heard.LOOK, BATCH, W.PREEMPTING, Meaning.PREEMPT, SAVES, LEFT, Outcome.PREEMPTED),
    (Heard.LOOK, BATCH, W.NEAR_LIMIT, Meaning.LIMIT, SAVES, LEFT, Outcome.PREEMPTED),
]
EXPECTED = {
    (call, by, condition): rest
    for call, heard_by, condition, *rest in ROWS
    for by in ((heard_by,) if heard_by is not None else tuple(HeardBy))
}


def decide(call: Heard, heard_by: HeardBy, condition: JobCondition) -> SignalDecision | None:
    return decide_signal(call, heard_by, SlurmAnswer(condition, LEFT), grace=GRACE, kill_wait=KILL_WAIT)


@pytest.mark.parametrize(("call", "heard_by", "condition"), list(itertools.product(Heard, HeardBy, JobCondition)))
def test_each_row(call: Heard, heard_by: HeardBy, condition: JobCondition) -> None:
    found = decide(call, heard_by, condition)
    wanted = EXPECTED.get((call, heard_by, condition))
    if wanted is None:
        assert call is Heard.LOOK, "each signal means something, whoever heard it and whatever Slurm says"
        assert found is None
    else:
        assert found is not None
        assert [found.meaning, found.saves, found.seconds, found.outcome] == wanted
        assert found.requeued is (condition is W.REQUEUED and call in (Heard.NOTICE, Heard.END, Heard.INTERRUPT))


@pytest.mark.parametrize(("left", "seconds"), [(None, GRACE), (-5.0, 1.0)], ids=["not named", "over already"])
def test_an_end_that_slurm_does_not_name_is_the_grace(left: float | None, seconds: float) -> None:
    found = decide_signal(Heard.NOTICE, BATCH, SlurmAnswer(W.PREEMPTING, left), grace=GRACE, kill_wait=None)
    assert found is not None
    assert found.seconds == seconds


def test_which_signal_is_what() -> None:
    assert call_of(signal.SIGUSR2) is Heard.NOTICE
    assert call_of(signal.SIGTERM) is Heard.END
    assert call_of(signal.SIGINT) is call_of(signal.SIGHUP) is Heard.INTERRUPT


# As scontrol of 22.05.8 printed them at the moment of the signal, cut down to what is read of them.
_HEAD = "JobId=7 JobName=train\n   JobState="
_TIMES = "\n   RunTime=00:00:04 TimeLimit=00:10:00 TimeMin=N/A\n   StartTime=2026-11-21T15:19:11 EndTime="
SAID = {
    "running": (
        f"{_HEAD}RUNNING Reason=None Dependency=(null)\n   Requeue=1 Restarts=0{_TIMES}2026-11-21T15:29:11 Deadline=N/A"
        "\n   PreemptEligibleTime=2026-11-21T15:19:11 PreemptTime=None\n",
        W.RUNNING,
    ),
    "the grace of a preemption": (
        f"{_HEAD}RUNNING Reason=None Dependency=(null)\n   Requeue=1 Restarts=0{_TIMES}2026-11-21T15:19:25 Deadline=N/A"
        "\n   PreemptEligibleTime=2026-11-21T15:19:11 PreemptTime=2026-11-21T15:19:15\n",
        W.PREEMPTING,
    ),
    "preempted, mode cancel": (
        f"{_HEAD}COMPLETING Reason=None Dependency=(null)\n   Requeue=1 Restarts=0{_TIMES}2026-11-21T15:19:30 "
        "Deadline=N/A\n   PreemptEligibleTime=2026-11-21T15:19:11 PreemptTime=2026-11-21T15:19:30\n",
        W.PREEMPTED,
    ),
    "preempted, mode requeue": (
        f"{_HEAD}COMPLETING Reason=None Dependency=(null)\n   Requeue=1 Restarts=1{_TIMES}2026-11-21T15:29:30 "
        "Deadline=N/A\n",
        W.REQUEUED,
    ),
    "scontrol requeue": (
        f"{_HEAD}COMPLETING Reason=None Dependency=(null)\n   Requeue=1 Restarts=1{_TIMES}Unknown Deadline=N/A\n",
        W.REQUEUED,
    ),
    "scancel": (
        f"{_HEAD}COMPLETING Reason=None Dependency=(null)\n   Requeue=1 Restarts=0{_TIMES}2026-11-21T15:19:15 "
        "Deadline=N/A\n   PreemptEligibleTime=2026-11-21T15:19:11 PreemptTime=None\n",
        W.ENDED,
    ),
    "time limit": (
        f"{_HEAD}COMPLETING Reason=TimeLimit Dependency=(null)\n   Requeue=1 Restarts=0{_TIMES}2026-11-21T15:22:13 "
        "Deadline=N/A\n   PreemptEligibleTime=2026-11-21T15:20:44 PreemptTime=None\n",
        W.TIME_LIMIT,
    ),
    "after all of that": (
        f"{_HEAD}TIMEOUT Reason=TimeLimit Dependency=(null)\n   Requeue=1 Restarts=0\n",
        W.TIME_LIMIT,
    ),
    "after a preemption": (f"{_HEAD}PREEMPTED Reason=None Dependency=(null)\n   Requeue=1 Restarts=0\n", W.PREEMPTED),
    "in the queue": (f"{_HEAD}PENDING Reason=BeginTime Dependency=(null)\n   Requeue=1 Restarts=1\n", W.REQUEUED),
}


@pytest.mark.parametrize("case", SAID)
def test_what_slurm_says_of_the_job(case: str) -> None:
    text, condition = SAID[case]
    (state,) = parse_show_job(text)
    assert slurm_answer(state, restarts=0, near=100.0, now_ns=_at("15:19:15")).condition is condition
    if condition is W.REQUEUED:
        assert (
            slurm_answer(state, restarts=state.restarts, near=100.0, now_ns=_at("15:19:15")).condition
            is not W.TIME_LIMIT
        )


def test_how_much_time_is_left() -> None:
    (runs,) = parse_show_job(SAID["running"][0])
    assert slurm_answer(runs, restarts=0, near=100.0, now_ns=_at("15:19:15")) == SlurmAnswer(W.RUNNING, 596.0, 600.0)
    assert slurm_answer(None, restarts=0, near=100.0, now_ns=0).condition is W.ENDED, "Slurm has forgotten the job"
    failed = JobState(job_id="7", state="COMPLETING", reason="launch failed requeued held", restarts=1)
    answer = slurm_answer(failed, restarts=0, near=0.0, now_ns=0)
    assert answer == SlurmAnswer(W.REQUEUED, held="launch failed requeued held"), "as 22.05 says where a prolog fails"
    assert slurm_answer(runs, restarts=0, near=600.0, now_ns=_at("15:19:15")).condition is W.NEAR_LIMIT
    (grace,) = parse_show_job(SAID["the grace of a preemption"][0])
    assert slurm_answer(grace, restarts=0, near=1.0, now_ns=_at("15:19:15")).seconds_left == 10.0


def _at(clock: str) -> int:
    return int(time.mktime(time.strptime(f"2026-11-21T{clock}", "%Y-%m-%dT%H:%M:%S"))) * 10**9


class Asked:
    """A resolver, and what it asked."""

    def __init__(self, answer: SlurmAnswer, *, grace: float = 120.0) -> None:
        self.answer = answer
        self.near: list[float] = []
        self.events: list[dict[str, Any]] = []
        self.clock = FakeClock()
        events = log_into_dicts(self.events)
        self.resolver = SignalResolver(self._ask, grace=grace, kill_wait=30.0, events=events, clock=self.clock)  # type: ignore[arg-type]

    def _ask(self, near: float) -> SlurmAnswer:
        self.near.append(near)
        return self.answer


def test_a_signal_is_looked_up_and_the_decision_told() -> None:
    asked = Asked(SlurmAnswer(JobCondition.PREEMPTING, 40.0))
    found = asked.resolver.hear(signal.SIGTERM, HeardBy.AGENTS, reason="SIGTERM on n2")
    assert (found.meaning, found.saves, found.seconds) == (Meaning.PREEMPT, True, 40.0)
    assert asked.near == [120.0 + EARLY_NOTICE], "Slurm may give its notice a minute early"
    (told,) = asked.events
    assert told == {
        "event": "signal_decided",
        "call": "SIGTERM",
        "heard_by": "agents alone",
        "slurm": "is preempted, its grace time runs",
        "meaning": "preemption",
        "saves": True,
        "seconds": 40.0,
        "reason": "SIGTERM on n2",
    }


@pytest.mark.parametrize(
    ("number", "heard_by", "answer", "is_news"),
    [
        (signal.SIGUSR2, HeardBy.BATCH, SlurmAnswer(JobCondition.PREEMPTING, 40.0), True),
        (signal.SIGTERM, HeardBy.AGENTS, SlurmAnswer(JobCondition.PREEMPTING, 40.0), True),
        (signal.SIGUSR2, HeardBy.BATCH, SlurmAnswer(JobCondition.PREEMPTING, 59.0), False),
        (signal.SIGUSR2, HeardBy.BATCH, SlurmAnswer(JobCondition.RUNNING), False),
        (signal.SIGTERM, HeardBy.AGENTS, SlurmAnswer(JobCondition.ENDED), False),
        (signal.SIGTERM, HeardBy.BATCH, SlurmAnswer(JobCondition.ENDED), True),
        (signal.SIGINT, HeardBy.BATCH, SlurmAnswer(JobCondition.RUNNING), True),
    ],
    ids=["sooner", "sooner, by agents", "the same", "later", "an end, by agents", "an end", "Ctrl-C"],
)
def test_after_a_notice_only_what_is_sooner_is_news(
    number: signal.Signals, heard_by: HeardBy, answer: SlurmAnswer, is_news: bool
) -> None:
    asked = Asked(answer)
    found = asked.resolver.hear(number, heard_by, reason="again", ends_in=60.0)
    assert (found is not None) is is_news
    assert len(asked.events) == is_news, "what is no news is not told"


def test_a_person_at_a_terminal_waits_for_no_answer() -> None:
    asked = Asked(SlurmAnswer(JobCondition.PREEMPTING, 40.0))
    assert asked.resolver.hear(signal.SIGINT, HeardBy.BATCH, reason="").outcome is Outcome.CANCELLED
    assert asked.near == []


@pytest.mark.parametrize(
    ("left", "limit", "lead"),
    [(3600.0, 7200.0, 120.0), (3600.0, None, 120.0), (100.0, 120.0, 30.0)],
    ids=["long", "limit not told", "a short job is not told to stop as it begins"],
)
def test_the_limit_is_looked_at_when_it_is_near(left: float, limit: float | None, lead: float) -> None:
    asked = Asked(SlurmAnswer(JobCondition.RUNNING, left, limit))
    assert asked.resolver.look() is None
    due = asked.resolver.due
    assert due is not None
    assert left - lead < due - asked.clock.now < left - lead + 2
    asked.clock.now = due - 0.1
    assert asked.resolver.look() is None
    assert len(asked.near) == 1, "not asked again before it is time"
    asked.clock.now = due
    asked.answer = SlurmAnswer(JobCondition.RUNNING, lead - 1, limit)
    found = asked.resolver.look()
    assert found is not None
    assert (found.meaning, found.saves, found.seconds) == (Meaning.LIMIT, True, lead - 1)
    assert asked.resolver.due is None


def test_a_limit_that_was_raised_meanwhile_is_waited_for_anew() -> None:
    asked = Asked(SlurmAnswer(JobCondition.RUNNING, 600.0, 600.0))
    asked.resolver.look()
    assert asked.resolver.due is not None
    asked.clock.now = asked.resolver.due
    asked.answer = SlurmAnswer(JobCondition.RUNNING, 5000.0, 9000.0)
    assert asked.resolver.look() is None
    assert asked.resolver.due == pytest.approx(asked.clock.now + 4880, abs=2)


@pytest.mark.parametrize(
    ("condition", "due"),
    [
        (JobCondition.NO_SLURM, None),
        (JobCondition.RUNNING, None),
        (JobCondition.ENDED, None),
        (JobCondition.REQUEUED, None),
        (JobCondition.SILENT, SILENT_RETRY),
    ],
)
def test_there_may_be_nothing_to_look_for_or_nobody_to_say_it(condition: JobCondition, due: float | None) -> None:
    asked = Asked(SlurmAnswer(condition))
    assert asked.resolver.look() is None
    assert asked.resolver.due == (asked.clock.now + due if due is not None else None)
    assert asked.events == []
