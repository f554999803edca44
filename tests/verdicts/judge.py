"""Whether a report is right about a case's cause, honest about not knowing it, or wrong: a pure function."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from hpc_elastic.failures.worker_failure import LOGGED_BEFORE
from tests.verdicts.case import Case

_VICTIM = re.compile(r"timed out waiting \d+ms for|closed by peer|reset by peer|broken pipe", re.IGNORECASE)
"""What gloo has a rank report when another one is gone or does not come."""
_LOOK_AT = re.compile(r"look at ranks? ([0-9][0-9, -]*)", re.IGNORECASE)


class Grade(str, Enum):
    """What a report is worth."""

    RIGHT = "right"
    """It names an expected rank or node, and states what happened there."""
    HONEST = "honest"
    """It states that the cause is not known, and sends nobody to a wrong rank."""
    WRONG = "wrong"


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One case's result."""

    name: str
    group: str
    grade: Grade
    confidence: str
    """Of the verdict; empty where there was no report."""
    why: str
    """What is wrong with it; empty where it is right."""
    summary: str
    """The verdict in one line."""
    text: str
    """report.txt."""


def judge(case: Case, report: Mapping[str, Any], text: str) -> Judged:
    """Compare a report with what is right.

    Args:
        case: The case.
        report: report.json.
        text: report.txt.
    """
    verdict = report["verdict"]
    grade, why = _grade(case, verdict, cause_section(text))
    return Judged(
        name=case.name,
        group=case.group,
        grade=grade,
        confidence=verdict["confidence"],
        why=why,
        summary=verdict["summary"],
        text=text,
    )


def failed_to_run(case: Case, why: str, log: str) -> Judged:
    """A run that made no report counts as wrong."""
    return Judged(name=case.name, group=case.group, grade=Grade.WRONG, confidence="", why=why, summary="", text=log)


def cause_section(text: str) -> str:
    """What report.txt shows of the root cause: from the rule under the run directory to the next heading."""
    lines = text.splitlines()
    start = next((number for number, line in enumerate(lines) if line.startswith("----")), -1) + 1
    rest = lines[start:]
    # The section's own heading stands in the first line; the next line that is not indented is another section's.
    stop = next((number for number, line in enumerate(rest) if number and line and not line.startswith(" ")), len(rest))
    return "\n".join(rest[:stop])


def _grade(case: Case, verdict: Mapping[str, Any], section: str) -> tuple[Grade, str]:
    if verdict["cause"] == "unknown" or verdict["confidence"] == "none":
        return _grade_unknown(case, verdict, section)
    failure, lost = verdict["failure"], verdict["lost_node"]
    if failure is None and lost is None:
        if case.ranks or case.node is not None or not case.says:
            return Grade.WRONG, "names no rank and no node"
    elif lost is not None:
        if lost["host"] != case.node:
            return Grade.WRONG, f"names node {lost['host']}, not {_expected(case)}"
    elif case.node is not None and not case.ranks:
        if failure["host"] != case.node:
            return Grade.WRONG, f"names rank {failure['global_rank']} on {failure['host']}, not {case.node}"
    elif case.ranks and failure["global_rank"] not in case.ranks:
        return Grade.WRONG, f"names rank {failure['global_rank']}, not {_expected(case)}"
    elif not case.says and (not case.ranks or _VICTIM.search(verdict["summary"])):
        return Grade.WRONG, f"names rank {failure['global_rank']} by what a victim reports; right is {_expected(case)}"
    why = _unsaid(case, verdict, section)
    return (Grade.WRONG, why) if why else (Grade.RIGHT, "")


def _grade_unknown(case: Case, verdict: Mapping[str, Any], section: str) -> tuple[Grade, str]:
    """Not known. A suspect that is not an expected one sends the reader to the wrong place."""
    suspects = _suspects(verdict, section)
    right = set(case.ranks) or _ranks_of(case)
    if suspects and not suspects & right:
        return Grade.WRONG, f"not known, and sends to rank {_ranks(suspects)}, not {_expected(case)}"
    if not case.unknown_is_right:
        return Grade.HONEST, f"not known; right is {_expected(case)}"
    if right and not suspects:
        return Grade.HONEST, f"names no suspect; right is {_expected(case)}"
    if len(suspects - right) > len(suspects & right):
        return Grade.HONEST, f"names ranks {_ranks(suspects)} as suspects; right is {_expected(case)}"
    why = _unsaid(case, verdict, section)
    return (Grade.HONEST, why) if why else (Grade.RIGHT, "")


def _ranks_of(case: Case) -> set[int]:
    """The ranks on `Case.node`, whose names are node0, node1 …"""
    if case.node is None:
        return set()
    first = int(case.node.removeprefix("node")) * case.nproc
    return set(range(first, first + case.nproc))


def _suspects(verdict: Mapping[str, Any], section: str) -> set[int]:
    if verdict.get("suspects"):
        return {int(suspect["rank"]) for suspect in verdict["suspects"]}
    found = _LOOK_AT.search(f"{verdict['evidence']}\n{section}")
    ranks: set[int] = set()
    for part in re.findall(r"\d+(?:-\d+)?", found.group(1)) if found else ():
        first, _, last = part.partition("-")
        ranks.update(range(int(first), int(last or first) + 1))
    return ranks


def _unsaid(case: Case, verdict: Mapping[str, Any], section: str) -> str:
    """What the report should state and does not; empty: it states everything."""
    shown = _flat(f"{verdict['summary']}\n{section}")
    if case.says and not any(_flat(text) in shown for text in case.says):
        return f"does not state {' or '.join(map(repr, case.says))}"
    for text in case.not_says:
        if _flat(text) in _flat(verdict["summary"].partition(f" ({LOGGED_BEFORE}")[0]):
            return f"states {text!r}"
    for name, value in (("category", case.category), ("retryable", case.retryable)):
        if value is not None and verdict[name] != value:
            return f"{name} is {verdict[name]}, not {value}"
    return ""


def _flat(text: str) -> str:
    """Without what a line break, an indent or a letter's case changes."""
    return " ".join(text.split()).casefold()


def _expected(case: Case) -> str:
    if case.ranks:
        return f"rank {_ranks(case.ranks)}"
    return f"node {case.node}" if case.node else "no rank at all"


def _ranks(ranks: tuple[int, ...] | set[int]) -> str:
    return " or ".join(map(str, sorted(ranks)))
