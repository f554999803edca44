"""Hung workers that no signal reaches: what the kernel says of them is in the report, and the run goes on."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_elastic.run.paths import ExitCode
from tests.rigs.local_run import LocalRun
from tests.rigs.nfs_emulator import require_fuse
from tests.rigs.processes import is_alive
from tests.rigs.silent_mount import SilentMount
from tests.rigs.waiting import until

# Python starts programs by vfork: until its child has loaded the program, the worker waits for it in the kernel.
_STARTS_A_PROGRAM = """
import hpc_elastic
tell("here")
hpc_elastic.heartbeat(step=3)
if ROUND == 0 and RANK == 1:
    with hpc_elastic.section("save"):
        subprocess.run([os.environ["NEVER"]])
if ROUND == 0:
    time.sleep(1000)
tell("done")
"""


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[SilentMount]:
    require_fuse()
    with SilentMount(tmp_path / "silent") as mount:
        yield mount


def test_a_child_that_hangs_before_its_program_runs_is_named(tmp_path: Path, mount: SilentMount) -> None:
    run = LocalRun(
        tmp_path,
        _STARTS_A_PROGRAM,
        environ={"NEVER": str(mount.file)},
        options=["--section-timeouts", "save:1.5", "--shutdown-timeout", "0.5"],
    )
    with run:
        run.wait_moments("done", count=2, round_index=1)
        assert mount.was_asked
        assert run.finish() == ExitCode.OK
        failure = run.report()["verdict"]["failure"]
        assert (failure["global_rank"], failure["failure_class"], failure["category"]) == (1, "hang", "infrastructure")
        assert failure["fingerprint"] == "hang:kernel"
        child = re.search(
            r"it waited for its child (\d+) to begin its program, which sat in .*execve", failure["reason"]
        )
        assert child, failure["reason"]
        text = run.attempt().report_text.read_text()
        assert re.search(rf"  rank 1: no Python stack; D .*; its child {child[1]} \(", text), text
        assert "  rank 0: <module> (train.py:" in text, "the other node's stacks are there all the same"
        assert re.search(r"  rank 1: at step 3, section 'save', silent for \d\.\d s", text)
        stacks = run.rank(1).stacks.read_text()
        assert f"  child {child[1]} " in stacks
        assert "it sits in an uninterruptible system call" in run.log(), "it was left, and that was told"
        mount.release()
        until(lambda: not is_alive(int(child[1])), what="its end, once the mount has gone")
        run.check_nothing_left(within=60)
