"""NFSv3 from a server in user space, NFS-Ganesha; clients by libnfs and FUSE (`tests.rigs.network_mounts.libnfs_fuse`).

Not part of CI: HPC_ELASTIC_ALL_MOUNTS=1 has the tests of network filesystems run on it too. Debian's packages are
nfs-ganesha, nfs-ganesha-vfs, rpcbind and libnfs13.
"""

from __future__ import annotations

import socket
import sys
from pathlib import Path

from tests.rigs.network_mounts.location import Site

CACHE_SECONDS = 2
_ROOT = Path(__file__).resolve().parents[3]
_CONFIGURATION = """
NFS_CORE_PARAM {{ Protocols = 3; Enable_NLM = false; Enable_RQUOTA = false; mount_path_pseudo = false; }}
EXPORT {{
  Export_Id = 1; Path = "{path}"; Pseudo = "/export"; Access_Type = RW; Squash = No_Root_Squash;
  Protocols = 3; Transports = TCP; SecType = sys; FSAL {{ Name = VFS; }}
}}
"""
# rpcbind has one socket and one lock in /run, for the whole machine: here it has a /run of its own.
_SERVERS = "mount -t tmpfs tmpfs /run && { rpcbind -w -f & } && exec ganesha.nfsd -F -f $1 -L $2 -p /run/ganesha.pid"


def start(site: Site) -> None:
    configuration = site.write("ganesha.conf", _CONFIGURATION.format(path=site.server))
    log = site.logs / "ganesha.log"
    argv = ["unshare", "--mount", "--propagation", "private", "sh", "-c", _SERVERS, "sh", configuration, log]
    site.serve("ganesha", argv)
    site.wait(_answers, "the server")
    for number, path in enumerate(site.mounts):
        client = [sys.executable, "-m", "tests.rigs.network_mounts.libnfs_fuse", "127.0.0.1", site.server]
        site.connect(number, ["env", "-C", _ROOT, *client, path, str(CACHE_SECONDS)])
    site.wait_mounted()
    site.wait_usable()


def _answers() -> bool:
    for port in (111, 2049):
        with socket.create_connection(("127.0.0.1", port), timeout=1):
            pass
    return True
