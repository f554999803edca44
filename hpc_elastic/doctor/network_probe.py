"""The network as one node sees it: names, addresses, datagrams, clocks, MASTER_ADDR, and transfers in pairs.

The datagrams are the notifier's own, which carry the clocks' comparison too.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from msgspec import Struct, field

from hpc_elastic.base import codec
from hpc_elastic.base.clock import uptime_ns
from hpc_elastic.base.host_facts import LOOPBACK, candidate_addresses
from hpc_elastic.base.waking import wait_readable
from hpc_elastic.doctor.pairs import PROGRAM, LinkProbe, NetworkVerdict, measure_pairs
from hpc_elastic.doctor.probe_site import ProbeSite
from hpc_elastic.slurm.job_environment import in_job
from hpc_elastic.store.base import StoreError
from hpc_elastic.store.notifier import Notifier

DATAGRAMS = 100
"""Sent to each address of each other node."""
_EVERY = 0.02
_LAST_ONES = 0.5
_CONNECT_SECONDS = 3.0
_GATHER_SECONDS = 30.0
_AT_ONCE = 32


class Reached(Struct, frozen=True, kw_only=True):
    """A TCP connection that was tried."""

    node: str
    """Whose address it is; empty: MASTER_ADDR's."""
    address: str
    error: str = ""
    """Why there is none; empty: it was made."""


class ClockAhead(Struct, frozen=True, kw_only=True):
    """How far this node's wall clock is ahead of another's."""

    seconds: float
    bound: float
    """It is off by at most so much."""


class NetworkFacts(Struct, frozen=True, kw_only=True):
    """What one node found."""

    addresses: tuple[str, ...] = ()
    """Of its own, as the agents use them: what its name resolves to, then those of its interfaces."""
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Node → what its name resolves to here; empty: it was not asked."""
    reached: tuple[Reached, ...] = ()
    datagrams: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Sending node → own address → how many of `DATAGRAMS` came. Nodes that took part are in it, with all addresses."""
    clocks: Mapping[str, ClockAhead] = field(default_factory=dict)
    """Other node → this one's clock against it."""
    master: Reached | None = None
    """MASTER_ADDR and MASTER_PORT, as workers get them; None: there are none."""
    pairs: NetworkVerdict | None = None
    """The same on all nodes."""
    no_pairs: str = ""
    """Why there is none."""


class NodeAddresses(Struct, frozen=True, kw_only=True):
    """What a node shows the others, so that they can reach it."""

    node: str
    addresses: tuple[str, ...]
    datagrams: int
    """Its notifier's port."""
    connections: int
    booted_ns: int
    """Its wall clock when its clock since the boot was 0."""


def probe_network(site: ProbeSite) -> NetworkFacts:
    """Measure. All nodes do so at the same time."""
    addresses = tuple(candidate_addresses(site.node)) if in_job(site.env) else (LOOPBACK,)
    listener = socket.create_server(("0.0.0.0", 0), backlog=128)
    master, port = site.env.get("MASTER_ADDR", ""), int(site.env.get("MASTER_PORT", "0"))
    listeners = [listener]
    if site.rank == 0 and port and site.env.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        with contextlib.suppress(OSError):  # another program has it: that is then what the others reach
            listeners.append(socket.create_server(("0.0.0.0", port), backlog=128))  # as rank 0 would do itself
    secrets = site.gather("network-secret", os.urandom(16).hex(), seconds=_GATHER_SECONDS)
    notifier = Notifier(
        secret=secrets[min(secrets)].encode(), run_uid="doctor", uid=site.node, host="0.0.0.0", clock=site.clock
    )
    mine = NodeAddresses(
        node=site.node, addresses=addresses, datagrams=notifier.port, connections=listener.getsockname()[1],
        booted_ns=site.clock.time_ns() - uptime_ns(site.clock),
    )  # fmt: skip
    raw = site.gather("network-hello", codec.dumps(mine), seconds=_GATHER_SECONDS)
    nodes = {rank: codec.loads(NodeAddresses, text) for rank, text in sorted(raw.items())}
    others = {rank: hello for rank, hello in nodes.items() if rank != site.rank}
    for one in listeners:
        threading.Thread(target=_accept_all, args=(one,), daemon=True).start()
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        names = _resolve(pool, [node for node in site.hosts if node]) if in_job(site.env) else {}
        places = [(hello.node, address, hello.connections) for hello in others.values() for address in hello.addresses]
        reached = tuple(pool.map(lambda place: _connect(*place), places))
        to_master = _connect("", master, port) if master else None
    site.barrier("network-connected", seconds=_GATHER_SECONDS)
    for one in listeners:
        one.close()
    _exchange_datagrams(site, notifier, list(others.values()))
    clocks = {hello.node: ahead for hello in others.values() if (ahead := _clock_ahead(notifier, mine, hello))}
    pairs = _measure_pairs(site, addresses) if others else "there is one node alone"
    return NetworkFacts(
        addresses=addresses,
        names=names,
        reached=reached,
        datagrams={
            hello.node: {address: min(DATAGRAMS, notifier.received[hello.node, address]) for address in addresses}
            for hello in others.values()
        },
        clocks=clocks,
        master=to_master,
        pairs=None if isinstance(pairs, str) else pairs,
        no_pairs=pairs if isinstance(pairs, str) else "",
    )


def _accept_all(listener: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it was closed
        while True:
            listener.accept()[0].close()


def _resolve(pool: ThreadPoolExecutor, names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    def addresses_of(name: str) -> tuple[str, ...]:
        try:
            found = socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            return ()
        return tuple(dict.fromkeys(str(entry[4][0]) for entry in found))

    return dict(zip(names, pool.map(addresses_of, names), strict=True))


def _connect(node: str, address: str, port: int) -> Reached:
    try:
        socket.create_connection((address, port), timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        return Reached(node=node, address=address, error=error.strerror or str(error))
    return Reached(node=node, address=address)


def _exchange_datagrams(site: ProbeSite, notifier: Notifier, others: Sequence[NodeAddresses]) -> None:
    """Send to all, and take in what comes until all have sent. The notifier counts, and compares clocks."""
    places = [(address, hello.datagrams) for hello in others for address in hello.addresses]
    site.barrier("network-datagrams", seconds=_GATHER_SECONDS)
    for _ in range(DATAGRAMS):
        notifier.beat(places)
        _drain(notifier, _EVERY)
    all_have_sent = threading.Event()

    def wait() -> None:
        site.barrier("network-sent", seconds=_GATHER_SECONDS)
        all_have_sent.set()

    threading.Thread(target=wait, daemon=True).start()
    while not all_have_sent.is_set():
        _drain(notifier, _EVERY)
    _drain(notifier, _LAST_ONES)
    notifier.close()


def _clock_ahead(notifier: Notifier, mine: NodeAddresses, other: NodeAddresses) -> ClockAhead | None:
    """This host's wall clock against the other's; None: datagrams did not pass both ways."""
    if (offset := notifier.offset_to(other.node)) is None:
        return None
    ahead_ns = mine.booted_ns - other.booted_ns + offset.offset_ns
    return ClockAhead(seconds=ahead_ns / 1e9, bound=offset.bound_ns / 1e9)


def _drain(notifier: Notifier, seconds: float) -> None:
    """Take in what comes for so long."""
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        wait_readable([notifier], left)
        notifier.drain()


def _measure_pairs(site: ProbeSite, addresses: Sequence[str]) -> NetworkVerdict | str:
    settings = site.settings
    # In a container the workers' interpreter is not to be had from here: then without torch.
    python = settings.python if settings.container is None else sys.executable
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with theirs:
            process = subprocess.Popen([python, str(PROGRAM)], stdin=theirs.fileno(), env=dict(site.env))
    except OSError as error:
        ours.close()
        return f"{python}: {error.strerror or error}"
    try:
        return measure_pairs(site, addresses, LinkProbe(ours))
    except (OSError, StoreError) as error:
        return str(error)
    finally:
        ours.close()
        process.kill()
        process.wait()
