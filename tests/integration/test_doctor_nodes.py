"""The probe of files on mounts with caches of their own; `hpc-elastic doctor --nodes` on this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hpc_elastic.base.clock import SystemClock
from hpc_elastic.doctor.host import FileFacts, ProbeSettings, ProbeSite, probe_files
from hpc_elastic.store.file_store import FileStore
from tests.rigs.local_run import ROOT
from tests.rigs.nfs_emulator import MountSettings, NfsEmulator
from tests.rigs.waiting import until


def site_on(mount: Path, rank: int) -> ProbeSite:
    folder, clock = mount / "runs" / "doctor" / "run" / "doctor", SystemClock()
    return ProbeSite(
        rank=rank, world_size=2, node=f"n{rank}", folder=folder, settings=ProbeSettings(python=sys.executable),
        store=FileStore(folder / "store", clock=clock), clock=clock, env={"HOME": str(mount), "TMPDIR": str(mount)},
    )  # fmt: skip


def probe_two(folder: Path, settings: MountSettings) -> list[FileFacts]:
    (folder / "runs" / "doctor" / "run" / "doctor" / "store").mkdir(parents=True, mode=0o700)
    with NfsEmulator(folder, mounts=2, settings=settings) as emulator, ThreadPoolExecutor(2) as pool:
        return list(pool.map(probe_files, [site_on(path, rank) for rank, path in enumerate(emulator.paths)]))


def test_the_store_is_not_held_back_by_caches_of_names(tmp_path: Path) -> None:
    """As NFS: a name that was missing stays so for a while, but to open a folder or a file asks the server."""
    found = probe_two(tmp_path, MountSettings(attributes=4.0, directories=4.0))
    for facts in found:
        assert facts.store_seconds is not None
        assert facts.store_seconds < 2
        assert not facts.rooms["runs"].error
        assert facts.filesystem.startswith("fuse")
    assert sorted(bool(facts.created) for facts in found) == [False, True]


# -- the command ---------------------------------------------------------------------------------------------------


def doctor(folder: Path, *arguments: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    own = {
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "HOME": str(folder), "PYTHONPATH": str(ROOT),
        "XDG_STATE_HOME": str(folder / "state"), "LANG": os.environ.get("LANG", "C.UTF-8"), **(env or {}),
    }  # fmt: skip
    command = [sys.executable, "-m", "hpc_elastic", "doctor", "--cluster", "local", *arguments]
    return subprocess.Popen(
        command, cwd=folder, env=own, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def test_two_nodes_of_this_machine_are_examined_and_nothing_is_left(tmp_path: Path) -> None:
    nowhere = str(tmp_path / "nowhere")
    asked = doctor(tmp_path, "--nodes", "2", "--python", "/usr/bin/python3", "--json", env={"HOME": nowhere})
    printed, notes = asked.communicate(timeout=240)
    found: dict[str, Any] = json.loads(printed)
    levels = {finding["check"]: finding["level"] for finding in found["findings"]}
    assert levels["nodes.job"] == "ok", notes
    assert levels["nodes.create"] == levels["nodes.store"] == "ok", printed
    assert levels["nodes.home"] == "problem"
    assert asked.returncode == 1
    assert {node["node"]: node["files"]["created"] for node in found["nodes"]}.keys() == {"node0", "node1"}
    assert sum(node["files"]["created"] for node in found["nodes"]) == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_its_end_ends_the_run_too(tmp_path: Path, number: signal.Signals) -> None:
    asked = doctor(tmp_path, "--nodes", "2", "--python", "/usr/bin/python3")
    folders = tmp_path / "runs" / "doctor"
    until(lambda: list(folders.glob("*/attempt-000/events/*")) != [], seconds=60)
    asked.send_signal(number)
    assert asked.wait(60) == 128 + number
    (run,) = folders.iterdir()
    assert (run / "attempt-000" / "result.json").exists(), "it was ended, and not left behind"


def test_a_node_that_writes_nothing_is_a_problem_and_its_files_are_kept(tmp_path: Path) -> None:
    """The setup fails on every node: no worker starts."""
    asked = doctor(tmp_path, "--nodes", "1", "--python", "/usr/bin/python3", "--setup", "exit 7")
    printed, notes = asked.communicate(timeout=240)
    (line,) = [line for line in printed.splitlines() if " nodes.job: " in line]
    assert line.startswith("problem  nodes.job: node0: wrote nothing: failed"), line
    assert asked.returncode == 1
    (run,) = (tmp_path / "runs" / "doctor").iterdir()
    assert str(run) in notes


def test_a_probe_that_is_killed_leaves_what_was_known_and_why_it_ended(tmp_path: Path) -> None:
    """In the workers' interpreter, which shows that it was started and never ends."""
    slow = tmp_path / "python"
    slow.write_text(f"#!/bin/sh\n[ -z $RANK ] && exit 1\ntouch {tmp_path}/begun-$RANK\nexec sleep 600\n")
    slow.chmod(0o755)
    asked = doctor(tmp_path, "--nodes", "2", "--python", str(slow))
    folders = tmp_path / "runs" / "doctor"
    until(lambda: (tmp_path / "begun-0").exists() and (tmp_path / "begun-1").exists(), seconds=60)
    (probe,) = [
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if str(folders).encode() in (words := _read(path)) and b"node_job" in words
        if b"\0RANK=1\0" in _read(path.with_name("environ"))
    ]
    os.kill(probe, signal.SIGKILL)
    printed, notes = asked.communicate(timeout=120)
    (line,) = [line for line in printed.splitlines() if " nodes.job: " in line]
    assert line.startswith("problem  nodes.job: node[0-1]: stopped while it probed "), line
    assert "SIGKILL" in line or "signal 9" in line, line
    assert "ok       nodes.create: " in printed, "what was known before counts"
    assert "job.log" in notes


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_what_it_does_not_take_is_misuse(tmp_path: Path) -> None:
    asked = doctor(tmp_path, "--tee", "3")
    _, notes = asked.communicate(timeout=60)
    assert (asked.returncode, len(notes.splitlines())) == (2, 1)
    assert "--tee belongs to hpc-elastic submit" in notes


def test_a_run_of_nodes_that_a_file_asks_for_is_not_examined(tmp_path: Path) -> None:
    (tmp_path / "hpc_elastic.toml").write_text("nodes = 2\n")
    asked = doctor(tmp_path, "--python", "/usr/bin/python3")
    printed, _ = asked.communicate(timeout=120)
    assert " files.runs: " in printed
    assert " nodes." not in printed


def test_a_rank_that_does_not_come_is_waited_for_in_bounded_time(tmp_path: Path) -> None:
    (tmp_path / "runs" / "doctor" / "run" / "doctor" / "store").mkdir(parents=True, mode=0o700)
    alone, late = site_on(tmp_path, 0), site_on(tmp_path, 1)
    assert alone.barrier("x", seconds=0.2) == (1,)
    threading.Timer(0.2, lambda: late.gather("y", "mine")).start()
    assert alone.gather("y", "own", seconds=30) == {0: "own", 1: "mine"}
