"""The check command counts right: what it says last is what CI believes."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests import check
from tests.check import Cases, Outcome, Tier
from tests.conftest import LONGEST

XML = """<?xml version="1.0" encoding="utf-8"?>
<testsuites><testsuite name="pytest" errors="1" failures="1" skipped="1" tests="4" time="0.1">
<testcase classname="tests.unit.test_a" name="test_ok" time="0.001" />
<testcase classname="tests.unit.test_a" name="test_bad" time="0.001"><failure message="m">text</failure></testcase>
<testcase classname="tests.unit.test_a" name="test_torn[x]" time="0.001"><error message="m">text</error></testcase>
<testcase classname="tests.unit.test_a" name="test_left_out" time="0.000"><skipped message="why" /></testcase>
</testsuite></testsuites>
"""


def test_a_junit_file_is_counted_and_what_failed_is_named(tmp_path: Path) -> None:
    (tmp_path / "junit.xml").write_text(XML)
    outcome = Outcome(name="unit")
    check.count(check.read_cases(tmp_path / "junit.xml"), Cases(), outcome)
    assert (outcome.passed, outcome.failed, outcome.skipped) == (1, 2, 1)
    assert outcome.notes == ["tests.unit.test_a::test_bad", "tests.unit.test_a::test_torn[x]", "1 skipped: why"]


@pytest.mark.parametrize("text", [None, "", XML[:200]])
def test_a_missing_or_torn_junit_file_has_no_tests(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "junit.xml").write_text(text)
    assert check.read_cases(tmp_path / "junit.xml") == Cases()


def test_a_test_that_fails_passes_alone_or_fails_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three real runs of pytest in one tier: a test that passes the second time, one that never does, one that does."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_mixed.py").write_text(
        "from pathlib import Path\n"
        "def test_once_late():\n"
        "    seen = Path('seen')\n"
        "    there = seen.exists()\n"
        "    seen.touch()\n"
        "    assert there\n"
        "def test_wrong():\n"
        "    assert False\n"
        "def test_right():\n"
        "    pass\n"
    )
    monkeypatch.setattr(check, "ROOT", tmp_path)
    outcome = Outcome(name="small", budget=60.0)
    check.run_tier(Tier(name="small", folders=("tests",), budget=60.0), outcome, long=False)
    assert (outcome.passed, outcome.failed) == (2, 1)
    assert outcome.notes == ["tests.test_mixed::test_wrong"]
    assert [name.split(" ")[0] for name in outcome.unsteady] == ["tests.test_mixed::test_once_late"]


def test_more_than_three_unsteady_tests_fail_the_run() -> None:
    some, many = Outcome(name="unit", passed=9, unsteady=["a", "b", "c"]), Outcome(name="slurm", unsteady=["d (1 s)"])
    lines = check.summary([some]).splitlines()
    assert lines[-5:] == [
        "unsteady, passed only when run once more, alone (to be mended):",
        *("    a", "    b", "    c"),
        "9 passed, 0 failed",
    ]
    assert check.exit_code([some]) == 0
    assert check.summary([some, many]).splitlines()[-1] == "9 passed, 1 failed"
    assert check.exit_code([some, many]) == 1


def test_the_last_line_is_the_sum() -> None:
    outcomes = [Outcome(name="unit", passed=3, failed=1), Outcome(name="slurm", passed=2, skipped=4)]
    assert check.summary(outcomes).splitlines()[-1] == "5 passed, 1 failed, 4 skipped"
    assert check.summary(outcomes[:1]).splitlines()[-1] == "3 passed, 1 failed"


def test_a_tier_over_its_budget_fails_and_one_within_does_not() -> None:
    slow = check.finish(Outcome(name="unit", passed=1, budget=60.0), time.monotonic() - 61)
    assert slow.failed == 1
    assert "over its budget: 61 of 60 s" in slow.notes
    assert check.finish(Outcome(name="unit", passed=1, budget=60.0), time.monotonic() - 59).failed == 0
    assert check.finish(Outcome(name="unit", passed=1), time.monotonic() - 9999).failed == 0


def test_where_slurm_is_required_a_tier_that_ran_nothing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPC_ELASTIC_REQUIRE_SLURM", "1")
    assert check.finish(Outcome(name="slurm", skipped=9), time.monotonic()).failed == 1
    assert check.finish(Outcome(name="slurm", passed=1), time.monotonic()).failed == 0
    monkeypatch.delenv("HPC_ELASTIC_REQUIRE_SLURM")
    assert check.finish(Outcome(name="slurm", skipped=9), time.monotonic()).failed == 0


def test_shell_scripts_of_the_project_are_found() -> None:
    names = {str(path.relative_to(check.ROOT)) for path in check.shell_scripts()}
    assert {".ci/run", "tests/run.sh", "docs/examples/setup-venv.sh"} <= names


@pytest.mark.parametrize("name", LONGEST)
def test_what_is_to_begin_first_is_there(name: str) -> None:
    path, _, function = name.partition("::")
    assert f"def {function}" in (check.ROOT / "tests" / path).read_text()
