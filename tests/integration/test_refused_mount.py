"""A mount that refuses everything for a while, as with an expired ticket or a withdrawn export: no node's fault."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_elastic.run.paths import ExitCode, Outcome
from tests.integration.test_hung_mount import MountedRun, check_killed_worker, run_on
from tests.rigs.network_nodes import NetworkRun
from tests.rigs.nfs_emulator import MountSettings, NfsEmulator

HOLD = 3.0
"""Seconds: a second look at the mount comes one second after the first, and a refusal is told from one second on."""


@pytest.fixture
def emulator(tmp_path: Path) -> Iterator[NfsEmulator]:
    backing = tmp_path / "server"
    for folder in (backing, backing / "runs"):
        folder.mkdir(mode=0o700)
    with NfsEmulator(backing, mounts=1, settings=MountSettings(write_behind=False)) as emulator:
        yield emulator


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
