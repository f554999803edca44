"""Finds slow ranks: one agent's part in that, from when its workers entered their collectives.

All agents ask their workers at the same time of the clock, and write what they answer to the run directory. The node of
group rank 0 reads what all wrote: a slow rank is reported, and left alone until the next restart, at which its node may
leave the run. The same node compares the run's pace with its best hour.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Mapping, Sequence
from enum import Enum
from functools import partial
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from hpc_elastic.agent.part import AgentSite, HealthVerdict, Part, save_if_possible
from hpc_elastic.agent.slow_ranks import (
    Network,
    Pace,
    Watched,
    by_node,
    choose_leaving,
    find_slow,
    find_slow_network,
    next_pace,
    next_watched,
)
from hpc_elastic.agent.supervision import Phase
from hpc_elastic.base import codec
from hpc_elastic.base.clock import Offset, uptime_ns
from hpc_elastic.base.text import ranges
from hpc_elastic.rendezvous.state import RoundRecord, Status
from hpc_elastic.run import progress
from hpc_elastic.run.agent_events import RunSlowed, RunSlowEnded, SlowRankEnded, SlowRankFound
from hpc_elastic.run.progress import NOW, STEPS, GroupArrivals, NodeArrivals, OnSlowRank, RunPace, SlowRank, SlowRanks

if TYPE_CHECKING:
    from hpc_elastic.agent.local_workers import LocalWorkers
    from hpc_elastic.agent.node_agent import NodeAgent

logger = logging.getLogger(__name__)

EVERY_SECONDS = 30.0
SECONDS_PER_NODE = 0.25
"""A run of many nodes is looked at less often: one node reads the files of all."""
MOST_SHARE = 0.001
"""Share of a rank's time for its answers."""
MOST_BYTES = 1e6 / 60
"""A second, of the files that one node reads: as each node reckons it by its own file."""
LEAVE_SECONDS, LOOK_SECONDS = 2.0, 0.05
"""How long a node that may leave at a restart waits for its files, and how often it looks."""
ANSWER_SECONDS = 3.0
"""How long after the question the answers are read; so long again, and the other nodes' files are there."""


class _Step(Enum):
    ASK = "ask"
    WRITE = "write"
    JUDGE = "judge"


class SlowRankWatch(Part):
    due: float | None = None

    def __init__(self, site: AgentSite) -> None:
        self._folder, self._node, self._names = site.me.paths.slow_ranks, site.me.node, site.me.attempt.nodes
        self._pace_path, self._spec, self._beats = site.me.run.pace_json, site.me.spec, site.watch.read
        self._clock, self._files, self._notifier = site.clock, site.files, site.notifier
        self._uid, self._write_event = site.info.uid, site.events.write
        self._step = _Step.ASK
        self._step_due = self._pace_due = 0.0
        self._workers: LocalWorkers | None = None
        self._record: RoundRecord | None = None
        self._waiting = 0
        self._watched, self._network = Watched(), Network()
        self._spent: dict[int, tuple[float, Mapping[str, float]]] = {}
        self._pace = Pace()
        self._slow_run: RunPace | None = None
        self._seconds = 0.0
        self._bytes = 0
        self._holds_until: float | None = None
        """The node joins no round until then: whether it is to leave is being read."""
        self._leaves_because = ""

    def on_record(self, record: RoundRecord, workers: LocalWorkers | None) -> None:
        self._record = record
        if record.status is Status.FINAL:
            self._waiting = record.waiting

    def on_start(self, workers: LocalWorkers) -> None:
        self._workers, self._step, self._watched, self._pace = workers, _Step.ASK, Watched(), Pace()
        self._network, self._spent = Network(), {}
        self._pace_due = self._clock.monotonic() + EVERY_SECONDS if workers.layout.group_rank == 0 else math.inf
        self._wait()
        self.due = min(self._step_due, self._pace_due)

    def before_stop(self) -> None:
        if self._workers is not None:
            self._files.post(partial(self._end, self._workers, self._watched, self._slow_run))
        self._workers, self.due, self._slow_run = None, None, None
        self._watched = Watched()

    def on_success(self) -> None:
        self.before_stop()

    def on_join(self, last_round: int) -> None:
        if self._spec.slow_ranks is OnSlowRank.EXCLUDE and last_round >= 0 and self._record is not None:
            self.due = self._clock.monotonic()
            self._holds_until = self.due + LEAVE_SECONDS
            self._files.post(partial(self._look_whether_to_leave, last_round, self._record))

    def holds_join(self, agent: NodeAgent) -> bool:
        return self._holds_until is not None

    def look(self, agent: NodeAgent) -> None:
        workers, record, now = self._workers, self._record, self._clock.monotonic()
        if self._holds_until is not None and now < self._holds_until:
            self.due = now + LOOK_SECONDS
            return
        if workers is None:
            self.due = self._holds_until = None
            reason, self._leaves_because = self._leaves_because, ""
            if reason and agent.phase is Phase.JOINING:
                agent.on_health(HealthVerdict(reason=reason))
            return
        if record is None or self.due is None or now < self.due:
            return
        if now >= self._pace_due:
            self._pace_due = now + EVERY_SECONDS
            self._look_at_pace(agent, workers)
        if now >= self._step_due:
            self._take_step(workers, record, now)
        self.due = min(self._step_due, self._pace_due)

    def _take_step(self, workers: LocalWorkers, record: RoundRecord, now: float) -> None:
        is_judge = workers.layout.group_rank == 0
        if self._step is _Step.ASK:
            workers.ask_for_arrivals()
            self._step, self._step_due = _Step.WRITE, now + ANSWER_SECONDS
        elif self._step is _Step.WRITE:
            self._files.post(partial(self._write, workers, record, self._look_at_sections(now)))
            self._step = _Step.JUDGE if is_judge else _Step.ASK
            if is_judge:
                self._step_due = now + ANSWER_SECONDS
            else:
                self._wait()
        else:
            self._files.post(partial(self._judge, workers, record))
            self._step = _Step.ASK
            self._wait()

    def _look_at_sections(self, now: float) -> tuple[progress.RankSections, ...]:
        before, self._spent = self._spent, {beat.rank: (now, beat.spent) for beat in self._beats()}
        return tuple(
            progress.RankSections(
                rank=rank,
                seconds=now - before[rank][0],
                spent={name: seconds - before[rank][1].get(name, 0.0) for name, seconds in spent.items()},
            )
            for rank, (_, spent) in self._spent.items()
            if rank in before
        )

    def _look_at_pace(self, agent: NodeAgent, workers: LocalWorkers) -> None:
        slow = self._watched.slow.values()
        agent.figures.put("slow_ranks", len(slow))
        agent.figures.put("slow_ranks_share", max((one.share for one in slow), default=0.0))
        done = [(one.counted_steps if one.step is None else one.step, one) for one in self._beats()]
        steps, beat = max(
            ((n, one) for n, one in done if n is not None and one.source in STEPS), default=(0, None), key=itemgetter(0)
        )
        if beat is None:
            return
        before, self._pace = self._pace, next_pace(self._pace, steps=steps, at=beat.stepped_at)
        if before.steps < 0:  # not at the start: a restart asks the file server for little
            self._files.post(partial(self._load_best, workers))
        pace, was_slow = self._pace, self._slow_run
        if pace.best and pace.now != before.now:
            agent.figures.put("step_seconds", pace.now)
            agent.figures.put("step_seconds_best", pace.best)
        if pace.best != before.best:
            best = progress.BestPace(world_size=workers.layout.world_size, step=pace.best, spread=pace.spread)
            self._files.post(partial(save_if_possible, self._pace_path, best))
        now_ns = self._clock.time_ns()
        if pace.is_slow:
            since_ns = now_ns if was_slow is None else was_slow.since_ns
            self._slow_run = RunPace(step=pace.now, best=pace.best, since_ns=since_ns)
            if was_slow is None:
                logger.warning("%s", self._slow_run)
                self._write_event(RunSlowed(round=workers.round, pace=self._slow_run))
        elif was_slow is not None:
            self._slow_run = None
            logger.warning("the run is as fast as it was: a step takes %.3g s", pace.now)
            self._write_event(_slow_ended(workers, was_slow, now_ns))
        if self._slow_run is not was_slow:
            self._files.post(partial(self._save_now, workers))

    def _wait(self) -> None:
        """The next look is at a time that is the same on all nodes: what ranks did then is compared."""
        count = len(self._record.members) if self._record is not None else 1
        least = max(count * SECONDS_PER_NODE, self._seconds / MOST_SHARE, count * self._bytes / MOST_BYTES)
        every = EVERY_SECONDS
        while every < least:
            every *= 2  # the times of a node that looks rarely are times of the others, too
        self._step_due = self._clock.monotonic() + every - self._clock.time_ns() / 1e9 % every

    # -- in the files' thread ------------------------------------------------------------------------------------------

    def _write(self, workers: LocalWorkers, record: RoundRecord, sections: tuple[progress.RankSections, ...]) -> None:
        boot_ns = self._clock.time_ns() - uptime_ns(self._clock)
        offset = self._notifier.offset_to(record.leader) if self._notifier is not None else None
        if record.leader == self._uid:
            offset = Offset(offset_ns=0, bound_ns=0)
        groups: list[GroupArrivals] = []
        kinds: dict[str, int] = {}
        answers = workers.take_arrivals()
        for rank, raw in answers.items():
            try:
                answer = json.loads(raw)
                self._seconds = max(self._seconds, float(answer["seconds"]))
                groups += [read_group(rank, name, group, kinds) for name, group in answer["groups"].items()]
            except (ValueError, TypeError, LookupError, AttributeError) as error:
                logger.debug("what rank %s wrote of its collectives is not understood: %r", rank, error)
        groups = [group for group in groups if group.entered_us]
        if not groups and (answers or not sections):
            return
        since, counted = count_from_first(groups)
        ends = [one for one in record.members if record.leader in (one.uid, self._uid) and one.uid != self._uid]
        travel = {one.node: self._notifier.travel_from(one.uid) for one in ends if self._notifier is not None}
        found = NodeArrivals(
            round=workers.round,
            reference=record.leader if offset is not None else "",
            since_ns=since * 1000 - boot_ns - (offset.offset_ns if offset is not None else 0),
            bound_ns=offset.bound_ns if offset is not None else 0,
            kinds=tuple(kinds),
            groups=counted,
            sections=() if answers else sections,
            travel_us={node: (took[0] // 1000, took[1] // 1000) for node, took in travel.items() if took is not None},
        )
        save_if_possible(path := self._path(self._node), found)
        self._bytes = path.stat().st_size if path.exists() else 0

    def _judge(self, workers: LocalWorkers, record: RoundRecord) -> None:
        nodes = {member.node: codec.load(self._path(member.node), NodeArrivals) for member in record.members}
        known = {node: found for node, found in nodes.items() if isinstance(found, NodeArrivals)}
        now_ns, before = self._clock.time_ns(), self._watched
        index, names = workers.round, self._names
        found, compared, pace = find_slow(known, round_index=index, names=names)
        late, network = find_slow_network(known, pace, self._network, round_index=index, names=names)
        if not {one.node for one in late.values()} & {one.node for one in found.values()}:
            found = late or found  # behind a slow link the ranks of other nodes are late, too
        after = next_watched(before, found, compared=compared, now_ns=now_ns)
        if self._workers is not workers:
            return
        self._watched, self._network = after, network
        for rank in after.slow.keys() - before.slow.keys():
            slow = after.slow[rank]
            logger.warning("%s; look at the node with hpc-elastic doctor --nodes", slow)
            self._write_event(SlowRankFound(round=workers.round, slow=slow))
        for rank in before.slow.keys() - after.slow.keys():
            ended = _rank_ended(workers, before.slow[rank], now_ns, recovered=True)
            logger.warning("rank %s on %s is not slow any more, after %.0f s", rank, ended.slow.host, ended.seconds)
            self._write_event(ended)
        counts = [0] * len(self._names)
        for member in record.members:
            counts[member.node] = member.local_world_size
        for node in set(by_node(after.slow.values(), counts)) - set(by_node(before.slow.values(), counts)):
            if counts[node] > 1:
                logger.warning("all ranks on %s are slow", self._names[node])
        self._save_now(workers)

    def _save_now(self, workers: LocalWorkers) -> None:
        if self._workers is not workers:
            return
        path, ranks, pace = self._folder / NOW, tuple(self._watched.slow.values()), self._slow_run
        if ranks or pace is not None:
            now_ns = self._clock.time_ns()
            save_if_possible(path, SlowRanks(round=workers.round, written_ns=now_ns, ranks=ranks, pace=pace))
        else:
            path.unlink(missing_ok=True)

    def _load_best(self, workers: LocalWorkers) -> None:
        best = codec.load(self._pace_path, progress.BestPace)
        if isinstance(best, progress.BestPace) and best.world_size == workers.layout.world_size:
            self._pace = replace(self._pace, best=best.step, spread=best.spread)

    def _look_whether_to_leave(self, last_round: int, record: RoundRecord) -> None:
        """All nodes read the same in `NOW` of the round that has ended; each takes itself out."""
        now = codec.load(self._folder / NOW, SlowRanks)
        slow = now.ranks if isinstance(now, SlowRanks) and now.round == last_round else ()
        gone = {path: codec.load(path, SlowRanks) for path in self._folder.glob("left-*.json")}
        found = choose_leaving(
            slow,
            record,
            waiting=self._waiting,
            min_nodes=self._spec.min_nodes,
            segment=self._spec.segment,
            moved={one.rank: one.node for left in gone.values() if isinstance(left, SlowRanks) for one in left.ranks},
        )
        own = [one for one in slow if one.node == self._node]
        if stays := found.get(self._node):
            logger.warning("this node stays in the run though rank %s is slow: %s", own[0].rank, stays)
        elif own and self._node in found:
            left = SlowRanks(round=last_round, written_ns=self._clock.time_ns(), ranks=tuple(own))
            save_if_possible(self._folder / f"left-{self._node:05d}.json", left)
            self._leaves_because = f"{progress.SLOW_RANK}: {own[0]}"
        self._holds_until = None

    def _end(self, workers: LocalWorkers, watched: Watched, slow_run: RunPace | None) -> None:
        now_ns = self._clock.time_ns()
        for slow in watched.slow.values():
            self._write_event(_rank_ended(workers, slow, now_ns, recovered=False))
        if slow_run is not None:
            self._write_event(_slow_ended(workers, slow_run, now_ns))
        if self._bytes:
            self._path(self._node).unlink(missing_ok=True)

    def _path(self, node: int) -> Path:
        return self._folder / f"node-{node:05d}.json"


def _rank_ended(workers: LocalWorkers, slow: SlowRank, now_ns: int, *, recovered: bool) -> SlowRankEnded:
    seconds = round((now_ns - slow.since_ns) / 1e9, 1)
    return SlowRankEnded(round=workers.round, slow=slow, seconds=seconds, recovered=recovered)


def _slow_ended(workers: LocalWorkers, pace: RunPace, now_ns: int) -> RunSlowEnded:
    return RunSlowEnded(round=workers.round, pace=pace, seconds=round((now_ns - pace.since_ns) / 1e9, 1))


def count_from_first(groups: Sequence[GroupArrivals]) -> tuple[int, tuple[GroupArrivals, ...]]:
    """Returns the first time of all, and the groups with their times as `GroupArrivals` has them."""
    since = min((group.entered_us[0] for group in groups), default=0)
    return since, tuple(
        replace(group, entered_us=tuple(later - one for one, later in pairwise((since, *group.entered_us))))
        for group in groups
    )


def read_group(rank: int, name: str, group: Mapping[str, Any], kinds: dict[str, int]) -> GroupArrivals:
    members = [int(member) for member in str(group["members"]).strip("[]").split(",") if member.strip()]
    peers: set[int] = set()
    for transfer in group["transfers"]:
        places = [int(place) for place in re.findall(r"\d+", str(transfer))]
        peers |= {members[place] for place in places if place < len(members)}
    return GroupArrivals(
        rank=rank,
        group=name,
        members=ranges(members),
        links=tuple(sorted(peers - {rank})),
        has_transfers=bool(group["transfers"]) and not peers,
        first=group["first"],
        calls=tuple(kinds.setdefault(group["kinds"][call], len(kinds)) for call in group["calls"]),
        entered_us=tuple(entered // 1000 for entered in group["entered_ns"]),
        took_us=tuple(group.get("took_us", ())),
    )
