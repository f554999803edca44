"""A switch and the nodes' ends of its cables, made of network namespaces. No packet leaves the machine.

Packets are lost in one direction by a wrong Ethernet address that the senders believe in: silently, as on a real
network; netem is not in every kernel.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from tests.rigs.processes import kill_all
from tests.rigs.requirements import require
from tests.rigs.slurm_cluster.processes import call, pids_in_namespace

NETNS_FOLDER = Path("/run/netns")
_PREFIX = "hpcnodes-"
_NOBODY = "02:00:00:00:00:fe"


def unavailable() -> str | None:
    """Why there can be no such network here, in one line."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    missing = [program for program in ("ip", "tc", "nsenter", "unshare", "mount") if shutil.which(program) is None]
    if missing:
        return f"{', '.join(missing)} missing (apt-get install iproute2 util-linux mount)"
    name = f"{_PREFIX}{os.getpid()}-probe"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        return f"no network namespace can be made: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", name], check=False)
    return None


def require_network() -> None:
    require("the network of namespaces", unavailable())


class Network:
    """`count` nodes on one switch, in a ``with``. Node k has the address 10.77.0.k+1 on ``eth0``."""

    def __init__(self, count: int, *, ipv6_only: bool = False) -> None:
        self._count = count
        self._ipv6_only = ipv6_only

    def __enter__(self) -> Network:
        require_network()
        remove_leftovers()
        try:
            _ip("netns", "add", self._switch)
            _batch(self._switch, "link add br0 type bridge", "link set br0 up")
            for node in range(self._count):
                self._plug_in(node)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in (*map(self.netns, range(self._count)), self._switch):
            _remove(name)

    @property
    def _switch(self) -> str:
        return f"{_PREFIX}{os.getpid()}-switch"

    def netns(self, node: int) -> str:
        return f"{_PREFIX}{os.getpid()}-{node}"

    @staticmethod
    def address(node: int) -> str:
        return f"10.77.0.{node + 1}"

    def _plug_in(self, node: int) -> None:
        name, port = self.netns(node), f"n{node}"
        _ip("netns", "add", name)
        _ip("link", "add", port, "netns", self._switch, "type", "veth", "peer", "name", "eth0", "netns", name)
        _batch(self._switch, f"link set {port} master br0", f"link set {port} up")
        address = f"fd77::{node + 1}/64 dev eth0 nodad" if self._ipv6_only else f"{self.address(node)}/24 dev eth0"
        _batch(name, "link set lo up", f"address add {address}", "link set eth0 up")

    def set_link(self, node: int, *, up: bool) -> None:
        _batch(self._switch, f"link set n{node} {'up' if up else 'down'}")

    def lose_from(self, node: int) -> None:
        """What this node sends to the others is lost; what they send arrives."""
        lines = [
            f"neighbour replace {self.address(other)} lladdr {_NOBODY} dev eth0 nud permanent"
            for other in self._others(node)
        ]
        _batch(self.netns(node), *lines)

    def lose_to(self, node: int) -> None:
        """What the others send to this node is lost; what it sends arrives."""
        for other in self._others(node):
            _batch(self.netns(other), f"neighbour replace {self.address(node)} lladdr {_NOBODY} dev eth0 nud permanent")

    def slow_down(self, node: int, *, mbit: int) -> None:
        """What this node sends and gets passes at so many Mbit/s at most; needs tc and the kernel's tbf."""
        for netns, device in ((self.netns(node), "eth0"), (self._switch, f"n{node}")):
            limit = ["tbf", "rate", f"{mbit}mbit", "burst", "64kb", "latency", "100ms"]
            call(["ip", "netns", "exec", netns, "tc", "qdisc", "add", "dev", device, "root", *limit])

    def _others(self, node: int) -> Iterable[int]:
        return (other for other in range(self._count) if other != node)


def remove_leftovers() -> None:
    """Take away the networks of test processes that are gone (kill -9)."""
    names = os.listdir(NETNS_FOLDER) if NETNS_FOLDER.is_dir() else []
    for name in names:
        owner = name.removeprefix(_PREFIX).partition("-")[0]
        if name.startswith(_PREFIX) and not os.path.exists(f"/proc/{owner}"):
            _remove(name)


def _remove(name: str) -> None:
    """A namespace, and whatever still runs in it."""
    try:
        inode = os.stat(NETNS_FOLDER / name).st_ino
    except FileNotFoundError:
        return
    deadline = time.monotonic() + 40
    while (pids := pids_in_namespace("net", inode)) and time.monotonic() < deadline:
        kill_all(pids)
        time.sleep(0.02)
    subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def _ip(*arguments: str) -> None:
    call(["ip", *arguments])


def _batch(netns: str, *lines: str) -> None:
    call(["ip", "-n", netns, "-batch", "-"], input="\n".join(lines) + "\n")
