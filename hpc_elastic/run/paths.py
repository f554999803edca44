"""Where everything lies in a run directory. Names only: nothing here touches the disk.

::

    <runs>/<run-id>/                     0700
      run.json                           what was asked for (run/spec.py): immutable
      preload.json                       what the fork servers import (run/preload.py)
      secret                             0600: authenticates notifications (store/notifier.py)
      job.sbatch  job.log                the exact script, and what the batch host printed (appended by every attempt)
      nodes.json                         what speaks against nodes, and which are left out (run/node_records.py)
      call.pkl  launcher.json            of a submitted function: see submission/call.py
      latest -> attempt-000
      attempt-000/                       one per execution of the job
        attempt.json                     job id, nodes, versions, requeue armed or why not
        store/                           rendezvous: its format is the store's own
        events/<role>-<node>-<uid>.jsonl one writer per file
        health/node-00012-<uid>          what an agent writes to see whether it can (agent/health.py)
        heartbeats/node-00012.json       where each node's workers were last (agent/hang.py)
        setup/node-00012.log             the end of what --setup printed
        suspicions/now.json  node-00012.json  the run seems to hang (run/suspicions.py)
        round-000/times-node-00003       when what was printed (output/log_times.py)
        round-000/rank-00012/            stdout.log stderr.log error.json stacks.txt,
                                           flight-recorder-12.json (agent/flight_recorder.py)
        result.json                      how the attempt ended, and what was decided (run/attempt.py)
        report.json report.txt report.html

An array's run directory has ``task-<k>/`` for each of its tasks, and each is a run directory of its own, with a
run.json, a secret, a job.log and attempts.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from msgspec import Struct

RUN_ID = "[A-Za-z0-9][A-Za-z0-9._-]{0,99}"
"""A pattern of Python's and of POSIX: the whole text of a run's id, which is a folder's name, and no shell's syntax."""
_ATTEMPT = re.compile(r"attempt-(\d{3,})\Z")
_ROUND = re.compile(r"round-(\d{3,})\Z")
_TASK = re.compile(r"task-(\d+)\Z", re.ASCII)
_RANK = re.compile(r"rank-(\d{5,})\Z")


class RankPaths(Struct, frozen=True):
    """The files of one worker in one round."""

    root: Path

    @property
    def stdout(self) -> Path:
        return self.root / "stdout.log"

    @property
    def stderr(self) -> Path:
        return self.root / "stderr.log"

    @property
    def error_file(self) -> Path:
        return self.root / "error.json"

    @property
    def stacks(self) -> Path:
        return self.root / "stacks.txt"


class AttemptPaths(Struct, frozen=True):
    """The files of one execution of the job."""

    root: Path

    @property
    def number(self) -> int:
        match = _ATTEMPT.match(self.root.name)
        return int(match.group(1)) if match else 0

    @property
    def attempt_json(self) -> Path:
        return self.root / "attempt.json"

    @property
    def store(self) -> Path:
        return self.root / "store"

    @property
    def events(self) -> Path:
        return self.root / "events"

    @property
    def result_json(self) -> Path:
        return self.root / "result.json"

    @property
    def report_json(self) -> Path:
        return self.root / "report.json"

    @property
    def report_text(self) -> Path:
        return self.root / "report.txt"

    @property
    def report_html(self) -> Path:
        return self.root / "report.html"

    @property
    def supervisor_error_file(self) -> Path:
        return self.root / "supervisor.error.json"

    def agent_error_file(self, node: int) -> Path:
        return self.root / f"agent-{node:05d}.error.json"

    def heartbeats(self, node: int) -> Path:
        return self.root / "heartbeats" / f"node-{node:05d}.json"

    @property
    def suspicions(self) -> Path:
        return self.root / "suspicions"

    def setup_log(self, node: int) -> Path:
        return self.root / "setup" / f"node-{node:05d}.log"

    def health_probe(self, node: int, uid: str) -> Path:
        return self.root / "health" / f"node-{node:05d}-{uid}"

    def round_dir(self, round_index: int) -> Path:
        return self.root / f"round-{round_index:03d}"

    def rank(self, round_index: int, global_rank: int) -> RankPaths:
        return RankPaths(self.round_dir(round_index) / f"rank-{global_rank:05d}")


class RunPaths(Struct, frozen=True):
    """The files of one run. `root` is absolute."""

    root: Path

    @property
    def run_id(self) -> str:
        """The folder's name; of an array's task ``<the array's>_<k>``, as Slurm writes such jobs."""
        task = task_index(self.root.name)
        return self.root.name if task is None else f"{self.root.parent.name}_{task}"

    def task(self, index: int) -> RunPaths:
        """The run of one task of this array."""
        return RunPaths(self.root / f"task-{index}")

    @property
    def run_json(self) -> Path:
        return self.root / "run.json"

    @property
    def preload(self) -> Path:
        return self.root / "preload.json"

    @property
    def secret(self) -> Path:
        return self.root / "secret"

    @property
    def script(self) -> Path:
        return self.root / "job.sbatch"

    @property
    def job_log(self) -> Path:
        return self.root / "job.log"

    @property
    def nodes_json(self) -> Path:
        return self.root / "nodes.json"

    @property
    def latest(self) -> Path:
        return self.root / "latest"

    def attempt(self, number: int) -> AttemptPaths:
        return AttemptPaths(self.root / f"attempt-{number:03d}")

    def attempts(self) -> list[AttemptPaths]:
        """Those that have begun, the newest last.

        Raises:
            OSError: the run directory can't be listed.
        """
        numbers = [number for name in os.listdir(self.root) if (number := attempt_number(name)) is not None]
        return [self.attempt(number) for number in sorted(numbers)]

    def begun_attempts(self) -> list[AttemptPaths]:
        """The same; none where the run directory can't be listed."""
        try:
            return self.attempts()
        except OSError:
            return []


def attempt_number(name: str) -> int | None:
    """``attempt-007`` → 7; None for any other name."""
    match = _ATTEMPT.match(name)
    return int(match.group(1)) if match else None


def task_index(name: str) -> int | None:
    """``task-7`` → 7; None for any other name."""
    match = _TASK.match(name)
    return int(match.group(1)) if match else None


def round_index(name: str) -> int | None:
    """``round-007`` → 7; None for any other name."""
    match = _ROUND.match(name)
    return int(match.group(1)) if match else None


def rank_index(name: str) -> int | None:
    """``rank-00007`` → 7; None for any other name."""
    match = _RANK.match(name)
    return int(match.group(1)) if match else None
