"""Facts of this host that psutil knows: addresses, free memory, and the arguments of processes.

This module alone imports psutil. That takes 13 ms and 1.3 MB, so each function does it when it is called first. How
processes are found and signalled, and why not with psutil, stands in `hpc_elastic.processes.tree`.
"""

from __future__ import annotations

import socket


def interface_addresses() -> list[tuple[str, list[str]]]:
    """The network interfaces and the IPv4 addresses of each, by name. Raises OSError."""
    import psutil

    return [
        (name, [entry.address for entry in addresses if entry.family == socket.AF_INET])
        for name, addresses in sorted(psutil.net_if_addrs().items())
    ]


def available_memory() -> int | None:
    """Bytes that programs can have without swapping, what the kernel keeps of files included; None: unreadable.

    The node's: what a cgroup leaves of it, psutil does not know.
    """
    import psutil

    try:
        return psutil.virtual_memory().available
    except (OSError, ValueError, KeyError, IndexError):  # the last three: a sandbox's /proc/meminfo
        return None


def command_line(pid: int) -> list[str]:
    """The arguments of a process; none where it is gone, another user's, or just being loaded."""
    import psutil

    try:
        return psutil.Process(pid).cmdline()
    except (OSError, psutil.Error):
        return []
