"""Goodput for ``status`` and ``list --goodput``: by a run's events, with the report's one accounting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpc_elastic.base.text import duration, plural
from hpc_elastic.launch.run_status import RunStatus
from hpc_elastic.output.terminal import one_line
from hpc_elastic.report.collect import collect_run
from hpc_elastic.report.goodput import Goodput, describe_goodput, goodput_of, is_worth_showing


def read_goodput(root: Path) -> Goodput | None:
    try:
        found = goodput_of(collect_run(root))
    except OSError:
        return None  # it is being removed, or can't be read
    return found if is_worth_showing(found) else None


def goodput_json(goodput: Goodput) -> dict[str, Any]:
    parts = {key: seconds for key, _, seconds in describe_goodput(goodput)}
    known = {"progress": goodput.progress.value, "steps_known": goodput.steps_known}
    return {**known, "share": goodput.share, "wall": goodput.wall, "parts": parts}


class MeasuredRuns:
    HEAD = f"{'goodput':<8}  {'of':<13}  run"

    def __init__(self) -> None:
        self._found: list[Goodput] = []

    def read(self, status: RunStatus) -> Goodput | None:
        found = read_goodput(Path(status.run_dir))
        self._found += [found] if found is not None else []
        return found

    def line(self, status: RunStatus, goodput: Goodput | None) -> str:
        """A run's line: the largest part first, what is below a tenth of a percent left out."""
        if goodput is None:
            return one_line(f"{'-':<8}  {'-':<13}  {status.run_id}  it took less than a minute, or nothing is known")
        parts = sorted(describe_goodput(goodput)[1:], key=lambda part: -part[2])
        least = 0.0005 * goodput.wall
        shown = [f"{100 * seconds / goodput.wall:.1f} % {what}" for _, what, seconds in parts if seconds >= least]
        shown += [] if goodput.steps_known else [f"uptime of the processes, since {goodput.why_unknown}"]
        return one_line(f"{_share(goodput.share or 0.0, goodput.wall)}  {status.run_id}  {', '.join(shown)}")

    def of_all(self) -> str:
        if len(self._found) < 2:
            return ""
        wall = sum(one.wall for one in self._found)
        useful = sum((one.share or 0.0) * one.wall for one in self._found)
        without = sum(1 for one in self._found if not one.steps_known)
        by_uptime = f", {without} of them by uptime" if without else ""
        return f"{_share(useful / wall, wall)}  all {plural(len(self._found), 'run')} together{by_uptime}"


def _share(share: float, wall: float) -> str:
    return f"{f'{100 * share:.1f} %':>7}   {duration(wall):<13}"
