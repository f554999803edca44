"""Debian packages for the rigs: whether they are installed, and installing those that are not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable


def install(packages: Iterable[str]) -> None:
    """Install those of `packages` that are missing. None of the daemons in them is started: the rigs run their own."""
    if os.geteuid() != 0:
        raise PermissionError("only root may install packages")
    wanted = sorted({package for package in packages if not is_installed(package)})
    if not wanted:
        return
    # Where there is no init, as in a container, a refused start would fail the installation, too.
    policy = "/usr/sbin/policy-rc.d"
    made_policy = not os.path.exists(policy)
    if made_policy:
        with open(policy, "w") as file:
            file.write("#!/bin/sh\nexit 101\n")
        os.chmod(policy, 0o755)
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    try:
        subprocess.run(
            ["apt-get", "update", "-q"], check=True, env=environment, stdin=subprocess.DEVNULL, stdout=sys.stderr
        )
        command = ["apt-get", "install", "-q", "-y", "--no-install-recommends", *wanted]
        subprocess.run(command, check=True, env=environment, stdin=subprocess.DEVNULL, stdout=sys.stderr)
    finally:
        if made_policy:
            os.unlink(policy)


def is_installed(package: str) -> bool:
    done = subprocess.run(
        ["dpkg-query", "--show", "--showformat=${Status}", package], capture_output=True, text=True, check=False
    )
    return done.returncode == 0 and done.stdout.endswith(" installed")
