"""What a person does to a run on purpose, by a command."""

from __future__ import annotations

from hpc_elastic.run.event_types import OperatorEvent


class FaultPlanted(OperatorEvent, frozen=True, kw_only=True):
    """`hpc-elastic chaos` did a fault to the run: what follows is not the cluster's, and speaks against no node."""

    round: int
    """that was running"""
    fault: str
    """its name in the catalogue"""
    node: int = -1
    """that it hit; -1: the whole job"""
    host: str = ""
    rank: int = -1
    """that it hit; -1: none alone"""
    pid: int = 0
    what: str = ""
    """the same in words"""
