"""Every option of a run: the one table of the command line, the configuration files and the executor.

What an option's value is where no layer gives one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import fields

from hpc_elastic.options import job_options, worker_options
from hpc_elastic.options.sbatch import IMPOSSIBLE
from hpc_elastic.options.table import Option
from hpc_elastic.run.index import DEFAULT_RUNS_DIR
from hpc_elastic.run.spec import RunSpec

ALL_OPTIONS = (*worker_options.OPTIONS, *job_options.OPTIONS)
_NOT_FOR_A_JOB = ("--help", "--usage", "--version", "-V")
REFUSED: Mapping[str, str] = {
    **{name: why for name, why in IMPOSSIBLE.items() if name not in _NOT_FOR_A_JOB},
    **worker_options.REFUSED,
}
"""Options that will never be, torchrun's and sbatch's, with the reason and the way out."""
YIELDS: Mapping[str, Sequence[str]] = job_options.SBATCH_VARIABLES
"""For Slurm: what sbatch reads from the environment wins over files, as everything there does."""


_NAMED_OTHERWISE = {"grace": "signal_grace"}
_NOT_IN_THE_SPEC = {"nodes": "1", "cluster": "auto", "runs_dir": f"./{DEFAULT_RUNS_DIR}"}
# In the spec, and no option's default: the run's own, or said in words by the help.
_OF_THE_RUN = frozenset(("run_id", "name", "cwd", "sbatch_args", "srun_args"))


def default_of(option: Option) -> str | bool | None:
    """The default as on the command line; None: there is none, or it is found out later (the job's name …)."""
    if option.dest in _NOT_IN_THE_SPEC:
        return _NOT_IN_THE_SPEC[option.dest]
    field = {each.name: each for each in fields(RunSpec)}.get(_NAMED_OTHERWISE.get(option.dest, option.dest))
    if field is None or option.dest in _OF_THE_RUN:
        return None
    value = field.default
    if isinstance(value, bool):
        return value
    if isinstance(value, (int, float)):
        return f"{value:g}" if abs(value) < 1e6 else str(value)
    return value or None if isinstance(value, str) else None
