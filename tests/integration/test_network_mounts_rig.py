"""The rig itself: two clients of one server; nothing is left, whatever is killed; a frozen server holds them up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rigs.network_mounts import NetworkMounts, require_mounts
from tests.rigs.network_mounts.leftovers import PREFIX, remove_leftovers
from tests.rigs.network_mounts.location import mounts_below
from tests.rigs.processes import Process, all_processes
from tests.rigs.waiting import until

ROOT = Path(__file__).resolve().parents[2]
_OWNER = """
import sys, time
from tests.rigs.network_mounts import NetworkMounts
rig = NetworkMounts("glusterfs")
rig.__enter__()
print(rig.keeper, rig.paths[0].parent, flush=True)
time.sleep(100)
"""


def processes_of(folder: Path) -> list[Process]:
    """Those whose command line names the rig's folder."""
    return [process for process in all_processes() if any(str(folder) in word for word in process.argv)]


@pytest.fixture
def owner(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[subprocess.Popen[str], int, Path]]:
    """A process with a rig, to be killed: itself, its rig's keeper's pid, and the rig's folder."""
    require_mounts("glusterfs")
    # Its folder lies where no other session's rig, which may start just now, looks for what is left.
    with tempfile.TemporaryDirectory(prefix="rig-") as place:
        environ = {**os.environ, "TMPDIR": place}
        monkeypatch.setattr(tempfile, "tempdir", place)
        with subprocess.Popen(
            [sys.executable, "-c", _OWNER], cwd=ROOT, stdout=subprocess.PIPE, text=True, env=environ
        ) as process:
            assert process.stdout is not None
            keeper, folder = process.stdout.readline().split()
            yield process, int(keeper), Path(folder)
            process.kill()
            process.wait()
            remove_leftovers()


@pytest.mark.parametrize("kind", ["glusterfs", "sshfs"])
def test_two_clients_share_a_server_and_leave_nothing(kind: str) -> None:
    require_mounts(kind)
    with NetworkMounts(kind) as filesystem:
        folder = filesystem.paths[0].parent
        (filesystem.paths[0] / "made").mkdir()
        until(lambda: "made" in os.listdir(filesystem.paths[1]), "the other client sees it")
        assert len(mounts_below(folder)) == 3, "two clients and the server's disk"
        assert len({os.stat(path).st_dev for path in filesystem.paths}) == 2
        assert processes_of(folder)
    assert not folder.exists()
    assert not processes_of(folder)


def test_a_killed_owner_leaves_nothing(owner: tuple[subprocess.Popen[str], int, Path]) -> None:
    process, _, folder = owner
    process.send_signal(signal.SIGKILL)
    until(lambda: not folder.exists() and not processes_of(folder), "its keeper takes all away")
    assert not mounts_below(folder)


def test_what_a_killed_keeper_left_is_taken_away_at_the_next_start(
    owner: tuple[subprocess.Popen[str], int, Path],
) -> None:
    process, keeper, folder = owner
    process.send_signal(signal.SIGSTOP)  # so that it does nothing about it
    os.kill(keeper, signal.SIGKILL)
    until(lambda: not processes_of(folder), "the kernel kills all that it started")
    assert mounts_below(folder), "which the keeper would have taken away"
    remove_leftovers()
    assert not folder.exists()
    assert not mounts_below(folder)
    assert folder.name not in os.listdir(tempfile.gettempdir())
    assert folder.name.startswith(PREFIX)


def test_one_client_can_hang_alone_and_a_cut_ends_every_wait() -> None:
    require_mounts("sshfs")
    with NetworkMounts("sshfs") as filesystem:
        for path in filesystem.paths:
            (path / "shared").mkdir(exist_ok=True)
        ends: list[str] = []

        def write(name: str) -> threading.Thread:
            def body() -> None:
                try:
                    (filesystem.paths[0] / "shared" / name).write_text("x")
                    ends.append(f"{name} written")
                except OSError:
                    ends.append(f"{name} refused")

            thread = threading.Thread(target=body, daemon=True)
            thread.start()
            return thread

        filesystem.freeze(0)
        held_up = write("first")
        (filesystem.paths[1] / "shared" / "second").write_text("x")  # the other one goes on
        held_up.join(1.0)
        assert ends == []
        filesystem.thaw(0)
        held_up.join(60.0)
        assert ends == ["first written"]
        filesystem.freeze()
        for_ever = write("third")
        for_ever.join(1.0)
        assert for_ever.is_alive()
        filesystem.cut()
        for_ever.join(60.0)
        assert ends[1:] == ["third refused"]
