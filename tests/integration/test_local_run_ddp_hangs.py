"""An unmodified DDP script hangs, or only looks like it: what is found by default, and which rank is named."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.rigs.local_run import LocalRun

pytestmark = pytest.mark.torch
Run = Callable[..., LocalRun]


@pytest.mark.parametrize(
    ("hangs", "fail_rank"),
    [
        (("sleep@init", "gil@12"), 0),
        *(
            pytest.param(hangs, rank, marks=pytest.mark.slow)
            for hangs, rank in ((("sleep@1", "lock@12"), 1), (("gil@12",), 1), (("sleep@end", "sleep@exit"), 0))
        ),
    ],
)
def test_each_hang_is_found_and_the_rank_is_the_cause(ddp_run: Run, hangs: tuple[str, ...], fail_rank: int) -> None:
    """Each rank on a node of its own: named wherever it is. The round after a hang is watched like the first."""
    arguments = ("--steps", "24", *(word for what in hangs for word in ("--fail", what)), "--fail-rank", str(fail_rank))
    with ddp_run(*arguments, options=("--hangs", "act:8", "--max-same-failures", "0")) as run:
        assert run.finish(within=240) == 0
        suspected = run.events("hang_suspected")
        assert [(event["source"], event["round"], event["ranks"]) for event in suspected] == [
            ("kernel", index, [fail_rank]) for index in range(len(hangs))
        ]
        failed = run.events("worker_failed")
        assert [(event["rank"], event["failure_class"]) for event in failed] == [(fail_rank, "hang")] * len(hangs)
        assert [event["round"] for event in run.events("round_final")][-1] == len(hangs)


def test_a_hang_after_all_workers_of_the_other_node_have_ended_is_found(ddp_run: Run) -> None:
    arguments = ("--steps", "4", "--fail", "stop@2", "--fail", "sleep@atexit", "--fail-rank", "1")
    with ddp_run(*arguments, options=("--hangs", "act:6", "--max-same-failures", "0")) as run:
        assert run.finish(within=240) == 0
        stopped, last = run.events("hang_suspected")
        assert "ended with 0" not in stopped["reason"]
        assert "(1 other ended with 0)" in last["reason"]
        assert [event["rank"] for event in run.events("worker_failed")] == [1, 1]


@pytest.mark.parametrize(("what", "fail_rank"), [("evaluate@5", 1), ("download@5", 0)])
def test_what_is_no_hang(ddp_run: Run, what: str, fail_rank: int) -> None:
    arguments = ("--steps", "10", "--fail", what, "--pause", "10", "--fail-rank", str(fail_rank))
    without = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"} if what == "download@5" else {}
    with ddp_run(*arguments, options=("--hangs", "act:5"), environ=without) as run:
        assert run.finish() == 0
        assert not run.events("hang_suspected")
        assert run.report()["goodput"]["progress"] == ("kernel" if without else "optimizer")


@pytest.mark.slow
def test_a_longer_pause_than_three_times_the_last_is_one(ddp_run: Run) -> None:
    """Observed, since `observe` ends nothing: the script goes on by itself."""
    arguments = ("--steps", "12", "--fail", "pause@3", "--fail", "pause@9", "--pause", "12")
    with ddp_run(*arguments, options=("--hangs", "observe:3")) as run:
        assert run.finish() == 0
        assert len(run.events("hang_suspected")) == 1, "the second pause is no longer than three times the first"
        assert "nothing is ended; --hangs act starts the workers again" in run.log()
