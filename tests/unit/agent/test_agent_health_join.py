"""An agent joins no round before its node is known to be fit, and takes itself out where it is not."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from hpc_elastic.agent.ending import leave_run
from hpc_elastic.agent.health_checks import HealthChecks
from hpc_elastic.agent.node_agent import NodeAgent
from hpc_elastic.agent.part import HealthVerdict
from hpc_elastic.agent.supervision import Phase
from hpc_elastic.run.paths import UNHEALTHY_CODE, Outcome
from tests.unit.agent.test_agent_node_agent import START, Play, closed, failure, final, frozen, joinable, play  # noqa: F401

WHY = "health check failed: GPU 2 is lost"


class Health(HealthChecks):
    """Answers when a test says so."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.begun: list[int] = []
        self.answers: list[HealthVerdict] = []
        self.calls: list[str] = []
        self.is_awaited = False

    pids: frozenset[int] = frozenset()
    is_stuck = False

    def watched(self) -> tuple[int, ...]:
        return (self._fd,)

    def on_join(self, last_round: int) -> None:
        self.is_awaited = True
        self.begun.append(last_round)

    def holds_join(self, agent: NodeAgent) -> bool:
        return self.is_awaited

    def take(self) -> HealthVerdict | None:
        self.is_awaited = self.is_awaited and not self.answers
        return self.answers.pop() if self.answers else None

    def close(self) -> None:
        self.calls.append("close")

    def say(self, reason: str = "", **warnings: str) -> Callable[[], None]:
        return lambda: self.answers.append(HealthVerdict(reason=reason, checks=("gpu",), warnings=warnings))


@pytest.fixture
def health() -> Iterator[Health]:
    fd = os.eventfd(0)
    yield Health(fd)
    os.close(fd)


@pytest.fixture
def p(play: Callable[..., Play], health: Health) -> Play:  # noqa: F811
    return play(parts=[health])


def test_it_joins_when_its_node_is_fit_and_looks_again_before_the_next_round(p: Play, health: Health) -> None:
    def not_yet() -> None:
        assert "join" not in p.said.all()

    code = p.run(
        [START],
        not_yet,
        health.say(clock="the clock is off"),
        lambda: p.said.all("join") == ["join"] or pytest.fail("it did not join"),
        [frozen()],
        [final()],
        p.fall(failure()),
        [],
        [joinable(1)],
        [],
        Phase.JOINING,
        health.say(),
        [frozen(1)],
        [final(1)],
        lambda: p.workers[1].finish(),
        [],
        [closed()],
    )
    assert code == 0
    assert health.begun == [-1, 0]
    assert p.said.all("join") == ["join", "join"]
    assert p.event("health_warning") == {"subject": "health_warning", "text": "clock", "reason": "the clock is off"}
    assert health.calls == ["close"]


def test_one_that_is_unfit_after_a_failure_leaves_with_the_reason(p: Play, health: Health) -> None:
    left: list[tuple[int, str]] = []
    p.said.__dict__["leave"] = lambda index, reason: left.append((index, reason))
    p.said.__dict__["record"] = joinable(1)
    code = p.run(
        health.say(),
        [frozen()],
        [final()],
        p.fall(failure()),
        [],
        [joinable(1)],
        [],
        health.say(WHY),
    )
    assert code == UNHEALTHY_CODE
    assert left == [(1, WHY), (2, WHY)]
    assert p.said.all() == ["join", "confirm", "report_failure", "sum_up_failures", "deregister"]
    assert p.event("health_check_failed") == {"round": 0, "checks": ["gpu"], "reason": WHY}
    assert p.event("agent_ended") == {"reason": WHY, "code": UNHEALTHY_CODE}


def test_an_answer_that_comes_when_the_run_is_closed_changes_nothing(p: Play, health: Health) -> None:
    def both() -> list[object]:
        health.say(WHY)()
        return [closed(Outcome.FAILED)]

    code = p.run([START], both)
    assert code == 1
    assert "health_check_failed" not in [name for name, _ in p.events]


def test_who_leaves_before_the_first_round_leaves_that_one() -> None:
    left: list[int] = []

    class Participant:
        record = None

        def leave(self, index: int, reason: str) -> None:
            left.append(index)

    leave_run(Participant(), WHY)  # type: ignore[arg-type]
    assert left == [0, 1]
