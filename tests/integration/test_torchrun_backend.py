"""torch's own agents with ``--rdzv-backend hpcfs``: real torchrun processes on this machine, one per "node"."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.rigs.nfs_emulator import NfsEmulator
from tests.rigs.processes import kill_all
from tests.rigs.waiting import until

pytestmark = pytest.mark.torch

# Waits until a file lets it end; says who it is each time it starts. No tensor: torch is imported by the agents alone.
_WORKER = """
import os, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
e = os.environ
name = f"{e['WORLD_SIZE']}-{e['RANK']}-{os.getpid()}"
import socket
socket.create_connection((e["MASTER_ADDR"], int(e["MASTER_PORT"])), 20).close()
(folder / name).touch()
deadline, parent = time.monotonic() + 300, os.getppid()
while not (folder / "end").exists():
    if (folder / ("fail-" + e["WORLD_SIZE"] + "-" + e["RANK"])).exists() and not (folder / "failed").exists():
        (folder / "failed").touch()
        sys.exit(3)
    assert time.monotonic() < deadline and os.getppid() == parent
    time.sleep(0.02)
"""


class Torchruns:
    """Agents of one test, each with the process group that it starts."""

    def __init__(self, folder: Path) -> None:
        self.shared = folder / "shared"
        self.shared.mkdir()
        self.folder = folder
        self.script = folder / "worker.py"
        self.script.write_text(_WORKER)
        self.agents: list[subprocess.Popen[bytes]] = []

    def start(
        self, nnodes: str, facts: Path, *, restarts: int = 0, task: int | None = None, shared: Path | None = None
    ) -> subprocess.Popen[bytes]:
        """`task`: its place in the scheduler's order. `shared`: where this node has the shared folder."""
        facts.mkdir(exist_ok=True)
        log = (self.folder / f"agent{len(self.agents)}.log").open("wb")
        conf = "timeout=140,last_call_timeout=1,heartbeat_ttl=4,poll_interval=0.2"
        environ = {key: value for key, value in os.environ.items() if not key.startswith("SLURM_")}
        if task is not None:
            environ["SLURM_PROCID"] = str(task)
        options = ["--rdzv-backend", "hpcfs", "--rdzv-endpoint", str(shared or self.shared), "--rdzv-id", "a job.1"]
        argv = [sys.executable, "-m", "torch.distributed.run", *options, "--rdzv-conf", conf, "--nnodes", nnodes]
        argv += ["--nproc-per-node", "1", "--max-restarts", str(restarts), "--local-addr", "127.0.0.1"]
        agent = subprocess.Popen(
            [*argv, str(self.script), str(facts)],
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**environ, "TMPDIR": str(self.folder)},  # torch leaves its log folders
        )
        log.close()
        self.agents.append(agent)
        return agent

    def coordinator(self) -> int:
        newest = max(self.shared.glob("*/epoch-*/log/*"))
        leader: str = json.loads(os.readlink(newest).partition(" ")[2])["leader"]
        return int(leader.partition("-")[0])

    def lose(self, *agents: subprocess.Popen[bytes]) -> None:
        for agent in agents:
            os.killpg(agent.pid, signal.SIGKILL)
        for agent in agents:
            agent.wait()

    def logs(self) -> str:
        return "\n".join(path.read_text("utf-8", "replace")[-3000:] for path in sorted(self.folder.glob("agent*.log")))

    def until(self, condition: Callable[[], bool], seconds: float = 150.0) -> None:
        until(condition, self.logs, seconds=seconds, every=0.05)

    def ended_well(self, *agents: subprocess.Popen[bytes]) -> None:
        for agent in agents:
            assert agent.wait(150) == 0, self.logs()


def ranks(facts: Path, size: int) -> set[str]:
    """Ranks that started in a world of `size`."""
    return {path.name.split("-")[1] for path in facts.glob(f"{size}-*")}


@pytest.fixture
def torchruns(tmp_path: Path) -> Iterator[Torchruns]:
    runs = Torchruns(tmp_path)
    yield runs
    for agent in runs.agents:
        kill_all([agent.pid, *_children_in_session(agent.pid)])
        agent.wait()


def _children_in_session(session: int) -> list[int]:
    """Workers lead sessions of their own or not, by torch's version; they end by themselves without their agent."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                if os.getsid(int(entry.name)) == session:
                    found.append(int(entry.name))
            except ProcessLookupError:
                continue
    return found


@pytest.mark.slow
def test_the_first_node_is_lost_a_newcomer_comes_and_the_id_is_used_again(torchruns: Torchruns, tmp_path: Path) -> None:
    first = tmp_path / "first"
    agents = [torchruns.start("2:3", first, task=task) for task in range(3)]
    torchruns.until(lambda: ranks(first, 3) == {"0", "1", "2"})

    for path in first.glob("2-*"):
        path.unlink()  # of a first round without the slowest to start
    # Rank 0, which serves the workers' store, is task 0's. The coordinator is whoever was first: mostly the same.
    lost = {0, torchruns.coordinator()}
    torchruns.lose(*(agents[task] for task in lost))
    if len(lost) == 2:
        agents.append(torchruns.start("2:3", first))
    torchruns.until(lambda: ranks(first, 2) == {"0", "1"})
    for path in first.glob("3-*"):
        path.unlink()

    newcomer = torchruns.start("2:3", first)
    torchruns.until(lambda: ranks(first, 3) == {"0", "1", "2"})
    (first / "end").touch()
    torchruns.ended_well(*(agent for task, agent in enumerate(agents) if task not in lost), newcomer)

    second = tmp_path / "second"
    assert torchruns.start("1:1", second).wait(150) == 1
    assert "is closed: succeeded" in torchruns.logs()
    assert not list(second.iterdir()), "a late node trains again"


def test_each_on_a_mount_of_its_own_one_is_lost_then_all_and_the_id_is_used_again(
    torchruns: Torchruns, tmp_path: Path
) -> None:
    """All killed: nothing was closed. The next ones with the id take the run over."""
    facts = tmp_path / "facts"
    with NfsEmulator(torchruns.shared, mounts=2) as emulator:
        one, other = (torchruns.start("1:2", facts, shared=path) for path in emulator.paths)
        torchruns.until(lambda: ranks(facts, 2) == {"0", "1"})
        for path in facts.glob("1-*"):
            path.unlink()
        torchruns.lose(one)
        torchruns.until(lambda: ranks(facts, 1) == {"0"})
        torchruns.lose(other)
        for path in facts.glob("2-*"):
            path.unlink()
        again = [torchruns.start("2", facts, shared=path) for path in emulator.paths]
        torchruns.until(lambda: ranks(facts, 2) == {"0", "1"})
        (facts / "end").touch()
        torchruns.ended_well(*again)
    assert len(list(torchruns.shared.glob("*/epoch-*"))) == 1


def test_a_failed_worker_restarts_on_all_nodes(torchruns: Torchruns, tmp_path: Path) -> None:
    facts = tmp_path / "facts"
    facts.mkdir()
    agents = [torchruns.start("2", facts, restarts=1) for _ in range(2)]
    torchruns.until(lambda: ranks(facts, 2) == {"0", "1"})
    (facts / "fail-2-1").touch()
    torchruns.until(lambda: (facts / "failed").exists() and len(list(facts.glob("2-*"))) == 4)
    (facts / "end").touch()
    torchruns.ended_well(*agents)


_ERRORS = """
import sys
from torch.distributed.elastic.rendezvous import api
from hpc_elastic.pytorch.rendezvous_handler import get_handler

def handler(least, run_id="x", **config):
    config = {"timeout": "0.3", **config}
    return get_handler()(api.RendezvousParameters("hpcfs", sys.argv[1], run_id, least, least, "127.0.0.1", **config))

def raised(call):
    try:
        return call()
    except Exception as error:
        return type(error)

assert handler(1).get_backend() == "hpcfs" and handler(1).get_run_id() == "x"
assert raised(handler(2).next_rendezvous) is api.RendezvousTimeoutError
one, other = handler(1), handler(1, timeout="20")
assert not one.is_closed()
one.set_closed()
assert other.is_closed() and raised(other.next_rendezvous) is api.RendezvousClosedError
assert raised(lambda: handler(1, no_such_key=1)) is ValueError
found = handler(1, reopen="on", timeout="20").next_rendezvous()
assert (found.rank, found.world_size) == (0, 1)
assert found.store.add("n", 1) == 1
from hpc_elastic.pytorch.rendezvous_handler import config_from_parameters
params = api.RendezvousParameters("hpcfs", sys.argv[1], "x", 1, 3, timeout=900)
plain = config_from_parameters(params, {})
assert (plain.node, plain.job, plain.settings.timeout) == (None, "", 900) and plain.addresses
slurm = {"SLURM_PROCID": "3", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}
first = config_from_parameters(params, slurm)
again = config_from_parameters(params, {**slurm, "SLURM_RESTART_COUNT": "1"})
assert first.node == 3 and first.job and first.job != again.job
import torch.distributed as dist
real = dist.TCPStore
def no_port(*_, **__):
    raise dist.DistNetworkError("no port")
dist.TCPStore = no_port
assert raised(handler(1, "no port", timeout="20").next_rendezvous) is api.RendezvousError
dist.TCPStore = real
import pathlib
blocked = handler(1, "blocked")
(pathlib.Path(sys.argv[1]) / "elsewhere").mkdir()
from hpc_elastic.rendezvous.handler_config import safe_name
(pathlib.Path(sys.argv[1]) / safe_name("blocked")).symlink_to("elsewhere")
assert raised(blocked.next_rendezvous) is api.RendezvousError
print("held")
"""


def test_errors_are_torchs_own(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", _ERRORS, str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["held"]


def test_a_wrong_key_is_refused_by_name(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend", "hpcfs", "--rdzv-endpoint", str(tmp_path)]
    done = subprocess.run(
        [*argv, "--rdzv-id", "x", "--nnodes", "1", "--rdzv-conf", "tiemout=3", "nothing.py"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode != 0
    assert "--rdzv-conf: unknown key 'tiemout'" in done.stderr


def test_settings_of_torchs_other_backends_are_ignored_with_one_warning(tmp_path: Path) -> None:
    """So that an existing line needs the backend's name and endpoint changed, and nothing else."""
    (tmp_path / "train.py").write_text("print('trained')\n")
    argv = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend", "hpcfs", "--rdzv-endpoint", str(tmp_path)]
    conf = "join_timeout=60,is_host=1,read_timeout=30,timeout=100"
    done = subprocess.run(
        [*argv, "--rdzv-id", "x", "--nnodes", "1", "--rdzv-conf", conf, str(tmp_path / "train.py")],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "trained" in done.stdout
    warning = "--rdzv-conf is_host, join_timeout, read_timeout: not a setting of the backend hpcfs; ignored"
    assert done.stderr.count(warning) == 1
