"""Measure ourselves beside torchrun, on this machine: 4 nodes with 1 worker each.

::

    python -m tests.bench.run                   medians of several repetitions, some five minutes
    python -m tests.bench.run --quick           one repetition, some three minutes: whether it runs at all
    python -m tests.bench.run --only torchrun   one of the two; no ratios
    python -m tests.bench.run --parts goodput   40 minutes: only where it is named, or in short with --quick
    python -m tests.bench.run --update-docs     put the table into docs/benchmarks.md

Prints Markdown. A missed target is printed, not failed; the exit code is 1 only where nothing could be
measured at all. Runs of the two alternate, so that whatever else the machine does hits both.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.bench import (
    agent_numbers,
    evidence,
    flight_recorder,
    goodput,
    heartbeat,
    inprocess,
    leftovers,
    output,
    rendezvous_scale,
    report,
    stop_everywhere,
    warm_start,
)
from tests.bench.figures import Samples, help_seconds, leftovers_table, machine, run_session, table
from tests.bench.scale_plot import plot
from tests.bench.systems import NODES, OURS, ROOT, TORCHRUN, TookTooLong

DOCUMENT = ROOT / "docs" / "benchmarks.md"
BEGIN, END = "<!-- bench: begin -->", "<!-- bench: end -->"
TABLES: dict[str, tuple[Any, str, str]] = {
    "agent": (agent_numbers, "an agent", "an agent"),
    "evidence": (evidence, "evidence", "CPU for the evidence of"),
    "goodput": (goodput, "goodput", "the same failures under"),
    "hangs": (flight_recorder, "hangs", "dumps of 1,024 ranks"),
    "report": (report, "a report", "a report, CPU and memory"),
    "warm": (warm_start, "a warm start", "`--start-method forkserver`"),
}
"""Part → module, what the marks around its table call it, and the table's heading."""
SCALE_PLOT = ROOT / "docs" / "images" / "scale.svg"
PARTS = ("plain", "torch", "help", "leftovers", "heartbeat", "output", *TABLES, "stop", "inprocess", "scale")


class Bench:
    """One call's measurements, in the order of `run`."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.deadline = time.monotonic() + options.time_limit
        self.facts, self.samples = machine(), Samples()
        self.systems = [system for system in (TORCHRUN, OURS) if options.only in (None, system.name)]
        self.has_measured = False

    def run(self) -> None:
        """Measure and print all that was asked for and that there is time for."""
        self._sessions()
        lines = self._beside_torchrun()
        if OURS in self.systems:
            for part in TABLES:
                if self._is_wanted(part, f"what this costs: {part}"):
                    self._numbers(part)
            stops = self._stops() if "stop" in self.options.parts else {}
            lines += ["", *stop_everywhere.table(stops)] if stops else []
        if self.samples.values or lines[1:]:
            self.has_measured = True
            self._show("\n".join(lines) + "\n", DOCUMENT, BEGIN, END)
        if OURS in self.systems and self._is_wanted("inprocess", "the in-process restart group"):
            print(inprocess.measured(quick=True).text())
        if OURS in self.systems and self._is_wanted("scale"):
            self._scale()
        for trouble in self.samples.troubles:
            print(f"trouble: {trouble}", file=sys.stderr)

    def _is_wanted(self, part: str, what: str = "") -> bool:
        """Whether a part was asked for and, where it is named, is begun in time."""
        if part not in self.options.parts or (what and self._is_late(what)):
            return False
        self.has_measured = True
        return True

    def _is_late(self, what: str) -> bool:
        if time.monotonic() < self.deadline:
            return False
        self.samples.troubles.append(f"out of time before {what}")
        return True

    def _show(self, text: str, document: Path, begin: str = BEGIN, end: str = END) -> None:
        print(text)
        if self.options.update_docs:
            update_document(document, text, begin=begin, end=end)

    def _sessions(self) -> None:
        limit = 20.0 if self.options.quick else 60.0
        for kind, count in (("plain", self.options.plain), ("torch", self.options.torch)):
            for repetition in range(count if kind in self.options.parts else 0):
                for system in self.systems:
                    if self._is_late(f"{system.name}, {kind}, repetition {repetition}"):
                        return
                    _progress(f"{system.name}, {kind} workers, {repetition + 1}")
                    run_session(self.samples, system, kind, victim=(repetition + 1) % NODES, limit=limit)

    def _beside_torchrun(self) -> list[str]:
        parts, ours = self.options.parts, OURS in self.systems
        helps = help_seconds(3 if self.options.quick else 11) if "help" in parts and ours else {}
        facts = self.facts
        where = f"{facts['date']}, {facts['cores']} cores, {facts['memory']}, Linux {facts['kernel']}, "
        where += f"Python {facts['python']}, torch {facts['torch']}; {NODES} nodes × 1 worker on one machine"
        lines = [where]
        if self.samples.values or helps:
            lines += ["", *table(self.samples, helps)]
        if "leftovers" in parts and (left := self._leftovers()):
            lines += ["", *leftovers_table(left)]
        if "heartbeat" in parts and ours:
            lines += ["", *heartbeat.lines(heartbeat.measure())]
        if "output" in parts and ours:
            lines += ["", *output.lines(output.measure())]
        return lines

    def _leftovers(self) -> dict[str, list[leftovers.Left]]:
        found: dict[str, list[leftovers.Left]] = {}
        # What torchrun leaves is counted for the document: 15 s each until it is known not to go away.
        for system in [system for system in (OURS, TORCHRUN) if system is OURS or not self.options.quick]:
            for ending in leftovers.ENDINGS if system in self.systems else ():
                if self._is_late(f"{system.name}: {ending.name}"):
                    return found
                _progress(f"{system.name}, {ending.name}")
                left = leftovers.measure(system, ending)
                found.setdefault(system.name, []).append(left)
                for name in (*left.processes, *left.files, *filter(None, [left.note])):
                    print(f"left by {system.name} after {ending.name}: {name}", file=sys.stderr)
        return found

    def _numbers(self, part: str) -> None:
        module, name, heading = TABLES[part]
        _progress(f"what this costs: {part}")
        try:
            numbers = module.measure(quick=self.options.quick)
        except (AssertionError, TookTooLong) as error:  # what should have happened did not
            self.samples.troubles.append(f"{part}: {error}")
            return
        facts = self.facts
        text = f"{facts['date']}, {facts['cores']} cores, load {facts['load before']}, Python {facts['python']}\n\n"
        text += "\n".join(agent_numbers.number_table(heading, numbers)) + "\n"
        self._show(text, DOCUMENT, f"<!-- bench of {name}: begin -->", f"<!-- bench of {name}: end -->")

    def _stops(self) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {}
        if why := stop_everywhere.why_not():
            self.samples.troubles.append(f"how soon a failure stops all nodes is not measured: {why}")
            return found
        for variant in stop_everywhere.VARIANTS:
            if self._is_late(f"stop: {variant.title}"):
                break
            _progress(f"a failure stops all nodes: {variant.title}")
            try:
                found[variant.title] = stop_everywhere.measure(variant, 2 if self.options.quick else 4)
            except AssertionError as error:  # what should have happened did not
                self.samples.troubles.append(f"stop: {variant.title}: {error}")
        return found

    def _scale(self) -> None:
        """Many nodes, simulated and on emulated NFS: beside another way to meet, not beside torchrun itself."""
        quick = self.options.quick
        rows = rendezvous_scale.measure_all(
            rendezvous_scale.QUICK_SIZES if quick else rendezvous_scale.SIZES, _progress
        )
        emulated = rendezvous_scale.emulate_all(rendezvous_scale.EMULATED_SIZES[: 2 if quick else None], _progress)
        lines = [f"{self.facts['date']}, Python {self.facts['python']}", "", *rendezvous_scale.table(rows)]
        if emulated:
            what = "Counted on emulated NFS, each node with a mount of its own, on one machine and by its clock:"
            lines += ["", what, "", *rendezvous_scale.emulated_table(emulated)]
        self._show("\n".join(lines) + "\n", DOCUMENT, "<!-- bench of scale: begin -->", "<!-- bench of scale: end -->")
        if self.options.update_docs:
            drawn = plot(rendezvous_scale.panels(rows), ours="this rendezvous", theirs="one document, compare-and-swap")
            SCALE_PLOT.write_text(drawn)


def _progress(what: str) -> None:
    print(f"… {what}", file=sys.stderr, flush=True)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.run", description="Measure ourselves beside torchrun.")
    parser.add_argument("--quick", action="store_true", help="one repetition, some three minutes")
    parser.add_argument("--plain", type=int, metavar="N", help="repetitions without torch in the workers")
    parser.add_argument("--torch", type=int, metavar="N", help="repetitions with it")
    parser.add_argument("--only", choices=[TORCHRUN.name, OURS.name])
    parser.add_argument("--parts", nargs="+", choices=PARTS)
    parser.add_argument("--time-limit", type=float, metavar="SECONDS", help="begin nothing after this long")
    parser.add_argument("--update-docs", action="store_true", help=f"write {DOCUMENT.relative_to(ROOT)}")
    options = parser.parse_args(argv)
    options.parts = options.parts or [part for part in PARTS if options.quick or part != "goodput"]
    plain, torch, limit = (1, 1, 200.0) if options.quick else (7, 5, 300.0)
    options.plain = plain if options.plain is None else options.plain
    options.torch = torch if options.torch is None else options.torch
    options.time_limit = limit if options.time_limit is None else options.time_limit
    return options


def update_document(path: Path, text: str, *, begin: str = BEGIN, end: str = END) -> None:
    """Put `text` between the two marks of a Markdown file."""
    head, has_begin, rest = path.read_text().partition(begin)
    _, has_end, tail = rest.partition(end)
    if not has_begin or not has_end:
        raise SystemExit(f"{path} has no lines {begin} and {end} to put the table between")
    path.write_text(f"{head}{begin}\n{text}{end}{tail}")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Returns the exit code."""
    options = _parse(argv)
    if importlib.util.find_spec("torch") is None:
        print("torch is not installed: only our own plain figures can be taken", file=sys.stderr)
        options.only = OURS.name
        options.parts = [part for part in options.parts if part not in ("torch", "inprocess", "warm", "goodput")]
    bench = Bench(options)
    bench.run()
    return 0 if bench.has_measured else 1


if __name__ == "__main__":
    sys.exit(main())
