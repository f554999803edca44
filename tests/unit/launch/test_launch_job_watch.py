"""Whether the controller answers, and whether Slurm and the run mean the same nodes: told once each."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from hpc_elastic.launch.site import LOOK_SECONDS, RETRY_SECONDS, SOON_SECONDS, ControllerOutage, JobWatch, nodes_differ
from hpc_elastic.run.control_events import NodesCompared
from hpc_elastic.slurm.client import CommandResult, SlurmClient
from hpc_elastic.slurm.commands import JobId, SlurmError, SlurmUnavailableError
from tests.rigs.event_pairs import log_into_dicts
from tests.rigs.fake_clock import FakeClock

TAKEN = "not in the job any more by Slurm, and the run uses it"
KEPT = "lost to the run, and in the job by Slurm"
AWAY = SlurmUnavailableError(what="looking up jobs", why="Unable to contact slurm controller")


@pytest.mark.parametrize(
    ("used", "lost", "job", "differ"),
    [
        (["n1", "n2"], [], ["n1", "n2", "n3"], NodesCompared()),
        (["n1", "n2"], [], [], NodesCompared()),
        (["n1", "n3"], ["n3"], ["n1", "n3"], NodesCompared()),  # back already
        (["n1", "n2", "n3"], [], ["n1"], NodesCompared(taken=("n2", "n3"), reason=f"n[2-3] {TAKEN}")),
        (["n1"], ["n2", "n3"], ["n1", "n3"], NodesCompared(kept=("n3",), reason=f"n3 {KEPT}")),
        (
            ["n1", "n4"], ["n3"], ["n1", "n3"],
            NodesCompared(taken=("n4",), kept=("n3",), reason=f"n4 {TAKEN}; n3 {KEPT}"),
        ),
    ],
)  # fmt: skip
def test_about_which_nodes_they_disagree(used: list[str], lost: list[str], job: list[str], differ: object) -> None:
    assert nodes_differ(used=used, lost=lost, job=job) == differ


class World:
    def __init__(self) -> None:
        self.clock = FakeClock()
        self.answer: Sequence[str] | SlurmError = ("n1", "n2")
        self.asked: list[float] = []
        self.events: list[dict[str, Any]] = []
        self.waiting: list[Callable[[], None]] = []
        self.watch = JobWatch(self.ask, events=log_into_dicts(self.events), clock=self.clock, start=self.waiting.append)

    def ask(self) -> Sequence[str]:
        self.asked.append(self.clock.now)
        if isinstance(self.answer, SlurmError):
            raise self.answer
        return self.answer

    def pass_seconds(self, seconds: float, *, used: list[str] | None, lost: Sequence[str] = ()) -> None:
        """As the supervisor does: it sleeps until something is due."""
        until = self.clock.now + seconds
        while True:
            self.watch.look(used=used, lost=lost)
            due = self.watch.due
            if due is not None and due > until:
                self.clock.now = until
                return
            self.clock.now = max(self.clock.now, due or 0.0)
            for work in self.waiting:
                work()
            self.waiting.clear()


def test_a_difference_is_told_once_and_its_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    world = World()
    world.pass_seconds(5 * LOOK_SECONDS, used=["n1", "n2"])
    assert len(world.asked) == 5
    assert world.events == []
    world.answer = ("n1",)
    world.pass_seconds(3 * LOOK_SECONDS, used=["n1", "n2"])
    assert [event["taken"] for event in world.events] == [["n2"]]
    world.pass_seconds(3 * LOOK_SECONDS, used=None)
    world.pass_seconds(3 * LOOK_SECONDS, used=["n1"])
    assert [event["taken"] for event in world.events] == [["n2"], []]
    assert [record.getMessage() for record in caplog.records] == [
        "Slurm and the run disagree: n2 not in the job any more by Slurm, and the run uses it",
        "Slurm and the run agree about the job's nodes again",
    ]


def test_after_a_loss_it_is_looked_soon() -> None:
    world = World()
    world.pass_seconds(LOOK_SECONDS / 2, used=["n1", "n2"])
    assert world.asked == []
    world.pass_seconds(2 * SOON_SECONDS, used=["n1"], lost=["n2"])
    assert len(world.asked) == 1
    assert world.events[0]["kept"] == ["n2"]


def test_a_controller_that_does_not_answer_is_asked_more_often_and_nothing_follows_from_it() -> None:
    world = World()
    world.answer = AWAY
    world.pass_seconds(LOOK_SECONDS + 4 * RETRY_SECONDS, used=["n1", "n3"])
    assert len(world.asked) == 5
    assert world.events == []


def test_a_question_that_takes_long_is_asked_once() -> None:
    world = World()
    for _ in range(10):
        world.clock.now += LOOK_SECONDS
        world.watch.look(used=["n1", "n2"], lost=())
    assert len(world.waiting) == 1


def test_an_outage_is_one_line_when_it_is_noticed_and_one_when_it_is_over(caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    answers = [0, 1, 1, 1, 0, 0]

    def run(argv: Sequence[str], *, timeout: float) -> CommandResult:
        if answers.pop(0):
            clock.now += 9
            return CommandResult(rc=1, stderr="slurm_load_jobs error: Unable to contact slurm controller")
        return CommandResult(rc=1, stderr="slurm_load_jobs error: Invalid job id specified")

    client = SlurmClient(run, clock, on_answer=ControllerOutage(clock).on_answer)
    for _ in range(6):
        try:
            client.queue_states([JobId("7")])
        except SlurmUnavailableError:
            pass
    begun, over = (record.getMessage() for record in caplog.records)
    assert begun.startswith("Slurm's controller does not answer (Unable to contact slurm controller")
    assert over == "Slurm's controller answers again after at least 18 s"
