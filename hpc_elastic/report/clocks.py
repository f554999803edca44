"""One attempt's clocks: what its agents measured of each other, put together so that all nodes' times can be compared.

Each agent compares its host's clock with the coordinator's (`clock_offset` in the event log). All nodes' times are
taken to one of them, the reference, over a chain of such samples where the coordinator changed: offsets and bounds add
up, and a bound grows with the time between the measurement and the moment that is asked for. What was measured are the
clocks that nobody sets; a wall clock that was set meanwhile disturbs nothing where an agent saw the moment.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from msgspec import Struct, field
from msgspec.structs import replace

from hpc_elastic.base.clock import drift_ns
from hpc_elastic.failures.ranking import PRINTED_NS, Moment
from hpc_elastic.run.agent_events import AgentStarted, ClockCompared, RoundFinal
from hpc_elastic.run.control_events import AttemptStarted
from hpc_elastic.run.event_reader import EventLine, read_events
from hpc_elastic.run.events import RunEvent, name_of
from hpc_elastic.run.paths import AttemptPaths

if TYPE_CHECKING:
    from hpc_elastic.failures.worker_failure import WorkerFailure
    from hpc_elastic.report.history import NodeLoss

OF_CLOCKS: frozenset[type[RunEvent]] = frozenset({ClockCompared, AgentStarted, AttemptStarted})
SUPERVISOR = -1
_VIEWS = 8
_SOME = 16
_SET_NS = 1_000_000_000
"""A wall clock that differs by more from one attempt to the next was set; below that it was slewed."""
_STEP_NS = 1_000_000
"""A wall clock that was set jumps by more in its distance to the time since the boot."""


class HostOffset(Struct, frozen=True, kw_only=True):
    """How far a host's wall clock is ahead of the reference's."""

    offset_ns: int
    """Subtract it from the host's times."""
    bound_ns: int
    measured: bool = True
    """False: concluded from the rounds."""


class _Hop(Struct, frozen=True):
    """`at_ns`: ascending, by the near node's clock."""

    to: int
    at_ns: tuple[int, ...]
    offsets: tuple[tuple[int, int], ...]
    """(near ahead of far, bound)."""

    def cross(self, at_ns: int) -> tuple[int, int]:
        here = bisect_left(self.at_ns, at_ns)
        near = range(max(0, here - 2), min(len(self.at_ns), here + 2))
        bound, offset = min((self.offsets[i][1] + drift_ns(at_ns - self.at_ns[i]), self.offsets[i][0]) for i in near)
        return at_ns - offset, bound


class Clocks(Struct, frozen=True, kw_only=True):
    reference: int | None = None
    host: str = ""
    contradicted: tuple[int, ...] = ()
    offsets: Mapping[int, HostOffset] = field(default_factory=dict)
    """How far each node's wall clock is ahead of the reference's, as last measured; without the reference itself."""
    _hops: Mapping[int, _Hop] = field(default_factory=dict)
    _walls: Mapping[int, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    """Node → (time since the boot, how far the wall clock is ahead of it), ascending."""
    set_nodes: frozenset[int] = frozenset()
    """Nodes whose wall clocks were set between two measurements: no one offset holds for all of their times."""
    _axis_ns: int | None = None
    """The reference's time since the boot plus this is the axis; None: its own wall clock's distance to it."""
    _supervisor: int | None = None
    _views: tuple[Clocks, ...] = ()
    _found: dict[tuple[int | None, int, int], Moment] = field(default_factory=dict)
    """The cache of `moment`: each failure's is asked for several times."""

    def around(self, moments: Sequence[tuple[int, int]]) -> Clocks:
        """The view that knows these moments (node, time since its boot) best: older measurements have grown old."""

        def doubt(view: Clocks) -> int:
            bounds = (view.moment(node, 0, uptime_ns=uptime_ns).bound_ns for node, uptime_ns in moments[:_SOME])
            return sum(1 << 62 if bound is None else bound for bound in bounds)

        return min(self._views, key=doubt, default=self)

    def moment(self, node: int | None, wall_ns: int, *, uptime_ns: int = 0) -> Moment:
        """Its time since its boot is concluded from the wall clock where `uptime_ns` is 0."""
        key = (node, wall_ns, uptime_ns)
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = self._moment(
                self._supervisor if node == SUPERVISOR else node, wall_ns, uptime_ns
            )
        return found

    def of_failure(self, failure: WorkerFailure) -> Moment:
        node = failure.node if failure.node >= 0 else None
        return self.moment(node, failure.ended_ns, uptime_ns=failure.ended_uptime_ns)

    def of_printed(self, failure: WorkerFailure) -> Moment | None:
        if not failure.printed_ns:
            return None
        node = failure.node if failure.node >= 0 else None
        uptime = failure.ended_uptime_ns - (failure.ended_ns - failure.printed_ns) if failure.ended_uptime_ns else 0
        return self.moment(node, failure.printed_ns, uptime_ns=max(0, uptime))._replace(blur_ns=PRINTED_NS)

    def of_loss(self, loss: NodeLoss) -> Moment:
        return self.moment(loss.observer, loss.gone_ns)

    def _moment(self, node: int | None, wall_ns: int, uptime_ns: int) -> Moment:
        if node is None or self.reference is None or (node != self.reference and node not in self._hops):
            return Moment(wall_ns, None, -1 if node is None else node, uptime_ns or wall_ns, bool(uptime_ns))
        own, bound = (uptime_ns, 0) if uptime_ns else self._from_wall(node, wall_ns)
        at, here = own, node
        while here != self.reference:
            hop = self._hops[here]
            at, more = hop.cross(at)
            bound += more
            here = hop.to
        ahead = self._walls[self.reference][-1][1] if self._axis_ns is None else self._axis_ns
        return Moment(at + ahead, bound, node, own, True)

    def _from_wall(self, node: int, wall_ns: int) -> tuple[int, int]:
        walls = self._walls.get(node, ())
        if not walls:
            return wall_ns, 1 << 62
        aheads = [ahead for _, ahead in walls]
        if max(aheads) - min(aheads) > _STEP_NS:
            # How far it was ahead at one sample may have been so from the sample before to the sample after.
            ends = [at for at, _ in walls]
            times = zip([-(1 << 62), *ends], [*ends[1:], 1 << 62], aheads, strict=False)
            aheads = [ahead for begin, end, ahead in times if begin <= wall_ns - ahead <= end] or aheads
        low, high = min(aheads), max(aheads)
        return wall_ns - (low + high) // 2, 0 if high - low <= _STEP_NS else (high - low + 1) // 2

    def likely(self, node: int, wall_ns: int) -> int | None:
        """The likeliest moment of a wall clock that was set in between, for a picture.

        A clock that was set back shows the same time twice. Of the possible moments it is the one that is nearest to a
        measurement: agents compare clocks whenever workers start. By the reference's wall clock; None: this clock was
        not set, or not compared with the reference's.
        """
        here = self._supervisor if node == SUPERVISOR else node
        if here is None or here not in self.set_nodes:
            return None
        uptime = min((abs(wall_ns - ahead - at), wall_ns - ahead) for at, ahead in self._walls[here])[1]
        moment = self.moment(here, wall_ns, uptime_ns=uptime)
        return None if moment.bound_ns is None else moment.at_ns

    def axes(self) -> dict[int, tuple[int, int]]:
        """Node → when it last compared clocks, since its boot; how far the reference's wall clock is ahead of that."""
        last = {node: walls[-1][0] for node, walls in self._walls.items()}
        moments = {node: self.moment(node, 0, uptime_ns=uptime) for node, uptime in last.items()}
        known = {node: moment for node, moment in moments.items() if moment.bound_ns is not None}
        return {node: (last[node], moment.at_ns - last[node]) for node, moment in known.items()}

    def on_axis_of(self, before: tuple[int, int] | None) -> Clocks:
        """`before`: what `axes` said of the reference's host in an earlier attempt; its clock was set since then."""
        if self.reference is None or before is None:
            return self
        (first, _), (_, ahead) = self._walls[self.reference][0], self._walls[self.reference][-1]
        if first < before[0] or abs(ahead - before[1]) < _SET_NS:  # booted anew; or nobody has set it
            return self
        return replace(self, _axis_ns=before[1], set_nodes=frozenset(self._walls), _views=(), _found={})


NO_CLOCKS = Clocks()


class ClocksBuilder:
    def __init__(self) -> None:
        self._samples: list[tuple[int, ClockCompared]] = []
        self._hosts: dict[int, str] = {}

    def take(self, line: EventLine) -> None:
        event, node = line.event, line.node
        if not isinstance(event, (ClockCompared, AgentStarted, AttemptStarted)):
            return
        if isinstance(event, AttemptStarted):
            if line.role == "supervisor":
                self._hosts[SUPERVISOR] = line.host
            return
        if line.role != "agent" or node is None or node < 0 or line.by is not None:
            return
        self._hosts.setdefault(node, line.host)
        if isinstance(event, ClockCompared) and event.reference >= 0 and event.bound_ns >= 0:
            self._samples.append((node, event))

    def build(self) -> Clocks:
        links, contradicted = _links(self._samples)
        walls: dict[int, list[tuple[int, int]]] = {}
        for node, sample in self._samples:
            walls.setdefault(node, []).append((sample.uptime_ns, sample.wall_ns - sample.uptime_ns))
        if not walls:
            return Clocks()
        degree = Counter(near for near, _ in links)
        references = {sample.reference for _, sample in self._samples}.intersection(walls) or walls.keys()
        steps = {node: {ahead for _, ahead in measured} for node, measured in walls.items()}
        were_set = frozenset(node for node, aheads in steps.items() if max(aheads) - min(aheads) > _STEP_NS)
        supervisor = self._hosts.get(SUPERVISOR)
        nodes = [node for node in sorted({*degree, *walls}) if supervisor and self._hosts.get(node) == supervisor]
        views = []
        for reference in sorted(references, key=lambda node: (-degree[node], node))[:_VIEWS]:
            clocks = Clocks(
                reference=reference,
                host=self._hosts.get(reference, ""),
                contradicted=contradicted,
                _hops=_tree(links, reference),
                _walls={node: tuple(sorted(measured)) for node, measured in walls.items()},
                set_nodes=were_set,
                _supervisor=nodes[0] if nodes else None,
            )
            offsets = {}
            for node in (node for node in sorted(clocks._hops) if node in walls):
                uptime, ahead = clocks._walls[node][-1]
                moment = clocks.moment(node, uptime + ahead, uptime_ns=uptime)
                assert moment.bound_ns is not None
                offsets[node] = HostOffset(offset_ns=uptime + ahead - moment.at_ns, bound_ns=moment.bound_ns)
            views.append(replace(clocks, offsets=offsets, _found={}))
        return views[0] if len(views) == 1 else replace(views[0], _views=tuple(views), _found={})


def _links(samples: list[tuple[int, ClockCompared]]) -> tuple[dict[tuple[int, int], _Hop], tuple[int, ...]]:
    """(near, far) → the way between two compared clocks, both ways; and the nodes that contradict themselves."""
    found: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for node, sample in samples:
        if node == sample.reference:
            continue
        found.setdefault((node, sample.reference), []).append((sample.uptime_ns, sample.offset_ns, sample.bound_ns))
        far = sample.uptime_ns - sample.offset_ns
        back = (far, -sample.offset_ns, sample.bound_ns + drift_ns(sample.bound_ns))
        found.setdefault((sample.reference, node), []).append(back)
    links: dict[tuple[int, int], _Hop] = {}
    wrong: set[int] = set()
    pairs = {(node, sample.reference) for node, sample in samples}
    for (near, to), measured in found.items():
        measured.sort()
        # Each is (near time, offset, bound).
        if any(abs(a[1] - b[1]) > a[2] + b[2] + drift_ns(b[0] - a[0]) for a, b in pairwise(measured)):
            # A clock was reset (its host was booted anew), or a measurement was wrong.
            wrong |= {near} if (near, to) in pairs else set()
            continue
        links[near, to] = _Hop(
            to, tuple(at for at, _, _ in measured), tuple((offset, bound) for _, offset, bound in measured)
        )
    return {pair: hop for pair, hop in links.items() if pair[::-1] in links}, tuple(sorted(wrong))


def _tree(links: Mapping[tuple[int, int], _Hop], reference: int) -> dict[int, _Hop]:
    """Node → its first hop on the shortest way to the reference."""
    neighbours: dict[int, list[int]] = {}
    for near, far in sorted(links):
        neighbours.setdefault(far, []).append(near)
    hops: dict[int, _Hop] = {}
    reached = [reference]
    for far in reached:  # it grows
        for near in neighbours.get(far, ()):
            if near != reference and near not in hops:
                hops[near] = links[near, far]
                reached.append(near)
    return hops


NOTABLE_NS = 50_000_000
"""A wall clock that is off by no more is not worth mentioning."""
SUSPECT_NS = 90 * 1_000_000_000
"""A node that learns late, behind caches that are trusted for a minute, is not taken for one with a wrong clock."""


def node_offsets(finals: Iterable[Mapping[int, int]], *, clocks: Clocks) -> dict[int, HostOffset]:
    """Clocks that were not measured are trusted, but for one that contradicts the others by as much in every round."""
    found = dict(clocks.offsets)
    measured = {*found, clocks.reference}
    deviations: dict[int, list[int]] = {}
    for final in finals:
        others = [node for node in final if node not in measured]
        if not others or len(final) < 2:
            continue
        right = {node: when - (found[node].offset_ns if node in found else 0) for node, when in final.items()}
        middle = _median_low(right.values())
        for node in others:
            deviations.setdefault(node, []).append(right[node] - middle)
    for node, values in deviations.items():
        least, most = min(values), max(values)
        is_wrong = least > SUSPECT_NS or most < -SUSPECT_NS
        if is_wrong and most - least < SUSPECT_NS:
            bound = max(1_000_000_000, most - least)
            found[node] = HostOffset(offset_ns=_median_low(values), bound_ns=bound, measured=False)
    return found


def read_offsets_ns(attempt: AttemptPaths) -> dict[int, int]:
    """Nanoseconds. A clock that may as well be right, within the measurement's bound, is trusted, and is not there."""
    finals: dict[int, dict[int, int]] = {}
    clocks = ClocksBuilder()
    kinds: set[type[RunEvent]] = {*OF_CLOCKS, RoundFinal}
    for line in read_events(attempt.events, names=set(map(name_of, kinds))):
        if isinstance(line.event, RoundFinal):
            if line.node is not None and line.written_ns:
                finals.setdefault(line.event.round, {}).setdefault(line.node, line.written_ns)
        else:
            clocks.take(line)
    offsets = node_offsets(finals.values(), clocks=clocks.build())
    return {node: offset.offset_ns for node, offset in offsets.items() if abs(offset.offset_ns) > offset.bound_ns}


def _median_low(values: Iterable[int]) -> int:
    """`statistics` takes longer to import than a small run's report to be made."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2]
