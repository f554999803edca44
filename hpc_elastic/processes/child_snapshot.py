"""What an agent's children were when it was seen last: so are those found who carry no mark of it any more.

A process that has cleared its environment is found by whom it hangs on, as long as its agent lives. When the agent dies
it hangs on nobody. What it had from the agent then is that it was a worker's descendant in the worker's session, or
that it had become the agent's own child (as that of a subreaper). Both can be read from one small file a second.
"""

from __future__ import annotations

from collections.abc import Iterable

from hpc_elastic.light_dataclasses import dataclass
from hpc_elastic.processes import tree
from hpc_elastic.processes.tree import Proc


@dataclass(frozen=True, slots=True)
class _Child:
    proc: Proc
    leads: bool
    """Whether its session is its own, and so one in which none but its descendants can be."""


class ChildSnapshot:
    """The children of one agent. Call `look` while the agent lives, and `remnants` when it has died."""

    def __init__(self, agent: int, *, leave_out: Iterable[int] = ()) -> None:
        """Args:
        agent: Its pid.
        leave_out: Children that are none of a worker's.
        """
        self._agent = agent
        self._leave_out = frozenset(leave_out)
        own = tree.look_at(agent)
        self._own_session = own.sid if own is not None else -1
        self._children: dict[int, _Child] = {}

    def look(self) -> None:
        """Take in who is there now: one read where nobody has come or gone."""
        pids = tree.main_children(self._agent)
        if pids is None:
            return  # it is dying, or this kernel doesn't tell
        seen: dict[int, _Child] = {}
        for pid in pids:
            known = self._children.get(pid)
            if known is None and pid not in self._leave_out:
                proc = tree.look_at(pid)
                # In the agent's own session are commands that it runs itself; a fork that is no session's yet, too.
                if proc is None or proc.sid == self._own_session:
                    continue
                known = _Child(proc, leads=proc.sid == proc.pid)
            if known is not None:
                seen[pid] = known
        self._children = seen

    @property
    def pids(self) -> frozenset[int]:
        """The children at the last look, ended ones included."""
        return frozenset(self._children)

    def remnants(self) -> list[Proc]:
        """Those that live. A pid or session that has got another meaning since is not taken for one."""
        leaders = {child.proc.sid: child.proc.starttime for child in self._children.values() if child.leads}
        known = {(child.proc.pid, child.proc.starttime) for child in self._children.values()}
        processes = tree.all_processes()
        found = []
        for proc in processes.values():
            if proc.is_dead or proc.pid in self._leave_out:
                continue
            began = leaders.get(proc.sid)
            leader = processes.get(proc.sid)
            is_member = began is not None and proc.starttime >= began and (leader is None or leader.starttime == began)
            if is_member or (proc.pid, proc.starttime) in known:
                found.append(proc)
        return found
