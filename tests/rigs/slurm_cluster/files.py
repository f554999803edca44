"""A rig's folders, users and configuration files on the disk."""

from __future__ import annotations

import fcntl
import os
import pwd
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path

from . import cgroups, configuration, debian_root, emulated_fs, services
from .configuration import Settings
from .layout import CACHE_FOLDER, CONTROLLER, RIGS_FOLDER, USERS, Layout
from .processes import call


def make_folders(layout: Layout) -> None:
    RIGS_FOLDER.mkdir(mode=0o755, parents=True, exist_ok=True)
    shared = (layout.server, layout.client, layout.homes, layout.shared)
    for folder in (layout.folder, layout.etc, layout.logs, layout.boot, layout.spool, *shared):
        folder.mkdir()
        folder.chmod(0o755)
    for folder in (layout.munge_key.parent, layout.state):
        folder.mkdir(mode=0o700)
    layout.shared.chmod(0o1777)
    for user in USERS:
        entry = ensure_user(user)
        home = layout.homes / user
        shutil.copytree("/etc/skel", home)
        home.chmod(0o700)
        for path in (home, *home.rglob("*")):
            os.chown(path, entry.pw_uid, entry.pw_gid)
        # On every host the rig's homes are bound over /home; that needs something to be bound over.
        Path("/home", user).mkdir(mode=0o700, parents=True, exist_ok=True)
    Path("/etc/slurm").mkdir(exist_ok=True)


def ensure_user(name: str) -> pwd.struct_passwd:
    """The user's entry; the user is made where there is none."""
    CACHE_FOLDER.mkdir(mode=0o755, parents=True, exist_ok=True)
    with open(CACHE_FOLDER / "users.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of two useradd that begin together the later changes the user's number
        try:
            return pwd.getpwnam(name)
        except KeyError:
            call(["useradd", "--create-home", "--shell", "/bin/bash", name])
        return pwd.getpwnam(name)


def write_configuration(layout: Layout, settings: Settings, *, mounts: Mapping[Path, Path]) -> None:
    root = debian_root.debian_root(settings.release) if settings.release else None
    key = layout.munge_key
    key.touch(mode=0o400)
    key.write_bytes(secrets.token_bytes(1024))
    layout.hosts_file.write_text(configuration.hosts_file(layout))
    write_slurm_conf(layout, settings)
    (layout.etc / "gres.conf").write_text(configuration.gres_conf(settings))
    (layout.etc / "cgroup.conf").write_text(configuration.cgroup_conf(services.slurm_version(root), settings))
    database = layout.etc / "slurmdbd.conf"
    database.touch(mode=0o600)
    database.write_text(configuration.slurmdbd_conf(layout))
    for host in layout.host_names:
        mount = emulated_fs.mount_lines(layout, host, settings.fs) if settings.fs and host != CONTROLLER else ()
        groups = cgroups.boot_lines(layout.netns(host)) if settings.cgroups and host in layout.node_names else ()
        script = configuration.boot_script(layout, host, mounts=mounts, client=mount, groups=groups, root=root)
        (layout.boot / f"{host}.sh").write_text(script)


def write_slurm_conf(layout: Layout, settings: Settings) -> None:
    """Write what all daemons read, as a whole: one that reads it meanwhile sees the old or the new one."""
    # The folder is bound on every host, so a file that is renamed in it is seen there.
    fresh = layout.etc / "slurm.conf.new"
    fresh.write_text(configuration.slurm_conf(layout, settings))
    fresh.replace(layout.etc / "slurm.conf")
