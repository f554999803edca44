"""When an agent asks Slurm for the job's nodes, and what it does about the answer."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace
from typing import Any

import pytest

from hpc_elastic.agent.ending import GIVEN_UP, JobNodes
from hpc_elastic.rendezvous.succession import NodesCutOff
from tests.rigs.specs import make_record

RECORD = make_record(leader="l", round=1, members=())


class Asked:
    """Stands for the agent's site and for the process that asks."""

    pid = 4711

    def __init__(self, *, cluster: str = "slurm") -> None:
        self.attempt = SimpleNamespace(nodes=("n1", "n2", "n3"), batch_host="n1", cluster=cluster)
        self.me, self.run = self, SimpleNamespace(root="/run")
        self.environ, self.coordination, self.events = {"SLURM_JOB_ID": "7"}, self, self
        self.commands: list[list[str]] = []
        self.written: list[Any] = []
        self.given_up: list[int] = []
        self.answer: str | None = None

    def start(self, argv: list[str], **_: object) -> Asked:
        self.commands.append(argv)
        return self

    def poll(self) -> int | None:
        return None if self.answer is None else 0

    def communicate(self) -> tuple[str, None]:
        return self.answer or "", None

    def write(self, event: object) -> None:
        self.written.append(event)

    def ask(self, command: Any) -> None:
        command(SimpleNamespace(claims=SimpleNamespace(give_up_node=self.given_up.append)))


@pytest.mark.parametrize(
    ("cut_off", "lost", "cluster", "asks"),
    [
        ((0,), (), "slurm", True),
        ((2,), (), "slurm", False),  # the supervisor hears of it
        ((2,), (0,), "slurm", True),  # there is none any more
        ((0,), (), "local", False),
    ],
)
def test_slurm_is_asked_where_the_supervisor_can_not(
    monkeypatch: pytest.MonkeyPatch, cut_off: tuple[int, ...], lost: tuple[int, ...], cluster: str, asks: bool
) -> None:
    asked = Asked(cluster=cluster)
    monkeypatch.setattr(subprocess, "Popen", asked.start)
    question = JobNodes(asked)  # type: ignore[arg-type]
    for _ in range(2):  # no second question beside the first
        question.on_cut_off(NodesCutOff(nodes=cut_off), RECORD.successor(lost=lost))
    assert [argv[-3:] for argv in asked.commands] == [["batch", "--job-nodes", "/run"]] * asks
    assert set(question.pids) == ({4711} if asks else set())


@pytest.mark.parametrize(
    ("answer", "given_up"), [("n2 n3\n", [0]), ("n1 n2 n3\n", []), ("\n", [])], ids=["gone", "there", "no answer"]
)
def test_a_node_that_is_not_in_the_job_any_more_is_given_up(
    monkeypatch: pytest.MonkeyPatch, answer: str, given_up: list[int]
) -> None:
    asked = Asked()
    monkeypatch.setattr(subprocess, "Popen", asked.start)
    question = JobNodes(asked)  # type: ignore[arg-type]
    question.on_cut_off(NodesCutOff(nodes=(0,)), RECORD)
    question.look(None)  # type: ignore[arg-type]
    assert question.pids, "it is still asking"
    asked.answer = answer
    question.look(None)  # type: ignore[arg-type]
    assert (asked.given_up, set(question.pids)) == (given_up, set())
    assert [(event.node, event.name, event.reason) for event in asked.written] == [(0, "n1", GIVEN_UP)][: len(given_up)]
