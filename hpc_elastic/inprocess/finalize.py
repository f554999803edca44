"""Hooks that bring a process back into a state in which the function can start again."""

from __future__ import annotations

import abc
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from hpc_elastic.inprocess.exception import TimeoutError
from hpc_elastic.inprocess.state import State


class Finalize(abc.ABC):
    """Runs on every rank after a fault and the abort, before the health check. If it raises, this rank ends."""

    @abc.abstractmethod
    def __call__(self, state: State, train_ex: Exception | None = None) -> tuple[State, Exception | None]:
        """Args:
        state: This rank's.
        train_ex: What the function raised on this rank; None where the fault was elsewhere.
        """
        raise NotImplementedError


class ThreadedFinalize(Finalize):
    """Calls a function in a thread of its own, and waits no longer than it is given."""

    def __init__(
        self,
        timeout: timedelta,
        fn: Callable[..., Any],
        args: tuple[Any, ...] | None = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Args:
        timeout: After which this rank ends.
        fn, args, kwargs: What to call.
        """
        self.timeout = timeout
        self.fn = fn
        self.args = args or ()
        self.kwargs = dict(kwargs or {})

    def __call__(self, state: State, train_ex: Exception | None = None) -> tuple[State, Exception | None]:
        """Raises:
        TimeoutError: it has not returned in time; the thread is left to itself.
        BaseException: what `fn` raised.
        """
        raised: list[BaseException] = []

        def call() -> None:
            try:
                self.fn(*self.args, **self.kwargs)
            except BaseException as error:
                raised.append(error)

        thread = threading.Thread(target=call, name=f"{type(self).__name__}-{state.rank}", daemon=True)
        thread.start()
        thread.join(self.timeout.total_seconds())
        if thread.is_alive():
            raise TimeoutError(f"finalize: {self.fn!r} has not returned after {self.timeout.total_seconds():g} s")
        if raised:
            raise raised.pop()
        return state, train_ex
