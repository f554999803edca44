"""Finds slow ranks: one agent's part in that, from when its workers entered their collectives.

All agents ask their workers at the same time of the clock, rarely. Each writes what they answer to the run directory,
and the node of group rank 0 reads what all wrote: the rank that the others wait for is reported, and left alone.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from hpc_elastic.agent.part import AgentSite, Part
from hpc_elastic.agent.slow_ranks import Watched, by_node, find_slow, next_watched
from hpc_elastic.base import codec
from hpc_elastic.base.clock import Offset, uptime_ns
from hpc_elastic.base.files import make_private_dir
from hpc_elastic.base.text import ranges
from hpc_elastic.rendezvous.state import RoundRecord
from hpc_elastic.run.agent_events import SlowRankEnded, SlowRankFound
from hpc_elastic.run.slow_ranks import GroupArrivals, NodeArrivals, SlowRanks

if TYPE_CHECKING:
    from hpc_elastic.agent.local_workers import LocalWorkers
    from hpc_elastic.agent.node_agent import NodeAgent

logger = logging.getLogger(__name__)

EVERY_SECONDS = 30.0
SECONDS_PER_NODE = 0.25
"""A run of many nodes is looked at less often: one node reads the files of all."""
MOST_SHARE = 0.001
"""Of a rank's time, for its answers."""
ANSWER_SECONDS = 3.0
"""How long after the question the answers are read; so long again, and the other nodes' files are there."""


class _Step(Enum):
    ASK = "ask"
    WRITE = "write"
    JUDGE = "judge"


class SlowRankWatch(Part):
    """One agent's. Nothing here waits: files are read and written elsewhere."""

    due: float | None = None

    def __init__(self, site: AgentSite) -> None:
        self._folder, self._node, self._names = site.me.paths.slow_ranks, site.me.node, site.me.attempt.nodes
        self._clock, self._files, self._notifier = site.clock, site.files, site.notifier
        self._uid, self._write_event = site.info.uid, site.events.write
        self._step = _Step.ASK
        self._workers: LocalWorkers | None = None
        self._record: RoundRecord | None = None
        self._watched = Watched()
        self._seconds = 0.0
        """What the dearest answer took of its rank's time."""
        self._has_written = False

    def on_record(self, record: RoundRecord, workers: LocalWorkers | None) -> None:
        self._record = record

    def on_start(self, workers: LocalWorkers) -> None:
        self._workers, self._step, self._watched = workers, _Step.ASK, Watched()
        self._wait()

    def before_stop(self) -> None:
        if self._workers is not None:
            self._files.post(partial(self._end, self._workers.round, self._watched))
        self._workers, self.due = None, None
        self._watched = Watched()

    def on_success(self) -> None:
        self.before_stop()

    def look(self, agent: NodeAgent) -> None:
        workers, record, now = self._workers, self._record, self._clock.monotonic()
        if workers is None or record is None or self.due is None or now < self.due:
            return
        is_judge = workers.layout.group_rank == 0
        if is_judge and self._step is _Step.ASK:
            slow = self._watched.slow.values()
            agent.figures.put("slow_ranks", len(slow))
            agent.figures.put("slow_ranks_share", max((one.share for one in slow), default=0.0))
        if self._step is _Step.ASK:
            workers.ask_for_arrivals()
            self._step, self.due = _Step.WRITE, now + ANSWER_SECONDS
        elif self._step is _Step.WRITE:
            self._files.post(partial(self._write, workers, record))
            self._step = _Step.JUDGE if is_judge else _Step.ASK
            if is_judge:
                self.due = now + ANSWER_SECONDS
            else:
                self._wait()
        else:
            self._files.post(partial(self._judge, workers, record))
            self._step = _Step.ASK
            self._wait()

    def _wait(self) -> None:
        """Until the next time that is the same on all nodes, by their clocks: what ranks did then is compared."""
        count = len(self._record.members) if self._record is not None else 1
        least = max(EVERY_SECONDS, count * SECONDS_PER_NODE, self._seconds / MOST_SHARE)
        every = EVERY_SECONDS * -(-least // EVERY_SECONDS)
        self.due = self._clock.monotonic() + every - self._clock.time_ns() / 1e9 % every

    # -- in the files' thread ------------------------------------------------------------------------------------------

    def _write(self, workers: LocalWorkers, record: RoundRecord) -> None:
        boot_ns = self._clock.time_ns() - uptime_ns(self._clock)
        offset = self._notifier.offset_to(record.leader) if self._notifier is not None else None
        if record.leader == self._uid:
            offset = Offset(offset_ns=0, bound_ns=0)
        groups: list[GroupArrivals] = []
        for rank, raw in workers.take_arrivals().items():
            try:
                answer = json.loads(raw)
                self._seconds = max(self._seconds, float(answer["seconds"]))
                groups += [_read_group(rank, name, group) for name, group in answer["groups"].items()]
            except (ValueError, TypeError, LookupError, AttributeError) as error:
                logger.debug("what rank %s wrote of its collectives is not understood: %r", rank, error)
        groups = [group for group in groups if group.entered_us]
        if not groups:
            return
        since = min(group.entered_us[0] for group in groups)
        found = NodeArrivals(
            round=workers.round,
            reference=record.leader if offset is not None else "",
            since_ns=since * 1000 - boot_ns - (offset.offset_ns if offset is not None else 0),
            bound_ns=offset.bound_ns if offset is not None else 0,
            groups=tuple(
                replace(group, entered_us=tuple(entered - since for entered in group.entered_us)) for group in groups
            ),
        )
        self._has_written = True
        try:
            make_private_dir(self._folder)
            codec.save(self._path(self._node), found)
        except OSError as error:
            logger.debug("%s could not be written: %s", self._path(self._node), error)

    def _judge(self, workers: LocalWorkers, record: RoundRecord) -> None:
        nodes = {member.node: codec.load(self._path(member.node), NodeArrivals) for member in record.members}
        known = {node: found for node, found in nodes.items() if isinstance(found, NodeArrivals)}
        now_ns, before = self._clock.time_ns(), self._watched
        found, compared = find_slow(known, round_index=workers.round, names=self._names)
        after = next_watched(before, found, compared=compared, now_ns=now_ns)
        if self._workers is not workers:
            return
        self._watched = after
        for rank in after.slow.keys() - before.slow.keys():
            slow = after.slow[rank]
            logger.warning("%s; look at the node with hpc-elastic doctor --nodes", slow)
            self._write_event(SlowRankFound(round=workers.round, slow=slow))
        for rank in before.slow.keys() - after.slow.keys():
            slow = before.slow[rank]
            seconds = (now_ns - slow.since_ns) / 1e9
            logger.warning("rank %s on %s is not slow any more, after %.0f s", rank, slow.host, seconds)
            self._write_event(SlowRankEnded(round=workers.round, slow=slow, seconds=round(seconds, 1)))
        counts = [0] * len(self._names)
        for member in record.members:
            counts[member.node] = member.local_world_size
        for node in set(by_node(after.slow.values(), counts)) - set(by_node(before.slow.values(), counts)):
            if counts[node] > 1:
                logger.warning("all ranks on %s are slow", self._names[node])
        self._save(workers.round, after, now_ns)

    def _save(self, round_index: int, watched: Watched, now_ns: int) -> None:
        path = self._folder / "now.json"
        try:
            if watched.slow:
                codec.save(path, SlowRanks(round=round_index, written_ns=now_ns, ranks=tuple(watched.slow.values())))
            else:
                path.unlink(missing_ok=True)
        except OSError as error:
            logger.debug("%s could not be written: %s", path, error)

    def _end(self, index: int, watched: Watched) -> None:
        """The round is over: what was slow until now was so until its end."""
        now_ns = self._clock.time_ns()
        for slow in watched.slow.values():
            self._write_event(SlowRankEnded(round=index, slow=slow, seconds=round((now_ns - slow.since_ns) / 1e9, 1)))
        for path in (self._path(self._node), *([self._folder / "now.json"] if watched.slow else [])):
            if self._has_written:
                path.unlink(missing_ok=True)

    def _path(self, node: int) -> Path:
        return self._folder / f"node-{node:05d}.json"


def _read_group(rank: int, name: str, group: Mapping[str, Any]) -> GroupArrivals:
    """One process group of a rank's answer; its times are not yet counted from `NodeArrivals.since_ns`."""
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
        kinds=tuple(group["kinds"]),
        calls=tuple(group["calls"]),
        entered_us=tuple(entered // 1000 for entered in group["entered_ns"]),
    )
