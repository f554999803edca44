"""Where the time of a real run went by its report, beside what its workers wrote down."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_elastic.report.blocks import measure_costs
from hpc_elastic.report.collect import collect_run
from hpc_elastic.report.goodput import describe_goodput, goodput_of
from tests.bench.goodput import TRAINER, Failure, Plan, account
from tests.rigs.local_run import LocalRun

KINDS = ("killed", "exception", "node", "hang")
TRAINING = Plan(
    steps=240,
    step_seconds=0.05,
    save_every=16,
    save_seconds=0.1,
    failures=tuple(
        Failure(after=after, into=0.5, rank=after % 2, kind=kind)
        for after, kind in zip((41, 94, 171, 230), KINDS, strict=True)
    ),
    has_torch=False,
)
HANG = 3.0


def test_a_real_runs_time_adds_up(tmp_path: Path) -> None:
    with LocalRun(
        tmp_path,
        TRAINER.read_text(),
        prelude="",
        arguments=[TRAINING.text()],
        options=["--max-restarts", "1", "--max-requeues", "3", "--section-timeouts", f"step:{HANG:g}"],
        environ={"BENCH_STAMPS": str(tmp_path / "stage")},
    ) as run:
        assert run.finish() == 0, run.log_tail()
        written, history = account(run.stage), collect_run(run.paths.root)
    found = goodput_of(history)
    assert (len(history.attempts) > 1, len(written.restarts)) == (True, len(KINDS))
    assert sum(seconds for _, _, seconds in describe_goodput(found)) == pytest.approx(found.wall)
    # The first heartbeat of a round and the last say how long the steps between took, and no more.
    slack = 2 * TRAINING.step_seconds * (len(KINDS) + 1)
    assert found.kept == pytest.approx(written.kept, abs=slack)
    assert found.recomputed == pytest.approx(written.lost, abs=slack)
    assert found.checkpointing == pytest.approx(written.saving, abs=0.3)
    assert HANG - 0.1 <= found.hanging <= HANG + 1.5
    assert found.queued > 0
    every = measure_costs(history, found).checkpoint_every
    assert every == pytest.approx(TRAINING.save_every * TRAINING.step_seconds, rel=0.2)
