"""``hpc-elastic batch RUN_DIR``: what the generated script becomes. Not for people."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hpc_elastic.errors import UsageError


def main(argv: Sequence[str]) -> int:
    """Supervise one attempt of the run in this Slurm job."""
    if len(argv) != 1 or argv[0].startswith("-"):
        raise UsageError("batch takes one run directory; it is called by the script that submit makes")
    from hpc_elastic.launch.batch import run_batch

    return run_batch(Path(argv[0]))
