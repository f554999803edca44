"""Mounts that stop answering for ever, or refuse everything for a while: the run ends, or goes on; no node's fault.

The emulated mount's process stops serving: whoever asks it something sits in the kernel, and not even SIGKILL takes the
thread away. What can be seen of the run is read from the server's side. It refuses as with an expired ticket or a
withdrawn export.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hpc_elastic.run.paths import ExitCode, Outcome
from hpc_elastic.workers.tree import TAG_VARIABLE
from tests.rigs import lockstep
from tests.rigs.local_run import LocalRun
from tests.rigs.network_nodes import NetworkRun
from tests.rigs.nfs_emulator import MountSettings, NfsEmulator
from tests.rigs.processes import Process

GRACE = 1.0
LEAVING = 30.0
"""Seconds beyond the grace in which everything is over; most are waits for a mount that is not known to be dead yet."""
PATIENCE = 70.0

_TRAINS = Path(lockstep.__file__).read_text()
_SAVES_ON_SIGTERM = ("--save-every", "1000000", "--save-on-sigterm")
_HAS_A_FAMILY = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen(["sh", "-c", "(setsid sleep 1000 &)"]).wait()
tell("here")
others_in_round()
wait_for("end")
"""


class MountedRun(LocalRun):
    """Its run directory lies on the mount, and what it prints where `prints_there`. Tests read the server's side."""

    server: Path
    prints_there = False

    def __enter__(self) -> LocalRun:
        mount = self.runs
        if self.prints_there:
            self.log_path = mount.parent / "printed.log"
        super().__enter__()
        self.runs = self.server / mount.name
        if self.prints_there:
            self.log_path = self.server / "printed.log"
        return self

    def steps(self) -> int:
        """The furthest step of the newest round, from the job log."""
        newest = self.log().rpartition(" begins at step ")[2]
        return max(map(int, re.findall(r"\bstep (\d+) at ", newest)), default=0)

    def wait_more_steps(self, round_index: int = 0) -> None:
        """Until the ranks of the round have done three steps, or three more."""
        begun = " begins at step "
        self.until(lambda: self.log().count(begun) == self.nodes * int(self.nproc) * (round_index + 1), "the round")
        before = self.steps()
        self.until(lambda: self.steps() >= before + 3, "steps")

    def kill_rank(self, rank: int) -> None:
        (pid,) = (process.pid for process in self.processes() if process.environ.get("RANK") == str(rank))
        os.kill(pid, signal.SIGKILL)

    def ends_well(self) -> None:
        """The training is told to end, and each rank has the right result."""
        (self.folder / "end").touch()
        assert self.finish() == ExitCode.OK
        results = re.findall(r"final: step=(\d+) state=(\d+)", self.log())
        assert len(results) == self.nodes * int(self.nproc)
        assert {int(state) for _, state in results} == {lockstep.expected(int(results[0][0]))}


@pytest.fixture
def emulator(tmp_path: Path) -> Iterator[NfsEmulator]:
    backing = tmp_path / "server"
    for folder in (backing, backing / "runs"):
        folder.mkdir(mode=0o700)
    with NfsEmulator(backing, mounts=1, settings=MountSettings(write_behind=False)) as emulator:
        yield emulator


@contextmanager
def run_on(
    emulator: NfsEmulator,
    script: str = "",
    *,
    prints_there: bool = False,
    hangs_first: bool = False,
    options: Sequence[str] = (),
    **how: Any,
) -> Iterator[MountedRun]:
    """A run of `script`; without one, of the lock-step trainer, whose checkpoints are on another filesystem."""
    options = ["--shutdown-timeout", f"{GRACE:g}", *options]
    folder = emulator.backing.parent
    how = how if script else {"prelude": "", **how}
    run = MountedRun(folder, script or _TRAINS, runs_dir=emulator.paths[0] / "runs", options=options, **how)
    run.server, run.prints_there = emulator.backing, prints_there
    if hangs_first:
        emulator.freeze()
    run.__enter__()
    try:
        yield run
    finally:
        emulator.thaw()  # what the mount still holds can go
        run.__exit__(ValueError)


def workers(run: LocalRun) -> list[int]:
    return [process.pid for process in run.processes() if "RANK" in process.environ]


def ends(run: LocalRun, number: signal.Signals) -> float:
    """Send the signal and wait for the run's end, in vain for one that takes too long. Returns the seconds it took."""
    began = time.monotonic()
    run.signal(number)
    assert run.finish(within=PATIENCE) == 128 + number
    assert workers(run) == []
    return time.monotonic() - began


def test_ctrl_c_in_training(emulator: NfsEmulator) -> None:
    with run_on(emulator, arguments=_SAVES_ON_SIGTERM) as run:
        run.wait_more_steps()
        emulator.freeze()
        run.wait_more_steps()
        assert ends(run, signal.SIGINT) < GRACE + LEAVING
        assert list(run.folder.glob("step-*.json")), "rank 0 got its SIGTERM, and its time"
        assert "does not answer" in run.log()
        assert f"{emulator.paths[0] / 'runs'}" in run.log()
        assert f"end: the run was cancelled (SIGINT on {os.uname().nodename}); exit code 130" in run.log()


def test_ctrl_c_before_there_is_a_run_directory(emulator: NfsEmulator) -> None:
    with run_on(emulator, hangs_first=True) as run:
        run.until(lambda: len(run.processes()) == 2, "process behind the front")
        assert ends(run, signal.SIGINT) < LEAVING
        # Its stderr is a file, which might be on the mount: said on a terminal or a pipe alone.
        assert run.log() == ""


def test_sigterm_before_the_first_round(emulator: NfsEmulator) -> None:
    with run_on(emulator) as run:
        run.until(lambda: "when it has ended" in run.log(), "head of the job log")
        emulator.freeze()
        assert ends(run, signal.SIGTERM) < GRACE + LEAVING
        assert "does not answer" in run.log() or "has not answered" in run.log()


def test_sigterm_while_the_evidence_of_a_failure_can_not_be_had(emulator: NfsEmulator) -> None:
    """And stdout, too, is a file on the mount."""
    with run_on(emulator, nodes=1, nproc=2, prints_there=True) as run:
        run.wait_more_steps()
        emulator.freeze()
        run.kill_rank(0)
        run.until(lambda: not workers(run), "end of the workers", within=GRACE + LEAVING)
        assert ends(run, signal.SIGTERM) < GRACE + LEAVING


@pytest.mark.slow  # as in training, but for the phase
def test_sigterm_when_all_workers_have_ended(emulator: NfsEmulator) -> None:
    with run_on(emulator) as run:
        run.wait_more_steps()
        emulator.freeze()
        (run.folder / "end").touch()
        run.until(lambda: not workers(run), "end of the workers")
        assert ends(run, signal.SIGTERM) < GRACE + LEAVING


def test_a_worker_fails_and_the_run_goes_on_when_the_mount_answers_again(emulator: NfsEmulator) -> None:
    with run_on(emulator, nodes=1, nproc=2) as run:
        run.wait_more_steps()
        emulator.freeze()
        run.wait_more_steps()
        run.kill_rank(1)
        run.until(lambda: not workers(run), "end of the other worker", within=GRACE + LEAVING)
        emulator.thaw()
        run.wait_more_steps(1)
        run.ends_well()
        check_killed_worker(run)


def check_killed_worker(run: MountedRun) -> None:
    """Rank 1's SIGKILL is the one cause, the other rank's error is its consequence, and one restart is charged."""
    verdict = run.report()["verdict"]
    assert (verdict["cause"], verdict["failure"]["global_rank"]) == ("worker", 1)
    assert "SIGKILL" in verdict["summary"]
    assert run.report()["bad_nodes"] == []
    assert {event["restarts_used"] for event in run.events("round_final")} == {0, 1}
    assert run.events("node_lost") == run.events("health_check_failed") == []


def test_nothing_of_a_round_outlives_a_killed_supervisor_and_a_killed_agent(emulator: NfsEmulator) -> None:
    with run_on(emulator, _HAS_A_FAMILY) as run:
        run.wait_moments("here", count=2)

        def sleepers() -> list[Process]:
            return [process for process in run.processes() if process.argv[:1] == ("sleep",)]

        run.until(lambda: len(sleepers()) == 2, "each worker's daemon, a program by now")
        family = sleepers() + run.tagged(1)
        family = [process for process in family if "store_host.py" not in " ".join(process.argv)]
        assert len(family) >= 4
        emulator.freeze()
        time.sleep(2 * run.heartbeat_ttl / 5)  # so that all agents have asked the mount something
        agent = run.agent(0)
        os.kill(agent.pid, signal.SIGKILL)
        mine = [process for process in family if process.environ.get(TAG_VARIABLE, "").startswith(f"{run.uid}:0:")]
        assert mine
        run.until(lambda: not any(p.lives() for p in mine), "end of the killed agent's family", within=40.0)
        run.signal(signal.SIGKILL)
        assert run.finish() == -signal.SIGKILL
        run.until(lambda: not any(p.lives() for p in family), "end of all", within=GRACE + LEAVING, after_its_end=True)


HOLD = 3.0
"""Seconds: a second look at the mount comes one second after the first, and a refusal is told from one second on."""


def until_all_notice(run: MountedRun) -> None:
    run.until(lambda: run.log().count("the shared filesystem refused") == 3, "both nodes' and the supervisor's word")


def refused(run: MountedRun) -> set[tuple[str, int, bool]]:
    return {(event["error"], event["node"], event["over"]) for event in run.events("filesystem_refused")}


@pytest.mark.parametrize(("error", "text"), [("EACCES", "Permission denied"), ("ESTALE", "Stale file handle")])
def test_a_worker_fails_meanwhile(error: str, text: str, emulator: NfsEmulator) -> None:
    with run_on(emulator, nodes=2, nproc=1) as run:
        run.wait_more_steps()
        emulator.fail(error)
        run.kill_rank(1)
        until_all_notice(run)
        time.sleep(HOLD)
        emulator.heal()
        run.wait_more_steps(1)
        run.ends_well()
        assert refused(run) == {(text, node, True) for node in (-1, 0, 1)}
        check_killed_worker(run)
        assert f": {text}" in run.attempt().report_text.read_text()
        assert run.rank(1).error_file.exists(), "the evidence was written when that was possible again"


def test_nothing_else_happens_and_then_the_run_ends_meanwhile(emulator: NfsEmulator) -> None:
    with run_on(emulator, nodes=2, nproc=1) as run:
        run.wait_more_steps()
        emulator.fail("EIO")
        until_all_notice(run)
        time.sleep(HOLD)
        run.wait_more_steps()
        emulator.heal()
        run.until(lambda: len(run.events("filesystem_refused")) == 3, "end of the refusal")
        emulator.fail("EPERM")
        (run.folder / "end").touch()
        run.until(lambda: not any("RANK" in process.environ for process in run.processes()), "end of the workers")
        run.until(lambda: run.log().count("the shared filesystem refused") == 6, "all words about the second refusal")
        time.sleep(HOLD)
        emulator.heal()
        run.ends_well()
        assert {event["round"] for event in run.events("round_final")} == {0}
        assert run.report()["verdict"]["cause"] == "none"
        outages = run.report()["attempts"][0]["outages"]
        errors = [one["error"] for one in outages if one["kind"] == "filesystem"]
        assert sorted(errors) == ["Input/output error"] * 3 + ["Operation not permitted"] * 3


def test_one_that_lasts_is_the_cause(emulator: NfsEmulator) -> None:
    options = ["--health-checks", "default,shared=4"]
    with run_on(emulator, nodes=2, nproc=1, options=options) as run:
        run.wait_more_steps()
        emulator.fail("EACCES")
        run.kill_rank(1)
        run.until(lambda: "node1 has left the run" in run.log(), "the failed worker's node gives up")
        emulator.heal()
        assert run.finish() == ExitCode.WORKERS_FAILED
        report = run.report()
        assert report["outcome"] == Outcome.TOO_FEW_NODES.value
        assert report["verdict"]["cause"] == "filesystem"
        assert "Permission denied" in report["verdict"]["summary"]
        assert report["bad_nodes"] == []


def test_one_node_alone_leaves_and_the_others_go_on(tmp_path: Path) -> None:
    with NetworkRun(tmp_path, nodes=3) as run:
        first = run.wait_round(count=3)
        alone = next(node for node in range(3) if node != run.coordinator())
        run.emulator.fail("EACCES", mount=alone)
        run.until(lambda: "the shared filesystem refused" in run.log(alone), "the node's word")
        workers = run.workers(first)
        run.kill_worker(workers[alone])
        run.wait_for_ends([alone], within=60.0)
        assert "this node leaves the run" in run.log(alone)
        assert "Permission denied" in run.log(alone)
        run.let_workers_end()


def test_a_quota_that_is_used_up_holds_a_restart_and_no_node_is_blamed(emulator: NfsEmulator) -> None:
    with run_on(emulator, nodes=2, nproc=1) as run:
        run.wait_more_steps()
        for operation in ("write", "create", "mkdir", "symlink", "link", "commit"):
            emulator.fail("EDQUOT", operation=operation)
        run.kill_rank(1)
        run.until(lambda: "is full: Disk quota exceeded" in run.log(), "word about the quota")
        time.sleep(HOLD)
        emulator.heal()
        run.wait_more_steps(1)
        run.ends_well()
        check_killed_worker(run)
        (refused,) = [event for event in run.events("filesystem_refused") if event["node"] == 1]
        assert refused["error"] == "Disk quota exceeded"
        assert refused["path"].startswith(f"{emulator.paths[0]}")
        assert run.rank(1).error_file.exists()
