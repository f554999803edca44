"""The run under test, as the driver needs it: started, its processes found node by node, told to finish."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
import time
from pathlib import Path

from hpc_elastic.launch.run_directory import create_run
from hpc_elastic.rendezvous.handler_config import safe_name
from hpc_elastic.run.paths import load_result
from hpc_elastic.run.spec import EntryKind, Entrypoint, RunSpec, new_run_id, rdzv_values
from hpc_elastic.workers import tree
from hpc_elastic.workers.guardian import GUARDIAN_NAME
from hpc_elastic.workers.tree import NODE_TAG_VARIABLE, TAG_VARIABLE, Proc
from tests.rigs.chaos.clocks import set_clock, with_clock
from tests.rigs.chaos.places import Place
from tests.rigs.chaos.schedule import Plan
from tests.rigs.processes import bare_environ

ROOT = Path(__file__).resolve().parents[3]
WORKER = Path(__file__).with_name("worker.py")
NEVER_TORCH = "no-python-with-torch"
LAST_CALL_SECONDS = 6.0


class Cluster:
    """The parts of both kinds. Each says besides how it starts, which processes a node has (all, the agent's, the
    workers'), where its store is, how a node is lost for good, and how it ended."""

    def __init__(self, folder: Path, place: Place, plan: Plan) -> None:
        self.stage = folder / "stage"
        """On this machine's own disk: journals, and words to the workers."""
        (self.stage / "journal").mkdir(parents=True)
        self._folder = folder
        self._place = place
        self._plan = plan

    def tend(self) -> None:
        """What a scheduler would do, called again and again; the agents' supervisor does it itself."""

    def set_clock(self, node: int, offset: float) -> None:
        set_clock(self.stage, node, offset)

    def finish(self) -> None:
        (self.stage / "finish").touch()

    def _conf(self) -> dict[str, str]:
        ttl = self._plan.ttl
        return {
            "heartbeat_ttl": f"{ttl:g}",
            "heartbeat_interval": f"{ttl / 5:g}",
            "poll_interval": f"{ttl / 12:g}",
            "last_call_timeout": f"{LAST_CALL_SECONDS:g}",
            "doorbell": "on" if self._plan.doorbell else "off",
        }

    def _environ(self) -> dict[str, str]:
        base = bare_environ()
        return {**base, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}


class AgentCluster(Cluster):
    """Real agents under the real supervisor. The nodes' names are n0, n1 …; node 0's mount is the batch host's too."""

    def __init__(self, folder: Path, place: Place, plan: Plan) -> None:
        super().__init__(folder, place, plan)
        self.uid = secrets.token_hex(16)
        self._process: subprocess.Popen[bytes] | None = None
        self._run_id = new_run_id("chaos")

    def start(self) -> None:
        spec = RunSpec(
            run_id=self._run_id,
            uid=self.uid,
            name="chaos",
            created_ns=time.time_ns(),
            entrypoint=Entrypoint(
                kind=EntryKind.COMMAND,
                target=sys.executable,
                args=("-S", "-u", str(WORKER), str(self.stage)),
                python=NEVER_TORCH,
            ),
            cwd=str(self.stage),
            cluster="local",
            min_nodes=self._plan.min_nodes,
            max_nodes=self._plan.nodes,
            nproc_per_node="1",
            max_restarts=100_000,
            max_requeues=0,
            max_same_failures=0,
            shutdown_timeout=5.0,
            rdzv_conf=rdzv_values(self._conf()),
        )
        runs = [self._place.path(node) / "runs" for node in range(self._plan.nodes)]
        paths = create_run(spec, runs[0]).paths
        config = {
            "stage": str(self.stage),
            "runs": [str(path) for path in runs],
            "run_dir": str(paths.root),
            "relaunches": self._plan.kills_per_node,
        }
        (self.stage / "config.json").write_text(json.dumps(config))
        with open(self._folder / "job.log", "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.rigs.chaos.site", str(self.stage / "config.json")],
                cwd=ROOT,
                env=self._environ(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _outside(self) -> Path:
        return self._place.outside() / "runs" / self._run_id / "attempt-000"

    def store(self) -> Path:
        return self._outside() / "store"

    def events(self) -> Path:
        return self._outside() / "events"

    def rounds(self) -> Path:
        return self._outside()

    def processes(self, node: int) -> list[Proc]:
        mark = f"{self.uid}:{node}"
        return tree.own_processes_where(
            lambda _, environ: (
                environ.get(NODE_TAG_VARIABLE) == mark or (environ.get(TAG_VARIABLE) or "").startswith(mark + ":")
            )
        )

    def agent(self, node: int) -> Proc | None:
        assert self._process is not None
        found = [p for p in self.processes(node) if p.ppid == self._process.pid and p.name != GUARDIAN_NAME]
        return found[0] if found else None

    def workers(self, node: int) -> list[Proc]:
        mark = f"{self.uid}:{node}:"
        return tree.own_processes_where(lambda _, environ: (environ.get(TAG_VARIABLE) or "").startswith(mark))

    def lose(self, node: int) -> None:
        (self.stage / f"down-{node}").touch()

    def ended(self) -> bool:
        assert self._process is not None
        return self._process.poll() is not None

    def end_complaints(self, *, too_few: bool) -> list[str]:
        assert self._process is not None
        found = []
        result = load_result(self._outside() / "result.json")
        outcome = result.outcome if result else "nothing"
        wanted = "too_few_nodes" if too_few else "succeeded"
        if outcome != wanted:
            found.append(f"the run ended with {outcome} ({result and result.reason}), not {wanted}")
        if (self._process.returncode == 0) != (wanted == "succeeded"):
            found.append(f"the supervisor's exit code is {self._process.returncode}")
        return found

    def left(self) -> list[Proc]:
        mark = f"{self.uid}:"
        return tree.own_processes_where(
            lambda _, environ: (
                (environ.get(NODE_TAG_VARIABLE) or "").startswith(mark)
                or (environ.get(TAG_VARIABLE) or "").startswith(mark)
            )
        )

    def log(self) -> str:
        return (self._folder / "job.log").read_text(errors="replace")

    def kill_all(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        deadline = time.monotonic() + 10.0
        while (left := self.left()) and time.monotonic() < deadline:
            for proc in left:
                tree.kill_safely(proc, 9)
            time.sleep(0.02)


class HandlerCluster(Cluster):
    """Real handlers, each in a process of its own, without agents: what a few cores can take of 16 or 32 nodes."""

    MARK = "CHAOS_MEMBER"

    def __init__(self, folder: Path, place: Place, plan: Plan) -> None:
        super().__init__(folder, place, plan)
        self._mark = secrets.token_hex(8)
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._due: dict[int, float] = {}
        self._down: set[int] = set()
        self._codes: dict[int, int] = {}
        self.failures: list[str] = []
        """Members that ended though nobody killed them."""

    def start(self) -> None:
        for node in range(self._plan.nodes):
            self._start(node)

    def _start(self, node: int) -> None:
        config = {
            "stage": str(self.stage),
            "node": node,
            "directory": str(self._place.path(node)),
            "run_id": "chaos",
            "min_nodes": self._plan.min_nodes,
            "max_nodes": self._plan.nodes,
            "conf": {**self._conf(), "timeout": "120"},
        }
        environ = {**with_clock(self._environ(), self.stage, node), self.MARK: f"{self._mark}:{node}"}
        with open(self._folder / f"member-{node}.log", "ab") as log:
            self._processes[node] = subprocess.Popen(
                [sys.executable, "-m", "tests.rigs.chaos.member", json.dumps(config)],
                cwd=ROOT,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def tend(self) -> None:
        now = time.monotonic()
        for node, process in list(self._processes.items()):
            code = process.poll()
            if code is None:
                continue
            del self._processes[node]
            self._codes[node] = code
            if code != -9 and not (self.stage / "finish").exists():
                self.failures.append(f"the member on node {node} ended with {code}")
            if node not in self._down and not (self.stage / "finish").exists():
                self._due[node] = now + 0.3
        for node in [node for node, due in self._due.items() if now >= due]:
            del self._due[node]
            if not (self.stage / "finish").exists():
                self._start(node)

    def store(self) -> Path:
        return self._place.outside() / safe_name("chaos") / "epoch-000001"

    def processes(self, node: int) -> list[Proc]:
        process = self._processes.get(node)
        proc = tree.look_at(process.pid) if process is not None else None
        return [proc] if proc is not None and not proc.is_dead else []

    def agent(self, node: int) -> Proc | None:
        found = self.processes(node)
        return found[0] if found else None

    def workers(self, node: int) -> list[Proc]:
        return self.processes(node)

    def lose(self, node: int) -> None:
        self._down.add(node)

    def ended(self) -> bool:
        self.tend()
        return not self._processes

    def end_complaints(self, *, too_few: bool) -> list[str]:
        wrong = {node: code for node, code in self._codes.items() if code != 0 and node not in self._down}
        return self.failures + ([f"members ended with {wrong}"] if wrong else [])

    def left(self) -> list[Proc]:
        return tree.own_processes_where(lambda _, environ: (environ.get(self.MARK) or "").startswith(self._mark))

    def log(self) -> str:
        texts = []
        for path in sorted(self._folder.glob("member-*.log")):
            text = path.read_text(errors="replace")
            if text:
                texts.append(f"--- {path.name}\n{text[-1500:]}")
        return "\n".join(texts)

    def kill_all(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()
