"""The agent's side of the heartbeats: a folder on the node itself with one small file per worker.

Nothing of it touches the shared filesystem. The folder is the agent's alone (0700), goes when the agent ends, is
removed by the guardian where it was killed, and where both were killed at once, by the user's next agent on the node.
"""

from __future__ import annotations

import fcntl
import itertools
import logging
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from hpc_elastic.base.files import check_private_dir
from hpc_elastic.base.host_facts import filesystem_type
from hpc_elastic.errors import UnsafePathError
from hpc_elastic.run.progress import ProgressSource
from hpc_elastic.worker_api import records
from hpc_elastic.worker_api.records import SETUP, HeartbeatRecord, NoticeRecord

logger = logging.getLogger(__name__)

PREFIX = "hpc-elastic-beats."
FOLDER_VARIABLE = "HPC_ELASTIC_HEARTBEAT_DIR"
"""A folder on the node itself for the pages, which the workers' containers see too."""
_ALIVE = "alive"
_MOST_ENTRIES = 100_000
_MOST_NAMES = 5_000
"""Most names to look at, anybody's: some 20 ms."""
_PACE_SAMPLES = 5
_PACE_LEAST_SECONDS = 2.0
_LOCAL_TYPES = frozenset({"tmpfs", "ramfs", "ext2", "ext3", "ext4", "xfs", "btrfs", "overlay", "zfs", "f2fs"})


class HeartbeatFolder:
    """Without a place for a folder all workers are silent, and the run goes on."""

    def __init__(self, path: Path | None, lock_fd: int = -1) -> None:
        """`lock_fd` holds the lock that shows that its agent lives."""
        self.path = path
        self._lock_fd = lock_fd

    def make_file(self, name: str) -> str:
        if self.path is None:
            return ""
        path = self.path / name
        try:
            path.unlink(missing_ok=True)
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                # Written, not only made longer: a worker that finds no page later would be killed by SIGBUS.
                if os.write(fd, records.empty_file()) != records.FILE_BYTES:
                    raise OSError("no space left")
            finally:
                os.close(fd)
        except OSError as error:
            logger.warning("no heartbeats of this worker: %s: %s", path, error)
            return ""
        return str(path)

    def make_pipe(self, name: str, use: str) -> tuple[str, int]:
        if self.path is None:
            return "", -1
        path = str(self.path / name)
        try:
            os.mkfifo(path, 0o600)
            return path, os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            logger.warning("no %s: %s: %s", use, path, error.strerror)
            return "", -1

    def remove(self) -> None:
        if self.path is not None:
            _remove(self.path)
            self.path = None


def open_folder(name: str, env: Mapping[str, str], *, mounts: str = "/proc/self/mountinfo") -> HeartbeatFolder:
    for base in candidates(env):
        if not _is_local(base, mounts):
            continue
        try:
            sweep(base, PREFIX)
            return make_folder(base / f"{PREFIX}{name}")
        except (OSError, UnsafePathError):
            continue
    logger.warning("heartbeats: no folder on this node can be written (/dev/shm, XDG_RUNTIME_DIR, TMPDIR, /tmp)")
    return HeartbeatFolder(None)


def candidates(env: Mapping[str, str]) -> Iterator[Path]:
    if env.get(FOLDER_VARIABLE, "").startswith("/"):
        yield Path(env[FOLDER_VARIABLE])
    yield Path("/dev/shm")
    for variable in ("XDG_RUNTIME_DIR", "TMPDIR"):
        if env.get(variable, "").startswith("/"):
            yield Path(env[variable])
    yield Path("/tmp")


def _is_local(base: Path, mounts: str) -> bool:
    kind = filesystem_type(os.path.realpath(base), mountinfo=mounts)
    return str(base) == "/dev/shm" if kind is None else kind in _LOCAL_TYPES


def make_folder(path: Path) -> HeartbeatFolder:
    while True:
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            check_private_dir(path)
            _remove(path)
            os.mkdir(path, 0o700)
        fd = os.open(path / _ALIVE, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.lockf(fd, fcntl.LOCK_EX)
        if os.fstat(fd).st_nlink:
            return HeartbeatFolder(path, fd)
        os.close(fd)  # another agent's `sweep` had the lock first, and took the folder for a dead agent's


def sweep(base: Path, prefix: str) -> None:
    """Remove the folders whose lock can be had: those of dead agents. (Pids mean nothing between containers.) Anybody
    may make any number of names there: of very many only some are looked at."""
    with os.scandir(base) as entries:
        found = [entry for entry in itertools.islice(entries, _MOST_ENTRIES) if entry.name.startswith(prefix)]
    for entry in found[:_MOST_NAMES]:
        try:
            if entry.stat(follow_symlinks=False).st_uid != os.geteuid():
                continue
            check_private_dir(base / entry.name)
            fd = os.open(base / entry.name / _ALIVE, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except (OSError, UnsafePathError):
            continue  # another user's, or one that is just being made
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(base / entry.name)
        except OSError:
            pass  # its agent lives
        finally:
            os.close(fd)


def _remove(path: Path) -> None:
    """`shutil` brings half a megabyte of decompressors along."""
    with suppress(OSError):
        for entry in os.scandir(path):
            if entry.is_dir(follow_symlinks=False):
                _remove(Path(entry.path))
            else:
                os.unlink(entry.path)
        os.rmdir(path)


def is_seen_by(pids: Iterable[int], path: str) -> bool:
    """A container may have its own /dev/shm. A process of which that can't be known, or that is gone, sees the page."""
    try:
        mine = os.stat(path)
    except OSError:
        return True
    for pid in pids:
        try:
            os.stat(f"/proc/{pid}/root/")
            found = os.stat(f"/proc/{pid}/root{path}")
        except FileNotFoundError:
            if os.path.exists(f"/proc/{pid}/root/"):
                return False
        except OSError:
            continue
        else:
            if (found.st_dev, found.st_ino) != (mine.st_dev, mine.st_ino):
                return False
    return True


class RankBeat(Struct, frozen=True, kw_only=True):
    """A worker's last heartbeat as its agent sees it: what `HeartbeatRecord` holds, in seconds on the agent's clock."""

    rank: int
    local_rank: int
    section: str
    at: float
    """The worker's start where there was none yet."""
    step: int | None = None
    counted_steps: int | None = None
    """Steps of its optimizer in this round, or its collectives, where the script reports none; `step` is None then."""
    source: ProgressSource = ProgressSource.UNKNOWN
    is_final: bool = False
    """The collectives were counted at the process' end, so that they are all that it did."""
    count: int = 0
    intervals: int = 0
    longest: float = 0.0
    pid: int = 0
    checkpoints: int = 0
    saved_at: float = 0.0
    saved_step: int | None = None
    total: int | None = None
    loss: float | None = None
    first_step: int | None = None
    first_at: float = 0.0
    stepped_at: float = 0.0
    checkpoint_seconds: float = 0.0
    redone_seconds: float = 0.0
    sections: tuple[str, ...] | None = ()
    """`None`: too many to know."""
    spent: Mapping[str, float] = {}
    asks_for_notices: bool = False
    has_notice: bool = False
    """The script may get it by `should_checkpoint`, by a callback, or by `preemption_notice`."""

    @property
    def changes(self) -> int:
        """Grows with each heartbeat, and with each collective where they are counted."""
        return self.count + (self.counted_steps or 0) * (self.source is ProgressSource.COLLECTIVES)

    def age(self, now: float) -> float:
        return max(0.0, now - self.at)


class StepPace:
    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque(maxlen=_PACE_SAMPLES)

    def add(self, beats: Iterable[RankBeat], now: float) -> None:
        done = (beat.counted_steps if beat.step is None else beat.step for beat in beats)
        if not (steps := [step for step in done if step is not None]):
            return
        if len(self._samples) > 1 and now - self._samples[-1][0] < _PACE_LEAST_SECONDS:
            self._samples.pop()  # looks in quick succession are one
        self._samples.append((now, max(steps)))

    @property
    def steps_per_second(self) -> float | None:
        if len(self._samples) < 2 or self._samples[-1][0] <= self._samples[0][0]:
            return None
        (begin, first), (end, last) = self._samples[0], self._samples[-1]
        return max(0, last - first) / (end - begin)


class RoundBeats:
    def __init__(self, folder: HeartbeatFolder, *, round_index: int, first_rank: int, count: int, now: float) -> None:
        self._folder = folder
        self._round = round_index
        self.paths = [folder.make_file(f"{round_index}-{local_rank}") for local_rank in range(count)]
        self._lease = folder.make_file(f"{round_index}-lease") if count else ""
        self._last_look = now
        self.beats = [RankBeat(rank=first_rank + n, local_rank=n, section=SETUP, at=now) for n in range(count)]

    def begin_again(self, local_rank: int, now: float) -> None:
        """Another process comes in this one's place, and has sent nothing yet. A new file: the old one is mapped."""
        self.paths[local_rank] = self._folder.make_file(f"{self._round}-{local_rank}")
        rank = self.beats[local_rank].rank
        self.beats[local_rank] = RankBeat(rank=rank, local_rank=local_rank, section=SETUP, at=now)

    def read(self, now: float) -> list[RankBeat]:
        for local_rank, path in enumerate(self.paths):
            self.beats[local_rank] = self._read(self.beats[local_rank], path, now)
        self._last_look = now
        return list(self.beats)

    def write_notice(self, notice: NoticeRecord) -> None:
        for path in self.paths:
            _write(path, *records.pack_notice(notice))

    def write_lease(self, until_ns: int, looked_ns: int) -> None:
        """Writes as `pack_lease` says. Thread-safe."""
        _write(self._lease, *records.pack_lease(until_ns, looked_ns))

    def renew(self, now: float) -> None:
        self.beats = [replace(beat, at=now) for beat in self.beats]
        self._last_look = now

    def remove(self) -> None:
        for path in filter(None, (*self.paths, self._lease)):
            with suppress(OSError):
                os.unlink(path)

    def _read(self, before: RankBeat, path: str, now: float) -> RankBeat:
        if not path:
            return before
        try:
            with open(path, "rb", buffering=0) as file:
                raw = file.read(records.FILE_BYTES)
        except OSError:
            return before
        record, collectives = records.read_record(raw), records.COLLECTIVES.read(raw)
        if record is not None and (record.count, record.pid) != (before.count, before.pid):
            before = self._describe(before, raw, record, now)
        if collectives is None or before.source not in (ProgressSource.UNKNOWN, ProgressSource.COLLECTIVES):
            return before
        done, first_ns, last_ns, is_final = collectives
        return replace(
            before,
            source=ProgressSource.COLLECTIVES,
            counted_steps=done,
            is_final=is_final,
            first_at=min(now, first_ns / 1e9),
            stepped_at=min(now, last_ns / 1e9),
        )

    def _describe(self, before: RankBeat, raw: bytes, record: HeartbeatRecord, now: float) -> RankBeat:
        # By the worker's own clock, which is this one but in a time namespace of its own; it came after the last look.
        at = min(now, max(record.at_ns / 1e9, self._last_look))
        source = ProgressSource.OPTIMIZER if record.is_counted else ProgressSource.HEARTBEAT
        return RankBeat(
            rank=before.rank,
            local_rank=before.local_rank,
            section=record.section,
            at=at,
            source=source if record.step is not None else ProgressSource.UNKNOWN,
            step=None if record.is_counted else record.step,
            counted_steps=record.step if record.is_counted else None,
            count=record.count,
            intervals=record.intervals,
            longest=record.longest_ns / 1e9,
            pid=record.pid,
            checkpoints=record.checkpoints,
            saved_at=min(now, record.saved_ns / 1e9),
            saved_step=record.saved_step,
            total=(records.TOTAL.read(raw) or (None,))[0] or None,
            loss=(records.LOSS.read(raw) or (None,))[0],
            first_step=None if record.is_counted else record.first_step,
            first_at=min(now, record.first_ns / 1e9),
            stepped_at=min(now, record.stepped_ns / 1e9),
            checkpoint_seconds=record.checkpoint_ns / 1e9,
            redone_seconds=record.redone_ns / 1e9,
            sections=records.read_sections(raw),
            spent=records.read_spent(raw),
            asks_for_notices=record.asks_for_notices,
            has_notice=record.has_notice,
        )


def _write(path: str, offset: int, raw: bytes) -> None:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return
    try:
        os.pwrite(fd, raw, offset)
    except OSError as error:
        logger.warning("%s can't be written: %s", path, error)
    finally:
        os.close(fd)
