"""A full disk under the run directory: recording stops, training does not."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_elastic.run.paths import ExitCode, load_result
from tests.rigs.local_run import LocalRun
from tests.rigs.small_disk import fill_disk, small_disk

_TRAINS = """
tell("here")
others_in_round()
if ROUND == 0:
    wait_for("train")
    for step in range(300):
        print("step", step, "x" * 80)
    tell("trained")
wait_for("end")
"""


@pytest.fixture
def filler(tmp_path: Path) -> Iterator[Path]:
    """A file on the filesystem of 4 MB on which the runs are: to be filled, and unlinked."""
    path = tmp_path / "runs"
    path.mkdir(mode=0o700)
    with small_disk(path, "4m"):
        yield path / "filler"


_FILES_ALONE = ("--rdzv-conf", "doorbell=off,heartbeat_ttl=5")
"""While packets come through, heartbeats in the files are rare, and nobody depends on them."""


def wait_for_heartbeats(run: LocalRun) -> None:
    """Until each node's has changed."""

    def cells() -> dict[str, str]:
        return {path.name: path.read_text() for path in (run.attempt().store / "hb").glob("0000*")}

    run.until(lambda: len(cells()) == 2, "both nodes' first heartbeats")
    before = cells()
    run.until(lambda: all(value != before[name] for name, value in cells().items()), "heartbeats")


def test_training_goes_on_while_the_disk_is_full(tmp_path: Path, filler: Path) -> None:
    with LocalRun(tmp_path, _TRAINS) as run:
        run.wait_moments("here", count=2)
        fill_disk(filler)
        run.say("train")
        run.wait_moments("trained", count=2)
        words = [f"rank-0000{rank}/stdout.log: No space left on device" for rank in range(2)]
        run.until(lambda: all(word in run.log() for word in words), "both nodes' word about the full disk")
        filler.unlink()
        run.finish_well()
        assert {event["round"] for event in run.events("round_final")} == {0}
        told = [line for line in run.log().splitlines() if "No space left on device" in line]
        # Each agent twice for its workers' output (it begins; what it came to), once for the store.
        assert len(told) <= 6
        lost = run.events("output_lost")
        assert {(one["rank"], one["stream"]) for event in lost for one in event["streams"]} == {
            (0, "stdout"),
            (1, "stdout"),
        }
        assert {event["reason"] for event in lost} == {"No space left on device"}
        size = sum(len(f"step {step} {'x' * 80}\n") for step in range(300))
        assert 0 < sum(event["not_in_files"] for event in lost) <= 2 * size
        (line,) = (line for line in run.attempt().report_text.read_text().splitlines() if "output lost" in line)
        assert line.endswith("bytes of the output of ranks 0-1 are in no file: No space left on device")
        assert all(f"[node{rank}:{rank}] step 299" in run.log() for rank in range(2))


def test_restart_waits_for_room_on_the_disk(tmp_path: Path, filler: Path) -> None:
    with LocalRun(tmp_path, _TRAINS, options=_FILES_ALONE) as run:
        run.wait_moments("here", count=2)
        fill_disk(filler)
        run.kill_worker(1, round_index=0)
        run.until(lambda: "the shared filesystem refused" in run.log(), "word about the full disk")
        for _ in range(6):  # longer than the lease
            wait_for_heartbeats(run)
        filler.unlink()
        run.wait_moments("here", count=2, round_index=1)
        run.finish_well()
        assert {event["restarts_used"] for event in run.events("round_final")} == {0, 1}
        (failed,) = run.events("worker_failed")
        assert failed["rank"] == 1
        assert run.events("node_lost") == []


def test_end_waits_for_room_on_the_disk(tmp_path: Path, filler: Path) -> None:
    with LocalRun(tmp_path, _TRAINS, options=_FILES_ALONE) as run:
        run.wait_moments("here", count=2)
        reserve = run.attempt().store / "reserve"
        run.until(reserve.exists, "room that is kept free")
        reserve.unlink()  # another process may take it before the run does
        fill_disk(filler)
        run.say("train")
        run.say("end")
        run.until(lambda: "the shared filesystem refused" in run.log(), "word about the full disk")
        wait_for_heartbeats(run)
        assert run.log().count("trying again") == 1
        filler.unlink()
        assert run.finish() == ExitCode.OK


def test_a_run_ends_by_itself_on_a_disk_that_stays_full(tmp_path: Path, filler: Path) -> None:
    """What the attempt kept free is enough for the last record, the result and the report."""
    with LocalRun(tmp_path, _TRAINS) as run:
        run.wait_moments("here", count=2)
        run.until(lambda: (run.attempt().store / "reserve").exists(), "room that is kept free")
        fill_disk(filler)
        began = time.monotonic()
        run.say("train")
        run.finish_well()
        assert time.monotonic() - began < 20.0
        assert run.report()["outcome"] == "succeeded"
        assert "train.py SUCCEEDED (exit code 0)" in run.attempt().report_text.read_text()
        assert load_result(run.attempt().result_json).outcome == "succeeded"
        assert not (run.attempt().store / "reserve").exists()
