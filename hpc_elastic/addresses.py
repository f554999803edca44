"""By which addresses other nodes may reach this one, the likeliest first."""

from __future__ import annotations

import socket
from collections.abc import Iterable

LOOPBACK = "127.0.0.1"


def candidate_addresses(node_name: str) -> list[str]:
    """IPv4 addresses of this host: what its name resolves to, then those of its interfaces; never the loopback.

    A name that resolves to 127.0.1.1, as Debian's installer writes it, is of no use to others: it is left out.
    """
    found: dict[str, None] = {}
    for name in (node_name, socket.gethostname()):
        try:
            for entry in socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_DGRAM):
                found.setdefault(str(entry[4][0]))
        except (OSError, UnicodeError):
            continue  # not every node name is a host name
    for address in _interface_addresses():
        found.setdefault(address)
    return [address for address in found if not address.startswith("127.")]


def choose_master_address(*, given: str | None, reached: Iterable[str], candidates: Iterable[str]) -> str:
    """The address that workers on other nodes are told.

    Args:
        given: The user's own choice wins.
        reached: Addresses at which another node's packet has arrived: proven, not believed.
        candidates: `candidate_addresses`.
    """
    if given:
        return given
    for address in (*reached, *candidates):
        return address
    return LOOPBACK


def _interface_addresses() -> list[str]:
    import psutil  # 10 ms: only where several hosts take part

    found = []
    for name, addresses in sorted(psutil.net_if_addrs().items()):
        if name == "lo" or name.startswith(("docker", "virbr", "veth", "br-")):
            continue
        found += [entry.address for entry in addresses if entry.family == socket.AF_INET]
    return found
