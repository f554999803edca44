"""What ``submitit.AutoExecutor`` (1.5) hands its executor, and what it keeps to itself: ``slurm_*``.

An AutoExecutor drops, without a word, what has another executor's prefix. A program that says ``slurm_partition`` and
moves to ``cluster="elastic"`` means it all the same; so it is read where the AutoExecutor, which is calling, holds it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from hpc_elastic.submission import parameters

_MODULE = "submitit.auto.auto"
_PREFIX = "slurm_"
_FRAMES = 4


def slurm_arguments() -> dict[str, Any]:
    """The ``slurm_*`` arguments, without the prefix, of the AutoExecutor's call that is under way; empty for none."""
    frame = sys._getframe(1)
    for _ in range(_FRAMES):
        found = frame.f_back
        if found is None:
            return {}
        frame = found
        is_call = frame.f_code.co_name in ("flexible_init", "_internal_update_parameters")
        if is_call and frame.f_globals.get("__name__") == _MODULE:
            given = frame.f_locals.get("kwargs", {})
            return {name[len(_PREFIX) :]: value for name, value in given.items() if name.startswith(_PREFIX)}
    return {}


class ParameterNames(frozenset[str]):
    """The executor's names, as an AutoExecutor looks at them.

    It asks whether a name is one: what is none is refused here, with the nearest one that there is. And it lists them,
    to learn what `partition=` without a prefix means on *every* cluster, where the last executor that has the name
    wins: so only those are listed that are ours alone.
    """

    def __contains__(self, name: object) -> bool:
        if super().__contains__(name):
            return True
        raise parameters.unknown(str(name))

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(name for name in super().__iter__() if name not in _OF_OTHERS))


def _others() -> frozenset[str]:
    from submitit.local.local import LocalExecutor
    from submitit.slurm.slurm import SlurmExecutor

    return frozenset(SlurmExecutor._valid_parameters() | LocalExecutor._valid_parameters())


_OF_OTHERS = _others()
