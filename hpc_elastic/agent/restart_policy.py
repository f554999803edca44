"""Whether a round's failures are worth another round: pure, asked by the coordinator when it freezes the next one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpc_elastic.rendezvous.coordinator import Settlement
from hpc_elastic.rendezvous.state import FailureMemory, NodeFailure, RoundRecord

_STRENGTH = {"root": 0, "infrastructure": 1}
"""Which failure is told as the cause; all others are equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """The run's budget, as the user gave it."""

    max_restarts: int
    max_same_failures: int
    """So many times the same fingerprint with no progress between: a bug in the script. 0: never."""
    restart_window: float
    """Seconds after which a round counts as progress, where no step was reported."""

    def settle(self, record: RoundRecord, failures: Sequence[NodeFailure], node_lost: bool) -> Settlement:
        """Decide about the failures of the round before `record`'s.

        A round that broke because a node was lost, where all that the others have to tell is a symptom of that, is a
        membership change and free of charge.
        """
        memory = record.memory
        if not failures:
            return Settlement(go_on=True, counts=False, reason="", memory=memory)
        if node_lost and all(f.failure_class == "symptom" for f in failures):
            return Settlement(go_on=True, counts=False, reason="", memory=memory)
        cause = min(failures, key=lambda failure: _STRENGTH.get(failure.failure_class, len(_STRENGTH)))
        memory = self._remember(memory, failures, cause)
        final = next((f for f in failures if not f.retryable), None)
        if final is not None:
            return _give_up(f"not retryable: {final.message}", memory)
        if self.max_same_failures and memory.times >= self.max_same_failures:
            return _give_up(
                f"this looks like a bug in the script: the same failure {memory.times} times in a row "
                f"with no progress between ({cause.message})",
                memory,
            )
        if record.restarts_used >= self.max_restarts:
            used = f"{record.restarts_used} of {self.max_restarts} restarts used"
            return Settlement(
                go_on=False, counts=False, reason=f"restarts exhausted ({used}): {cause.message}", memory=memory
            )
        left = self.max_restarts - record.restarts_used - 1
        return Settlement(
            go_on=True,
            counts=True,
            reason=f"restart {record.restarts_used + 1} of {self.max_restarts} ({left} left) after: {cause.message}",
            memory=memory,
        )

    def _remember(self, before: FailureMemory, failures: Sequence[NodeFailure], cause: NodeFailure) -> FailureMemory:
        step = max((f.step for f in failures), default=-1)
        if step >= 0 and before.step >= 0:
            progress = step > before.step
        else:
            progress = max(f.seconds for f in failures) >= self.restart_window
        same = bool(cause.fingerprint) and cause.fingerprint == before.fingerprint and not progress
        return FailureMemory(
            fingerprint=cause.fingerprint,
            times=before.times + 1 if same else (1 if cause.fingerprint else 0),
            step=max(step, before.step),
        )


def _give_up(reason: str, memory: FailureMemory) -> Settlement:
    return Settlement(go_on=False, counts=False, reason=reason, memory=memory, retryable=False)
