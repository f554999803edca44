"""A real Slurm of several nodes on one machine, for tests and by hand: ``python -m tests.rigs.slurm_cluster up 4``."""

from __future__ import annotations

from .cluster import ENDED_STATES, SlurmCluster
from .emulated_fs import caches_of
from .layout import RigError
from .prerequisites import install_prerequisites, missing_prerequisites, must_run
from .processes import CommandFailed, RigProcess

__all__ = [
    "ENDED_STATES",
    "CommandFailed",
    "RigError",
    "RigProcess",
    "SlurmCluster",
    "caches_of",
    "install_prerequisites",
    "missing_prerequisites",
    "must_run",
]
