"""Real network filesystems on this machine, through FUSE: a server and two or more clients of it, each a mount.

What there is (`KINDS`): GlusterFS (one brick, two volume files, no glusterd), sshfs (each client with an sftp-server of
its own, no sshd), MooseFS (master and one chunk server), CephFS (monitor, one OSD in memory, metadata server).

How nothing is left behind, whatever is killed. Everything but the mounts' own paths lives in a pid and a network
namespace of its own, whose process number 1 is the `keeper`: when it ends, the kernel kills every other. It ends when
its stdin does, which is when the process that started it is gone, and takes the mounts away first. Where the keeper is
killed itself, the next rig to start unmounts and removes what it left (`leftovers`).
"""

from tests.rigs.network_mounts.kinds import KINDS, Kind
from tests.rigs.network_mounts.prerequisites import missing_prerequisites, require_mounts
from tests.rigs.network_mounts.rig import NetworkMounts, started_together

__all__ = ["KINDS", "Kind", "NetworkMounts", "missing_prerequisites", "require_mounts", "started_together"]
