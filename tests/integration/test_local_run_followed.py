"""``logs`` and ``report`` beside a run that goes on: what comes is shown; its end ends them, and Ctrl-C."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hpc_elastic.run.paths import ExitCode
from tests.rigs.local_run import ROOT, LocalRun

_SCRIPT = """
def wait_for_line(line):
    # What the other printed was read by its agent when it stands in its file.
    theirs = os.environ["TORCHELASTIC_ERROR_FILE"].replace(f"rank-0000{RANK}", f"rank-0000{1 - RANK}")
    deadline = time.monotonic() + 60
    while line + "\\n" not in open(theirs.replace("error.json", "stdout.log")).read():
        assert time.monotonic() < deadline
        time.sleep(0.005)

print(f"hello of {RANK} in {ROUND}", flush=True)
tell("here")
if ROUND == 0:
    wait_for("go")
    for number in range(3):
        if RANK == 1:
            wait_for_line(f"step {number} of 0")
        print(f"step {number} of {RANK}", flush=True)
        if RANK == 0:
            wait_for_line(f"step {number} of 1")
    if RANK == 1:
        raise ValueError("bad luck")
    wait_for("never")
print("\\x1b[2Jlast words", file=sys.stderr, flush=True)
wait_for("end")
"""


class Follower:
    """A subcommand that follows, and what it printed so far."""

    def __init__(self, run: LocalRun, *argv: str) -> None:
        self.out = run.folder / f"{''.join(argv)}.out"
        self.err = run.folder / f"{''.join(argv)}.err"
        with open(self.out, "wb") as out, open(self.err, "wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "hpc_elastic", argv[0], str(run.paths.root), "--follow", *argv[1:]],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                preexec_fn=_heed_sigint,
            )

    def text(self) -> str:
        return self.out.read_text(errors="replace")

    def lines(self) -> list[str]:
        return self.text().splitlines()


def _heed_sigint() -> None:
    """Whoever started the tests may ignore it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def following(run: LocalRun, *argv: str) -> Iterator[Follower]:
    follower = Follower(run, *argv)
    try:
        yield follower
    finally:
        follower.process.kill()
        follower.process.wait()


def cli(*argv: str, run: LocalRun) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hpc_elastic", argv[0], str(run.paths.root), *argv[1:]],
        capture_output=True,
        text=True,
        errors="replace",
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=60,
    )


def test_everything_that_follows_sees_the_run_through_a_restart_to_its_end(tmp_path: Path) -> None:
    with LocalRun(tmp_path, _SCRIPT, options=["--max-restarts", "1"]) as run:
        run.wait_moments("here", count=2, round_index=0)
        with (
            following(run, "logs", "--tail", "all") as logs,
            following(run, "logs", "--events") as events,
            following(run, "report") as report,
        ):
            run.until(lambda: "hello of 1 in 0" in logs.text(), "hello of rank 1")
            run.until(lambda: " round_final " in events.text(), "round_final")
            run.until(lambda: "is running" in report.text(), "report of a run that goes on")
            run.say("go")
            run.until(lambda: "last words" in logs.text(), "last words of round 1")
            run.until(lambda: " worker_failed " in events.text(), "the failure's event")
            run.until(lambda: "ValueError: bad luck" in report.text(), "report of the failure")
            assert [one.process.poll() for one in (logs, events, report)] == [None] * 3
            run.finish_well()
            assert [one.process.wait(60) for one in (logs, events, report)] == [0, 0, 0]
        for rank in range(2):
            mine = [line for line in logs.lines() if line.startswith(f"[rank {rank}] ")]
            steps = [f"[rank {rank}] step {number} of {rank}" for number in range(3)]
            assert mine[:4] == [f"[rank {rank}] hello of {rank} in 0", *steps]
            assert mine[-2:] == [f"[rank {rank}] hello of {rank} in 1", f"[rank {rank}] \x1b[2Jlast words"]
        assert "[rank 1] ValueError: bad luck" in logs.lines()
        assert logs.lines().count("--- attempt 0, round 1 ---") == 1
        written = sum(len(path.read_text().splitlines()) for path in run.attempt().events.glob("*.jsonl"))
        assert len(events.lines()) == written
        assert "succeeded: all workers ended with 0 (exit code 0)" in logs.err.read_text()
        assert "SUCCEEDED" in report.text().rpartition("=" * 60 + "\n" + "train.py")[2]

        _after_its_end(run)


def _after_its_end(run: LocalRun) -> None:
    """In the order in which it was printed, by the times that the agents kept: each step waits for the one before."""
    done = cli("logs", "--round", "0", "--stdout", run=run)
    assert (done.returncode, done.stderr) == (0, "")
    steps = [line for line in done.stdout.splitlines() if " step " in line]
    assert steps == [f"[rank {rank}] step {number} of {rank}" for number in range(3) for rank in range(2)]
    around = cli("logs", "--around-failure", "--lines", "3", run=run)
    lines = around.stdout.splitlines()
    middle = next(number for number, line in enumerate(lines) if "rank 1 on node1 failed: ValueError: bad luck" in line)
    assert "[rank 1] ValueError: bad luck" in lines[:middle]
    assert "[rank 0] step 2 of 0" in lines[:middle]
    command = [sys.executable, "-m", "hpc_elastic", "logs", str(run.paths.root), "--round", "0"]
    read, write = os.pipe()
    os.close(read)  # as `head` does
    with subprocess.Popen(
        command, stdout=write, stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)}
    ) as piped:
        os.close(write)
        assert piped.stderr is not None
        assert piped.stderr.read() == b""
        assert piped.wait(60) == 141
    command = [*command[:-2], "--stderr", "--rank", "0"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm"}
    for name in ("NO_COLOR", "FORCE_COLOR"):
        environ.pop(name, None)
    assert on_a_terminal(command, environ) == b"\x1b[36m[rank 0]\x1b[0m last words\r\n"
    assert on_a_terminal(command, {**environ, "NO_COLOR": "1"}) == b"[rank 0] last words\r\n"
    assert on_a_terminal([*command, "--raw"], environ) == b"[rank 0] \x1b[2Jlast words\r\n"


def on_a_terminal(command: list[str], environ: dict[str, str]) -> bytes:
    """What a command prints where its stdout is a terminal."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs, env=environ) as process:
        os.close(theirs)
        found = b""
        try:
            while chunk := os.read(ours, 65536):
                found += chunk
        except OSError:
            pass  # its other end is closed
        os.close(ours)
        assert process.wait(60) == 0
    return found


def test_ctrl_c_ends_who_follows_and_not_the_run(tmp_path: Path) -> None:
    with LocalRun(tmp_path, 'print("here", flush=True); tell("here"); wait_for("end"); sys.exit(3)', nodes=1,
                  options=["--max-restarts", "0"]) as run:  # fmt: skip
        run.wait_moments("here", count=1)
        with (
            following(run, "logs") as logs,
            following(run, "logs", "--events") as events,
            following(run, "report") as report,
            following(run, "report", "--format", "json") as one_more,
        ):
            run.until(lambda: "[rank 0] here" in logs.text(), "output")
            run.until(lambda: "workers_started" in events.text(), "events")
            run.until(lambda: "is running" in report.text(), "report")
            for one in (logs, events, report):
                one.process.send_signal(signal.SIGINT)
            assert [one.process.wait(60) for one in (logs, events, report)] == [130] * 3
            assert [one.err.read_text() for one in (logs, events, report)] == [""] * 3
            run.say("end")
            assert run.finish() == ExitCode.WORKERS_FAILED
            assert one_more.process.wait(60) == ExitCode.WORKERS_FAILED, "it takes over the run's code"
