"""What the rig needs of the machine: said in one line when missing, installed on request."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys

from tests.rigs import debian_packages
from tests.rigs.network_mounts.kinds import KINDS
from tests.rigs.requirements import require

SYSTEM_FOLDERS = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_EVERY_KIND = {
    "fusermount3": "fuse3",
    "unshare": "util-linux",
    "ip": "iproute2",
    "tc": "iproute2",
    "iptables": "iptables",
}
PACKAGES = frozenset((*(name for kind in KINDS.values() for name in kind.packages.values()), *_EVERY_KIND.values()))
"""Debian's, for all kinds."""


@functools.cache
def missing_prerequisites(kind: str) -> str:
    """Why a filesystem can't be brought up here, in one line; empty where it can."""
    if sys.platform != "linux" or not os.path.exists("/dev/fuse"):
        return "this machine has no FUSE (/dev/fuse)"
    if os.geteuid() != 0:
        return "not root, who alone may mount it"
    wanted = {**_EVERY_KIND, **KINDS[kind].packages}
    missing = sorted({package for program, package in wanted.items() if not shutil.which(program, path=SYSTEM_FOLDERS)})
    if missing:
        return f"not installed: {' '.join(missing)} (as root: python -m tests.rigs.network_mounts install)"
    tried = subprocess.run(
        ["unshare", "--pid", "--net", "--fork", "true"], capture_output=True, text=True, check=False, timeout=30
    )
    return f"this machine refuses namespaces: {tried.stderr.strip()}" if tried.returncode else ""


def require_mounts(kind: str) -> None:
    require(kind, missing_prerequisites(kind))


def install_prerequisites() -> None:
    debian_packages.install(PACKAGES)
    missing_prerequisites.cache_clear()
