"""The run that a job began before it was requeued: for a batch script of the user's own, which only says ``run``."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from hpc_elastic import run_index
from hpc_elastic.attempt import AttemptInfo, UnreadableAttemptError, load_attempt
from hpc_elastic.launch.attempts import begun_attempts
from hpc_elastic.launch.result import load_result
from hpc_elastic.outcome import ExitCode
from hpc_elastic.run_paths import RunPaths
from hpc_elastic.run_spec import RunSpec, UnreadableRunError, load_run_spec
from hpc_elastic.slurm.job_environment import JobEnvironment

_MOST = 200
"""Runs of the folder that are looked at, newest first: the index is a home's, and a node may have another home."""


def earlier_run(job: JobEnvironment, spec: RunSpec, runs_dir: Path, env: Mapping[str, str]) -> Path | None:
    """The directory of the run that this very job began, with this very command; None where there is none.

    A script may have several runs, one after the other: where it was requeued from is the one that has not ended.

    Args:
        job: This one.
        spec: What is asked for now.
        runs_dir: Where its directory would be made.
        env: For the index.
    """
    if not job.restart_count:
        return None
    found = []
    for paths in _candidates(job, runs_dir, env):
        try:
            before = load_run_spec(paths.run_json)
        except UnreadableRunError:
            continue
        same = (before.entrypoint, before.cwd, before.cluster) == (spec.entrypoint, spec.cwd, spec.cluster)
        attempts = _attempts_of(paths, job) if same else []
        if attempts:
            result = load_result(paths.attempt(attempts[-1].number).result_json)
            if result is None or result.exit_code == ExitCode.REQUEUED:
                return paths.root
            found.append(paths.root)
    return found[0] if found else None


def _candidates(job: JobEnvironment, runs_dir: Path, env: Mapping[str, str]) -> Iterator[RunPaths]:
    seen = set()
    for entry in run_index.entries(job.requeue_id, cluster=job.cluster, env=env):
        seen.add(entry.run_dir)
        yield RunPaths(entry.run_dir)
    try:
        names = sorted(os.listdir(runs_dir), reverse=True)  # ids begin with the time
    except OSError:
        return
    for name in names[:_MOST]:
        if runs_dir / name not in seen and not name.startswith("."):
            yield RunPaths(runs_dir / name)


def _attempts_of(paths: RunPaths, job: JobEnvironment) -> list[AttemptInfo]:
    """Those that this job made before it was requeued, in order."""
    found = []
    for begun in begun_attempts(paths):
        try:
            attempt = load_attempt(begun.attempt_json)
        except UnreadableAttemptError:
            continue
        if attempt.job_id == job.requeue_id and attempt.restart_count < job.restart_count:
            found.append(attempt)
    return found
