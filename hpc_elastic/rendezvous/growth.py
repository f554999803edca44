"""Whether a round that goes well is ended so that nodes that wait come in: pure."""

from __future__ import annotations

from enum import Enum

from hpc_elastic.light_dataclasses import dataclass

SETTLE_SECONDS = 2.5
"""From the word that one node's checkpoint is complete until the others', which still write theirs, must have said so:
an agent looks at its workers once a second."""


class GrowPolicy(str, Enum):
    """``--grow``: when a node that waits is taken into a healthy round that is smaller than MAX."""

    CHECKPOINT = "checkpoint"
    """After the next checkpoint that the script reports; at once where it has reported none for some minutes."""
    NOW = "now"
    NEVER = "never"
    """Only where a new round begins for another reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowthFacts:
    """What the coordinator of a final round knows. Times in seconds, on its own monotonic clock."""

    newcomers: int
    """Nodes that wait, without those that were submitted as spares."""
    spares: int
    """Nodes that wait and were submitted as spares."""
    free: int
    """Places up to MAX."""
    vacant: int
    """Of them, those of lost members that nobody has taken since."""
    since_final: float
    """How long the round has run."""
    since_waiting: float
    """For how long nodes have waited."""
    since_saved: float
    """Since a checkpoint was completed in this round, on any node; infinite where none was."""
    is_saving: bool
    """Whether a node is still writing its part of one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """What is decided about nodes that wait."""

    takes_in: bool
    why: str
    """Follows their names."""


def decide_growth(facts: GrowthFacts, policy: GrowPolicy, *, patience: float, answer: float) -> Growth:
    """Whether a new round is begun so that nodes that wait come in.

    One that replaces a lost node comes in at once; spares come in for no other reason.

    Args:
        facts: What is known.
        policy: ``--grow``.
        patience: After so long without a checkpoint, CHECKPOINT waits for none any more.
        answer: How long it may take until the members, asked by the record that says that nodes wait, have told of the
            checkpoints that they completed before.
    """
    several = facts.newcomers + facts.spares > 1
    waits, as_a_spare = ("wait", "wait as spares") if several else ("waits", "waits as a spare")
    if facts.newcomers + facts.spares == 0 or facts.free <= 0:
        return Growth(takes_in=False, why=as_a_spare)
    if facts.vacant > 0:
        return Growth(takes_in=True, why=f"came for {'lost nodes' if several else 'a lost node'}")
    if facts.newcomers == 0:
        return Growth(takes_in=False, why=as_a_spare)
    if policy is GrowPolicy.NOW:
        return Growth(takes_in=True, why="came")
    if policy is GrowPolicy.NEVER:
        return Growth(takes_in=False, why=f"{waits} for a new round to begin (--grow never)")
    idle = min(facts.since_saved, facts.since_final)
    if idle >= patience and facts.since_waiting >= answer:
        return Growth(takes_in=True, why=f"came, and no checkpoint was reported for {idle:.0f} s")
    is_fresh = SETTLE_SECONDS <= facts.since_saved < facts.since_waiting
    if is_fresh and not facts.is_saving:
        return Growth(takes_in=True, why="came, and a checkpoint is complete")
    return Growth(takes_in=False, why=f"{waits} for the next checkpoint (--grow checkpoint)")
