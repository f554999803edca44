"""The picture ranks x last collectives, in the text, in report.json and on the page; its browser test is elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_elastic.failures.flight_grid import CallState, draw_grids
from hpc_elastic.report.collect import collect_run
from hpc_elastic.report.render_html import render_html
from hpc_elastic.report.render_json import render_json
from hpc_elastic.report.render_text import render_text
from tests.browser.sample_runs import collectives_run
from tests.unit.failures.test_flight_recorder import real

WHAT = "all_reduce (4.0 MiB bf16)"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return collectives_run(tmp_path / "run").root


def test_the_text_has_a_line_for_the_ranks_that_did_the_same(root: Path) -> None:
    text = render_text(collect_run(root))
    _, _, found = text.partition("Last collectives, by torch's flight recorder:\n")
    assert found.splitlines()[:5] == [
        "  group default_pg (nccl):",
        f"    rank 0: completed #39 {WHAT}, in #40 {WHAT}",
        f"    rank 1: completed #39 {WHAT}, called broadcast as #40",
        f"    rank 2: completed #39 {WHAT}, never entered #40 {WHAT}",
        "    rank 3: not known",
    ]


def test_report_json_has_the_picture(root: Path) -> None:
    document = render_json(collect_run(root))
    (grid,) = document["attempts"][0]["rounds"][0]["collectives"]
    assert (grid["group"], grid["numbers"]) == ("default_pg", list(range(33, 41)))
    assert grid["calls"] == [*[WHAT] * 5, "barrier", WHAT, WHAT]
    assert [(row["ranks"], row["states"][-1], row["called"]) for row in grid["rows"]] == [
        ("0", "waits", ""),
        ("1", "other", "broadcast"),
        ("2", "never_entered", ""),
        ("3", "not_known", ""),
    ]


def test_the_page_says_each_cell_in_words_too(root: Path) -> None:
    page = render_html(collect_run(root))
    assert f'title="never entered: #40 {WHAT}"' in page
    assert "#33 to #37 all_reduce" in page


def test_what_torch_wrote_is_drawn_for_the_group_that_waits() -> None:
    (grid,) = draw_grids(real("gloo_2.13_never"))
    assert (grid.group, grid.numbers, grid.calls[-2:]) == (
        "default_pg",
        tuple(range(1, 7)),
        ("barrier", "all_reduce (28 B fp32)"),
    )
    assert [(row.ranks, row.states[-1]) for row in grid.rows] == [
        ((2,), CallState.NEVER_ENTERED),
        ((0, 1, 3), CallState.WAITS),
    ]
    (grid,) = draw_grids(real("gloo_2.13_other"))
    assert [row.called for row in grid.rows if CallState.OTHER in row.states] == ["broadcast (28 B fp32)"]
    assert [row.ranks for row in grid.rows if CallState.WAITS in row.states] == [(0, 1, 3)]
    assert draw_grids([]) == ()
