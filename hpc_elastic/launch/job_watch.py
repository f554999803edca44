"""Slurm's view of the running job. Each question has a thread: without a controller a command takes half a minute."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

from msgspec import UNSET, Struct

from hpc_elastic.base.clock import Clock
from hpc_elastic.base.loop import Inbox, start_thread
from hpc_elastic.launch.site import Allocation
from hpc_elastic.rendezvous.ending import END_UNCONFIRMED
from hpc_elastic.rendezvous.participant import Participant
from hpc_elastic.run.events import EventLog
from hpc_elastic.run.supervisor_events import NodesCompared
from hpc_elastic.slurm.commands import SlurmError, SlurmUnavailableError
from hpc_elastic.slurm.notation import compress

logger = logging.getLogger(__name__)

LOOK_SECONDS = 60.0
RETRY_SECONDS = 15.0
SOON_SECONDS = 5.0
"""Delay after a node was lost: Slurm may just be reporting it."""
ASK_AGAIN_SECONDS = 3.0
_WHY = {
    Allocation.LOST: "Slurm has given this node up, or has requeued the job",
    Allocation.UNKNOWN: "Slurm can't be asked from here",
}

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


class EndClaim(Struct, eq=False):
    """Claims the right to finish the closed attempt: Slurm confirms it, or no other process claims it for long."""

    allocation: Callable[[], Allocation]
    ask: Callable[[Callable[[Participant], None]], None]
    clock: Clock
    start: Start = start_thread
    due: float | None = None
    """When to call `step` next, monotonic; None: not begun, or over."""
    _question: SlurmQuestion[Allocation] = UNSET  # type: ignore[assignment]
    _deadline: float = 0.0
    _ask_at: float = 0.0
    _has_warned: bool = False

    def __post_init__(self) -> None:
        self._question = SlurmQuestion(self.allocation, self.start)

    def fileno(self) -> int:
        return self._question.fileno()

    def begin(self) -> None:
        self._deadline = self.due = self.clock.monotonic() + END_UNCONFIRMED
        self.ask(lambda participant: participant.ending.announce_claim())
        self._question.ask()

    def step(self) -> None:
        now = self.clock.monotonic()
        answer = self._question.answer()
        if self.due is None:
            return
        if answer is Allocation.HELD or now >= self._deadline:
            self.claim()
            return
        if isinstance(answer, Allocation):
            if not self._has_warned:
                logger.warning(
                    "finishing the attempt is left to another node for %.0f s: %s", END_UNCONFIRMED, _WHY[answer]
                )
            self._has_warned, self._ask_at = True, now + ASK_AGAIN_SECONDS
        elif self._has_warned and now >= self._ask_at:
            self._question.ask()
        self.due = self._deadline if self._question.is_open else min(self._ask_at, self._deadline)

    def claim(self) -> None:
        """Claim without asking: Slurm's own signal has come, so Slurm reaches this node."""
        self.stop()
        self.ask(lambda participant: participant.ending.may_claim())

    def stop(self) -> None:
        self.due = None


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
