"""A container image of a folder for charliecloud: an own root, with the host's /usr, Python and this checkout mounted.

It has its own /etc, /home, /opt and so on, and none of the host's other folders, so what a worker has of the host is
what was mounted. Charliecloud 0.31 makes no folder to mount at in a read-only image: they are made here.
"""

from __future__ import annotations

import os
import sys
import zlib
from pathlib import Path

from tests.rigs.requirements import missing_programs, require

ROOT = Path(__file__).resolve().parents[2]
_FOLDERS = ("dev", "etc", "home", "mnt", "opt", "proc", "root", "run", "sys", "tmp", "usr", "var")
_LINKS = ("bin", "lib", "lib64", "sbin")


def require_charliecloud() -> None:
    require("charliecloud", missing_programs("ch-run"))


def podmans_sockets(folder: Path) -> Path:
    """Where podman has its sockets for what it runs in `folder`. The test removes it.

    A path of more than 50 characters is too long for them: each container then takes 20 s to end, and is not removed.
    """
    return Path(f"/tmp/podman-{zlib.crc32(os.fsencode(folder)):08x}")


def podman_environment(folder: Path) -> dict[str, str]:
    """Variables with which podman works here; where it does not, the test is skipped, and fails in CI.

    As root without CAP_SYS_RESOURCE podman's default limits are refused, and crun knows no hybrid cgroups.
    """
    conf = folder / "containers.conf"
    conf.write_text(
        '[containers]\ndefault_ulimits = ["nofile=1024:4096", "nproc=1000:1000"]\n'
        '[engine]\nruntime = "runc"\ncgroup_manager = "cgroupfs"\n'
    )
    storage = folder / "storage.conf"
    storage.write_text(
        f'[storage]\ndriver = "vfs"\ngraphroot = "{folder}/podman"\nrunroot = "{podmans_sockets(folder)}"\n'
    )
    require("podman", missing_programs("podman", "runc"))
    return {"CONTAINERS_CONF": str(conf), "CONTAINERS_STORAGE_CONF": str(storage)}


def interpreters_folders() -> list[str]:
    """What a worker's Python needs, as absolute paths, none below another."""
    wanted = {"/usr", str(ROOT), os.path.realpath(sys.prefix), os.path.realpath(sys.base_prefix)}
    return sorted(path for path in wanted if not any(path.startswith(other + "/") for other in wanted))


def make_image(folder: Path, *, mounted_at: list[str]) -> Path:
    """An image with room for mounts at `mounted_at`."""
    for name in _FOLDERS:
        (folder / name).mkdir(parents=True)
    for name in _LINKS:
        (folder / name).symlink_to(f"usr/{name}")
    for name in ("passwd", "group", "hosts", "resolv.conf"):
        (folder / "etc" / name).touch()
    (folder / "etc" / "of-the-image").write_text("yes")
    for path in mounted_at:
        (folder / path.lstrip("/")).mkdir(parents=True, exist_ok=True)
    return folder
