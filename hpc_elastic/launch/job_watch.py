"""The supervisor's claim to finish the closed attempt: it rests on Slurm's answer (`rendezvous.ending` has the rest).

A node that Slurm has given up may live. What is done there about the job is not done, so the supervisor first asks
whether this node still belongs to the job. The question has a thread of its own: a controller may take long to answer,
and meanwhile agents end and signals come.

A look at the running job now and then: whether Slurm's controller answers, and which nodes the job has by it.

The look is made in a thread: a controller that does not answer takes a command up to half a minute to say so, and the
supervisor has signals and agents to see to.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Sequence

from msgspec import Struct

from hpc_elastic.base.clock import Clock
from hpc_elastic.launch.site import Allocation
from hpc_elastic.rendezvous.ending import END_UNCONFIRMED
from hpc_elastic.rendezvous.participant import Participant
from hpc_elastic.run.events import EventLog
from hpc_elastic.slurm.errors import SlurmError, SlurmUnavailableError
from hpc_elastic.slurm.notation import compress

logger = logging.getLogger(__name__)

ASK_AGAIN_SECONDS = 3.0
"""Between two questions to Slurm."""
_WHY = {
    Allocation.LOST: "Slurm has given this node up, or has requeued the job",
    Allocation.UNKNOWN: "Slurm can't be asked from here",
}


class EndClaim:
    """Claims the end where Slurm confirms that, or where no process has finished the attempt for long."""

    def __init__(
        self,
        allocation: Callable[[], Allocation],
        ask: Callable[[Callable[[Participant], None]], None],
        *,
        clock: Clock,
    ) -> None:
        """Args:
        allocation: Asks Slurm whether this node still belongs to the job; may take a minute.
        ask: Has something done by this supervisor's participant.
        clock: For the waits.
        """
        self._allocation = allocation
        self._ask = ask
        self._clock = clock
        self._stop = threading.Event()
        self._deadline: float | None = None
        """When the end is claimed without Slurm's answer; set by the first step."""

    def start(self) -> None:
        """Begin, in a thread that ends by itself."""
        threading.Thread(target=self._run, name="end-claim", daemon=True).start()

    def stop(self) -> None:
        """Another process finishes the attempt, or this one does by now."""
        self._stop.set()

    def claim(self) -> None:
        """Claim the end without asking: Slurm's own signal has come, so Slurm reaches this node."""
        self.stop()
        self._ask(lambda participant: participant.claim_end())

    def step(self) -> float | None:
        """Ask once, and claim the end where that is right.

        Returns:
            Seconds until the next step; None: there is none.
        """
        is_first = self._deadline is None
        if self._deadline is None:
            self._deadline = self._clock.monotonic() + END_UNCONFIRMED
            self._ask(lambda participant: participant.announce_claim())
        found = self._allocation()
        left = self._deadline - self._clock.monotonic()
        if self._stop.is_set():
            return None
        if found is Allocation.HELD or left <= 0:
            self.claim()
            return None
        if is_first:
            logger.warning("finishing the attempt is left to another node for %.0f s: %s", END_UNCONFIRMED, _WHY[found])
        return min(ASK_AGAIN_SECONDS, left)

    def _run(self) -> None:
        while (wait := self.step()) is not None and not self._clock.wait(self._stop, wait):
            pass


LOOK_SECONDS = 60.0
"""Between two looks; one cheap call each."""
RETRY_SECONDS = 15.0
"""The same while the controller does not answer."""
SOON_SECONDS = 5.0
"""After a node was lost: Slurm may just be saying so as well."""
_ANSWER_LOOK_SECONDS = 0.5


class ControllerOutage:
    """Says once in the log that Slurm's controller does not answer, and once that it answers again."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.since: float | None = None
        """When it was noticed, monotonic; None: it answers."""

    def heard(self, error: SlurmUnavailableError | None) -> None:
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
            logger.warning("Slurm's controller answers again, after at least %.0f s", now - self.since)
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
        said = [f"{compress(self.taken)} not in the job any more by Slurm, and the run uses it"] if self.taken else []
        said += [f"{compress(self.kept)} lost to the run, and in the job by Slurm"] if self.kept else []
        return "; ".join(said)


def nodes_differ(*, used: Sequence[str], lost: Sequence[str], job: Collection[str]) -> NodesDiffer:
    """Compare.

    Args:
        used: Nodes of the newest round.
        lost: Those that the run has taken out.
        job: What Slurm has in the job; empty: it said nothing about them.
    """
    if not job:
        return NodesDiffer()
    return NodesDiffer(
        taken=tuple(node for node in used if node not in job),
        kept=tuple(node for node in lost if node in job and node not in used),
    )


def _in_thread(work: Callable[[], None]) -> None:
    threading.Thread(target=work, daemon=True, name="job-watch").start()


class JobWatch:
    """The supervisor's."""

    def __init__(
        self,
        ask: Callable[[], Sequence[str]],
        *,
        events: EventLog,
        clock: Clock,
        start: Callable[[Callable[[], None]], None] = _in_thread,
    ) -> None:
        """Args:
        ask: The job's nodes by Slurm, none where it does not run; may take its time, and raise SlurmError.
        events: The supervisor's.
        clock: For the looks.
        start: Has a question asked beside everything else.
        """
        self._ask = ask
        self._events = events
        self._clock = clock
        self._start = start
        self.due = clock.monotonic() + LOOK_SECONDS
        """When `look` is to be called next, monotonic."""
        self._asked = False
        self._answer: Sequence[str] | SlurmError | None = None
        self._lost: Sequence[str] = ()
        self._differ = NodesDiffer()

    def look(self, *, used: Sequence[str] | None, lost: Sequence[str]) -> None:
        """Ask where it is time to, and log what is new. To be called as often as one likes; never waits.

        Args:
            used: As in `nodes_differ`; None: nodes are just meeting, and nothing is compared.
            lost: As in `nodes_differ`.
        """
        now = self._clock.monotonic()
        if tuple(lost) != tuple(self._lost):
            self._lost = tuple(lost)
            self.due = min(self.due, now + SOON_SECONDS)
        if now < self.due:
            return
        if not self._asked:
            self._asked, self._answer = True, None
            self._start(self._question)
        answer = self._answer
        if answer is None:
            self.due = now + _ANSWER_LOOK_SECONDS
            return
        self._asked = False
        self.due = now + (RETRY_SECONDS if isinstance(answer, SlurmError) else LOOK_SECONDS)
        if not isinstance(answer, SlurmError) and used is not None:
            self._report(nodes_differ(used=used, lost=lost, job=answer))

    def _question(self) -> None:
        try:
            self._answer = self._ask()
        except SlurmError as error:
            self._answer = error

    def _report(self, differ: NodesDiffer) -> None:
        if differ == self._differ:
            return
        self._differ = differ
        reason = str(differ) or "Slurm and the run agree about the job's nodes again"
        (logger.warning if differ else logger.info)("%s%s", "Slurm and the run disagree: " if differ else "", reason)
        self._events.write("nodes_differ", taken=list(differ.taken), kept=list(differ.kept), reason=reason)
