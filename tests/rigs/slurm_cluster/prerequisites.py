"""What the rig needs of the machine: said in one line each when missing, installed on request."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping

from tests.rigs import debian_packages

REQUIRE_VARIABLE = "HPC_ELASTIC_REQUIRE_SLURM"

PACKAGES = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sbatch": "slurm-client",
    "slurmdbd": "slurmdbd",
    "munged": "munge",
    "mariadbd": "mariadb-server",
    "ip": "iproute2",
    "iptables": "iptables",
    "/usr/bin/python3": "python3",
}
"""Program → the Debian package that has it."""

ALL_PACKAGES = (*PACKAGES.values(), "python3-venv")
SYSTEM_FOLDERS = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@functools.lru_cache(maxsize=1)
def missing_prerequisites() -> tuple[str, ...]:
    """Say why the rig can't run here, one line each; nothing when it can."""
    if sys.platform != "linux":
        return ("it needs Linux namespaces",)
    missing = [package for program, package in PACKAGES.items() if shutil.which(program, path=SYSTEM_FOLDERS) is None]
    reasons = [f"not installed: {' '.join(missing)}"] if missing else []
    if os.geteuid() != 0:
        reasons.append("not root, who alone may make namespaces and become other users")
    elif not missing and (refusal := _namespaces_refused()):
        reasons.append(f"this machine refuses network namespaces: {refusal}")
    return tuple(reasons)


def _namespaces_refused() -> str:
    """Try what the rig does to the kernel, in namespaces that vanish at once."""
    program = "ip link add br0 type bridge && ip link add v0 type veth peer name v1 && mount -t tmpfs x /tmp"
    done = subprocess.run(
        ["unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--mount-proc", "sh", "-c", program],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    return "" if done.returncode == 0 else done.stderr.strip().replace("\n", "; ") or f"code {done.returncode}"


def must_run(environment: Mapping[str, str]) -> bool:
    """Whether tests that need the rig must fail, and not be skipped, where it can't run: in CI, or when asked to."""
    return environment.get("CI", "").lower() in ("true", "1") or environment.get(REQUIRE_VARIABLE, "") not in ("", "0")


def install_prerequisites() -> None:
    debian_packages.install(ALL_PACKAGES)
    missing_prerequisites.cache_clear()
