"""rehearsal.html in a real browser: the look of report.html, and no table that is cut."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_elastic.rehearsal.journal import LossSource
from hpc_elastic.rehearsal.judge import (
    NOTICE,
    SAVING_KILLED,
    WORKER_KILLED,
    InjectionSeen,
    LossComparison,
    PlannedFault,
    RehearsalResult,
    Rehearsed,
    as_page,
    attribute_failure,
)
from hpc_elastic.rehearsal.live_run import RehearsalOptions
from tests.browser.chromium import Browser
from tests.rigs.specs import make_spec

LONG = "while checkpoints/step_00000350/model-00001-of-00002.safetensors was written"


def outcome(folder: Path) -> RehearsalResult:
    facts = [(WORKER_KILLED, "rank 1 on node1", None), (SAVING_KILLED, LONG, None), (NOTICE, "", False)]
    injections = tuple(
        InjectionSeen(
            run=1,
            fault=PlannedFault(number=number, kind=kind),
            what=what,
            at=10.0 * number,
            before=(0, number),
            trained_at=None if kind == SAVING_KILLED else 10.0 * number + 3.25,
            resumed=None if kind == SAVING_KILLED else (41,),
            redone=7,
            used_notice=used,
            why_stuck=f"the run ended with exit code 93: EOFError; hpc-elastic report {folder}/{'x' * 60}",
        )
        for number, (kind, what, used) in enumerate(facts, 1)
    )
    found = Rehearsed(comparison=LossComparison(compared=120), injections=injections, first=(1,), steps=60)
    options = RehearsalOptions(
        spec=make_spec(), folder=folder, kinds=(), tolerance=0.001, source=LossSource(), patience=180.0
    )
    return RehearsalResult(
        options=options, found=found, findings=attribute_failure(found), skipped={"disk-full": "a disk"}, seconds=61.0
    )


@pytest.mark.parametrize("width", [400, 800, 1400])
def test_the_page_has_the_reports_look_and_nothing_in_it_is_cut(browser: Browser, tmp_path: Path, width: int) -> None:
    page = tmp_path / "rehearsal.html"
    page.write_text(as_page(outcome(tmp_path)))
    browser.size(width, 1400)
    browser.log()
    browser.open(page)
    browser.screenshot(tmp_path / f"rehearsal-{width}.png")
    found = browser.run(
        """const cut = [...document.querySelectorAll('main *')].filter(e => e.scrollWidth > e.clientWidth + 1
             && getComputedStyle(e).display !== 'inline');
           return {page: document.documentElement.scrollWidth, cut: cut.map(e => e.tagName),
                   rows: document.querySelectorAll('tr').length, cards: document.querySelectorAll('.card').length,
                   chip: document.querySelector('.chip.bad').textContent,
                   label: getComputedStyle(document.querySelector('td[data-name="hit"]'), ':before').content};"""
    )
    assert found["page"] <= width
    assert found["cut"] == []
    assert (found["rows"], found["chip"], found["cards"]) == (4, "guilty", 2)
    assert ("attr" in found["label"] or "hit" in found["label"]) is (width == 400), (
        "the columns' names, where no head is"
    )
    assert [entry for entry in browser.log() if "Content Security Policy" in str(entry)] == []
