"""Nodes on one machine that differ as real ones do: a network address, process ids and an NFS mount of their own each.

Real agents run on them, started as the launchers start them, with workers that need no torch. Links are cut, packets
are lost in one direction, mounts are frozen, and a node's processes are killed all at once.
"""

from tests.rigs.network_nodes.network import Network, require_network
from tests.rigs.network_nodes.nodes import NetworkRun, Worker

__all__ = ["Network", "NetworkRun", "Worker", "require_network"]
