"""The process that serves the workers' TCPStore: with torch's own workers, and in every way that it can end."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import pytest

from hpc_elastic.agent.store_server import StoreServer, StoreState, torch_available
from hpc_elastic.base.loop import wait_readable
from tests.rigs.inprocess_ranks import free_ports
from tests.rigs.processes import is_alive
from tests.rigs.waiting import until

ROOT = Path(__file__).resolve().parents[2]
DEADLINE = 120.0
MakeServer = Callable[..., StoreServer]
FakeTorch = Callable[..., str]

WORKER = """
import os, signal, sys, torch, torch.distributed as dist
rank, world, tag = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), os.environ["ROUND"]
dist.init_process_group("gloo")
store = dist.distributed_c10d._get_default_store()
total = torch.ones(1) * (rank + 1)
dist.all_reduce(total)
old = [t for t in "abcdef" if t != tag and store.check([f"round-{t}"])]
store.set(f"round-{tag}", "was here")
print(rank, int(total.item()), *old, flush=True)
sys.stdin.readline()
dist.barrier()
"""

# A client without the second that importing all of torch takes.
CLIENT = """
import sys
from hpc_elastic.pytorch.store_host import import_store_class
store_class = import_store_class(lean=True)
print("connecting", flush=True)
store = store_class("127.0.0.1", int(sys.argv[1]), None, False)
print(store.add("count", 1), flush=True)
"""

# What torch looks like to the store host, with the accidents that a test wants.
FAKE_STORE = """
import socket
class TCPStore:
    def __init__(self, host, port, world_size, is_master, *, timeout, wait_for_workers, master_listen_fd):
        self.listener = socket.socket(fileno=master_listen_fd)
        self.connection = socket.create_connection((host, port))
"""


def wait_for_state(server: StoreServer, *wanted: StoreState) -> StoreState:
    deadline = time.monotonic() + DEADLINE
    while (state := server.handle()) not in wanted:
        left = deadline - time.monotonic()
        assert left > 0, f"still {state.value} after {DEADLINE:.0f} s: {server.failure}"
        wait_readable(server.watched(), left)
    return state


def serve(server: StoreServer) -> tuple[StoreState, int]:
    """Whether it serves in the end, and the port."""
    _, port = server.bind("127.0.0.1", None)
    server.serve()
    return wait_for_state(server, StoreState.SERVING, StoreState.FAILED), port


def nobody_listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except ConnectionRefusedError:
        return True
    return False


@pytest.fixture
def make_server(tmp_path: Path) -> Iterator[MakeServer]:
    servers: list[StoreServer] = []

    def make(**environ: str) -> StoreServer:
        servers.append(
            StoreServer(sys.executable, log_path=tmp_path / "store-host.log", environ={**os.environ, **environ})
        )
        return servers[-1]

    yield make
    for server in servers:
        pid = server.pid
        server.close()
        assert pid is None or not is_alive(pid)


@pytest.fixture
def fake_torch(tmp_path: Path) -> FakeTorch:
    """Makes a package `torch`, its extension module of `lean`, `torch.distributed` of `full`. Returns its folder."""

    def make(*, lean: str, full: str) -> str:
        package = tmp_path / "fake" / "torch"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("")
        (package / "_C.py").write_text(textwrap.dedent(lean))
        (package / "distributed.py").write_text(textwrap.dedent(full))
        return str(package.parent)

    return make


@contextmanager
def start(code: str, *arguments: str, **environ: str) -> Iterator[subprocess.Popen[str]]:
    """A Python process, killed at the end."""
    with subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **environ, "PYTHONPATH": f"{environ.get('PYTHONPATH', '')}:{ROOT}"},
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    readable, _, _ = select.select([process.stdout], [], [], DEADLINE)
    assert readable, "no line from the process"
    return process.stdout.readline().strip()


def start_worker(port: int, rank: int, world: int, tag: str) -> AbstractContextManager[subprocess.Popen[str]]:
    return start(
        WORKER,
        RANK=str(rank),
        WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        # The count that, on torchrun, differs between agents and leaves the workers in different key spaces.
        TORCHELASTIC_RESTART_COUNT=str(rank),
        TORCHELASTIC_RUN_ID="a-run",
        ROUND=tag,
    )


@pytest.mark.torch
def test_process_groups_form_in_every_round_whoever_died(make_server: MakeServer) -> None:
    """Three rounds of other sizes on one process and one fixed port; rank 0 dies, then the last rank."""
    server = make_server()
    port = free_ports()
    pid: int | None = None
    for tag, world, victim in (("a", 3, 0), ("b", 2, 1), ("c", 3, None)):
        server.bind("127.0.0.1", port)
        with ExitStack() as stack:
            workers = [stack.enter_context(start_worker(port, rank, world, tag)) for rank in range(world)]
            server.serve()
            assert pid in (None, server.pid)
            pid = server.pid
            total = world * (world + 1) // 2
            # Ranks all there, the sum right, and no key of an earlier round.
            assert [line_of(worker) for worker in workers] == [f"{rank} {total}" for rank in range(world)]
            assert wait_for_state(server, StoreState.SERVING, StoreState.FAILED) is StoreState.SERVING
            if victim is None:
                for worker in workers:
                    assert worker.stdin is not None
                    worker.stdin.write("\n")
                    worker.stdin.flush()
                assert [worker.wait(DEADLINE) for worker in workers] == [0] * world
            else:
                workers[victim].kill()
                workers[victim].wait()
                assert server.handle() is StoreState.SERVING
        server.release()
        assert nobody_listens(port)


@pytest.mark.torch
def test_a_worker_that_connects_before_the_store_is_up_waits(make_server: MakeServer) -> None:
    server = make_server()
    _, port = server.bind("127.0.0.1", None)
    with start(CLIENT, str(port)) as client:
        assert line_of(client) == "connecting"
        established = f":{port:04X} "
        until(
            lambda: any(
                established in line.split("00000000:0000")[0] and line.split()[3] == "01"
                for line in Path("/proc/net/tcp").read_text().splitlines()[1:]
            ),
            "the client's connection in the backlog",
        )
        assert client.poll() is None
        server.serve()
        assert line_of(client) == "1"
        assert client.wait(DEADLINE) == 0
    assert wait_for_state(server, StoreState.SERVING, StoreState.FAILED) is StoreState.SERVING


@pytest.mark.torch
def test_it_outlives_terminations_and_loses_only_its_own_round(make_server: MakeServer) -> None:
    server = make_server()
    port = free_ports()
    server.bind("localhost", port)
    server.serve()
    wait_for_state(server, StoreState.SERVING)
    assert server.pid is not None
    assert os.getsid(server.pid) == server.pid
    outputs = {os.path.basename(os.readlink(f"/proc/{server.pid}/fd/{fd}")) for fd in (0, 1, 2)}
    # None of the agent's: srun waits for the end of those. None on a disk: one that hangs would take the agent along.
    assert outputs == {"null", "memfd:store-host.log (deleted)"}
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        os.kill(server.pid, number)
    with start(CLIENT, str(port)) as client:  # also the proof that the signals have been dealt with
        assert line_of(client) == "connecting"
        assert line_of(client) == "1"
    assert server.handle() is StoreState.SERVING

    os.kill(server.pid, signal.SIGKILL)
    assert wait_for_state(server, StoreState.FAILED, StoreState.IDLE) is StoreState.FAILED
    assert "ended" in server.failure
    assert nobody_listens(port)
    assert server.pid is None

    server.bind("127.0.0.1", port)
    assert server.state is StoreState.BOUND
    server.serve()
    wait_for_state(server, StoreState.SERVING)
    with start(CLIENT, str(port)) as client:
        assert line_of(client) == "connecting"
        assert line_of(client) == "1"  # a fresh store: the first client added 1 before


AGENT = """
import os, sys
from pathlib import Path
from hpc_elastic.base.loop import wait_readable
from hpc_elastic.agent.store_server import StoreServer, StoreState
server = StoreServer(sys.executable, log_path=Path(sys.argv[1]), environ=dict(os.environ))
_, port = server.bind("127.0.0.1", None)
server.serve()
if sys.argv[2] == "serving":
    while server.handle() is not StoreState.SERVING:
        wait_readable(server.watched(), 30)
print(server.pid, port, flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("when", ["starting", "serving"])
def test_it_dies_with_its_agent(when: str, tmp_path: Path, fake_torch: FakeTorch) -> None:
    """Also where it is in the middle of an import that never ends."""
    lean = "import time; time.sleep(600)" if when == "starting" else "raise ImportError"
    torch = fake_torch(lean=lean, full=FAKE_STORE)
    with start(AGENT, str(tmp_path / "log"), when, PYTHONPATH=torch) as agent:
        pid, port = map(int, line_of(agent).split())
        agent.kill()
    # Its main thread is a zombie a moment before the last thread lets go of the socket.
    until(lambda: not is_alive(pid) and nobody_listens(port), "the store host's end")


@pytest.mark.parametrize(
    "accident",
    ["import os; os.abort()", "raise ImportError('no such symbol')", "_c10d_init = lambda: False"],
    ids=["crash", "import-error", "not-built-in"],
)
def test_where_the_lean_import_fails_torch_is_imported_as_a_whole(
    accident: str, make_server: MakeServer, fake_torch: FakeTorch
) -> None:
    server = make_server(PYTHONPATH=fake_torch(lean=accident, full=FAKE_STORE))
    for _ in range(2):
        state, port = serve(server)
        assert state is StoreState.SERVING, server.failure
        assert not nobody_listens(port)
        server.release()
        assert nobody_listens(port)


def test_where_torch_does_not_import_at_all_the_reason_is_told(make_server: MakeServer, fake_torch: FakeTorch) -> None:
    broken = "raise ImportError('libcudart.so.13: cannot open shared object file')"
    server = make_server(PYTHONPATH=fake_torch(lean=broken, full=broken))
    state, port = serve(server)
    assert state is StoreState.FAILED
    assert "libcudart.so.13" in server.failure
    assert nobody_listens(port)


def test_a_store_that_fails_is_told_and_the_next_round_is_tried(make_server: MakeServer, fake_torch: FakeTorch) -> None:
    failing = """
        class TCPStore:
            def __init__(self, *args, **kwargs):
                raise RuntimeError("the server socket has gone")
    """
    server = make_server(PYTHONPATH=fake_torch(lean="raise ImportError", full=failing))
    for _ in range(2):
        assert serve(server)[0] is StoreState.FAILED
        assert server.failure == "the server socket has gone"


@pytest.mark.parametrize("stop", ["release", "close"])
def test_a_port_is_freed_at_once_whatever_the_process_does(
    stop: str, make_server: MakeServer, fake_torch: FakeTorch
) -> None:
    """The process hangs in its import, with the socket still on its way to it."""
    server = make_server(PYTHONPATH=fake_torch(lean="import time; time.sleep(600)", full=""))
    _, port = server.bind("127.0.0.1", None)
    server.serve()
    pid = server.pid
    assert pid is not None
    began = time.monotonic()
    getattr(server, stop)()
    assert time.monotonic() - began < 15.0
    with socket.socket() as other:  # without SO_REUSEADDR: nothing holds the port any more
        other.bind(("127.0.0.1", port))
    assert not is_alive(pid)
    assert server.state is StoreState.IDLE


def test_an_interpreter_that_is_not_there_is_a_failure_not_a_crash(tmp_path: Path) -> None:
    server = StoreServer("/nowhere/python3", log_path=tmp_path / "log", environ={})
    server.bind("127.0.0.1", None)
    server.serve()
    assert server.handle() is StoreState.FAILED
    assert "/nowhere/python3" in server.failure
    server.close()
    assert list(tmp_path.iterdir()) == []


def test_what_the_process_printed_is_a_file_when_it_is_over(
    make_server: MakeServer, fake_torch: FakeTorch, tmp_path: Path
) -> None:
    crashes = "import sys; sys.exit('no such driver')"
    server = make_server(PYTHONPATH=fake_torch(lean=crashes, full=crashes))
    assert serve(server)[0] is StoreState.FAILED
    assert "no such driver" in server.failure
    assert not (tmp_path / "store-host.log").exists()
    server.close()
    assert "no such driver" in (tmp_path / "store-host.log").read_text()
    assert (tmp_path / "store-host.log").stat().st_mode & 0o777 == 0o600


def test_a_process_that_can_not_come_is_given_up(make_server: MakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a descriptor that it inherits lies on a mount that hangs: the fork's end is not seen."""
    goes_on = threading.Event()
    monkeypatch.setattr("hpc_elastic.agent.store_server._SPAWN_SECONDS", 0.2)
    monkeypatch.setattr("hpc_elastic.agent.store_server.subprocess.Popen", lambda *_, **__: goes_on.wait(DEADLINE))
    server = make_server()
    server.bind("127.0.0.1", None)
    server.serve()
    goes_on.set()
    assert server.handle() is StoreState.FAILED
    assert "has not answered" in server.failure
    assert server.pid is None


def test_torch_is_looked_for_without_being_imported(fake_torch: FakeTorch, tmp_path: Path) -> None:
    wrapper = tmp_path / "python-with-torch"
    folder = fake_torch(lean="", full="")
    (Path(folder) / "torch" / "__init__.py").write_text("raise SystemExit('imported')")
    wrapper.write_text(f"#!/bin/sh\nPYTHONPATH='{folder}' exec '{sys.executable}' \"$@\"\n")
    wrapper.chmod(0o755)
    assert torch_available(str(wrapper))
    bare = tmp_path / "python-without"
    bare.write_text(f"#!/bin/sh\nexec '{sys.executable}' -I -S \"$@\"\n")
    bare.chmod(0o755)
    assert not torch_available(str(bare))
    assert not torch_available("/nowhere/python3")
