"""A handful of the calibration catalogue: cheap ones, of each mechanism, so that CI runs the judge and the rig too.

The whole of it is a tier of its own: ``python -m tests.check --tier verdicts``.
"""

from __future__ import annotations

import pytest

from tests.verdicts.case import all_cases
from tests.verdicts.judge import Grade
from tests.verdicts.run import run_case

NAMES = (
    "wrapped-in-words-of-a-symptom",
    "sigterm-handlers-raise",
    "only-stdout",
    "argparse-unknown-option",
    "wrapper-with-tee",
    "assert-in-c",
    "interrupt-main",
    "hidden-in-a-child",
)
_CASES = {case.name: case for case in all_cases()}


@pytest.mark.parametrize("name", NAMES)
def test_the_report_is_right(name: str, start_method: str) -> None:
    judged = run_case(_CASES[name], start_method=start_method)
    assert judged.grade is Grade.RIGHT, f"{judged.confidence}: {judged.why}\n\n{judged.text}"
