"""Write a report beside the attempt that it is about. Called by the supervisor at the end of every attempt."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from hpc_elastic.base.files import write_private
from hpc_elastic.report.collect import collect_run
from hpc_elastic.report.document import Document, with_end
from hpc_elastic.report.history import RunHistory
from hpc_elastic.report.render_html import CHEAP_NODE_ROUNDS, render_html
from hpc_elastic.report.render_json import json_report
from hpc_elastic.report.render_text import render_job_log, render_text
from hpc_elastic.report.verdict import Confidence, Verdict
from hpc_elastic.run.paths import RunPaths


class ReportResult(Struct, frozen=True, kw_only=True):
    verdict: Verdict
    text: str
    """The job log's: at most 25 lines for a failure."""
    history: RunHistory | None = None
    problems: tuple[str, ...] = ()
    """Files that could not be read or written; the report is there all the same."""


def write_report(
    run_dir: Path | str,
    *,
    attempt: int,
    outcome: str,
    exit_code: int | None,
    decision: str = "",
    history: RunHistory | None = None,
) -> ReportResult:
    """Build an attempt's report from the run directory and write report.txt, report.json and report.html. Never raises.

    The page of a run of many nodes and rounds takes seconds and is not made here: ``hpc-elastic report --format html``.

    Args:
        run_dir: The run.
        attempt: The attempt that has ended.
        outcome: A value of `hpc_elastic.run.paths.Outcome`, as the caller knows it (the events may not say it yet).
        exit_code: With which the job will end; None: not known yet.
        decision: What is done about the job: ``requeue: …`` or ``end: …``.
        history: The run's, where it has been read before.
    """
    try:
        history = with_end(
            history or collect_run(run_dir), attempt=attempt, outcome=outcome, exit_code=exit_code, decision=decision
        )
        document = Document(history, attempt=attempt)
        text = render_job_log(document)
    except Exception as error:  # the job's end must not fail for want of a report
        why = f"no report could be made: {error!r}"
        text = f"the report of {os.fspath(run_dir)} could not be made: {error!r}\n"
        return ReportResult(verdict=Verdict(confidence=Confidence.NONE, evidence=why), text=text, problems=(why,))
    problems: list[str] = []
    paths = RunPaths(Path(os.path.abspath(run_dir))).attempt(attempt)
    files: list[tuple[Path, Callable[[], str]]] = [
        (paths.report_text, lambda: render_text(document, is_file=True)),
        (paths.report_json, lambda: json_report(document)),
    ]
    if sum(len(item.nodes) for part in history.attempts for item in part.rounds) <= CHEAP_NODE_ROUNDS:
        files.append((paths.report_html, lambda: render_html(document)))
    for path, render in files:
        try:
            write_private(path, render())
        except Exception as error:
            problems.append(f"could not write {path}: {error}")
    return ReportResult(verdict=document.subject.verdict, text=text, history=history, problems=tuple(problems))
