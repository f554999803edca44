"""Decides which checkpoint is copied next, what is removed, and what restarted workers continue from. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from collections.abc import Set as AbstractSet

from hpc_elastic.checkpoints.layout import Choice, NodePart, NodeReport, Saving


def next_target(whole: Collection[NodePart], *, committed: int, dead: AbstractSet[Saving]) -> Saving | None:
    """`committed` is the newest committed step, -1 without one; `dead`: some node has not its part."""
    found = [part.saving for part in whole if part.saving.step > committed and part.saving not in dead]
    return max(found, default=None)


def removable_parts(
    whole: Collection[NodePart], *, is_settled: bool, committed: int, kept: Collection[Saving]
) -> list[NodePart]:
    """A rank enters a step's `checkpoint_dir` after all ranks have left the one before: the newest whole part is whole
    everywhere once a later one is begun (`is_settled`); until then the one before it is needed, too. `kept`: being
    copied, or so new that the leader may choose it next.
    """
    order = sorted(whole)
    needed = order[-1:] if is_settled or (order and order[-1].saving.step <= committed) else order[-2:]
    return [part for part in order if part not in needed and part.saving not in kept]


def removable_steps(steps: Collection[int], *, keep: int, protected: Collection[int]) -> list[int]:
    """Committed steps beyond the newest `keep`; never the newest one, nor one that workers may be reading."""
    return sorted(step for step in sorted(steps)[: -max(1, keep)] if step not in protected)


def choose_start(reports: Sequence[NodeReport], committed: Saving | None) -> tuple[Choice, Saving | None]:
    """Returns a newer checkpoint that could be committed first, too: all its parts are there, but a rank may have to
    read a file that another node has. `reports`: of all members, in the order of their group ranks.
    """
    fallback = Choice(saving=committed)
    known = {part.saving for report in reports for part in (*report.whole, *report.copies)}
    for saving in sorted(known, reverse=True):
        if committed is not None and saving.step <= committed.step:
            break
        held = {part.index for report in reports for part in (*report.whole, *report.copies) if part.saving == saving}
        if held != set(range(saving.count)):
            continue
        own = [
            dict(zip(report.whole, report.shapes, strict=False)).get(NodePart(saving, k))
            for k, report in enumerate(reports)
        ]
        if saving.count == len(reports) and own[0] and len(set(own)) == 1:
            return Choice(saving=saving, is_committed=False), None
        return fallback, saving
    return fallback, None
