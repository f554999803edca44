"""Names, addresses and folders of one rig: everything is found again from its name alone.

So a rig whose own process was killed can be cleaned up by name, and two rigs side by side share nothing: each has
network namespaces of its own (``hpcrig-<name>-<host>``) and one folder (``/srv/hpc-elastic-rig/<name>``).
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

RIGS_FOLDER = Path("/srv/hpc-elastic-rig")
"""Holds every rig's folder and lock. Root's, readable by all; on no tmpfs of a node, so all nodes see it."""

CACHE_FOLDER = Path("/var/lib/hpc-elastic-rig")
"""Holds what is worth keeping from one rig to the next."""

USERS = ("alice", "mallory")
"""The normal users of the cluster: alice submits jobs, mallory tries to get at them."""

NETNS_PREFIX = "hpcrig-"
CONTROLLER = "ctl"
LOGIN = "login"
SWITCH = "switch"

CONTROLLER_PORT = 6817
NODE_PORT = 6818
DATABASE_PORT = 6819

_NAME = re.compile(r"[a-z][a-z0-9]{0,15}")
_MAX_NODES = 200


class RigError(Exception):
    """The rig could not do what was asked; the message says what and why."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where everything of one rig lies. Its name has lower-case letters and digits, a letter first."""

    name: str
    nodes: int

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise RigError(f"rig name {self.name!r}: use 1 to 16 lower-case letters and digits, a letter first")
        if not 1 <= self.nodes <= _MAX_NODES:
            raise RigError(f"a rig has 1 to {_MAX_NODES} nodes, not {self.nodes}")

    @property
    def node_names(self) -> tuple[str, ...]:
        return tuple(f"n{number}" for number in range(1, self.nodes + 1))

    @property
    def host_names(self) -> tuple[str, ...]:
        return (CONTROLLER, LOGIN, *self.node_names)

    def address(self, host: str) -> str:
        """The host's IPv4 address; rigs don't see each other, so all use the same ones."""
        if host == CONTROLLER:
            return "10.77.0.1"
        if host == LOGIN:
            return "10.77.0.2"
        return f"10.77.0.{10 + int(host[1:])}"

    def netns(self, host: str) -> str:
        return f"{NETNS_PREFIX}{self.name}-{host}"

    @property
    def folder(self) -> Path:
        return RIGS_FOLDER / self.name

    @property
    def server(self) -> Path:
        """What the hosts share: this folder itself, or on each an emulated client of it, mounted over it."""
        return self.folder / "server"

    @property
    def client(self) -> Path:
        """An empty folder, where each host's emulated client is mounted first."""
        return self.folder / "client"

    def client_control(self, host: str) -> Path:
        """The socket on which the host's emulated client takes commands."""
        return self.boot / f"{host}.mount"

    @property
    def shared(self) -> Path:
        """What a cluster's scratch filesystem is: seen by all nodes, anyone may make files in it."""
        return self.server / "shared"

    @property
    def homes(self) -> Path:
        return self.server / "home"

    @property
    def etc(self) -> Path:
        """slurm.conf and its companions, bound over /etc/slurm on every host."""
        return self.folder / "etc"

    @property
    def hosts_file(self) -> Path:
        return self.folder / "hosts"

    @property
    def logs(self) -> Path:
        return self.folder / "log"

    @property
    def boot(self) -> Path:
        """A boot script and a ready mark per host."""
        return self.folder / "boot"

    @property
    def munge_key(self) -> Path:
        return self.folder / "munge" / "key"

    @property
    def spool(self) -> Path:
        return self.folder / "spool"

    @property
    def state(self) -> Path:
        return self.folder / "state"

    @property
    def database(self) -> Path:
        return self.folder / "mariadb"

    @property
    def python(self) -> Path:
        return self.folder / "python"

    @property
    def description(self) -> Path:
        """What the rig was started with, for a later process that attaches to it by name."""
        return self.folder / "rig.json"
