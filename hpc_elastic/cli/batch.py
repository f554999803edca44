"""``hpc-elastic batch [--finish ATTEMPT AGENT] RUN_DIR``: what the generated script becomes. Not for people."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from hpc_elastic.errors import UsageError
from hpc_elastic.slurm.job_environment import without_run_variables


def main(argv: Sequence[str]) -> int:
    """Supervise one attempt of the run in this Slurm job; or, for an agent, end one whose supervisor is gone."""
    if len(argv) == 4 and argv[0] in ("--finish", "--finish-unconfirmed") and argv[1].isdecimal():
        from hpc_elastic.launch.batch import finish_attempt

        confirmed = argv[0] == "--finish"
        return finish_attempt(Path(argv[3]), int(argv[1]), os.environ, agent=argv[2], confirmed=confirmed)
    if len(argv) != 1 or argv[0].startswith("-"):
        raise UsageError("batch takes one run directory; it is called by the script that submit makes")
    from hpc_elastic.launch.batch import run_batch, run_of_this_job

    # A worker of another run may have submitted this job by hand.
    env = without_run_variables(os.environ)
    return run_batch(run_of_this_job(Path(argv[0]), env), env)
