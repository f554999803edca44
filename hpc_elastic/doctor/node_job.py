"""The doctor's job on a run's nodes: the facts that its worker writes on each, and their judgement.

Of the network between the nodes, addresses, clocks and bandwidth, both are here; of each host by itself in `host`.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

from msgspec import Struct, field

import hpc_elastic
from hpc_elastic.agent.health import GPU_SECONDS
from hpc_elastic.base import codec
from hpc_elastic.base.clock import SystemClock
from hpc_elastic.base.files import Unreadable, ask_about, make_private_dir
from hpc_elastic.base.host_facts import LOOPBACK, candidate_addresses
from hpc_elastic.base.text import first_of
from hpc_elastic.doctor import host
from hpc_elastic.doctor.checks import DoctorFinding, fold, ok, problem, problem_unless, warn_unless, warning
from hpc_elastic.doctor.host import (
    IMPORT_SECONDS,
    FileFacts,
    GpusFacts,
    JobMemoryFacts,
    NoticeFacts,
    ProbeSettings,
    ProbeSite,
    PythonFacts,
)
from hpc_elastic.run.node_score import load_record
from hpc_elastic.run.paths import RunPaths, UnreadableAttemptError, load_attempt, load_newest_result
from hpc_elastic.run.spec import Container
from hpc_elastic.slurm.job_environment import in_job, names_text
from hpc_elastic.store.file_store import FileStore
from hpc_elastic.worker_api.preemption import preemption_notice

PROGRAM = Path(hpc_elastic.__file__).resolve().parent / "pytorch" / "link_probe.py"
_CONNECT_SECONDS = 3.0
_GATHER_SECONDS = 30.0
_READY_SECONDS, _TRANSFER_SECONDS = 60.0, 9.0
"""Limits of a node's import of torch, and of one exchange of data."""
_PARTNERS = 3
_MOST = 4


class Reached(Struct, frozen=True, kw_only=True):
    node: str
    """The node of the address; empty: MASTER_ADDR's."""
    address: str
    error: str = ""
    ahead: float | None = None
    """Seconds that this node's wall clock is ahead of the other's, plus or minus `bound`; None: it did not answer."""
    bound: float = 0.0


class Transfer(Struct, frozen=True, kw_only=True):
    node: str = ""
    seconds: float | None = None
    """None: it failed."""
    bytes: int = 0
    why: str = ""


class NetworkFacts(Struct, frozen=True, kw_only=True):
    addresses: tuple[str, ...] = ()
    """Its own, as the agents use them: those that its name resolves to, then those of its interfaces."""
    reached: tuple[Reached, ...] = ()
    master: Reached | None = None


class BandwidthFacts(Struct, frozen=True, kw_only=True):
    transfers: tuple[Transfer, ...] = ()
    backend: str = ""


class NodeAddresses(Struct, frozen=True, kw_only=True):
    node: str
    addresses: tuple[str, ...]
    port: int


class LinkEnd(NodeAddresses, frozen=True, kw_only=True):
    """The same for a node that is ready to exchange data. A peer that connects to the port shows the token."""

    backend: str = "tcp"
    gpus: int = 0
    token: str = ""


def _own_addresses(site: ProbeSite) -> tuple[str, ...]:
    return tuple(candidate_addresses(site.node)) if in_job(site.env) else (LOOPBACK,)


def probe_network(site: ProbeSite) -> NetworkFacts:
    addresses = _own_addresses(site)
    master, port = site.env.get("MASTER_ADDR", ""), int(site.env.get("MASTER_PORT", "0"))
    listeners = [socket.create_server(("0.0.0.0", 0), backlog=128)]
    if site.rank == 0 and port and site.env.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        with contextlib.suppress(OSError):  # another program has it: that is then what the others reach
            listeners.append(socket.create_server(("0.0.0.0", port), backlog=128))  # as rank 0 would do itself
    mine = NodeAddresses(node=site.node, addresses=addresses, port=listeners[0].getsockname()[1])
    raw = site.gather("network-hello", codec.dumps(mine), seconds=_GATHER_SECONDS)
    for one in listeners:
        threading.Thread(target=_answer_all, args=(one,), daemon=True).start()
    hellos = [codec.loads(NodeAddresses, text) for rank, text in sorted(raw.items()) if rank != site.rank]
    places = [(hello.node, address, hello.port) for hello in hellos for address in hello.addresses]
    with ThreadPoolExecutor(32) as pool:
        reached = tuple(pool.map(lambda place: _connect(*place), places))
    to_master = _connect("", master, port) if master else None
    site.barrier("network-connected", seconds=_GATHER_SECONDS)
    for one in listeners:
        one.close()
    return NetworkFacts(addresses=addresses, reached=reached, master=to_master)


def _answer_all(listener: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it was closed
        while True:
            connection = listener.accept()[0]
            with connection, contextlib.suppress(OSError):
                connection.settimeout(_CONNECT_SECONDS)
                connection.recv(1)
                connection.sendall(b"%020d" % time.time_ns())


def _connect(node: str, address: str, port: int) -> Reached:
    # Without a `node` another program may answer there, whose clock is not asked for.
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


def partners_of(rank: int, count: int) -> list[int | None]:
    """The ranks of a pair add up to one odd number in a round, modulo `count`: no two rounds have a pair in common."""
    rounds = min(_PARTNERS, count if count % 2 else count // 2)
    partners = [(2 * number + 1 - rank) % count for number in range(rounds)]
    return [None if partner == rank else partner for partner in partners]


def probe_bandwidth(site: ProbeSite) -> BandwidthFacts | None:
    if site.world_size < 2:
        return None
        # From here the workers' interpreter in a container can't be started: then without torch.
    python = site.settings.python if site.settings.container is None else sys.executable
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        with theirs:
            process = subprocess.Popen([python, str(PROGRAM)], stdin=theirs.fileno(), env=dict(site.env))
        try:
            return exchange_data(site, ours)
        finally:
            process.kill()
            process.wait()


def exchange_data(site: ProbeSite, control: socket.socket) -> BandwidthFacts:
    """Raises OSError: the process at the other end of `control` is not ready in time."""
    ready = _receive(control, _READY_SECONDS)
    shown = {"node": site.node, "token": os.urandom(16).hex(), "addresses": list(_own_addresses(site))}
    own = codec.readable(LinkEnd, {**ready, **shown}) if ready else None
    if own is None:
        raise TimeoutError("the workers' interpreter did not start it in time")
    raw = site.gather("link-ends", codec.dumps(own), seconds=_READY_SECONDS)
    ends = {rank: codec.loads(LinkEnd, text) for rank, text in raw.items()}
    # One for all: the times are compared. Later ones use more of what workers use.
    backend = min((end.backend for end in ends.values()), key=("tcp", "gloo", "nccl").index)
    done = []
    for number, partner in enumerate(partners_of(site.rank, site.world_size)):
        site.barrier(f"link-round-{number}", seconds=_TRANSFER_SECONDS + 2.0)
        if partner is None or partner not in ends:
            continue
        first = min(site.rank, partner)
        order = {
            "rank": int(site.rank != first), "addresses": ends[first].addresses, "port": ends[first].port,
            "backend": backend, "gpus": min(own.gpus, ends[partner].gpus) if backend == "nccl" else 0,
            "token": f"{ends[first].token} {number}", "seconds": _TRANSFER_SECONDS,
        }  # fmt: skip
        with contextlib.suppress(OSError):  # it has ended: then there is no answer either
            control.send(json.dumps(order).encode())
        answer = _receive(control, _TRANSFER_SECONDS + 1.0) or {"why": "the process that measures has ended, or hangs"}
        done.append(Transfer(node=ends[partner].node, **answer))
    return BandwidthFacts(transfers=tuple(done), backend=backend)


def _receive(control: socket.socket, seconds: float) -> dict[str, Any]:
    control.settimeout(seconds)
    try:
        found = json.loads(control.recv(1 << 16))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def judge_network(facts: Mapping[str, NetworkFacts]) -> list[DoctorFinding]:
    return [_addresses(facts), *_master(facts), _clocks(facts)] if len(facts) > 1 else []


def _addresses(facts: Mapping[str, NetworkFacts]) -> DoctorFinding:
    tried = [(node, one) for node, own in facts.items() for one in own.reached]
    works = {(node, one.node) for node, one in tried if not one.error}
    why = {(node, one.node): f"{one.address}: {one.error}" for node, one in tried}
    cut_off = [
        f"{node} does not reach {other} ({why.get((node, other), 'it has no address')})"
        for node, other in permutations(facts, 2)
        if (node, other) not in works
    ]
    names = {node: own.addresses[0] for node, own in facts.items() if own.addresses}
    failed = [f"{one.node}'s {one.address} from {node}" for node, one in tried if one.error]
    if cut_off:
        return problem(
            "network.addresses", first_of(cut_off, _MOST), "workers on these nodes can't meet: a run there fails",
            "--exclude one of the nodes, and have the site look at its network and firewall",
        )  # fmt: skip
    return warn_unless(
        not any(one.error and one.address == names.get(one.node) for _, one in tried), "network.addresses",
        f"not reached: {first_of(failed, _MOST)}" if failed
        else f"each node reaches each ({first_of([f'{node} at {address}' for node, address in names.items()], _MOST)})",
        "a script that uses the name of such a node as MASTER_ADDR does not work everywhere",
        "use MASTER_ADDR as workers get it (an address that others have reached), or --master-addr; "
        "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME for the process group",
    )  # fmt: skip


def _master(facts: Mapping[str, NetworkFacts]) -> Iterator[DoctorFinding]:
    tried = {node: own.master for node, own in facts.items() if own.master is not None}
    failed = [f"{node} ({found.error})" for node, found in tried.items() if found.error]
    reached = f"not reached from {first_of(failed, _MOST)}" if failed else "reached from all nodes"
    for address in dict.fromkeys(found.address for found in tried.values()):
        yield problem_unless(
            not failed, "network.master", f"MASTER_ADDR={address} is {reached}",
            "workers there wait for the process group until it times out",
            "--master-addr with an address of the first node that all others reach; --master-port where a firewall "
            "lets few ports through",
        )  # fmt: skip


def _clocks(facts: Mapping[str, NetworkFacts]) -> DoctorFinding:
    # Each pair of nodes once, by its first node's clock.
    apart = [
        (abs(one.ahead), one.bound, f"{node}'s and {one.node}'s")
        for node, own in facts.items()
        for one in own.reached
        if one.ahead is not None and node < one.node
    ]
    if not apart:
        return ok("network.clocks", "not known: no node reached another")
    far = dict.fromkeys(pair for ahead, bound, pair in apart if ahead - bound > 1.0)
    least, most = max(ahead - bound for ahead, bound, _ in apart), max(ahead + bound for ahead, bound, _ in apart)
    return warn_unless(
        not far, "network.clocks",
        f"up to {least:.1f} s apart: {first_of(list(far), _MOST)}" if far else f"at most {1000 * most:.1f} ms apart",
        "the times in the scripts' own logs do not fit together; hpc-elastic compares no wall clocks",
        "have the site look at NTP on the nodes that are named most",
    )  # fmt: skip


def judge_bandwidth(facts: Mapping[str, BandwidthFacts]) -> Iterator[DoctorFinding]:
    done = [(node, one) for node, own in facts.items() for one in own.transfers]
    if not done:
        return
    best: dict[str, float] = {}
    failed: dict[str, str] = {}
    for node, one in done:
        if one.seconds is not None:
            best[node] = min(one.seconds, best.get(node, one.seconds))
        else:  # of both ends the later one's reason: it tried to connect, the other could only wait
            failed[" and ".join(sorted((node, one.node)))] = one.why
    by = next(own.backend for own in facts.values() if own.transfers)
    if failed:
        dead = dict.fromkeys(node for node, _ in done if best and node not in best)
        shown = first_of([f"{pair}: {why}" for pair, why in failed.items()], _MOST)
        way_out = f"{by} must find the right network (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME); ask the site"
        yield problem(
            "network.bandwidth", f"no transfer between {shown}", "collectives between them fail or hang",
            f"--exclude {names_text(dead)}, and have the site look at its network" if dead else way_out,
        )  # fmt: skip
    if not best:
        return
    size, usual = max(one.bytes for _, one in done), median(best.values())
    slow = [f"{node}: {_rate(size, seconds)}" for node, seconds in best.items() if seconds > 2 * usual]
    if slow:
        yield warning(
            "network.bandwidth",
            f"{first_of(slow, _MOST)}, where the median of {len(best)} nodes is {_rate(size, usual)}",
            "all workers wait for the slowest in each step", "--exclude it, and have the site look at its network",
        )  # fmt: skip
    if not failed and not slow:
        by = "a plain TCP connection, as the workers' Python lacks torch" if by == "tcp" else by
        rates = f"{_rate(size, usual)} in the median, {_rate(size, max(best.values()))} at least"
        yield ok("network.bandwidth", f"{rates}, between two nodes by {by}")


def _rate(count: int, seconds: float) -> str:
    rate = 8 * count / max(seconds, 1e-9)
    return f"{rate / 1e9:.1f} Gbit/s" if rate >= 1e9 else f"{rate / 1e6:.1f} Mbit/s"


_ENDING = ".node.json"
PARTS: Mapping[str, tuple[Callable[[ProbeSite], Any], float]] = {
    "memory": (host.probe_memory, 60.0),
    "files": (host.probe_files, 240.0),
    "network": (probe_network, 180.0),
    "python": (host.probe_python, IMPORT_SECONDS + 60.0),
    "bandwidth": (probe_bandwidth, 200.0),
    "gpus": (host.probe_gpus, GPU_SECONDS + 15.0),
    "notice": (host.probe_notice, 800.0),  # last: the job ends with it
}
"""Fields of `ProbedNode`: the probe, and its time limit in seconds."""


class ProbedNode(Struct, kw_only=True):
    node: str
    rank: int = 0
    files: FileFacts | None = None
    memory: JobMemoryFacts | None = None
    network: NetworkFacts | None = None
    bandwidth: BandwidthFacts | None = None
    notice: NoticeFacts | None = None
    python: PythonFacts | None = None
    gpus: GpusFacts | None = None
    failed: dict[str, str] = field(default_factory=dict)
    unfinished: str = ""
    """The part that was being probed when this was written; empty: all are done."""


def facts_folder(paths: RunPaths) -> Path:
    return paths.root / "doctor"


def probe_node(site: ProbeSite) -> ProbedNode:
    facts, path = ProbedNode(node=site.node, rank=site.rank), site.folder / f"{site.node}{_ENDING}"
    for name, (probe, seconds) in PARTS.items():
        print(f"doctor: {name}", flush=True)
        facts.unfinished = name
        codec.save(path, facts)
        found = _bounded(probe, site, seconds)
        if isinstance(found, str):
            facts.failed[name] = found
        else:
            setattr(facts, name, found)
    facts.unfinished = ""
    codec.save(path, facts)
    return facts


def _bounded(probe: Callable[[ProbeSite], Any], site: ProbeSite, seconds: float) -> Any:
    # A text is the reason why the probe failed. One that hangs is left to its thread.
    outcome: list[Any] = []

    def work() -> None:
        try:
            outcome.append(probe(site))
        except Exception as error:
            outcome.append(f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    return outcome[0] if outcome else f"no end after {seconds:g} s"


def open_site(folder: Path, settings: str, env: Mapping[str, str]) -> ProbeSite:
    """Open this worker's place, by the variables of each worker and the JSON of `ProbeSettings`."""
    rank, clock = int(env["GROUP_RANK"]), SystemClock()
    make_private_dir(folder)
    # A round that follows a lost node has keys of its own.
    root = folder / f"store-{env['HPC_ELASTIC_ATTEMPT']}-{env['TORCHELASTIC_RESTART_COUNT']}"
    return ProbeSite(
        rank=rank,
        world_size=int(env["GROUP_WORLD_SIZE"]),
        node=env.get("SLURMD_NODENAME") or f"node{rank}",
        folder=folder,
        settings=codec.loads(ProbeSettings, settings),
        store=FileStore(root, clock=clock),
        clock=clock,
        env=env,
    )


def main() -> NoReturn:
    preemption_notice()  # from now on the agent knows that this worker takes notices
    probe_node(open_site(Path(sys.argv[1]), sys.argv[2], os.environ))
    sys.stdout.flush()
    os._exit(0)  # a probe may hang in a mount


def collect(paths: RunPaths) -> tuple[tuple[str, ...], dict[str, ProbedNode], str]:
    """The job's nodes, empty where it never began; their facts; and the known reason why some are missing."""
    begun = paths.begun_attempts()
    if not begun:
        return (), {}, ""
    try:
        attempt = load_attempt(begun[-1].attempt_json)
    except UnreadableAttemptError as error:
        return (), {}, str(error)
    ask_about(facts_folder(paths))
    read = {node: codec.load(facts_folder(paths) / f"{node}{_ENDING}", ProbedNode) for node in attempt.nodes}
    facts = {node: each for node, each in read.items() if not isinstance(each, Unreadable)}
    left = unfinished(attempt.nodes, facts)
    known = (item.why for item in load_record(paths.nodes_json).evidence if item.node in left)
    why = ", ".join(filter(None, dict.fromkeys(known)))
    if not why and (stored := load_newest_result(paths)) is not None:
        why = f"{stored.outcome.replace('_', ' ')}: {stored.reason}"
    return attempt.nodes, facts, why


def unfinished(nodes: Sequence[str], facts: Mapping[str, ProbedNode]) -> dict[str, str]:
    texts = {node: f"stopped while it probed {each.unfinished}" for node, each in facts.items() if each.unfinished}
    return {node: texts.get(node, "wrote nothing") for node in nodes if node in texts or node not in facts}


def judge_nodes(
    nodes: Sequence[str], facts: Mapping[str, ProbedNode], *, why: str = "", container: Container | None = None
) -> list[DoctorFinding]:
    """`why` is the reason for missing facts, or how the job ended; `container` is the workers' image."""

    def part(name: str) -> dict[str, Any]:
        return {node: found for node, each in facts.items() if (found := getattr(each, name)) is not None}

    return [
        *_came(nodes, facts, f": {why}" if why else ""),
        *host.judge_files(part("files")),
        *host.judge_job(part("memory"), part("notice")),
        *judge_network(part("network")),
        *judge_bandwidth(part("bandwidth")),
        *(host.judge_pythons(part("python"), container) if facts else ()),
        *host.judge_node_gpus(part("gpus")),
    ]


def _came(nodes: Sequence[str], facts: Mapping[str, ProbedNode], why: str) -> Iterator[DoctorFinding]:
    means, way_out = "a run would not have those nodes", "see the job's log and report; leave nodes out with --exclude"
    texts = unfinished(nodes, facts)
    if not nodes:
        yield problem("nodes.job", f"it did not run on any node{why}", "a run would not begin", way_out)
    elif not texts:
        yield ok("nodes.job", f"agents and workers ran on {names_text(nodes)}")
    yield from fold([(node, problem("nodes.job", text + why, means, way_out)) for node, text in texts.items()])
    yield from fold([
        (node, problem("nodes.probes", f"{part}: {text}", "what it checks is not known there", "try it on that node"))
        for node, each in facts.items()
        for part, text in each.failed.items()
    ])  # fmt: skip
