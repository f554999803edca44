"""The run of a Slurm job that this account's index does not have: by what Slurm says of the job, at last."""

from __future__ import annotations

import os
from pathlib import Path

from hpc_elastic.errors import UsageError
from hpc_elastic.run_paths import RunPaths, task_index
from hpc_elastic.slurm.client import SlurmClient
from hpc_elastic.slurm.commands import JobId
from hpc_elastic.slurm.errors import SlurmError, SlurmMissingError
from hpc_elastic.slurm.job_state import JobState
from hpc_elastic.slurm.sbatch import COMMENT_MARK


def run_of_job(job: str, client: SlurmClient) -> Path:
    """The run directory of a job, by one question to Slurm.

    Args:
        job: As Slurm's commands take it.
        client: Answers.

    Raises:
        SlurmMissingError: there is no Slurm here.
        UsageError: it is unknown, another user's, or none of this program's.
    """
    try:
        state = client.job_state(JobId(job))
    except SlurmMissingError:
        raise
    except SlurmError as error:
        raise UsageError(
            f"no run of job {job} is known on this account, and Slurm can't be asked ({error.why}); give its directory"
        ) from None
    return _run_of(job, state)


def _run_of(text: str, state: JobState | None) -> Path:
    if state is None:
        raise UsageError(
            f"job {text} is unknown: it is no run of this account's, and Slurm knows no such job (any more); "
            "give the run directory"
        )
    whose = state.user if state.user not in (None, _own_name(), str(os.getuid())) else None
    root = _run_directory_of(state)
    if root is None:
        owner = f"{whose}'s, and " if whose else ""
        raise UsageError(
            f"job {text} ({state.name}) is {owner}no run that is known here: not submitted by hpc-elastic, or its run "
            "directory is elsewhere; see scontrol show job"
        )
    if whose:
        raise UsageError(f"job {text} is {whose}'s: a run's files are their owner's alone ({root})")
    task = text.partition("_")[2]
    paths = RunPaths(root)
    if task.isdecimal() and task_index(root.name) is None:
        paths = paths.task(int(task))
    if not paths.run_json.is_file():
        raise UsageError(
            f"the run directory of job {text} is gone: {paths.root}; if the job runs on, scancel {text} ends it"
        )
    return paths.root


def _run_directory_of(state: JobState) -> Path | None:
    """The run directory by the comment, or where the user gave another, by where the log is."""
    if state.comment.startswith(COMMENT_MARK):
        return Path(state.comment.removeprefix(COMMENT_MARK))
    folder = Path(state.stdout).parent if state.stdout and state.stdout.endswith("/job.log") else None
    return folder if folder is not None and RunPaths(folder).run_json.is_file() else None


def _own_name() -> str:
    import pwd

    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())
