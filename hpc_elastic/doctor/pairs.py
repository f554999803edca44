"""Transfers between the nodes in pairs: which node is bad, and which is slow.

Neighbours first, then the fastest with the slowest, as DLRover's node check does it. A node that fails with everyone,
while another node works with others, is bad; one that takes more than twice the median is slow. Where the number of
nodes is odd, one of them rests in each round; where that, or several bad nodes, has left a node that does badly without
two partners that do well, another round follows. (DLRover makes the last three a group, whose times do not show which
of the three it is.)

`pair_up` and `judge_times` decide, from facts alone; `measure_pairs` carries it out, by a process of the workers'
interpreter (`hpc_elastic.pytorch.link_probe`).
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from msgspec import Struct, field
from msgspec.structs import replace

import hpc_elastic
from hpc_elastic.base import codec
from hpc_elastic.doctor.probe_site import ProbeSite

PROGRAM = Path(hpc_elastic.__file__).resolve().parent / "pytorch" / "link_probe.py"
"""Run by the workers' interpreter."""
SLOW_FACTOR = 2.0
MOST_ROUNDS = 4
_READY_SECONDS, _ROUND_SECONDS = 45.0, 9.0
"""How long a node may take to import torch, and for one round's transfers."""
_MESSAGE = 65536
_BACKENDS = ("tcp", "gloo", "nccl")
"""The more of what workers use comes later."""


R = TypeVar("R", bound=Struct)


class Hello(Struct, frozen=True, kw_only=True):
    """What a node shows that is ready to measure."""

    host: str
    addresses: tuple[str, ...]
    port: int
    backend: str
    gpus: int = 0
    token: str
    """Shown by who connects to that port."""


class Time(Struct, frozen=True, kw_only=True):
    """How the transfer between this node and its partner went."""

    seconds: float | None = None
    """Of one transfer; None: it failed."""
    bytes: int = 0
    why: str = ""


class PairTime(Struct, frozen=True, kw_only=True):
    """The same of both."""

    pair: tuple[int, int]
    seconds: float | None = None
    why: str = ""


class NetworkVerdict(Struct, frozen=True, kw_only=True):
    """What the measurements show."""

    backend: str = ""
    bytes: int = 0
    """Of one transfer, in each direction."""
    median: float | None = None
    """Seconds, over all nodes that could transfer any."""
    seconds: Mapping[int, float] = field(default_factory=dict)
    """Node → of its fastest pair."""
    bad: Mapping[int, str] = field(default_factory=dict)
    """Node → why."""
    slow: Mapping[int, str] = field(default_factory=dict)
    failed: tuple[PairTime, ...] = ()
    """Pairs that could not transfer data."""
    names: Mapping[int, str] = field(default_factory=dict)


class Plan(Struct, frozen=True, kw_only=True):
    """What all follow: a round's pairs, and the times of those before; no pairs: there is no further round."""

    nodes: Mapping[int, Hello]
    """Who takes part."""
    pairs: tuple[tuple[int, int], ...] = ()
    times: tuple[PairTime, ...] = ()
    """Of the rounds before."""
    bytes: int = 0


# -- decisions -----------------------------------------------------------------------------------------------------


def needs_round(nodes: Sequence[int], times: Sequence[PairTime], *, done: int) -> bool:
    """Whether another round follows `done` ones: until each node was measured twice, and each that does badly has tried
    two others that do well."""
    if len(nodes) < 2 or done >= MOST_ROUNDS:
        return False
    sound = _sound(_fastest(times))
    partners = _partners(nodes, times)
    return any(
        sum(node in one.pair for one in times) < 2
        or (node not in sound and len(partners[node] & sound) < min(2, len(sound)))
        for node in nodes
    )


def pair_up(nodes: Sequence[int], times: Sequence[PairTime]) -> tuple[tuple[int, int], ...]:
    """The next round's pairs: neighbours at first, then the fastest with the slowest, as far as they have not met.

    Args:
        nodes: In the order of their neighbourhood, which Slurm's order of nodes is.
        times: Of the rounds before; none: this is the first.
    """
    if not times:
        return tuple(zip(nodes[::2], nodes[1::2], strict=False))
    fastest, met = _fastest(times), _partners(nodes, times)
    sound = _sound(fastest)

    def rank(node: int) -> tuple[bool, int, float, int]:
        tried = 0 if node in sound else len(met[node] & sound)
        return node not in sound, -tried, fastest.get(node, float("inf")), nodes.index(node)

    order = sorted(nodes, key=rank)
    if len(order) % 2:  # one rests: of those that do well the one that has met the most
        order.remove(min(order, key=lambda node: (node not in sound, -len(met[node]), order.index(node))))
    pairs = []
    while order:
        slowest = order.pop()
        partner = next((node for node in order if node not in met[slowest]), order[0])
        order.remove(partner)
        pairs.append((partner, slowest))
    return tuple(pairs)


def judge_times(plan: Plan, *, backend: str) -> NetworkVerdict:
    """Which nodes are bad, and which are slow.

    Both only of a node that has tried another one which does well: where a pair has nobody else to try, neither is
    blamed.
    """
    names = {node: hello.host for node, hello in plan.nodes.items()}
    fastest = _fastest(plan.times)
    sound = _sound(fastest)
    median = _median(fastest.values()) if fastest else None
    bad, slow = {}, {}
    for node in names:
        own = [time for time in plan.times if node in time.pair]
        if node in sound or sound.isdisjoint(_other(time, node) for time in own):
            continue
        if node not in fastest:
            said = "; ".join(f"with {names[_other(time, node)]}: {time.why}" for time in own)
            bad[node] = f"no transfer over the network succeeded ({said})"
        elif median is not None:
            rate, usual = rate_text(plan.bytes, fastest[node]), rate_text(plan.bytes, median)
            with_ = " and ".join(dict.fromkeys(names[_other(time, node)] for time in own))
            slow[node] = f"{rate} with {with_}, where the median of {len(fastest)} nodes is {usual}"
    return NetworkVerdict(
        backend=backend,
        bytes=plan.bytes,
        median=median,
        seconds=fastest,
        bad=bad,
        slow=slow,
        failed=tuple(time for time in plan.times if time.seconds is None),
        names=names,
    )


def _partners(nodes: Sequence[int], times: Sequence[PairTime]) -> dict[int, set[int]]:
    return {node: {_other(one, node) for one in times if node in one.pair} for node in nodes}


def _fastest(times: Sequence[PairTime]) -> dict[int, float]:
    """Node → seconds of its fastest pair; not those that have none."""
    found: dict[int, float] = {}
    for time_ in times:
        if time_.seconds is not None:
            for node in time_.pair:
                found[node] = min(found.get(node, time_.seconds), time_.seconds)
    return found


def _sound(fastest: Mapping[int, float]) -> frozenset[int]:
    """The nodes that do well."""
    limit = SLOW_FACTOR * _median(fastest.values()) if fastest else 0.0
    return frozenset(node for node, seconds in fastest.items() if seconds <= limit)


def _median(values: Collection[float]) -> float:  # importing statistics would cost more than all else here
    ordered = sorted(values)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


def _other(time_: PairTime, node: int) -> int:
    return time_.pair[1] if time_.pair[0] == node else time_.pair[0]


def join_times(pairs: Sequence[tuple[int, int]], times: Mapping[int, Time]) -> tuple[PairTime, ...]:
    """One result for each pair of what its two nodes found; a node that wrote none did not answer."""
    found = []
    for pair in pairs:
        both = [times.get(node, Time(why="it did not answer")) for node in pair]
        seconds = [one.seconds for one in both if one.seconds is not None]
        # The reason is that of the end that tried, not of the one that could only wait.
        why = next((one.why for one in reversed(both) if one.why), "")
        is_whole = len(seconds) == len(both)
        found.append(PairTime(pair=pair, seconds=max(seconds) if is_whole else None, why="" if is_whole else why))
    return tuple(found)


def common_backend(nodes: Collection[Hello]) -> tuple[str, int]:
    """What all of them can use, and how many GPUs of each."""
    backend = min((hello.backend for hello in nodes), key=_BACKENDS.index)
    return backend, min(hello.gpus for hello in nodes) if backend == "nccl" else 0


def rate_text(count: int, seconds: float) -> str:
    """``9.4 Gbit/s``."""
    rate = 8 * count / max(seconds, 1e-9)
    return f"{rate / 1e9:.1f} Gbit/s" if rate >= 1e9 else f"{rate / 1e6:.1f} Mbit/s"


# -- carried out ---------------------------------------------------------------------------------------------------


class LinkProbe:
    """The process that measures, by its control socket. All waits are bounded."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control

    def ready(self, seconds: float) -> Mapping[str, object] | None:
        """What it can do, once it has imported torch; None: it ended, or takes longer."""
        return self._receive(seconds)

    def measure(self, order: Mapping[str, object], seconds: float) -> Time:
        """Exchange data with the partner that `order` names."""
        try:
            self._control.send(json.dumps({**order, "seconds": seconds}).encode())
        except OSError:
            return Time(why="the process that measures has ended")
        found = self._receive(seconds + 1.0)
        time_ = None if found is None else codec.readable(Time, found)
        return time_ or Time(why="the process that measures has ended, or hangs")

    def _receive(self, seconds: float) -> Mapping[str, object] | None:
        self._control.settimeout(max(0.001, seconds))
        try:
            found = json.loads(self._control.recv(_MESSAGE))
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None


def measure_pairs(site: ProbeSite, addresses: Sequence[str], probe: LinkProbe) -> NetworkVerdict | str:
    """Take part. Returns the verdict, which is the same on all nodes; a text: why this node has none.

    Args:
        site: This node's.
        addresses: By which others may reach it, the likeliest first.
        probe: The process that measures here.

    Raises:
        OSError, StoreError: the store can't be used.
    """
    ready = probe.ready(_READY_SECONDS) or {}
    hello = codec.readable(Hello, {**ready, "host": site.node, "addresses": addresses, "token": os.urandom(16).hex()})
    if hello is None:
        return "the workers' interpreter did not start the probe in time"
    hellos = _gather(site, "pairs-hello", hello, _READY_SECONDS)
    backend = common_backend(hellos.values())[0]  # one for all: the times are compared
    nodes = {node: replace(each, backend=backend) for node, each in sorted(hellos.items())}
    plan = _agree(site, 0, Plan(nodes=nodes, pairs=pair_up(list(nodes), ())))
    number = 0
    while plan.pairs:
        if site.rank not in plan.nodes:
            return "this node came too late for it"
        number += 1
        pair = next((pair for pair in plan.pairs if site.rank in pair), None)
        own = Time() if pair is None else probe.measure(_order(plan, pair, site.rank, number), _ROUND_SECONDS)
        times = _gather(site, f"pairs-times-{number}", own, _ROUND_SECONDS + 2.0)
        after = Plan(
            nodes=plan.nodes,
            times=(*plan.times, *join_times(plan.pairs, times)),
            bytes=max([plan.bytes, *(one.bytes for one in times.values())]),
        )
        if needs_round(list(after.nodes), after.times, done=number):
            after = replace(after, pairs=pair_up(list(after.nodes), after.times))
        plan = _agree(site, number, after)
    return judge_times(plan, backend=common_backend(plan.nodes.values())[0])


def _order(plan: Plan, pair: tuple[int, int], rank: int, number: int) -> Mapping[str, object]:
    first = plan.nodes[pair[0]]
    backend, gpus = common_backend([plan.nodes[node] for node in pair])
    return {
        "rank": pair.index(rank),
        "addresses": first.addresses,
        "port": first.port,
        "backend": backend,
        "gpus": gpus,
        "token": f"{first.token} {number}",
    }


def _gather(site: ProbeSite, name: str, own: R, seconds: float) -> dict[int, R]:
    found = site.gather(name, codec.dumps(own), seconds=seconds)
    return {rank: codec.loads(type(own), text) for rank, text in found.items()}


def _agree(site: ProbeSite, number: int, own: Plan) -> Plan:
    """The plan that was written first: nodes that were waited for in vain may differ between two nodes' ones."""
    site.store.put_if_absent(f"pairs-plan/{number}", codec.dumps(own))
    site.store.invalidate("pairs-plan")
    return codec.loads(Plan, site.store.get(f"pairs-plan/{number}") or codec.dumps(own))
