"""The run's event log: the base types of its events, and the writer of one file of it.

A file is JSON lines of one writer; all are read together afterwards. A line is one object: ``v`` (schema version, 1),
``t`` (this host's wall clock, nanoseconds since the epoch), ``n`` (position in this file, from 0), ``host``, ``node``
(node index in Slurm's order, or -1), ``role`` (``supervisor`` or ``agent``), ``event`` (its name) and the event's own
fields. Times of two hosts are shown, never subtracted.

Each event is a type, which writers build and readers get back: see `agent_events` and `control_events`. The class's
name in snake case, or its `tag`, is the event's name in the file. What no program reads is a `Note`. A line of an
earlier version may lack a field with a default; a line without one of the others is useless. Durations are seconds;
`round` is its index in the attempt.

docs/reference/events.md is generated: a class's docstring and the texts below its fields are its row.
"""

from __future__ import annotations

import errno
import os
from collections import deque
from pathlib import Path
from typing import Annotated, ClassVar

from msgspec import Meta, Struct

from hpc_elastic.base.clock import Clock
from hpc_elastic.base.codec import to_json
from hpc_elastic.base.files import json_text, make_private_dir
from hpc_elastic.base.loop import FileExecutor
from hpc_elastic.errors import UnsafePathError

Seconds = Annotated[float, Meta(ge=0, lt=1e9)]
"""A duration; a reader takes a value outside of these bounds for another host's defect."""


class RunEvent(
    Struct,
    frozen=True,
    kw_only=True,
    gc=False,
    tag_field="event",
    tag=lambda name: "".join(f"_{char.lower()}" if char.isupper() else char for char in name).lstrip("_"),
):
    """An action, a decision or a finding."""

    at_once: ClassVar[bool] = False
    """Others act on it, its writer may be about to die, or it shows that an agent that was killed soon has run."""


class SupervisorEvent(RunEvent, frozen=True, kw_only=True):
    """Written by the supervisor."""


class AgentEvent(RunEvent, frozen=True, kw_only=True):
    """Written by an agent, about its own node."""


class CoordinatorEvent(RunEvent, frozen=True, kw_only=True):
    """Written by the agent that coordinates the rounds."""

    round: int


class Note(RunEvent, frozen=True, kw_only=True, omit_defaults=True):
    """An event that only people read. `logs --events` shows its subject as its name."""

    subject: str
    """a key of `NOTES`"""
    text: str
    """what happened, in words"""
    reason: str = ""
    round: int | None = None


NOTES = {
    "agents_launched": "srun starts the agents.",
    "attempt_superseded": "An earlier attempt of this run was ended by this one: "
    "[two attempts at once](../explanation/when-something-dies.md#two-attempts-at-once).",
    "coordinator_changed": "The agent that writes this coordinates now.",
    "events_dropped": "Lines were lost while the disk was full.",
    "fork_server_ended": "The fork server of this node is gone or useless; another one takes its place.",
    "fork_server_gave_up": "This node has no fork server from here on: workers are started fresh.",
    "fork_server_ready": "The fork server of this node has imported all that is preloaded.",
    "health_warning": "A check warns, and the node stays; once for each check.",
    "nodes_asked": "Silent nodes are asked through the files, or have answered.",
    "nodes_judged": "The nodes that the next attempt does without, and the bad ones that stay.",
    "nodes_waiting": "Nodes wait for a place in the next round.",
    "notice_given": "The job is about to end; again, if it ends sooner than expected.",
    "preload_left_out": "A module can't be shared: the fork server starts again without it.",
    "replacement_refused": "A failed worker is not replaced: all workers start again.",
    "ring_left": "A rank alone leaves a wrapped call; the others continue.",
    "round_confirmed": "All members have confirmed the round.",
    "signal_heard": "An agent got a signal, and the supervisor has to find out its meaning.",
    "step_agreed": "All workers save after this step.",
}
"""Each subject, and what it says in docs/reference/events.md."""


def name_of(event: RunEvent | type[RunEvent]) -> str:
    """Its name in the file; of a note its subject."""
    return event.subject if isinstance(event, Note) else str(event.__struct_config__.tag)


SCHEMA_VERSION = 1
_KEPT_WHEN_DISK_IS_FULL = 1000
_OPENED = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_NO_SYNC = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
"""Errors of a filesystem that can't sync."""


class EventLog:
    """One writer. A full disk stops the record, never the training: lines wait in memory and are written later."""

    def __init__(
        self,
        folder: Path,
        *,
        role: str,
        host: str,
        node: int,
        uid: str,
        clock: Clock,
        files: FileExecutor | None = None,
        together: float = 0.0,
    ) -> None:
        """Create the file, and `folder` where it is missing.

        `uid` distinguishes this writer from an earlier one of the same role and node. `files` is the thread that
        writes, for a caller that must not wait for a disk; without it `write` writes itself, and UnsafePathError or
        OSError is raised here. Most events of `together` seconds are written as one: each write asks the file server
        twice.
        """
        self._folder = folder
        self._path = folder / f"{role}-{node:05d}-{uid}.jsonl"
        self._clock = clock
        self._head = {"host": host, "node": node, "role": role}
        self._count = 0
        self._waiting: deque[bytes] = deque(maxlen=_KEPT_WHEN_DISK_IS_FULL)
        self._dropped = 0
        self._offset = 0
        self._exists = False
        self._closed = False
        self._files, self._together = files, together
        self._flush_is_due = False
        if files is None:
            self._create()
        else:
            files.post(self._create)

    def _create(self) -> None:
        make_private_dir(self._folder)
        os.close(os.open(self._path, _OPENED | os.O_CREAT | os.O_EXCL, 0o600))
        self._exists = True

    def write(self, event: RunEvent) -> None:
        """Append one event. Never raises for the disk's sake, and with a thread of files never waits for it."""
        fields = to_json(event)
        line = {"v": SCHEMA_VERSION, "t": self._clock.time_ns(), "n": self._count, **self._head, **fields}
        if "node" in fields:
            line["by"] = self._head["node"]
        self._count += 1
        raw = (json_text(line) + "\n").encode()
        if len(self._waiting) == self._waiting.maxlen:
            self._dropped += 1
        self._waiting.append(raw)
        if self._files is None:
            self._flush()
        elif event.at_once:
            self._files.post(self._flush)
        elif not self._flush_is_due:
            self._flush_is_due = True
            self._files.post(self._flush, after=self._together)

    def _flush(self) -> None:
        self._flush_is_due = False
        if self._closed or not self._waiting:
            return
        try:
            if not self._exists:
                if self._files is None:
                    return
                self._create()  # it could not be made before
            # Opened for each write: every process that is started while a file on a mount that hangs is open would hang
            # too, when the kernel closes for it what it inherited.
            fd = os.open(self._path, _OPENED)
        except (OSError, UnsafePathError):
            return
        try:
            self._write_out(fd)
        finally:
            try:
                os.close(fd)
            except OSError:
                pass  # what counts as written was synced before

    def _write_out(self, fd: int) -> None:
        # Not O_APPEND: it loses records on NFS and CephFS. One writer knows its own offset.
        # An NFS client would keep it for half a minute, and a node that loses its power would take it along. And what
        # it can't write out at last, on a full disk, it drops, and only fsync reports it: so a line is kept here until
        # then, and written again at the same offset.
        offset, written = self._offset, []
        try:
            for raw in tuple(self._waiting):
                if os.pwrite(fd, raw, offset) != len(raw):
                    break  # the disk filled up in mid-line
                offset += len(raw)
                written.append(raw)
        except OSError:
            pass
        if not written:
            return
        try:
            os.fdatasync(fd)
        except OSError as error:
            if error.errno not in _NO_SYNC:
                return
        self._offset = offset
        for raw in written:
            if self._waiting and self._waiting[0] is raw:  # else it was pushed out meanwhile, and counted as dropped
                self._waiting.popleft()

    def close(self, *, within: float = 5.0) -> None:
        """Write the waiting lines. With a thread of files, a disk that hangs loses them after `within` seconds."""
        if self._files is None:
            self._close()
            return
        try:
            self._files.do(self._close, within=within)
        except OSError:
            pass

    def _close(self) -> None:
        if self._closed:
            return
        self._flush()  # first, so that what follows pushes out nothing
        self._files = None
        if self._dropped:
            self.write(Note(subject="events_dropped", text=f"{self._dropped} events lost: the disk was full"))
        self._closed = True
