"""``--prewarm``: what workers are likely to import is read into the node's page cache while the nodes meet.

For fresh interpreters, in a fork server's place. `hpc_elastic.workers.prewarm` reads, in a process of its own that the
agent never waits for: started by the thread for files, seen when it has ended, killed with the agent.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

from hpc_elastic.agent.fork_server_process import folder_of, script_text
from hpc_elastic.agent.fork_server_states import NoForkServer
from hpc_elastic.agent.script_text import top_level_imports
from hpc_elastic.base.file_executor import FileExecutor
from hpc_elastic.base.host_facts import available_memory
from hpc_elastic.run.agent_events import FilesPrewarmed
from hpc_elastic.run.event_types import AgentEvent
from hpc_elastic.run.preload import load_preload
from hpc_elastic.run.spec import EntryKind, RunSpec
from hpc_elastic.workers import prewarm as program
from hpc_elastic.workers.environment_change import NO_CHANGE, EnvironmentChange

logger = logging.getLogger(__name__)

MOST_SECONDS = 120.0
MOST_BYTES = 8 << 30
MEMORY_SHARE = 4
"""At most the share of the free memory: the page cache of a job counts as its memory where the node's is short."""
_LONGEST_ANSWER = 4096


class Prewarm(NoForkServer):
    """One agent's, beside fresh interpreters."""

    def __init__(
        self,
        spec: RunSpec,
        *,
        environ: Mapping[str, str],
        preload_path: Path,
        files: FileExecutor,
        write_event: Callable[[AgentEvent], object],
    ) -> None:
        """Args:
        spec: The run's.
        environ: The workers', with the tag of what an agent starts.
        preload_path: Where it is kept what workers were seen to import.
        files: Starts the process, and reads the script.
        write_event: Of the agent's log.
        """
        self._spec = spec
        self._environ = environ
        self._preload_path = preload_path
        self._files = files
        self._write_event = write_event
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = False
        self._answer = b""
        self._fd = -1

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def fileno(self) -> int:
        return self._fd

    def begin(self, change: EnvironmentChange = NO_CHANGE) -> None:
        if self._spec.entrypoint.kind is EntryKind.COMMAND:
            logger.warning("--prewarm: nothing is read: the workers run a command, not a Python script")
            return
        self._fd, theirs = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._files.post(lambda: self._start(theirs, change))

    def _start(self, stdout: int, change: EnvironmentChange) -> None:
        """In the thread for files, which may hang."""
        argv, cwd = change.command(self._spec.entrypoint.argv()), self._spec.cwd
        try:
            kept = load_preload(self._preload_path)
            learned = [name.partition(".")[0] for name in kept.wanted] if kept is not None else []
            plan = {
                "agent": os.getpid(),
                "roots": list(dict.fromkeys(["torch", "numpy", *top_level_imports(script_text(argv, cwd)), *learned])),
                "folder": folder_of(argv, cwd),
                "bytes": min(MOST_BYTES, (available_memory() or MOST_BYTES) // MEMORY_SHARE),
                "seconds": MOST_SECONDS,
            }
            if not self._is_closed:
                self._process = subprocess.Popen(
                    [argv[0], "-c", Path(program.__file__).read_text(encoding="utf-8"), json.dumps(plan)],
                    stdin=subprocess.DEVNULL,
                    stdout=stdout,
                    stderr=subprocess.DEVNULL,
                    cwd=cwd,
                    env=change.apply(self._environ),
                    start_new_session=True,
                )
        except OSError as error:
            os.write(stdout, json.dumps({"why": f"it can't be started: {error.strerror}"}).encode())
        finally:
            os.close(stdout)

    def handle(self) -> None:
        if self._fd < 0:
            return
        try:
            got = os.read(self._fd, _LONGEST_ANSWER)
        except BlockingIOError:
            return
        self._answer += got
        if got:
            return
        self._close_pipe()
        try:
            found = json.loads(self._answer)
        except ValueError:
            found = {"why": "its process ended without an answer"}
        if self._process is not None:
            self._process.wait()
            self._process = None
        event = FilesPrewarmed(
            files=int(found.get("files", 0)),
            bytes=int(found.get("bytes", 0)),
            seconds=float(found.get("seconds", 0.0)),
            reason=str(found.get("why", "")),
        )
        ended = f", not all: {event.reason}" if event.reason else ""
        logger.info("prewarmed: %d files, %d MiB, %.1f s%s", event.files, event.bytes >> 20, event.seconds, ended)
        self._write_event(event)

    def _close_pipe(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def close(self) -> None:
        self._is_closed = True
        self._close_pipe()
        if self._process is not None:
            self._process.kill()
            try:
                self._process.wait(1.0)
            except subprocess.TimeoutExpired:
                pass  # a hung filesystem has it; it dies when that answers
