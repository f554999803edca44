"""The network between the nodes: addresses, clocks and bandwidth. The probe, and what its facts mean.

Each node connects to every address of every other, which answers with its wall clock. For the bandwidth it exchanges
data with up to three others, one after the other, by a process of the workers' interpreter
(`hpc_elastic.pytorch.link_probe`).
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

from msgspec import Struct

import hpc_elastic
from hpc_elastic.base import codec
from hpc_elastic.base.host_facts import LOOPBACK, candidate_addresses
from hpc_elastic.base.text import first_of
from hpc_elastic.doctor.findings import Finding, ok, problem, warn_unless, warning
from hpc_elastic.doctor.probe_site import ProbeSite
from hpc_elastic.slurm.job_environment import in_job

PROGRAM = Path(hpc_elastic.__file__).resolve().parent / "pytorch" / "link_probe.py"
"""Run by the workers' interpreter."""
_CONNECT_SECONDS = 3.0
_GATHER_SECONDS = 30.0
_READY_SECONDS, _TRANSFER_SECONDS = 60.0, 9.0
"""How long a node may take to import torch, and for one exchange of data."""
_PARTNERS = 3
_BACKENDS = ("tcp", "gloo", "nccl")
"""The more of what workers use comes later."""
_AT_ONCE = 32
_APART = 1.0
"""Seconds between two wall clocks."""
_SLOW_FACTOR = 2.0
_MOST = 4


class Reached(Struct, frozen=True, kw_only=True):
    """A TCP connection that was tried."""

    node: str
    """Whose address it is; empty: MASTER_ADDR's."""
    address: str
    error: str = ""
    """Why there is none; empty: it was made."""
    ahead: float | None = None
    """Seconds that this node's wall clock is ahead of the other's; None: it did not answer."""
    bound: float = 0.0
    """`ahead` is off by at most so much."""


class Transfer(Struct, frozen=True, kw_only=True):
    """An exchange of data with another node."""

    node: str = ""
    seconds: float | None = None
    """None: it failed."""
    bytes: int = 0
    """In each direction."""
    why: str = ""


class NetworkFacts(Struct, frozen=True, kw_only=True):
    """What one node found."""

    addresses: tuple[str, ...] = ()
    """Of its own, as the agents use them: what its name resolves to, then those of its interfaces."""
    reached: tuple[Reached, ...] = ()
    master: Reached | None = None
    """MASTER_ADDR and MASTER_PORT, as workers get them; None: there are none."""
    transfers: tuple[Transfer, ...] = ()
    backend: str = ""
    """By which data was exchanged: ``nccl``, ``gloo`` or ``tcp``."""
    no_transfers: str = ""
    """Why there are none."""


class NodeAddresses(Struct, frozen=True, kw_only=True):
    """What a node shows the others, so that they can reach it."""

    node: str
    addresses: tuple[str, ...]
    port: int
    """At which it answers."""


class LinkEnd(Struct, frozen=True, kw_only=True):
    """What a node shows the others that is ready to exchange data."""

    port: int = 0
    backend: str = "tcp"
    gpus: int = 0
    token: str = ""
    """Shown by who connects to that port."""


# -- measured ------------------------------------------------------------------------------------------------------


def probe_network(site: ProbeSite) -> NetworkFacts:
    """Measure. All nodes do so at the same time."""
    addresses = tuple(candidate_addresses(site.node)) if in_job(site.env) else (LOOPBACK,)
    master, port = site.env.get("MASTER_ADDR", ""), int(site.env.get("MASTER_PORT", "0"))
    listeners = [socket.create_server(("0.0.0.0", 0), backlog=128)]
    if site.rank == 0 and port and site.env.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        with contextlib.suppress(OSError):  # another program has it: that is then what the others reach
            listeners.append(socket.create_server(("0.0.0.0", port), backlog=128))  # as rank 0 would do itself
    mine = NodeAddresses(node=site.node, addresses=addresses, port=listeners[0].getsockname()[1])
    raw = site.gather("network-hello", codec.dumps(mine), seconds=_GATHER_SECONDS)
    nodes = {rank: codec.loads(NodeAddresses, text) for rank, text in sorted(raw.items())}
    for one in listeners:
        threading.Thread(target=_answer_all, args=(one,), daemon=True).start()
    places = [
        (hello.node, address, hello.port)
        for rank, hello in nodes.items()
        if rank != site.rank
        for address in hello.addresses
    ]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        reached = tuple(pool.map(lambda place: _connect(*place), places))
    to_master = _connect("", master, port) if master else None
    site.barrier("network-connected", seconds=_GATHER_SECONDS)
    for one in listeners:
        one.close()
    transfers = _exchange_data(site, nodes) if len(nodes) > 1 else "there is one node alone"
    done, backend = ((), "") if isinstance(transfers, str) else transfers
    return NetworkFacts(
        addresses=addresses,
        reached=reached,
        master=to_master,
        transfers=done,
        backend=backend,
        no_transfers=transfers if isinstance(transfers, str) else "",
    )


def _answer_all(listener: socket.socket) -> None:
    """Send the wall clock to each that asks."""
    with contextlib.suppress(OSError):  # it was closed
        while True:
            connection = listener.accept()[0]
            with connection, contextlib.suppress(OSError):
                connection.settimeout(_CONNECT_SECONDS)
                connection.recv(1)
                connection.sendall(b"%020d" % time.time_ns())


def _connect(node: str, address: str, port: int) -> Reached:
    """`node`: whose clock is asked for; empty: another program may answer there."""
    try:
        with socket.create_connection((address, port), timeout=_CONNECT_SECONDS) as connection:
            if not node:
                return Reached(node=node, address=address)
            asked = time.time_ns()
            connection.sendall(b"?")
            answer = connection.recv(20, socket.MSG_WAITALL)
            answered = time.time_ns()
    except OSError as error:
        return Reached(node=node, address=address, error=error.strerror or str(error))
    ahead = ((asked + answered) // 2 - int(answer)) / 1e9 if len(answer) == 20 else None
    return Reached(node=node, address=address, ahead=ahead, bound=(answered - asked) / 2e9)


def partner_of(rank: int, number: int, count: int) -> int | None:
    """With whom a node exchanges data in round `number` of a round-robin tournament; None: it rests.

    No two rounds below ``count - 1`` have a pair in common.
    """
    last = count - 1 + count % 2  # where the number of nodes is odd, this one stands for the rest
    if last == 0:
        return None
    found = number if rank == last else (2 * number - rank) % last
    found = last if found == rank else found
    return found if found < count else None


def _exchange_data(site: ProbeSite, nodes: Mapping[int, NodeAddresses]) -> tuple[tuple[Transfer, ...], str] | str:
    """Each transfer, and by what; a text: why there is none."""
    settings = site.settings
    # In a container the workers' interpreter is not to be had from here: then without torch.
    python = settings.python if settings.container is None else sys.executable
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        try:
            with theirs:
                process = subprocess.Popen([python, str(PROGRAM)], stdin=theirs.fileno(), env=dict(site.env))
        except OSError as error:
            return f"{python}: {error.strerror or error}"
        try:
            return exchange_data(site, {rank: hello.addresses for rank, hello in nodes.items()}, ours)
        finally:
            process.kill()
            process.wait()


def exchange_data(
    site: ProbeSite, addresses: Mapping[int, Sequence[str]], control: socket.socket
) -> tuple[tuple[Transfer, ...], str] | str:
    """Exchange data with one partner after the other.

    Args:
        site: This node's.
        addresses: By rank, the likeliest first.
        control: Of the process that measures here.

    Returns:
        Each transfer, and by what; a text: why there is none.
    """
    ready = _receive(control, _READY_SECONDS)
    own = None if ready is None else codec.readable(LinkEnd, {**ready, "token": os.urandom(16).hex()})
    if own is None:
        return "the workers' interpreter did not start the probe in time"
    raw = site.gather("link-ends", codec.dumps(own), seconds=_READY_SECONDS)
    ends = {rank: codec.loads(LinkEnd, text) for rank, text in raw.items()}
    backend = min((end.backend for end in ends.values()), key=_BACKENDS.index)  # one for all: the times are compared
    done = []
    for number in range(min(_PARTNERS, site.world_size - 1 + site.world_size % 2)):
        site.barrier(f"link-round-{number}", seconds=_TRANSFER_SECONDS + 2.0)
        partner = partner_of(site.rank, number, site.world_size)
        if partner is None or partner not in ends or partner not in addresses:
            continue
        first = min(site.rank, partner)
        order = {
            "rank": int(site.rank != first), "addresses": list(addresses[first]), "port": ends[first].port,
            "backend": backend, "gpus": min(own.gpus, ends[partner].gpus) if backend == "nccl" else 0,
            "token": f"{ends[first].token} {number}", "seconds": _TRANSFER_SECONDS,
        }  # fmt: skip
        with contextlib.suppress(OSError):  # it has ended: then there is no answer either
            control.send(json.dumps(order).encode())
        answer = _receive(control, _TRANSFER_SECONDS + 1.0) or {"why": "the process that measures has ended, or hangs"}
        done.append(Transfer(node=site.hosts[partner], **answer))
    return tuple(done), backend


def _receive(control: socket.socket, seconds: float) -> Mapping[str, Any] | None:
    control.settimeout(seconds)
    try:
        found = json.loads(control.recv(1 << 16))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


# -- judged --------------------------------------------------------------------------------------------------------


def judge_network(facts: Mapping[str, NetworkFacts]) -> list[Finding]:
    """All findings, in the order of their lines.

    Args:
        facts: By node, in their order, of those that measured any.
    """
    if len(facts) < 2:
        return []
    return [_addresses(facts), *_master(facts), _clocks(facts), *judge_transfers(facts)]


def _addresses(facts: Mapping[str, NetworkFacts]) -> Finding:
    """Which address of each node reaches which."""
    works: dict[str, dict[str, set[str]]] = {
        node: {address: set() for address in own.addresses} for node, own in facts.items()
    }
    why: dict[tuple[str, str], str] = {}
    for node, own in facts.items():
        for tried in own.reached:
            if not tried.error:
                works.setdefault(tried.node, {}).setdefault(tried.address, set()).add(node)
            else:
                why.setdefault((node, tried.node), f"{tried.address}: {tried.error}")
    cut_off = [
        f"{node} does not reach {other} ({why.get((node, other), 'it has no address')})"
        for node in facts
        for other in facts
        if node != other and not any(node in reaching for reaching in works[other].values())
    ]
    if cut_off:
        return problem(
            "network.addresses", first_of(cut_off, _MOST), "workers on these nodes can't meet: a run there fails",
            "--exclude one of the nodes, and have the site look at its network and firewall",
        )  # fmt: skip
    useless = [
        f"{node}'s {address} is reached by {len(reaching)} of {len(facts) - 1} nodes"
        for node, addresses in works.items()
        for address, reaching in addresses.items()
        if len(reaching) < len(facts) - 1
    ]
    first = {node: own.addresses[0] if own.addresses else "" for node, own in facts.items()}
    bad = [node for node, address in first.items() if len(works[node].get(address, ())) < len(facts) - 1]
    if bad:
        return warning(
            "network.addresses", first_of(useless, _MOST),
            f"a script that uses the name of {first_of(bad, _MOST)} as MASTER_ADDR does not work everywhere",
            "use MASTER_ADDR as workers get it (an address that others have reached), or --master-addr; "
            "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME for the process group",
        )  # fmt: skip
    also = f"; {first_of(useless, _MOST)}" if useless else ""
    shown = first_of([f"{node} at {address}" for node, address in first.items()], _MOST)
    return ok("network.addresses", f"each node reaches each ({shown}){also}")


def _master(facts: Mapping[str, NetworkFacts]) -> Iterator[Finding]:
    tried = {node: own.master for node, own in facts.items() if own.master is not None}
    if not tried:
        return
    address = next(iter(tried.values())).address
    failed = [f"{node} ({found.error})" for node, found in tried.items() if found.error]
    if failed:
        yield problem(
            "network.master", f"MASTER_ADDR={address} is not reached from {first_of(failed, _MOST)}",
            "workers there wait for the process group until it times out",
            "--master-addr with an address of the first node that all others reach; --master-port where a firewall "
            "lets few ports through",
        )  # fmt: skip
    else:
        yield ok("network.master", f"MASTER_ADDR={address} is reached from all nodes")


def _clocks(facts: Mapping[str, NetworkFacts]) -> Finding:
    best: dict[tuple[str, str], tuple[float, float]] = {}
    for node, own in facts.items():
        for one in own.reached:
            pair = (node, one.node)
            if one.ahead is not None and node < one.node and (pair not in best or one.bound < best[pair][1]):
                best[pair] = (one.ahead, one.bound)
    apart = [(abs(ahead), bound, *pair, ahead) for pair, (ahead, bound) in best.items()]
    if not apart:
        return ok("network.clocks", "not known: no node reached another")
    far = sorted((one for one in apart if one[0] - one[1] > _APART), reverse=True)
    said = [f"{node}'s is {seconds:+.1f} s against {other}'s" for _, _, node, other, seconds in far]
    most, bound = max(one[:2] for one in apart)
    return warn_unless(
        not far, "network.clocks",
        first_of(said, _MOST) if far else f"at most {1000 * most:.0f} ms apart (± {1000 * bound:.1f} ms)",
        "the times in the scripts' own logs do not fit together; hpc-elastic compares no wall clocks",
        "have the site look at NTP on the nodes that are named most",
    )  # fmt: skip


def judge_transfers(facts: Mapping[str, NetworkFacts]) -> Iterator[Finding]:
    """Which nodes are bad, and which are slow: each only where it has tried another one that does well."""
    if not any(own.transfers for own in facts.values()):
        why = dict.fromkeys(own.no_transfers for own in facts.values() if own.no_transfers)
        yield warning(
            "network.bandwidth", f"not measured: {first_of(list(why), 2)}", "slow links are not known",
            "--python with an interpreter that every node has, then hpc-elastic doctor again",
        )  # fmt: skip
        return
    pairs = _pairs(facts)
    best: dict[str, float] = {}
    for pair, (seconds, _) in pairs.items():
        if seconds is not None:
            best.update({node: min(seconds, best.get(node, seconds)) for node in pair})
    usual = median(best.values()) if best else 0.0
    sound = {node for node, seconds in best.items() if seconds <= _SLOW_FACTOR * usual}
    size = max(one.bytes for own in facts.values() for one in own.transfers)
    bad, slow = {}, {}
    for node in facts:
        tried = {one: why for pair, (_, why) in pairs.items() if node in pair for one in pair if one != node}
        if node in sound or sound.isdisjoint(tried):
            continue
        if node not in best:
            said = "; ".join(f"with {other}: {why}" for other, why in tried.items())
            bad[node] = f"{node}: no transfer over the network succeeded ({said})"
        else:
            partners = " and ".join(other for other, why in tried.items() if not why)
            rates = f"{rate_text(size, best[node])} with {partners}"
            slow[node] = f"{node}: {rates}, where the median of {len(best)} nodes is {rate_text(size, usual)}"
    failed = [
        f"{' and '.join(pair)}: {why}"
        for pair, (seconds, why) in pairs.items()
        if seconds is None and bad.keys().isdisjoint(pair)
    ]
    by = next(own.backend for own in facts.values() if own.transfers)
    way_out = "--exclude it, and have the site look at its network"
    if bad:
        found = first_of(list(bad.values()), _MOST)
        yield problem("network.bandwidth", found, "collectives with this node fail or hang", way_out)
    if failed:
        yield problem(
            "network.bandwidth", f"no transfer between {first_of(failed, _MOST)}",
            "collectives between them fail or hang",
            f"{by} must find the right network (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME); ask the site",
        )  # fmt: skip
    if slow:
        found = first_of(list(slow.values()), _MOST)
        yield warning("network.bandwidth", found, "all workers wait for the slowest in each step", way_out)
    if not (bad or failed or slow):
        by = "a plain TCP connection, as the workers' Python lacks torch" if by == "tcp" else by
        least = rate_text(size, max(best.values()))
        yield ok(
            "network.bandwidth",
            f"{rate_text(size, usual)} in the median, {least} at least, between two nodes by {by}",
        )


def _pairs(facts: Mapping[str, NetworkFacts]) -> dict[tuple[str, str], tuple[float | None, str]]:
    """How long each pair took, which works where both ends say so; None and why: it failed."""
    order = {node: place for place, node in enumerate(facts)}
    ends: dict[tuple[str, str], list[Transfer]] = {}
    for node, own in facts.items():
        for one in own.transfers:
            pair = sorted((node, one.node), key=lambda each: order.get(each, len(order)))
            ends.setdefault((pair[0], pair[1]), []).append(one)
    found: dict[tuple[str, str], tuple[float | None, str]] = {}
    for pair_, both in ends.items():
        times = [one.seconds for one in both if one.seconds is not None]
        # The reason is that of the end that tried to connect, not of the one that could only wait.
        why = next((one.why for one in reversed(both) if one.why), "it did not answer")
        found[pair_] = (max(times), "") if len(times) == 2 else (None, why)
    return found


def rate_text(count: int, seconds: float) -> str:
    """``9.4 Gbit/s``."""
    rate = 8 * count / max(seconds, 1e-9)
    return f"{rate / 1e9:.1f} Gbit/s" if rate >= 1e9 else f"{rate / 1e6:.1f} Mbit/s"
