"""A Python function as a worker's program: handed over through a file, its return value handed back through another.

The files lie in a 0700 folder on the node's own disk. cloudpickle writes them: functions of ``__main__``, lambdas and
closures go by value. A worker runs ``python -m hpc_elastic.agent.function_call CALL RESULTS``.

The workers of one node end together: one that has returned waits for the node's others (`ExitHold`).
"""

from __future__ import annotations

import fcntl
import os
import pickle
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hpc_elastic.base.host_facts import worker_arguments
from hpc_elastic.errors import UsageError
from hpc_elastic.worker_api.heartbeat import heartbeat

SECTION = "returned"
"""The section of a worker that is held: no timeout is meant for it."""
_STARTED, _RETURNED = b"s", b"r"
_LOOK_SECONDS = 0.02
_BEAT_SECONDS = 1.0


class ExitHold:
    """Holds a worker whose function has returned until those of the node's others have.

    Where a peer's connection closes while a process ends whose process group was not destroyed, gloo's threads abort it
    (SIGABRT at exit, after the result was written: seen with torch 2.13 on busy CPUs). No agent takes part: the workers
    share one file with a byte for each, which its process locks while it lives.
    """

    def __init__(self, path: str, *, local_rank: int, local_world_size: int) -> None:
        """`path`: on the node itself, another in each round. Where it can't be written, no worker is held."""
        self._others = [rank for rank in range(local_world_size) if rank != local_rank]
        self._rank = local_rank
        self._fd = -1
        if not self._others:
            return
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, local_rank)
            os.pwrite(self._fd, _STARTED, local_rank)
        except OSError:
            self._fd = -1

    def wait(self) -> None:
        if self._fd < 0:
            return
        try:
            os.pwrite(self._fd, _RETURNED, self._rank)
            next_beat = 0.0
            while not all(map(self._is_over, self._others)):
                if time.monotonic() >= next_beat:
                    heartbeat(section=SECTION)
                    next_beat = time.monotonic() + _BEAT_SECONDS
                time.sleep(_LOOK_SECONDS)
        except OSError:
            return

    def _is_over(self, rank: int) -> bool:
        state = os.pread(self._fd, 1, rank)
        if state != _STARTED:
            return state == _RETURNED
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        except (BlockingIOError, PermissionError):
            return False
        fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, rank)  # a process that takes its place may lock it
        return True


class FunctionCall:
    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        import tempfile  # workers import this module too

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
