"""In-process restart beside NVIDIA's: from an exception on one rank to the last rank's next start, and what it costs.

::

    python -m tests.bench.inprocess [--quick] [--update-docs]

NVIDIA's is installed from the package registry, into a folder of its own; where that can't be had, a line says so and
this package is measured alone.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from tests.bench.figures import machine
from tests.rigs.inprocess_ranks import Job, run_jobs

OURS, THEIRS = "hpc_elastic.inprocess", "nvidia_resiliency_ext.inprocess"
THEIR_VERSION = "0.4.1"
MARKS = ("<!-- bench of the in-process restart group: begin -->", "<!-- bench of the in-process restart group: end -->")
INSTALL_SECONDS = 120
SHORT = "0.05"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table."""

    what: str
    ours: str
    theirs: str = "–"
    ratio: float | None = None
    goal: float | None = None

    def text(self) -> str:
        met = "–" if self.goal is None or self.ratio is None else "yes" if self.ratio <= self.goal else "**no**"
        ratio = "–" if self.ratio is None else f"{self.ratio:.3g}"
        goal = "–" if self.goal is None else f"≤ {self.goal:g} ×"
        return f"| {self.what} | {self.ours} | {self.theirs} | {ratio} | {goal} | {met} |"


@dataclass(slots=True)
class Table:
    """All of them, and what else is to be said."""

    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def text(self) -> str:
        head = [
            "| | this package | NVIDIA's " + THEIR_VERSION + " | ratio | goal | met |",
            "| --- | --- | --- | --- | --- | --- |",
        ]
        return "\n".join([*head, *(row.text() for row in self.rows), *(f"\n{note}" for note in self.notes)])


def find_theirs(folder: Path) -> str | None:
    """Where their package can be imported from: "" for as it is, a folder, or None: nowhere.

    Args:
        folder: Empty; it is installed there.
    """
    if importlib.util.find_spec("nvidia_resiliency_ext") is not None:
        return ""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--target", str(folder), f"nvidia-resiliency-ext=={THEIR_VERSION}", "pyyaml", "defusedxml"]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=INSTALL_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return str(folder) if done.returncode == 0 else None


def run(job: str, *, search: str = "") -> Job:
    """One scenario of `tests.rigs.inprocess_timing`."""
    with tempfile.TemporaryDirectory() as folder:
        (found,) = run_jobs(Path(folder), job, search=search)
    assert all(ending.exit_code == 0 for ending in found.ranks), found.output
    return found


def seconds_of(job: Job) -> list[float]:
    """Of each restart: until the last rank."""
    return [max(times) for times in zip(*(result["seconds"] for result in job.results), strict=True)]


def compared(ranks: int, *, search: str | None, restarts: int, their_restarts: int, interval: str = "") -> Row:
    """Restarts while the other ranks are in a loop of Python: NVIDIA's does not get out of a blocked gloo operation."""
    options = "wait=loop" + (f":interval={interval}" if interval else "")
    ours = statistics.median(seconds_of(run(f"restart_times:{ranks}:restarts={restarts}:{options}")))
    what = f"raise → function runs on all of {ranks} ranks, {'intervals of 50 ms' if interval else 'default settings'}"
    if search is None:
        return Row(what=what, ours=f"{ours * 1000:.1f} ms")
    job = run(f"restart_times:{ranks}:restarts={their_restarts}:{options}:package={THEIRS}", search=search)
    theirs = statistics.median(seconds_of(job))
    return Row(
        what=what,
        ours=f"{ours * 1000:.1f} ms",
        theirs=f"{theirs * 1000:.0f} ms",
        ratio=ours / theirs,
        goal=1.0 if interval else 0.15,
    )


def growth(*, ranks: int, restarts: int) -> list[Row]:
    """Restarts out of an all-reduce, and what the largest process grew by after the first tenth of them."""
    job = run(f"restart_times:{ranks}:restarts={restarts}:deadline={60 + restarts}")
    each = seconds_of(job)
    sizes = [result["sizes"] for result in job.results]
    grown = [max(after[n] - before[n] for before, after in sizes) for n in range(3)]
    return [
        Row(
            what=f"the same out of a blocked gloo all-reduce, {ranks} ranks, {restarts} restarts",
            ours=f"{statistics.median(each) * 1000:.1f} ms (at most {max(each) * 1000:.0f})",
            theirs="gloo's timeout",
        ),
        Row(
            what=f"growth over the last {restarts - restarts // 10} of them",
            ours=f"{grown[0]:.1f} MiB, {grown[1]:g} threads, {grown[2]:g} descriptors",
        ),
    ]


def steady(*, turns: int) -> Row:
    """The whole process' CPU time, with the call's threads."""

    def share(job: Job) -> float:
        return statistics.median(result["wrapped"] / result["plain"] for result in job.results) - 1

    ours = share(run(f"overhead:2:turns={turns}"))
    met = "met" if ours <= 0.01 else "missed"
    return Row(
        what=f"CPU that the call adds to a loop of 1 ms iterations with a ping (goal ≤ 1 %: {met})", ours=f"{ours:+.2%}"
    )


def measured(*, quick: bool) -> Table:
    """All figures; a quick run leaves 8 ranks and the thousand restarts out."""
    table = Table()
    with tempfile.TemporaryDirectory() as folder:
        search = find_theirs(Path(folder))
        if search is None:
            table.notes.append(
                f"nvidia-resiliency-ext {THEIR_VERSION} can't be installed here: nothing to compare with."
            )
        for ranks in (4,) if quick else (4, 8):
            table.rows.append(
                compared(ranks, search=search, restarts=10 if quick else 40, their_restarts=3 if quick else 10)
            )
            if not quick:
                table.rows.append(compared(ranks, search=search, restarts=40, their_restarts=20, interval=SHORT))
    table.rows += growth(ranks=4, restarts=20 if quick else 1000)
    table.rows.append(steady(turns=2 if quick else 6))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--update-docs", action="store_true")
    options = parser.parse_args()
    facts = machine()
    table = measured(quick=options.quick)
    where = f"{facts['date']}, {facts['cores']} cores, load {facts['load before']}"
    text = f"{where}, Python {facts['python']}, torch {facts['torch']}\n\n{table.text()}\n"
    print(text)
    if options.update_docs:
        from tests.bench.run import DOCUMENT, update_document

        update_document(DOCUMENT, text, begin=MARKS[0], end=MARKS[1])


if __name__ == "__main__":
    main()
