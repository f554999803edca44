"""What signals mean: the whole table, and what Slurm's records of jobs say, as they were printed by real ones."""

from __future__ import annotations

import itertools
import signal
import time

import pytest

from hpc_elastic.launch.site import (
    TABLE,
    Heard,
    HeardBy,
    JobCondition,
    Meaning,
    SignalDecision,
    SlurmAnswer,
    call_of,
    decide_signal,
)
from hpc_elastic.launch.slurm_site import slurm_answer
from hpc_elastic.run.paths import Outcome
from hpc_elastic.slurm.job_state import JobState, parse_show_job

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


def test_the_table_has_no_row_that_is_not_tested() -> None:
    rows = {
        (call, by, condition) for call, halves in TABLE.items() for by, words in halves.items() for condition in words
    }
    assert rows == EXPECTED.keys()


def test_an_end_that_slurm_does_not_name_is_the_grace() -> None:
    found = decide_signal(Heard.NOTICE, BATCH, SlurmAnswer(W.PREEMPTING), grace=GRACE, kill_wait=None)
    assert found is not None
    assert found.seconds == GRACE
    late = decide_signal(Heard.NOTICE, BATCH, SlurmAnswer(W.PREEMPTING, -5.0), grace=GRACE, kill_wait=None)
    assert late is not None
    assert late.seconds == 1.0


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


def test_a_job_that_slurm_has_forgotten_has_ended() -> None:
    assert slurm_answer(None, restarts=0, near=100.0, now_ns=0).condition is W.ENDED


def test_how_much_time_is_left() -> None:
    (runs,) = parse_show_job(SAID["running"][0])
    assert slurm_answer(runs, restarts=0, near=100.0, now_ns=_at("15:19:15")) == SlurmAnswer(W.RUNNING, 596.0, 600.0)
    failed = JobState(job_id="7", state="COMPLETING", reason="launch failed requeued held", restarts=1)
    answer = slurm_answer(failed, restarts=0, near=0.0, now_ns=0)
    assert answer == SlurmAnswer(W.REQUEUED, held="launch failed requeued held"), "as 22.05 says where a prolog fails"
    assert slurm_answer(runs, restarts=0, near=600.0, now_ns=_at("15:19:15")).condition is W.NEAR_LIMIT
    (grace,) = parse_show_job(SAID["the grace of a preemption"][0])
    assert slurm_answer(grace, restarts=0, near=1.0, now_ns=_at("15:19:15")).seconds_left == 10.0


def _at(clock: str) -> int:
    return int(time.mktime(time.strptime(f"2026-11-21T{clock}", "%Y-%m-%dT%H:%M:%S"))) * 10**9
