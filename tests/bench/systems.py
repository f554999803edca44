"""The two that are compared: how each is started, and which of its processes are agents."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tests.rigs.processes import Process, kill_marked, marked

ROOT = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).with_name("worker.py")
NODES = 4
MARK = "HPC_ELASTIC_BENCH"
GRACE = "3"
"""Seconds from SIGTERM to SIGKILL, for both."""
_POLL = 0.005


class TookTooLong(Exception):
    """A moment that did not come; says which, and what the job said last."""


@dataclass(frozen=True, slots=True)
class System:
    name: str
    commands: Callable[[Path, Sequence[str]], list[list[str]]]
    """Session folder, worker's argument list → the commands that start a job of `workers` workers."""
    is_agent: Callable[[Process], bool]
    environ: dict[str, str] = field(default_factory=dict)
    workers: int = NODES
    """In all; with as many nodes, unless it says otherwise."""


def _torchrun_commands(folder: Path, worker: Sequence[str], *, restarts: int = 3) -> list[list[str]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(NODES), "--nproc-per-node", "1"]
    agent += ["--max-restarts", str(restarts), "--shutdown-timeout", GRACE]
    agent += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"]
    return [[*agent, "--rdzv-id", folder.name, *worker] for _ in range(NODES)]


def ours(name: str = "hpc-elastic", *options: str, nodes: int = NODES, nproc: int = 1) -> System:
    """`hpc-elastic run` on this machine, with further options."""
    command = [sys.executable, "-m", "hpc_elastic", "run", "--cluster", "local", "--nodes", str(nodes)]
    command += ["--nproc-per-node", str(nproc), "--max-restarts", "3", "--max-requeues", "0"]
    command += ["--shutdown-timeout", GRACE, *options]
    return System(
        name=name,
        commands=lambda folder, worker: [[*command, "--runs-dir", str(folder / "runs"), *worker]],
        # The agent's guardian is a fork of it: the same arguments, but an agent's child.
        is_agent=lambda process: "agent" in process.argv[:7] and "hpc_elastic" in " ".join(process.argv[:7]),
        workers=nodes * nproc,
    )


def torchrun(name: str = "torchrun", *, restarts: int = 3) -> System:
    return System(
        name=name,
        commands=partial(_torchrun_commands, restarts=restarts),
        is_agent=lambda process: "torch.distributed.run" in process.argv,
        # Without it torchrun 2.13 gets no process group again: the agents' restart counts, and so the keys, differ.
        environ={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
    )


TORCHRUN = torchrun()
OURS = ours()


class Session:
    """One job of one system, with a folder, a mark and a log of its own; everything is gone when it closes."""

    def __init__(self, system: System, *arguments: str, limit: float = 60.0, worker: Path = WORKER) -> None:
        self.system = system
        self._limit = limit
        self._mark = uuid.uuid4().hex
        self._folder = tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True)
        self.folder = Path(self._folder.name)
        for name in ("stamps", "tmp", "home", "state", "runs"):
            (self.folder / name).mkdir(mode=0o700)
        self._environ = {
            **os.environ,
            **system.environ,
            MARK: self._mark,
            "BENCH_STAMPS": str(self.folder / "stamps"),
            "TMPDIR": str(self.folder / "tmp"),
            "XDG_RUNTIME_DIR": str(self.folder / "tmp"),
            "XDG_STATE_HOME": str(self.folder / "state"),
            "HOME": str(self.folder / "home"),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
        }
        self._worker = [str(worker), *arguments]
        self.began = time.time_ns()
        self.started: list[subprocess.Popen[bytes]] = []
        self._start()

    def _start(self) -> None:
        with open(self.folder / "log", "ab") as log:
            for command in self.system.commands(self.folder, self._worker):
                self.started.append(
                    subprocess.Popen(
                        command, cwd=self.folder, env=self._environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                        start_new_session=True,
                    )
                )  # fmt: skip

    def start_again(self) -> None:
        """End all of it at once, and start the commands again in the same folder."""
        self._end()
        self.started.clear()
        self._start()

    def _end(self) -> None:
        kill_marked(MARK, self._mark)
        for process in self.started:
            process.kill()
            process.wait()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self._folder.cleanup()

    def processes(self) -> list[Process]:
        return marked(MARK, self._mark)

    def agents(self) -> list[Process]:
        agents = [process for process in self.processes() if self.system.is_agent(process)]
        pids = {process.pid for process in agents}
        return [process for process in agents if process.parent not in pids]

    def moments(self, name: str, *, since: int = 0) -> list[dict[str, Any]]:
        """The stamps of this name later than `since` (nanoseconds since the epoch)."""
        found = []
        for path in (self.folder / "stamps").glob("*.jsonl"):
            for line in path.read_text().splitlines():
                try:
                    value = json.loads(line)
                except ValueError:
                    continue  # being written
                if value["moment"] == name and value["t"] > since:
                    found.append(value)
        return found

    def wait_for_all(self, name: str, *, since: int) -> float:
        """Seconds from `since` until the last of the ranks stamped `name`."""
        self.wait_until(
            lambda: {m["rank"] for m in self.moments(name, since=since)} >= set(range(self.system.workers)),
            f"'{name}' of all ranks",
        )
        first = {m["rank"]: m["t"] for m in sorted(self.moments(name, since=since), key=lambda m: -m["t"])}
        return (max(first.values()) - since) / 1e9

    def wait_until(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + self._limit
        while not condition():
            if time.monotonic() > deadline:
                raise TookTooLong(f"{self.system.name}: no {what}; its log ends:\n{self.log_tail()}")
            time.sleep(_POLL)

    def log_tail(self) -> str:
        return "\n".join((self.folder / "log").read_text(errors="replace").splitlines()[-15:])

    def kill_worker(self, rank: int) -> int:
        """SIGKILL the newest worker of this rank. Returns when, in nanoseconds since the epoch."""
        newest = max((m for m in self.moments("line") if m["rank"] == rank), key=lambda m: m["t"])
        now = time.time_ns()
        os.kill(newest["pid"], signal.SIGKILL)
        return now

    def end_workers(self) -> None:
        """Have the workers exit with 0, and wait until what was started here has done the same."""
        (self.folder / "stamps" / "stop").touch()
        self.wait_until(lambda: all(process.poll() is not None for process in self.started), "end")
        codes = {process.returncode for process in self.started}
        assert codes == {0}, f"{self.system.name} ended with {sorted(codes)}:\n{self.log_tail()}"
