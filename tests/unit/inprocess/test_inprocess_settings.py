"""What the wrapper refuses, and that it says which argument and which value."""

from __future__ import annotations

import inspect
from datetime import timedelta
from typing import Any

import pytest

import hpc_elastic.inprocess as inprocess

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("store_factory", dict),
        ("store_kwargs", []),
        ("initialize", lambda state: state),
        ("abort", lambda state: state),
        ("finalize", 1),
        ("health_check", "x"),
        ("rank_assignment", None),
        ("rank_filter", 2),
        ("soft_timeout", 60),
        ("last_call_wait", 1.0),
        ("monitor_process_logfile", b"/x"),
        ("enabled", 1),
    ],
)
def test_wrong_types_are_named(name: str, value: Any) -> None:
    with pytest.raises(TypeError) as caught:
        inprocess.Wrapper(**{name: value})
    assert f"{name}={value!r}" in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"soft_timeout": 90}, "soft_timeout=90 s must be less than hard_timeout=90 s"),
        ({"hard_timeout": 120}, "hard_timeout=120 s must be less than barrier_timeout=120 s"),
        ({"monitor_process_interval": 120, "heartbeat_timeout": 130}, "monitor_process_interval=120 s"),
        ({"heartbeat_timeout": 120}, "heartbeat_timeout=120 s must be less than barrier_timeout=120 s"),
        ({"monitor_process_interval": 30}, "monitor_process_interval=30 s must be less than heartbeat_timeout=30 s"),
        ({"monitor_thread_interval": 60}, "monitor_thread_interval=60 s must be less than soft_timeout=60 s"),
        ({"progress_watchdog_interval": 60}, "progress_watchdog_interval=60 s must be less than soft_timeout=60 s"),
        ({"last_call_wait": -1}, "last_call_wait=-1 s must not be negative"),
    ],
)
def test_broken_orders_are_named(arguments: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError) as caught:
        inprocess.Wrapper(**{name: timedelta(seconds=value) for name, value in arguments.items()})  # type: ignore[arg-type]
    assert words in str(caught.value)


class OldFinalize(inprocess.finalize.Finalize):
    def __call__(self, state: Any) -> Any:  # type: ignore[override]
        return state


class NoState(inprocess.abort.Abort):
    def __call__(self) -> None:  # type: ignore[override]
        return None


class WithDefault(inprocess.health_check.HealthCheck):
    def __call__(self, state: Any, train_ex: Any = None, *, more: int = 1) -> Any:
        return state, train_ex


def test_a_hook_that_can_not_be_called_is_refused_at_once() -> None:
    """And not after the first fault, when it is called first."""
    with pytest.raises(TypeError, match=r"finalize=.*OldFinalize.* is called with \(state, train_ex\), .*too many"):
        inprocess.Wrapper(finalize=OldFinalize())
    with pytest.raises(TypeError, match=r"abort=.*NoState.* is called with \(state\)"):
        inprocess.Wrapper(abort=NoState())
    chain = inprocess.Compose(OldFinalize(), inprocess.finalize.ThreadedFinalize(timedelta(seconds=1), print))
    with pytest.raises(TypeError, match=r"finalize=.*OldFinalize"):
        inprocess.Wrapper(finalize=chain)  # type: ignore[arg-type]
    inprocess.Wrapper(health_check=WithDefault())


def test_a_logfile_by_no_absolute_path_and_a_torch_without_its_distributed_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ValueError, match="monitor_process_logfile='log' must be an absolute path"):
        inprocess.Wrapper(monitor_process_logfile="log")
    monkeypatch.setattr("torch.distributed.is_available", lambda: False)
    with pytest.raises(ValueError, match=r"torch\.distributed"):
        inprocess.Wrapper()


def test_the_function_keeps_its_face_and_is_given_back_where_it_is_switched_off() -> None:
    def function(one: int, *, two: str = "x") -> float:
        """What it does."""
        return 0.0

    wrapped = inprocess.Wrapper()(function)
    assert (wrapped.__name__, wrapped.__doc__) == ("function", "What it does.")
    assert inspect.signature(wrapped) == inspect.signature(function)
    assert inprocess.Wrapper(enabled=False)(function) is function
