"""A Python function as a worker's program: handed over through a file, its return value handed back through another.

The files lie in a 0700 folder on the node's own disk. cloudpickle writes them: functions of ``__main__``, lambdas and
closures go by value. A worker runs ``python -m hpc_elastic.agent.function_call CALL RESULTS``.
"""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hpc_elastic.base.self_command import worker_arguments
from hpc_elastic.errors import UsageError
from hpc_elastic.worker_api.exit_hold import ExitHold


class FunctionCall:
    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        import cloudpickle

        try:
            raw = cloudpickle.dumps((function, args))
        except Exception as error:  # whatever a user's object raises when it is taken apart
            name = getattr(function, "__qualname__", repr(function))
            raise UsageError(
                f"the function {name} can't be handed to another process: {error}; "
                "open files, locks and connections must be made inside of it"
            ) from error
        self._folder = tempfile.TemporaryDirectory(prefix="hpc-elastic-call-")
        self._call = Path(self._folder.name) / "call"
        # Functions of importable modules go by name: the worker must find what this process finds.
        self._call.write_bytes(pickle.dumps(sys.path) + raw)

    def argv(self, python: str, *, round_index: int) -> list[str]:
        results = f"{self._folder.name}/result-{round_index}"
        return [python, *worker_arguments("hpc_elastic.agent.function_call"), str(self._call), results]

    def result(self, *, round_index: int, local_rank: int) -> Any:
        """Raises `OSError`, `pickle.UnpicklingError`: it ended with 0 and left no result, as after ``os._exit(0)``."""
        return pickle.loads((Path(self._folder.name) / f"result-{round_index}-{local_rank}").read_bytes())

    def close(self) -> None:
        self._folder.cleanup()


def main(argv: list[str]) -> None:
    call, results = argv
    local_rank = int(os.environ["LOCAL_RANK"])
    hold = ExitHold(f"{results}.hold", local_rank=local_rank, local_world_size=int(os.environ["LOCAL_WORLD_SIZE"]))
    result = f"{results}-{local_rank}"
    sys.argv = [__file__]
    with open(call, "rb") as file:
        sys.path[:] = pickle.load(file)
        function, args = pickle.load(file)
    value = function(*args)
    import cloudpickle

    try:
        raw = cloudpickle.dumps(value)
    except Exception as error:
        raise TypeError(f"the return value, a {type(value).__name__}, can't be handed back: {error}") from error
    beside = f"{result}.tmp"
    with open(beside, "wb") as file:
        file.write(raw)
    os.replace(beside, result)
    hold.wait()
