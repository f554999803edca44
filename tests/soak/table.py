"""The result as a table, for the screen and for docs/."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from tests.soak.faults import NATURES, Kind
from tests.soak.injections import Injection

BEGIN, END = "<!-- soak: begin -->", "<!-- soak: end -->"


def table(injections: Sequence[Injection]) -> str:
    """Markdown: an item per kind of fault."""
    by_kind: dict[Kind, list[Injection]] = defaultdict(list)
    for injection in injections:
        by_kind[injection.fault.kind].append(injection)
    lines = ["Fault (how often): the median until it trains again.", ""]
    for kind in Kind:
        if kind not in by_kind:
            continue
        done = by_kind[kind]
        seconds = [injection.seconds for injection in done if injection.seconds is not None]
        unexplained = sum(not injection.explained for injection in done)
        stuck = len(done) - len(seconds)
        middle = _seconds(statistics.median(seconds)) if seconds else "-"
        most = f"never ({stuck} times)" if stuck else _seconds(max(seconds))
        title = NATURES[kind].title + (f"; {unexplained} not in the report" if unexplained else "")
        lines.append(f"- {title} ({len(done)}): {middle}" + (f", at most {most}" if most != middle else ""))
    return "\n".join(lines)


def _seconds(value: float) -> str:
    return "no pause" if value == 0 else f"{value:.1f} s"


def update(path: Path, text: str) -> None:
    """Put `text` between the two marks of a page.

    Raises:
        ValueError: The page has no such marks.
    """
    page = path.read_text()
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{path} has no {BEGIN} … {END}")
    path.write_text(f"{head}{BEGIN}\n\n{text}\n\n{END}{tail}")
