"""Events of a round, for the agent's event log and, where a person should read them, for the job log.

Beside them this host's clock: how far it is ahead of the coordinators', each with a bound. Every node compares its
clock with the coordinator's alone, by the packets that pass between the two anyway: so the report can order what
happened on different nodes, over a chain of them where the coordinator changed. Little is logged, and only where
another event is written too: once for each coordinator, when workers start, and anew when a worker fails.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import Struct

from hpc_elastic.agent.hang import describe_beat
from hpc_elastic.agent.health import HealthVerdict
from hpc_elastic.agent.heartbeats import RankBeat
from hpc_elastic.agent.worker_environment import RoundFacts
from hpc_elastic.base.clock import Clock, Offset, uptime_ns
from hpc_elastic.base.codec import to_json
from hpc_elastic.failures.stacks import RankStacks, fold_stacks, fold_threads
from hpc_elastic.rendezvous.state import node_of
from hpc_elastic.run.events import EventLog

if TYPE_CHECKING:
    from hpc_elastic.failures.worker_failure import WorkerFailure

logger = logging.getLogger(__name__)

_STACK_GROUPS = 50
_PLACES = (("host", "node"), ("replaces_host", "replaces_node"))


def log_coordination(events: EventLog, event: str, fields: Mapping[str, Any], *, nodes: Sequence[str]) -> None:
    """What this node decided as coordinator."""
    events.write(event, **fields)
    if event in ("node_lost", "node_missing", "spare_lost"):
        node = int(fields["node"])
        name = nodes[node] if 0 <= node < len(nodes) else str(node)
        if event == "node_missing":
            logger.warning("node %s has not come: the round begins without it", name)
            return
        silent = f", silent for {fields['age']:.0f} s" if fields.get("age", 0.0) >= 1 else ""
        logger.warning("%s %s is lost%s", event.split("_")[0], name, silent)
    elif event in ("round_opened", "closed", "coordinator_changed", "nodes_waiting", "nodes_asked"):
        logger.info("%s (round %s): %s", event.replace("_", " "), fields.get("round"), fields.get("reason"))
    elif event == "link_lost":
        logger.warning("%s: %s", fields.get("host") or f"node {fields.get('node')}", fields.get("reason"))
    elif event in ("signal_heard", "notice_given", "step_agreed"):
        logger.info("%s", fields.get("reason"))
    elif event == "node_left":
        logger.warning("node %s left: %s", fields.get("host") or fields.get("node"), fields.get("reason"))
    elif event == "node_replaced":
        come, gone = (fields.get(host) or fields.get(node) for host, node in _PLACES)
        logger.warning("%s took the place of %s (node %s of the round)", come, gone, fields.get("group_rank"))
    elif event == "round_frozen" and str(fields.get("reason")).startswith("restart"):
        logger.info("%s", fields.get("reason"))  # "restart 1 of 3 (2 left) after: …"


def log_round(events: EventLog, facts: RoundFacts, *, restarts_used: int) -> None:
    """The round is final: ranks hold, workers are about to be started."""
    layout = facts.layout
    ranks = list(layout.global_ranks)
    events.write(
        "round_final",
        round=facts.round,
        group_rank=layout.group_rank,
        group_world_size=layout.group_world_size,
        world_size=layout.world_size,
        local_world_size=layout.local_world_size,
        ranks=ranks,
        master=f"{facts.master_addr}:{facts.master_port}",
        restarts_used=restarts_used,
        max_restarts=facts.max_restarts,
    )
    logger.info(
        "round %d: role %s, ranks %s of %d, node %d of %d, master %s:%s, %d of %d restarts used",
        facts.round,
        facts.role,
        f"{ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else ranks[0],
        layout.world_size,
        layout.group_rank,
        layout.group_world_size,
        facts.master_addr,
        facts.master_port,
        restarts_used,
        facts.max_restarts,
    )


def log_health(events: EventLog, verdict: HealthVerdict, *, round_index: int) -> None:
    """What was found before a round: nothing where the node is fit."""
    for check, text in verdict.warnings.items():
        events.write("health_warning", check=check, reason=text)
        logger.warning("%s", text)
    if not verdict.is_healthy:
        events.write("health_check_failed", round=round_index, checks=list(verdict.checks), reason=verdict.reason)
        logger.error("this node leaves the run: %s", verdict.reason)


def log_failure(events: EventLog, failure: WorkerFailure) -> None:
    """A worker ended badly, and its evidence is written."""
    events.write("worker_failed", **failure.to_event())


def log_stacks(
    events: EventLog, round_index: int, *, stacks: Mapping[int, RankStacks], beats: Sequence[RankBeat], now: float
) -> None:
    """The stacks of this node's workers in a round that was ended because of a hang."""
    main = {rank: found.main for rank, found in stacks.items() if found.main}
    events.write(
        "stacks_taken",
        round=round_index,
        groups=[{"ranks": ranks, "stack": list(stack)} for ranks, stack in fold_stacks(main)[:_STACK_GROUPS]],
        threads=[
            {"ranks": ranks, "name": name, "stack": list(stack)}
            for ranks, (name, stack) in fold_threads(stacks)[:_STACK_GROUPS]
        ],
        silent=sorted(set(stacks) - set(main)),
        states=[{"rank": rank, "state": found.where} for rank, found in sorted(stacks.items()) if found.where],
        beats=[to_json(describe_beat(beat, now)) for beat in beats],
    )


MOST_REFERENCES = 4
"""Of so many coordinators, the latest ones, an offset is logged."""
_READS = 5
STEP_NS = 1_000_000
"""By so much the wall clock has to be set for another line."""


class Ruler(Protocol):
    """What is needed of `store.notifier.Notifier`."""

    def offset_to(self, uid: str) -> Offset | None: ...


class ClockSample(Struct, frozen=True, kw_only=True):
    """What is known at one moment."""

    offset: Offset
    uptime_ns: int
    """By this host's clock since its boot."""
    wall_ns: int


def is_news(sample: ClockSample, logged: ClockSample | None) -> bool:
    """Whether `sample` is worth a line after `logged`, the last one of its kind, which grows old."""
    if logged is None:
        return True
    age = sample.uptime_ns - logged.uptime_ns
    if abs(sample.wall_ns - logged.wall_ns - age) > STEP_NS:
        return True
    if (
        abs(sample.offset.offset_ns - logged.offset.offset_ns)
        > sample.offset.bound_ns + logged.offset.aged(age).bound_ns
    ):
        return True
    # A clock is never off from itself.
    return 0 < 2 * sample.offset.bound_ns < logged.offset.aged(age).bound_ns


class ClockOffsetLog:
    """One agent's."""

    def __init__(self, events: EventLog, ruler: Ruler | None, *, uid: str, clock: Clock) -> None:
        self._events = events
        self._ruler = ruler
        self._uid = uid
        self._clock = clock
        self._logged: dict[str, ClockSample | None] = {}
        """By coordinator, the latest last."""

    def on_leader(self, leader: str) -> None:
        """The coordinator is the agent `leader` from now on."""
        self._logged[leader] = self._logged.pop(leader, None)
        if len(self._logged) > MOST_REFERENCES:
            del self._logged[next(iter(self._logged))]

    def log_first(self) -> None:
        """Log the offset to each coordinator for which nothing was logged so far."""
        self._log([reference for reference, logged in self._logged.items() if logged is None])

    def log_changes(self) -> None:
        """Log the offsets that have changed: something has happened here whose time counts."""
        self._log(list(self._logged))

    def _log(self, references: list[str]) -> None:
        if self._ruler is None:
            return
        for reference in references:
            own = reference == self._uid
            offset = Offset(offset_ns=0, bound_ns=0) if own else self._ruler.offset_to(reference)
            if offset is None:
                continue
            uptime, wall = self._both_clocks()
            sample = ClockSample(offset=offset, uptime_ns=uptime, wall_ns=wall)
            if is_news(sample, self._logged[reference]):
                self._logged[reference] = sample
                self._events.write(
                    "clock_offset",
                    reference=node_of(reference),
                    offset_ns=offset.offset_ns,
                    bound_ns=offset.bound_ns,
                    uptime_ns=uptime,
                    wall_ns=wall,
                )

    def _both_clocks(self) -> tuple[int, int]:
        """The time since the boot and the wall clock's, at one moment: the closest of several reads."""
        reads = [(uptime_ns(self._clock), self._clock.time_ns(), uptime_ns(self._clock)) for _ in range(_READS)]
        before, wall, after = min(reads, key=lambda read: read[2] - read[0])
        return (before + after) // 2, wall
