"""``--health-checks network``: the nodes measure the network in pairs, and agree on who is bad and who is slow.

As DLRover's node check does it: neighbours first, then the fastest with the slowest. A node that fails with everyone,
while another node works with others, is bad; one that takes more than twice the median is slow. Where the number of
nodes is odd, one of them rests in each round; where that, or several bad nodes, has left a node that does badly without
two partners that do well, another round follows. (DLRover makes the last three a group, whose times do not show which
of the three it is.)

All nodes that are expected take part, in this order; each file is written once, in the attempt's store:

=============  ====================================  ===================================================
state          each node writes                      goes on when
=============  ====================================  ===================================================
meeting        ``hello``: its addresses and port     all expected nodes are there, or half of the time is over
pairing        (one node) ``plan/1``                 the plan is there: who is not in it takes no part
measuring N    ``times-N``: how its pair did         all in the plan have written theirs, or its time is over
pairing        (one node) ``plan/N+1``               the plan is there; after the last round it is the verdict
=============  ====================================  ===================================================

Any node may write a plan, the first in the order of nodes soonest: the store keeps the first that is written, and that
holds for all. A node that dies, comes late or can't measure costs the others bounded time, and no verdict on them.

`pair_up` and `judge_times` decide, from facts alone; `NetworkCheck` carries it out.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from msgspec import Struct, field
from msgspec.structs import replace

from hpc_elastic.agent.health import Finding, Meeting
from hpc_elastic.base import codec
from hpc_elastic.run.health_limits import Check
from hpc_elastic.store.base import Store

PROGRAM = Path(__file__).resolve().parent.parent / "pytorch" / "link_probe.py"
"""Run by the workers' interpreter."""
SLOW_FACTOR = 2.0
MOST_ROUNDS = 4
MEET_SHARE, ROUND_SHARE = 0.5, 0.1
"""Of the check's time: how long the others are waited for, and one round's transfers."""
_MOST_POSITION, _POSITION_SECONDS = 20, 0.25
"""Each node leaves the writing of a plan for so long to each of those before it."""
_LONGEST_PAUSE = 0.25
_INVALIDATE_SECONDS = 0.5
_MESSAGE = 65536
_BACKENDS = ("tcp", "gloo", "nccl")
"""The more of what workers use comes later."""

R = TypeVar("R", bound=Struct)


class Hello(Struct, frozen=True, kw_only=True):
    """What a node writes that is ready to measure."""

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
    """What all follow: a round's pairs; in place of a last round's, the verdict."""

    nodes: Mapping[int, Hello]
    """Who takes part."""
    pairs: tuple[tuple[int, int], ...] = ()
    times: tuple[PairTime, ...] = ()
    """Of the rounds before."""
    bytes: int = 0
    verdict: NetworkVerdict | None = None

    def partner(self, node: int) -> tuple[int, int] | None:
        """The pair that `node` is in; None: it rests."""
        return next((pair for pair in self.pairs if node in pair), None)


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


def judge_network(verdict: NetworkVerdict, node: int) -> list[Finding]:
    """What it means for one node: a bad one is unfit; a slow one is warned of."""
    check = Check.NETWORK.value
    if node in verdict.bad:
        return [Finding(check=check, reason=verdict.bad[node])]
    if node in verdict.slow:
        return [Finding(check=check, warning=f"this node's network is slow: {verdict.slow[node]}")]
    if node not in verdict.seconds:
        whys = "; ".join(dict.fromkeys(pair.why for pair in verdict.failed if node in pair.pair))
        if not whys:
            return []
        return [
            Finding(
                check=check, warning=f"no transfer over the network succeeded, which may be any node's fault: {whys}"
            )
        ]
    rate = rate_text(verdict.bytes, verdict.seconds[node])
    usual = rate_text(verdict.bytes, verdict.median or verdict.seconds[node])
    return [Finding(check=check, note=f"network: {rate} by {verdict.backend}, the median is {usual}")]


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


class NetworkCheck:
    """One node's part in a meeting. `run` waits: for a thread of its own."""

    def __init__(
        self,
        store: Store,
        meeting: Meeting,
        *,
        node: int,
        host: str,
        addresses: Sequence[str],
        seconds: float,
        pause: Callable[[float], bool],
    ) -> None:
        """Args:
        store: All nodes see it.
        meeting: Which, and who is expected.
        node: This one's number.
        host: Its name.
        addresses: By which others may reach it, the likeliest first.
        seconds: How long all of it may take.
        pause: Waits for so many seconds; returns False where nobody wants the result any more.
        """
        self._store = store
        self._folder = f"network/{meeting.name}"
        self._meeting = meeting
        self._node = node
        self._host = host
        self._addresses = tuple(addresses)
        self._seconds = seconds
        self._pause = pause
        self._ends = time.monotonic() + seconds
        self._invalidate_at = 0.0

    def run(self, probe: LinkProbe) -> NetworkVerdict | str:
        """Take part. Returns the verdict on all nodes; a text: why this node has none.

        Raises:
            OSError, StoreError: the store can't be used.
        """
        met_by = time.monotonic() + MEET_SHARE * self._seconds
        if self._read_plan("1") is not None:
            return "the other nodes have measured already"
        ready = probe.ready(MEET_SHARE * self._seconds)
        hello = (
            None
            if ready is None
            else codec.readable(
                Hello, {**ready, "host": self._host, "addresses": self._addresses, "token": os.urandom(16).hex()}
            )
        )
        if hello is None:
            return "the workers' interpreter did not start the probe in time"
        if not self._store.put_if_absent(f"{self._folder}-hello/{self._node:05d}", codec.dumps(hello)):
            return "another agent of this node has taken part"
        plan = self._agree("1", "hello", self._meeting.nodes, met_by, Hello, self._first_plan)
        number = 0
        while plan is not None and plan.verdict is None:
            if self._node not in plan.nodes:
                return "this node came too late for it"
            number += 1
            seconds = ROUND_SHARE * self._seconds
            if (pair := plan.partner(self._node)) is not None:
                result = probe.measure(self._order(plan, pair, number), seconds)
                self._store.put_if_absent(f"{self._folder}-times-{number}/{self._node:05d}", codec.dumps(result))
            awaited = {node for pair in plan.pairs for node in pair}
            until = time.monotonic() + seconds + 2.0
            propose = partial(self._next_plan, plan, number)
            plan = self._agree(str(number + 1), f"times-{number}", awaited, until, Time, propose)
        return plan.verdict if plan is not None and plan.verdict is not None else "the other nodes took too long"

    def _order(self, plan: Plan, pair: tuple[int, int], number: int) -> Mapping[str, object]:
        first = plan.nodes[pair[0]]
        backend, gpus = common_backend([plan.nodes[node] for node in pair])
        return {
            "rank": pair.index(self._node),
            "addresses": first.addresses,
            "port": first.port,
            "backend": backend,
            "gpus": gpus,
            "token": f"{first.token} {number}",
        }

    def _first_plan(self, hellos: Mapping[int, Hello]) -> Plan:
        backend = common_backend(hellos.values())[0]
        # One backend for all: the times are compared.
        nodes = {node: replace(hello, backend=backend) for node, hello in sorted(hellos.items())}
        plan = Plan(nodes=nodes, pairs=pair_up(list(nodes), ()))
        return plan if len(nodes) > 1 else Plan(nodes=nodes, verdict=NetworkVerdict(backend=backend))

    def _next_plan(self, before: Plan, number: int, times: Mapping[int, Time]) -> Plan:
        after = Plan(
            nodes=before.nodes,
            times=(*before.times, *join_times(before.pairs, times)),
            bytes=max([before.bytes, *(one.bytes for one in times.values())]),
        )
        if needs_round(list(after.nodes), after.times, done=number):
            return replace(after, pairs=pair_up(list(after.nodes), after.times))
        backend = common_backend(after.nodes.values())[0]
        return Plan(nodes=after.nodes, verdict=judge_times(after, backend=backend))

    def _agree(
        self,
        name: str,
        folder: str,
        awaited: Collection[int],
        until: float,
        content: type[R],
        propose: Callable[[Mapping[int, R]], Plan],
    ) -> Plan | None:
        """Wait for what the others write into a folder, and then for the plan that any of them makes of it; None: that
        did not come in time."""
        place = f"{self._folder}-{folder}"
        position = sum(node < self._node for node in awaited)
        patience = _POSITION_SECONDS * min(position, _MOST_POSITION)
        own_turn = float("inf")
        pause = 0.02
        while (plan := self._read_plan(name)) is None:
            now = time.monotonic()
            if now >= self._ends:
                return None
            self._invalidate(place, now)
            names = {int(found) for found in self._store.list(place) if found.isdecimal()}
            if own_turn == float("inf") and (names >= set(awaited) or now >= until):
                own_turn = now + patience
            if now >= own_turn:
                nodes = sorted(names)
                raws = self._store.get_many([f"{place}/{node:05d}" for node in nodes])
                values = {node: _read(content, raw) for node, raw in zip(nodes, raws, strict=True)}
                proposal = propose({node: value for node, value in values.items() if value is not None})
                self._store.put_if_absent(f"{self._folder}-plan/{name}", codec.dumps(proposal))
            if not self._pause(pause):
                return None
            pause = min(_LONGEST_PAUSE, 1.3 * pause)
        return plan

    def _read_plan(self, name: str) -> Plan | None:
        place = f"{self._folder}-plan"
        if name not in self._store.list(place):
            return None
        return _read(Plan, self._store.get(f"{place}/{name}"))

    def _invalidate(self, place: str, now: float) -> None:
        if now >= self._invalidate_at:
            self._invalidate_at = now + _INVALIDATE_SECONDS
            for folder in (place, f"{self._folder}-plan"):
                self._store.invalidate(folder)


def _read(content: type[R], raw: str | None) -> R | None:
    try:
        return None if raw is None else codec.loads(content, raw)
    except codec.UnreadableRecordError:
        return None
