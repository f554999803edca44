"""Nodes that failed a health check are not tried again; and agents that have not met yet are ended without delay."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import SimpleNamespace

from hpc_elastic.base.outcome import UNHEALTHY_CODE, Outcome
from hpc_elastic.launch.supervisor import ORPHANED_SECONDS, SILENT_SECONDS
from tests.unit.launch.test_launch_supervisor import Stage, stage  # noqa: F401


def test_a_node_that_is_unfit_gets_no_new_agent(stage: Callable[..., Stage]) -> None:  # noqa: F811
    s = stage()
    s.run(3.0, lambda: s.agents.kill(1, UNHEALTHY_CODE, detail="exit code 95"), 5.0, s.done)
    assert s.agents.relaunched == []
    assert "00001" in s.world.store.list("gone")


def all_unfit(s: Stage) -> None:
    def launch() -> None:
        for node in (0, 1, 2):
            s.agents.of[node] = SimpleNamespace(alive=True, frozen=True, participant=SimpleNamespace(record=None))  # type: ignore[assignment]
            s.agents.kill(node, UNHEALTHY_CODE, detail="exit code 95")

    s.agents.launch = launch  # type: ignore[method-assign]


def test_where_none_is_fit_the_attempt_ends_at_once_and_is_worth_another(stage: Callable[..., Stage]) -> None:  # noqa: F811
    s = stage()
    all_unfit(s)
    result = s.run()
    assert (result.outcome, result.retryable) == (Outcome.TOO_FEW_NODES, True)
    assert result.reason == "no node is left: 3 of 3 failed a health check"
    assert result.seconds < ORPHANED_SECONDS / 2


def test_ctrl_c_while_no_node_has_met_ends_the_agents_by_signal(stage: Callable[..., Stage]) -> None:  # noqa: F811
    s = stage()

    def launch() -> None:
        for node in (0, 1, 2):
            s.agents.of[node] = SimpleNamespace(alive=True, frozen=True, participant=SimpleNamespace(record=None))  # type: ignore[assignment]

    s.agents.launch = launch  # type: ignore[method-assign]

    def end() -> None:
        assert s.agents.terminated
        for node in list(s.agents.of):
            s.agents.kill(node, 143, detail="exit code 143")

    result = s.run(1.0, lambda: s.signals.append(signal.SIGINT), SILENT_SECONDS / 2, end)
    assert (result.outcome, result.signal_number) == (Outcome.CANCELLED, signal.SIGINT)
