"""A failure while the disk is full."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rigs.failure_catalogue import Catalogue, Told
from tests.rigs.small_disk import small_disk


@pytest.fixture
def tiny_disk(catalogue: Catalogue) -> Iterator[Path]:
    """The runs' folder on a filesystem of its own, of 4 MB. Where none can be mounted: skips, or fails in CI."""
    path = catalogue.folder / "runs"
    path.mkdir(mode=0o700)
    with small_disk(path, "4m"):
        yield path


def _fill(disk: Path) -> Path:
    filler, size = disk / "filler", 1 << 20
    with open(filler, "wb", buffering=0) as file:
        while size:
            try:
                file.write(b"0" * size)
            except OSError:
                size //= 2
    return filler


def test_a_full_disk_while_the_error_file_is_written(catalogue: Catalogue, tiny_disk: Path) -> None:
    """Nothing of the failure can be written when it happens: its agent remembers what it printed."""
    script = """
    from hpc_elastic.failures import record

    def step():
        raise ValueError("loss is NaN at step 17")

    @record
    def main():
        tell("here")
        others_in_round()
        wait_for("the-failure")
        if RANK == 1:
            step()
        wait_for("never")

    main()
    """
    with catalogue.run(script) as run:
        run.wait_moments("here", count=2)
        filler = _fill(tiny_disk)
        run.say("the-failure")
        run.until(lambda: "of the workers' output are not in their files" in run.log(), "word of the lost output")
        filler.unlink()
        run.finish()
        expected = Told(
            exit_code=1,
            cause="ValueError: loss is NaN at step 17",
            rank=1,
            host="node1",
            failure_class="root",
            category="worker",
            retryable=True,
            confidence="high",
            evidence="first of 2; the other was stopped within <N> ms",
            kind="uncaught exception",
        )
        catalogue.check(run, "disk-full", expected)
        assert "ValueError: loss is NaN at step 17" in run.log(), "the report sends there"
