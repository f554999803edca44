"""What the rig needs of the machine: said in one line when missing, installed on request."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys

import pytest

from tests.rigs.network_mounts.kinds import KINDS

SYSTEM_FOLDERS = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_EVERY_KIND = {"fusermount3": "fuse3", "unshare": "util-linux", "ip": "iproute2"}


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
    """Skip the test where the filesystem can't be brought up; in CI, fail it."""
    why = missing_prerequisites(kind)
    if not why:
        return
    if os.environ.get("CI", "").lower() in ("true", "1"):
        pytest.fail(f"{kind} can't run: {why}", pytrace=False)
    pytest.skip(f"{kind} can't run: {why}")


def install_prerequisites() -> None:
    """Install the Debian packages that are missing.

    Raises:
        PermissionError: not root.
        subprocess.CalledProcessError: apt-get failed; its output is on stderr.
    """
    if os.geteuid() != 0:
        raise PermissionError("only root may install packages")
    packages = {package for kind in KINDS.values() for package in kind.packages.values()} | set(_EVERY_KIND.values())
    wanted = sorted(package for package in packages if not _is_installed(package))
    if not wanted:
        return
    # No daemon of the machine's own may start, nor fail the installation where there is no init: the rig runs its own.
    policy = "/usr/sbin/policy-rc.d"
    made_policy = not os.path.exists(policy)
    if made_policy:
        with open(policy, "w") as file:
            file.write("#!/bin/sh\nexit 101\n")
        os.chmod(policy, 0o755)
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    try:
        subprocess.run(["apt-get", "update", "-q"], check=True, env=environment, stdout=sys.stderr)
        install = ["apt-get", "install", "-q", "-y", "--no-install-recommends", *wanted]
        subprocess.run(install, check=True, env=environment, stdout=sys.stderr)
    finally:
        if made_policy:
            os.unlink(policy)
    missing_prerequisites.cache_clear()


def _is_installed(package: str) -> bool:
    done = subprocess.run(
        ["dpkg-query", "--show", "--showformat=${Status}", package], capture_output=True, text=True, check=False
    )
    return done.returncode == 0 and done.stdout.endswith(" installed")
