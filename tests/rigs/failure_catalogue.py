"""A case of the catalogue of failures: a run that really fails, what is told of it, and its report as a golden file."""

from __future__ import annotations

import difflib
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpc_elastic.failures.patterns import symptom_kind
from hpc_elastic.report.collect import collect_run
from hpc_elastic.report.document import Document
from hpc_elastic.report.render_text import DEFAULT_LINES, render_text
from hpc_elastic.report.wording import brief
from tests.rigs.golden_report import normalise
from tests.rigs.local_run import LocalRun

GOLDEN = Path(__file__).resolve().parent.parent / "catalogue" / "golden"
MEET = 'tell("here"); others_in_round()\n'
"""A script's beginning: nobody fails while others still start."""
FIRST_SCREEN = 12
"""The cause, its rank and its host stand within so many lines of a report's beginning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What a report has to say of a failure. Volatile parts as `golden_report.normalise` writes them."""

    exit_code: int
    """Of the run."""
    cause: str
    """The headline: what happened."""
    rank: int | None
    """Of the root cause; None where it is a node."""
    host: str
    failure_class: str | None
    """None where the cause is a node."""
    category: str
    retryable: bool
    confidence: str
    evidence: str
    """Why this one."""
    kind: str
    """Why it is of its class, as the report's ``kind`` says it; empty where the cause is a node."""
    consequences: Mapping[str, str] = field(default_factory=dict)
    """What the round's consequences tell (`symptom_kind`) → the ranks that do. Their words are chance: see
    `golden_report`."""


class Catalogue:
    """Runs a test's case and compares what came of it."""

    def __init__(self, *, update: bool, start_method: str = "spawn") -> None:
        # Of one length, whoever runs the tests and wherever: lines are cut at their length.
        self.folder = Path(tempfile.mkdtemp(prefix="hpc-cat-", dir="/tmp"))
        self._update = update
        self._start_method = start_method

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def run(self, script: str, *, options: Sequence[str] = (), **settings: Any) -> LocalRun:
        """A run that is given up at its first failure, unless `options` say otherwise."""
        settings.setdefault("start_method", self._start_method)
        return LocalRun(self.folder, script, options=["--max-restarts", "0", *options], **settings)

    def told(self, run: LocalRun) -> Told:
        report = run.report()
        verdict = report["verdict"]
        failure, lost = verdict["failure"], verdict["lost_node"]
        cause = verdict["summary"]
        if failure:
            cause = cause.removeprefix(f"rank {failure['global_rank']} on {failure['host']}: ")
        return Told(
            exit_code=run.finish(),
            cause=self.normalise(cause),
            rank=failure["global_rank"] if failure else None,
            host=failure["host"] if failure else lost["host"] if lost else "",
            failure_class=failure["failure_class"] if failure else None,
            category=verdict["category"],
            retryable=verdict["retryable"],
            confidence=verdict["confidence"],
            evidence=self.normalise(verdict["evidence"]),
            kind=self.normalise(failure["reason"]) if failure else "",
            consequences=_consequences(report),
        )

    def normalise(self, text: str) -> str:
        return normalise(text, folder=self.folder)

    def check(self, run: LocalRun, name: str, expected: Told) -> None:
        """Compare what was told, then the report as the command prints it with ``golden/<name>.txt``."""
        told = self.told(run)
        text = shown_report(run)
        assert {event["started_fresh"] for event in run.events("workers_started")} <= {""}
        assert told == expected, f"\n{told}\nis told in place of\n{expected}\n\n{text}"
        kept = run.attempt().report_text.read_text()
        assert [line for line in text.splitlines() if line not in kept and not line.endswith(" ...")] == []
        assert len(text.splitlines()) <= DEFAULT_LINES
        top = "\n".join(text.splitlines()[:FIRST_SCREEN])
        assert brief(run.report()["verdict"]["summary"]).partition(f"{expected.host}: ")[2][:60] in top
        assert expected.host in top
        found, path = self.normalise(text), GOLDEN / f"{name}.txt"
        if self._update:
            path.write_text(found)
            return
        golden = path.read_text() if path.exists() else ""
        difference = difflib.unified_diff(golden.splitlines(), found.splitlines(), str(path), "this run", lineterm="")
        assert found == golden, "\n".join(["read it, then pytest tests/catalogue --update-golden:", *difference])


def shown_report(run: LocalRun) -> str:
    """What `hpc-elastic report` prints; report.txt may have more of a long cause."""
    return render_text(Document(collect_run(run.paths.root), attempt=run.attempt().number))


def _consequences(report: Mapping[str, Any]) -> dict[str, str]:
    verdict = report["verdict"]
    (attempt,) = (part for part in report["attempts"] if part["number"] == verdict["attempt"])
    (part,) = (part for part in attempt["rounds"] if part["index"] == verdict["round"])
    folds = [fold for fold in part["failures"] if fold["first"]["failure_class"] == "symptom"]
    found = {symptom_kind(fold["first"]["reason"]): fold["ranks"] for fold in folds}
    assert len(found) == len(folds), f"two lines tell the same: {folds}"
    return found
