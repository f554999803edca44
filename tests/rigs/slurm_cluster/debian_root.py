"""Another Debian release's Slurm: a root folder of its own, made once, from where this machine's apt has its packages.

Hosts of a rig with `Settings.release` change their root to it when they boot; the rig's folder, homes and users are
the same as outside. Such a rig has no accounting, no emulated filesystem and no torch.
"""

from __future__ import annotations

import fcntl
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.rigs import debian_packages

from .layout import CACHE_FOLDER, RIGS_FOLDER, RigError
from .processes import call

PACKAGES = (
    "slurmctld",
    "slurmd",
    "slurm-client",
    "munge",
    "iproute2",
    "procps",
    "python3",
    "python3-msgspec",
    "python3-psutil",
    "python3-filelock",
    "python3-cloudpickle",
    "python3-click",
    "python3-jinja2",
)
_SHARED_FILES = ("/etc/passwd", "/etc/group")
_TIMEOUT = 1800


def debian_root(release: str) -> Path:
    """The root folder of a release, such as ``trixie`` or ``testing``; made in minutes where there is none."""
    root = CACHE_FOLDER / f"root-{release}"
    complete = CACHE_FOLDER / f"root-{release}.complete"
    CACHE_FOLDER.mkdir(mode=0o755, parents=True, exist_ok=True)
    with open(CACHE_FOLDER / f"root-{release}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two rigs that start together make one
        if complete.exists():
            return root
        print(f"rig: making {root} from Debian's {release}, once …", file=sys.stderr, flush=True)
        debian_packages.install(["debootstrap"])
        shutil.rmtree(root, ignore_errors=True)
        _run(["debootstrap", "--variant=minbase", release, str(root), _mirror()])
        (root / "usr/sbin/policy-rc.d").write_text("#!/bin/sh\nexit 101\n")
        (root / "usr/sbin/policy-rc.d").chmod(0o755)
        inside = ["unshare", "--mount", "chroot", str(root), "sh", "-ec"]
        packages = " ".join(PACKAGES)
        _run([*inside, f"mount -t proc proc /proc; apt-get install -q -y --no-install-recommends {packages}"])
        complete.touch()
    return root


def _mirror() -> str:
    """Where this machine's apt has Debian's own packages from."""
    found = call(["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages", "Label: Debian"])
    if not found.strip():
        raise RigError("apt knows no archive of Debian's (apt-get indextargets): run apt-get update")
    return found.split()[0]


def _run(argv: list[str]) -> None:
    environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C.UTF-8"}
    done = subprocess.run(
        argv, capture_output=True, text=True, errors="replace", check=False, timeout=_TIMEOUT, env=environ
    )
    if done.returncode != 0:
        raise RigError(f"{argv[0]} ended with {done.returncode}: {(done.stdout + done.stderr).strip()[-2000:]}")


def entering_lines(root: Path, binds: Mapping[Path, Path]) -> list[str]:
    """The lines of a boot script that make `root` its root folder. `binds`: where to → what, as seen without it."""
    quote = shlex.quote
    shared = {Path(name): Path(name) for name in _SHARED_FILES}
    lines = [f"mount --bind {quote(str(root))} {quote(str(root))}"]
    for target, source in {**shared, RIGS_FOLDER: RIGS_FOLDER, **binds}.items():
        inside = quote(f"{root}{target}")
        make = f"mkdir -p {inside}" if source.is_dir() else f"mkdir -p $(dirname {inside}); touch {inside}"
        lines += [make, f"mount --rbind {quote(str(source))} {inside}"]
    return [
        *lines,
        f"cd {quote(str(root))}",
        "mount -t proc proc proc",
        "mount --rbind /sys sys",
        "mount --rbind /dev dev",
        "pivot_root . mnt",
        "cd /",
        "umount --lazy /mnt",
    ]
