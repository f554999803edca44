"""Where signals come in on the batch host: asks Slurm what they mean, by `signal_table`, and looks by itself in time.

Slurm gives its notice once. It is lost on a batch script that can't hear yet, and nobody gives one in an allocation
that was made without ``--signal``; so the limit is looked at from here too.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import replace

from hpc_elastic.clock import Clock
from hpc_elastic.events import EventLog
from hpc_elastic.launch.signal_table import (
    Call,
    HeardBy,
    JobCondition,
    SignalDecision,
    SlurmAnswer,
    call_of,
    decide_signal,
)

EARLY_NOTICE = 75.0
"""Seconds by which Slurm may give the notice too early (seen: up to 60)."""
SILENT_RETRY = 60.0
"""Between two looks at the limit where Slurm does not answer."""
LATE_LOOK = 1.0
"""Seconds for which Slurm's own notice goes first."""
SOONER_SECONDS = 2.0
"""By how much sooner than was known the job has to end for another notice to be news."""


class SignalResolver:
    """The supervisor's."""

    def __init__(
        self,
        ask: Callable[[float], SlurmAnswer],
        *,
        grace: float,
        kill_wait: float | None,
        events: EventLog,
        clock: Clock,
    ) -> None:
        """Args:
        ask: What Slurm says of the job, in bounded time; given how near its limit is when it is near, in seconds.
        grace: ``--grace``, in seconds.
        kill_wait: Seconds from Slurm's SIGTERM to its SIGKILL; None where unknown.
        events: For each decision.
        clock: For the looks.
        """
        self._ask = ask
        self._grace = grace
        self._kill_wait = kill_wait
        self._events = events
        self._clock = clock
        self.due: float | None = clock.monotonic()
        """When `look` is to be called next, monotonic; None: never."""

    def hear(
        self, number: signal.Signals, heard_by: HeardBy, *, reason: str, ends_in: float | None = None
    ) -> SignalDecision | None:
        """What a signal means.

        Args:
            number: The signal.
            heard_by: Who heard it.
            reason: In words, for the event.
            ends_in: Seconds until the job's end by the notice that the workers have already; None: they have none.

        Returns:
            What to do; None, which only a notice makes possible: it says nothing new, as most often. News is that the
            job ends now, or sooner. The former is not taken from agents alone: the batch script is told as well.
        """
        call = call_of(number)
        # A person at a terminal waits for nobody's answer.
        answer = SlurmAnswer(JobCondition.NO_SLURM) if call is Call.INTERRUPT else self._ask(self._grace + EARLY_NOTICE)
        decision = self._decide(call, heard_by, answer)
        assert decision is not None, "the table has a row for each signal"
        if ends_in is not None:
            is_later = decision.saves and decision.seconds > ends_in - SOONER_SECONDS
            if is_later or (heard_by is HeardBy.AGENTS and not decision.saves):
                return None
        return self._log(decision, call, heard_by, answer, reason)

    def look(self) -> SignalDecision | None:
        """Look at the job where it is time to. Returns what is to be done, if anything."""
        if self.due is None or self._clock.monotonic() < self.due:
            return None
        answer = self._ask(0.0)
        self.due = None
        if answer.condition is JobCondition.SILENT:
            self.due = self._clock.monotonic() + SILENT_RETRY
        elif answer.condition in (JobCondition.RUNNING, JobCondition.NEAR_LIMIT) and answer.seconds_left is not None:
            # A short job would be told to stop as it begins.
            lead = self._grace if answer.limit is None else min(self._grace, answer.limit / 4)
            if answer.seconds_left > lead:
                self.due = self._clock.monotonic() + answer.seconds_left - lead + LATE_LOOK
                return None
            answer = replace(answer, condition=JobCondition.NEAR_LIMIT)
        decision = self._decide(Call.LOOK, HeardBy.BATCH, answer)
        return self._log(decision, Call.LOOK, HeardBy.BATCH, answer, "nobody gave notice")

    def _decide(self, call: Call, heard_by: HeardBy, answer: SlurmAnswer) -> SignalDecision | None:
        return decide_signal(call, heard_by, answer, grace=self._grace, kill_wait=self._kill_wait)

    def _log(
        self, decision: SignalDecision | None, call: Call, heard_by: HeardBy, answer: SlurmAnswer, reason: str
    ) -> SignalDecision | None:
        if decision is not None:
            self._events.write(
                "signal_decided",
                call=call.value,
                heard_by=heard_by.value,
                slurm=answer.condition.value,
                meaning=decision.meaning.value,
                saves=decision.saves,
                seconds=round(decision.seconds, 1),
                reason=reason,
            )
        return decision
