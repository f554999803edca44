"""Folders and pages that an attacker puts into /dev/shm, where agents and workers keep their heartbeats."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_elastic.agent.heartbeats import PREFIX
from tests.rigs.two_users import User

_NAME = "hpc-elastic-security-test"
_OPEN = """
import os, sys
from hpc_elastic.agent.heartbeats import open_folder
folder = open_folder(sys.argv[1], os.environ)
print(folder.path, os.stat(folder.path).st_uid == os.geteuid(), oct(os.stat(folder.path).st_mode & 0o777))
print(folder.make_file("0-0"))
folder.remove()
"""
_PAGE = """
import os, sys
from pathlib import Path
from hpc_elastic.worker_api.records import empty_file
os.umask(0)
folder = Path(sys.argv[1])
folder.mkdir(exist_ok=True)
(folder / "alive").touch()
page = folder / "0-0"
page.write_bytes(empty_file())
print(page)
"""


@pytest.fixture
def shm() -> Iterator[Path]:
    path = Path("/dev/shm", f"{PREFIX}{_NAME}")
    yield path
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@pytest.mark.parametrize("planted", ["folder", "link to the victim's", "link to the attacker's", "file"])
def test_a_planted_folder_is_never_used(attacker: User, victim: User, shm: Path, shared: Path, planted: str) -> None:
    victim.run(["mkdir", "-m", "700", "-p", "mine"], check=True)
    attacker.run(["mkdir", "-m", "777", str(shared / "theirs")], check=True)
    if planted == "folder":
        attacker.python(_PAGE, shm)
    elif planted == "file":
        attacker.run(["touch", str(shm)], check=True)
    else:
        target = victim.home / "mine" if "victim" in planted else shared / "theirs"
        attacker.run(["ln", "-s", str(target), str(shm)], check=True)
    path, is_ours, mode, page = victim.python(_OPEN, _NAME, env={"TMPDIR": str(victim.home)}).stdout.split()
    assert path != str(shm)
    assert (is_ours, mode) == ("True", "0o700")
    assert page.startswith(path)
    assert list((shared / "theirs").iterdir()) == []
    assert list((victim.home / "mine").iterdir()) == []


def test_a_sweep_leaves_strangers_folders_alone(attacker: User, victim: User, shm: Path) -> None:
    attacker.python(_PAGE, shm)
    victim.python(_OPEN, "another", env={"TMPDIR": str(victim.home)})
    assert (shm / "0-0").exists()


def test_a_worker_maps_no_strangers_page(attacker: User, victim: User, shared: Path) -> None:
    """Its owner could cut it off, which kills a process that has it mapped (SIGBUS), or write notices into it."""
    page = attacker.python(_PAGE, shared / "planted").stdout.strip()
    done = victim.python(
        """
        import os, sys
        import hpc_elastic
        from hpc_elastic.worker_api import heartbeat
        hpc_elastic.heartbeat(step=1)
        os.truncate(sys.argv[1], 0)
        hpc_elastic.heartbeat(step=2)
        print("mapped", sys.argv[1] in open("/proc/self/maps").read(), heartbeat.notice_is_there())
        """,
        page,
        env={"HPC_ELASTIC_HEARTBEAT": page},
    )
    assert done.stdout.split() == ["mapped", "False", "False"]
