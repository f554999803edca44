"""What torchrun 2.13 never recovers from: one worker's SIGKILL on gloo, any rank, again and again."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.rigs.local_run import LocalRun
from tests.rigs.torch_ranks import ALL_REDUCE

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
