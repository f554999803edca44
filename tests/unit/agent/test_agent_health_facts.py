"""What is measured of a node's memory, disks and run directory."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from hpc_elastic.agent import health_checks
from hpc_elastic.agent.health import MemoryFacts, RoomFacts
from hpc_elastic.agent.health_checks import measure_memory, measure_room, measure_shared
from hpc_elastic.base.clock import SystemClock
from hpc_elastic.doctor.host import probe_memory
from tests.rigs.fake_clock import FakeClock

MIB = 1 << 20


@pytest.fixture(autouse=True)
def node_memory(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """1 GiB available."""
    memory = SimpleNamespace(available=1 << 30)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    return memory


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def proc_tree(top: Path, *, v2: bool) -> tuple[str, Path]:
    """A procfs with one memory cgroup, job/step, the cgroups' mount point."""
    mount = top / "cgroup"
    kind, path = ("cgroup2", "0::/job/step") if v2 else ("cgroup", "4:memory:/job/step")
    write(top / "proc/self/cgroup", path + "\n")
    options = "rw" if v2 else "rw,memory"
    write(top / "proc/self/mountinfo", f"30 20 0:26 / {mount} rw - {kind} none {options}\n")
    return str(top / "proc"), mount


STAT = f"anon 1\ninactive_file {300 * MIB}\nactive_file {100 * MIB}\n"
V1_LIMIT = {
    "job/step/memory.limit_in_bytes": "9223372036854771712\n",  # no limit
    "job/step/memory.usage_in_bytes": "1\n",
    "job/memory.limit_in_bytes": f"{100 * MIB}\n",
    "job/memory.usage_in_bytes": f"{200 * MIB}\n",
}
OF_512, OF_100 = "the cgroup's limit of 512.0 MiB", "the cgroup's limit of 100.0 MiB"


@pytest.mark.parametrize(
    ("v2", "files", "free", "limited_by"),
    [
        (True, {"job/step/memory.max": "max\n", "job/step/memory.current": "5000\n"}, 1 << 30, ""),
        # The job's own limit counts; what is kept of files does not.
        (
            True,
            {
                "job/step/memory.max": "max\n",
                "job/memory.max": f"{512 * MIB}\n",
                "job/memory.current": f"{500 * MIB}\n",
                "job/memory.stat": STAT,
            },
            412 * MIB,
            OF_512,
        ),
        (
            False,
            {**V1_LIMIT, "job/memory.stat": f"inactive_file 7\ntotal_inactive_file {110 * MIB}\n"},
            10 * MIB,
            OF_100,
        ),
        (False, {**V1_LIMIT, "job/memory.stat": ""}, 0, OF_100),
    ],
)
def test_memory_is_what_the_node_and_the_cgroups_leave(
    tmp_path: Path, v2: bool, files: dict[str, str], free: int, limited_by: str
) -> None:
    proc, mount = proc_tree(tmp_path, v2=v2)
    for name, text in files.items():
        write(mount / name, text)
    assert measure_memory(proc) == MemoryFacts(free=free, limited_by=limited_by)


def test_where_nothing_can_be_read_nothing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert measure_memory(str(tmp_path / "nothing")) == MemoryFacts(free=1 << 30)
    monkeypatch.undo()
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path / "nothing"))
    assert measure_memory(str(tmp_path / "nothing")) is None


def test_a_limit_above_what_the_node_has_free_is_one_to_the_doctor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a job with all memory of its node: files that the kernel keeps make the node's own the smaller."""
    _, mount = proc_tree(tmp_path, v2=True)
    write(mount / "job/memory.max", f"{4096 * MIB}\n")
    write(mount / "job/memory.current", f"{500 * MIB}\n")
    monkeypatch.setattr(health_checks, "memory_folders", lambda **_: [(str(mount / "job"), True)])
    assert measure_memory() == MemoryFacts(free=1 << 30)
    found = probe_memory(SimpleNamespace(env={"SLURM_JOB_ID": "1"}))  # type: ignore[arg-type]
    assert found.limit == "the cgroup's limit of 4.0 GiB"


def test_room_on_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = measure_room(str(tmp_path))
    real = os.statvfs(tmp_path)
    assert abs(here.free - real.f_bavail * real.f_frsize) < 1 << 30
    assert here.error == ""
    assert measure_room(str(tmp_path / "missing")).free > 1 << 50, "a TMPDIR that is not there is full of nothing"

    def counts_no_inodes(path: str) -> Any:
        return SimpleNamespace(f_bavail=3, f_frsize=4096, f_files=0, f_favail=0)

    monkeypatch.setattr(os, "statvfs", counts_no_inodes)
    assert measure_room("/x") == RoomFacts(path="/x", free=12288, has_inodes=True)

    def dead(path: str) -> Any:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "statvfs", dead)
    assert measure_room("/x") == RoomFacts(path="/x", error="Input/output error")


def test_a_run_directory_takes_a_file_and_gives_it_back(tmp_path: Path) -> None:
    path = tmp_path / "attempt-000/health/node-0"
    path.parent.parent.mkdir(mode=0o700)
    for _ in range(2):
        facts = measure_shared(path, SystemClock())
        assert (facts.error, facts.is_full) == ("", False)
        assert -2.0 < facts.clock.least <= facts.clock.most < 2.0, "it is this host's own clock"
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)


def test_the_server_s_clock_shows(tmp_path: Path) -> None:
    path = tmp_path / "health" / "node-0"
    clock = FakeClock()
    facts = measure_shared(path, clock)
    wanted = path.stat().st_mtime - clock.time_ns() / 1e9
    assert facts.clock.least == pytest.approx(wanted, abs=0.01)


def test_a_run_directory_that_is_gone_is_the_store_s_to_tell(tmp_path: Path) -> None:
    assert measure_shared(tmp_path / "gone/health/node-0", SystemClock()).error == ""


@pytest.mark.parametrize(
    ("code", "is_full"), [(errno.ENOSPC, True), (errno.EDQUOT, True), (errno.EIO, False), (errno.ESTALE, False)]
)
def test_a_disk_that_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, is_full: bool) -> None:
    def refuse(fd: int, data: bytes, offset: int) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "pwrite", refuse)
    facts = measure_shared(tmp_path / "health" / "node-0", SystemClock())
    assert (facts.error, facts.is_full) == (os.strerror(code), is_full)


def test_what_is_read_back_must_be_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_checks.os, "pread", lambda fd, count, offset: b"\0" * 32)
    facts = measure_shared(tmp_path / "health" / "node-0", SystemClock())
    assert facts.error == "what was written is not what is read back"


def test_a_folder_that_somebody_planted_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "health").symlink_to(tmp_path / "elsewhere")
    assert "symbolic link" in measure_shared(tmp_path / "health" / "node-0", SystemClock()).error
