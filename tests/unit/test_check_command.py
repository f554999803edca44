"""The check command counts right: what it says last is what CI believes."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
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


def test_a_tier_over_its_budget_fails_the_run_and_counts_as_no_test() -> None:
    slow = check.finish(Outcome(name="unit", passed=1, budget=60.0), time.monotonic() - 61)
    assert "over its budget: 61 of 60 s" in slow.notes
    assert check.exit_code([slow]) == 1
    assert check.summary([slow]).splitlines()[-1] == "1 passed, 0 failed", "as pytest counts"
    for outcome in (Outcome(name="unit", passed=1, budget=70.0), Outcome(name="unit", passed=1)):
        assert check.exit_code([check.finish(outcome, time.monotonic() - 61)]) == 0


@pytest.mark.parametrize(("ci", "code"), [("", 0), ("true", 1)])
def test_only_ci_holds_a_tier_to_its_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ci: str, code: int
) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_slow.py").write_text("import time\ndef test_slow():\n    time.sleep(0.2)\n")
    monkeypatch.setattr(check, "ROOT", tmp_path)
    monkeypatch.setattr(check, "TIERS", (Tier(name="unit", folders=("tests",), budget=0.01),))
    monkeypatch.setenv("CI", ci)
    assert check.main(["--tier", "unit"]) == code
    assert ("over the budget" in capsys.readouterr().out) == bool(code)


def test_the_unit_tier_needs_no_packages_and_others_say_what_they_install_and_do_it_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert {tier.name: tier.packages for tier in check.TIERS}["unit"] == ()
    there: set[str] = {"a"}
    calls = []

    def install(packages: Sequence[str]) -> None:
        calls.append(tuple(packages))
        if "none" in packages:
            raise subprocess.CalledProcessError(100, "apt-get")
        there.update(packages)

    monkeypatch.setattr(check.debian_packages, "is_installed", there.__contains__)
    monkeypatch.setattr(check.shutil, "which", lambda name: name)
    assert check.install_packages(["b", "a", "b"], install=install, is_root=False) == ["b"]
    assert not calls
    assert check.install_packages(["b", "none", "a"], install=install, is_root=True) == ["none"]
    assert calls == [("b", "none"), ("b",), ("none",)]
    assert "missing Debian packages that these tests need: b none\n" in capsys.readouterr().out
    assert check.install_packages(["b", "a"], install=install, is_root=True) == []
    assert len(calls) == 3
    assert capsys.readouterr().out == ""


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
