"""What the supervisor asks Slurm about its job beside everything else: each question in a thread of its own.

A controller that does not answer takes a command up to half a minute to say so, and meanwhile agents end and signals
come. `JobWatch` looks at the running job now and then: whether the controller answers, and which nodes the job has by
it. `EndClaim` asks, once the run is closed, whether this node still belongs to the job: a node that Slurm has given up
may live, and what it did about the job would not be done (`rendezvous.ending` has the rest).
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Generic, TypeVar

from msgspec import Struct

from hpc_elastic.base.clock import Clock
from hpc_elastic.base.waking import Waker
from hpc_elastic.launch.site import Allocation
from hpc_elastic.rendezvous.ending import END_UNCONFIRMED
from hpc_elastic.rendezvous.participant import Participant
from hpc_elastic.run.events import EventLog
from hpc_elastic.run.supervisor_events import NodesCompared
from hpc_elastic.slurm.errors import SlurmError, SlurmUnavailableError
from hpc_elastic.slurm.notation import compress

logger = logging.getLogger(__name__)

LOOK_SECONDS = 60.0
"""Between two looks at the job; one cheap call each."""
RETRY_SECONDS = 15.0
"""The same while the controller does not answer."""
SOON_SECONDS = 5.0
"""After a node was lost: Slurm may just be saying so as well."""
ASK_AGAIN_SECONDS = 3.0
"""Between two questions whether this node still belongs to the job."""
_WHY = {
    Allocation.LOST: "Slurm has given this node up, or has requeued the job",
    Allocation.UNKNOWN: "Slurm can't be asked from here",
}

T = TypeVar("T")
Start = Callable[[Callable[[], None]], None]


def _in_thread(work: Callable[[], None]) -> None:
    threading.Thread(target=work, daemon=True, name="slurm-question").start()


class SlurmQuestion(Generic[T]):
    """One question, asked in a thread each time; the answer wakes the loop."""

    def __init__(self, ask: Callable[[], T], start: Start = _in_thread) -> None:
        """Args:
        ask: May take its time, and raise SlurmError.
        start: Has it done beside everything else.
        """
        self._ask = ask
        self._start = start
        self._answers: deque[T | SlurmError] = deque()
        self._waker = Waker()
        self.is_open = False
        """Whether it was asked, and its answer not taken yet."""

    def fileno(self) -> int:
        """Readable when there is an answer."""
        return self._waker.fileno()

    def ask(self) -> None:
        if not self.is_open:
            self.is_open = True
            self._start(self._run)

    def take(self) -> T | SlurmError | None:
        """The answer, once; None: there is none yet."""
        if not self._waker.drain():
            return None
        self.is_open = False
        return self._answers.popleft()

    def _run(self) -> None:
        try:
            self._answers.append(self._ask())
        except SlurmError as error:
            self._answers.append(error)
        self._waker.wake()


class EndClaim:
    """The claim to finish the closed attempt: made where Slurm confirms it, or no other process makes it for long."""

    def __init__(
        self,
        allocation: Callable[[], Allocation],
        ask: Callable[[Callable[[Participant], None]], None],
        *,
        clock: Clock,
        start: Start = _in_thread,
    ) -> None:
        """Args:
        allocation: Asks Slurm whether this node still belongs to the job; may take a minute.
        ask: Has something done by this supervisor's participant.
        """
        self._question = SlurmQuestion(allocation, start)
        self._ask = ask
        self._clock = clock
        self._deadline = self._ask_at = 0.0
        """When the end is claimed without Slurm's answer; when Slurm is asked again."""
        self._has_warned = False
        self.due: float | None = None
        """When `step` is to be called next, monotonic; None: not before it has begun, and no more once it is over."""

    def fileno(self) -> int:
        return self._question.fileno()

    def begin(self) -> None:
        """The run is closed: ask Slurm."""
        self._deadline = self.due = self._clock.monotonic() + END_UNCONFIRMED
        self._ask(lambda participant: participant.ending.announce_claim())
        self._question.ask()

    def step(self) -> None:
        """Claim the end where that is right, ask again where it is not known. Never waits."""
        now = self._clock.monotonic()
        answer = self._question.take()
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
        """Claim the end without asking: Slurm's own signal has come, so Slurm reaches this node."""
        self.stop()
        self._ask(lambda participant: participant.ending.may_claim())

    def stop(self) -> None:
        """Another process finishes the attempt, or this one does by now."""
        self.due = None


class ControllerOutage:
    """Logs once that Slurm's controller does not answer, and once that it answers again."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.since: float | None = None
        """When it was noticed, monotonic; None: it answers."""

    def on_answer(self, error: SlurmUnavailableError | None) -> None:
        """Take in what a call came to: its error, or None where it was answered."""
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


class NodesDiffer(Struct, frozen=True, kw_only=True):
    """Nodes about which Slurm and the run disagree, in the run's order."""

    taken: tuple[str, ...] = ()
    """The run has workers there, and Slurm no longer has them in the job."""
    kept: tuple[str, ...] = ()
    """They are lost to the run, and Slurm has them in the job."""

    def __bool__(self) -> bool:
        return bool(self.taken or self.kept)

    def __str__(self) -> str:
        parts = [f"{compress(self.taken)} not in the job any more by Slurm, and the run uses it"] if self.taken else []
        parts += [f"{compress(self.kept)} lost to the run, and in the job by Slurm"] if self.kept else []
        return "; ".join(parts)


def nodes_differ(*, used: Sequence[str], lost: Sequence[str], job: Collection[str]) -> NodesDiffer:
    """Compare.

    Args:
        used: Nodes of the newest round.
        lost: Those that the run has taken out.
        job: What Slurm has in the job; empty: not known.
    """
    if not job:
        return NodesDiffer()
    return NodesDiffer(
        taken=tuple(node for node in used if node not in job),
        kept=tuple(node for node in lost if node in job and node not in used),
    )


class JobWatch:
    """Looks at the running job now and then."""

    def __init__(
        self, ask: Callable[[], Sequence[str]], *, events: EventLog, clock: Clock, start: Start = _in_thread
    ) -> None:
        """Args:
        ask: The job's nodes by Slurm, none where it does not run; may take its time, and raise SlurmError.
        """
        self._question = SlurmQuestion(ask, start)
        self._events = events
        self._clock = clock
        self._look_at = clock.monotonic() + LOOK_SECONDS
        self._lost: Sequence[str] = ()
        self._differ = NodesDiffer()

    def fileno(self) -> int:
        return self._question.fileno()

    @property
    def due(self) -> float | None:
        """When `look` is to be called next, monotonic; None: the answer to its question wakes the loop."""
        return None if self._question.is_open else self._look_at

    def look(self, *, used: Sequence[str] | None, lost: Sequence[str]) -> None:
        """Ask where it is time to, and log what is new. To be called as often as one likes; never waits.

        Args:
            used: As in `nodes_differ`; None: nodes are just meeting, and nothing is compared.
        """
        now = self._clock.monotonic()
        if tuple(lost) != tuple(self._lost):
            self._lost = tuple(lost)
            self._look_at = min(self._look_at, now + SOON_SECONDS)
        if now >= self._look_at:
            self._question.ask()
        answer = self._question.take()
        if isinstance(answer, SlurmError):
            self._look_at = now + RETRY_SECONDS
        elif answer is not None:
            self._look_at = now + LOOK_SECONDS
            if used is not None:
                self._report(nodes_differ(used=used, lost=lost, job=answer))

    def _report(self, differ: NodesDiffer) -> None:
        if differ == self._differ:
            return
        self._differ = differ
        reason = str(differ) or "Slurm and the run agree about the job's nodes again"
        (logger.warning if differ else logger.info)("%s%s", "Slurm and the run disagree: " if differ else "", reason)
        self._events.write(NodesCompared(taken=tuple(differ.taken), kept=tuple(differ.kept), reason=reason))
