"""A rehearsal's outcome as text for the terminal, as a page, and as one JSON object. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpc_elastic.base.text import plural
from hpc_elastic.rehearsal.journal import step_text
from hpc_elastic.rehearsal.judge import Comparison, InjectionSeen
from hpc_elastic.rehearsal.parts import NAMES, advise
from hpc_elastic.rehearsal.rehearse import Outcome
from hpc_elastic.report.render_html_markup import Markup, element

_HEAD = ("fault", "hit", "resumed at", "done again", "trains again after", "notice")


def rows(injections: Sequence[InjectionSeen]) -> list[tuple[str, ...]]:
    """A row for each fault, below its titles."""
    found: list[tuple[str, ...]] = [_HEAD]
    for injection in injections:
        if injection.resumed is not None:
            resumed, redone = f"step {step_text(injection.resumed)}", str(injection.redone)
        else:
            resumed, redone = ("trained on", "-") if injection.trained_at is not None else ("never", "-")
        found.append(
            (
                f"#{injection.fault.number} {injection.fault.title}",
                injection.what or "-",
                resumed,
                redone,
                f"{injection.seconds:.1f} s" if injection.seconds is not None else "never",
                "-" if injection.notice is None else injection.notice.value,
            )
        )
    return found


def part_rows(injections: Sequence[InjectionSeen]) -> list[tuple[str, ...]]:
    """How long the parts of each restart took; nothing where none is known."""
    found = []
    for injection in injections:
        values = [getattr(injection.parts, name) for name in NAMES]
        if any(value is not None for value in values):
            found.append(
                (f"#{injection.fault.number}", *("-" if value is None else f"{value:.1f} s" for value in values))
            )
    return [("restart", *NAMES.values()), *found] if found else []


def verdict_lines(outcome: Outcome) -> list[str]:
    """What holds, and what does not."""
    found, comparison = outcome.found, outcome.found.comparison
    lines = [_losses(comparison, outcome.wish.tolerance)]
    lines += [f"not done: {text}" for text in outcome.skipped]
    lines += advise(found.injections)
    lines += [f"GUILTY: {finding.text}" for finding in outcome.findings]
    if not outcome.findings:
        lines.append(
            f"holds: {plural(len(found.injections), 'fault')}, seed {outcome.wish.seed}"
            if found.injections
            else "nothing was tried: no fault could be done"
        )
    return lines


def _losses(comparison: Comparison, tolerance: float) -> str:
    if comparison.parting is not None and not comparison.repeatable:
        return (
            f"losses: the script does not repeat itself: two undisturbed runs differ, too (by up to "
            f"{comparison.largest:.2%}); seed its random generators, or give a larger --tolerance"
        )
    if not comparison.compared:
        return "losses: none to compare: print them, or hpc_elastic.heartbeat(step, loss=loss), or --losses"
    if comparison.parting is not None:
        parting = comparison.parting
        where = (
            f"step {step_text(parting.step)} of run {parting.run}, attempt {parting.place[0]} round {parting.place[1]}"
        )
        return f"losses: they part at {where}, by {parting.by:.2%}; at most by {comparison.largest:.2%}"
    return (
        f"losses: {comparison.compared} compared, equal to those of the undisturbed run within {tolerance:g} "
        f"(at most {comparison.largest:.1e} off)"
    )


def as_text(outcome: Outcome) -> str:
    """For the terminal."""
    parts = [_aligned(rows(outcome.found.injections))] if outcome.found.injections else []
    if found := part_rows(outcome.found.injections):
        parts.append(_aligned(found))
    parts.append("\n".join(verdict_lines(outcome)))
    return "\n\n".join(parts) + "\n"


def _aligned(table: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table
    )


def as_json(outcome: Outcome) -> dict[str, Any]:
    """One object; its fields are in docs/how-to/rehearse.md."""
    found, comparison = outcome.found, outcome.found.comparison
    parting = comparison.parting
    return {
        "version": 1,
        "holds": not outcome.findings,
        "seed": outcome.wish.seed,
        "seconds": round(outcome.seconds, 3),
        "steps": found.steps,
        "tolerance": outcome.wish.tolerance,
        "losses": {
            "compared": comparison.compared,
            "largest_difference": comparison.largest,
            "repeatable": comparison.repeatable,
            "parts": None
            if parting is None
            else {
                "step": list(parting.step),
                "rank": parting.rank,
                "run": parting.run,
                "loss": parting.loss,
                "expected": parting.expected,
            },
        },
        "faults": [
            {
                "fault": injection.fault.kind.value,
                "number": injection.fault.number,
                "run": injection.run,
                "hit": injection.what,
                "resumed": None if injection.resumed is None else list(injection.resumed),
                "done_again": injection.redone,
                "seconds": injection.seconds,
                "notice": None if injection.notice is None else injection.notice.value,
                "parts": {name: getattr(injection.parts, name) for name in NAMES},
            }
            for injection in found.injections
        ],
        "guilty": [{"of": finding.guilt.value, "text": finding.text} for finding in outcome.findings],
        "not_done": list(outcome.skipped),
    }


_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:70rem;padding:0 1rem}"
    "table{border-collapse:collapse;margin:1rem 0}td,th{border:1px solid #8888;padding:.25rem .6rem;text-align:left}"
    ".guilty{border-left:.4rem solid #b00;padding-left:.6rem}.holds{border-left:.4rem solid #080;padding-left:.6rem}"
    "@media(prefers-color-scheme:dark){body{background:#111;color:#ddd}}"
)


def as_page(outcome: Outcome) -> str:
    """A page of its own, without anything from elsewhere."""
    wish = outcome.wish
    title = f"Rehearsal of {wish.spec.name}: {'guilty' if outcome.findings else 'holds'}"
    body = [
        element("h1", title),
        element(
            "p", f"{wish.spec.entrypoint} — seed {wish.seed}, {outcome.seconds:.0f} s, {outcome.found.steps} steps"
        ),
    ]
    for line in verdict_lines(outcome):
        kind = "guilty" if line.startswith("GUILTY") else "holds" if line.startswith("holds") else None
        body.append(element("p", line, class_=kind))
    tables = (rows(outcome.found.injections) if outcome.found.injections else [], part_rows(outcome.found.injections))
    body += [_table(table) for table in tables if table]
    head = element("head", element("meta", charset="utf-8"), element("title", title), element("style", Markup(_STYLE)))
    return f"<!DOCTYPE html>\n{element('html', head, element('body', *body), lang='en')}\n"


def _table(table: Sequence[tuple[str, ...]]) -> Markup:
    head = element("tr", *(element("th", cell) for cell in table[0]))
    return element("table", head, *(element("tr", *(element("td", cell) for cell in row)) for row in table[1:]))
