"""``Wrapper``, the decorator, and ``CallWrapper``, one call of what it decorates."""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import itertools
import os
import threading
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch.distributed as dist
from msgspec import Struct
from torch.distributed import distributed_c10d

from hpc_elastic.inprocess.abort import Abort, AbortTorchDistributed, ledger
from hpc_elastic.inprocess.hooks import (
    Compose,
    Finalize,
    HealthCheck,
    Initialize,
    RankAssignment,
    RankFilter,
    ShiftRanks,
)
from hpc_elastic.inprocess.iterations import Iterations, Rank
from hpc_elastic.inprocess.monitor_process import MonitorProcess, Unplaced
from hpc_elastic.inprocess.progress_watchdog import ProgressPage, ProgressWatchdog, SignalHandler
from hpc_elastic.inprocess.replacement import Admission, Admissions, AgentLink, ReplacementProcess
from hpc_elastic.inprocess.state import State
from hpc_elastic.inprocess.store import PrefixStore, StoreMixin, TCPStore, detect_silence, read_value
from hpc_elastic.worker_api.records import RestartGroupEvent

Function = TypeVar("Function", bound=Callable[..., Any])

_CALL = "call_of_now"
"""Key in the restart group's store: the name of the outermost call that began last."""

_open: list[CallWrapper] = []
_outermost = itertools.count()
"""Numbers the calls that are in no other. All ranks make the same calls in the same order."""
LESS_THAN = (
    ("soft_timeout", "hard_timeout"),
    ("hard_timeout", "barrier_timeout"),
    ("monitor_process_interval", "barrier_timeout"),
    ("heartbeat_timeout", "barrier_timeout"),
    ("monitor_process_interval", "heartbeat_timeout"),
    ("monitor_thread_interval", "soft_timeout"),
    ("progress_watchdog_interval", "soft_timeout"),
)
"""The first must be less than the second."""

_HOOKS = (Abort, Finalize, HealthCheck, Initialize, RankAssignment, RankFilter)
GIVEN: Mapping[str, Sequence[str]] = {
    "initialize": ("state",),
    "abort": ("state",),
    "finalize": ("state", "train_ex"),
    "health_check": ("state", "train_ex"),
    "rank_assignment": ("state", "terminated_ranks"),
    "rank_filter": ("state",),
}


class Wrapper(Struct, frozen=True, kw_only=True):
    """Decorates a function that all ranks call: a fault on any rank starts it again on all that are healthy.

    The processes stay. See ``docs/how-to/restart-in-process.md``.

    Args:
        store_factory, store_kwargs: The store in which the ranks meet: a class with `StoreMixin`, called on every
            rank and once more in its monitor process.
        initialize: Runs first in each iteration.
        abort: Runs in the monitor thread after a fault.
        finalize: Runs after the abort.
        health_check: Runs before the function, and after `finalize`.
        rank_assignment: Gives the ranks that are left their numbers.
        rank_filter: Chooses those that call the function.
        monitor_thread_interval: Between two looks at this rank's progress. (A fault elsewhere is seen at once.)
        monitor_process_interval: Between two heartbeats.
        progress_watchdog_interval: Between two looks whether the main thread executes bytecode.
        soft_timeout: A rank without progress for this long is interrupted.
        hard_timeout: A rank without progress for this long is killed.
        heartbeat_timeout: A rank without a heartbeat for this long counts as dead.
        barrier_timeout: Limit of the initial, iteration and termination barriers.
        completion_timeout: Limit of the completion barrier: from this rank's return to that of the last.
        last_call_wait: Limit for other ranks to report their own failure; it ends when all have answered.
        termination_grace_time: Between SIGTERM and SIGKILL at the hard timeout.
        monitor_process_logfile: An absolute path; ``{rank}`` is the initial rank.
        enabled: If false, the function stays as it is.

    Raises:
        TypeError: an argument has the wrong type, or a hook can't be called with the arguments that it gets.
        ValueError: timeouts are out of order, the logfile's path is not absolute, or torch has no
            ``torch.distributed``.
    """

    store_factory: type[StoreMixin] = TCPStore
    store_kwargs: dict[str, Any] | None = None
    initialize: Initialize | None = None
    abort: Abort | None = AbortTorchDistributed()
    finalize: Finalize | None = None
    health_check: HealthCheck | None = None
    rank_assignment: RankAssignment = ShiftRanks()
    rank_filter: RankFilter | None = None
    monitor_thread_interval: timedelta = timedelta(seconds=1)
    monitor_process_interval: timedelta = timedelta(seconds=1)
    progress_watchdog_interval: timedelta = timedelta(seconds=1)
    soft_timeout: timedelta = timedelta(seconds=60)
    hard_timeout: timedelta = timedelta(seconds=90)
    heartbeat_timeout: timedelta = timedelta(seconds=30)
    barrier_timeout: timedelta = timedelta(seconds=120)
    completion_timeout: timedelta = timedelta(seconds=120)
    last_call_wait: timedelta = timedelta(seconds=1)
    termination_grace_time: timedelta = timedelta(seconds=5)
    monitor_process_logfile: str | None = None
    enabled: bool = True

    def __post_init__(self) -> None:
        check(self)
        if not dist.is_available():
            raise ValueError("Wrapper: this torch has no torch.distributed")

    def __call__(self, fn: Function) -> Function:
        """Wrap `fn`. Its name, docstring and signature stay."""
        if not self.enabled:
            return fn

        @functools.wraps(fn)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with CallWrapper(self) as call:
                return call(fn, args, kwargs)

        return cast("Function", wrapped)


class CallWrapper:
    """One wrapped call on one rank. A parameter of the function that is annotated with this class receives it."""

    def __init__(self, wrapper: Wrapper) -> None:
        """Start the monitor process, open the store, and wait for all ranks.

        Raises:
            ValueError: a default process group exists, or this is not the main thread.
            BarrierTimeout: not all ranks came.
        """
        if threading.current_thread() is not threading.main_thread():
            raise ValueError("a wrapped function is called in the main thread alone: there it can be interrupted")
        if dist.is_initialized():
            raise ValueError(
                "a wrapped function makes its own process group: destroy the default one before the call, "
                "and call init_process_group inside"
            )
        self._atomic_lock = threading.RLock()
        self._rank: Rank | None = None
        self._inner = (-1, 0)
        self._admission: Admission | None = None  # a running restart group took this process in like this
        self._is_over = False  # the call ended before this process was in it
        with contextlib.ExitStack() as stack:
            self._rank = self._set_up(wrapper, stack)
            self._stack = stack.pop_all()

    def _set_up(self, settings: Wrapper, stack: contextlib.ExitStack) -> Rank:
        state = State()
        page = ProgressPage()
        stack.callback(page.close)
        name, is_outermost = self._name(), not _open
        agent_link = AgentLink.from_env(os.environ) if is_outermost else AgentLink()
        replacement = ReplacementProcess(state.initial_rank) if agent_link.replaces > 0 and name == "call0" else None
        process = MonitorProcess(
            page=page,
            unplaced=Unplaced(
                call=name, initial_rank=state.initial_rank, world_size=state.initial_world_size, replacement=replacement
            ),
            settings=settings,
        )
        is_served = process.start()
        stack.callback(process.shutdown)
        was_client_only = TCPStore.is_client_only
        TCPStore.is_client_only = was_client_only or is_served
        try:
            raw: Any = settings.store_factory(**(settings.store_kwargs or {}))
        finally:
            TCPStore.is_client_only = was_client_only
        if replacement is not None:
            name = self._take_place(raw, state, replacement, settings)
        else:
            PrefixStore(name, raw).initial_barrier(
                rank=state.rank, rendezvous_count=state.world_size, timeout=settings.barrier_timeout
            )
        state.store = base = PrefixStore(name, raw)
        if is_outermost:
            raw.set(_CALL, name)
        if self._admission is None:
            base.set_initial_rank(state.rank, state.initial_rank)
        else:
            state.store = PrefixStore(self._admission.iteration - 1, base)
        interval = min(settings.progress_watchdog_interval, settings.monitor_thread_interval)
        watchdog = ProgressWatchdog(page, interval=interval.total_seconds())
        watchdog.start()
        stack.callback(watchdog.shutdown)
        stack.enter_context(SignalHandler())
        # The thread that waits in a TCPStore keeps all others of that client out: it has a connection of its own.
        watched_base = PrefixStore(name, raw.clone() if isinstance(raw, dist.TCPStore) else raw)
        if isinstance(raw, dist.TCPStore) and raw.critical_ranks:
            detect_silence(raw.port, settings.heartbeat_timeout.total_seconds())
        rank = Rank(
            state=state,
            base=base,
            watched_base=watched_base,
            critical_ranks=raw.critical_ranks,
            watchdog=watchdog,
            process=process,
            atomic_lock=self._atomic_lock,
            settings=settings,
            name=name,
            agent_link=agent_link,
            admissions=Admissions(base, wait=agent_link.wait) if agent_link.wait is not None else None,
        )
        stack.enter_context(ledger.kept(distributed_c10d))
        stack.enter_context(_frozen_garbage())
        stack.callback(rank.announce_end)
        rank.agent_link.report(RestartGroupEvent.BEGUN, rank=state.initial_rank)
        return rank

    def _name(self) -> str:
        """The call's own name, the same on all ranks: its keys are apart, also where a store outlives it."""
        if not _open:
            return f"call{next(_outermost)}"
        outer = _open[-1]
        inner_iteration, number = outer._inner
        number = number + 1 if inner_iteration == outer.iteration else 0
        outer._inner = outer.iteration, number
        return f"{outer._open_rank().name}.{outer.iteration}.{number}"

    def _take_place(self, raw: Any, state: State, replacement: ReplacementProcess, settings: Wrapper) -> str:
        """Take a dead process' place. Returns the call's name; `state` is that of the restart group afterwards."""
        name = "call0"
        base = PrefixStore(name, raw)
        if not base.is_released(base.INITIAL_BARRIER) and base.resolve_slot(state.rank, "taken"):
            # It died before the call began, and may have come to its first barrier.
            base.reentrant_barrier(state.rank, base.INITIAL_BARRIER, state.world_size, settings.barrier_timeout)
            return name
        name = read_value(raw, _CALL) or name
        global _outermost
        _outermost = itertools.count(int(name.removeprefix("call")) + 1)
        found = replacement.wait_for_place(PrefixStore(name, raw), patience=settings.barrier_timeout.total_seconds())
        if found is None:
            self._is_over = True
            return name
        self._admission = found
        state.iteration = found.iteration
        state.rank, state.world_size = found.places[replacement.uid], found.world_size
        return name

    def __enter__(self) -> CallWrapper:
        _open.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _open.remove(self)
        self._stack.close()
        self._rank = None

    @property
    def iteration(self) -> int:
        """Number of restarts: 0 is the first time that the function runs."""
        return self._open_rank().state.iteration

    def ping(self) -> None:
        """Report progress: some microseconds.

        The first one in an iteration arms the manual timeout: from then on, `soft_timeout` without a ping interrupts
        this rank, `hard_timeout` kills it.
        """
        self._open_rank().watchdog.ping()

    @contextlib.contextmanager
    def atomic(self) -> Iterator[None]:
        """Keep aborts out of a ``with`` block. Reentrant. An abort waits for its end; while an abort runs, no thread
        enters."""
        with self._atomic_lock:
            yield

    @contextlib.contextmanager
    def disable_hang_protection(self) -> Iterator[None]:
        """Suspend `soft_timeout` and `hard_timeout` in a ``with`` block that may take long: a load, a compilation.

        Both begin again at its end. A fault on another rank interrupts it all the same, and then `hard_timeout`
        counts. Nests.
        """
        watchdog = self._open_rank().watchdog
        watchdog.pause()
        try:
            yield
        finally:
            watchdog.resume()

    def __call__(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run `fn` until all ranks have completed it in the same iteration.

        Returns:
            Its value; None on a spare.

        Raises:
            RestartError: this rank can't continue (`HealthCheckError`, `RankDiscarded`, a barrier's timeout, …).
            BaseException: any other exception that ended this rank: the very object.
        """
        rank, value = self._open_rank(), None
        if not self._is_over:
            args, kwargs = with_value_for(CallWrapper, fn, args, kwargs, self)
            empty = self._admission.empty if self._admission is not None else ()
            value = Iterations(rank, functools.partial(fn, *args, **kwargs), terminated=empty).run()
        rank.agent_link.report(RestartGroupEvent.ENDED, rank=rank.state.initial_rank)
        return value

    def _open_rank(self) -> Rank:
        if self._rank is None:
            raise ValueError("this wrapped call is over")
        return self._rank


@contextlib.contextmanager
def _frozen_garbage() -> Iterator[None]:
    """Exclude what exists from garbage collection during the call: torch's 100,000 objects cost 0.1 s a time."""
    if gc.get_freeze_count():
        yield  # the program's own, or an outer call's
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def check(wrapper: Struct) -> None:
    """Raise TypeError for a wrong type, and ValueError for a wrong order, or a path that is not absolute."""
    hints = typing.get_type_hints(type(wrapper))
    arguments = {name: getattr(wrapper, name) for name in hints}
    factory = arguments["store_factory"]
    if not (isinstance(factory, type) and issubclass(factory, StoreMixin)):
        raise TypeError(f"Wrapper: store_factory={factory!r} must be a subclass of StoreMixin")
    for name, hint in hints.items():
        value = arguments[name]
        kinds = tuple(typing.get_origin(kind) or kind for kind in typing.get_args(hint) or (hint,))
        if name != "store_factory" and not isinstance(value, kinds):
            names = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
            raise TypeError(f"Wrapper: {name}={value!r} must be {names}, not {type(value).__name__}")
    for name, given in GIVEN.items():
        if arguments[name] is not None:
            _check_call(name, arguments[name], given)
    seconds = {name: f"{arguments[name].total_seconds():g} s" for name, hint in hints.items() if hint is timedelta}
    for name, shown in seconds.items():
        if arguments[name] < timedelta(0):
            raise ValueError(f"Wrapper: {name}={shown} must not be negative")
    for less, more in LESS_THAN:
        if not arguments[less] < arguments[more]:
            raise ValueError(f"Wrapper: {less}={seconds[less]} must be less than {more}={seconds[more]}")
    logfile = arguments["monitor_process_logfile"]
    if logfile is not None and not os.path.isabs(logfile):
        raise ValueError(f"Wrapper: monitor_process_logfile={logfile!r} must be an absolute path")


def _check_call(name: str, hook: Callable[..., Any], given: Sequence[str]) -> None:
    """Check early that a hook takes its arguments: it is called for the first time after a fault."""
    # The last of a chain is called first. What the others get is the one's value that is called before them.
    parts = hook.instances if isinstance(hook, Compose) else (hook,)
    for part in (parts[-1], *(part for part in parts[:-1] if isinstance(part, _HOOKS))):
        try:
            signature = inspect.signature(part)
        except (TypeError, ValueError):
            continue  # written in C
        try:
            signature.bind(*given)
        except TypeError as error:
            raise TypeError(
                f"Wrapper: {name}={part!r} is called with ({', '.join(given)}), and its call takes {signature}: {error}"
            ) from None


def with_value_for(
    wanted: type, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], value: object
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """`args` and `kwargs`, with `value` for each parameter of `fn` annotated with `wanted` or ``Optional[wanted]``."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return args, dict(kwargs)
    try:
        hints = typing.get_type_hints(fn)
    except Exception:
        hints = {}  # a name that only a type checker knows
    names = [
        name
        for name, parameter in signature.parameters.items()
        if _is_for(hints.get(name, parameter.annotation), wanted)
    ]
    if not names:
        return args, dict(kwargs)
    bound = signature.bind_partial(*args, **kwargs)
    for name in names:
        bound.arguments[name] = value
    # Keep the signature's order: positional ones are taken from the front.
    bound.arguments = {name: bound.arguments[name] for name in signature.parameters if name in bound.arguments}
    return bound.args, bound.kwargs


def _is_for(annotation: object, wanted: type) -> bool:
    if isinstance(annotation, str):
        bare = annotation.replace(" ", "").removesuffix("|None").removeprefix("None|")
        bare = bare.removeprefix("typing.").removeprefix("Optional[").removesuffix("]")
        return bare.rsplit(".", 1)[-1] == wanted.__name__
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return wanted in typing.get_args(annotation)
    return annotation is wanted
