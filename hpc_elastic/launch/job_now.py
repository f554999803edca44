"""Which Slurm job has a run now: a run may go on in a follow-on job, where its first one may not be requeued."""

from __future__ import annotations

from hpc_elastic.attempt import UnreadableAttemptError, load_attempt
from hpc_elastic.launch.attempts import begun_attempts
from hpc_elastic.launch.result import load_result
from hpc_elastic.outcome import ExitCode
from hpc_elastic.run_paths import RunPaths


def job_now(paths: RunPaths) -> str | None:
    """The Slurm job that has the run now, or had it last; None where none has begun.

    Where an attempt's word of its follow-on job was lost, or is past, that job's own attempt tells of it.
    """
    for attempt in reversed(begun_attempts(paths)):
        stored = load_result(attempt.result_json)
        if stored is not None and stored.next_job and stored.exit_code == ExitCode.REQUEUED:
            return stored.next_job
        try:
            job_id = load_attempt(attempt.attempt_json).job_id
        except UnreadableAttemptError:
            continue
        if job_id:
            return job_id
    return None
