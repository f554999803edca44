"""An `Injector` on a node of a Slurm job: a step of its own beside the agents', with one line of JSON for each request.

The owner of a job may start a step in it at any time (``srun --overlap``). What runs there has no mark of the run, so
that faults don't hit it, and ends with its standard input, or, after a SIGTERM, when no process of the run is left on
the node: Slurm sends that to all steps, before a job's end and as a notice.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from msgspec import Struct

from hpc_elastic.base.codec import from_json, to_json
from hpc_elastic.base.self_command import module_command
from hpc_elastic.base.waking import wait_readable
from hpc_elastic.rehearsal.injector import Injector, NotNow
from hpc_elastic.rehearsal.saves import FileEvent, WrittenNames
from hpc_elastic.slurm.commands import JobId, srun_one_agent, submission_environment

_ANSWER_SECONDS = 20.0
"""For a step to begin on a busy node, and for its first answer."""
_LOOK_SECONDS = 0.2
_END_SECONDS = 2.0


class _Setup(Struct, frozen=True, kw_only=True):
    """The first line that the process on the node reads."""

    uid: str
    folders: tuple[str, ...]
    names: WrittenNames


class _Message(Struct, frozen=True, kw_only=True):
    """A line that it writes: files that were written, or the answer to a request."""

    files: tuple[FileEvent, ...] = ()
    names: WrittenNames | None = None
    is_answer: bool = False
    said: str = ""
    """By `tear`."""
    refused: str = ""
    """Why it was not done."""


class RemoteInjector:
    """The caller's end. What it does raises NotNow where the node does not answer."""

    def __init__(
        self,
        job: JobId,
        node: str,
        uid: str,
        *,
        env: Mapping[str, str],
        folders: Sequence[Path] = (),
        names: WrittenNames | None = None,
    ) -> None:
        """Start the step; it is not waited for.

        Args:
            job: The run's.
            node: By Slurm's name.
            uid: The run's.
            env: For srun.
            folders: In which the script saves.
            names: What is known of the files that it writes.
        """
        self.node = node
        self._names = names if names is not None else WrittenNames()
        cluster = [f"--clusters={job.cluster}"] if job.cluster else []
        command = module_command("hpc_elastic.rehearsal.remote_injector", "main")
        self._process = subprocess.Popen(
            srun_one_agent(node, command, extra=(*cluster, f"--jobid={job}", "--quiet")),
            env=submission_environment(env),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._output, False)
        self._partial = b""
        self._files: list[FileEvent] = []
        self._answers: list[_Message] = []
        self.has_ended = False
        self._write(to_json(_Setup(uid=uid, folders=tuple(map(str, folders)), names=self._names)))

    sees_files = True

    def filenos(self) -> list[int]:
        return [] if self.has_ended else [self._output]

    def read_files(self) -> list[FileEvent]:
        self._read()
        found, self._files = self._files, []
        return found

    def signal(self, pid: int, number: int) -> None:
        self._ask("signal", pid, number)

    def signal_node(self, key: str, number: int) -> None:
        self._ask("signal_node", key, number)

    def signal_workers(self, number: int) -> None:
        self._ask("signal_workers", number)

    def tear(self) -> str:
        return self._ask("tear").said

    def close(self) -> None:
        """End the step."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.close()
            self._process.wait(_END_SECONDS)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self.has_ended = True

    def _ask(self, what: str, *arguments: object) -> _Message:
        self._write([what, *arguments])
        deadline = time.monotonic() + _ANSWER_SECONDS
        while not self._answers:
            left = deadline - time.monotonic()
            if left <= 0 or self.has_ended:
                raise NotNow(f"no step could be started on {self.node}" if left > 0 else f"{self.node} is silent")
            wait_readable(self.filenos(), left)
            self._read()
        answer = self._answers.pop(0)
        if answer.refused:
            raise NotNow(answer.refused)
        return answer

    def _write(self, value: object) -> None:
        try:
            os.write(self._input, json.dumps(value).encode() + b"\n")
        except OSError:
            self.has_ended = True

    def _read(self) -> None:
        while not self.has_ended:
            try:
                data = os.read(self._output, 1 << 16)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            self.has_ended = not data
            *lines, self._partial = (self._partial + data).split(b"\n")
            for line in lines:
                self._take(line)

    def _take(self, line: bytes) -> None:
        try:
            message = from_json(_Message, json.loads(line))
        except ValueError:
            return  # a profile's, on that node
        self._files += message.files
        if message.names is not None:
            self._names.learn(message.names)
        if message.is_answer:
            self._answers.append(message)


def main() -> NoReturn:
    """The process on the node."""
    terminated: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: terminated.append(number))
    partial = b""
    lines: list[bytes] = []
    injector: Injector | None = None
    names = WrittenNames()
    try:
        while not (terminated and (injector is None or not injector.all())):
            ready = wait_readable([0, *(injector.filenos() if injector is not None else ())], _LOOK_SECONDS)
            if injector is not None and (files := injector.read_files()):
                _send(_Message(files=tuple(files), names=names))
            if 0 in ready:
                data = os.read(0, 1 << 16)
                if not data:
                    break
                *lines, partial = (partial + data).split(b"\n")
                for line in lines:
                    value: Any = json.loads(line)
                    if injector is None:
                        setup = from_json(_Setup, value)
                        names = setup.names
                        injector = Injector(setup.uid, [Path(folder) for folder in setup.folders], names)
                    else:
                        _send(_do(injector, value))
    except BrokenPipeError:
        pass
    finally:
        if injector is not None:
            injector.close()
    sys.exit(0)


def _do(injector: Injector, request: list[Any]) -> _Message:
    does: dict[str, Callable[..., str | None]] = {
        "signal": injector.signal, "signal_node": injector.signal_node, "signal_workers": injector.signal_workers,
        "tear": injector.tear,
    }  # fmt: skip
    try:
        found = does[request[0]](*request[1:])
    except NotNow as reason:
        return _Message(is_answer=True, refused=str(reason))
    return _Message(is_answer=True, said=found or "")


def _send(message: _Message) -> None:
    data = json.dumps(to_json(message)).encode() + b"\n"
    while data:
        data = data[os.write(1, data) :]
