"""Every public name is where users of NVIDIA's extension 0.2 look for it, with the same arguments and defaults."""

from __future__ import annotations

import importlib
import inspect
import pickle
from datetime import timedelta
from operator import attrgetter
from typing import Any

import pytest

import hpc_elastic.inprocess as inprocess
from hpc_elastic.inprocess.state import HealthCheckError, InternalError, RestartAbort, RestartError

pytestmark = pytest.mark.torch

NAMES = {
    "": "Wrapper CallWrapper Compose",
    "abort": "Abort AbortTorchDistributed",
    "attribution": "Interruption InterruptionRecord",
    "exception": "RestartError RestartAbort HealthCheckError InternalError TimeoutError",
    "finalize": "Finalize ThreadedFinalize",
    "health_check": "HealthCheck CudaHealthCheck FaultCounter FaultCounterExceeded",
    "initialize": "Initialize RetryController",
    "rank_assignment": "RankAssignment RankDiscarded FillGaps ShiftRanks FilterGroupedByKey",
    "rank_filter": "RankFilter MaxActiveWorldSize WorldSizeDivisibleBy",
    "state": "State Status",
    "store": "StoreMixin TCPStore FileStore PrefixStore BarrierError BarrierTimeout BarrierOverflow SharedFileStore",
    "monitor_thread": "MonitorThread RankShouldRestart async_raise reraise_if_unraisable",
    "monitor_process": "MonitorProcess",
    "progress_watchdog": "ProgressWatchdog",
    "tools.inject_fault": "Fault inject_fault",
}


@pytest.mark.parametrize("module", NAMES)
def test_names(module: str) -> None:
    found = importlib.import_module(".".join(filter(None, ("hpc_elastic.inprocess", module))))
    assert [name for name in NAMES[module].split() if not hasattr(found, name)] == []
    assert not module or attrgetter(module)(inprocess) is found, "submodules and tools come with the package"


NONE = inspect.Parameter.empty


def defaults(function: Any) -> dict[str, Any]:
    return {name: parameter.default for name, parameter in inspect.signature(function).parameters.items()}


def test_the_wrappers_arguments_and_defaults() -> None:
    found = defaults(inprocess.Wrapper)
    assert isinstance(found.pop("abort"), inprocess.abort.AbortTorchDistributed)
    assert isinstance(found.pop("rank_assignment"), inprocess.rank_assignment.ShiftRanks)
    assert found == {
        "store_factory": inprocess.store.TCPStore,
        "store_kwargs": None,
        "initialize": None,
        "finalize": None,
        "health_check": None,
        "rank_filter": None,
        "monitor_thread_interval": timedelta(seconds=1),
        "monitor_process_interval": timedelta(seconds=1),
        "progress_watchdog_interval": timedelta(seconds=1),
        "soft_timeout": timedelta(seconds=60),
        "hard_timeout": timedelta(seconds=90),
        "heartbeat_timeout": timedelta(seconds=30),
        "barrier_timeout": timedelta(seconds=120),
        "completion_timeout": timedelta(seconds=120),
        "last_call_wait": timedelta(seconds=1),
        "termination_grace_time": timedelta(seconds=5),
        "monitor_process_logfile": None,
        "enabled": True,
    }
    kinds = {each.kind for each in inspect.signature(inprocess.Wrapper).parameters.values()}
    assert kinds == {inspect.Parameter.KEYWORD_ONLY}


@pytest.mark.parametrize(
    ("function", "wanted"),
    [
        ("initialize.RetryController", {"max_iterations": None, "min_world_size": 1, "min_active_world_size": 1}),
        ("health_check.CudaHealthCheck", {"timeout": timedelta(seconds=30)}),
        ("health_check.FaultCounter", {"max_rank_faults": None}),
        ("rank_filter.WorldSizeDivisibleBy", {"divisor": 1}),
        ("rank_filter.MaxActiveWorldSize", {"max_active_world_size": NONE}),
        (
            "rank_assignment.FilterGroupedByKey",
            {"key_or_fn": NONE, "condition": NONE, "timeout": timedelta(seconds=60)},
        ),
        ("finalize.ThreadedFinalize", {"timeout": NONE, "fn": NONE, "args": (), "kwargs": None}),
    ],
)
def test_the_hooks_arguments_and_defaults(function: str, wanted: dict[str, Any]) -> None:
    assert defaults(attrgetter(function)(inprocess)) == wanted


def test_values_of_the_enumerations() -> None:
    assert [each.name for each in inprocess.attribution.Interruption] == [
        "EXCEPTION", "BASE_EXCEPTION", "SOFT_TIMEOUT", "HARD_TIMEOUT", "TERMINATED", "UNRESPONSIVE",
        "MONITOR_PROCESS_EXCEPTION",
    ]  # fmt: skip
    statuses = [each.name for each in inprocess.state.Status]
    assert statuses == ["INITIALIZED", "ACTIVE", "INACTIVE", "ABORTING", "ABORTED"]


def test_what_ends_a_rank_is_no_exception_where_it_must_pass_by_except_exception() -> None:
    assert not issubclass(RestartAbort, Exception)
    assert not issubclass(inprocess.monitor_thread.RankShouldRestart, Exception)
    assert issubclass(HealthCheckError, RestartError)
    assert issubclass(InternalError, RestartError)
    assert issubclass(inprocess.store.BarrierTimeout, inprocess.store.BarrierError)
    assert issubclass(inprocess.store.BarrierError, RestartError)


def test_errors_pickle() -> None:
    for kind in (RestartAbort, RestartError, HealthCheckError, InternalError, inprocess.store.BarrierTimeout):
        copy = pickle.loads(pickle.dumps(kind("why")))
        assert (type(copy), str(copy)) == (kind, "why")


def test_records_are_read_back_and_put_in_words() -> None:
    Interruption, Record = inprocess.attribution.Interruption, inprocess.attribution.InterruptionRecord
    records = [Record(2, Interruption.EXCEPTION), Record(0, Interruption.EXCEPTION), Record(1, Interruption.TERMINATED)]
    assert [Record.from_str(str(record)) for record in records] == records
    words = inprocess.attribution.format_interruption_records(records)
    assert words == "EXCEPTION on ranks 0, 2; TERMINATED on rank 1"
    with pytest.raises(ValueError, match="nonsense"):
        Record.from_str("nonsense")


STORE_METHODS = {
    **{
        f"{name}_barrier": "rank rendezvous_count timeout"
        for name in ("initial", "iteration", "completion", "termination")
    },
    "set_initial_rank": "rank initial_rank",
    "get_initial_rank": "rank",
    "record_completed": "",
    "is_any_rank_completed": "",
    "record_interrupted": "record",
    "record_terminated_rank": "rank",
    "get_terminated_ranks": "",
    "record_base_terminated_rank": "rank",
    "get_base_terminated_count": "",
}


@pytest.mark.parametrize("name", STORE_METHODS)
def test_the_stores_methods_and_their_arguments(name: str) -> None:
    store = inprocess.store
    for kind in (store.StoreMixin, store.TCPStore, store.FileStore, store.PrefixStore, store.SharedFileStore):
        found = [each for each in inspect.signature(getattr(kind, name)).parameters if each != "self"]
        assert [each for each in STORE_METHODS[name].split() if each not in found] == [], kind


def test_torchs_own_barrier_does_not_come_before_ours() -> None:
    store = inprocess.store
    for kind in (store.TCPStore, store.FileStore, store.PrefixStore, store.SharedFileStore):
        assert kind.barrier is store.StoreMixin.barrier, kind
        assert isinstance(kind.critical_ranks, property)


def test_what_a_state_and_a_call_have() -> None:
    state = inprocess.state.State()
    assert vars(state).keys() == {
        "rank", "world_size", "active_world_size", "initial_rank", "initial_world_size", "iteration", "status",
    }  # fmt: skip
    for name in ("activate_all_ranks", "set_distributed_vars", "advance"):
        assert callable(getattr(state, name))
    for name in ("iteration", "ping", "atomic"):
        assert hasattr(inprocess.CallWrapper, name)


@pytest.mark.parametrize("name", ["Mode", "FrozenState", "Tree", "Layer", "completion", "terminate"])
def test_what_0_4_added_is_not_there(name: str) -> None:
    modules = [inprocess, inprocess.state, inprocess.rank_assignment]
    assert not any(hasattr(module, name) for module in modules)
    if name in ("completion", "terminate"):
        with pytest.raises(TypeError):
            inprocess.Wrapper(**{name: None})


def test_what_is_cheap_of_0_4() -> None:
    hooks = inprocess.rank_assignment
    assert hooks.FilterCountGroupedByKey is hooks.FilterGroupedByKey
    state = inprocess.state.State.from_env()
    state.world_size = 4
    chain: Any = inprocess.Compose(hooks.ActivateAllRanks(), hooks.ShiftRanks())
    assert isinstance(chain, hooks.RankAssignment)
    after, left = chain(state, {3})
    assert (after.rank, after.world_size, left) == (0, 3, set())
