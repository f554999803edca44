"""One worker, started by each start method, with all that it prints and how it ends: for what must be alike."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpc_elastic.agent.fork_server import IMPORT_SECONDS, ForkServer, ServerState
from hpc_elastic.agent.fork_server_process import Launch
from hpc_elastic.base.clock import RunClock
from hpc_elastic.base.loop import FileExecutor, wait_readable
from hpc_elastic.run.events import Note
from hpc_elastic.run.spec import Preload
from hpc_elastic.workers import linux
from hpc_elastic.workers.spawn import ExitStatus, Inherited, WorkerProcess, start_worker

PATIENCE = 60.0
INHERITED = Inherited(umask=0o027, core_limit=(0, 0), subreaper=True, file_limit=(256, 512))


@dataclass
class Seen:
    """What can be seen of a worker from outside."""

    pid: int
    status: ExitStatus
    stdout: str
    stderr: str


@dataclass
class Starter:
    """Starts workers of one script. For a ``with``: its server is gone at the end."""

    folder: Path
    argv: Sequence[str] = ("train.py",)
    """After ``python -u``."""
    script: str | None = None
    """The text of train.py, where the test has not written it."""
    preload: Sequence[str] = ("json",)
    environ: Mapping[str, str] = field(default_factory=dict)
    import_seconds: float = IMPORT_SECONDS
    is_auto: bool = False
    python: str = sys.executable

    def __post_init__(self) -> None:
        self.clock = RunClock()
        self.events: list[Note] = []
        if self.script is not None:
            (self.folder / "train.py").write_text(self.script)
        site = self.folder / "site"
        site.mkdir(exist_ok=True)
        names = ("PATH", "HOME", "LANG", "PYTHONPATH", "VIRTUAL_ENV", "RES_OPTIONS", "OMP_NUM_THREADS")
        self.base = {name: os.environ[name] for name in names if name in os.environ} | {
            "PYTHONFAULTHANDLER": "1",
            **self.environ,
        }
        self.command = [self.python, "-u", *self.argv]
        self.files = FileExecutor(clock=self.clock)
        self.server = ForkServer(
            Launch(
                argv=self.command,
                environ=self.base,
                watched=["RANK", "LOCAL_RANK"],
                cwd=str(self.folder),
                inherited=INHERITED,
                folder=site,
                log_path=self.folder / "server.log",
                pipe_bytes=1 << 16,
                preload_path=self.folder / "preload.json",
            ),
            Preload(modules=tuple(self.preload), is_auto=self.is_auto),
            clock=self.clock,
            files=self.files,
            write_event=self.events.append,
            import_seconds=self.import_seconds,
        )

    def __enter__(self) -> Starter:
        assert threading.current_thread() is threading.main_thread()
        self._was_subreaper = linux.is_child_subreaper()
        linux.set_child_subreaper()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.close()
        linux.set_child_subreaper(on=self._was_subreaper)

    def until(self, state: ServerState) -> None:
        """Handle the server's messages until it is in `state`."""
        deadline = time.monotonic() + PATIENCE
        while self.server.state is not state:
            assert time.monotonic() < deadline, f"{self.server.state}, not {state}: {self.log()}"
            wait_readable(self.server.watched(), 0.05)
            self.server.handle()

    def ready(self) -> None:
        self.server.start()
        self.until(ServerState.READY)

    def imports(self) -> int:
        """How many times a server was ready so far."""
        return sum(event.subject == "fork_server_ready" for event in self.events)

    def log(self) -> str:
        path = self.folder / "server.log"
        return path.read_text() if path.exists() else ""

    def spawn(self, **env: str) -> WorkerProcess:
        return start_worker(
            argv=self.command,
            env={**self.base, **env},
            cwd=str(self.folder),
            inherited=INHERITED,
            clock=self.clock,
            pipe_bytes=1 << 16,
        )

    def fork(self, **env: str) -> WorkerProcess:
        (found,) = self.server.fork_workers([{**self.base, **env}])
        assert found is not None, f"{self.server.why_fresh}\n{self.log()}"
        return found

    def both(self, **env: str) -> tuple[Seen, Seen]:
        """A fresh one and a fork, to their ends."""
        return finish(self.spawn(**env)), finish(self.fork(**env))


def finish(worker: WorkerProcess, *, send: signal.Signals | None = None, at: str = "") -> Seen:
    """Read a worker's output to its end; send a signal once it has printed `at`."""
    stdout, stderr = worker.take_output()
    texts = {stdout: b"", stderr: b""}
    deadline = time.monotonic() + PATIENCE
    open_ends = set(texts)
    while open_ends:
        assert time.monotonic() < deadline, f"the worker does not end: {texts}"
        for fd in wait_readable(open_ends, 0.2):
            chunk = os.read(fd, 1 << 16)
            texts[fd] += chunk
            if not chunk:
                open_ends.discard(fd)
                os.close(fd)
        if send is not None and at.encode() in texts[stdout]:
            os.kill(worker.pid, send)
            send = None
    while (status := worker.poll()) is None:
        assert time.monotonic() < deadline, "the worker closed its output and goes on"
        time.sleep(0.005)
    worker.release()
    return Seen(worker.pid, status, texts[stdout].decode(), texts[stderr].decode())
