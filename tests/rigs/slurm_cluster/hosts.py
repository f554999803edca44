"""Hosts and the network between them, made of Linux namespaces.

A host is a network namespace with a name, and a process tree in pid, mount, UTS and IPC namespaces of its own, whose
process 1 is the boot script. Killing that process is the power cut. No state is kept here but in the kernel: a host is
found by the name of its network namespace.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from tests.rigs.processes import kill_all

from . import cgroups, delayed_link
from .configuration import ready_mark
from .layout import NETNS_PREFIX, RIGS_FOLDER, SWITCH, Layout, RigError
from .processes import call, is_namespace_init, namespace_of, pids_in_namespace, wait_until

NETNS_FOLDER = Path("/run/netns")

DAEMON_ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LANG": "C.UTF-8",
}
"""What daemons see: nothing of the environment that the rig was started from."""

_BOOT_TIMEOUT = 20.0
_DEATH_TIMEOUT = 20.0


def netns_names(rig: str | None = None) -> list[str]:
    """The network namespaces of one rig, or of all."""
    prefix = NETNS_PREFIX if rig is None else f"{NETNS_PREFIX}{rig}-"
    try:
        return sorted(entry for entry in os.listdir(NETNS_FOLDER) if entry.startswith(prefix))
    except FileNotFoundError:
        return []


def rigs_with_leftovers() -> list[str]:
    """The names of all rigs that have a namespace or a folder, running or not."""
    names = {netns.removeprefix(NETNS_PREFIX).rpartition("-")[0] for netns in netns_names()}
    if RIGS_FOLDER.is_dir():
        names |= {entry.name for entry in RIGS_FOLDER.iterdir() if entry.is_dir() and re.match("[a-z]", entry.name)}
    return sorted(names)


def remove_namespaces(rig: str) -> None:
    """Kill every process of the rig and remove its network namespaces; none of either is fine.

    All that a rig starts lives in one of its network namespaces, so this needs no memory of what was started.
    """
    names = netns_names(rig)
    inodes = {inode for name in names if (inode := _netns_inode(name)) is not None}

    def survivors() -> list[int]:
        return [pid for inode in inodes for pid in pids_in_namespace("net", inode)]

    def all_dead() -> bool:
        pids = survivors()
        kill_all(pids)
        for name in names:
            cgroups.thaw(name)  # a frozen process does not die
        return not pids

    wait_until(all_dead, timeout=_DEATH_TIMEOUT, what=f"the processes of rig {rig} die")
    cgroups.remove(rig)
    for name in names:
        call(["ip", "netns", "delete", name], check=False)


def _netns_inode(name: str) -> int | None:
    try:
        return os.stat(NETNS_FOLDER / name).st_ino
    except FileNotFoundError:
        return None


class Hosts:
    """The hosts of one rig, and the switch that connects them."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._inits: dict[str, int] = {}

    # The network ---------------------------------------------------------------------------------------------------

    def make_switch(self) -> None:
        """Make the bridge, in a network namespace of its own: no packet leaves the machine."""
        switch = self.layout.netns(SWITCH)
        call(["ip", "netns", "add", switch])
        call(["ip", "-n", switch, "-batch", "-"], input="link add br0 type bridge\nlink set br0 up\n")

    def _plug_in(self, host: str) -> None:
        switch, netns = self.layout.netns(SWITCH), self.layout.netns(host)
        call(["ip", "netns", "add", netns])
        # A host keeps its hardware address through a power cut, as a network card does: the others remember it.
        card = "02:77:" + ":".join(f"{int(part):02x}" for part in self.layout.address(host).split("."))
        peer = ["peer", "name", "eth0", "address", card, "netns", netns]
        call(["ip", "link", "add", host, "netns", switch, "type", "veth", *peer])
        call(["ip", "-n", switch, "-batch", "-"], input=f"link set {host} master br0\nlink set {host} up\n")
        address = f"{self.layout.address(host)}/24"
        call(
            ["ip", "-n", netns, "-batch", "-"],
            input=f"link set lo up\naddress add {address} dev eth0\nlink set eth0 up\n",
        )

    def set_link(self, host: str, *, up: bool) -> None:
        call(["ip", "-n", self.layout.netns(SWITCH), "link", "set", host, "up" if up else "down"])

    def disturb_link(self, host: str, *, mbit: int) -> None:
        for netns, device in ((self.layout.netns(host), "eth0"), (self.layout.netns(SWITCH), host)):
            limit = ["tbf", "rate", f"{mbit}mbit", "burst", "64kb", "latency", "100ms"]
            call(["ip", "netns", "exec", netns, "tc", "qdisc", "replace", "dev", device, "root", *limit])

    def clear_link(self, host: str) -> None:
        for netns, device in ((self.layout.netns(host), "eth0"), (self.layout.netns(SWITCH), host)):
            call(["ip", "netns", "exec", netns, "tc", "qdisc", "delete", "dev", device, "root"])

    def delay_link(self, host: str, seconds: float) -> subprocess.Popen[str]:
        """Let each frame to and from the host take so long, until `undelay_link`."""
        switch, program = self.layout.netns(SWITCH), [sys.executable, delayed_link.__file__]
        call(["ip", "netns", "exec", self.layout.netns(host), *program, "eth0"])
        call(["ip", "-n", switch, "link", "set", host, "nomaster"])
        argv = ["ip", "netns", "exec", switch, *program, host, str(seconds)]
        relay = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
        assert relay.stdout is not None
        assert relay.stdout.readline() == "ready\n"
        call(["ip", "-n", switch, "-batch", "-"], input=f"link set {host}-late master br0\nlink set {host}-late up\n")
        return relay

    def undelay_link(self, host: str, relay: subprocess.Popen[str]) -> None:
        relay.kill()
        relay.communicate()
        call(["ip", "-n", self.layout.netns(SWITCH), "link", "set", host, "master", "br0"])

    # Power -----------------------------------------------------------------------------------------------------------

    def boot(self, hosts: Iterable[str]) -> None:
        """Start the hosts, all at once, and wait until each is ready for its daemons."""
        hosts = list(hosts)
        for host in hosts:
            ready_mark(self.layout, host).unlink(missing_ok=True)
            self._plug_in(host)
            log = self.layout.logs / f"boot-{host}.log"
            # setsid --fork: nobody's child, so that the host outlives the process that started it (`up`).
            program = 'exec 0</dev/null >"$1" 2>&1; shift; exec setsid --fork "$@"'
            namespaces = ["--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
            argv = ["nsenter", f"--net={NETNS_FOLDER / self.layout.netns(host)}", "env", "-i", *_assignments()]
            argv += ["bash", "-c", program, "bash", str(log)]
            call([*argv, "unshare", *namespaces, "bash", str(self.layout.boot / f"{host}.sh")])
        for host in hosts:
            self._await_boot(host)

    def _await_boot(self, host: str) -> None:
        try:
            wait_until(ready_mark(self.layout, host).exists, timeout=_BOOT_TIMEOUT, what=f"{host} boots", interval=0.01)
        except RigError as error:
            said = (self.layout.logs / f"boot-{host}.log").read_text(errors="replace").strip()
            raise RigError(f"{error}; it said: {said[-2000:] or 'nothing'}") from None

    def power_off(self, host: str, *, silent: bool) -> None:
        """Cut the host's power; one that is off already is left so.

        Args:
            host: Which.
            silent: Whether its peers hear nothing of it, as of a real one; else the dying processes' connections are
                closed in their peers' sight.
        """
        netns = self.layout.netns(host)
        inode = _netns_inode(netns)
        if inode is None:
            return
        unplug = ["ip", "-n", self.layout.netns(SWITCH), "link", "delete", host]
        if silent:
            call(unplug, check=False)

        def all_dead() -> bool:
            pids = pids_in_namespace("net", inode)
            # Process 1 takes the others along; those that were sent in from outside may need it a second time.
            kill_all([pid for pid in pids if is_namespace_init(pid)] or pids)
            cgroups.thaw(netns)  # a frozen process does not die
            return not pids

        wait_until(all_dead, timeout=_DEATH_TIMEOUT, what=f"the processes of {host} die", interval=0.01)
        call(unplug, check=False)
        call(["ip", "netns", "delete", netns])
        self._inits.pop(host, None)

    def freeze(self, host: str) -> None:
        """Stop the host as a kernel that hangs does: nothing runs there, and no packet is answered."""
        self.set_link(host, up=False)
        cgroups.freeze(self.layout.netns(host), lambda: self.pids(host))

    def thaw(self, host: str) -> None:
        """Let a frozen host go on; its link comes up first, as its kernel would answer before any process."""
        self.set_link(host, up=True)
        cgroups.thaw(self.layout.netns(host), self.pids(host))

    # Who is there ----------------------------------------------------------------------------------------------------

    def is_on(self, host: str) -> bool:
        return self._find_init(host) is not None

    def init_pid(self, host: str) -> int:
        """The host's process 1, as numbered outside."""
        pid = self._find_init(host)
        if pid is None:
            known = ", ".join(self.layout.host_names)
            why = "is off" if host in self.layout.host_names else f"is none of {known}"
            raise RigError(f"host {host!r} of rig {self.layout.name} {why}")
        return pid

    def _find_init(self, host: str) -> int | None:
        inode = _netns_inode(self.layout.netns(host))
        if inode is None:
            return None
        known = self._inits.get(host)
        if known is not None and namespace_of(known, "net") == inode and is_namespace_init(known):
            return known
        for pid in pids_in_namespace("net", inode):
            if is_namespace_init(pid):
                self._inits[host] = pid
                return pid
        return None

    def pids(self, host: str) -> list[int]:
        """The host's processes, as numbered outside; none when it is off."""
        init = self._find_init(host)
        inode = None if init is None else namespace_of(init, "pid")
        return [] if inode is None else pids_in_namespace("pid", inode)

    def enter_argv(self, host: str) -> list[str]:
        """What goes before a command for it to run on the host, as root, in its folder ``/``."""
        namespaces = ("--net", "--uts", "--ipc", "--mount", "--pid", "--cgroup")
        return ["nsenter", "--target", str(self.init_pid(host)), *namespaces, "--"]

    def start_daemon(self, host: str, argv: list[str], *, log: Path | None = None) -> None:
        """Run a command on the host as root with a daemon's environment, and wait until it has gone to the background.

        Args:
            host: Where.
            argv: A command that returns when it has daemonised; with `log`, one that stays in the foreground.
            log: Where the output of a command that stays in the foreground goes.
        """
        enter = [*self.enter_argv(host), *cgroups.joining(self.layout.netns(host)), "env", "-i", *_assignments()]
        if log is not None:
            program = 'exec 0</dev/null >"$1" 2>&1; shift; exec setsid --fork "$@"'
            argv = ["bash", "-c", program, "bash", str(log), *argv]
        call([*enter, *argv])

    def kill(self, host: str, pids: Iterable[int], sig: int = signal.SIGKILL) -> None:
        mine = set(self.pids(host))
        for pid in pids:
            if pid not in mine:
                raise RigError(f"process {pid} is not on host {host}")
            with suppress(ProcessLookupError):  # it ended with the one before: srun's helper does
                os.kill(pid, sig)


def _assignments() -> list[str]:
    return [f"{key}={value}" for key, value in DAEMON_ENVIRONMENT.items()]
