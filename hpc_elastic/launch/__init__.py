"""The batch side of a run, from sbatch to the requeue: docs/explanation/ways.md follows an attempt through it."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import NoReturn


class _Package(ModuleType):
    def __call__(self, *_: object, **__: object) -> NoReturn:
        raise TypeError(
            "hpc_elastic.launch is no longer a function: "
            "use ElasticExecutor(folder, cluster='local') of hpc_elastic.submission"
        )


sys.modules[__name__].__class__ = _Package
