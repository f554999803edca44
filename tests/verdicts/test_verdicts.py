"""The calibration catalogue as a whole: how often the report is right, and how often it is wrong and certain.

Run before a release: ``python -m tests.check --tier verdicts``.
"""

from __future__ import annotations

import os

import pytest

from tests.verdicts.case import all_cases
from tests.verdicts.judge import Grade
from tests.verdicts.run import complaints, high_and_wrong, run_all, table

LEAST_RIGHT = 0.95
MOST_HIGH_AND_WRONG = 0.01
_JOBS = 2


@pytest.mark.torch
@pytest.mark.skipif(
    not os.environ.get("HPC_ELASTIC_REQUIRE_VERDICTS"),
    reason="takes many minutes: python -m tests.check --tier verdicts",
)
def test_the_report_is_right(capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print()
        results = run_all(
            all_cases(), jobs=_JOBS, done=lambda one: print(f"{one.grade.value:6} {one.name}", flush=True)
        )
        print("\n".join(["", *table(results), "", *complaints(results)]), flush=True)
    right = sum(one.grade is Grade.RIGHT for one in results)
    certain = [one for one in results if one.confidence == "high"]
    assert right >= LEAST_RIGHT * len(results), f"{right} of {len(results)} are right"
    wrong = high_and_wrong(results)
    assert len(wrong) < MOST_HIGH_AND_WRONG * len(certain), [one.name for one in wrong]
