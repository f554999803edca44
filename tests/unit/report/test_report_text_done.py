"""What was done about a failure, as the text report tells it: once, and not the cause again."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_elastic.report.collect import collect_run
from hpc_elastic.report.render_text import render_text
from tests.rigs.run_builder import RunBuilder, make_failure

_CAUSE = "rank 2: ValueError: bad batch"


@pytest.mark.parametrize(
    ("reason", "shown"),
    [
        (f"restart 1 of 3 (2 left) after: {_CAUSE}", "  restart 1 of 3 (2 left) -> round 1\n"),
        ("restart 1 of 3 (2 left) after: rank 2: ValueError: bad ba...", "  restart 1 of 3 (2 left) -> round 1\n"),
        (f"restart 1 of 3: {_CAUSE} and more", f"  restart 1 of 3: {_CAUSE} and more -> round 1\n"),
        ("restart 1 of 3: rank 1: gloo/a.cc", "  restart 1 of 3: rank 1: gloo/a.cc -> round 1\n"),
        ("restart 1 of 3: [/x/pair.cc:538] closed", "  restart 1 of 3: closed -> round 1\n"),
    ],
)
def test_the_reason_without_the_cause_that_stands_above(tmp_path: Path, reason: str, shown: str) -> None:
    builder = RunBuilder(tmp_path / "run")
    builder.attempt(0)
    builder.round(0, 0, at=1)
    builder.fail(make_failure(2, at=15, exception="ValueError: bad batch"))
    builder.round(0, 1, at=20, reason=reason)
    assert shown in render_text(collect_run(builder.root))
