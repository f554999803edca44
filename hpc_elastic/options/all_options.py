"""Every option of a run: the one table of the command line, the configuration files and the executor.

And what an option's value is where no layer gives one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum

from hpc_elastic.options import job_options, worker_options
from hpc_elastic.options.sbatch import IMPOSSIBLE
from hpc_elastic.options.table import Option
from hpc_elastic.run.index import DEFAULT_RUNS_DIR
from hpc_elastic.run.option_values import BadNodeSettings, StreamChoice
from hpc_elastic.run.spec import EntryKind, Entrypoint, RunSpec

ALL_OPTIONS = (*worker_options.OPTIONS, *job_options.OPTIONS)
_NOT_FOR_A_JOB = ("--help", "--usage", "--version", "-V")
REFUSED: Mapping[str, str] = {
    **{name: why for name, why in IMPOSSIBLE.items() if name not in _NOT_FOR_A_JOB},
    **worker_options.REFUSED,
}
"""Options that will never be, torchrun's and sbatch's, with the reason and the way out."""
YIELDS: Mapping[str, Sequence[str]] = job_options.SBATCH_VARIABLES
"""For Slurm: what sbatch reads from the environment wins over files, as everything there does."""


_NOT_IN_THE_SPEC = {"nodes": "1", "cluster": "auto", "runs_dir": f"./{DEFAULT_RUNS_DIR}"}


def default_of(option: Option) -> str | bool | None:
    """The default as on the command line; None: there is none, or it is found out later (the job's name …)."""
    if option.dest in _NOT_IN_THE_SPEC:
        return _NOT_IN_THE_SPEC[option.dest]
    if option.dest not in _FIELDS:
        return None
    entry = Entrypoint(kind=EntryKind.SCRIPT, target="")
    defaults = RunSpec(run_id="", uid="", name="", created_ns=0, entrypoint=entry, cwd="")
    value = getattr(defaults, _FIELDS[option.dest])
    if isinstance(value, bool):
        return value
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, (int, float)):
        return f"{value:g}" if abs(value) < 1e6 else str(value)
    return str(value) if value and isinstance(value, (str, StreamChoice, BadNodeSettings)) else None


_FIELDS = {
    **{option.dest: option.field for option in ALL_OPTIONS if option.field and option.dest != "run_id"},
    "grace": "signal_grace",
    "requeue": "requeue",
    "segment": "segment",
}
"""`Option.dest` → the field of `RunSpec` whose default is the option's."""
