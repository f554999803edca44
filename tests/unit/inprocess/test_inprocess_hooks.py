"""The hooks that come with the restart group, composing them, and what a function is given."""

from __future__ import annotations

import importlib
import socket
import sys
import threading
import typing
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Optional

import pytest

import hpc_elastic.inprocess as inprocess
from hpc_elastic.inprocess import abort
from hpc_elastic.inprocess.tools.inject_fault import Fault, planned
from hpc_elastic.inprocess.wrap import with_value_for

pytestmark = pytest.mark.torch


def adding(number: int) -> Any:
    class Add(inprocess.initialize.Initialize):
        def __call__(self, state: Any) -> Any:
            return [*state, number]

    return Add()


def test_compose_calls_the_last_first_and_is_a_hook() -> None:
    assert importlib.import_module("hpc_elastic.inprocess.compose").Compose is inprocess.Compose
    composed = inprocess.Compose(adding(1), adding(2), adding(3))
    assert isinstance(composed, inprocess.initialize.Initialize)
    assert isinstance(composed, inprocess.Compose)
    assert not isinstance(composed, inprocess.finalize.Finalize)
    assert composed([]) == [3, 2, 1]
    assert inprocess.Compose(composed, adding(4))([]) == [4, 3, 2, 1]


def test_compose_hands_tuples_on_as_arguments() -> None:
    composed = inprocess.Compose(inprocess.rank_assignment.ShiftRanks(), inprocess.rank_assignment.FillGaps())
    state = inprocess.state.State()
    state.rank, state.world_size = 3, 4
    assert isinstance(composed, inprocess.rank_assignment.RankAssignment)
    assert composed(state, {1}) == (state, set())
    assert (state.rank, state.world_size) == (1, 3)


def test_compose_warns_of_a_link_that_returns_nothing_and_refuses_what_it_cannot_call() -> None:
    class Forgetful(inprocess.initialize.Initialize):
        def __call__(self, state: Any) -> Any:
            return None

    with pytest.warns(UserWarning, match="Forgetful.* returned None"):
        inprocess.Compose(lambda state: state, Forgetful())(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert inprocess.Compose(lambda: 1, lambda: None)() == 1
    for arguments in ((), (1,)):
        with pytest.raises(TypeError, match="Compose"):
            inprocess.Compose(*arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "allowed"),
    [
        ({"max_iterations": 3}, True),
        ({"max_iterations": 2}, False),
        ({"min_world_size": 4}, True),
        ({"min_world_size": 5}, False),
        ({"min_active_world_size": 3}, True),
        ({"min_active_world_size": 4}, False),
    ],
)
def test_the_retry_controller(arguments: dict[str, int], allowed: bool) -> None:
    state = inprocess.state.State()
    state.iteration, state.world_size, state.active_world_size = 2, 4, 3
    controller = inprocess.initialize.RetryController(**arguments)
    if allowed:
        assert controller(state) is state
        return
    with pytest.raises(inprocess.exception.RestartAbort) as caught:
        controller(state)
    assert f"{next(iter(arguments))}={next(iter(arguments.values()))}" in str(caught.value)


def test_the_threaded_finalize() -> None:
    seen: list[Any] = []
    make = inprocess.finalize.ThreadedFinalize
    state = inprocess.state.State()
    hook = make(timedelta(seconds=30), lambda *args, **kwargs: seen.append((args, kwargs)), (1,), {"two": 2})
    assert hook(state, None) == (state, None)
    assert seen == [((1,), {"two": 2})]

    def fail() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        make(timedelta(seconds=30), fail)(state)
    stop = threading.Event()
    with pytest.raises(inprocess.exception.TimeoutError, match=r"0\.01 s"):
        make(timedelta(seconds=0.01), stop.wait)(state)
    stop.set()


def test_the_fault_counter_counts_this_ranks_own_faults() -> None:
    state = inprocess.state.State()
    check = inprocess.health_check.FaultCounter(max_rank_faults=1)
    check(state, None)
    check(state, ValueError())
    check(state, None)
    with pytest.raises(inprocess.health_check.FaultCounterExceeded, match="2 faults; max_rank_faults=1"):
        check(state, ValueError())


def test_the_cuda_check_leaves_a_process_without_gpu_alone() -> None:
    state, error = inprocess.state.State(), ValueError()
    assert inprocess.health_check.CudaHealthCheck()(state, error) == (state, error)


@pytest.mark.parametrize(
    ("name", "method"),
    [("ProcessGroupNCCL", "_shutdown"), ("ProcessGroupNCCL", "abort"), ("ProcessGroupNCCL2", "abort")],
)
def test_nccl_is_aborted_by_each_class_that_torch_had_for_it(
    monkeypatch: pytest.MonkeyPatch, name: str, method: str
) -> None:
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    aborted: list[str] = []
    kind = type(name, (), {method: lambda self: aborted.append(name)})

    class Group:
        def __init__(self, backend: object) -> None:
            self.backend = backend

        def _get_backend(self, device: object) -> object:
            if self.backend is None:
                raise RuntimeError("No backend type associated with device type cuda")
            return self.backend

    monkeypatch.setattr(dist, name, kind, raising=False)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed_c10d, name, kind, raising=False)
    groups = [Group(kind()), Group(object()), Group(None), Group(kind())]
    monkeypatch.setattr(type(distributed_c10d._world), "pg_map", dict.fromkeys(groups))
    inprocess.abort._abort_nccl()
    assert aborted == [name, name]


class Given:
    pass


def by_class(one: int, call: Given, two: int = 2) -> None: ...
def by_optional(one: int, call: Optional[Given] = None) -> None: ...  # noqa: UP045 - as users write it
def by_union(one: int, *, call: typing.Union[Given, None] = None) -> None: ...  # noqa: UP007
def by_text(one: int, call: Given | None = None) -> None: ...
def without(one: int, call: Any = None) -> None: ...


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "wanted"),
    [
        (by_class, (1,), {}, ((1, "it"), {})),
        (by_class, (1, "old", 3), {}, ((1, "it", 3), {})),
        (by_class, (1,), {"two": 5}, ((1, "it", 5), {})),
        (by_optional, (1,), {}, ((1, "it"), {})),
        (by_union, (1,), {}, ((1,), {"call": "it"})),
        (by_text, (1,), {}, ((1, "it"), {})),
        (without, (1,), {}, ((1,), {})),
    ],
)
def test_the_function_is_given_its_call(
    function: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any], wanted: Any
) -> None:
    assert with_value_for(Given, function, args, kwargs, "it") == wanted


def test_a_local_annotation_of_text_is_known_by_its_name() -> None:
    class CallWrapper: ...

    def function(call: CallWrapper) -> None: ...

    assert with_value_for(CallWrapper, function, (), {}, "it") == (("it",), {})


def test_faults_are_planned_alike_on_all_ranks() -> None:
    arguments = ((Fault.KILL, Fault.TERM), (1, 3), 2, (0.5, 1.5), 7, 8)
    plan = planned(*arguments)
    assert plan == planned(*arguments)
    assert 1 <= len(plan.ranks) <= 3
    assert min(plan.ranks) >= 2
    assert 0.5 <= plan.delay <= 1.5
    assert planned((Fault.GIL,), 5, 7, 1.0, 0, 8).ranks == (7,)
    assert planned((Fault.GIL,), 5, 9, 1, 0, 8).ranks == ()
    with pytest.raises(ValueError, match="no fault"):
        planned((), 1, 0, 1.0, 0, 8)


def test_a_socket_is_cut_only_while_it_is_the_one_that_is_meant() -> None:
    before = abort.open_sockets()
    one, other = socket.socketpair()
    found = abort.new_sockets(before, abort.open_sockets())
    assert set(found) == {one.fileno(), other.fileno()}
    assert not abort.cut(one.fileno(), "socket:[1]")
    other.send(b"x")
    assert one.recv(1) == b"x"
    assert abort.cut(one.fileno(), found[one.fileno()])
    assert other.recv(1) == b""
    listener = socket.create_server(("127.0.0.1", 0))
    inode = abort.open_sockets()[listener.fileno()]
    assert not abort.cut(listener.fileno(), inode)
    for each in (one, other, listener):
        each.close()
    assert not abort.cut(10**6, "socket:[1]")


def test_ports_of_sockets() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            assert abort.ports(client.fileno()) == (client.getsockname()[1], port)
        assert abort.ports(server.fileno()) == (port, None)
    one, other = socket.socketpair()
    with one, other:
        assert abort.ports(one.fileno()) == (None, None)
    assert abort.ports(10**6) == (None, None)


def test_async_raise_reaches_a_thread_and_names_one_that_is_not_there() -> None:
    found: list[str] = []
    is_running = threading.Event()

    def loop() -> None:
        try:
            while True:
                is_running.set()
        except KeyError:
            found.append("raised")

    thread = threading.Thread(target=loop)
    thread.start()
    is_running.wait(30)
    inprocess.monitor_thread.async_raise(thread.ident or 0, KeyError)
    thread.join(30)
    assert found == ["raised"]
    with pytest.raises(RuntimeError, match="no thread 12345"):
        inprocess.monitor_thread.async_raise(12345, KeyError)


def test_what_a_destructor_swallows_is_raised_again() -> None:
    class Bad:
        def __del__(self) -> None:
            raise KeyError("swallowed")

    before = sys.unraisablehook
    shown: list[Any] = []
    sys.unraisablehook = shown.append
    try:
        with inprocess.monitor_thread.reraise_if_unraisable(KeyError), pytest.raises(KeyError):
            Bad()
            for _ in range(10**9):
                pass
        assert sys.unraisablehook == shown.append
    finally:
        sys.unraisablehook = before
    assert len(shown) == 1
