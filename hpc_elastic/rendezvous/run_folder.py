"""Where a run's rendezvous lives in a shared directory: many runs side by side, each id used again in a new epoch.

``<directory>[/<prefix>]/<name of the run>/epoch-000001`` is a store. When it is closed, whoever comes with the same id
later opens ``epoch-000002``, and nothing of the old one is read.
"""

from __future__ import annotations

import hashlib
import os
import threading
from pathlib import Path

from hpc_elastic.atomic_file import make_private_dir, why_replaceable
from hpc_elastic.clock import Clock
from hpc_elastic.errors import UnsafePathError
from hpc_elastic.rendezvous.errors import RendezvousStateError
from hpc_elastic.rendezvous.round_log import RoundLog
from hpc_elastic.rendezvous.state import RoundRecord, Status
from hpc_elastic.rendezvous.sweep_epochs import EpochSweep
from hpc_elastic.store.file_store import FileStore

_EPOCH = "epoch-"
_READABLE = 48


def safe_name(text: str) -> str:
    """Any text as one path component: readable where it can be, different for different texts.

    ``jobs/42`` → ``jobs_42.`` and 32 hexadecimal digits of its SHA-256.
    """
    readable = "".join(c if c.isascii() and (c.isalnum() or c in "-_") else "_" for c in text[:_READABLE])
    return f"{readable}.{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()[:32]}"


class RunFolder:
    """The epochs of one run id. Methods read the filesystem anew and may raise OSError."""

    def __init__(self, directory: str, run_id: str, *, prefix: str, job: str, clock: Clock) -> None:
        """Args:
        directory: Shared by all nodes; it exists.
        run_id: Any text that is not empty.
        prefix: Keeps runs of the same id apart; may be empty.
        job: What is the same on all nodes of one start of the job and on no others, such as the scheduler's job and
            restart number; empty where that is not known.
        clock: For the stores.
        """
        self._directory = directory
        self._run_id = run_id
        self._prefix = safe_name(prefix) if prefix else ""
        self._job = job
        self._clock = clock

    @property
    def path(self) -> str:
        return os.path.join(self._directory, self._prefix, safe_name(self._run_id))

    def epoch_path(self, epoch: int) -> str:
        return os.path.join(self.path, f"{_EPOCH}{epoch:06d}")

    def epoch_name(self, epoch: int) -> str:
        """The same on every node, by whatever path each of them sees the directory."""
        return "/".join(part for part in (self._prefix, safe_name(self._run_id), f"{_EPOCH}{epoch:06d}") if part)

    def current_epoch(self) -> int:
        """The epoch that a newcomer belongs to: the newest, or the one after it where that was closed.

        A latecomer of the job that closed it (the same `job`) stays in the closed one.
        """
        newest = max(self._epochs(), default=0)
        if newest == 0:
            return 1
        record = self.latest(newest)
        if record is None or record.status is not Status.CLOSED:
            return newest
        if self._job and self.open(newest).get("epoch/job") == self._job:
            return newest
        return newest + 1

    def latest(self, epoch: int) -> RoundRecord | None:
        """The newest record of `epoch`, or None where nothing exists yet."""
        if epoch not in self._epochs():
            return None
        return RoundLog(self.open(epoch), self._run_id).latest()

    def open(self, epoch: int) -> FileStore:
        """The store of `epoch`, created where it is not there.

        Raises:
            UnsafePathError: another user could put a store of theirs in its place.
        """
        at = Path(self._directory)
        problem = why_replaceable(at, option="--rdzv-endpoint")
        if problem is not None:
            raise UnsafePathError(f"the rendezvous folder {at} {problem}")
        for part in (self._prefix, safe_name(self._run_id)):
            if part:
                at = at / part
                make_private_dir(at)
        return FileStore(Path(self.epoch_path(epoch)), clock=self._clock)

    def enter(self, epoch: int) -> FileStore:
        """`open` for taking part in it."""
        store = self.open(epoch)
        if self._job:
            store.put_if_absent("epoch/job", self._job)
        return store

    def remove_earlier_epochs(self, stop: threading.Event) -> None:
        """Remove what earlier runs of this id left, when it may go: for a thread in the background."""
        EpochSweep(epochs=self._epochs, state=self._state, path=self.epoch_path, clock=self._clock).run(stop)

    def _state(self, epoch: int) -> tuple[bool, object]:
        """Whether an epoch is closed, and what changes when something happens in it."""
        # Looked at only: a folder that somebody else is removing must not be made anew.
        if not os.path.isdir(self.epoch_path(epoch)):
            return False, None
        store = self.open(epoch)
        try:
            record = RoundLog(store, self._run_id).latest()
        except RendezvousStateError:
            record = None  # a later program's: it counts as one that was never closed
        beats = {uid: store.version(f"hb/{uid}") for uid in store.list("hb")}
        return record is not None and record.status is Status.CLOSED, (
            record.number if record is not None else 0,
            beats,
        )

    def _epochs(self) -> list[int]:
        try:
            names = os.listdir(self.path)
        except FileNotFoundError:
            return []
        return [int(n[len(_EPOCH) :]) for n in names if n.startswith(_EPOCH) and n[len(_EPOCH) :].isdecimal()]
