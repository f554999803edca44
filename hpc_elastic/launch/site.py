"""`Site`: a Slurm job, a step of the user's own, or this machine; a signal's meaning there; Slurm's view of the job.

A signal's meaning is in `TABLE`, by its receiver and Slurm's state of the job. Slurm signals the tasks alone when a
preemption's grace time begins, and the batch script too when it is over (seen on 22.05, as at a cancel, a requeue and
the time limit): so a signal by itself says little. Slurm gives its notice once: it is lost on a batch script that can't
hear yet, and there is none in an allocation that was made without ``--signal``. docs/reference/exit-codes.md is
generated from the table.

Each question of `JobWatch` has a thread: without a controller a command takes half a minute.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum
from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from hpc_elastic.base.clock import Clock
from hpc_elastic.base.loop import FileExecutor, Inbox, start_thread
from hpc_elastic.launch.agents import Launcher
from hpc_elastic.launch.requeue import EligibleNodes, NextAttempt, Requeued
from hpc_elastic.rendezvous.participant import OBSERVER_NODE
from hpc_elastic.run.control_events import NodesCompared, SignalDecided
from hpc_elastic.run.events import EventLog
from hpc_elastic.run.paths import AttemptInfo, AttemptPaths, Outcome, RunPaths
from hpc_elastic.run.spec import RunSpec
from hpc_elastic.slurm.commands import SlurmError, SlurmUnavailableError
from hpc_elastic.slurm.job_environment import compress

logger = logging.getLogger(__name__)


class AttemptContext(Struct, frozen=True, kw_only=True):
    paths: RunPaths
    spec: RunSpec
    site: Site
    attempt: AttemptInfo
    events: EventLog
    clock: Clock

    @property
    def folder(self) -> AttemptPaths:
        return self.paths.attempt(self.attempt.number)


def supervisor_events(
    folder: AttemptPaths, *, host: str, uid: str, clock: Clock, files: FileExecutor | None = None
) -> EventLog:
    return EventLog(
        folder.events, role="supervisor", host=host, node=OBSERVER_NODE, uid=uid[-21:], clock=clock, files=files
    )


def attempt_facts(**facts: Any) -> AttemptInfo:
    return AttemptInfo(number=-1, batch_host="", started_ns=0, **facts)


class Allocation(Enum):
    HELD = "held"
    """The job runs, or has ended, and Slurm has not taken this node from it."""
    LOST = "lost"
    """Slurm has given this node up, or requeued the job: actions here no longer affect the job."""
    UNKNOWN = "unknown"


class Site:
    """The place where an attempt runs. Defaults are those of a machine without Slurm."""

    umask = 0o077

    def facts(self, spec: RunSpec) -> AttemptInfo:
        raise NotImplementedError

    def launcher(self, spec: RunSpec, paths: RunPaths, attempt: AttemptInfo) -> Launcher:
        raise NotImplementedError

    def ask(self, *, near: float) -> SlurmAnswer:
        """Ask Slurm about the job; within seconds. The time limit is near when `near` seconds are left."""
        return SlurmAnswer(JobCondition.NO_SLURM)

    def allocation(self) -> Allocation:
        """Ask whether this node still belongs to the job; may take a minute."""
        return Allocation.HELD

    def nodes_up(self) -> frozenset[str]:
        """Nodes that are up; within seconds. Empty: Slurm can't be asked.

        Slurm ends all of a job's processes on a node that it reaches before it starts the job again.
        """
        return frozenset()

    def job_nodes(self) -> Sequence[str]:
        """The job's nodes now; may take a minute. None: no job, or it does not run. Raises SlurmError."""
        return ()

    def is_running(self, job_id: str) -> bool:
        """Ask whether a job runs; within seconds. False if Slurm can't be asked."""
        return False

    def eligible_nodes(self) -> EligibleNodes | None:
        """Nodes that the next attempt may get; within seconds. None: unknown, or there is no choice."""
        return None

    def why_not_without(self, paths: RunPaths, nodes: Sequence[str]) -> str | None:
        """Slurm's reason why the run could never begin without these nodes; within seconds. None: it could."""
        return None

    def requeue(self, plan: NextAttempt) -> Requeued:
        raise NotImplementedError


class Heard(str, Enum):
    NOTICE = "notice (SIGUSR2)"
    END = "SIGTERM"
    INTERRUPT = "SIGINT, SIGHUP"
    LOOK = "no signal: the state of the job"
    """A look at the supervisor's start, since Slurm may have signalled earlier, and near the time limit."""


class HeardBy(str, Enum):
    BATCH = "supervisor"
    AGENTS = "agents alone"


class JobCondition(str, Enum):
    RUNNING = "runs"
    NEAR_LIMIT = "runs, its time limit is near"
    PREEMPTING = "is preempted, its grace time runs"
    PREEMPTED = "is ended by a preemption"
    TIME_LIMIT = "is ended by its time limit"
    REQUEUED = "is requeued"
    ENDED = "is ended"
    """``scancel``, usually."""
    SILENT = "no answer in time"
    NO_SLURM = "no Slurm here"


class Meaning(str, Enum):
    PREEMPT = "preemption"
    LIMIT = "time limit"
    CANCEL = "cancel"
    REQUEUE = "requeue"


class Deadline(str, Enum):
    END_TIME = "the job's end as Slurm names it"
    GRACE = "--grace"
    KILL_WAIT = "KillWait"


class Reaction(Struct, frozen=True):
    """Workers may save first with END_TIME and GRACE; everything ends at once with KILL_WAIT."""

    meaning: Meaning
    deadline: Deadline

    @property
    def saves(self) -> bool:
        return self.deadline is not Deadline.KILL_WAIT


_ENDS: Mapping[JobCondition, Reaction] = {
    JobCondition.PREEMPTED: Reaction(Meaning.PREEMPT, Deadline.KILL_WAIT),
    JobCondition.TIME_LIMIT: Reaction(Meaning.LIMIT, Deadline.KILL_WAIT),
    JobCondition.REQUEUED: Reaction(Meaning.REQUEUE, Deadline.KILL_WAIT),
    JobCondition.ENDED: Reaction(Meaning.CANCEL, Deadline.KILL_WAIT),
}
"""Slurm has begun to end the job: its SIGKILL is KillWait away."""
_PREEMPTING: Mapping[JobCondition, Reaction] = {JobCondition.PREEMPTING: Reaction(Meaning.PREEMPT, Deadline.END_TIME)}
_NEAR_LIMIT: Mapping[JobCondition, Reaction] = {JobCondition.NEAR_LIMIT: Reaction(Meaning.LIMIT, Deadline.END_TIME)}
_CANCEL = Reaction(Meaning.CANCEL, Deadline.KILL_WAIT)
_NOTICE: Mapping[JobCondition, Reaction] = {
    **_ENDS,
    **_PREEMPTING,
    **_NEAR_LIMIT,
    JobCondition.RUNNING: Reaction(Meaning.REQUEUE, Deadline.GRACE),  # by hand: hpc-elastic requeue
    JobCondition.SILENT: Reaction(Meaning.LIMIT, Deadline.GRACE),
    JobCondition.NO_SLURM: Reaction(Meaning.REQUEUE, Deadline.GRACE),
}

TABLE: Mapping[Heard, Mapping[HeardBy, Mapping[JobCondition, Reaction]]] = {
    Heard.NOTICE: {HeardBy.BATCH: _NOTICE, HeardBy.AGENTS: _NOTICE},
    Heard.END: {
        HeardBy.BATCH: {
            **_ENDS,
            **_PREEMPTING,
            **dict.fromkeys(
                (JobCondition.RUNNING, JobCondition.NEAR_LIMIT, JobCondition.SILENT, JobCondition.NO_SLURM), _CANCEL
            ),
        },
        HeardBy.AGENTS: {
            **_ENDS,
            **_PREEMPTING,
            **_NEAR_LIMIT,  # a user's own --signal=TERM@60
            JobCondition.RUNNING: _CANCEL,
            # Of all that Slurm does, only a preemption's grace begins with the tasks alone.
            JobCondition.SILENT: Reaction(Meaning.PREEMPT, Deadline.GRACE),
            JobCondition.NO_SLURM: _CANCEL,
        },
    },
    Heard.INTERRUPT: {
        HeardBy.BATCH: dict.fromkeys(JobCondition, _CANCEL),
        HeardBy.AGENTS: dict.fromkeys(JobCondition, _CANCEL),
    },
    # What is being ended sends its signal as well.
    Heard.LOOK: {HeardBy.BATCH: {**_PREEMPTING, **_NEAR_LIMIT}},
}


class SlurmAnswer(Struct, frozen=True):
    condition: JobCondition
    seconds_left: float | None = None
    """Seconds to the limit, or the grace time's end; None: unlimited, or unknown."""
    limit: float | None = None
    held: str = ""
    """Slurm's reason, where it has requeued the job itself and holds it: ``launch failed requeued held``."""


class SignalDecision(Struct, frozen=True, kw_only=True):
    meaning: Meaning
    saves: bool
    """Workers may save first; else everything ends at once."""
    seconds: float
    outcome: Outcome
    requeued: bool
    held: str = ""

    @property
    def text(self) -> str:
        return f"{self.meaning.value}; Slurm: {self.held}" if self.held else self.meaning.value


def call_of(number: signal.Signals) -> Heard:
    if number is signal.SIGUSR2:
        return Heard.NOTICE
    return Heard.END if number is signal.SIGTERM else Heard.INTERRUPT


def decide_signal(
    call: Heard, heard_by: HeardBy, answer: SlurmAnswer, *, grace: float, kill_wait: float | None
) -> SignalDecision | None:
    """`kill_wait`: seconds from SIGTERM to SIGKILL; None: unknown."""
    row = TABLE[call].get(heard_by, {}).get(answer.condition)
    if row is None:
        return None
    seconds = {
        Deadline.END_TIME: grace if answer.seconds_left is None else max(1.0, answer.seconds_left),
        Deadline.GRACE: grace,
        Deadline.KILL_WAIT: kill_wait or 0.0,
    }[row.deadline]
    outcome = Outcome.TIMED_OUT if row.meaning is Meaning.LIMIT and not row.saves else Outcome.PREEMPTED
    if row.meaning is Meaning.CANCEL:
        outcome = Outcome.CANCELLED
    return SignalDecision(
        meaning=row.meaning,
        saves=row.saves,
        seconds=seconds,
        outcome=outcome,
        requeued=answer.condition is JobCondition.REQUEUED,
        held=answer.held,
    )


EARLY_NOTICE = 75.0
"""Seconds by which Slurm may give the notice too early (seen: up to 60)."""
SILENT_RETRY = 60.0
LATE_LOOK = 1.0
"""Seconds for which Slurm's own notice goes first."""
SOONER_SECONDS = 2.0
"""A second notice is news if the job ends at least this much sooner."""


class SignalResolver(Struct, eq=False):
    ask: Callable[[float], SlurmAnswer]
    grace: float
    kill_wait: float | None
    events: EventLog
    clock: Clock
    due: float | None = None

    def __post_init__(self) -> None:
        self.due = self.clock.monotonic()

    def hear(
        self, number: signal.Signals, heard_by: HeardBy, *, reason: str, ends_in: float | None = None
    ) -> SignalDecision | None:
        """News, after a notice, is that the job ends now, or sooner than in `ends_in` seconds; None: no news.

        The former is not taken from agents alone: Slurm signals the batch script as well.
        """
        call = call_of(number)
        # A person at a terminal does not wait for Slurm's answer.
        answer = SlurmAnswer(JobCondition.NO_SLURM) if call is Heard.INTERRUPT else self.ask(self.grace + EARLY_NOTICE)
        decision = decide_signal(call, heard_by, answer, grace=self.grace, kill_wait=self.kill_wait)
        assert decision is not None, "the table has a row for each signal"
        if ends_in is not None:
            is_later = decision.saves and decision.seconds > ends_in - SOONER_SECONDS
            if is_later or (heard_by is HeardBy.AGENTS and not decision.saves):
                return None
        return self._log(decision, call, heard_by, answer, reason)

    def look(self) -> SignalDecision | None:
        if self.due is None or self.clock.monotonic() < self.due:
            return None
        answer = self.ask(0.0)
        self.due = None
        if answer.condition is JobCondition.SILENT:
            self.due = self.clock.monotonic() + SILENT_RETRY
        elif answer.condition in (JobCondition.RUNNING, JobCondition.NEAR_LIMIT) and answer.seconds_left is not None:
            # A short job would be asked to stop as it begins.
            lead = self.grace if answer.limit is None else min(self.grace, answer.limit / 4)
            if answer.seconds_left > lead:
                self.due = self.clock.monotonic() + answer.seconds_left - lead + LATE_LOOK
                return None
            answer = replace(answer, condition=JobCondition.NEAR_LIMIT)
        decision = decide_signal(Heard.LOOK, HeardBy.BATCH, answer, grace=self.grace, kill_wait=self.kill_wait)
        return decision and self._log(decision, Heard.LOOK, HeardBy.BATCH, answer, "no notice was given")

    def _log(
        self, decision: SignalDecision, call: Heard, heard_by: HeardBy, answer: SlurmAnswer, reason: str
    ) -> SignalDecision:
        self.events.write(
            SignalDecided(
                call=call.value,
                heard_by=heard_by.value,
                slurm=answer.condition.value,
                meaning=decision.meaning.value,
                saves=decision.saves,
                seconds=round(decision.seconds, 1),
                reason=reason,
            )
        )
        return decision


LOOK_SECONDS = 60.0
RETRY_SECONDS = 15.0
SOON_SECONDS = 5.0
"""Delay after a node was lost: Slurm may just be reporting it."""

T = TypeVar("T")
Start = Callable[[Callable[[], None]], None]


class SlurmQuestion(Inbox[T | SlurmError]):
    def __init__(self, ask: Callable[[], T], start: Start = start_thread) -> None:
        super().__init__()
        self._ask = ask
        self._start = start
        self.is_open = False

    def ask(self) -> None:
        if not self.is_open:
            self.is_open = True
            self._start(self._run)

    def answer(self) -> T | SlurmError | None:
        if not (answers := self.take()):
            return None
        self.is_open = False
        return answers[0]

    def _run(self) -> None:
        try:
            self.put(self._ask())
        except SlurmError as error:
            self.put(error)


class ControllerOutage:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.since: float | None = None

    def on_answer(self, error: SlurmUnavailableError | None) -> None:
        now = self._clock.monotonic()
        if error is not None and self.since is None:
            self.since = now
            logger.warning(
                "Slurm's controller does not answer (%s); workers go on, and what needs it (a requeue, what a signal "
                "means) waits",
                error.why,
            )
        elif error is None and self.since is not None:
            logger.warning("Slurm's controller answers again after at least %.0f s", now - self.since)
            self.since = None


def nodes_differ(*, used: Sequence[str], lost: Sequence[str], job: Collection[str]) -> NodesCompared:
    """An empty `job`, Slurm's list, means unknown."""
    taken = tuple(node for node in used if node not in job) if job else ()
    kept = tuple(node for node in lost if node in job and node not in used)
    parts = [f"{compress(taken)} not in the job any more by Slurm, and the run uses it"] if taken else []
    parts += [f"{compress(kept)} lost to the run, and in the job by Slurm"] if kept else []
    return NodesCompared(taken=taken, kept=kept, reason="; ".join(parts))


class JobWatch:
    def __init__(
        self, ask: Callable[[], Sequence[str]], *, events: EventLog, clock: Clock, start: Start = start_thread
    ) -> None:
        self._question = SlurmQuestion(ask, start)
        self._events = events
        self._clock = clock
        self._look_at = clock.monotonic() + LOOK_SECONDS
        self._lost: Sequence[str] = ()
        self._differ = NodesCompared()

    def fileno(self) -> int:
        return self._question.fileno()

    @property
    def due(self) -> float | None:
        """When to call `look` next, monotonic; None: the answer to its question wakes the loop."""
        return None if self._question.is_open else self._look_at

    def look(self, *, used: Sequence[str] | None, lost: Sequence[str]) -> None:
        """`used` is None while nodes are just meeting."""
        now = self._clock.monotonic()
        if tuple(lost) != tuple(self._lost):
            self._lost = tuple(lost)
            self._look_at = min(self._look_at, now + SOON_SECONDS)
        if now >= self._look_at:
            self._question.ask()
        answer = self._question.answer()
        if isinstance(answer, SlurmError):
            self._look_at = now + RETRY_SECONDS
        elif answer is not None:
            self._look_at = now + LOOK_SECONDS
            if used is not None:
                self._report(nodes_differ(used=used, lost=lost, job=answer))

    def _report(self, differ: NodesCompared) -> None:
        if differ == self._differ:
            return
        self._differ = differ
        if differ.reason:
            logger.warning("Slurm and the run disagree: %s", differ.reason)
        else:
            differ = NodesCompared(reason="Slurm and the run agree about the job's nodes again")
            logger.info("%s", differ.reason)
        self._events.write(differ)
