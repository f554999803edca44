"""From a seed to what happens when. Pure: the same seed and plan give the same schedule."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum

COORDINATOR = -1
"""As a node: whoever coordinates at that moment."""


class Kind(str, Enum):
    KILL_AGENT = "kill_agent"
    """SIGKILL to the agent alone: its guardian has to clear up, a new agent comes."""
    KILL_NODE = "kill_node"
    """SIGKILL to everything of the node at once, as when its power fails; a new agent comes."""
    LOSE_NODE = "lose_node"
    """As KILL_NODE, and no new agent ever comes."""
    KILL_WORKER = "kill_worker"
    STOP_AGENT = "stop_agent"
    """SIGSTOP to the agent alone, SIGCONT after `seconds`."""
    STOP_NODE = "stop_node"
    """SIGSTOP to everything of the node."""
    FREEZE_ALL = "freeze_all"
    """The server answers nobody for `seconds`."""
    FREEZE_ONE = "freeze_one"
    """The node's own mount hangs for `seconds`."""
    FAULTS = "faults"
    """Within `seconds`, `count` operations of the node's mount fail with `error`; where `done`, after the work."""
    FULL = "full"
    """No space for anybody for `seconds`."""
    CLOCK = "clock"
    """The node's clock is `offset` seconds wrong from its next agent on."""
    DROP_CACHES = "drop_caches"


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One disturbance. Times in seconds."""

    after: float
    """Since the one before it began."""
    kind: Kind
    node: int = 0
    seconds: float = 0.0
    error: str = ""
    operation: str = "*"
    done: bool = False
    count: int = 0
    offset: float = 0.0

    def __str__(self) -> str:
        words = [self.kind.value, "coordinator" if self.node == COORDINATOR else f"node {self.node}"]
        if self.seconds:
            words.append(f"{self.seconds:.1f} s")
        if self.error:
            words.append(f"{self.count} x {self.error} of {self.operation}{', done' if self.done else ''}")
        if self.offset:
            words.append(f"{self.offset:+.0f} s")
        return " ".join(words)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    nodes: int
    min_nodes: int
    bursts: int
    """Each is followed by a recovery."""
    ttl: float = 3.0
    kinds: tuple[Kind, ...] = tuple(Kind)
    """What the place can do."""
    kills_per_node: int = 3
    """The supervisor starts an agent so many times again."""
    doorbell: bool = True
    closes_itself: bool = True
    """Whether the run ends where too few nodes are left; handlers wait for others as long as they were told to."""


_WEIGHTS = {
    Kind.KILL_AGENT: 4,
    Kind.KILL_NODE: 4,
    Kind.LOSE_NODE: 1,
    Kind.KILL_WORKER: 2,
    Kind.STOP_AGENT: 3,
    Kind.STOP_NODE: 3,
    Kind.FREEZE_ALL: 2,
    Kind.FREEZE_ONE: 2,
    Kind.FAULTS: 5,
    Kind.FULL: 1,
    Kind.CLOCK: 2,
    Kind.DROP_CACHES: 1,
}
_DEADLY = (Kind.KILL_AGENT, Kind.KILL_NODE, Kind.LOSE_NODE)
_ERRORS = ("EIO", "ESTALE", "EIO", "EACCES", "ETIMEDOUT")
_OPERATIONS = ("*", "*", "symlink", "readlink", "readdir", "write", "create", "read", "mkdir", "lookup")


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Bursts of actions; and what every node's clock says when it first starts."""

    seed: int
    plan: Plan
    bursts: tuple[tuple[Action, ...], ...]
    clocks: tuple[float, ...]
    """Seconds by which each node's wall clock is wrong from the start."""
    too_few: bool
    """Whether so many nodes are lost at the end that the run has to close itself; otherwise its workers finish."""

    def lost(self) -> set[int]:
        """Nodes that never come back."""
        return {action.node for action in self.actions() if action.kind is Kind.LOSE_NODE}

    def actions(self) -> Iterator[Action]:
        for burst in self.bursts:
            yield from burst


def make_schedule(seed: int, plan: Plan) -> Schedule:
    """All choices of chance are made here, before anything runs."""
    rng = random.Random(seed)
    clocks = [0.0] * plan.nodes
    if Kind.CLOCK in plan.kinds:
        clocks[rng.randrange(plan.nodes)] = rng.choice((3600.0, -3600.0))
    chooser = _Chooser(rng, plan)
    bursts = tuple(chooser.burst() for _ in range(plan.bursts))
    too_few = plan.closes_itself and Kind.LOSE_NODE in plan.kinds and plan.min_nodes > 1 and rng.random() < 0.25
    return Schedule(seed=seed, plan=plan, bursts=bursts, clocks=tuple(clocks), too_few=too_few)


class _Chooser:
    def __init__(self, rng: random.Random, plan: Plan) -> None:
        self._rng = rng
        self._plan = plan
        self._kills = dict.fromkeys(range(plan.nodes), 0)
        self._coordinator_kills = 0
        self._lost: set[int] = set()

    def burst(self) -> tuple[Action, ...]:
        rng = self._rng
        found = [self._action(rng.uniform(0.0, 1.0))]
        while len(found) < 5 and rng.random() < 0.6:
            found.append(self._action(rng.choice((0.0, rng.uniform(0.0, 0.5), rng.uniform(0.5, 4.0)))))
        return tuple(found)

    def _action(self, after: float) -> Action:
        rng, plan = self._rng, self._plan
        while True:
            kinds = [kind for kind in plan.kinds if self._is_allowed(kind)]
            kind = rng.choices(kinds, [_WEIGHTS[kind] for kind in kinds])[0]
            node = rng.choice([n for n in range(plan.nodes) if n not in self._lost])
            if kind in (Kind.KILL_AGENT, Kind.KILL_NODE):
                if rng.random() < 0.4 and self._spare_kills() > 0:
                    # Whom it hits is not known before: each node keeps one start for that.
                    self._coordinator_kills += 1
                    return Action(after=after, kind=kind, node=COORDINATOR)
                if self._kills[node] + self._coordinator_kills >= plan.kills_per_node:
                    continue
                self._kills[node] += 1
            if kind is Kind.LOSE_NODE:
                self._lost.add(node)
            return self._detailed(Action(after=after, kind=kind, node=node))

    def _spare_kills(self) -> int:
        return self._plan.kills_per_node - max(self._kills.values()) - self._coordinator_kills

    def _is_allowed(self, kind: Kind) -> bool:
        plan = self._plan
        if kind is Kind.LOSE_NODE:
            return len(self._lost) < plan.nodes - plan.min_nodes - 1
        if kind in _DEADLY:
            return min(self._kills[n] for n in range(plan.nodes) if n not in self._lost) < plan.kills_per_node
        return True

    def _detailed(self, action: Action) -> Action:
        rng, ttl = self._rng, self._plan.ttl
        values: dict[str, object] = {}
        if action.kind in (Kind.STOP_AGENT, Kind.STOP_NODE):
            # Shorter than anything notices, or past the lease.
            values["seconds"] = rng.choice((rng.uniform(0.1, 0.4 * ttl), rng.uniform(1.2 * ttl, 3.0 * ttl)))
            if rng.random() < 0.3:
                values["node"] = COORDINATOR
        elif action.kind is Kind.FREEZE_ALL:
            values["seconds"] = rng.choice((rng.uniform(0.2, 0.8 * ttl), rng.uniform(1.0 * ttl, 2.5 * ttl)))
        elif action.kind is Kind.FREEZE_ONE:
            longest = 1.5 * ttl if self._plan.doorbell else 0.5 * ttl
            values["seconds"] = rng.uniform(0.2, longest)
        elif action.kind is Kind.FAULTS:
            values.update(
                error=rng.choice(_ERRORS),
                operation=rng.choice(_OPERATIONS),
                done=rng.random() < 0.4,
                count=rng.randint(1, 5),
                seconds=rng.uniform(1.0, 5.0),
            )
        elif action.kind is Kind.FULL:
            values["seconds"] = rng.uniform(1.0, 2.5 * ttl)
        elif action.kind is Kind.CLOCK:
            values["offset"] = rng.choice((3600.0, -3600.0, 0.0))
        return replace(action, **values)  # type: ignore[arg-type]


def told(schedule: Schedule) -> str:
    """For a person, and for whoever replays it."""
    plan = schedule.plan
    wrong = ", ".join(f"node {node} {offset:+.0f} s" for node, offset in enumerate(schedule.clocks) if offset)
    lines = [f"seed {schedule.seed}: {plan.nodes} nodes, at least {plan.min_nodes}, clocks {wrong or 'right'}"]
    for number, burst in enumerate(schedule.bursts):
        lines.append(f"  burst {number}: " + "; ".join(f"+{a.after:.1f} {a}" for a in burst))
    lines.append("  end: " + ("too few nodes" if schedule.too_few else "the workers finish"))
    return "\n".join(lines)
