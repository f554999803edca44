"""``hpc-elastic status`` of an array: a line for each of its runs, with one question to Slurm about all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from hpc_elastic.base.clock import Clock
from hpc_elastic.cli.list_runs import status_line
from hpc_elastic.cli.status_text import JSON_VERSION, status_json
from hpc_elastic.launch.run_status import RunState, RunStatus, read_status
from hpc_elastic.run.paths import RunPaths
from hpc_elastic.slurm.job_state import JobState


def read_tasks(paths: RunPaths, tasks: Sequence[int], *, clock: Clock) -> dict[int, RunStatus]:
    """Where each task of an array stands."""
    return {task: read_status(paths.task(task), clock=clock) for task in tasks}


def array_lines(paths: RunPaths, runs: Mapping[int, RunStatus], jobs: Mapping[int, JobState], job: str) -> list[str]:
    """The lines, the headline first.

    Args:
        paths: The array's.
        runs: By task.
        jobs: What Slurm says, by task.
        job: The array's job id, where it is known.
    """
    counts = Counter(status.state for status in runs.values())
    said = ", ".join(f"{counts[state]} {state.value}" for state in RunState if counts[state])
    lines = [f"array {paths.run_id}{f', job {job}' if job else ''}: {len(runs)} runs: {said}"]
    for task, status in runs.items():
        state = jobs.get(task)
        shows = state is not None and status.state is not RunState.ENDED
        slurm = f"  [{state.state}{f': {state.reason}' if state.reason else ''}]" if shows and state else ""
        lines.append(f"  {status_line(status)}{slurm}")
    lines.append(f"  directory: {paths.root}")
    return lines


def array_json(paths: RunPaths, runs: Mapping[int, RunStatus], jobs: Mapping[int, JobState]) -> dict[str, Any]:
    """The same as an object."""
    return {
        "version": JSON_VERSION,
        "run_id": paths.run_id,
        "run_dir": str(paths.root),
        "tasks": {str(task): status_json(status, jobs.get(task), seconds_left=None) for task, status in runs.items()},
    }
