"""The one check: format, lint, types, import contracts, shell scripts, then the tests tier by tier.

::

    python -m tests.check                       everything
    python -m tests.check --tier unit           one tier (may be repeated)
    python -m tests.check --no-slurm            all but the real-Slurm tier
    python -m tests.check --long                the minutes-long tests too; no budgets
    python -m tests.check --tier frameworks     accelerate, Lightning, transformers, which it downloads; not in all
    python -m tests.check --tier gpu --record FILE      what needs an NVIDIA GPU, and a table of what it saw; neither
    python -m tests.check --tier verdicts       how often the report is right, on real failures; before a release
    python -m tests.check --bench               short benchmarks at the end (a crash fails, a missed figure is printed)

The tiers: unit (pure, no process), store (one suite per protocol, and models), faults (real processes and signals),
catalogue (one case per kind of failure, each really failing under both start methods, its report compared with a golden
file that a person has read, and what is printed of recorded runs: ``pytest tests/catalogue --update-golden`` writes all
anew), slurm (a real one),
slurm-next (what is marked ``any_release`` on a newer Debian's Slurm: only where ``--tier`` names it;
HPC_ELASTIC_SLURM_RELEASE may name another release), security (attacks by another user of the same machine; root makes
two for the while), docs (commands, links, pages in a browser), packaging (wheel, sdist, recipes).

What the tiers that run need of Debian's packages is named first and installed once, as root; the unit tier needs none.
Each tier has a time budget for two cores. In CI (``CI=true``) a tier that takes longer is stopped, and the run fails;
elsewhere the summary shows both times, and no more. Tests that failed run once more, alone; one
that then passes is unsteady. The summary lists unsteady tests with their times, and more than three fail the run: an
unsteady test is mended, or made to wait for its condition, in the next change. The last line is ``N passed, N failed[,
N skipped]`` over everything that ran, where each check counts as one, as pytest counts; the exit code is 1 if anything
failed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.browser import chromium
from tests.rigs import debian_packages
from tests.rigs.network_mounts import prerequisites as network_mounts
from tests.rigs.slurm_cluster import prerequisites as slurm_cluster

ROOT = Path(__file__).resolve().parent.parent
MOST_UNSTEADY = 3
"""More tests than this that pass only alone fail the run."""
STOP_FACTOR = 1.25
"""A tier is interrupted at so many times its budget: long enough to finish and say by how much it was over."""


BY_TESTS = ("--dist=load", "--maxschedchunk=1")
"""Each process takes the next test: where a conftest has the longest come first, none is left over at the end."""


@dataclass(frozen=True, kw_only=True)
class Tier:
    """Folders of tests that share a time budget."""

    name: str
    folders: tuple[str, ...]
    budget: float
    """Seconds on two cores."""
    packages: tuple[str, ...] = ()
    """Of Debian's: what cannot run without them is skipped."""
    processes: int = 1
    """pytest processes that share the tier's tests: for tests that mostly wait, on processes and timeouts."""
    optional: bool = False
    """Only where ``--tier`` names it: it downloads, or takes long. Its tests find HPC_ELASTIC_REQUIRE_<NAME> set."""
    sharing: tuple[str, ...] = ("--dist=loadfile", "--no-loadscope-reorder")
    """How they share them, in pytest-xdist's words: by files in order, or `BY_TESTS`."""
    environment: tuple[tuple[str, str], ...] = ()
    """Variables that its tests get where they are not set."""


_MOUNTS = ("fuse3", *network_mounts.PACKAGES)
_SLURM = slurm_cluster.ALL_PACKAGES
_CONTAINERS = ("charliecloud", "podman", "runc")
CHECKS_NEED = ("shellcheck",)
TIERS = (
    Tier(name="unit", folders=("tests/unit",), budget=140, processes=2),
    Tier(
        name="store",
        folders=("tests/contract", "tests/model"),
        budget=240,
        packages=_MOUNTS,
        processes=3,
        sharing=("--dist=worksteal",),
    ),
    Tier(
        name="faults",
        folders=("tests/integration",),
        budget=1200,
        packages=(*_MOUNTS, *_CONTAINERS, *_SLURM),
        processes=4,
    ),
    Tier(name="catalogue", folders=("tests/catalogue",), budget=200, processes=2),
    Tier(
        name="slurm",
        folders=("tests/slurm",),
        budget=750,
        packages=(*_SLURM, *_MOUNTS, *_CONTAINERS),
        processes=4,
        sharing=BY_TESTS,
    ),
    Tier(
        name="slurm-next",
        folders=("tests/slurm",),
        budget=900,
        packages=(*_SLURM, *_MOUNTS, *_CONTAINERS),
        optional=True,
        environment=(("HPC_ELASTIC_SLURM_RELEASE", "trixie"), ("HPC_ELASTIC_REQUIRE_SLURM", "1")),
    ),
    Tier(name="security", folders=("tests/security",), budget=110, packages=_SLURM),
    Tier(name="docs", folders=("tests/docs", "tests/browser"), budget=150, packages=chromium.PACKAGES, processes=2),
    Tier(name="packaging", folders=("tests/packaging",), budget=150),
    Tier(name="frameworks", folders=("tests/frameworks",), budget=1500, packages=_SLURM, optional=True),
    Tier(name="gpu", folders=("tests/gpu",), budget=470, optional=True),
    Tier(name="verdicts", folders=("tests/verdicts",), budget=2400, optional=True),
)
BENCH_BUDGET = 520.0


@dataclass(kw_only=True)
class Outcome:
    """What one tier, or the group of checks, came to."""

    name: str
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    budget: float | None = None
    is_late: bool = False
    """Over its budget, or stopped for that, where the budget is held."""
    notes: list[str] = field(default_factory=list)
    unsteady: list[str] = field(default_factory=list)
    """Tests that failed, and passed when they ran once more, alone; with their times."""

    def fail(self, note: str) -> None:
        self.failed += 1
        self.notes.append(note)

    def skip(self, note: str) -> None:
        self.skipped += 1
        self.notes.append(note)


def install_packages(wanted: Iterable[str], *, install: Callable[[Sequence[str]], None], is_root: bool) -> list[str]:
    """Say which of these Debian packages are missing, and install them where we may. Returns those still missing."""
    if shutil.which("dpkg-query") is None:
        return []
    missing = sorted(package for package in set(wanted) if not debian_packages.is_installed(package))
    if not missing:
        return []
    print(f"missing Debian packages that these tests need: {' '.join(missing)}", flush=True)
    if not is_root:
        print("not root: what needs them is skipped", flush=True)
        return missing
    print("installing them with apt-get, once", flush=True)
    failed = []
    try:
        install(missing)
    except (OSError, subprocess.CalledProcessError):
        for package in missing:  # one that this release does not have must not keep out the others
            try:
                install([package])
            except (OSError, subprocess.CalledProcessError) as error:
                print(f"{package} could not be installed: {error}; what needs it is skipped", flush=True)
                failed.append(package)
    return failed


def shell_scripts() -> list[Path]:
    """The shell scripts of this project: by ending, and .ci/run."""
    found = [ROOT / ".ci" / "run", *(ROOT / "tests").rglob("*.sh"), *(ROOT / "docs").rglob("*.sh")]
    return sorted(path for path in found if path.is_file() and "data" not in path.relative_to(ROOT).parts)


def run_checks(outcome: Outcome) -> None:
    """Everything that reads the code without running it."""
    python = sys.executable
    # Not by $PATH: the tools of this virtual environment, also when it is not activated.
    lint_imports = str(Path(python).with_name("lint-imports"))
    checks: list[tuple[str, list[str]]] = [
        ("ruff format", [python, "-m", "ruff", "format", "--check", "."]),
        ("ruff check", [python, "-m", "ruff", "check", "."]),
        ("mypy", [python, "-m", "mypy"]),
        ("import contracts", [lint_imports]),
    ]
    scripts = [str(path.relative_to(ROOT)) for path in shell_scripts()]
    checks.append(("bash -n", ["bash", "-n", *scripts]))
    if shutil.which("shellcheck"):
        checks.append(("shellcheck", ["shellcheck", "-x", *scripts]))
    elif os.environ.get("CI"):
        outcome.fail("shellcheck: not installed")
    else:
        outcome.skip("shellcheck: not installed (apt-get install shellcheck)")
    for name, argv in checks:
        started = time.monotonic()
        try:
            result = subprocess.run(
                argv, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            problem = None if result.returncode == 0 else f"exit {result.returncode}"
            output = result.stdout
        except OSError as error:
            problem, output = str(error), ""
        print(f"{name:20} {problem or 'ok'} ({time.monotonic() - started:.1f} s)", flush=True)
        if problem:
            print(output, flush=True)
            outcome.fail(f"{name}: {problem}")
        else:
            outcome.passed += 1


def run_limited(
    argv: Sequence[str], seconds: float | None, *, environment: Mapping[str, str] | None = None
) -> tuple[int, bool]:
    """Run a command with our output; interrupt it, then kill it, when `seconds` have passed.

    Args:
        argv: The command.
        seconds: None: it may take as long as it likes.
        environment: Variables for it, where ours has not set them.

    Returns:
        Its exit code, and whether it was stopped.
    """
    variables = {**(environment or {}), **os.environ}
    process = subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.DEVNULL, env=variables)
    try:
        return process.wait(seconds), False
    except subprocess.TimeoutExpired:
        # As Ctrl-C: pytest says where it was and runs the fixtures' clean-up.
        process.send_signal(signal.SIGINT)
        try:
            return process.wait(60), True
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait(), True
    except KeyboardInterrupt:
        process.wait()
        raise


def run_tier(tier: Tier, outcome: Outcome, *, long: bool, arguments: Sequence[str] = ()) -> None:
    """Run one tier's tests with pytest, given further arguments, and what failed once more, alone; count them.

    It is stopped some time after the outcome's budget, where that has one.
    """
    folders = [name for name in tier.folders if any((ROOT / name).rglob("test_*.py"))]
    if not folders:
        outcome.notes.append("no tests yet")
        return
    limit = None if outcome.budget is None else outcome.budget * STOP_FACTOR
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hpc-elastic-check-") as temporary:
        xml, again_xml = Path(temporary) / "junit.xml", Path(temporary) / "again.xml"
        common = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            *folders,
            *arguments,
            "-rfE",
            f"--override-ini=cache_dir={temporary}",
        ]
        if not long:
            common += ["-m", "not slow"]
        shared = ["-n", str(tier.processes), *tier.sharing] if tier.processes > 1 else []
        argv = [*common, f"--junitxml={xml}", "--durations=12", *shared]
        code, stopped = run_limited(argv, limit, environment=dict(tier.environment))
        cases = read_cases(xml)
        outcome.seconds = time.monotonic() - started
        again = Cases()
        if cases.failed and not stopped:
            print(f"\n-- {tier.name}: what failed, once more and alone --", flush=True)
            argv = [*common, f"--junitxml={again_xml}", "--last-failed", "--last-failed-no-failures=none"]
            run_limited([*argv, f"--maxfail={MOST_UNSTEADY}"], limit, environment=dict(tier.environment))
            again = read_cases(again_xml)
    count(cases, again, outcome)
    if stopped:
        outcome.is_late = True
        outcome.notes.append(f"stopped after {limit:.0f} s")
    elif code == 5:
        outcome.notes.append("no tests yet")
    elif code != 0 and not cases.failed:
        outcome.fail(f"pytest ended with {code}")


@dataclass(kw_only=True)
class Cases:
    """The tests of a JUnit file."""

    passed: dict[str, float] = field(default_factory=dict)
    """Name → seconds."""
    failed: dict[str, float] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    """The reasons."""


def read_cases(xml: Path) -> Cases:
    """Read a JUnit file; one that is missing or torn has no tests: pytest's exit code then says what happened."""
    cases = Cases()
    try:
        root = ElementTree.parse(xml).getroot()
    except (OSError, ElementTree.ParseError):
        return cases
    for case in root.iter("testcase"):
        kinds = {child.tag for child in case}
        name, seconds = f"{case.get('classname')}::{case.get('name')}", float(case.get("time") or 0.0)
        if kinds & {"failure", "error"}:
            cases.failed[name] = seconds
        elif "skipped" in kinds:
            cases.skipped += [child.get("message", "") for child in case if child.tag == "skipped"]
        else:
            cases.passed[name] = seconds
    return cases


def count(cases: Cases, again: Cases, outcome: Outcome) -> None:
    """Add what ran to an outcome: how much, the names of what failed, the reasons of what was skipped.

    Args:
        cases: The tier's tests.
        again: What failed of them, run once more.
        outcome: What the figures are added to.
    """
    outcome.passed += len(cases.passed.keys() - cases.failed.keys())  # a test that ends and is then torn down has two
    for name, seconds in cases.failed.items():
        if name in again.passed and name not in again.failed:
            outcome.passed += 1
            outcome.unsteady.append(
                f"{name} (failed after {seconds:.1f} s; alone it passed in {again.passed[name]:.1f} s)"
            )
        else:
            outcome.fail(name)
    outcome.skipped += len(cases.skipped)
    outcome.notes += [f"{number} skipped: {reason}" for reason, number in Counter(cases.skipped).most_common()]


def run_bench(outcome: Outcome) -> None:
    """The benchmarks print their own figures; only a crash, or endless running, fails."""
    if not (ROOT / "tests" / "bench" / "run.py").is_file():
        outcome.notes.append("no benchmarks yet")
        return
    code, stopped = run_limited([sys.executable, "-m", "tests.bench.run", "--quick"], BENCH_BUDGET)
    if stopped:
        outcome.fail(f"stopped after {BENCH_BUDGET:.0f} s")
    elif code:
        outcome.fail(f"ended with {code}")
    else:
        outcome.passed += 1


def finish(outcome: Outcome, started: float) -> Outcome:
    """Note the time, where a tier has not noted that of its first run, and what took longer than its budget."""
    outcome.seconds = outcome.seconds or time.monotonic() - started
    if outcome.budget is not None and outcome.seconds > outcome.budget:
        outcome.is_late = True
        outcome.notes.append(f"over its budget: {outcome.seconds:.0f} of {outcome.budget:.0f} s")
    if outcome.name == "slurm" and os.environ.get("HPC_ELASTIC_REQUIRE_SLURM") and not outcome.passed:
        outcome.fail("HPC_ELASTIC_REQUIRE_SLURM is set, and no test ran on a real Slurm")
    return outcome


def summary(outcomes: Sequence[Outcome]) -> str:
    """The table, the unsteady tests, and the line that is read by machines."""
    lines = ["", f"{'tier':10}{'passed':>8}{'failed':>8}{'skipped':>9}{'seconds':>9}{'budget':>8}"]
    for o in outcomes:
        budget = "-" if o.budget is None else f"{o.budget:.0f}"
        lines.append(f"{o.name:10}{o.passed:8}{o.failed:8}{o.skipped:9}{o.seconds:9.1f}{budget:>8}")
        lines += [f"    {note}" for note in o.notes]
    passed, failed, skipped = (sum(getattr(o, key) for o in outcomes) for key in ("passed", "failed", "skipped"))
    total = sum(o.seconds for o in outcomes)
    unsteady = [name for o in outcomes for name in o.unsteady]
    if len(unsteady) > MOST_UNSTEADY:
        failed += 1
    lines.append(f"{'all':10}{passed:8}{failed:8}{skipped:9}{total:9.1f}")
    if late := [o.name for o in outcomes if o.is_late]:
        lines.append(f"over the budget, which fails the run in CI: {', '.join(late)}")
    if unsteady:
        verdict = f"more than {MOST_UNSTEADY}, which fails the run" if len(unsteady) > MOST_UNSTEADY else "to be mended"
        lines.append(f"unsteady, passed only when run once more, alone ({verdict}):")
        lines += [f"    {name}" for name in unsteady]
    lines.append(f"{passed} passed, {failed} failed" + (f", {skipped} skipped" if skipped else ""))
    return "\n".join(lines)


def exit_code(outcomes: Sequence[Outcome]) -> int:
    """1 where anything failed or was late, or too many tests are unsteady."""
    unsteady = sum(len(outcome.unsteady) for outcome in outcomes)
    return int(unsteady > MOST_UNSTEADY or any(outcome.failed or outcome.is_late for outcome in outcomes))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.check", description="Check everything; see tests/check.py.")
    names = ["checks", *(tier.name for tier in TIERS)]
    parser.add_argument("--tier", action="append", choices=names, help="only this one; may be repeated")
    parser.add_argument("--no-slurm", action="store_true", help="leave out the tier that needs a real Slurm")
    parser.add_argument("--long", action="store_true", help="also tests marked slow; no budgets")
    parser.add_argument("--bench", action="store_true", help="run the benchmarks at the end")
    parser.add_argument("--record", type=Path, metavar="FILE", help="with --tier gpu: write the table of what it saw")
    options = parser.parse_args(argv)
    if options.record and "gpu" not in (options.tier or ()):
        parser.error("--record: only --tier gpu has something to record")
    # Started in the background (`… &`, nohup, some CI) we inherit an ignored SIGINT, and so would pytest and all tests.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    wanted = set(options.tier or ["checks", *(tier.name for tier in TIERS if not tier.optional)])
    if options.no_slurm:
        wanted.discard("slurm")

    holds = bool(os.environ.get("CI")) and not options.long
    needed = [package for tier in TIERS if tier.name in wanted for package in tier.packages]
    needed += CHECKS_NEED if "checks" in wanted else ()
    install_packages(needed, install=debian_packages.install, is_root=os.geteuid() == 0)

    outcomes: list[Outcome] = []
    if "checks" in wanted:
        started, outcome = time.monotonic(), Outcome(name="checks")
        run_checks(outcome)
        outcomes.append(finish(outcome, started))
    for tier in TIERS:
        if tier.name not in wanted:
            continue
        print(f"\n== {tier.name}: {' '.join(tier.folders)}, budget {tier.budget:.0f} s ==", flush=True)
        if tier.optional:
            os.environ[f"HPC_ELASTIC_REQUIRE_{tier.name.upper().replace('-', '_')}"] = "1"
        started, outcome = time.monotonic(), Outcome(name=tier.name, budget=tier.budget if holds else None)
        record = (f"--gpu-record={options.record.absolute()}",) if options.record and tier.name == "gpu" else ()
        run_tier(tier, outcome, long=options.long, arguments=record)
        outcomes.append(finish(outcome, started))
    if options.bench:
        print("\n== bench ==", flush=True)
        started, outcome = time.monotonic(), Outcome(name="bench")
        run_bench(outcome)
        outcomes.append(finish(outcome, started))
    print(summary(outcomes), flush=True)
    return exit_code(outcomes)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
