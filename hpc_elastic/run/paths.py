"""The layout of a run directory. Names only: nothing here touches the disk.

docs/reference/files.md has the whole of it.
"""

from __future__ import annotations

import os
import re
from functools import partial
from pathlib import Path

from msgspec import Struct

RUN_ID = "[A-Za-z0-9][A-Za-z0-9._-]{0,99}"
"""A pattern of Python's and of POSIX: the whole text of a run's id, which is a folder's name, and no shell's syntax."""


def _number(pattern: re.Pattern[str], name: str) -> int | None:
    match = pattern.match(name)
    return int(match.group(1)) if match else None


# ``attempt-007`` → 7; None for any other name.
attempt_number = partial(_number, re.compile(r"attempt-(\d{3,})\Z"))
round_index = partial(_number, re.compile(r"round-(\d{3,})\Z"))
task_index = partial(_number, re.compile(r"task-(\d+)\Z", re.ASCII))
rank_index = partial(_number, re.compile(r"rank-(\d{5,})\Z"))


class _File:
    """A path below `root`, as an attribute of the folder's type."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, folder: RankPaths | AttemptPaths | RunPaths, kind: type | None = None) -> Path:
        return folder.root / self._name


class RankPaths(Struct, frozen=True):
    root: Path

    stdout = _File("stdout.log")
    stderr = _File("stderr.log")
    error_file = _File("error.json")
    stacks = _File("stacks.txt")
    result_pickle = _File("result.pkl")
    exception_pickle = _File("exception.pkl")


class AttemptPaths(Struct, frozen=True):
    root: Path

    attempt_json = _File("attempt.json")
    store = _File("store")
    output = _File("output.log")
    records = _File("records.log")
    events = _File("events")
    result_json = _File("result.json")
    report_json = _File("report.json")
    report_text = _File("report.txt")
    report_html = _File("report.html")
    supervisor_error_file = _File("supervisor.error.json")
    suspicions = _File("suspicions")
    slow_ranks = _File("slow-ranks")
    requeue_asked = _File("requeue-asked.json")
    checkpoint = _File("checkpoint")
    checkpoints = _File("checkpoints")

    @property
    def number(self) -> int:
        return attempt_number(self.root.name) or 0

    def agent_error_file(self, node: int) -> Path:
        return self.root / f"agent-{node:05d}.error.json"

    def heartbeats(self, node: int) -> Path:
        return self.root / "heartbeats" / f"node-{node:05d}.json"

    def setup_log(self, node: int) -> Path:
        return self.root / "setup" / f"node-{node:05d}.log"

    def health_probe(self, node: int, uid: str) -> Path:
        return self.root / "health" / f"node-{node:05d}-{uid}"

    def round_dir(self, round_index: int) -> Path:
        return self.root / f"round-{round_index:03d}"

    def rank_checkpoint(self, global_rank: int) -> Path:
        return self.checkpoint / f"rank-{global_rank:05d}.pkl"

    def rank(self, round_index: int, global_rank: int) -> RankPaths:
        return RankPaths(self.round_dir(round_index) / f"rank-{global_rank:05d}")


class RunPaths(Struct, frozen=True):
    """The files of one run. `root` is absolute."""

    root: Path

    run_json = _File("run.json")
    preload = _File("preload.json")
    secret = _File("secret")
    script = _File("job.sbatch")
    job_log = _File("job.log")
    nodes_json = _File("nodes.json")
    pace_json = _File("pace.json")
    call_pickle = _File("call.pkl")
    launcher_json = _File("launcher.json")
    latest = _File("latest")

    @property
    def run_id(self) -> str:
        """The folder's name; for an array's task ``<the array's>_<k>``, Slurm's notation of such jobs."""
        task = task_index(self.root.name)
        return self.root.name if task is None else f"{self.root.parent.name}_{task}"

    def task(self, index: int) -> RunPaths:
        return RunPaths(self.root / f"task-{index}")

    def attempt(self, number: int) -> AttemptPaths:
        return AttemptPaths(self.root / f"attempt-{number:03d}")

    def attempts(self) -> list[AttemptPaths]:
        """The attempts that have begun, the newest last. Raises OSError: the run directory can't be listed."""
        numbers = [number for name in os.listdir(self.root) if (number := attempt_number(name)) is not None]
        return [self.attempt(number) for number in sorted(numbers)]

    def begun_attempts(self) -> list[AttemptPaths]:
        """The same; empty where the run directory can't be listed."""
        try:
            return self.attempts()
        except OSError:
            return []
