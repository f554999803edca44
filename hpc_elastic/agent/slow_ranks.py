"""Which ranks of a run are slow, from what all nodes wrote of their ranks; and whether the whole run is. Pure.

A run whose ranks are all slow has no slow rank: its pace is compared with its own best hour. The pace is a median of
minutes, so that a save or an evaluation, which makes one of them long, is no loss of pace.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate

from msgspec import Struct
from msgspec.structs import replace

from hpc_elastic.agent.lateness import MIN_SHARE, Arrivals, GroupLateness, judge, median
from hpc_elastic.rendezvous.ranks import whole_segments
from hpc_elastic.rendezvous.state import RoundRecord
from hpc_elastic.run.slow_ranks import NodeArrivals, RankSections, SlowRank
from hpc_elastic.worker_api.heartbeat_record import CHECKPOINT, SETUP

WINDOWS = 2
"""A rank is slow, and is slow no more, when so many windows in a row show it: the first minutes of a run differ."""
WINDOW_SECONDS, WINDOW_STEPS = 60.0, 8
"""A window is at least so long, and has so many steps."""
RECENT = 5
"""The pace now is that of so many windows."""
HOUR_SECONDS = 3600.0
LEAST_SECONDS = 1800.0
"""An hour of which less is known is not compared with."""
SLOWER, AS_FAST = 1.1, 1.05
"""How many times the seconds of a step in the best hour make the run slow, and slow no more."""
SPREADS = 3.0
"""How many times the windows' own deviation in that hour: steps of some scripts are uneven."""


def find_slow(
    nodes: Mapping[int, NodeArrivals], *, round_index: int, names: Sequence[str]
) -> tuple[dict[int, SlowRank], set[int]]:
    """Compare the ranks of all nodes within each of their process groups, by what each node wrote in this round.

    Returns rank → how slow it is, by the group in which that costs most, and the ranks that could be compared. A rank
    that waits for a slow one in a group of theirs is not slow itself, though it is late everywhere else.
    """
    nodes = {node: found for node, found in nodes.items() if found.round == round_index}
    if sections := {one.rank: (node, one) for node, found in nodes.items() for one in found.sections}:
        return _find_in_sections(sections, names), set(sections)
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
    return slow, compared


def _find_in_sections(ranks: Mapping[int, tuple[int, RankSections]], names: Sequence[str]) -> dict[int, SlowRank]:
    """Compare the sections of which all ranks had some. The one in which all wait for a slow rank is long for most."""
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
    """Which ranks are stages of one pipeline: they do different work, and enter their common collectives apart."""

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
    """Process groups by name and members; the times of all are on one clock, or the group is left out."""
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
    """Whether a rank that is late in one group waits for another one in another group of its own.

    So does a rank whose group has a slow one; and one of a group that is late as a whole, across nodes: a stage of a
    pipeline whose transfers are not known.
    """
    late_here = {late.rank for late in findings[name].late}
    for other, finding in findings.items():
        group = groups[other]
        if rank not in group.ranks or any(late.rank == rank for late in finding.late):
            continue
        if finding.late or (finding.calls and late_here.issuperset(group.ranks) and len(set(group.nodes.values())) > 1):
            return True
    return False


class Watched(Struct, frozen=True, kw_only=True):
    seen: Mapping[int, int] = {}
    """Rank → windows in a row that show it as slow, or, below zero, as slow no more."""
    slow: Mapping[int, SlowRank] = {}


def next_watched(before: Watched, found: Mapping[int, SlowRank], *, compared: Collection[int], now_ns: int) -> Watched:
    """Take one more window in; it says nothing of ranks that were not `compared`. What is in `slow` now and was not
    before is to be reported, and the reverse."""
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
    """Choose the nodes that leave the run at a restart because of their slow ranks, those first that cost the most.

    Args:
        record: The newest one, with the members of the round that has ended.
        waiting: How many nodes wait to take a place.
        moved: Rank → another node on which the same rank was slow before: then it has more to do, wherever it runs.

    Returns:
        Node → why it stays; empty: it leaves.
    """
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
    """When step `steps` was done: the window begins there."""
    windows: tuple[tuple[float, float], ...] = ()
    """Those of the last hour: when each ended, and its seconds a step."""
    now: float = 0.0
    """Seconds a step now; 0: not known yet."""
    best: float = 0.0
    """The same in the best hour; 0: there is none yet."""
    spread: float = 0.0
    is_slow: bool = False


def next_pace(before: Pace, *, steps: int, at: float) -> Pace:
    """Take one more look in: the round's workers had done `steps` steps, the last one at `at`, monotonic."""
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
