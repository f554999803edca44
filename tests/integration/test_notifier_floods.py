"""Packets that are forged, repeated, too long, cut off or garbage, one by one and as a flood, against a running agent;
and nodes that can have no notifier at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_elastic.rendezvous.membership import addresses_of
from hpc_elastic.rendezvous.schedule import budget
from hpc_elastic.run.spec import RendezvousSettings
from hpc_elastic.store.notifier import MOST_LOGGED, MOST_REJECTED, PERIOD
from tests.rigs.network_nodes import NetworkRun
from tests.rigs.network_nodes.network import NETNS_FOLDER
from tests.rigs.network_nodes.nodes import MARK, seconds_to_stop
from tests.rigs.processes import marked

NODES = 3
FLOOD_SECONDS = 3.0
MOST_CPU = 0.10
"""Of one core: the agent's, while it is flooded. The notifier alone takes a hundredth."""
SHARE = budget(NODES, RendezvousSettings().operations_per_second) / NODES
"""Operations a second. What a coordinator asks for in three quiet seconds is chance: 4 to 44."""

_FLOOD = """
import hashlib, hmac, json, os, socket, sys, time
secret, run_uid, host, port, seconds = json.load(sys.stdin)
key = hashlib.sha256(secret.encode() + b"\\0" + run_uid.encode()).digest()
def sealed(body, key=key):
    return hmac.digest(key, body, "sha256") + body
def body(count, port=port):
    return json.dumps({"u": "evil", "k": "ring", "c": count, "to": host, "p": port, "a": "log/999999"}).encode()
kinds = [
    os.urandom(200), b"", sealed(body(9), b"k" * 32), sealed(body(1)), sealed(body(5))[:-3],
    b"x" * 65000, sealed(b"[]"), sealed(body(7, port + 1)),
]
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sock.sendto(sealed(body(1)), (host, port))  # one that is valid: all the same to come are repetitions
end, sent = time.monotonic() + seconds, 0
while time.monotonic() < end:
    for data in kinds:
        sock.sendto(data, (host, port))
    sent += len(kinds)
    if sent % 160 == 0:
        time.sleep(0.002)  # the machine is the receiver's too
print(sent)
"""


def agent_pid(run: NetworkRun, node: int) -> int:
    """The agent's process, as numbered outside. Its guardian is a fork of it."""
    found = [process for process in marked(MARK, run.mark) if process.argv[1:4] == ("-m", "hpc_elastic", "agent")]
    mine = {agent.pid: agent.parent for agent in found if agent.argv[agent.argv.index("--node") + 1] == f"{node}"}
    (pid,) = (pid for pid, parent in mine.items() if parent not in mine)
    return pid


def cpu_seconds(pid: int) -> float:
    """User's and system's so far."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def notifier_of(run: NetworkRun, node: int) -> tuple[str, int]:
    """Of the coordinator: its records say where."""
    assert node == run.coordinator()
    return addresses_of(run.newest_record()["bell"])[0]


def flood(run: NetworkRun, sender: int, receiver: int, *, seconds: float) -> subprocess.Popen[str]:
    """From another node."""
    host, port = notifier_of(run, receiver)
    root = run.attempt.root.parent
    facts = [(root / "secret").read_text().strip(), json.loads((root / "run.json").read_text())["uid"], host, port]
    enter = ["nsenter", f"--net={NETNS_FOLDER / run.network.netns(sender)}"]
    process = subprocess.Popen(
        [*enter, sys.executable, "-c", _FLOOD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps([*facts, seconds]))
    process.stdin.close()
    return process


@pytest.fixture
def run(tmp_path: Path) -> Iterator[NetworkRun]:
    with NetworkRun(tmp_path, nodes=NODES, caches=3.0) as run:
        run.wait_round(count=NODES)
        yield run


def test_a_flood_costs_the_coordinator_little_and_nobody_a_place(run: NetworkRun) -> None:
    receiver = run.coordinator()
    sender = (receiver + 1) % NODES
    pid = agent_pid(run, receiver)

    def usage(seconds: float) -> tuple[float, int]:
        """Cores, and operations on the server, of the receiver."""
        run.emulator.reset_counters(receiver)
        before, began = cpu_seconds(pid), time.monotonic()
        time.sleep(seconds)  # the measurement's length
        took = time.monotonic() - began
        return (cpu_seconds(pid) - before) / took, run.emulator.counters(receiver).total()

    flooding = flood(run, sender, receiver, seconds=FLOOD_SECONDS + 3.0)
    cores, operations = usage(FLOOD_SECONDS)
    # A failure in the midst of it is told of by the next poll, if no notification gets through.
    took = seconds_to_stop(run, 0, sender, within=20)
    run.wait_round(count=NODES, after=0)
    assert flooding.stdout is not None
    sent = int(flooding.stdout.read())
    assert flooding.wait(30) == 0
    print(f"{sent} packets: {cores:.3f} cores, {operations} operations, stop {took:.2f} s")
    assert sent > 20 * MOST_REJECTED, "it was no flood"
    assert cores < MOST_CPU
    # One valid notification is one look, and one past the caches; each packet for itself would be thousands.
    assert operations < SHARE * FLOOD_SECONDS, "its share of what all nodes may ask of the server"
    assert took < 15.0
    assert not run.events("node_lost")

    run.let_workers_end()
    assert run.wait_for_ends(range(NODES)) == [0] * NODES
    told = [line for line in run.log(receiver).splitlines() if "dropped a packet" in line]
    assert 4 <= len(told) <= MOST_LOGGED
    assert len(told) == len(set(told)), "each reason and sender once"
    summary = next(line for line in run.log(receiver).splitlines() if "dropped packets in all" in line)
    counts = {words.split()[1]: int(words.split()[0]) for words in summary.rpartition(": ")[2].split(", ")}
    assert set(counts) == {"forged", "garbled", "misdirected", "oversized", "repeated"}
    longest = FLOOD_SECONDS + 3.0 + 2.0
    assert sum(counts.values()) <= MOST_REJECTED * (longest / PERIOD + 2), "the rest was never looked at"
    assert "Traceback" not in run.log(receiver)


def test_nodes_without_ipv4_meet_by_polling_and_say_so_once(tmp_path: Path) -> None:
    with NetworkRun(tmp_path, nodes=NODES, caches=3.0, ipv6_only=True) as run:
        index = run.wait_round(count=NODES)
        took = seconds_to_stop(run, index, 0, within=20)
        assert took < 15.0
        run.wait_round(count=NODES, after=index)
        run.let_workers_end()
        assert run.wait_for_ends(range(NODES)) == [0] * NODES
        for node in range(NODES):
            lines = [line for line in run.log(node).splitlines() if "no IPv4 address" in line]
            assert len(lines) == 1, run.log(node)
            assert "looking at the files alone" in lines[0]


def test_an_agent_refuses_a_secret_that_others_may_have_read(tmp_path: Path) -> None:
    unstarted = NetworkRun(tmp_path, nodes=1)
    secret = unstarted.make_attempt().root.parent / "secret"
    secret.chmod(0o640)
    argv = [sys.executable, "-m", "hpc_elastic", "agent", "--run-dir", str(secret.parent), "--attempt", "0"]
    done = subprocess.run([*argv, "--node", "0"], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert f"{secret} is open to other users (mode 0640)" in done.stderr
