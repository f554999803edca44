"""Every option of a run: the one table of the command line, the configuration files and the executor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hpc_elastic.configuration import job_options, worker_options
from hpc_elastic.slurm.sbatch import IMPOSSIBLE

ALL_OPTIONS = (*worker_options.OPTIONS, *job_options.OPTIONS)
_NOT_FOR_A_JOB = ("--help", "--usage", "--version", "-V")
REFUSED: Mapping[str, str] = {
    **{name: why for name, why in IMPOSSIBLE.items() if name not in _NOT_FOR_A_JOB},
    **worker_options.REFUSED,
}
"""Options that will never be, torchrun's and sbatch's, with the reason and the way out."""
YIELDS: Mapping[str, Sequence[str]] = job_options.SBATCH_VARIABLES
"""For Slurm: what sbatch reads from the environment wins over files, as everything there does."""
