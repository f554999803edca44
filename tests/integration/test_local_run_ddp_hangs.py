"""An unmodified DDP script hangs, or only looks like it: what is found by default, and which rank is named."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.rigs.local_run import LocalRun

pytestmark = pytest.mark.torch
Run = Callable[..., LocalRun]


@pytest.mark.parametrize(
    ("what", "fail_rank"),
    [
        ("sleep@init", 0),
        ("stop@12", 1),
        ("gil@12", 0),
        *(
            pytest.param(what, rank, marks=pytest.mark.slow)
            for what, rank in (("sleep@1", 1), ("lock@12", 1), ("gil@12", 1), ("sleep@end", 0))
        ),
    ],
)
def test_a_hang_is_found_and_the_rank_is_the_cause(ddp_run: Run, what: str, fail_rank: int) -> None:
    """Each rank on a node of its own: named wherever it is. The restart then gets through."""
    arguments = ("--steps", "24", "--fail", what, "--fail-rank", str(fail_rank))
    with ddp_run(*arguments, options=("--hangs", "act:8")) as run:
        assert run.finish() == 0
        (suspected,) = run.events("hang_suspected")
        assert (suspected["source"], suspected["round"]) == ("kernel", 0)
        assert suspected["ranks"] == [fail_rank]
        failed = run.events("worker_failed")
        assert [(event["rank"], event["failure_class"]) for event in failed] == [(fail_rank, "hang")]
        assert [event["round"] for event in run.events("round_final")][-1] == 1


@pytest.mark.parametrize(
    ("what", "fail_rank"), [("sleep@atexit", 1), pytest.param("sleep@exit", 0, marks=pytest.mark.slow)]
)
def test_a_hang_after_all_workers_of_the_other_node_have_ended_is_found(
    ddp_run: Run, what: str, fail_rank: int
) -> None:
    arguments = ("--steps", "2", "--fail", what, "--fail-rank", str(fail_rank))
    with ddp_run(*arguments, options=("--hangs", "act:6")) as run:
        assert run.finish() == 0
        (suspected,) = run.events("hang_suspected")
        assert "(1 other ended with 0)" in suspected["reason"]
        assert [event["rank"] for event in run.events("worker_failed")] == [fail_rank]


def test_the_round_after_a_hang_is_watched_like_the_first(ddp_run: Run) -> None:
    with ddp_run("--fail", "sleep@3", "--fail", "sleep@03", options=("--hangs", "act:6")) as run:
        assert run.finish() == 124, "the same hang again, with no step between"
        assert [event["round"] for event in run.events("hang_suspected")] == [0, 1]


@pytest.mark.parametrize(("what", "fail_rank"), [("evaluate@5", 1), ("download@5", 0)])
def test_what_is_no_hang(ddp_run: Run, what: str, fail_rank: int) -> None:
    arguments = ("--steps", "10", "--fail", what, "--pause", "20", "--fail-rank", str(fail_rank))
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
