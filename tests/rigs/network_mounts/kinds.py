"""The filesystems that the rig can bring up, and what each needs and promises."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tests.rigs.network_mounts import cephfs, ganesha, glusterfs, moosefs, sshfs
from tests.rigs.network_mounts.location import Site


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    name: str
    start: Callable[[Site], None]
    packages: Mapping[str, str]
    """Program → the Debian package that has it."""
    listing_delay: float
    """Seconds after which a listing on another client shows a new name, as its clients are set here; 0: at once."""
    delay: float
    """Seconds after which a look by name shows what was not there, or a file's new contents; 0: at once."""
    disk_megabytes: int = 0
    """Of the server's disk, where it is small enough to be filled."""
    by_hand: bool = False
    """Only where HPC_ELASTIC_ALL_MOUNTS is set."""


KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind(
            name="glusterfs",
            start=glusterfs.start,
            packages={"glusterfsd": "glusterfs-server", "glusterfs": "glusterfs-client"},
            listing_delay=0.0,
            delay=2.0,
            disk_megabytes=64,
        ),
        Kind(
            name="sshfs",
            start=sshfs.start,
            packages={"sshfs": "sshfs", sshfs.SFTP_SERVER: "openssh-sftp-server"},
            listing_delay=2.0 * sshfs.CACHE_SECONDS,
            delay=2.0 * sshfs.CACHE_SECONDS,
            disk_megabytes=64,
        ),
        Kind(
            name="moosefs",
            start=moosefs.start,
            packages={
                "mfsmaster": "moosefs-master",
                "mfschunkserver": "moosefs-chunkserver",
                "mfsmount": "moosefs-client",
                "ip": "iproute2",
            },
            listing_delay=1.0,
            delay=2.0,
        ),
        Kind(
            name="cephfs",
            start=cephfs.start,
            packages={
                "ceph-mon": "ceph-mon",
                "ceph-osd": "ceph-osd",
                "ceph-mds": "ceph-mds",
                "ceph-fuse": "ceph-fuse",
                "ceph": "ceph-common",
            },
            listing_delay=0.0,
            delay=0.0,
        ),
        Kind(
            name="ganesha",
            start=ganesha.start,
            packages={
                "ganesha.nfsd": "nfs-ganesha",
                "rpcbind": "rpcbind",
            },
            listing_delay=0.0,
            delay=2.0 * ganesha.CACHE_SECONDS,
            by_hand=True,
        ),
    )
    if not kind.by_hand or os.environ.get("HPC_ELASTIC_ALL_MOUNTS")
}
