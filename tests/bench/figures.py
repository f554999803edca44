"""The figures: what is measured, against what it is held, and how a table is made of them."""

from __future__ import annotations

import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.bench.leftovers import Left
from tests.bench.systems import NODES, OURS, ROOT, TORCHRUN, Session, System, TookTooLong
from tests.rigs.processes import resident_mb


@dataclass(frozen=True, slots=True)
class Figure:
    """One row. A ratio is ours by torchrun's of the same repetition; a bound is on our own value."""

    key: str
    title: str
    unit: str
    max_ratio: float | None = None
    max_value: float | None = None


START = Figure("start", "start → last worker's first line", "s", max_ratio=0.25)
RESTART = Figure("restart", "SIGKILL of a worker → last worker's first line", "s", max_ratio=0.25)
REGROUP = Figure("regroup", "SIGKILL of a worker → process group up in all ranks", "s", max_ratio=0.6)
GROUP = Figure("group", "start → process group up in all ranks", "s")
RESIDENT = Figure("resident", "agent, resident (VmRSS of the largest of the agents)", "MiB", max_value=30 * 1e6 / 2**20)
FIGURES = (START, RESTART, REGROUP, GROUP, RESIDENT)


@dataclass(slots=True)
class Samples:
    """Figure → system → the values of the repetitions, None where the moment did not come."""

    values: dict[str, dict[str, list[float | None]]] = field(default_factory=dict)
    troubles: list[str] = field(default_factory=list)

    def add(self, figure: Figure, system: System, value: float | None) -> None:
        """Append one repetition's value."""
        self.values.setdefault(figure.key, {}).setdefault(system.name, []).append(value)

    def of(self, figure: Figure, system: System) -> list[float | None]:
        """One cell's repetitions, oldest first."""
        return self.values.get(figure.key, {}).get(system.name, [])


def run_session(samples: Samples, system: System, kind: str, victim: int, *, limit: float) -> None:
    """One job: start it, kill one worker, wait for the next round; a moment that takes `limit` seconds is a None."""
    start, again, last = (START, RESTART, "line") if kind == "plain" else (GROUP, REGROUP, "group")
    missing = [start, again]
    with Session(system, kind, "wait", limit=limit) as session:
        try:
            samples.add(start, system, session.wait_for_all(last, since=session.began))
            missing.remove(start)
            if kind == "torch":
                sizes = [resident_mb(agent.pid) * 1e6 / 2**20 for agent in session.agents()]
                if len(sizes) != NODES:
                    samples.troubles.append(f"{system.name}: {len(sizes)} agents found instead of {NODES}")
                samples.add(RESIDENT, system, max(sizes, default=None))
            killed = session.kill_worker(victim)
            samples.add(again, system, session.wait_for_all(last, since=killed))
            missing.remove(again)
            session.let_workers_end()
            session.wait_for_end(limit=30.0)
            codes = {process.returncode for process in session.started}
            if codes != {0}:
                samples.troubles.append(f"{system.name}, {kind}: ended with {sorted(codes)}:\n{session.log_tail()}")
        except TookTooLong as error:
            samples.troubles.append(str(error))
            for figure in missing:
                samples.add(figure, system, None)


def help_seconds(repetitions: int) -> dict[str, float]:
    """Median wall time in seconds of our ``--help`` and of an interpreter that does nothing."""
    beside = os.path.join(os.path.dirname(sys.executable), "hpc-elastic")
    program = [beside] if os.path.exists(beside) else [sys.executable, "-m", "hpc_elastic"]
    commands = {"hpc-elastic --help": [*program, "--help"], "python -c pass": [sys.executable, "-c", "pass"]}
    found: dict[str, float] = {}
    for name, command in commands.items():
        times = []
        for _ in range(repetitions + 1):
            began = time.perf_counter()
            done = subprocess.run(command, capture_output=True, cwd=ROOT, timeout=60, check=False)
            times.append(time.perf_counter() - began)
            if done.returncode != 0:
                return {}
        found[name] = statistics.median(times[1:])  # the first one warms the disk's cache
    return found


def ratio(samples: Samples, figure: Figure) -> float | None:
    """The median over the repetitions of ours by torchrun's; None where there is no pair."""
    pairs = zip(samples.of(figure, OURS), samples.of(figure, TORCHRUN), strict=False)
    ratios = [ours / theirs for ours, theirs in pairs if ours is not None and theirs]
    return statistics.median(ratios) if ratios else None


def cell(values: Sequence[float | None], unit: str) -> str:
    """``median (least-most)``, and how many moments never came."""
    known = [value for value in values if value is not None]
    lost = f", {len(values) - len(known)} of {len(values)} never" if len(known) < len(values) else ""
    if not known:
        return f"never in {len(values)}" if values else "–"
    digits = 2 if unit == "s" else 0
    middle, least, most = (f"{value:.{digits}f}" for value in (statistics.median(known), min(known), max(known)))
    return f"{middle} {unit} ({least}–{most}{lost})" if len(values) > 1 else f"{middle} {unit}"


def table(samples: Samples, helps: dict[str, float]) -> list[str]:
    """The figures as lines of a Markdown table."""
    lines = ["| figure | hpc-elastic | torchrun | ratio | target | met |", "| --- | --- | --- | --- | --- | --- |"]
    for figure in FIGURES:
        ours, theirs = samples.of(figure, OURS), samples.of(figure, TORCHRUN)
        if not ours and not theirs:
            continue
        middle = ratio(samples, figure)
        target, met = "–", "–"
        if figure.max_ratio is not None:
            target = f"≤ {figure.max_ratio:g} ×"
            met = "–" if not ours or not theirs else _word(middle is not None and middle <= figure.max_ratio)
        elif figure.max_value is not None:
            known = [value for value in ours if value is not None]
            target = f"≤ {figure.max_value:.0f} {figure.unit}"
            met = _word(max(known) <= figure.max_value) if known else "–"
        shown = "–" if middle is None else f"{middle:.2f}"
        lines.append(
            f"| {figure.title} | {cell(ours, figure.unit)} | {cell(theirs, figure.unit)} | {shown} | {target} | {met} |"
        )
    if len(helps) == 2:
        ours_help, bare = helps.values()
        allowed = 0.15 * bare / 0.015
        lines.append(
            f"| `hpc-elastic --help`; beside it `python -c pass` | {ours_help * 1000:.0f} ms | {bare * 1000:.0f} ms | "
            f"{ours_help / bare:.1f} | ≤ 10 × | {_word(ours_help <= allowed)} |"
        )
    return lines


def leftovers_table(left: dict[str, list[Left]]) -> list[str]:
    """What was left after each ending, as lines of a Markdown table."""
    systems = list(left)
    lines = [
        "| what is left after | " + " | ".join(systems) + " | target |",
        "| --- |" + " --- |" * (len(systems) + 1),
    ]
    endings = list(dict.fromkeys(one.ending for rows in left.values() for one in rows))
    for ending in endings:
        cells = []
        for system in systems:
            one = next((one for one in left[system] if one.ending == ending), None)
            cells.append("–" if one is None else _describe(one))
        lines.append(f"| {ending} | " + " | ".join(cells) + " | 0 |")
    return lines


def _describe(one: Left) -> str:
    if one.note and not one.count:
        return one.note.splitlines()[0].replace("|", "/")
    if not one.count:
        return f"0 (gone in {one.seconds:.1f} s)"
    parts = [
        f"{count} {word}"
        for count, word in ((len(one.processes), "processes"), (one.sockets, "sockets"), (len(one.files), "files"))
        if count
    ]
    return ", ".join(parts)


def _word(met: bool) -> str:
    return "yes" if met else "**no**"


def machine() -> dict[str, str]:
    """What the figures were taken on; nothing that names the machine or its folders."""
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    version = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.__version__)"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{pages / 2**30:.0f} GiB",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": version or "none",
        "load before": f"{os.getloadavg()[0]:.1f}",
        "free space": f"{shutil.disk_usage('/tmp').free / 2**30:.0f} GiB",
    }
