"""A rehearsal's outcome as text for the terminal, as a page, and as one JSON object. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpc_elastic.base.codec import to_json
from hpc_elastic.base.text import plural
from hpc_elastic.rehearsal.journal import step_text
from hpc_elastic.rehearsal.judge import InjectionSeen, LossComparison, find_remarks
from hpc_elastic.rehearsal.rehearse import RehearsalResult
from hpc_elastic.report.render_html import render_page

_VERDICTS = ("holds", "guilty", "not certain")
_HEAD = ("fault", "hit", "resumed at", "done again", "trains again after", "notice")


def rows(injections: Sequence[InjectionSeen]) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = [_HEAD]
    for injection in injections:
        if injection.resumed is not None:
            resumed, redone = f"step {step_text(injection.resumed)}", str(injection.redone)
        else:
            resumed, redone = ("trained on", "-") if injection.trained_at is not None else ("never", "-")
        found.append(
            (
                str(injection.fault),
                injection.what or "-",
                resumed,
                redone,
                f"{injection.seconds:.1f} s" if injection.seconds is not None else "never",
                "-" if injection.used_notice is None else "used" if injection.used_notice else "not used",
            )
        )
    return found


def verdict_lines(outcome: RehearsalResult) -> list[str]:
    found, comparison = outcome.found, outcome.found.comparison
    lines = [_losses(comparison, outcome.options.tolerance)]
    lines += [f"not done: {name}: {why}" for name, why in outcome.skipped.items()]
    lines += [f"remark: {text}" for text in find_remarks(found)]
    lines += [f"GUILTY: {finding.text}" for finding in outcome.findings]
    if not outcome.findings:
        lacks = f"; not tried: {', '.join(outcome.skipped)}" if outcome.skipped else ""
        lines.append(f"{_VERDICTS[outcome.code]}: {plural(len(found.injections), 'fault')}{lacks}")
    return lines


def _losses(comparison: LossComparison, tolerance: float) -> str:
    if comparison.divergence is not None and not comparison.repeatable:
        return (
            f"losses: the script does not repeat itself: two undisturbed runs differ, too (by up to "
            f"{comparison.largest:.2%}); seed its random generators, or give a larger --tolerance"
        )
    if not comparison.compared:
        return "losses: none to compare: print them, or hpc_elastic.heartbeat(step, loss=loss), or --losses"
    if comparison.divergence is not None:
        one = comparison.divergence
        where = f"step {step_text(one.step)} of run {one.run}, attempt {one.place[0]} round {one.place[1]}"
        return f"losses: they part at {where}, by {one.by:.2%}; at most by {comparison.largest:.2%}"
    return (
        f"losses: {comparison.compared} compared, equal to those of the undisturbed run within {tolerance:g} "
        f"(at most {comparison.largest:.1e} off)"
    )


def as_text(outcome: RehearsalResult) -> str:
    parts = []
    if outcome.found.injections:
        table = rows(outcome.found.injections)
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in table)
        parts.append("\n".join(line.rstrip() for line in lines))
    parts.append("\n".join(verdict_lines(outcome)))
    return "\n\n".join(parts) + "\n"


def as_json(outcome: RehearsalResult) -> dict[str, Any]:
    found, comparison = outcome.found, outcome.found.comparison
    return {
        "version": 1,
        "holds": outcome.code == 0,
        "seconds": round(outcome.seconds, 3),
        "steps": found.steps,
        "tolerance": outcome.options.tolerance,
        "losses": {
            "compared": comparison.compared,
            "largest_difference": comparison.largest,
            "repeatable": comparison.repeatable,
            "parts": None if comparison.divergence is None else to_json(comparison.divergence),
        },
        "faults": [
            {
                "fault": injection.fault.kind.name,
                "number": injection.fault.number,
                "run": injection.run,
                "hit": injection.what,
                "resumed": None if injection.resumed is None else list(injection.resumed),
                "done_again": injection.redone,
                "seconds": injection.seconds,
                "used_notice": injection.used_notice,
            }
            for injection in found.injections
        ],
        "remarks": list(find_remarks(found)),
        "guilty": [{"of": finding.guilt.value, "text": finding.text} for finding in outcome.findings],
        "not_done": [f"{name}: {why}" for name, why in outcome.skipped.items()],
    }


def as_page(outcome: RehearsalResult) -> str:
    """A page with the look of report.html, and without anything from elsewhere."""
    options, lines = outcome.options, verdict_lines(outcome)
    head, *faults = rows(outcome.found.injections)
    return render_page(
        "rehearsal/page.html",
        title=f"Rehearsal of {options.spec.name}",
        verdict=_VERDICTS[outcome.code],
        tone=("good", "bad", "warn")[outcome.code],
        findings=[line for line in lines if _is_verdict(line)],
        others=[line for line in lines if not _is_verdict(line)],
        facts=(
            ("script", str(options.spec.entrypoint)),
            ("steps", str(outcome.found.steps)),
            ("took", f"{outcome.seconds:.0f} s"),
        ),
        head=head,
        faults=faults,
    )


def _is_verdict(line: str) -> bool:
    return line.startswith(("GUILTY", *_VERDICTS))
