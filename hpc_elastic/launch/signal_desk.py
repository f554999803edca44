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
    SignalDecision,
    SlurmAnswer,
    SlurmWord,
    call_of,
    decide_signal,
)

EARLY_NOTICE = 75.0
"""Seconds by which Slurm may give the notice too early (seen: up to 60)."""
SILENT_RETRY = 60.0
"""Between two looks at the limit where Slurm does not answer."""
LATE_LOOK = 1.0
"""Seconds for which Slurm's own notice goes first."""


class SignalDesk:
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

    def hear(self, number: signal.Signals, heard_by: HeardBy, *, reason: str) -> SignalDecision:
        """What a signal means.

        Args:
            number: The signal.
            heard_by: Who heard it.
            reason: In words, for the event.
        """
        call = call_of(number)
        # A person at a terminal waits for nobody's answer.
        answer = SlurmAnswer(SlurmWord.NO_SLURM) if call is Call.INTERRUPT else self._ask(self._grace + EARLY_NOTICE)
        decision = self._decide(call, heard_by, answer, reason)
        assert decision is not None, "the table has a row for each signal"
        return decision

    def look(self) -> SignalDecision | None:
        """Look at the job where it is time to. Returns what is to be done, if anything."""
        if self.due is None or self._clock.monotonic() < self.due:
            return None
        answer = self._ask(0.0)
        self.due = None
        if answer.word is SlurmWord.SILENT:
            self.due = self._clock.monotonic() + SILENT_RETRY
        elif answer.word in (SlurmWord.RUNNING, SlurmWord.NEAR_LIMIT) and answer.seconds_left is not None:
            # A short job would be told to stop as it begins.
            lead = self._grace if answer.limit is None else min(self._grace, answer.limit / 4)
            if answer.seconds_left > lead:
                self.due = self._clock.monotonic() + answer.seconds_left - lead + LATE_LOOK
                return None
            answer = replace(answer, word=SlurmWord.NEAR_LIMIT)
        return self._decide(Call.LOOK, HeardBy.BATCH, answer, "nobody gave notice")

    def _decide(self, call: Call, heard_by: HeardBy, answer: SlurmAnswer, reason: str) -> SignalDecision | None:
        decision = decide_signal(call, heard_by, answer, grace=self._grace, kill_wait=self._kill_wait)
        if decision is not None:
            self._events.write(
                "signal_decided",
                call=call.value,
                heard_by=heard_by.value,
                slurm=answer.word.value,
                meaning=decision.meaning.value,
                saves=decision.saves,
                seconds=round(decision.seconds, 1),
                reason=reason,
            )
        return decision
