"""A run of real agents on such nodes: started, disturbed, watched from outside, and cleared up after."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_elastic.base.files import make_private_dir
from hpc_elastic.launch.run_directory import claim_attempt, create_run
from hpc_elastic.run.option_values import DEFAULT_LIMITS
from hpc_elastic.run.paths import AttemptInfo, AttemptPaths
from hpc_elastic.run.spec import EntryKind, Entrypoint, RunSpec, new_run_id, rdzv_values
from hpc_elastic.workers.tree import NODE_TAG_VARIABLE
from tests.rigs.event_pairs import read_events
from tests.rigs.network_nodes.network import NETNS_FOLDER, Network
from tests.rigs.nfs_emulator import MountSettings, NfsEmulator
from tests.rigs.processes import bare_environ, deaths_of, marked
from tests.rigs.waiting import until

ROOT = Path(__file__).resolve().parents[3]
MARK = "NETWORK_RUN_MARK"
_BOOT = 'hostname "$1"; mount --bind "$2" "$3"; shift 3; "$@" & wait $!'

_WORKER = """
import os, signal, time
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
stage = os.environ["NETWORK_RUN_STAGE"]
name = f"{os.environ['TORCHELASTIC_RESTART_COUNT']}-{os.environ['RANK']}-{os.environ['GROUP_RANK']}"
name += "-" + os.environ["NETWORK_RUN_NODE"]
open(f"{stage}/{name}", "w").close()
while not os.path.exists(f"{stage}/end"):
    time.sleep(0.1)
"""


@dataclass(frozen=True, slots=True)
class Worker:
    pid: int
    rank: int
    round: int
    node: int


class NetworkRun:
    """One attempt on `nodes` nodes, one worker each, in a ``with``. At its end nothing of it is left.

    There is no supervisor: nobody starts an agent again, so that a node that was lost stays lost.
    """

    def __init__(
        self,
        folder: Path,
        *,
        nodes: int,
        caches: float = 3.0,
        conf: Mapping[str, str] | None = None,
        mount_settings: MountSettings | None = None,
        ipv6_only: bool = False,
    ) -> None:
        """Args:
        folder: Of the test; empty.
        nodes: How many; also the most that a round takes.
        caches: Seconds for which a mount trusts what it knows.
        conf: As ``--rdzv-conf``.
        mount_settings: In place of `caches`.
        ipv6_only: Nodes without an IPv4 address.
        """
        self.nodes = nodes
        self.folder = folder
        self.mark = uuid.uuid4().hex
        settings = mount_settings or MountSettings(attributes=caches, directories=caches)
        self._server = folder / "server"
        self.stage = folder / "stage"
        self._shared = folder / "shared"
        for path in (self._server, self.stage, self._shared):
            path.mkdir(mode=0o700)
        (folder / "worker.py").write_text(_WORKER)
        self.network = Network(nodes, ipv6_only=ipv6_only)
        self.emulator = NfsEmulator(self._server, mounts=nodes, settings=settings)
        self._spec = RunSpec(
            run_id=new_run_id("nodes"),
            uid=uuid.uuid4().hex,
            name="nodes",
            created_ns=time.time_ns(),
            entrypoint=Entrypoint(
                kind=EntryKind.COMMAND,
                target=sys.executable,
                args=("-S", str(folder / "worker.py")),
                python="/bin/false",  # has no torch: no TCPStore is served, which would cost seconds
            ),
            cwd=str(folder),
            cluster="slurm",
            min_nodes=1,
            max_nodes=nodes,
            nproc_per_node="1",
            max_restarts=100,
            max_same_failures=0,
            shutdown_timeout=10.0,
            rdzv_conf=rdzv_values(conf or {}),
            health_checks=dict(DEFAULT_LIMITS),
        )
        self._agents: dict[int, subprocess.Popen[bytes]] = {}
        self._stack = ExitStack()

    def __enter__(self) -> NetworkRun:
        try:
            self._stack.enter_context(self.emulator)
            self._stack.enter_context(self.network)
            self._stack.callback(self._kill_all)
            self._attempt = self.make_attempt()
            for node in range(self.nodes):
                self.start_agent(node)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def make_attempt(self) -> AttemptPaths:
        """The run directory and the attempt's in it, on the server; no process."""
        make_private_dir(self._server / "runs")
        attempt = claim_attempt(create_run(self._spec, self._server / "runs").paths)
        AttemptInfo(
            number=attempt.number,
            cluster="network",
            nodes=tuple(f"n{node}" for node in range(self.nodes)),
            batch_host="n0",
            started_ns=time.time_ns(),
        ).save(attempt.attempt_json)
        return attempt

    def start_agent(self, node: int) -> None:
        """On a node that has none."""
        run_dir = self._shared / "runs" / self._spec.run_id
        agent = [sys.executable, "-m", "hpc_elastic", "agent", "--run-dir", str(run_dir), "--attempt", "0"]
        agent += ["--node", str(node)]
        boot = ["sh", "-c", _BOOT, "sh", f"n{node}", str(self.emulator.paths[node]), str(self._shared)]
        argv = ["nsenter", f"--net={NETNS_FOLDER / self.network.netns(node)}"]
        argv += ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc", *boot, *agent]
        environ = bare_environ() | {
            MARK: self.mark,
            "NETWORK_RUN_STAGE": str(self.stage),
            "NETWORK_RUN_NODE": str(node),
            "PYTHONPATH": str(ROOT),
            "TMPDIR": str(self.folder),
            NODE_TAG_VARIABLE: f"{self._spec.uid}:host",
        }
        with open(self.log_path(node), "ab") as log:
            self._agents[node] = subprocess.Popen(
                argv, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def _kill_all(self) -> None:
        for mount in range(self.nodes):
            self.emulator.thaw(mount)  # who waits for a frozen mount can't even be killed
        for node in self._agents:
            self.kill_node(node)

    # -- what happens to nodes

    def kill_node(self, node: int) -> float:
        """All processes of a node die at once. Returns when, by CLOCK_MONOTONIC."""
        now = time.monotonic()
        self._agents[node].kill()  # unshare's child, process 1 of the node, goes with it, and so all others
        self._agents[node].wait()
        return now

    def kill_worker(self, worker: Worker) -> float:
        """SIGKILL. Returns when, by CLOCK_MONOTONIC."""
        now = time.monotonic()
        os.kill(worker.pid, signal.SIGKILL)
        return now

    def let_workers_end(self) -> None:
        (self.stage / "end").touch()

    def wait_for_ends(self, nodes: Iterable[int], *, within: float = 90.0) -> list[int]:
        """The exit codes of these nodes' boot scripts: 0 once the agent has ended."""
        self.until(
            lambda: all(self._agents[node].poll() is not None for node in nodes), "the agents' end", within=within
        )
        return [self._agents[node].returncode for node in nodes]

    # -- what can be seen

    def until(self, condition: Callable[[], Any], what: str, *, within: float = 90.0) -> Any:
        return until(condition, lambda: f"{what}\n{self.logs()}", seconds=within, every=0.01)

    def started(self, round_index: int) -> dict[int, int]:
        """Who has started in a round: rank → node."""
        found = {}
        for name in os.listdir(self.stage):
            words = name.split("-")
            if len(words) == 4 and int(words[0]) == round_index:
                found[int(words[1])] = int(words[3])
        return found

    def newest_round(self) -> int:
        return max((int(name.split("-")[0]) for name in os.listdir(self.stage) if name.count("-") == 3), default=-1)

    def wait_round(self, *, count: int, after: int = -1, within: float = 90.0) -> int:
        """Wait until all of `count` workers of one round later than `after` run. Returns the round."""

        def found() -> int | None:
            newest = self.newest_round()
            return newest + 1 if newest > after and len(self.started(newest)) == count else None

        value: int = self.until(found, f"round of {count} workers after round {after}", within=within)
        return value - 1

    def workers(self, round_index: int) -> dict[int, Worker]:
        found = {}
        for process in marked(MARK, self.mark):
            environ = process.environ
            if "RANK" in environ and int(environ["TORCHELASTIC_RESTART_COUNT"]) == round_index:
                node = int(environ["NETWORK_RUN_NODE"])
                found[node] = Worker(process.pid, int(environ["RANK"]), round_index, node)
        return found

    def events(self, name: str) -> list[dict[str, Any]]:
        """All events of this name, as the server has them, by time (one machine, one clock)."""
        found = [event for event in read_events(self._attempt.events) if event["event"] == name]
        return sorted(found, key=lambda event: event["t"])

    @property
    def attempt(self) -> AttemptPaths:
        """As the server has it."""
        return self._attempt

    def newest_record(self) -> dict[str, Any]:
        """The log's newest record, as the server has it."""
        names = sorted(name for name in os.listdir(self._attempt.store / "log") if name.isdecimal())
        value: dict[str, Any] = json.loads(os.readlink(self._attempt.store / "log" / names[-1]).partition(" ")[2])
        return value

    def coordinator(self) -> int:
        return int(str(self.newest_record()["leader"]).partition("-")[0])

    def log_path(self, node: int) -> Path:
        return self.folder / f"node-{node}.log"

    def log(self, node: int) -> str:
        return self.log_path(node).read_text(errors="replace")

    def logs(self) -> str:
        return "\n".join(f"n{node}: {line}" for node in range(self.nodes) for line in self.log(node).splitlines()[-12:])


def seconds_to_stop(run: NetworkRun, round_index: int, victim: int, *, within: float) -> float:
    """Kill the worker of one node. Returns the seconds from its death to that of the last worker of the others."""
    workers = run.workers(round_index)
    others = [worker for node, worker in workers.items() if node != victim]
    if len(workers) != run.nodes:
        raise AssertionError(f"workers on nodes {sorted(workers)} alone\n{run.logs()}")
    with deaths_of(worker.pid for worker in others) as deaths:
        killed = run.kill_worker(workers[victim])
        moments = deaths(within)
    left = sorted(worker.node for worker in others if worker.pid not in moments)
    if left:
        raise AssertionError(f"the workers of nodes {left} still ran after {within:g} s\n{run.logs()}")
    return max(moments.values()) - killed
