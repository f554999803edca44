"""Whole calls of one rank of one, with a stand-in for the monitor process: the order of everything."""

from __future__ import annotations

import copy
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

import hpc_elastic.inprocess as inprocess
from hpc_elastic.inprocess import progress_watchdog, wrap
from hpc_elastic.inprocess.progress_watchdog import SIGNAL, Interruptible, RankShouldRestart, SignalHandler
from hpc_elastic.inprocess.state import HealthCheckError, RestartAbort, RestartError
from hpc_elastic.inprocess.store import StoreMixin

pytestmark = pytest.mark.torch


class HashStore(StoreMixin, dist.HashStore):  # type: ignore[misc, unused-ignore]
    pass


class StandIn:
    """A monitor process that is none, and remembers what it was told."""

    places: list[Any] = []  # noqa: RUF012

    def __init__(self, **_: Any) -> None:
        StandIn.places = []

    def start(self) -> None: ...
    def shutdown(self) -> None: ...

    def start_iteration(self, place: Any) -> None:
        StandIn.places.append(place)


@pytest.fixture(autouse=True)
def no_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(wrap, "MonitorProcess", StandIn)
    threads = threading.active_count()
    handler = signal.getsignal(SIGNAL)
    yield
    assert threading.active_count() == threads
    assert signal.getsignal(SIGNAL) == handler
    assert gc.get_freeze_count() == 0


def wrapper(**arguments: Any) -> inprocess.Wrapper:
    return inprocess.Wrapper(store_factory=HashStore, **arguments)


def hook(kind: type, body: Callable[..., Any]) -> Any:
    """One of this kind that does `body`."""
    return type(kind)("Hook", (kind,), {"__call__": lambda _, *arguments: body(*arguments)})()


class Script:
    """All hooks at once: they note their calls, and raise what they are told to, once."""

    def __init__(self, **raising: BaseException) -> None:
        self.seen: list[str] = []
        self.raising = dict(raising)

    def note(self, name: str, detail: object = "") -> None:
        self.seen.append(f"{name} {detail}".strip())
        error = self.raising.pop(name, None)
        if error is not None:
            raise error

    def function(self, call: inprocess.CallWrapper) -> int:
        self.note("function", call.iteration)
        return call.iteration

    def arguments(self) -> dict[str, Any]:
        def noting(kind: type, facts: Callable[..., tuple[str, object]]) -> Any:
            def call(state: Any, *rest: Any) -> Any:
                self.note(*facts(state, *rest))
                return (state, *rest) if rest else state

            return hook(kind, call)

        def assign(state: Any, terminated_ranks: Any) -> Any:
            self.note("assign", sorted(terminated_ranks))
            return inprocess.rank_assignment.ShiftRanks()(state, terminated_ranks)

        def checked(state: Any, error: Exception | None) -> tuple[str, object]:
            is_before = state.status is inprocess.state.Status.ACTIVE
            return "check_before" if is_before else "check_after", repr(error)

        return {
            "initialize": noting(inprocess.initialize.Initialize, lambda state: ("initialize", state.iteration)),
            "abort": noting(inprocess.abort.Abort, lambda state: ("abort", state.status.name)),
            "finalize": noting(inprocess.finalize.Finalize, lambda state, error: ("finalize", repr(error))),
            "health_check": noting(inprocess.health_check.HealthCheck, checked),
            "rank_assignment": hook(inprocess.rank_assignment.RankAssignment, assign),
            "rank_filter": noting(inprocess.rank_filter.RankFilter, lambda state: ("filter", state.active_world_size)),
        }


ITERATION = ["assign []", "filter 1"]


def test_a_call_without_a_fault_returns_the_functions_value() -> None:
    script = Script()

    @wrapper(**script.arguments())
    def function(one: int, call: inprocess.CallWrapper, *, two: int) -> Any:
        script.note("function", call.iteration)
        return one + two, os.environ["RANK"], os.environ["WORLD_SIZE"]

    assert function(1, two=2) == (3, "0", "1")
    assert script.seen == [*ITERATION, "initialize 0", "check_before None", "function 0"]
    assert [(place.iteration, place.rank, place.count) for place in StandIn.places] == [(0, 0, 1)]


def test_an_exception_restarts_in_the_contracts_order() -> None:
    error = ValueError("x")
    script = Script(function=error)
    assert wrapper(**script.arguments())(script.function)() == 1
    first = [*ITERATION, "initialize 0", "check_before None", "function 0"]
    recovery = ["abort ABORTING", f"finalize {error!r}", f"check_after {error!r}"]
    assert script.seen == [*first, *recovery, *ITERATION, "initialize 1", "check_before None", "function 1"]
    assert [place.iteration for place in StandIn.places] == [0, 1]


def iteration(call: inprocess.CallWrapper) -> int:
    return call.iteration


@pytest.mark.parametrize("place", ["initialize", "check_before"])
def test_what_fails_before_the_function_restarts_too(place: str) -> None:
    script = Script(**{place: ValueError("early")})
    assert wrapper(**script.arguments())(iteration)() == 1
    assert "finalize ValueError('early')" in script.seen


def test_a_failed_abort_does_not_end_the_restart() -> None:
    script = Script(function=ValueError(), abort=KeyError())
    assert wrapper(**script.arguments())(script.function)() == 1


@pytest.mark.parametrize(
    ("raising", "kind"),
    [
        ({"function": KeyboardInterrupt()}, KeyboardInterrupt),
        ({"function": RestartAbort("enough")}, RestartAbort),
        ({"initialize": RestartAbort("enough")}, RestartAbort),
        ({"function": ValueError(), "finalize": KeyError()}, KeyError),
        ({"function": ValueError(), "check_after": KeyError()}, HealthCheckError),
    ],
)
def test_what_ends_a_rank_is_raised_as_it_is(raising: dict[str, BaseException], kind: type[BaseException]) -> None:
    script = Script(**raising)
    last = [*raising.values()][-1]
    with pytest.raises(kind) as caught:
        wrapper(**script.arguments())(script.function)()
    assert last is (caught.value.__cause__ if kind is HealthCheckError else caught.value)


def test_what_fails_because_of_the_abort_is_no_fault_of_this_rank() -> None:
    is_aborted = threading.Event()
    script = Script()
    hooks = script.arguments()
    base: list[Any] = []

    def start(state: Any) -> Any:
        base.append(state.store)
        return state

    def stop(state: Any) -> Any:
        part = progress_watchdog.aborted()
        assert part is not None
        # As AbortTorchDistributed does: told to leave, then cut.
        part._wanted = "test"
        is_aborted.set()
        part.wait_until_left(30)
        return state

    hooks |= {"initialize": hook(inprocess.initialize.Initialize, start), "abort": hook(inprocess.abort.Abort, stop)}

    @wrapper(**hooks)
    def function(call: inprocess.CallWrapper) -> int:
        if call.iteration == 0:
            base[-1].record_interrupted()
            while not is_aborted.is_set():
                pass
            raise ConnectionError("closed by peer")
        return call.iteration

    assert function() == 1
    assert "finalize None" in script.seen
    assert base[0].get_interruption_records() == []


def test_what_initialize_returns_takes_the_states_place() -> None:
    given: list[Any] = []

    def start(state: Any) -> Any:
        given.append(copy.copy(state))
        return given[-1]

    def check(state: Any, error: Exception | None) -> Any:
        assert state is given[-1]
        return state, error

    started, checked = hook(inprocess.initialize.Initialize, start), hook(inprocess.health_check.HealthCheck, check)
    assert wrapper(initialize=started, health_check=checked)(lambda: len(given))() == 1


def test_terminated_ranks_that_are_not_absorbed_end_the_rank() -> None:
    leave = hook(inprocess.rank_assignment.RankAssignment, lambda state, _: (state, {3}))
    with pytest.raises(RestartError, match="left terminated ranks: 3"):
        wrapper(rank_assignment=leave)(lambda: None)()


def test_calls_can_be_made_again_and_all_hooks_may_be_none() -> None:
    @wrapper(abort=None)
    def function(call: inprocess.CallWrapper) -> int:
        if call.iteration < 2:
            raise ValueError
        return call.iteration

    assert [function(), function()] == [2, 2]


def test_a_default_group_before_the_call_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    with pytest.raises(ValueError, match="makes its own process group"):
        wrapper()(lambda: None)()


def test_other_threads_are_refused() -> None:
    found: list[str] = []

    def call() -> None:
        try:
            wrapper()(lambda: None)()
        except ValueError as error:
            found.append(str(error))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join(30)
    assert "main thread alone" in found[0]


def test_a_rank_that_shows_no_progress_is_interrupted_in_its_sleep() -> None:
    started = time.monotonic()

    @wrapper(
        soft_timeout=timedelta(seconds=0.05),
        progress_watchdog_interval=timedelta(seconds=0.01),
        monitor_thread_interval=timedelta(seconds=0.01),
    )
    def function(call: inprocess.CallWrapper) -> int:
        if call.iteration == 0:
            time.sleep(1000)
        return call.iteration

    assert function() == 1
    assert time.monotonic() - started < 60


def test_abort_waits_for_an_atomic_part_and_nobody_enters_one_while_it_runs() -> None:
    order: list[str] = []
    is_aborting = threading.Event()

    base: list[Any] = []

    def start(state: Any) -> Any:
        base.append(state.store.base_store)
        return state

    def stop(state: Any) -> Any:
        order.append("abort")
        is_aborting.set()
        time.sleep(0.05)
        order.append("abort ends")
        return state

    def function(call: inprocess.CallWrapper) -> int:
        if call.iteration:
            return call.iteration
        store = inprocess.store.PrefixStore(0, base[-1])
        with call.atomic(), call.atomic():
            store.record_interrupted()
            assert not is_aborting.wait(0.05)
            order.append("atomic ends")
        is_aborting.wait(30)
        with call.atomic():
            order.append("entered")
        raise AssertionError

    started, stopped = hook(inprocess.initialize.Initialize, start), hook(inprocess.abort.Abort, stop)
    assert wrapper(abort=stopped, initialize=started)(function)() == 1
    assert order == ["atomic ends", "abort", "abort ends"]


def test_the_signal_raises_inside_the_part_alone() -> None:
    part = Interruptible()
    main = threading.main_thread().ident or 0
    with SignalHandler():
        part.interrupt("too early")
        signal.pthread_kill(main, SIGNAL)
        with pytest.raises(RankShouldRestart) as caught:
            part.run(lambda: signal.pthread_kill(main, SIGNAL))
        assert caught.value.owner is part
        part.interrupt("too late")
        signal.pthread_kill(main, SIGNAL)
    part.close()


def test_a_part_that_was_left_is_not_interrupted_although_it_has_not_said_so_yet() -> None:
    part = Interruptible()
    part.interrupt("why")
    # As if the handler came between the end of the part and its `finally`.
    part._frame = (lambda: sys._getframe())()
    part.raise_if_inside(sys._getframe())
    part.close()


def test_what_is_on_its_way_out_is_left_alone_for_a_while() -> None:
    now = [0.0]
    part = Interruptible(clock=lambda: now[0])
    main = threading.main_thread().ident or 0
    seen: list[str] = []

    def body() -> None:
        try:
            signal.pthread_kill(main, SIGNAL)
        finally:
            signal.pthread_kill(main, SIGNAL)
            seen.append("cleaned up")
            now[0] = 60
            try:
                signal.pthread_kill(main, SIGNAL)
            except RankShouldRestart:
                seen.append("raised again")
                raise

    with SignalHandler():
        part.interrupt("why")
        with pytest.raises(RankShouldRestart):
            part.run(body)
    assert seen == ["cleaned up", "raised again"]
    part.close()
