"""`Script`: a training script as a function to submit, so that it runs unchanged under an executor."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable
from typing import Any

from hpc_elastic import worker_heartbeat
from hpc_elastic.errors import UsageError
from hpc_elastic.submission.call import Call


class Script:
    """``executor.submit(Script("train.py"), "--epochs", 90)``: what ``hpc-elastic submit train.py --epochs 90`` runs.

    The worker itself becomes the script: ``__name__`` is ``"__main__"``, ``sys.argv`` and ``sys.path`` are as under
    ``python train.py``. It returns None; what it raises, and an exit code other than 0, fail it. After a restart or a
    requeue it begins anew, and goes on from the checkpoint that it has saved itself.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Args:
        path: The file, which all nodes see.

        Raises:
            UsageError: there is none.
        """
        self.path = os.path.abspath(path)
        if not os.path.isfile(self.path):
            raise UsageError(f"there is no script {self.path}")
        self.__qualname__ = os.path.basename(self.path)  # for messages and the run's name

    def __call__(self, *args: object) -> None:
        before = sys.argv, sys.path
        sys.argv = [self.path, *map(str, args)]
        sys.path = [os.path.dirname(self.path), *sys.path]
        try:
            runpy.run_path(self.path, run_name="__main__")
        except SystemExit as leave:
            # Only the script's own: what leaves because of a notice is of another class.
            if type(leave) is not SystemExit or leave.code not in (None, 0):
                raise
        finally:
            sys.argv, sys.path = before

    @property
    def checkpoint(self) -> Callable[..., Any] | None:
        """By submitit's protocol; None where the script asks for notices itself, and saves at a step of its own."""
        return None if worker_heartbeat.asks_for_notices() else self._again

    def _again(self, *args: object) -> Any:
        try:
            from submitit.core.utils import DelayedSubmission
        except ImportError:  # a worker needs no submitit
            return Call(self, args)
        return DelayedSubmission(self, *args)
