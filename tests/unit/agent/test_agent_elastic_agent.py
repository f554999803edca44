"""The seam: a toy agent of another launcher, whose workers are plain objects, over a rendezvous in memory."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_elastic.agent import (
    DEFAULT_ROLE,
    MonitorResult,
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerGroupFailureError,
    WorkerGroupFailureException,
    WorkerSpec,
    WorkerState,
)
from hpc_elastic.agent.elastic_agent import GroupFacts, layouts_of
from hpc_elastic.base.clock import SystemClock
from hpc_elastic.errors import UsageError
from hpc_elastic.run.spec import EntryKind, Entrypoint


class MemoryRoundStore:
    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def set(self, key: str, value: bytes) -> None:
        with self._lock:
            self._values[key] = value

    def get(self, key: str) -> bytes | None:
        with self._lock:
            return self._values.get(key)

    def add(self, key: str, amount: int) -> int:
        with self._lock:
            value = int(self._values.get(key, b"0")) + amount
            self._values[key] = b"%d" % value
            return value


@dataclass
class MemoryRound:
    store: MemoryRoundStore
    rank: int
    world_size: int
    version: int


class Meeting:
    """A rendezvous of `nodes` threads: a round is there when all have asked for it."""

    def __init__(self, nodes: int, make_store: type[MemoryRoundStore] = MemoryRoundStore) -> None:
        self.nodes, self.make_store, self.store = nodes, make_store, make_store()
        self.version, self.closed = -1, False
        self.asked: set[int] = set()
        self.changed = threading.Condition()


class ClosedError(Exception):
    pass


@dataclass
class MemoryHandler:
    meeting: Meeting
    node: int
    round: int = -1
    shut_down: int = 0
    waiting: int = 0

    def get_run_id(self) -> str:
        return "toy"

    def next_rendezvous(self) -> MemoryRound:
        meeting = self.meeting
        with meeting.changed:
            meeting.asked.add(self.node)
            if len(meeting.asked) == meeting.nodes:
                meeting.asked.clear()
                meeting.version += 1
                meeting.store = meeting.make_store()
            meeting.changed.notify_all()
            if meeting.asked:
                assert meeting.changed.wait_for(lambda: meeting.closed or meeting.version > self.round, timeout=20)
            if meeting.closed:
                raise ClosedError
            self.round = meeting.version
            return MemoryRound(meeting.store, self.node, meeting.nodes, self.round)

    def round_is_over(self) -> bool:
        with self.meeting.changed:
            return bool(self.meeting.asked) or self.meeting.closed

    def num_nodes_waiting(self) -> int:
        waiting, self.waiting = self.waiting, 0
        return waiting

    def set_closed(self) -> None:
        with self.meeting.changed:
            self.meeting.closed = True
            self.meeting.changed.notify_all()

    def shutdown(self) -> bool:
        self.shut_down += 1
        return True


class WaitingStore(MemoryRoundStore):
    """As torch's: `get` waits for what is missing."""

    def check(self, keys: list[str]) -> bool:
        with self._lock:
            return all(key in self._values for key in keys)

    def get(self, key: str) -> bytes | None:
        assert self.check([key]), "it would wait, and no round that ends would be seen"
        return super().get(key)


class TupleHandler:
    """As little as torch's c10d handler has: no version, a waiting store; as a tuple, or as an object."""

    def __init__(self, handler: MemoryHandler, *, is_tuple: bool) -> None:
        self._handler, self._is_tuple = handler, is_tuple

    def next_rendezvous(self) -> Any:
        found = self._handler.next_rendezvous()
        place = {"store": found.store, "rank": found.rank, "world_size": found.world_size}
        return tuple(place.values()) if self._is_tuple else SimpleNamespace(**place)

    def num_nodes_waiting(self) -> int:
        return int(self._handler.round_is_over())

    def __getattr__(self, name: str) -> Any:
        if name == "round_is_over":
            raise AttributeError(name)
        return getattr(self._handler, name)


@dataclass
class ToyAgent(SimpleElasticAgent):
    """Another launcher's: its "workers" are what `script` says of each round."""

    spec: WorkerSpec
    script: Callable[[WorkerGroup], MonitorResult]
    metrics: Any = None
    log: list[str] = field(default_factory=list)
    started: list[list[tuple[int, int, int, int]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(self.spec, metrics=self.metrics)

    def _start_workers(self, group: WorkerGroup) -> Mapping[int, Any]:
        self.log.append(f"start {group.round}")
        ranks = [(w.global_rank, w.role_rank, w.world_size, w.role_world_size) for w in group.workers]
        self.started.append(ranks)
        return {worker.local_rank: f"toy-{worker.global_rank}" for worker in group.workers}

    def _stop_workers(self, group: WorkerGroup) -> None:
        self.log.append(f"stop {group.round}")

    def _monitor_workers(self, group: WorkerGroup) -> MonitorResult:
        return self.script(group)

    def _wait_for_news(self, group: WorkerGroup, seconds: float) -> None:
        SystemClock().wait(threading.Event(), min(seconds, 0.001))


def a_spec(handler: Any, **kwargs: Any) -> WorkerSpec:
    values: dict[str, Any] = {"role": "default", "local_world_size": 2, "entrypoint": "train", "rdzv_handler": handler}
    return WorkerSpec(**{**values, **kwargs})


def succeed(group: WorkerGroup) -> MonitorResult:
    return MonitorResult(WorkerState.SUCCEEDED, {w.global_rank: w.global_rank * 10 for w in group.workers})


def fail(group: WorkerGroup) -> MonitorResult:
    return MonitorResult(WorkerState.FAILED, exceptions={group.workers[0].global_rank: ValueError("boom")})


def run_all(agents: list[ToyAgent]) -> list[Any]:
    results: list[Any] = [None] * len(agents)

    def run(index: int) -> None:
        try:
            results[index] = agents[index].run()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(agents))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


def test_one_node_returns_values_by_global_rank() -> None:
    handler = MemoryHandler(Meeting(1), 0)
    agent = ToyAgent(a_spec(handler, role="trainer"), succeed)
    group = agent.get_worker_group()
    assert (group.state, group.store, group.group_rank, group.group_world_size) == (WorkerState.INIT, None, None, None)
    assert [(w.local_rank, w.global_rank, w.id) for w in group.workers] == [(0, -1, None), (1, -1, None)]
    result = agent.run("another role, which is ignored as torch does")
    assert not result.is_failed()
    assert (result[0], result[1]) == (0, 10)
    group = agent.get_worker_group("another")
    assert (group.spec.role, group.state) == ("trainer", WorkerState.SUCCEEDED)
    assert [worker.id for worker in group.workers] == ["toy-0", "toy-1"]
    assert handler.shut_down == 1
    with pytest.raises(UsageError, match="SUCCEEDED"):
        agent.run()


def test_nodes_of_different_sizes_and_roles_get_contiguous_ranks() -> None:
    meeting = Meeting(3)
    specs = [("trainer", 2), ("evaluator", 1), ("trainer", 3)]
    agents = [
        ToyAgent(a_spec(MemoryHandler(meeting, node), role=role, local_world_size=size), succeed)
        for node, (role, size) in enumerate(specs)
    ]
    results = run_all(agents)
    assert all(isinstance(result, RunResult) for result in results), results
    assert agents[0].started == [[(0, 0, 6, 5), (1, 1, 6, 5)]]
    assert agents[1].started == [[(2, 0, 6, 1)]]
    assert agents[2].started == [[(3, 2, 6, 5), (4, 3, 6, 5), (5, 4, 6, 5)]]
    masters = {(a.get_worker_group().master_addr, a.get_worker_group().master_port) for a in agents}
    assert len(masters) == 1


@pytest.mark.parametrize("max_restarts", [0, 2])
def test_n_restarts_allow_n_plus_one_starts(max_restarts: int) -> None:
    handler = MemoryHandler(Meeting(1), 0)
    agent = ToyAgent(a_spec(handler, max_restarts=max_restarts), fail)
    with pytest.raises(WorkerGroupFailureError, match=f"{max_restarts} of {max_restarts} restarts used") as caught:
        agent.run()
    assert len(agent.started) == max_restarts + 1
    assert isinstance(caught.value.get_worker_exceptions()[0], ValueError)
    assert agent.get_worker_group().state is WorkerState.FAILED
    assert handler.meeting.closed
    assert agent.log[-1] == f"stop {max_restarts}"
    assert WorkerGroupFailureException is WorkerGroupFailureError


def test_a_rendezvous_that_takes_a_reason_is_told_why_the_run_is_given_up() -> None:
    told: list[str] = []

    class Handler(MemoryHandler):
        def give_up(self, reason: str) -> None:
            told.append(reason)

    with pytest.raises(WorkerGroupFailureError):
        ToyAgent(a_spec(Handler(Meeting(1), 0), max_restarts=0), fail).run()
    assert told == [
        "the workers of role 'default' failed (no restart is left, 0 of 0 restarts used): rank 0: boom",
    ]


def test_the_budget_is_the_runs_and_not_the_nodes() -> None:
    """Node 0 fails in round 0, node 1 in round 1: with one restart that is one too many."""
    meeting = Meeting(2)

    def script(failing_round: int) -> Callable[[WorkerGroup], MonitorResult]:
        return lambda group: fail(group) if group.round == failing_round else MonitorResult(WorkerState.HEALTHY)

    agents = [
        ToyAgent(a_spec(MemoryHandler(meeting, node), max_restarts=1), script(failing_round=node)) for node in range(2)
    ]
    results = run_all(agents)
    assert isinstance(results[0], ClosedError), "what no worker here caused is another exception"
    assert isinstance(results[1], WorkerGroupFailureError)
    assert [agent.get_worker_group().restarts_used for agent in agents] == [1, 1]
    assert all(agent.log[-1].startswith("stop") for agent in agents)


class PlainHandler:
    """A rendezvous with nothing but what every agent needs, and what the test hands on beside it."""

    def __init__(self, handler: MemoryHandler, *more: str) -> None:
        for name in ("get_run_id", "next_rendezvous", "num_nodes_waiting", "set_closed", "shutdown", *more):
            setattr(self, name, getattr(handler, name))


def test_a_membership_change_costs_no_restart() -> None:
    handler = MemoryHandler(Meeting(1), 0)

    def script(group: WorkerGroup) -> MonitorResult:
        if group.round == 0:
            handler.waiting = 1
            return MonitorResult(WorkerState.HEALTHY)
        return succeed(group)

    agent = ToyAgent(a_spec(PlainHandler(handler), max_restarts=0), script)
    agent.run()
    assert agent.log == ["start 0", "stop 0", "start 1"]
    assert agent.get_worker_group().restarts_used == 0


def test_nobody_is_restarted_for_a_spare_where_the_rendezvous_says_when_a_round_is_over() -> None:
    handler, looks = MemoryHandler(Meeting(1), 0), iter(range(5))

    def script(group: WorkerGroup) -> MonitorResult:
        handler.waiting = 1
        return MonitorResult(WorkerState.HEALTHY) if next(looks, None) is not None else succeed(group)

    agent = ToyAgent(a_spec(PlainHandler(handler, "round_is_over")), script)
    agent.run()
    assert agent.log == ["start 0"]


@pytest.mark.parametrize("has_succeeded", [True, False])
def test_a_run_that_is_closed_in_the_exit_barrier_is_over_where_all_have_succeeded(has_succeeded: bool) -> None:
    """Whatever a cache shows of how many are done; without that word a closed run is an error."""
    meeting = Meeting(2)
    told: list[int] = []

    class Handler(MemoryHandler):
        def report_done(self) -> None:
            told.append(self.round)
            self.set_closed()

        def has_succeeded(self) -> bool:
            return has_succeeded

    def never(group: WorkerGroup) -> MonitorResult:
        return MonitorResult(WorkerState.HEALTHY)

    agents = [ToyAgent(a_spec(Handler(meeting, 0)), succeed), ToyAgent(a_spec(MemoryHandler(meeting, 1)), never)]
    results = run_all(agents)
    assert told == [0]
    assert isinstance(results[0], RunResult if has_succeeded else ClosedError), results


def test_a_failure_that_no_restart_would_help_ends_the_run_at_once() -> None:
    class SyntaxFailure(Exception):
        retryable = False

    def script(group: WorkerGroup) -> MonitorResult:
        return MonitorResult(WorkerState.FAILED, exceptions={0: SyntaxFailure("bad syntax")})

    agent = ToyAgent(a_spec(MemoryHandler(Meeting(1), 0), max_restarts=5), script)
    with pytest.raises(WorkerGroupFailureError, match="not retryable"):
        agent.run()
    assert len(agent.started) == 1


@pytest.mark.parametrize("is_tuple", [None, True, False], ids=["ours", "a tuple", "an object"])
def test_a_late_failure_elsewhere_starts_those_that_were_done_again(is_tuple: bool | None) -> None:
    """Over any rendezvous: rounds are counted where they have no number."""
    meeting = Meeting(2, MemoryRoundStore if is_tuple is None else WaitingStore)
    in_barrier = threading.Event()

    def done_first(group: WorkerGroup) -> MonitorResult:
        in_barrier.set()
        return succeed(group)

    def fails_once_the_other_waits(group: WorkerGroup) -> MonitorResult:
        if group.round == 0:
            assert in_barrier.wait(20)
            return fail(group)
        return succeed(group)

    handlers: list[Any] = [MemoryHandler(meeting, node) for node in range(2)]
    if is_tuple is not None:
        handlers = [TupleHandler(handler, is_tuple=is_tuple) for handler in handlers]
    agents = [ToyAgent(a_spec(handlers[0]), done_first), ToyAgent(a_spec(handlers[1]), fails_once_the_other_waits)]
    results = run_all(agents)
    assert all(isinstance(result, RunResult) for result in results), results
    assert [agent.get_worker_group().round for agent in agents] == [1, 1]
    assert [agent.log for agent in agents] == [["start 0", "stop 0", "start 1"]] * 2
    assert dict(results[1]) == {2: 20, 3: 30}


def test_whatever_goes_wrong_the_workers_are_stopped() -> None:
    def script(group: WorkerGroup) -> MonitorResult:
        raise KeyboardInterrupt

    handler = MemoryHandler(Meeting(1), 0)
    agent = ToyAgent(a_spec(handler), script)
    with pytest.raises(KeyboardInterrupt):
        agent.run()
    assert agent.log == ["start 0", "stop 0"]
    assert agent.get_worker_group().state is WorkerState.FAILED
    assert handler.shut_down == 1


def test_figures_go_to_the_sink() -> None:
    seen: list[tuple[str, float]] = []
    figures = SimpleNamespace(put=lambda *figure: seen.append(figure))
    agent = ToyAgent(a_spec(MemoryHandler(Meeting(1), 0), role="trainer", max_restarts=1), fail, metrics=figures)
    with pytest.raises(WorkerGroupFailureError):
        agent.run()
    left = [value for name, value in seen if name == "workers.trainer.remaining_restarts"]
    assert left == [1, 0]
    names = {name for name, _ in seen}
    assert {f"workers.trainer.{what}" for what in ("healthy", "stopped", "failed")} <= names
    assert {f"workers.trainer.{what}_seconds" for what in ("rendezvous", "start", "stop", "restart")} <= names


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"local_world_size": 0}, "local_world_size=0"),
        ({"local_world_size": -1}, "local_world_size=-1"),
        ({"max_restarts": -1}, "max_restarts=-1"),
        ({"monitor_interval": 0}, "monitor_interval=0"),
        ({"entrypoint": None}, "entrypoint is missing"),
        ({"entrypoint": 3}, "entrypoint=3"),
        ({"entrypoint": "x", "fn": print}, "not both"),
        ({"master_port": 70000}, "master_port=70000"),
        ({"role": ""}, "role is empty"),
        ({"rdzv_handler": None}, "rdzv_handler is missing"),
    ],
)
def test_bad_arguments_are_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        a_spec(MemoryHandler(Meeting(1), 0), **change)


def test_defaults_and_the_older_name_of_a_function() -> None:
    spec = WorkerSpec("trainer", 1, rdzv_handler=MemoryHandler(Meeting(1), 0), fn=succeed)
    assert (spec.max_restarts, spec.monitor_interval) == (100, 5.0)
    assert spec.entrypoint is succeed
    assert spec.get_entrypoint_name() == "succeed"
    entry = Entrypoint(kind=EntryKind.MODULE, target="pkg.train", python="python3")
    assert a_spec(spec.rdzv_handler, entrypoint=entry).get_entrypoint_name() == "python3 -u -m pkg.train"


def test_a_result_is_empty_where_functions_returned_nothing() -> None:
    result = RunResult(WorkerState.SUCCEEDED, {0: None, 1: None})
    assert (len(result), list(result), bool(result)) == (0, [], True)
    assert result[1] is None
    assert RunResult(WorkerState.FAILED).is_failed()


def test_the_error_pickles_with_its_failures() -> None:
    """And takes its arguments as torch's."""
    again = pickle.loads(pickle.dumps(WorkerGroupFailureException("no restart is left", {3: "boom"})))
    assert (str(again), again.get_worker_exceptions()) == ("no restart is left", {3: "boom"})


GROUPS = st.lists(
    st.builds(
        GroupFacts,
        role=st.sampled_from(["a", "b", "c"]),
        local_world_size=st.integers(1, 5),
        restarts_used=st.integers(0, 4),
        failed=st.booleans(),
    ),
    min_size=1,
    max_size=8,
)


@given(GROUPS)
def test_ranks_are_contiguous_over_all_and_over_each_role(groups: list[GroupFacts]) -> None:
    places = [(group.role, *layouts_of(groups, rank)) for rank, group in enumerate(groups)]
    assert [rank for _, layout, _ in places for rank in layout.global_ranks] == list(range(places[0][1].world_size))
    assert len({layout.world_size for _, layout, _ in places}) == 1
    for role in {group.role for group in groups}:
        own = [in_role for other, _, in_role in places if other == role]
        assert [rank for in_role in own for rank in in_role.global_ranks] == list(range(own[0].world_size))


class TorchsNames(ToyAgent):
    """Overrides and calls what torch's documentation of its agent names."""

    def _rendezvous(self, group: WorkerGroup) -> None:
        super()._rendezvous(group)
        self.log.append(f"met {group.group_rank} of {group.group_world_size}")

    def _initialize_workers(self, group: WorkerGroup) -> None:
        self.log.append("initialize")
        super()._initialize_workers(group)

    def _restart_workers(self, group: WorkerGroup) -> None:
        self.log.append(f"restart, {self._remaining_restarts} left")
        super()._restart_workers(group)


def test_a_subclass_overrides_torchs_methods() -> None:
    class Spec(WorkerSpec):
        def __init__(self, *, queue: str, **values: Any) -> None:
            super().__init__(**values)
            self.queue = queue

    spec = Spec(
        queue="long", role=DEFAULT_ROLE, local_world_size=1, entrypoint="train", max_restarts=3,
        rdzv_handler=MemoryHandler(Meeting(1), 0),
    )  # fmt: skip
    agent = TorchsNames(spec, lambda group: fail(group) if group.round == 0 else succeed(group))
    agent._remaining_restarts = 2
    assert agent.run() == {0: 0}
    assert agent.get_worker_group().spec is spec
    assert agent.log == [
        "initialize", "met 0 of 1", "start 0", "restart, 2 left", "stop 0", "initialize", "met 0 of 1", "start 1",
    ]  # fmt: skip
    assert agent._remaining_restarts == 1
