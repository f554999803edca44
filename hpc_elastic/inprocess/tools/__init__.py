"""Tools for trying the restart group out."""

from __future__ import annotations

from hpc_elastic.inprocess.tools import inject_fault as inject_fault
