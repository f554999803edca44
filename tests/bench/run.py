"""Measure ourselves beside torchrun, on this machine: 4 nodes with 1 worker each.

::

    python -m tests.bench.run                   medians of several repetitions, some five minutes
    python -m tests.bench.run --quick           one repetition, under four minutes: whether it runs at all
    python -m tests.bench.run --only torchrun   one of the two; no ratios
    python -m tests.bench.run --parts goodput   40 minutes: only where it is named, or in short with --quick
    python -m tests.bench.run --update-docs     put the table into docs/benchmarks.md

Prints Markdown and writes JSON. A missed target is printed, not failed; the exit code is 1 only where nothing could be
measured at all. Runs of the two alternate, so that whatever else the machine does hits both.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
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
from tests.bench.figures import FIGURES as ALL_FIGURES
from tests.bench.figures import Samples, help_seconds, leftovers_table, machine, ratio, run_session, table
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
SCALE_DOCUMENT, SCALE_PLOT = (ROOT / "docs" / "explanation" / name for name in ("scale.md", "scale.svg"))
PARTS = ("plain", "torch", "help", "leftovers", "heartbeat", "output", *TABLES, "stop", "inprocess", "scale")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Returns the exit code."""
    options = _parse(argv)
    deadline = time.monotonic() + options.time_limit
    systems = [system for system in (TORCHRUN, OURS) if options.only in (None, system.name)]
    facts, samples = machine(), Samples()
    if facts["torch"] == "none":
        print("torch is not installed: only our own plain figures can be taken", file=sys.stderr)
        systems = [system for system in systems if system is OURS]
        options.parts = [part for part in options.parts if part not in ("torch", "inprocess", "warm", "goodput")]
    plan = [
        (system, kind, repetition)
        for kind, count in (("plain", options.plain), ("torch", options.torch))
        if kind in options.parts
        for repetition in range(count)
        for system in systems
    ]
    for system, kind, repetition in plan:
        if _late(deadline, samples, f"{system.name}, {kind}, repetition {repetition}"):
            break
        _progress(f"{system.name}, {kind} workers, {repetition + 1}")
        run_session(samples, system, kind, victim=(repetition + 1) % NODES, limit=20.0 if options.quick else 60.0)
    helps = help_seconds(3 if options.quick else 11) if "help" in options.parts and OURS in systems else {}
    left: dict[str, list[leftovers.Left]] = {}
    # What torchrun leaves is counted for the document: 15 s each until it is known not to go away.
    leaving = [system for system in systems if system is OURS or not options.quick]
    for system in leaving if "leftovers" in options.parts else []:
        for ending in leftovers.ENDINGS:
            if _late(deadline, samples, f"{system.name}: {ending.name}"):
                break
            _progress(f"{system.name}, {ending.name}")
            left.setdefault(system.name, []).append(leftovers.measure(system, ending))
    beats = heartbeat.measure() if "heartbeat" in options.parts and OURS in systems else None
    costs = output.measure() if "output" in options.parts and OURS in systems else []
    numbers: list[agent_numbers.Number] = []
    for part in TABLES if OURS in systems else ():
        if part in options.parts and not _late(deadline, samples, f"what this costs: {part}"):
            numbers += _numbers(part, facts, samples, quick=options.quick, update=options.update_docs)
    stops = {}
    if "stop" in options.parts and OURS in systems:
        stops = _stops(deadline, samples, rounds=2 if options.quick else 4)
    text = _report(facts, samples, helps, dict(sorted(left.items())), beats, costs, stops)
    print(text)
    if (
        "inprocess" in options.parts
        and OURS in systems
        and not _late(deadline, samples, "the in-process restart group")
    ):
        print(inprocess.measured(quick=True).text())
    if "scale" in options.parts and OURS in systems:
        _scale(facts, quick=options.quick, update=options.update_docs)
    for trouble in samples.troubles:
        print(f"trouble: {trouble}", file=sys.stderr)
    for system_name, rows in left.items():
        for one in rows:
            for name in (*one.processes, *one.files):
                print(f"left by {system_name} after {one.ending}: {name}", file=sys.stderr)
            if one.note:
                print(f"{system_name}, {one.ending}: {one.note}", file=sys.stderr)
    _write_json(options.json, facts, samples, helps, left, beats, costs, stops, numbers)
    if options.update_docs and not set(options.parts) <= {"scale", "inprocess", *TABLES}:
        update_document(DOCUMENT, text)
    measured = samples.values or helps or left or beats or costs or stops or numbers
    return 0 if measured or {"scale", "inprocess"} & set(options.parts) else 1


def _numbers(
    part: str, facts: dict[str, str], samples: Samples, *, quick: bool, update: bool
) -> list[agent_numbers.Number]:
    """A table of its own, so that it can be taken alone."""
    module, name, heading = TABLES[part]
    _progress(f"what this costs: {part}")
    try:
        numbers = module.measure(quick=quick)
    except (AssertionError, TookTooLong) as error:  # what should have happened did not
        samples.troubles.append(f"{part}: {error}")
        return []
    text = f"{facts['date']}, {facts['cores']} cores, load {facts['load before']}, Python {facts['python']}\n\n"
    text += "\n".join(agent_numbers.number_table(heading, numbers)) + "\n"
    print(text)
    if update:
        update_document(DOCUMENT, text, begin=f"<!-- bench of {name}: begin -->", end=f"<!-- bench of {name}: end -->")
    return numbers


def _scale(facts: dict[str, str], *, quick: bool, update: bool) -> None:
    """Many nodes, simulated and on emulated NFS: beside another way to meet, not beside torchrun itself."""
    rows = rendezvous_scale.measure_all(rendezvous_scale.QUICK_SIZES if quick else rendezvous_scale.SIZES, _progress)
    emulated = rendezvous_scale.emulate_all(rendezvous_scale.EMULATED_SIZES[: 2 if quick else None], _progress)
    lines = rendezvous_scale.table(rows)
    if emulated:
        lines += [
            "",
            "Counted on emulated NFS, each node with a mount of its own, on one machine and by its clock:",
            "",
        ]
        lines += rendezvous_scale.emulated_table(emulated)
    text = f"{facts['date']}, Python {facts['python']}\n\n" + "\n".join(lines) + "\n"
    print(text)
    if update:
        update_document(SCALE_DOCUMENT, text)
        drawn = plot(rendezvous_scale.panels(rows), ours="this rendezvous", theirs="one document, compare-and-swap")
        SCALE_PLOT.write_text(drawn)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.run", description="Measure ourselves beside torchrun.")
    parser.add_argument("--quick", action="store_true", help="one repetition, under 4 minutes")
    parser.add_argument("--plain", type=int, metavar="N", help="repetitions without torch in the workers")
    parser.add_argument("--torch", type=int, metavar="N", help="repetitions with it")
    parser.add_argument("--only", choices=[TORCHRUN.name, OURS.name])
    parser.add_argument("--parts", nargs="+", choices=PARTS)
    parser.add_argument("--time-limit", type=float, metavar="SECONDS", help="begin nothing after this long")
    parser.add_argument("--json", type=Path, default=ROOT / "build" / "bench.json")
    parser.add_argument("--update-docs", action="store_true", help=f"write {DOCUMENT.relative_to(ROOT)}")
    options = parser.parse_args(argv)
    options.parts = options.parts or [part for part in PARTS if options.quick or part != "goodput"]
    plain, torch, limit = (1, 1, 240.0) if options.quick else (7, 5, 300.0)
    options.plain = plain if options.plain is None else options.plain
    options.torch = torch if options.torch is None else options.torch
    options.time_limit = limit if options.time_limit is None else options.time_limit
    return options


def _stops(deadline: float, samples: Samples, *, rounds: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    if why := stop_everywhere.why_not():
        samples.troubles.append(f"how soon a failure stops all nodes is not measured: {why}")
        return found
    for variant in stop_everywhere.VARIANTS:
        if _late(deadline, samples, f"stop: {variant.title}"):
            break
        _progress(f"a failure stops all nodes: {variant.title}")
        try:
            found[variant.title] = stop_everywhere.measure(variant, rounds)
        except AssertionError as error:  # what should have happened did not
            samples.troubles.append(f"stop: {variant.title}: {error}")
    return found


def _late(deadline: float, samples: Samples, what: str) -> bool:
    if time.monotonic() < deadline:
        return False
    samples.troubles.append(f"out of time before {what}")
    return True


def _progress(what: str) -> None:
    print(f"… {what}", file=sys.stderr, flush=True)


def _report(
    facts: dict[str, str],
    samples: Samples,
    helps: dict[str, float],
    left: dict[str, list[leftovers.Left]],
    beats: heartbeat.HeartbeatFigures | None,
    costs: list[output.Cost],
    stops: dict[str, list[float]],
) -> str:
    where = f"{facts['date']}, {facts['cores']} cores, {facts['memory']}, Linux {facts['kernel']}, "
    where += f"Python {facts['python']}, torch {facts['torch']}; {NODES} nodes × 1 worker on one machine"
    lines = [where, "", *table(samples, helps)]
    if left:
        lines += ["", *leftovers_table(left)]
    if beats is not None:
        lines += ["", *heartbeat.lines(beats)]
    if costs:
        lines += ["", *output.lines(costs)]
    if stops:
        lines += ["", *stop_everywhere.table(stops)]
    return "\n".join(lines) + "\n"


def _write_json(
    path: Path,
    facts: dict[str, str],
    samples: Samples,
    helps: dict[str, float],
    left: dict[str, list[leftovers.Left]],
    beats: heartbeat.HeartbeatFigures | None,
    costs: list[output.Cost],
    stops: dict[str, list[float]],
    numbers: list[agent_numbers.Number],
) -> None:
    value: dict[str, Any] = {
        "version": 1,
        "machine": facts,
        "figures": {
            figure.key: {
                "title": figure.title,
                "unit": figure.unit,
                "values": samples.values.get(figure.key, {}),
                "ratio": ratio(samples, figure),
                "max_ratio": figure.max_ratio,
                "max_value": figure.max_value,
            }
            for figure in ALL_FIGURES
        },
        "help_seconds": helps,
        "left": {name: [asdict(one) for one in rows] for name, rows in left.items()},
        "heartbeat_microseconds": asdict(beats) if beats is not None else None,
        "agent_numbers": [asdict(number) for number in numbers],
        "output_costs": [asdict(cost) for cost in costs],
        "stop_seconds": stops,
        "troubles": samples.troubles,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def update_document(path: Path, text: str, *, begin: str = BEGIN, end: str = END) -> None:
    """Put `text` between the two marks of a Markdown file."""
    head, has_begin, rest = path.read_text().partition(begin)
    _, has_end, tail = rest.partition(end)
    if not has_begin or not has_end:
        raise SystemExit(f"{path} has no lines {begin} and {end} to put the table between")
    path.write_text(f"{head}{begin}\n{text}{end}{tail}")


if __name__ == "__main__":
    sys.exit(main())
