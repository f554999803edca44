"""``hpc-elastic doctor``, here and with --nodes: its lines and codes, and the probes of files and software."""

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
from hpc_elastic.doctor.host import FileFacts, ProbeSettings, ProbeSite, PythonFacts, look_at_python, probe_files
from hpc_elastic.run.spec import Container, ContainerImage, ContainerMount, Runtime
from hpc_elastic.store.file_store import FileStore
from tests.rigs.container_image import interpreters_folders, make_image, require_charliecloud
from tests.rigs.fake_nvml import build_nvml
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


LOCAL = ("doctor", "--cluster", "local", "--python", "/usr/bin/python3")


def start(folder: Path, *arguments: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    own = {
        "PATH": f"{folder / 'bin'}:{Path(sys.executable).parent}:/usr/bin:/bin", "HOME": str(folder), "USER": "ann",
        "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(folder / "state"), "LANG": os.environ.get("LANG", "C.UTF-8"),
        **(env or {}),
    }  # fmt: skip
    command = [sys.executable, "-m", "hpc_elastic", *arguments]
    return subprocess.Popen(
        command, cwd=folder, env=own, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def run(folder: Path, *arguments: str, env: Mapping[str, str] | None = None) -> tuple[int, str, str]:
    """The command's code, and what it printed on stdout and on stderr."""
    process = start(folder, *arguments, env=env)
    printed, notes = process.communicate(timeout=300)
    return process.returncode, printed, notes


def test_two_nodes_of_this_machine_are_examined_and_nothing_is_left(tmp_path: Path) -> None:
    nowhere = str(tmp_path / "nowhere")
    code, printed, notes = run(tmp_path, *LOCAL, "--nodes", "2", "--json", env={"HOME": nowhere})
    found: dict[str, Any] = json.loads(printed)
    levels = {finding["check"]: finding["level"] for finding in found["findings"]}
    assert levels["nodes.job"] == "ok", notes
    assert levels["nodes.create"] == levels["nodes.store"] == "ok", printed
    assert levels["nodes.home"] == "problem"
    assert code == 1
    assert {node["node"]: node["files"]["created"] for node in found["nodes"]}.keys() == {"node0", "node1"}
    assert sum(node["files"]["created"] for node in found["nodes"]) == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_its_end_ends_the_run_too(tmp_path: Path, number: signal.Signals) -> None:
    asked = start(tmp_path, *LOCAL, "--nodes", "2")
    folders = tmp_path / "runs" / "doctor"
    until(lambda: list(folders.glob("*/attempt-000/events/*")) != [], seconds=60)
    asked.send_signal(number)
    assert asked.wait(60) == 128 + number
    (ended,) = folders.iterdir()
    assert (ended / "attempt-000" / "result.json").exists(), "it was ended, and not left behind"


def test_a_node_that_writes_nothing_is_a_problem_and_its_files_are_kept(tmp_path: Path) -> None:
    """The setup fails on every node: no worker starts."""
    code, printed, notes = run(tmp_path, *LOCAL, "--nodes", "1", "--setup", "exit 7")
    (line,) = [line for line in printed.splitlines() if " nodes.job: " in line]
    assert line.startswith("problem  nodes.job: node0: wrote nothing: failed"), line
    assert code == 1
    (kept,) = (tmp_path / "runs" / "doctor").iterdir()
    assert str(kept) in notes


def test_a_probe_that_is_killed_leaves_what_was_known_and_why_it_ended(tmp_path: Path) -> None:
    """In the workers' interpreter, which shows that it was started and never ends."""
    slow = tmp_path / "python"
    slow.write_text(f"#!/bin/sh\n[ -z $RANK ] && exit 1\ntouch {tmp_path}/begun-$RANK\nexec sleep 600\n")
    slow.chmod(0o755)
    asked = start(tmp_path, *LOCAL, "--nodes", "2", "--python", str(slow))
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
    code, _, notes = run(tmp_path, *LOCAL, "--tee", "3")
    assert (code, len(notes.splitlines())) == (2, 1)
    assert "--tee belongs to hpc-elastic submit" in notes


def test_a_run_of_nodes_that_a_file_asks_for_is_not_examined(tmp_path: Path) -> None:
    (tmp_path / "hpc_elastic.toml").write_text("nodes = 2\n")
    _, printed, _ = run(tmp_path, *LOCAL)
    assert " files.runs: " in printed
    assert " nodes." not in printed


def test_a_rank_that_does_not_come_is_waited_for_in_bounded_time(tmp_path: Path) -> None:
    (tmp_path / "runs" / "doctor" / "run" / "doctor" / "store").mkdir(parents=True, mode=0o700)
    alone, late = site_on(tmp_path, 0), site_on(tmp_path, 1)
    assert alone.barrier("x", seconds=0.2) == (1,)
    threading.Timer(0.2, lambda: late.gather("y", "mine")).start()
    assert alone.gather("y", "own", seconds=30) == {0: "own", 1: "mine"}


FAKE = """#!/bin/sh
case "$*" in
  *config*) echo "SLURM_VERSION = 22.05.8"; echo "KillWait = 5 sec" ;;
  *partition*) echo "PartitionName=main Default=YES MaxTime=UNLIMITED State=UP TotalNodes=4" ;;
esac
"""


def test_a_person_sees_lines_the_code_says_whether_there_is_a_problem_and_submit_warns(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    for name in ("scontrol", "sacct", "sacctmgr", "sbatch"):
        (tmp_path / "bin" / name).write_text(FAKE)
        (tmp_path / "bin" / name).chmod(0o755)
    runs = ("--runs-dir", str(ROOT / "runs"), "--python", sys.executable)
    code, good, _ = run(tmp_path, "doctor", "--json", *runs)
    levels = {one["check"]: one["level"] for one in json.loads(good)["findings"]}
    assert (levels["slurm.version"], levels["slurm.kill-wait"]) == ("ok", "warning")
    assert not any(check.startswith("nodes.") for check in levels), "without --nodes nothing is submitted"
    assert (code == 1) == ("problem" in levels.values())
    code, bad, _ = run(tmp_path, "doctor", "--nodes", "5", "--save", *runs)
    assert code == 1
    (line,) = [line for line in bad.splitlines() if " partition.nodes: " in line]
    assert line.startswith("problem ")
    assert "gives a job at most 4 nodes" in line
    assert line.endswith("--nodes 4, or another --partition")
    # This sbatch prints no job id.
    (refused,) = [line for line in bad.splitlines() if " nodes.job: " in line]
    assert refused.startswith("problem  nodes.job: "), refused
    assert "a run would not begin either" in refused
    (tmp_path / "train.py").touch()
    options = ("--cluster", "slurm", "--dry-run", "--allow-local-runs-dir")
    code, _, warned = run(tmp_path, "submit", *options, "train.py")
    assert code == 0, warned
    assert "hpc-elastic doctor found: partition.nodes: main gives a job at most 4 nodes" in warned
    assert run(tmp_path, "doctor", "--nodes", "many")[0] == 2


_TORCH = """
import time
print("a banner on stdout")
time.sleep(0.2)
__version__ = "9.9.9"
"""
ENV = {"PATH": os.environ["PATH"], "HOME": "/tmp"}


def look(python: str, folder: Path, **more: object) -> PythonFacts:
    return look_at_python(python, {**ENV, "PYTHONPATH": str(folder)}, cwd=str(folder), **more)  # type: ignore[arg-type]


def test_an_interpreter_is_asked_in_a_process_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text(_TORCH)
    (tmp_path / "json.py").write_text("a user's")  # in the working directory, and on PYTHONPATH further down
    facts = look_at_python(sys.executable, {**ENV, "PYTHONPATH": str(tmp_path / "none")}, cwd=str(tmp_path))
    assert facts.version == ".".join(map(str, sys.version_info[:3]))
    (tmp_path / "json.py").unlink()
    facts = look(sys.executable, tmp_path)
    assert (facts.torch, facts.error) == ("9.9.9", "")
    assert facts.seconds >= 0.2


def test_what_is_no_interpreter_or_has_no_torch_is_a_fact(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')")
    broken = look(sys.executable, tmp_path)
    assert broken.torch_error == "ImportError: libcudart.so.13: cannot open shared object file"
    assert broken.version
    assert look("/bin/true", tmp_path).error == "/bin/true is no Python"
    assert look("/none/python", tmp_path).error == "/none/python: No such file or directory"
    (tmp_path / "torch/__init__.py").write_text("import time; time.sleep(60)")
    assert look(sys.executable, tmp_path, limit=0.5).error == f"{sys.executable} has not answered for 0.5 s"


def test_an_image_is_asked_through_the_runtime(tmp_path: Path) -> None:
    require_charliecloud()
    folders = interpreters_folders()
    image = make_image(tmp_path / "image", mounted_at=[*folders, str(tmp_path)])
    container = Container(
        image=ContainerImage(runtime=Runtime.CHARLIECLOUD, image=str(image)),
        mounts=tuple(ContainerMount(source=folder, target=folder) for folder in folders),
    )
    inside = look(sys.executable, tmp_path, container=container)
    assert not inside.error
    assert inside.version
    gone = Container(image=ContainerImage(runtime=Runtime.CHARLIECLOUD, image=str(tmp_path / "gone")))
    why = look(sys.executable, tmp_path, container=gone).error
    assert str(tmp_path / "gone") in why
    assert look(sys.executable, tmp_path, container=gone).error == why, "each node gives the same reason"
    enroot = Container(image=ContainerImage(runtime=Runtime.ENROOT, image="torch"))
    assert look(sys.executable, tmp_path, container=enroot).error == "enroot: No such file or directory"


def test_the_nodes_software_and_gpus_are_compared(tmp_path: Path) -> None:
    env = {"LD_LIBRARY_PATH": build_nvml(tmp_path), "FAKE_NVML_DRIVER": "550.54"}
    env |= {"FAKE_NVML": "0:h100=1;1:h100=1,ecc=3", "PATH": os.environ["PATH"]}
    command = ("doctor", "--cluster", "local", "--nodes", "2", "--json", "--runs-dir", str(tmp_path / "runs"))
    code, printed, notes = run(tmp_path, *command, env=env)
    assert code == 1, notes
    shown = json.loads(printed)
    found = {each["check"]: (each["level"], each["found"]) for each in shown["findings"]}
    assert found["nodes.python"][0] == "ok", found
    assert found["nodes.torch"][0] == "ok", found
    assert found["gpu.count"] == ("ok", "2 × NVIDIA H100 80GB HBM3, driver 550.54 on node[0-1]")
    assert found["gpu.errors"] == ("problem", "GPU 1 has 3 uncorrectable ECC errors on node[0-1]")
    assert [len(node["gpus"]["nvml"]["devices"]) for node in shown["nodes"]] == [2, 2]
    assert not any(node["failed"] for node in shown["nodes"])
