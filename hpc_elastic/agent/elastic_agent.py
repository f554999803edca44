"""The seam for other ways of starting workers: `SimpleElasticAgent`, with torch's names, over any rendezvous.

A subclass defines how workers are started, watched and stopped; this module decides when. Ranks are numbered from
`GroupFacts`, which the agents exchange through the round's store: it may be any rendezvous'.
"""

from __future__ import annotations

import abc
import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from msgspec import Struct

from hpc_elastic.agent.metrics import MetricSink, RoundFigures
from hpc_elastic.agent.supervision import (
    DEFAULT_ROLE,
    Rendezvous,
    Round,
    RoundStore,
    RunResult,
    WorkerGroup,
    WorkerGroupFailureError,
    WorkerSpec,
    WorkerState,
)
from hpc_elastic.base import codec
from hpc_elastic.base.clock import Clock, SystemClock, pause
from hpc_elastic.base.host_facts import candidate_addresses, choose_master_address
from hpc_elastic.errors import HpcElasticError, UsageError
from hpc_elastic.rendezvous.proposals import RankLayout, layout_of

logger = logging.getLogger(__name__)
T = TypeVar("T")

EXIT_BARRIER_SECONDS = 300.0
"""How long a node whose workers are done waits for the others, where its rendezvous notices no lost nodes."""
EXCHANGE_SECONDS = 60.0
"""How long the agents of a round wait for each other's facts, once the rendezvous is complete."""
_FIRST_LOOK = 0.005
_LONGEST_LOOK = 0.25


class PeerMissingError(HpcElasticError):
    template = (
        "round {round} of run {run_id!r}: no answer from the agent of group rank {group_rank} within {seconds:g} s; "
        "look at that node's log"
    )


class _RoundIsOverError(Exception):
    pass


class GroupFacts(Struct, frozen=True, kw_only=True):
    role: str
    local_world_size: int
    restarts_used: int
    failed: bool


class _Agreed(Struct, frozen=True, kw_only=True):
    groups: tuple[GroupFacts, ...]
    master: tuple[str, int]


def layouts_of(groups: Sequence[GroupFacts], group_rank: int) -> tuple[RankLayout, RankLayout]:
    role = groups[group_rank].role
    in_role = [group.local_world_size if group.role == role else 0 for group in groups]
    return layout_of([group.local_world_size for group in groups], group_rank), layout_of(in_role, group_rank)


class ElasticAgent(abc.ABC):
    """Starts and watches the workers of one node."""

    @abc.abstractmethod
    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Run the workers to their end, through as many rounds as it takes.

        Args:
            role: Ignored, as torch does: an agent has workers of one role, the spec's.

        Raises:
            WorkerGroupFailureError: the workers failed, and no restart is left or would help.
            Exception: what no worker caused, such as a rendezvous that was closed.
        """

    @abc.abstractmethod
    def get_worker_group(self, role: str = DEFAULT_ROLE) -> WorkerGroup:
        """The workers as they are now; to be read only."""


class SimpleElasticAgent(ElasticAgent):
    """The rounds, ranks, budget and states; a subclass starts and stops the processes. One use: one `run`."""

    def __init__(
        self,
        spec: WorkerSpec,
        *,
        exit_barrier_timeout: float = EXIT_BARRIER_SECONDS,
        metrics: MetricSink | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._worker_group = WorkerGroup(spec)
        self._exit_barrier_timeout = exit_barrier_timeout
        self._clock = clock or SystemClock()
        self._figures = RoundFigures(metrics, role=spec.role, clock=self._clock)
        self._failed_last = False

    # -- what a subclass defines ---------------------------------------------------------------------------------

    @abc.abstractmethod
    def _start_workers(self, group: WorkerGroup) -> Mapping[int, Any]:
        """Start all workers. Returns local rank → id; what it raises is no worker's failure, and ends the agent."""

    @abc.abstractmethod
    def _stop_workers(self, group: WorkerGroup) -> None:
        """End all workers and wait for it; in any state: none was started, some are gone, some are stuck."""

    @abc.abstractmethod
    def _monitor_workers(self, group: WorkerGroup) -> RunResult:
        """How they are, by global rank. HEALTHY: go on; SUCCEEDED: all ended well; UNHEALTHY, FAILED: restart."""

    def _open_master(self, group: WorkerGroup) -> tuple[str, int]:
        """Called on group rank 0 before the workers start: what becomes MASTER_ADDR and MASTER_PORT."""
        reached: Any = _call(group.spec.handler, "reached_addresses")
        address = choose_master_address(
            given=group.spec.master_addr,
            reached=reached or (),
            candidates=candidate_addresses(socket.gethostname()) if group.group_world_size != 1 else (),
        )
        if group.spec.master_port:
            return address, group.spec.master_port
        with socket.create_server(("", 0)) as listener:
            return address, int(listener.getsockname()[1])

    def _wait_for_news(self, group: WorkerGroup, seconds: float) -> None:
        """Wait until something may have happened to the workers, for `seconds` at most."""
        pause(self._clock, seconds)

    def get_worker_group(self, role: str = DEFAULT_ROLE) -> WorkerGroup:
        return self._worker_group

    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        group = self._worker_group
        if group.state is not WorkerState.INIT:
            raise UsageError(f"this agent has run already (its workers are {group.state.name}); make a new one")
        try:
            return self._rounds(group)
        except BaseException:
            if self._worker_group.state is not WorkerState.FAILED:
                self._enter(group, WorkerState.UNKNOWN)
                self._stop_workers(group)
                self._enter(group, WorkerState.FAILED)
            raise
        finally:
            group.spec.handler.shutdown()

    def _rounds(self, group: WorkerGroup) -> RunResult:
        self._initialize_workers(group)
        while True:
            self._wait_for_news(group, group.spec.monitor_interval)
            found = self._monitor_workers(group)
            if found.state is not group.state:
                self._enter(group, found.state)
            if found.state is WorkerState.SUCCEEDED:
                if self._all_are_done(group):
                    return found
                self._restart(group, "another node asked for a new round")
            elif found.state in (WorkerState.UNHEALTHY, WorkerState.FAILED):
                self._handle_failure(group, found)
            elif found.state is not WorkerState.HEALTHY:
                raise HpcElasticError(message=f"the workers are {found.state.name}, which no agent can go on from")
            elif self._round_is_over(group):
                self._restart(group, "the round is over")

    def _handle_failure(self, group: WorkerGroup, found: RunResult) -> None:
        left = self._remaining_restarts
        final = next((f for f in found.failures.values() if getattr(f, "retryable", True) is False), None)
        if left <= 0 or final is not None:
            self._give_up(group, found, "not retryable" if final is not None else "no restart is left")
        logger.warning("%s; %d of %d restarts left", _describe_failures(found), left - 1, group.spec.max_restarts)
        self._failed_last = True
        self._restart(group, "a worker failed")

    def _give_up(self, group: WorkerGroup, found: RunResult, why: str) -> None:
        with self._figures.timed("stop"):
            self._stop_workers(group)
        self._enter(group, WorkerState.FAILED)
        used = f"{group.restarts_used} of {group.spec.max_restarts} restarts used"
        reason = f"the workers of role {group.spec.role!r} failed ({why}, {used}): {_describe_failures(found)}"
        give_up = getattr(group.spec.handler, "give_up", None)
        if give_up is not None:
            give_up(reason)
        else:
            group.spec.handler.set_closed()
        raise WorkerGroupFailureError(reason=reason, exceptions=dict(found.failures))

    def _restart(self, group: WorkerGroup, reason: str) -> None:
        logger.info("stopping the workers of round %d: %s", group.round, reason)
        with self._figures.timed("restart"):
            self._restart_workers(group)

    # -- with torch's names: a subclass may call them, and override them -----------------------------------------

    @property
    def _remaining_restarts(self) -> int:
        return self._worker_group.spec.max_restarts - self._worker_group.restarts_used

    @_remaining_restarts.setter
    def _remaining_restarts(self, left: int) -> None:
        self._worker_group.restarts_used = self._worker_group.spec.max_restarts - left

    def _restart_workers(self, group: WorkerGroup) -> None:
        with self._figures.timed("stop"):
            self._stop_workers(group)
        self._enter(group, WorkerState.STOPPED)
        self._initialize_workers(group)

    def _rendezvous(self, group: WorkerGroup) -> None:
        with self._figures.timed("rendezvous"):
            while True:
                found = group.spec.handler.next_rendezvous()
                try:
                    self._take_place(group, found)
                    return
                except _RoundIsOverError:
                    logger.info("round %d ended before it began", group.round)

    def _initialize_workers(self, group: WorkerGroup) -> None:
        self._rendezvous(group)
        self._figures.put("remaining_restarts", self._remaining_restarts)
        logger.info(
            "round %d: role %s, %d of %d restarts used, group rank %s of %s, ranks %s, master %s:%s",
            group.round,
            group.spec.role,
            group.restarts_used,
            group.spec.max_restarts,
            group.group_rank,
            group.group_world_size,
            [worker.global_rank for worker in group.workers],
            group.master_addr,
            group.master_port,
        )
        self._failed_last = False
        with self._figures.timed("start"):
            ids = self._start_workers(group)
        for worker in group.workers:
            worker.id = ids.get(worker.local_rank)
        self._enter(group, WorkerState.HEALTHY)

    def _take_place(self, group: WorkerGroup, found: Round | tuple[RoundStore, int, int]) -> None:
        if isinstance(found, tuple):
            store, rank, world_size = found
        else:
            store, rank, world_size = found.store, found.rank, found.world_size
        group.store, group.round = store, getattr(found, "version", group.round + 1)
        group.group_rank, group.group_world_size = rank, world_size
        own = GroupFacts(
            role=group.spec.role,
            local_world_size=group.spec.local_world_size,
            restarts_used=group.restarts_used,
            failed=self._failed_last,
        )
        store.set(f"agent/{rank}", codec.dumps(own).encode())
        if rank == 0:
            raw = (self._read(group, f"agent/{other}", other) for other in range(world_size))
            facts = tuple(codec.loads(GroupFacts, text) for text in raw)
            agreed = _Agreed(groups=facts, master=self._open_master(group))
            store.set("agents", codec.dumps(agreed).encode())
        agreed = codec.loads(_Agreed, self._read(group, "agents", 0))
        groups = agreed.groups
        group.master_addr, group.master_port = agreed.master
        # One more than before where a worker's failure led to this round, on any node.
        group.restarts_used = max(each.restarts_used for each in groups) + int(any(each.failed for each in groups))
        group.layout, in_role = layouts_of(groups, rank)
        for worker in group.workers:
            worker.global_rank = group.layout.first_rank + worker.local_rank
            worker.role_rank = in_role.first_rank + worker.local_rank
            worker.world_size, worker.role_world_size = group.layout.world_size, in_role.world_size
            worker.id = None

    def _read(self, group: WorkerGroup, key: str, from_rank: int) -> bytes:
        assert group.store is not None
        store, has = group.store, getattr(group.store, "check", lambda keys: True)

        def look() -> bytes | None:
            value = store.get(key) if has([key]) else None
            if value is None and self._round_is_over(group):
                raise _RoundIsOverError
            return value

        if (value := self._await(look, EXCHANGE_SECONDS)) is None:
            run_id = group.spec.handler.get_run_id()
            raise PeerMissingError(round=group.round, run_id=run_id, group_rank=from_rank, seconds=EXCHANGE_SECONDS)
        return value

    def _await(self, look: Callable[[], T | None], seconds: float) -> T | None:
        deadline, delay = self._clock.monotonic() + seconds, _FIRST_LOOK
        while (found := look()) is None and self._clock.monotonic() < deadline:
            pause(self._clock, delay)
            delay = min(_LONGEST_LOOK, 2 * delay)
        return found

    def _all_are_done(self, group: WorkerGroup) -> bool:
        """The exit barrier: others may still need this node's store. False where a new round was asked for."""
        store, size, seconds = group.store, group.group_world_size, self._exit_barrier_timeout
        assert store is not None
        assert size is not None
        store.add("done", 1)
        _call(group.spec.handler, "report_done")

        def look() -> bool | None:
            over = self._round_is_over(group)  # asked first: when all are done, the round ends too
            if int(store.get("done") or b"0") >= size:
                return True
            return bool(_call(group.spec.handler, "has_succeeded")) if over else None

        if (found := self._await(look, seconds)) is None:
            logger.warning("%g s after this node's workers were done, others still are not; leaving", seconds)
        return found is not False

    def _round_is_over(self, group: WorkerGroup) -> bool:
        over = _call(group.spec.handler, "round_is_over")
        # A rendezvous that has it ends the round where a newcomer has a place: a node that waits is a spare then.
        return group.spec.handler.num_nodes_waiting() > 0 if over is None else bool(over)

    def _enter(self, group: WorkerGroup, state: WorkerState) -> None:
        group.state = state
        self._figures.enter(state)


def _call(handler: Rendezvous, name: str) -> object:
    method = getattr(handler, name, None)
    return method() if method is not None else None


def _describe_failures(found: RunResult) -> str:
    ranks = sorted(found.failures.items())
    described = [f"rank {rank}: {getattr(failure, 'headline', None) or failure}" for rank, failure in ranks]
    return "; ".join(described) or f"they are {found.state.name}"
