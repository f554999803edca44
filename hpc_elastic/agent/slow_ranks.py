"""Decides which ranks of a run are slow, from what all nodes wrote of their ranks; and whether the whole run is. Pure.

In synchronous training all ranks have the same step time, since each waits in its collectives for the last one. The
slow rank is the one that waits for no other: it enters last. Only what its lateness has delayed counts as a loss: DDP
enters the buckets of one backward pass without waiting, so a rank that is 30 ms late at each of ten costs 30 ms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise

from msgspec import Struct
from msgspec.structs import replace

from hpc_elastic.rendezvous.proposals import whole_segments
from hpc_elastic.rendezvous.state import RoundRecord
from hpc_elastic.run.progress import NodeArrivals, RankSections, SlowRank
from hpc_elastic.worker_api.records import CHECKPOINT, SETUP

MIN_CALLS = 8
"""Fewer collectives show no habit."""
MIN_SHARE = 0.05
"""The least share of the time that a rank must cost to be named."""
BLOCKS = 8
"""A slow rank is late in most of so many parts of the time: one that saves or evaluates is late in one of them."""
MOST_BLOCKS = 0.75
LATE_STEPS = 1 / 3
"""The least share of single steps in which it is late: a rank that saves each tenth step is not slow."""
RARE = 20
"""A kind of call that is so many times rarer than the most frequent one is no part of each step: a log, a save."""
SPREAD = 2.0
"""How many times as late as the usual rank: batches of uneven size make each rank late at times."""
NOISE_SECONDS = 0.001


class Arrivals(Struct, frozen=True, kw_only=True):
    first: int
    """The number of the first of them in its group; the others follow without a gap."""
    kinds: tuple[str, ...]
    at: tuple[float, ...]
    """Seconds, of the clock that all ranks of the group are compared on."""
    took: tuple[float, ...] = ()
    """Seconds that each ran on the GPU, to the end that all have in common; empty: not known."""
    bound: float = 0.0
    """Seconds by which that clock may be off against the other ranks'."""


class Late(Struct, frozen=True, kw_only=True):
    rank: int
    seconds: float
    """Median over `calls`, after the others."""
    calls: int
    kind: str
    on_gpu: bool = False
    """Its GPU enters late; its process launches them in time."""


class GroupLateness(Struct, frozen=True, kw_only=True):
    late: tuple[Late, ...] = ()
    share: float = 0.0
    """Share of the time which the group would have saved without them, 0 to 1."""
    calls: int = 0
    step: float = 0.0
    """Seconds from one step to the next, median; 0: the calls do not repeat."""
    pace: float = 0.0
    """Seconds from one call of the most frequent kind to the next, median of `BLOCKS`; 0: there are not two."""
    quickest: float = 0.0
    """The same in the quickest block."""


def judge(group: Mapping[int, Arrivals]) -> GroupLateness:
    """No slow rank where the calls are few, where the numbers have no part in common, or where more than half of the
    ranks would be slow: then it is the others that are fast, for a reason of the script's."""
    first = max(one.first for one in group.values())
    end = min(one.first + len(one.at) for one in group.values())
    count = end - first
    if len(group) < 2 or count < MIN_CALLS:
        return GroupLateness()
    some = next(iter(group.values()))
    kinds = some.kinds[first - some.first : end - some.first]
    most = max(map(kinds.count, set(kinds)))
    usual = [k for k in range(count) if kinds.count(kinds[k]) * RARE > most]
    kinds = tuple(kinds[k] for k in usual)
    launched = at = {rank: [one.at[first - one.first + k] for k in usual] for rank, one in group.items()}
    if all(one.took for one in group.values()):
        took = {rank: [one.took[first - one.first + k] for k in usual] for rank, one in group.items()}
        ends = [min(one[k] for one in at.values()) + max(one[k] for one in took.values()) for k in range(len(usual))]
        at = {rank: [end - one for end, one in zip(ends, took[rank], strict=True)] for rank in took}
    early = [sorted(times)[(len(at) - 1) // 4] for times in zip(*at.values(), strict=True)]
    last = list(map(max, *at.values()))
    period = _period(kinds)
    if at is launched:
        awaited = _awaited(period, early, last)
    else:  # For which of a step's collectives the GPUs waited is not known: the latest one is what it costs at least.
        places = [list(range(place, len(early), period)) for place in range(period)]
        awaited = max(places, key=lambda calls: sum(last[k] - early[k] for k in calls) / len(calls))
    late = {rank: [max(0.0, times[k] - early[k]) for k in awaited] for rank, times in at.items()}
    slow = _slow({rank: _by_step(values, awaited, period) for rank, values in late.items()}, group)
    spent = early[-1] - early[0]
    repeats = len(set(kinds)) <= period
    step = median(later - one for one, later in zip(early, early[period:], strict=False)) if repeats else 0.0
    # The period, and so the step, may differ between windows: where one call in twenty is of another kind, say.
    frequent = max(set(kinds), key=kinds.count)
    entered = [at for at, kind in zip(early, kinds, strict=True) if kind == frequent]
    paces = _blocks([later - one for one, later in pairwise(entered)] or [0.0], _mean)
    nobody = GroupLateness(calls=count, step=step, pace=sorted(paces)[len(paces) // 2], quickest=min(paces))
    if not slow or len(slow) * 2 > len(group) or spent <= 0:
        return nobody
    others = [max(values) for values in zip(*(late[rank] for rank in at if rank not in slow), strict=True)]
    lost = [max(values) for values in zip(*(late[rank] for rank in slow), strict=True)]
    share = sum(max(0.0, mine - usual) for mine, usual in zip(lost, others, strict=True)) / spent
    if share < MIN_SHARE:
        return nobody
    found = (_describe(rank, late[rank], [kinds[k] for k in awaited]) for rank in slow)
    if at is not launched:
        first_launch = [min(times) for times in zip(*launched.values(), strict=True)]
        behind = {rank: median(launched[rank][k] - first_launch[k] for k in awaited) for rank in slow}
        found = (replace(one, on_gpu=behind[one.rank] < one.seconds / 2) for one in found)
    late_ranks = tuple(sorted(found, key=lambda one: -one.seconds))
    return replace(nobody, late=late_ranks, share=min(share, 1.0))


def _describe(rank: int, late: Sequence[float], kinds: Sequence[str]) -> Late:
    by_kind: dict[str, float] = {}
    for kind, seconds in zip(kinds, late, strict=True):
        by_kind[kind] = by_kind.get(kind, 0.0) + seconds
    worst = max(by_kind, key=lambda kind: by_kind[kind])
    values = [seconds for kind, seconds in zip(kinds, late, strict=True) if kind == worst]
    return Late(rank=rank, seconds=median(values), calls=len(values), kind=worst)


def _by_step(late: Sequence[float], awaited: Sequence[int], period: int) -> list[float]:
    """The lateness of each whole step: a slow DataLoader is felt in one of its collectives."""
    steps = [0.0] * (awaited[-1] // period + 1)
    for k, seconds in zip(awaited, late, strict=True):
        steps[k // period] += seconds
    return steps


def _slow(late: Mapping[int, Sequence[float]], group: Mapping[int, Arrivals]) -> set[int]:
    blocks = {rank: _blocks(values, _mean) for rank, values in late.items()}
    usual = median(sorted(means)[len(means) * 3 // 4] for means in blocks.values())
    each = median(sorted(values)[len(values) * 3 // 4] for values in late.values())
    found = set()
    for rank, means in blocks.items():
        least = max(NOISE_SECONDS, group[rank].bound)
        in_blocks = sum(mean > max(least, SPREAD * usual) for mean in means) / len(means)
        most = max(least, each, sum(late[rank]) / len(late[rank]) / 2)
        in_steps = sum(value > most for value in late[rank]) / len(late[rank])
        if in_blocks >= MOST_BLOCKS and in_steps >= LATE_STEPS:
            found.add(rank)
    return found


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _blocks(values: Sequence[float], of_each: Callable[[Sequence[float]], float]) -> list[float]:
    count = min(BLOCKS, len(values))
    edges = [len(values) * k // count for k in range(count + 1)]
    return [of_each(values[a:b]) for a, b in pairwise(edges)]


def _awaited(period: int, early: Sequence[float], last: Sequence[float]) -> list[int]:
    """The early ranks waited where the next collective's entry follows the last rank's at a steady distance; else it
    follows their own. Which of the two is steadier is asked for each place in the step."""
    count = len(early)
    found: list[int] = []
    for place in range(period):
        here = range(place, count - 1, period)
        if any(early[k + 1] < last[k] for k in here if last[k] - early[k] > NOISE_SECONDS / 2):
            entered = sum(early[k + 1] < last[k] for k in here)
            if entered * 4 > len(here):
                continue  # the early ranks were in the next one before the last rank was in this
        own, others = ([early[k + 1] - times[k] for k in here] for times in (early, last))
        if _deviation(others) <= _deviation(own):
            found += here
    return sorted(found) or list(range(period - 1, count, period))


def median(values: Iterable[float]) -> float:
    """The lower one of two; `statistics` would import decimals and fractions into each agent."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2]


def _deviation(values: Sequence[float]) -> float:
    middle = median(values)
    return median(abs(value - middle) for value in values)


def _period(kinds: Sequence[str]) -> int:
    for period in range(1, len(kinds) // 3 + 1):
        if all(a == b for a, b in zip(kinds, kinds[period:], strict=False)):
            return period
    return 1


WINDOWS = 2
"""A rank is slow, and is slow no more, when so many windows in a row show it: the first minutes of a run differ."""
WINDOW_SECONDS, WINDOW_STEPS = 60.0, 8
RECENT = 5
HOUR_SECONDS = 3600.0
LEAST_SECONDS = 1800.0
"""An hour of which less is known is not compared with."""
SLOWER, AS_FAST = 1.1, 1.05
SPREADS = 3.0
"""How many times the windows' own deviation in that hour: steps of some scripts are uneven."""


def find_slow(
    nodes: Mapping[int, NodeArrivals], *, round_index: int, names: Sequence[str]
) -> tuple[dict[int, SlowRank], set[int], GroupLateness]:
    """Returns rank → how slow it is, by the group in which that costs most; the ranks that could be compared; and what
    was found of the largest group. A rank that waits for a slow one in a group of theirs is not slow itself, though it
    is late everywhere else."""
    nodes = {node: found for node, found in nodes.items() if found.round == round_index}
    if sections := {one.rank: (node, one) for node, found in nodes.items() for one in found.sections}:
        return _find_in_sections(sections, names), set(sections), GroupLateness()
    groups, pipelines = _groups(nodes), _Pipelines()
    for group in groups.values():
        for rank, links in group.links.items():
            for other in (*links, *(group.ranks if group.has_transfers else ())):
                pipelines.join(rank, other)
    findings = {name: judge(group.ranks) for name, group in groups.items() if pipelines.are_apart(group.ranks)}
    slow: dict[int, SlowRank] = {}
    for name, finding in sorted(findings.items(), key=lambda item: item[1].share):
        for late in finding.late:
            if not _waits_for_another(late.rank, name, groups, findings):
                slow[late.rank] = SlowRank(
                    rank=late.rank,
                    node=(node := groups[name].nodes[late.rank]),
                    host=names[node],
                    seconds=late.seconds,
                    call=late.kind,
                    calls=late.calls,
                    share=finding.share,
                    step=finding.step,
                    on_gpu=late.on_gpu,
                )
    compared = {rank for name, finding in findings.items() if finding.calls for rank in groups[name].ranks}
    largest = max(findings, key=lambda name: len(groups[name].ranks), default="")
    return slow, compared, findings.get(largest, GroupLateness())


def _find_in_sections(ranks: Mapping[int, tuple[int, RankSections]], names: Sequence[str]) -> dict[int, SlowRank]:
    slow: dict[int, SlowRank] = {}
    common = set.intersection(*({name for name, spent in one.spent.items() if spent} for _, one in ranks.values()))
    for name in sorted(common - {SETUP, CHECKPOINT}):
        shares = {rank: one.spent[name] / one.seconds for rank, (_, one) in ranks.items()}
        usual = median(shares.values())
        least = max(MIN_SHARE, SPREADS * median(abs(share - usual) for share in shares.values()))
        late = {rank: share - usual for rank, share in shares.items() if share - usual > least}
        for rank, share in late.items() if len(late) * 2 < len(ranks) else ():
            if rank not in slow or slow[rank].share < share:
                node = ranks[rank][0]
                slow[rank] = SlowRank(
                    rank=rank, node=node, host=names[node], seconds=60 * share, call=name, calls=0, share=share
                )
    return slow


class _Group(Struct):
    ranks: dict[int, Arrivals] = {}
    nodes: dict[int, int] = {}
    links: dict[int, tuple[int, ...]] = {}
    has_transfers: bool = False


class _Pipelines:
    """The stages of one pipeline do different work, and enter their common collectives apart."""

    def __init__(self) -> None:
        self._above: dict[int, int] = {}

    def join(self, one: int, other: int) -> None:
        self._above[self._root(one)] = self._root(other)

    def are_apart(self, ranks: Collection[int]) -> bool:
        return len({self._root(rank) for rank in ranks}) == len(ranks)

    def _root(self, rank: int) -> int:
        while (above := self._above.get(rank, rank)) != rank:
            rank = above
        return rank


def _groups(nodes: Mapping[int, NodeArrivals]) -> dict[str, _Group]:
    groups: dict[str, _Group] = {}
    references = {found.reference for found in nodes.values() if found.reference}
    for node, found in nodes.items():
        if len(nodes) > 1 and (len(references) > 1 or not found.reference):
            continue
        for one in found.groups:
            group = groups.setdefault(f"{one.group} {one.members}", _Group())
            since = found.since_ns // 1000
            group.ranks[one.rank] = Arrivals(
                first=one.first,
                kinds=tuple(found.kinds[at] for at in one.calls),
                at=tuple((since + entered) / 1e6 for entered in accumulate(one.entered_us)),
                took=tuple(took / 1e6 for took in one.took_us),
                bound=found.bound_ns / 1e9,
            )
            group.nodes[one.rank] = node
            group.links[one.rank] = one.links
            group.has_transfers |= one.has_transfers
    return groups


def _waits_for_another(
    rank: int, name: str, groups: Mapping[str, _Group], findings: Mapping[str, GroupLateness]
) -> bool:
    """A rank whose group has a slow one waits for that; and one of a group that is late as a whole, across nodes, is in
    a stage of a pipeline whose transfers are not known."""
    late_here = {late.rank for late in findings[name].late}
    for other, finding in findings.items():
        group = groups[other]
        if rank not in group.ranks or any(late.rank == rank for late in finding.late):
            continue
        if finding.late or (finding.calls and late_here.issuperset(group.ranks) and len(set(group.nodes.values())) > 1):
            return True
    return False


PACKETS_SECONDS = 0.003
"""Packets that take less slow no collective down by much, or are what a busy machine takes."""
TIMES_AS_LONG = 4.0
"""How many times as long as usual; in the first window, as the other nodes' quickest."""
TIMES_THE_OTHERS = 2.0
"""How many times as long as the others' now: a busy machine is late itself."""
USUAL_WINDOWS = 10


class Network(Struct, frozen=True, kw_only=True):
    """The windows in which no node's packets were late."""

    steps: tuple[float, ...] = ()
    """Seconds of a step, in the quickest part of each."""
    travel: Mapping[int, float] = {}
    """Node → the seconds of its quick packets, the least of all windows."""


def find_slow_network(
    nodes: Mapping[int, NodeArrivals], pace: GroupLateness, before: Network, *, round_index: int, names: Sequence[str]
) -> tuple[dict[int, SlowRank], Network]:
    """Find the nodes whose packets are late while the steps, by `pace`, are longer than they were: within a collective
    all ranks wait for all, so when each enters shows no slow link. Each by its first rank, and `before` with this
    window."""
    nodes = {node: found for node, found in nodes.items() if found.round == round_index and found.groups}
    usual = median(before.steps or (pace.quickest,))
    links: dict[int, dict[int, tuple[float, float]]] = {}
    for node, found in nodes.items():
        for other, (quick, slow_us) in found.travel_us.items():
            for one, end in ((node, other), (other, node)):
                of_node = links.setdefault(one, {})
                least, most = of_node.get(end, (math.inf, 0.0))
                of_node[end] = (min(least, quick / 1e6), max(most, slow_us / 1e6))
    quickest = {node: min(least for least, _ in links[node].values()) for node in links.keys() & nodes.keys()}
    travel = {node: min(most for _, most in links[node].values()) for node in quickest}
    at_first = sorted(quickest.values())[len(travel) // 4] if travel else 0.0
    usual_travel = {node: before.travel.get(node, at_first) for node in travel}
    limit = {node: max(PACKETS_SECONDS, TIMES_AS_LONG * usual_travel[node]) for node in travel}
    late = {node for node in travel if travel[node] > max(limit[node], TIMES_THE_OTHERS * median(travel.values()))}
    if len(travel) > 2 and all(quickest[node] > limit[node] for node in travel):
        late = {max(travel, key=lambda node: len(links[node]))}  # the coordinator, which has a link with each
    if not late or pace.pace <= usual * SLOWER:
        steps = (*before.steps, pace.quickest)[-USUAL_WINDOWS:] if pace.pace else before.steps
        kept = {node: min(took, before.travel.get(node, took)) for node, took in quickest.items()}
        return {}, Network(steps=steps, travel={**before.travel, **kept})
    slow = {}
    for node in late:
        rank = min(one.rank for one in nodes[node].groups)
        slow[rank] = SlowRank(
            rank=rank,
            node=node,
            host=names[node],
            seconds=travel[node] - usual_travel[node],
            call="packets",
            calls=0,
            share=1 - usual / pace.pace,
            step=pace.pace,
            by_network=True,
        )
    return slow, before


class Watched(Struct, frozen=True, kw_only=True):
    seen: Mapping[int, int] = {}
    """Rank → windows in a row that show it as slow, or, below zero, as slow no more."""
    slow: Mapping[int, SlowRank] = {}


def next_watched(before: Watched, found: Mapping[int, SlowRank], *, compared: Collection[int], now_ns: int) -> Watched:
    seen: dict[int, int] = {}
    slow: dict[int, SlowRank] = {}
    for rank in sorted({*before.seen, *before.slow, *found}):
        count, known = before.seen.get(rank, 0), before.slow.get(rank)
        if rank in found:
            seen[rank] = max(count, 0) + 1
            if known is not None or seen[rank] >= WINDOWS:
                slow[rank] = replace(found[rank], since_ns=known.since_ns if known is not None else now_ns)
        elif rank not in compared:
            seen[rank] = count
            if known is not None:
                slow[rank] = known
        elif known is not None:
            seen[rank] = min(count, 0) - 1
            if seen[rank] > -WINDOWS:
                slow[rank] = known
    return Watched(seen=seen, slow=slow)


def choose_leaving(
    slow: Iterable[SlowRank],
    record: RoundRecord,
    *,
    waiting: int,
    min_nodes: int,
    segment: int,
    moved: Mapping[int, int],
) -> dict[int, str]:
    """Returns node → why it stays (empty: it leaves), those first that cost the most. `waiting`: nodes that wait to
    take a place. `moved`: rank → another node on which the same rank was slow before: it has more to do, wherever it
    runs."""
    found: dict[int, str] = {}
    left = [member for member in record.members if member.node not in {*record.lost, *record.unfit}]
    for one in sorted(slow, key=lambda one: -one.share):
        fewer = [member for member in left if member.node != one.node]
        count = len(whole_segments(fewer, segment)) + waiting // segment * segment
        if len(fewer) == len(left):
            continue  # it is out already
        if moved.get(one.rank, one.node) != one.node:
            found[one.node] = f"rank {one.rank} was slow on another node, too"
        elif count < min_nodes:
            found[one.node] = f"only {count} of at least {min_nodes} nodes would be left"
        else:
            found[one.node], left = "", fewer
    return found


def by_node(ranks: Iterable[SlowRank], counts: Sequence[int]) -> tuple[int, ...]:
    """The nodes of which all ranks are slow; `counts` is the number of ranks of each node."""
    late: dict[int, int] = {}
    for rank in ranks:
        late[rank.node] = late.get(rank.node, 0) + 1
    return tuple(node for node, count in sorted(late.items()) if count == counts[node])


class Pace(Struct, frozen=True, kw_only=True):
    steps: int = -1
    at: float = 0.0
    windows: tuple[tuple[float, float], ...] = ()
    """Those of the last hour: when each ended, and its seconds a step."""
    now: float = 0.0
    best: float = 0.0
    """The same in the best hour; 0: there is none yet."""
    spread: float = 0.0
    is_slow: bool = False


def next_pace(before: Pace, *, steps: int, at: float) -> Pace:
    done, seconds = steps - before.steps, at - before.at
    if before.steps < 0 or done < 0:
        return replace(before, steps=steps, at=at)
    if done < WINDOW_STEPS or seconds < WINDOW_SECONDS:
        return before
    windows = (*(one for one in before.windows if one[0] > at - HOUR_SECONDS), (at, seconds / done))
    after = replace(before, steps=steps, at=at, windows=windows)
    if len(windows) < RECENT:
        return after
    now = median(one for _, one in windows[-RECENT:])
    best, spread = before.best, before.spread
    if at - windows[0][0] >= LEAST_SECONDS:
        hour = median(one for _, one in windows)
        if not best or hour < best:
            best, spread = hour, median(abs(one - hour) for _, one in windows)
    limit = AS_FAST * best if before.is_slow else max(SLOWER * best, best + SPREADS * spread)
    return replace(after, now=now, best=best, spread=spread, is_slow=0 < limit < now)
