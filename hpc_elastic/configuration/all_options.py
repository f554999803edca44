"""Every option of a run: the one table of the command line, the configuration files and the executor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hpc_elastic.configuration import job_options, worker_options

ALL_OPTIONS = (*worker_options.OPTIONS, *job_options.OPTIONS)
YIELDS: Mapping[str, Sequence[str]] = job_options.SBATCH_VARIABLES
"""For Slurm: what sbatch reads from the environment wins over files, as everything there does."""
