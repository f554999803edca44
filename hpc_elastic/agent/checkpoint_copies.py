"""``--checkpoint-dir``: the part of an agent that copies its node's checkpoints, in a thread of low I/O priority.

Before the workers of a round start, all nodes agree what they continue from. The thread may hang with a filesystem; the
agent's loop then goes on, and only the start of workers waits.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_elastic.agent.health_checks import measure_memory
from hpc_elastic.agent.heartbeats import make_folder, sweep
from hpc_elastic.agent.identity import CHECKPOINT_PREFIX
from hpc_elastic.agent.part import Part
from hpc_elastic.base.host_facts import filesystem_type
from hpc_elastic.base.loop import Waker
from hpc_elastic.base.text import size_text
from hpc_elastic.checkpoints.copying import ReplicaServer, Replicator, send_part
from hpc_elastic.checkpoints.folders import START_VARIABLE, NodePart, NodePlace
from hpc_elastic.checkpoints.node import NodeCheckpoints
from hpc_elastic.errors import UnsafePathError, UsageError, describe_error
from hpc_elastic.rendezvous.state import RoundRecord, Status, host_of
from hpc_elastic.run.agent_events import CheckpointNotCommitted
from hpc_elastic.store.notifier import read_secret

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpc_elastic.agent.local_workers import LocalWorkers
    from hpc_elastic.agent.node_agent import NodeAgent
    from hpc_elastic.agent.part import AgentSite

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.25
"""Pause between two looks at a node's folder, and of the first node at the shared one."""
NODES_PER_SECOND = 200
"""Looks at the shared filesystem by all nodes together."""
LONGEST_PAUSE = 30.0
ALONE_SECONDS = 15.0
"""Longest wait at the end for the first node to name the next checkpoint; it may be gone."""
_CLOSE_SECONDS = 1.0
_IOPRIO_SET, _BEST_EFFORT_LOWEST = {"x86_64": 251, "aarch64": 30}, 2 << 13 | 7


class _StopCopyingError(Exception):
    """A new round begins, or the agent ends."""


class CheckpointCopies(Part):
    def __init__(self, site: AgentSite) -> None:
        spec, me = site.me.spec, site.me
        folder = me.checkpoint_folder
        assert folder is not None
        room = find_room(folder.parent, spec.checkpoint_local.room)
        if spec.checkpoint_local.room is None:
            logger.info("checkpoints may take %s of %s, half of what is free", size_text(room), folder.parent)
        try:
            sweep(folder.parent, CHECKPOINT_PREFIX)
            self._folder = make_folder(folder)
        except (OSError, UnsafePathError) as error:
            raise UsageError(f"--checkpoint-local {folder.parent}: {error}; give another folder") from None
        self._site, self._bandwidth = site, spec.checkpoint_bandwidth
        self._replicas = ReplicaLink(site, folder, room) if spec.checkpoint_replicas else None
        self._node = NodeCheckpoints(
            spec=spec,
            local=folder,
            reports=me.paths.checkpoints,
            room=room,
            clock=site.clock,
            write=site.events.write,
            pace=self._pace,
            address=self._replicas.address if self._replicas is not None else "",
        )
        self._waker = Waker()
        self._changed = threading.Condition()
        self._pending: NodePlace | None = None
        self._round = -1
        self._is_chosen = True
        self._hurries = self._is_choosing = False
        self._ends_at: float | None = None
        self._gone: dict[str, str] = {}
        self._paid_until = self._warn_at = 0.0
        self._agent: NodeAgent | None = None
        self._thread = threading.Thread(target=self._run, name="checkpoints", daemon=True)

    @property
    def is_stuck(self) -> bool:
        return self._thread.is_alive()

    @property
    def due(self) -> float | None:
        return None if self._is_chosen else self._warn_at

    @property
    def holds_start(self) -> bool:
        return not self._is_chosen

    def fileno(self) -> int:
        return self._waker.fileno()

    def begin(self) -> None:
        self._thread.start()

    def on_record(self, record: RoundRecord, workers: LocalWorkers | None) -> None:
        self._hurries |= record.notice is not None
        me = self._site.me
        index = record.rank(me.uid)
        if record.status is Status.CLOSED:
            self._gone = {one.uid: host_of(one.uid) for one in record.members if one.node in record.lost}
        if record.status is not Status.FINAL or record.round == self._round or index is None:
            return
        self._round, self._is_chosen = record.round, False
        self._warn_at = self._site.clock.monotonic() + LONGEST_PAUSE
        place = NodePlace(
            attempt=me.attempt.number,
            round=record.round,
            index=index,
            uids=tuple(member.uid for member in record.members),
            ranks=record.members[index].local_world_size,
        )
        with self._changed:
            self._pending = place
            self._changed.notify()

    def environment(self, given: Mapping[str, str]) -> Mapping[str, str]:
        return {START_VARIABLE: str(self._node.start_path)}

    def look(self, agent: NodeAgent) -> None:
        self._agent = agent
        self._waker.drain()
        if self.due is not None and self._site.clock.monotonic() >= self.due:
            self._warn_at += LONGEST_PAUSE
            logger.warning("the workers wait: the nodes have not agreed yet which checkpoint to continue from")

    def close(self) -> None:
        """Flush what is whole, in the time that is left; nothing stays on the node."""
        left = self._agent.heard.left() if self._agent is not None else None
        seconds = self._site.me.spec.flush_seconds if left is None else left
        if self._replicas is not None:
            self._replicas.close()
        with self._changed:
            self._ends_at = self._site.clock.monotonic() + seconds
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(seconds + _CLOSE_SECONDS)
        self._folder.remove()

    # -- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        if (number := _IOPRIO_SET.get(os.uname().machine)) is not None:
            ctypes.CDLL(None).syscall(number, 1, 0, _BEST_EFFORT_LOWEST)
        pause = 0.0
        while True:
            with self._changed:
                if self._pending is None and self._ends_at is None and pause:
                    self._changed.wait(pause)
                place, self._pending = self._pending, None
            try:
                if self._ends_at is not None:
                    self._flush()
                    return
                if place is not None:
                    self._begin_round(place)
                pause = _look_seconds(self._node.place) if self._node.tick() else LOOK_SECONDS
            except _StopCopyingError:
                pause = 0.0
            except Exception as error:
                logger.exception("checkpoints are not copied any more")
                self._site.events.write(CheckpointNotCommitted(reason=describe_error(error)))
                return

    def _begin_round(self, place: NodePlace) -> None:
        pause, has_begun = 0.02, False
        self._is_choosing = True
        while True:
            try:
                if not has_begun:
                    self._node.begin(place)
                    has_begun = True
                if self._node.choose() is not None:
                    break
            except OSError as error:
                logger.warning("which checkpoint to continue from is not known yet: %s", error)
                pause = 1.0
            with self._changed:
                self._changed.wait(pause)
                if self._pending is not None or self._ends_at is not None:
                    return
            pause = min(pause * 1.5, max(LOOK_SECONDS, len(place.uids) / NODES_PER_SECOND))
        self._is_choosing = False
        if self._replicas is not None:
            self._replicas.neighbour, self._replicas.place = self._node.neighbour(), place
        self._is_chosen = place.round == self._round
        self._waker.wake()

    def _flush(self) -> None:
        node, clock = self._node, self._site.clock
        self._hurries = node.is_ending = True
        node.gone = self._gone
        assert self._ends_at is not None
        alone_at = clock.monotonic() + ALONE_SECONDS
        try:
            while node.tick(is_over=True):
                now = clock.monotonic()
                alone_at = now + ALONE_SECONDS if node.has_target else alone_at
                if now >= min(self._ends_at, alone_at):
                    raise _StopCopyingError
                clock.wait(threading.Event(), LOOK_SECONDS)
        except _StopCopyingError:
            node.report_left("there was no time to copy it")
        node.finish()

    def _pace(self, count: int) -> None:
        now = self._site.clock.monotonic()
        if self._ends_at is not None and (now >= self._ends_at or not self._node.is_ending):
            raise _StopCopyingError
        if self._pending is not None:
            raise _StopCopyingError
        if self._hurries or self._is_choosing:
            return
        self._paid_until = max(self._paid_until, now) + count / self._bandwidth
        if self._paid_until - now > 0.01:
            self._site.clock.wait(threading.Event(), self._paid_until - now)


class ReplicaLink:
    def __init__(self, site: AgentSite, folder: Path, room: int) -> None:
        self.neighbour = ""
        self.place: NodePlace | None = None
        self._site, self._folder = site, folder
        self._secret = read_secret(site.me.run.secret)
        self._stop = threading.Event()
        try:
            self._server = ReplicaServer(folder, site.info.addresses, self._secret, room=room)
        except OSError as error:
            raise UsageError(f"--checkpoint-replicas: no port on {site.info.host}: {error}") from None
        self.address = self._server.address
        threading.Thread(target=self._run, name="replicas-out", daemon=True).start()

    def close(self) -> None:
        self._stop.set()
        self._server.close()

    def _run(self) -> None:
        me = self._site.me
        replicator = Replicator(self._folder, Path(me.spec.checkpoint_dir), me.spec.uid, self._send)
        while not self._site.clock.wait(self._stop, _look_seconds(self.place)):
            try:
                if self.place is not None and self.neighbour:
                    replicator.tick(self.place.index)
            except OSError as error:
                logger.warning("checkpoints are not replicated: %s", error)
                self._site.clock.wait(self._stop, LONGEST_PAUSE)

    def _send(self, part: NodePart, folder: Path) -> None:
        send_part(self.neighbour, self._secret, part, owner=self._site.me.uid, folder=folder)


def _look_seconds(place: NodePlace | None) -> float:
    count = len(place.uids) if place is not None and place.index else 1
    return min(LONGEST_PAUSE, max(LOOK_SECONDS, count / NODES_PER_SECOND))


def find_room(folder: Path, asked: int | None) -> int:
    """Bytes: what was asked for, else half of what is free. Raises UsageError."""
    try:
        found = os.statvfs(folder)
    except OSError as error:
        raise UsageError(f"--checkpoint-local {folder}: {error.strerror}; give a folder of each node") from None
    free, why = found.f_bavail * found.f_frsize, "free"
    memory = measure_memory() if filesystem_type(os.path.realpath(folder)) in ("tmpfs", "ramfs") else None
    if memory is not None and memory.free < free:
        free, why = memory.free, f"free ({memory.limited_by or 'the memory of the node'})"
    if asked is not None and asked > free:
        host = os.uname().nodename
        raise UsageError(
            f"--checkpoint-local {folder}:{size_text(asked)}: only {size_text(free)} are {why} on {host}; "
            "ask for less or for more memory (--mem), or give a folder on the node's disk"
        )
    return asked or free // 2
