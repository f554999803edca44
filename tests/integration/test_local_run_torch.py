"""What torchrun 2.13 never recovers from: one worker's SIGKILL on gloo, any rank, again and again."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.rigs.local_run import LocalRun
from tests.rigs.torch_ranks import ALL_REDUCE
from tests.rigs.training_scripts import SYNTHETIC, check_that_it_resumed, run_alone, run_with_a_killed_rank

pytestmark = pytest.mark.torch
GLOO = ("gloo", "cpu")


@pytest.mark.parametrize(("nodes", "victims"), [(4, (0, 3)), pytest.param(2, (1, 1), marks=pytest.mark.slow)])
def test_all_ranks_are_in_a_working_group_after_each_kill(tmp_path: Path, nodes: int, victims: tuple[int, ...]) -> None:
    options = ["--max-same-failures", "0"]
    with LocalRun(tmp_path, ALL_REDUCE, nodes=nodes, arguments=GLOO, options=options) as run:
        for round_index, victim in enumerate((*victims, None)):
            here = run.wait_moments("here", count=nodes, round_index=round_index)
            assert [value["rank"] for value in here] == list(range(nodes))
            assert {value["total"] for value in here} == {2.0**nodes - 1}
            assert {value["group"] for value in here} == {nodes}
            if victim is not None:
                run.kill_worker(victim, round_index=round_index)
        run.finish_well()
        roots = [event for event in run.events("worker_failed") if event["failure_class"] == "root"]
        assert [(event["round"], event["rank"], event["exitcode"]) for event in roots] == [
            (index, rank, -signal.SIGKILL) for index, rank in enumerate(victims)
        ]
        assert max(event["restarts_used"] for event in run.events("round_final")) == len(victims)


def test_process_group_after_an_agents_death_and_on_fewer_nodes(tmp_path: Path) -> None:
    """Node 0's agent, with the TCPStore, is killed until the supervisor gives it up: node 1 goes on alone."""
    with LocalRun(tmp_path, ALL_REDUCE, nodes=2, min_nodes=1, arguments=GLOO) as run:
        run.wait_moments("here", count=2, round_index=0)
        for _ in range(4):
            run.kill_agent_in_a_round(0)
        alone = run.until(lambda: [value for value in run.moments("here") if value["group"] == 1], "group of one")
        assert [(value["rank"], value["total"]) for value in alone] == [(0, 1.0)]
        run.finish_well()


@pytest.mark.slow
def test_training_that_is_killed_resumes_to_the_same_losses(tmp_path: Path) -> None:
    """As tests/gpu does it on a GPU, and test_example_fsdp with an example."""
    undisturbed = run_alone(SYNTHETIC, tmp_path / "alone")
    result = run_with_a_killed_rank(SYNTHETIC, tmp_path, moved="checkpoint")
    check_that_it_resumed(result, undisturbed)
    assert "final: epoch=4 ranks=2 device=cpu" in result.stdout
