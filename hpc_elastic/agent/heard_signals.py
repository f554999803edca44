"""Signals that an agent hears: under Slurm it tells all at once, and the supervisor finds out what they mean.

When a preemption's grace time begins Slurm sends SIGTERM to the tasks, and nothing to the batch script, so the agents
hear of it first; but a SIGTERM may as well be a cancel. An agent that gets no answer goes by the signal alone.
"""

from __future__ import annotations

import signal

from hpc_elastic.agent.context import AgentContext
from hpc_elastic.agent.notice_watch import notice_of
from hpc_elastic.outcome import Outcome
from hpc_elastic.rendezvous.notice import Notice
from hpc_elastic.rendezvous.state import RoundRecord, Status

ANSWER_SECONDS = 4.0
"""How long the supervisor's answer is waited for at most: it asks Slurm for 2 s."""
KILL_RESERVE = 2.0
"""Seconds kept of what Slurm leaves for writing evidence, and for the requeue, after the workers have ended."""
KILL_WAIT_SHARE = 0.2
"""The same as a share of KillWait, where that is more: on a crowded node two seconds were not enough for the report."""
LEAST_GRACE = 0.5
_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class HeardSignals:
    """One agent's. All methods are for its main thread, and none waits."""

    def __init__(self, context: AgentContext) -> None:
        self._context = context
        self.ended_by: signal.Signals | None = None
        """The signal that ends this node, where nobody has said that it means something else."""
        self.due: float | None = None
        """When the answer to the first signal is overdue, monotonic; None: none is waited for."""
        self._asked: signal.Signals | None = None
        self._notice: Notice | None = None
        """The answer, or what came without being asked for."""
        self._kill_from: float | None = None
        """When Slurm's KillWait has begun, where a SIGTERM was its beginning."""
        self._ends_at: float | None = None
        """When the job is ended from outside, by the notice."""

    def hear(self, number: signal.Signals) -> bool:
        """Take a signal in. Slurm sends it twice at a limit, and at both ends of a preemption's grace.

        Returns:
            Whether it ends this node now.
        """
        is_slurm = self._context.attempt.cluster == "slurm"
        if number is signal.SIGUSR2:
            if is_slurm:
                self._ask(number)
            else:
                self._give_notice(number)
            return False
        if number not in _ENDING_SIGNALS or self.ended_by is not None:
            return False
        if number is signal.SIGTERM and is_slurm:
            self._kill_from = self._context.clock.monotonic()
            self._ask(number)
            return False
        self._end(number)
        return True

    def on_record(self, record: RoundRecord) -> None:
        """A newer record: is it the answer, or does it leave less time than was thought?"""
        notice = record.notice
        is_new = notice is not None and not notice.is_given_as(self._notice)
        if record.status is not Status.CLOSED and not is_new:
            return
        self.due = None
        if record.status is Status.CLOSED and self._kill_from is not None:
            self.ended_by = self.ended_by or signal.SIGTERM  # Slurm ends the job, and sees to the rest
        if notice is not None and is_new:
            self._notice = notice
            self._kill_from = None  # it was the notice: what comes after it is the end
            if notice.left is not None:
                ends_at = self._context.clock.monotonic() + notice.left
                self._ends_at = ends_at if self._ends_at is None else min(self._ends_at, ends_at)

    def overdue(self) -> signal.Signals | None:
        """The signal that ends this node after all, since nobody has answered what it means."""
        if self.due is None or self._context.clock.monotonic() < self.due:
            return None
        self.due, number = None, self._asked
        if number is signal.SIGUSR2:
            self._give_notice(number)
            return None
        assert number is not None
        self._end(number)
        return number

    def is_ending(self) -> bool:
        """Whether a signal has come that may end this node: handled already, or the next thing to be."""
        return self.ended_by is not None or self._context.signals.holds(_ENDING_SIGNALS)

    def grace(self) -> float:
        """Seconds from the workers' SIGTERM to their SIGKILL; never more than Slurm leaves where it ends the job."""
        context = self._context
        grace, now, kill_wait = context.spec.shutdown_timeout, context.clock.monotonic(), context.attempt.kill_wait
        if self._kill_from is not None and kill_wait is not None:
            reserve = max(KILL_RESERVE, KILL_WAIT_SHARE * kill_wait)
            grace = min(grace, max(LEAST_GRACE, self._kill_from + kill_wait - now - reserve))
        if self._ends_at is not None:
            grace = min(grace, max(LEAST_GRACE, self._ends_at - now - KILL_RESERVE))
        return grace

    def _ask(self, number: signal.Signals) -> None:
        """Slurm sends SIGTERM when a preemption begins, whatever notice there is, and again when its grace is over."""
        if self._asked in (number, signal.SIGTERM) or (self._notice is not None and number is not signal.SIGTERM):
            return
        if self._asked is None and self._notice is None:
            kill_wait = self._context.attempt.kill_wait
            patience = ANSWER_SECONDS if kill_wait is None else min(ANSWER_SECONDS, kill_wait / 2)
            self.due = self._context.clock.monotonic() + patience
        self._asked = number
        what = f"{number.name} on {self._context.place.host}"
        self._context.coordination.ask(lambda participant: participant.report_signal(what))

    def _give_notice(self, number: signal.Signals) -> None:
        notice = notice_of(self._context.spec, f"{number.name} on {self._context.place.host}")
        self._context.coordination.ask(lambda participant: participant.give_notice(notice))

    def _end(self, number: signal.Signals) -> None:
        self.ended_by = number
        reason = f"{number.name} on {self._context.place.host}"
        self._context.coordination.ask(lambda participant: participant.close(Outcome.CANCELLED, reason))
