"""The in-process restart group as its node's agent sees it: what the ranks report, and which dead workers are replaced.

The restart group restarts a function in the processes that are left. The agent's part is to start a fresh process in a
dead one's place, and to leave the others alone. Where that would not help, all workers start again, as without it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from hpc_elastic.agent.part import Part
from hpc_elastic.errors import HpcElasticError
from hpc_elastic.run.agent_events import (
    InProcessGaveUp,
    InProcessLeft,
    InProcessRestarted,
    ReplacementRefused,
    WorkerReplaced,
)
from hpc_elastic.worker_api import restart_group as reports
from hpc_elastic.worker_api.restart_group import RestartGroupEvent, RestartGroupReport, RestartWith
from hpc_elastic.workers.spawn import describe_exitcode

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

    from hpc_elastic.agent.local_workers import LocalWorkers
    from hpc_elastic.agent.node_agent import NodeAgent
    from hpc_elastic.agent.part import AgentSite

logger = logging.getLogger(__name__)

WAIT_SECONDS = 300.0
"""A fresh process comes to its restart group after Python's start and the script's imports, from a slow filesystem."""
_MOST_AT_ONCE = 1 << 16


class DeadWorker(Struct, frozen=True, kw_only=True):
    local_rank: int
    rank: int
    pid: int
    exitcode: int

    def __str__(self) -> str:
        return f"rank {self.rank} ended with {describe_exitcode(self.exitcode)}"


def why_not_replaced(dead: DeadWorker, *, last: RestartGroupEvent | None, used: int, limit: int) -> str:
    """Empty where a fresh process is put in its place. `used`: replacements on this node in this round."""
    if last is None:
        return f"{dead} before it was in a wrapped call"
    if last is RestartGroupEvent.ENDED:
        return f"{dead} after its wrapped call"
    if last is RestartGroupEvent.GAVE_UP:
        return f"{dead}: the in-process restart group gave up"
    if used >= limit:
        return f"{dead}, and {used} of {limit} replacements in this round are used"
    return ""


class RestartGroupWatch(Part):
    def __init__(self, site: AgentSite) -> None:
        self._events, self._policy = site.events, site.me.spec.restart_policy
        self._limit = site.me.spec.max_restarts
        self._round = -1
        self._last: dict[int, RestartGroupEvent] = {}
        self._used: dict[int, int] = {}
        self._unread = b""
        self._path, self._fd = site.watch.pages.make_pipe("ring", "in-process restart can be reported")

    def watched(self) -> Collection[FileDescriptorLike]:
        return (self._fd,)

    def environment(self, given: Mapping[str, str]) -> dict[str, str]:
        """A wait that the user chose stays."""
        if not self._path:
            return {}
        found = {reports.REPORTS: self._path}
        if self._policy is RestartWith.IN_PROCESS:
            found[reports.WAIT] = given.get(reports.WAIT) or f"{WAIT_SECONDS:g}"
        return found

    def look(self, agent: NodeAgent) -> None:
        self.handle(agent.round)

    def handle(self, round_index: int) -> None:
        if self._fd < 0:
            return
        try:
            raw = os.read(self._fd, _MOST_AT_ONCE)
        except BlockingIOError:
            return
        *lines, self._unread = (self._unread + raw).split(b"\n")
        for raw_line in lines:
            if (line := reports.decode(raw_line)) is not None:
                self._take(line, round_index)

    def replace_dead(self, workers: LocalWorkers) -> bool:
        if self._policy is not RestartWith.IN_PROCESS:
            return False
        if workers.round != self._round:
            self._round, self._used = workers.round, {}
        self.handle(workers.round)
        dead = workers.dead
        for each in dead:
            last, used = self._last.get(each.pid), sum(self._used.values())
            if why := why_not_replaced(each, last=last, used=used, limit=self._limit):
                return self._refuse(each, why, workers.round)
        return all(self._replace(each, workers) for each in dead)

    def _replace(self, dead: DeadWorker, workers: LocalWorkers) -> bool:
        number = self._used.get(dead.local_rank, 0) + 1
        self._used[dead.local_rank] = number
        try:
            pid = workers.replace(dead.local_rank, {reports.REPLACES: str(number)})
        except (HpcElasticError, OSError) as error:
            return self._refuse(dead, f"{dead}, and no process can be started in its place: {error}", workers.round)
        reason = f"{dead}; {sum(self._used.values())} of {self._limit} replacements in this round are used"
        logger.warning("a fresh process takes its place: %s", reason)
        self._events.write(
            WorkerReplaced(
                round=workers.round,
                rank=dead.rank,
                local_rank=dead.local_rank,
                exitcode=dead.exitcode,
                old_pid=dead.pid,
                pid=pid,
                reason=reason,
            )
        )
        return True

    def _refuse(self, dead: DeadWorker, why: str, round_index: int) -> bool:
        logger.warning("not replaced: %s", why)
        self._events.write(ReplacementRefused(round=round_index, rank=dead.rank, reason=why))
        return False

    def _take(self, line: RestartGroupReport, round_index: int) -> None:
        if line.event is RestartGroupEvent.RESTARTED:
            kinds = ", ".join(f"{name} on rank {rank}" for rank, name in line.interruptions)
            logger.info(
                "the function starts again (iteration %d) after %.2f s: %s", line.iteration, line.seconds, kinds
            )
            self._events.write(
                InProcessRestarted(
                    round=round_index,
                    iteration=line.iteration,
                    seconds=line.seconds,
                    world_size=line.world_size,
                    active_world_size=line.active_world_size,
                    interruptions=line.interruptions,
                    joined=line.joined,
                    reason=kinds,
                )
            )
            return
        self._last[line.pid] = line.event
        ends: dict[RestartGroupEvent, type[InProcessLeft | InProcessGaveUp]] = {
            RestartGroupEvent.LEFT: InProcessLeft,
            RestartGroupEvent.GAVE_UP: InProcessGaveUp,
        }
        if (end := ends.get(line.event)) is not None:
            self._events.write(end(round=round_index, rank=line.rank, iteration=line.iteration, reason=line.reason))


def keep_apart(error_file: Path, number: int) -> None:
    """The error file must not be taken for that of the process in the dead one's place."""
    try:
        error_file.rename(error_file.with_name(f"{error_file.stem}-replaced-{number}{error_file.suffix}"))
    except OSError:
        pass  # it left none
