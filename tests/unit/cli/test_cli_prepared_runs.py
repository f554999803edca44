"""Run directories that somebody prepared: no subcommand waits for a FIFO, or takes gigabytes."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_elastic.cli.main import main
from hpc_elastic.output.log_reader import OutputReader
from hpc_elastic.run.paths import RunPaths
from hpc_elastic.submission import environment
from tests.rigs.run_builder import RunBuilder, make_failure


@pytest.fixture(autouse=True)
def in_bounded_time() -> Iterator[None]:
    """What waits for a FIFO waits for ever: it is ended with an error."""

    def too_late(number: int, frame: object) -> None:
        pytest.fail("it waits for a FIFO")  # no OSError, which a reader could take for the file's

    before = signal.signal(signal.SIGALRM, too_late)
    signal.setitimer(signal.ITIMER_REAL, 60, 5)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture
def built(tmp_path: Path) -> RunBuilder:
    built = RunBuilder(tmp_path / "run").begin(at=1.0)
    built.fail(make_failure(rank=1, at=5.0, exception="RuntimeError: no"), error_file=True)
    built.end(0, at=9.0, outcome="failed", code=1, decision="end: no", reason="it failed")
    rank = built.paths.attempt(0).rank(0, 1)
    for path in (rank.stdout, rank.stderr, rank.stacks, built.paths.job_log, built.paths.attempt(0).report_text):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("last words\n")
    return built


SHOWN = (
    ["report"],
    ["report", "--rank", "1"],
    ["logs"],
    ["logs", "--around-failure"],
    ["logs", "--events"],
    ["status", "--no-slurm"],
)


@pytest.mark.parametrize("argv", SHOWN, ids=" ".join)
def test_no_file_that_is_a_fifo_is_waited_for(built: RunBuilder, argv: list[str], tmp_path: Path) -> None:
    files = [path for path in built.root.rglob("*") if path.is_file()]
    assert len(files) >= 10
    for path in files:
        aside = tmp_path / "aside"
        path.rename(aside)
        os.mkfifo(path)
        assert main([*argv, str(built.root)]) in (0, 2), path
        path.unlink()
        aside.rename(path)
    for path in files:
        path.unlink()
        os.mkfifo(path)
    assert main([*argv, str(built.root)]) in (0, 2)


def test_what_a_program_reads_of_its_job_waits_for_none(built: RunBuilder) -> None:
    paths = RunPaths(built.root)
    rank = paths.attempt(0).rank(0, 1)
    assert environment.report_text(paths) == "last words"
    assert environment.output(paths, 1, "stdout") == "last words\n"
    for path in (rank.stdout, paths.attempt(0).report_text, paths.job_log):
        path.unlink(missing_ok=True)
        os.mkfifo(path, 0o600)
    assert environment.report_text(paths) == ""
    assert environment.output(paths, 1, "stdout") is None
    assert OutputReader(paths.job_log).read() is None


@pytest.mark.parametrize("argv", [["report"], ["logs", "--events"], ["status", "--no-slurm"]], ids=" ".join)
def test_what_is_left_out_of_large_files_is_told(
    built: RunBuilder, argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """In a process that may have 600 MB more than it has now."""
    events = sorted(built.paths.attempt(0).events.iterdir())
    with events[0].open("ab") as file:
        file.write(b'{"event": "x", "y": [' + b"[]," * 20_000_000 + b"0]}\n")
    os.truncate(events[1], 2 << 30)
    store = built.paths.attempt(0).store
    store.mkdir(mode=0o700)
    before = resource.getrlimit(resource.RLIMIT_AS)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + (600 << 20), before[1]))
    try:
        assert main([*argv, str(built.root)]) == 0
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    said = "".join(capsys.readouterr())
    if argv != ["status", "--no-slurm"]:
        assert "bytes were left out: " in said
