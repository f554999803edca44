"""The restart policy's decision about a round's failures. The agents bring the policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hpc_elastic.light_dataclasses import dataclass
from hpc_elastic.rendezvous.state import FailureMemory, NodeFailure, RoundRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartDecision:
    """The restart policy's decision about the failures of a round."""

    go_on: bool
    counts: bool
    """Whether the new round is charged to the restart budget."""
    reason: str
    memory: FailureMemory
    retryable: bool = True
    """Where it does not go on: whether another attempt could end otherwise."""
    refills: bool = False
    """Whether there was progress enough for the whole budget to be there again, before the new round is charged."""


_STRENGTH = {"root": 0, "hang": 1, "infrastructure": 2}


def failure_order(failure: NodeFailure) -> tuple[int, int, float]:
    """Sorts nodes' failures, the one to be told as the cause first: of several hung workers the furthest behind."""
    strength = _STRENGTH.get(failure.failure_class, len(_STRENGTH))
    step, age = failure.hang.lag if failure.hang is not None else (0, 0.0)
    return strength, step, age


DecideRestart = Callable[[RoundRecord, Sequence[NodeFailure], bool], RestartDecision]
"""(the joinable record, the last round's failures, whether one of its members was lost) → decision."""
