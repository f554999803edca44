"""Who is gone, and who only says so: peers, collectives, the store, ports and nodes."""

from __future__ import annotations

import os
import shutil
import signal
import socket
from typing import Any

import pytest

from hpc_elastic.failures.patterns import LOST_PEER
from tests.rigs.failure_catalogue import MEET, Catalogue, Told
from tests.rigs.local_run import LocalRun
from tests.rigs.wrong_clocks import node_0_coordinates

_ENVIRON = {"OMP_NUM_THREADS": "1"}
# SIGTERM is ignored: whoever is ended before it has felt the loss could not tell of it.
_GROUP = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
import datetime
import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
dist.all_reduce(torch.ones(4))
tell("here")
"""


def told(cause: str, **changes: Any) -> Told:
    """A failure of rank 1 on node 1."""
    values: dict[str, Any] = {
        "exit_code": 1,
        "cause": cause,
        "rank": 1,
        "host": "node1",
        "failure_class": "root",
        "category": "worker",
        "retryable": True,
        "confidence": "high",
        "evidence": "first of 2; the other was stopped within <N> ms",
        "kind": "",
    }
    return Told(**{**values, **changes})


@pytest.mark.torch
def test_a_peer_that_vanishes(catalogue: Catalogue) -> None:
    """Three ranks tell of lost connections, and none of them is to blame."""
    pytest.importorskip("torch")
    script = _GROUP + (
        """
def train():
    for step in range(1000):
        dist.all_reduce(torch.ones(4))

if RANK == 1:
    wait_for("never")
train()
"""
    )
    with catalogue.run(script, nproc=2, environ=_ENVIRON) as run:
        run.wait_moments("here", count=4)
        run.kill_worker(1, round_index=0)
        run.finish()
        expected = told(
            "Signal 9 (SIGKILL) received by PID <PID>",
            host="node0",
            evidence="the only failure that is not a consequence of another one; 3 others are consequences",
            kind="SIGKILL not sent by hpc-elastic: probably the OOM killer (check dmesg) or a manual kill",
            consequences={LOST_PEER: "0,2-3"},
        )
        catalogue.check(run, "gloo-peer-vanished", expected)


@pytest.mark.torch
def test_a_collective_whose_timeout_runs_out(catalogue: Catalogue) -> None:
    """The one that did not come to it has not failed: it is named as the one to look at."""
    pytest.importorskip("torch")
    # The group itself has a long one: on a busy machine the ranks come to it many seconds apart.
    script = _GROUP.replace("signal.SIG_IGN", "signal.SIG_DFL") + (
        """
import threading
never = threading.Lock()
never.acquire()

def evaluate():
    never.acquire()

if RANK == 1:
    evaluate()
dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=2))
dist.all_reduce(torch.ones(4))
"""
    )
    with catalogue.run(script, environ=_ENVIRON) as run:
        run.wait_moments("here", count=2)
        run.finish()
        look = (
            "Look at rank 1 on node1: it never entered all_reduce #2 of group default_pg (16 B fp32), which rank 0 "
            "waits in; its last there was all_reduce #1; it was waiting for a lock, a queue or a thread "
            "(train.py:17 evaluate): `never.acquire()`"
        )
        expected = told(
            f"cause not known. {look}",
            rank=0,
            host="node0",
            failure_class="symptom",
            confidence="none",
            evidence=f"not known: the only failure reads like the consequence of another. {look}",
            kind="a collective waited for a peer until its timeout",
            consequences={"a collective waited for a peer until its timeout": "0"},
        )
        catalogue.check(run, "collective-timeout", expected)


@pytest.mark.torch
def test_a_store_that_goes_away(catalogue: Catalogue) -> None:
    """The process that serves the workers' TCPStore is killed while they wait in it."""
    pytest.importorskip("torch")
    script = _GROUP + (
        """
store = dist.distributed_c10d._get_default_store()

def wait_for_the_others():
    store.wait(["all-have-loaded"], datetime.timedelta(seconds=60))

wait_for_the_others()
"""
    )
    with catalogue.run(script, environ=_ENVIRON) as run:
        run.wait_moments("here", count=2)
        (server,) = (process for process in run.processes() if any("store_host" in word for word in process.argv))
        os.kill(server.pid, signal.SIGKILL)
        run.finish()
        expected = told(
            "the workers' TCPStore is gone: the process that serves it ended (on node0)",
            rank=None,
            host="node0",
            failure_class=None,
            category="platform",
            evidence="the script did not cause this: a process of hpc-elastic's own did; "
            "2 failures elsewhere are its consequence",
            consequences={LOST_PEER: "0-1"},
        )
        catalogue.check(run, "store-gone", expected)


def test_a_port_that_is_taken(catalogue: Catalogue) -> None:
    script = f"""
    {MEET}
    import socket

    def serve_metrics(port):
        server = socket.socket()
        server.bind(("127.0.0.1", port))

    if RANK == 1:
        serve_metrics(int(sys.argv[1]))
    wait_for("never")
    """
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        catalogue.run(script, arguments=[str(taken.getsockname()[1])]) as run,
    ):
        run.finish()
        expected = told(
            "OSError: [Errno 98] Address already in use",
            failure_class="infrastructure",
            category="infrastructure",
            kind="a port was taken",
        )
        catalogue.check(run, "port-taken", expected)


# Rank 0 feels it at once: the connection is reset.
_PEER_BY_SOCKET = """
import socket, struct

class DistNetworkError(RuntimeError):
    pass  # torch's, without torch

def serve_samples():
    with socket.create_server(("127.0.0.1", 0)) as server:
        tell("listens", port=server.getsockname()[1])
        peer, _ = server.accept()
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        tell("here")
        wait_for("never")

def receive_samples():
    wait_for("connect")
    port = json.loads(open(sys.argv[1]).read())
    with socket.create_connection(("127.0.0.1", port)) as peer:
        tell("here")
        try:
            peer.recv(1)
        except ConnectionResetError as error:
            raise DistNetworkError(str(error)) from None

if ROUND == 0:
    serve_samples() if RANK == 1 else receive_samples()
"""


def test_a_node_that_dies_with_its_evidence(catalogue: Catalogue) -> None:
    """Its agent could not tell what happened, and what it had written is gone. Another agent takes its place."""
    port_file = catalogue.folder / "port"
    # Who coordinates goes on, and nobody is taken for lost while the agent stands still.
    options = ["--max-restarts", "1", "--rdzv-conf", "beat_silence=20", *node_0_coordinates(catalogue.folder)]
    with catalogue.run(_PEER_BY_SOCKET, options=options, arguments=[str(port_file)], heartbeat_ttl=20.0) as run:
        (listens,) = run.wait_moments("listens", count=1)
        port_file.write_text(str(listens["port"]))
        run.say("connect")
        run.wait_moments("here", count=2)
        run.until(lambda: len(run.events("workers_started")) == 2, "what both agents report of the round")
        _lose_node(run, 1)
        run.finish()
        expected = told(
            "the agent on node1 died",
            exit_code=0,
            rank=None,
            failure_class=None,
            category="platform",
            evidence="its agent was ended by SIGKILL; 1 failure elsewhere is its consequence",
            consequences={LOST_PEER: "0"},
        )
        catalogue.check(run, "node-died-with-its-evidence", expected)


def _lose_node(run: LocalRun, node: int) -> None:
    """Everything on it ends, the agent last, and its files are gone."""
    agent = run.agent(node)
    os.kill(agent.pid, signal.SIGSTOP)
    os.kill(run.worker(node, round_index=0), signal.SIGKILL)
    run.until(lambda: run.events("worker_failed"), "the failure of the one that lost its peer")
    shutil.rmtree(run.rank(node).root)
    for path in run.attempt().events.glob(f"agent-node{node}-*"):
        path.unlink()
    os.kill(agent.pid, signal.SIGKILL)
