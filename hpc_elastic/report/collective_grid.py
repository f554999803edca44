"""Ranks × last collectives of a broken round, by torch's flight recorder: as lines of text and as JSON's values."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from hpc_elastic.base.text import clean_line, plural, ranges, ranks_text
from hpc_elastic.failures.flight_dump import dumps_of
from hpc_elastic.failures.flight_grid import CallGrid, CallState, GridRow, draw_grids
from hpc_elastic.report.history import RoundHistory

SIGNS = {  # a sign that differs without its colour, and what it means
    CallState.COMPLETED: ("\u2713", "completed"),
    CallState.WAITS: ("\u25cb", "waits in it"),
    CallState.OTHER: ("\u2260", "called something else"),
    CallState.NEVER_ENTERED: ("\u2013", "never entered"),
    CallState.NOT_KNOWN: ("\u00b7", "not known"),
}
TITLE = "Last collectives, by torch's flight recorder"


def grids_of(part: RoundHistory) -> tuple[CallGrid, ...]:
    """One for each group in which ranks wait or differ; none without dumps."""
    dumps = dumps_of({one.rank: one.flight for one in part.activities if one.flight is not None})
    return draw_grids(dumps, world_size=part.world_size) if dumps else ()


def grid_lines(part: RoundHistory, *, cap: int | None) -> list[str]:
    """A line for the ranks that did the same, the rarest first; `cap`: at most so many of each group."""
    lines: list[str] = []
    for grid in grids_of(part):
        lines.append(f"  {describe_group(grid)}:")
        rows = grid.rows if cap is None or len(grid.rows) <= cap else grid.rows[: cap - 1]
        lines += [f"    {ranks_text(row.ranks, limit=40)}: {describe_row(grid, row)}" for row in rows]
        if hidden := sum(len(row.ranks) for row in grid.rows[len(rows) :]) + grid.left_out:
            lines.append(f"    ... {plural(hidden, 'rank')} more; report.json has them")
    return [f"{TITLE}:", *map(clean_line, lines)] if lines else []


def grid_values(part: RoundHistory) -> list[dict[str, Any]]:
    """For report.json."""
    return [
        {
            "group": grid.group,
            "backend": grid.backend,
            "numbers": list(grid.numbers),
            "calls": list(grid.calls),
            "rows": [
                {"ranks": ranges(row.ranks), "states": [state.value for state in row.states], "called": row.called}
                for row in grid.rows
            ],
        }
        for grid in grids_of(part)
    ]


def columns(grid: CallGrid) -> Iterator[tuple[int, str]]:
    """The numbers, each with what most ranks called."""
    return zip(grid.numbers, grid.calls, strict=True)


def describe_calls(grid: CallGrid) -> Iterator[str]:
    """``#4 to #5 barrier``, ``#6 all_reduce (28 B fp32)``."""
    for call, numbers in groupby(columns(grid), key=lambda column: column[1]):
        found = [number for number, _ in numbers]
        yield f"#{found[0]}{f' to #{found[-1]}' if len(found) > 1 else ''} {call or 'not known'}"


def describe_group(grid: CallGrid) -> str:
    """``group tp_0 (nccl)``."""
    return f"group {grid.group}{f' ({grid.backend})' if grid.backend else ''}"


def describe_row(grid: CallGrid, row: GridRow) -> str:
    """``completed #5 barrier, never entered #6 all_reduce (28 B fp32)``."""
    found = []
    done = [column for column, state in zip(columns(grid), row.states, strict=True) if state is CallState.COMPLETED]
    if done:
        found.append(f"completed #{done[-1][0]} {done[-1][1]}")
    seen: set[CallState] = set()
    for (number, call), state in zip(columns(grid), row.states, strict=True):
        if state in seen:
            continue
        seen.add(state)
        if state is CallState.WAITS:
            found.append(f"in #{number} {call}")
        elif state is CallState.OTHER:
            found.append(f"called {row.called} as #{number}")
        elif state is CallState.NEVER_ENTERED:
            found.append(f"never entered #{number} {call}")
    return ", ".join(found) or "not known"
