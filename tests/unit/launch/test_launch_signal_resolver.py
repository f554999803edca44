"""When the supervisor asks Slurm about the job, and what it makes of the answer."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from hpc_elastic.launch.site import (
    EARLY_NOTICE,
    SILENT_RETRY,
    HeardBy,
    JobCondition,
    Meaning,
    SignalResolver,
    SlurmAnswer,
)
from hpc_elastic.run.paths import Outcome
from tests.rigs.event_pairs import log_into_dicts
from tests.rigs.fake_clock import FakeClock


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
    "condition", [JobCondition.NO_SLURM, JobCondition.RUNNING, JobCondition.ENDED, JobCondition.REQUEUED]
)
def test_there_may_be_nothing_to_look_for(condition: JobCondition) -> None:
    asked = Asked(SlurmAnswer(condition))
    assert asked.resolver.look() is None
    assert asked.resolver.due is None
    assert asked.events == []


def test_a_controller_that_does_not_answer_is_asked_again() -> None:
    asked = Asked(SlurmAnswer(JobCondition.SILENT))
    assert asked.resolver.look() is None
    assert asked.resolver.due == asked.clock.now + SILENT_RETRY
