"""An `Injector` on a node of a Slurm job: each request is a step of its own beside the agents', which prints an answer.

The owner of a job may start a step in it at any time (``srun --overlap``). What runs there has no mark of the run, so
that faults don't hit it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from msgspec import Struct

from hpc_elastic.base.codec import from_json, to_json
from hpc_elastic.base.self_command import module_command
from hpc_elastic.rehearsal.injector import Injector, NotNow
from hpc_elastic.rehearsal.saves import FileNames
from hpc_elastic.slurm.commands import JobId, srun_one_agent, submission_environment

_STEP_SECONDS = 30.0
"""For a step to begin on a busy node, and to end."""


class _Answer(Struct, frozen=True, kw_only=True):
    """The last line that it prints."""

    at: float = 0.0
    name: str = ""
    """The file that was being written."""
    refused: str = ""
    """Why it was not done."""


class RemoteInjector:
    """The caller's end. What it does raises NotNow where the node does not answer, too."""

    def __init__(self, job: JobId, node: str, uid: str, *, env: Mapping[str, str], folders: Sequence[Path]) -> None:
        """Args:
        job: The run's.
        node: By Slurm's name.
        uid: The run's.
        env: For srun.
        folders: In which the script saves.
        """
        self._job = job
        self._node = node
        self._env = submission_environment(env)
        self._uid, self._folders = uid, tuple(map(str, folders))

    def signal(self, pid: int, number: int) -> float:
        return self._ask("signal", pid, number).at

    def signal_node(self, key: str, number: int) -> float:
        return self._ask("signal_node", key, number).at

    def kill_in_save(self, names: FileNames, seconds: float) -> tuple[float, str]:
        answer = self._ask("kill_in_save", to_json(names), seconds, seconds=seconds)
        return answer.at, answer.name

    def _ask(self, what: str, *arguments: object, seconds: float = 0.0) -> _Answer:
        cluster = [f"--clusters={self._job.cluster}"] if self._job.cluster else []
        request = json.dumps([self._uid, self._folders, what, *arguments])
        command = [*module_command("hpc_elastic.rehearsal.remote_injector", "main"), request]
        try:
            done = subprocess.run(
                srun_one_agent(self._node, command, extra=(*cluster, f"--jobid={self._job}", "--quiet")),
                env=self._env,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_STEP_SECONDS + seconds,
                start_new_session=True,
            )
            answer = from_json(_Answer, json.loads(done.stdout.splitlines()[-1]))
        except (subprocess.TimeoutExpired, ValueError, IndexError):
            raise NotNow(f"no step could be started on {self._node}") from None
        if answer.refused:
            raise NotNow(answer.refused)
        return answer


def main() -> NoReturn:
    """The process on the node. It is given a run's uid, its folders, a method of `Injector`, what that takes."""
    uid, folders, what, *arguments = json.loads(sys.argv[1])
    injector = Injector(uid, [Path(folder) for folder in folders])
    try:
        if what == "kill_in_save":
            names, seconds = arguments
            at, name = injector.kill_in_save(from_json(FileNames, names), seconds)
            answer = _Answer(at=at, name=name)
        else:
            does: dict[str, Callable[..., float]] = {"signal": injector.signal, "signal_node": injector.signal_node}
            answer = _Answer(at=does[what](*arguments))
    except NotNow as reason:
        answer = _Answer(refused=str(reason))
    sys.stdout.write(json.dumps(to_json(answer)) + "\n")
    sys.exit(0)
