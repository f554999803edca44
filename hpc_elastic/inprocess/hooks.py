"""The hooks that a user gives the wrapper, except `abort`, and their composition.

Order in a restart: `Finalize` brings a process back into a state in which the function can start again,
`HealthCheck` decides whether a rank continues, `RankAssignment` gives the ranks that are left their new numbers,
`RankFilter` decides which of them call the function and which wait as spares, and `Initialize` runs first in every
iteration. ``Compose(a, b, c)(x)`` is ``a(b(c(x)))``.
"""

from __future__ import annotations

import abc
import functools
import inspect
import itertools
import os
import threading
import warnings
from bisect import bisect_left
from collections.abc import Callable, Mapping, Set
from datetime import timedelta
from typing import Any, ClassVar

import torch

from hpc_elastic.inprocess.state import RestartAbort, RestartError, State, Status, TimeoutError


class Initialize(abc.ABC):
    """Runs on every rank, spares included, before each call of the function.

    An ``Exception`` restarts all ranks; a ``BaseException`` ends this one.
    """

    @abc.abstractmethod
    def __call__(self, state: State) -> State:
        """The returned state takes the place of `state`."""


class RetryController(Initialize):
    """Gives up when there were enough iterations, or when too few ranks are left."""

    def __init__(
        self, max_iterations: int | None = None, min_world_size: int = 1, min_active_world_size: int = 1
    ) -> None:
        """Args:
        max_iterations: How many times the function may start, the first included.
        min_world_size: Ranks that must be there, spares included.
        min_active_world_size: Ranks that must call the function.
        """
        self.max_iterations = max_iterations
        self.min_world_size = min_world_size
        self.min_active_world_size = min_active_world_size

    def __call__(self, state: State) -> State:
        """Raises: RestartAbort: a limit is reached."""
        why = None
        if self.max_iterations is not None and state.iteration >= self.max_iterations:
            why = f"iteration {state.iteration} with max_iterations={self.max_iterations}"
        elif state.world_size < self.min_world_size:
            why = f"world_size={state.world_size} with min_world_size={self.min_world_size}"
        elif state.active_world_size < self.min_active_world_size:
            why = f"active_world_size={state.active_world_size} with min_active_world_size={self.min_active_world_size}"
        if why is not None:
            raise RestartAbort(f"no further restart within the processes: {why}")
        return state


class Finalize(abc.ABC):
    """Runs on every rank after a fault and the abort, before the health check. If it raises, this rank ends."""

    @abc.abstractmethod
    def __call__(self, state: State, train_ex: Exception | None = None) -> tuple[State, Exception | None]:
        """`train_ex` is the exception of the function on this rank; None where the fault was elsewhere."""


class ThreadedFinalize(Finalize):
    """Calls a function in its own thread, and waits no longer than `timeout`; then this rank ends."""

    def __init__(
        self,
        timeout: timedelta,
        fn: Callable[..., Any],
        args: tuple[Any, ...] | None = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.timeout = timeout
        self.fn = fn
        self.args = args or ()
        self.kwargs = dict(kwargs or {})

    def __call__(self, state: State, train_ex: Exception | None = None) -> tuple[State, Exception | None]:
        """Raises TimeoutError: `fn` has not returned in time, and its thread is left alone; or its exception."""
        call = functools.partial(self.fn, *self.args, **self.kwargs)
        name = f"{type(self).__name__}-{state.rank}"
        _within(self.timeout, call, name=name, late=f"finalize: {self.fn!r} has not returned")
        return state, train_ex


def _within(timeout: timedelta, action: Callable[[], object], *, name: str, late: str) -> None:
    raised: list[BaseException] = []

    def call() -> None:
        try:
            action()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=call, name=name, daemon=True)
    thread.start()
    thread.join(timeout.total_seconds())
    if thread.is_alive():
        raise TimeoutError(f"{late} after {timeout.total_seconds():g} s")
    if raised:
        raise raised.pop()


class HealthCheck(abc.ABC):
    """Runs on every rank before the function (what it raises restarts all) and after a fault (then this rank ends)."""

    @abc.abstractmethod
    def __call__(self, state: State, train_ex: Exception | None = None) -> tuple[State, Exception | None]:
        """`train_ex` is the exception of the function on this rank; None before it, and after a fault elsewhere."""


class CudaHealthCheck(HealthCheck):
    """Waits for this rank's GPU: a context that an error has spoilt raises it, one that hangs takes too long.

    The device is ``LOCAL_RANK``'s, or the current one. Nothing where this process has not used a GPU.
    """

    def __init__(self, timeout: timedelta = timedelta(seconds=30)) -> None:
        self.timeout = timeout

    def __call__(self, state: State, train_ex: Exception | None = None) -> tuple[State, Exception | None]:
        """Raises TimeoutError: the GPU has not answered in `timeout`; or RuntimeError: CUDA's error."""
        if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
            return state, train_ex
        local_rank = os.environ.get("LOCAL_RANK")
        device = torch.device("cuda", torch.cuda.current_device() if local_rank is None else int(local_rank))
        wait = functools.partial(torch.cuda.synchronize, device)
        _within(self.timeout, wait, name=f"{type(self).__name__}-{state.rank}", late=f"{device} has not answered")
        torch.cuda.synchronize(device)
        return state, train_ex


class FaultCounterExceeded(RestartError):
    """This process caused more faults than it may."""


class FaultCounter(HealthCheck):
    """Counts the faults that this process itself caused: exceptions of the function, `initialize`, health check."""

    def __init__(self, max_rank_faults: int | None = None) -> None:
        self.max_rank_faults = max_rank_faults
        self.faults_count = 0

    def __call__(self, state: State, train_ex: Exception | None = None) -> tuple[State, Exception | None]:
        """Raises: FaultCounterExceeded: this was one too many."""
        if train_ex is not None:
            self.faults_count += 1
            if self.max_rank_faults is not None and self.faults_count > self.max_rank_faults:
                raise FaultCounterExceeded(
                    f"rank {state.rank} has caused {self.faults_count} faults; max_rank_faults={self.max_rank_faults}"
                )
        return state, train_ex


class RankFilter(abc.ABC):
    """Runs on every rank after each assignment. Spares take over in the next iteration, after ranks are gone."""

    @abc.abstractmethod
    def __call__(self, state: State) -> State:
        """Set ``active_world_size`` and ``status``; the returned state takes the place of `state`."""


class MaxActiveWorldSize(RankFilter):
    """Lets at most `max_active_world_size` ranks call the function; None is no limit."""

    def __init__(self, max_active_world_size: int | None) -> None:
        self.max_active_world_size = max_active_world_size

    def __call__(self, state: State) -> State:
        limit = self.max_active_world_size
        return _narrow(state, state.active_world_size if limit is None else min(limit, state.active_world_size))


class WorldSizeDivisibleBy(RankFilter):
    """The number of ranks that call the function is a multiple of `divisor`, or 0."""

    def __init__(self, divisor: int = 1) -> None:
        self.divisor = divisor

    def __call__(self, state: State) -> State:
        return _narrow(state, state.active_world_size - state.active_world_size % self.divisor)


def _narrow(state: State, active: int) -> State:
    state.active_world_size = active
    state.status = Status.ACTIVE if state.rank < active else Status.INACTIVE
    return state


class Compose:
    """Hooks in a chain, which is itself a hook: an instance of the nearest class that all its parts have in common. The
    last one is called first. A tuple that it returns is the next one's arguments; a hook that takes none gets none."""

    instances: tuple[Callable[..., Any], ...]

    def __new__(cls, *instances: Callable[..., Any]) -> Compose:
        """Raises: TypeError: there are none, or one can't be called."""
        if not instances:
            raise TypeError("Compose: there is nothing to compose")
        for instance in instances:
            if not callable(instance):
                raise TypeError(f"Compose: {instance!r} can't be called")
        ancestor = _nearest_ancestor(instances)
        bases: tuple[type, ...] = (Compose,) if ancestor is object else (Compose, ancestor)
        if issubclass(ancestor, Compose):
            bases = (ancestor,)
        # A hook's base class is abstract, and Compose has the call that it lacks.
        made = type("Compose", bases, {"__new__": object.__new__, "__init__": object.__init__})()
        made.instances = instances
        return made  # type: ignore[no-any-return]

    def __call__(self, *arguments: Any) -> Any:
        """Warns UserWarning: a link had arguments and returned None: the next one gets that None."""
        result: Any = None
        for instance in reversed(self.instances):
            result = instance(*arguments)
            if result is None and any(argument is not None for argument in arguments):
                warnings.warn(f"Compose: {instance!r} returned None, which breaks the chain", stacklevel=2)
            arguments = result if isinstance(result, tuple) else (result,)
            if not isinstance(result, tuple):
                try:
                    arguments = (result,) if inspect.signature(instance).parameters else ()
                except (TypeError, ValueError):
                    pass  # written in C
        return result


def _nearest_ancestor(instances: tuple[object, ...]) -> type:
    shared = set(type(instances[0]).__mro__).intersection(*(type(other).__mro__ for other in instances[1:]))
    found = next(each for each in type(instances[0]).__mro__ if each in shared)
    try:
        type("Probe", (found,), {})
    except TypeError:
        return object  # functions: no class can inherit from theirs
    return found


class RankDiscarded(RestartError):
    """The others do not need this rank any more, or take it for dead."""


class RankAssignment(abc.ABC):
    """Runs on every rank that is left: once as the call begins, with no terminated ranks, then after each fault.

    All must come to the same world size, and to ranks from 0 without gaps.
    """

    @abc.abstractmethod
    def __call__(self, state: State, terminated_ranks: Set[int]) -> tuple[State, Set[int]]:
        """Args:
            state: Its rank and world size are those of the iteration that ended.
            terminated_ranks: In that iteration's numbers, the same on every rank.

        Returns:
            The state, with new rank and world size, and the terminated ranks that it still counts: a set that is not
            empty ends this rank with `RestartError`.
        """


def filled_gaps(rank: int, world_size: int, terminated: Set[int]) -> int:
    """The new number of `rank`: the last ranks move into the gaps, in order; all others keep theirs."""
    left = world_size - len(terminated)
    if rank < left:
        return rank
    healthy_before = rank - left - sum(left <= each < rank for each in terminated)
    return sorted(terminated)[healthy_before]


def shifted(rank: int, terminated: Set[int]) -> int:
    """The new number of `rank`: all close up, in order."""
    return rank - bisect_left(sorted(terminated), rank)


class FillGaps(RankAssignment):
    """The last ranks take the places of those that are gone; most keep their numbers.

    ``0 X 2 3 X X 6 7`` becomes ``0 6 2 3 7``.
    """

    def __call__(self, state: State, terminated_ranks: Set[int]) -> tuple[State, Set[int]]:
        """Raises: RankDiscarded: this rank is one of `terminated_ranks`."""
        _check_alive(state, terminated_ranks)
        state.rank = filled_gaps(state.rank, state.world_size, terminated_ranks)
        state.world_size -= len(terminated_ranks)
        return state, set()


class ShiftRanks(RankAssignment):
    """All close up and keep their order: ``0 X 2 3 X X 6 7`` becomes ``0 2 3 6 7``."""

    def __call__(self, state: State, terminated_ranks: Set[int]) -> tuple[State, Set[int]]:
        """Raises: RankDiscarded: this rank is one of `terminated_ranks`."""
        _check_alive(state, terminated_ranks)
        state.rank = shifted(state.rank, terminated_ranks)
        state.world_size -= len(terminated_ranks)
        return state, set()


class FilterGroupedByKey(RankAssignment):
    """Ranks with the same key stay or leave together: all of a node, for instance.

    It counts each key's ranks that are alive, and adds those whose count does not satisfy `condition` to the terminated
    ones. Another assignment, which discards them, comes after it: ``Compose(ShiftRanks(), FilterGroupedByKey(…))``.
    """

    instance_count: ClassVar[itertools.count[int]] = itertools.count()

    def __init__(
        self,
        key_or_fn: str | Callable[[int, int], str],
        condition: Callable[[int], bool],
        timeout: timedelta = timedelta(seconds=60),
    ) -> None:
        """Args:
        key_or_fn: This rank's key, or a function that gives it for rank and world size.
        condition: Decides from a key's number of ranks that are alive whether they stay.
        timeout: Limit for all ranks to publish their key.
        """
        self.key_or_fn = key_or_fn
        self.condition = condition
        self.timeout = timeout
        self.name = f"{type(self).__name__}_{next(self.instance_count)}"

    def __call__(self, state: State, terminated_ranks: Set[int]) -> tuple[State, Set[int]]:
        """Raises: BarrierTimeout: a rank has not published its key in time."""
        if state.rank in terminated_ranks:
            return state, terminated_ranks
        key = self.key_or_fn(state.rank, state.world_size) if callable(self.key_or_fn) else self.key_or_fn
        alive = state.world_size - len(terminated_ranks)
        # Iterations share the base store before the first and after the last: the call is part of the name.
        store, name = state.store, f"{self.name}/{state.iteration}"
        # One list for all: a key each would cost a round trip each.
        store.append_item(f"{name}/keys", f"{state.rank}={str(key).encode().hex()}")
        store.barrier(rank=state.rank, group_name=name, rendezvous_count=alive, timeout=self.timeout)
        keys = {}
        for item in store.items(f"{name}/keys"):
            who, _, raw = item.partition("=")
            keys[int(who)] = bytes.fromhex(raw).decode()
        return state, set(terminated_ranks) | grouped_out(keys, self.condition)


FilterCountGroupedByKey = FilterGroupedByKey
"""Its name in NVIDIA's 0.4."""


class ActivateAllRanks(RankAssignment):
    """NVIDIA's 0.4 needs it in a ``Compose``; here all ranks are active after every assignment."""

    def __call__(self, state: State, terminated_ranks: Set[int]) -> tuple[State, Set[int]]:
        return state, terminated_ranks


def grouped_out(keys: dict[int, str], condition: Callable[[int], bool]) -> set[int]:
    groups: dict[str, list[int]] = {}
    for rank, key in keys.items():
        groups.setdefault(key, []).append(rank)
    return {rank for ranks in groups.values() if not condition(len(ranks)) for rank in ranks}


def _check_alive(state: State, terminated_ranks: Set[int]) -> None:
    if state.rank in terminated_ranks:
        shown = ", ".join(map(str, sorted(terminated_ranks)))
        raise RankDiscarded(f"rank {state.rank} of {state.world_size} is discarded; terminated ranks: {shown}")
