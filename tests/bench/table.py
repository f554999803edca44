"""One row of a benchmark's table, and the table."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    title: str
    unit: str
    values: Sequence[float]
    goal: float | None = None
    """At most, of the median."""
    note: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.values)


def number_table(heading: str, numbers: Sequence[Number]) -> str:
    """A list in Markdown: each median, with (least–most; a goal that is missed), and what it is of."""
    lines = [f"{heading[0].upper()}{heading[1:]}:", ""]
    for number in numbers:
        least, most = min(number.values), max(number.values)
        beside = [f"{least:.3g}–{most:.3g}"] if most > least else []
        if number.goal is not None and number.median > number.goal:
            beside.append(f"**goal ≤ {number.goal:.3g} not met**")
        value = f"{number.median:.3g} {number.unit}" + (f" ({'; '.join(beside)})" if beside else "")
        lines.append(f"- {value}: {number.title}{f'; {number.note}' if number.note else ''}")
    return "\n".join(lines) + "\n"


def ratio(title: str, ours: Sequence[float], theirs: Sequence[float], goal: float | None, *, unit: str = "s") -> Number:
    """Each of our values by the other's of the same repetition."""
    ratios = [own / other for own, other in zip(ours, theirs, strict=True)]
    note = f"{statistics.median(ours):.3g} by {statistics.median(theirs):.3g} {unit}"
    return Number(title=title, unit="×", values=ratios, goal=goal, note=note)
