"""The supervisor's claim to finish the closed attempt: it rests on Slurm's answer (`rendezvous.ending` has the rest).

A node that Slurm has given up may live. What is done there about the job is not done, so the supervisor first asks
whether this node still belongs to the job. The question has a thread of its own: a controller may take long to answer,
and meanwhile agents end and signals come.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from hpc_elastic.clock import Clock
from hpc_elastic.launch.site import Allocation
from hpc_elastic.rendezvous.ending import END_UNCONFIRMED
from hpc_elastic.rendezvous.participant import Participant

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
