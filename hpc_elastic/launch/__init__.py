"""The batch side: a supervisor that starts one agent per node, and writes the verdict and the report.

Called, ``hpc_elastic.launch(fn, …)``, it is `submission.notebook.launch`: the name is torch's for it.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _CallableModule(ModuleType):
    def __call__(self, fn: Any, *args: Any, **options: Any) -> Any:
        from hpc_elastic.submission.notebook import launch

        return launch(fn, *args, **options)


sys.modules[__name__].__class__ = _CallableModule
