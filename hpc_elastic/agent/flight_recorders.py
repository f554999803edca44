"""torch's flight recorders in the workers of this node: the agent asks for their dumps, and reads them.

The files are in the folder of the heartbeats, on the node itself, the user's alone. NCCL's process group dumps on its
timeout, and when a byte comes through its pipe; for gloo `hpc_elastic.worker_api.flight_recorder` does the same. A
worker that is stopped, by a signal or by this agent, can dump nothing: the workers are asked before they are touched.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from hpc_elastic.base.clock import Clock
from hpc_elastic.base.files import Owner, open_checked, write_private
from hpc_elastic.errors import UnsafePathError
from hpc_elastic.failures.flight_dump import MOST_BYTES, RankDump, UnreadableDumpError, read_dump, tail_of
from hpc_elastic.run.progress import FlightTail
from hpc_elastic.worker_api.flight_recorder import ARRIVALS, ASK, DUMP, PING, PONG, VARIABLE, WHEN

DUMP_SECONDS = 1.5
"""How long dumps are waited for: NCCL's thread looks at its pipe once a second."""
_SETTLED_SECONDS = 0.1
"""NCCL writes into the file itself: whole is what has not grown for so long."""
_NCCL_DUMP, _NCCL_PIPE = "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"


class FlightRecorders:
    def __init__(self, folder: Path | None, *, round_index: int, clock: Clock) -> None:
        self._prefix = f"{folder}/flight-{round_index}-" if folder is not None else ""
        self._clock = clock
        self._began_ns = clock.time_ns()
        self._users: dict[int, str] = {}
        self._awaited: list[str] = []
        self._pinged: dict[str, float] = {}
        self._nccl_asked: list[int] = []

    def environment(self, rank: int, given: Mapping[str, str]) -> dict[str, str]:
        """A variable that is given already stays."""
        if not self._prefix:
            return {}
        self.forget(rank)
        if given.get(_NCCL_DUMP):
            self._users[rank] = given[_NCCL_DUMP]
        ours = {
            "TORCH_FR_BUFFER_SIZE": "2000",
            _NCCL_DUMP: f"{self._prefix}nccl-",
            _NCCL_PIPE: f"{self._prefix}nccl-",
            "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
            # Its stacks need the GIL, which a thread that hangs may hold: the dump would hang, too.
            "TORCH_INCLUDE_STACK_TRACE": "0",
        }
        if "TORCH_NCCL_TRACE_BUFFER_SIZE" in given:
            del ours["TORCH_FR_BUFFER_SIZE"]
        return {
            **{name: value for name, value in ours.items() if name not in given},
            VARIABLE: f"{self._prefix}gloo-{rank}",
        }

    def ask(self, ranks: Iterable[int]) -> bool:
        if self._prefix:
            pipes = self._files(ASK)
            for rank in ranks:
                self._awaited += [pipe.removesuffix(ASK) + DUMP for pipe in pipes.get(rank, ()) if _write(pipe)]
                self._nccl_asked += [rank] if _write(f"{self._prefix}nccl-{rank}.pipe") else []
        return bool(self._awaited or self._nccl_asked)

    def ask_for_arrivals(self, ranks: Iterable[int]) -> None:
        pipes = self._files(ASK)
        for rank in ranks:
            for pipe in pipes.get(rank, ()):
                _write(pipe, WHEN)

    def take_arrivals(self, ranks: Iterable[int]) -> dict[int, bytes]:
        """Rank → what was written since it was asked, as JSON. Reads files of the node's own disk, and removes them."""
        found: dict[int, bytes] = {}
        files = self._files(ARRIVALS)
        for rank in ranks:
            raws = []
            for path in files.get(rank, ()):
                raws.append(self._load(path) or b"")
                os.unlink(path)
            if raws:
                found[rank] = max(raws, key=len)  # a child that imports torch, too, has recorded nothing
        return found

    def find_mute(self, ranks: Mapping[int, int]) -> dict[int, float]:
        """Ask workers (local rank → global rank) for a sign of life; returns since when, monotonic, which have given
        none."""
        now = self._clock.monotonic()
        mute: dict[int, float] = {}
        pipes = self._files(ASK)
        for local_rank, rank in ranks.items():
            for pipe in pipes.get(rank, ()):
                sign = pipe.removesuffix(ASK) + PONG
                since = self._pinged.pop(pipe, now)
                if os.path.exists(sign):
                    os.unlink(sign)
                    since = now
                if _write(pipe, PING):
                    self._pinged[pipe] = since
                    if since < now:
                        mute[local_rank] = min(since, mute.get(local_rank, since))
        return mute

    def have_answered(self) -> bool:
        return all(map(os.path.exists, self._awaited)) and all(map(self._is_settled, self._nccl_asked))

    def read(self, rank: int, keep_in: Path) -> FlightTail | None:
        dumps: list[RankDump] = []
        found = [raw for path in self._files(DUMP).get(rank, ()) if (raw := self._load(path))]
        # A child that imports torch, too, has recorded nothing.
        of_gloo, of_nccl = max(found, key=len, default=None), self._load(self._nccl(rank))
        for raw, name in ((of_gloo, f"flight-recorder-{rank}.json"), (of_nccl, f"flight-recorder-nccl-{rank}")):
            if not raw or not self._prefix:
                continue
            try:
                write_private(keep_in / name, raw)
            except OSError:
                pass  # a full disk: the event has the end of it
            try:
                dumps.append(read_dump(raw, rank=rank))
            except UnreadableDumpError:
                continue  # half of one: the file is there for a person
        return tail_of(dumps) if dumps else None

    def forget(self, rank: int) -> None:
        if not self._prefix:
            return
        for path in (*self._files().get(rank, ()), f"{self._prefix}nccl-{rank}", f"{self._prefix}nccl-{rank}.pipe"):
            with suppress(OSError):
                os.unlink(path)

    def _files(self, ending: str = "") -> dict[int, list[str]]:
        """Global rank → those of its processes."""
        start = f"{self._prefix}gloo-"
        found: dict[int, list[str]] = {}
        for path in glob.glob(f"{glob.escape(start)}*{ending}") if self._prefix else ():
            found.setdefault(int(path[len(start) :].partition(".")[0]), []).append(path)
        return found

    def _nccl(self, rank: int) -> str:
        return f"{self._users.get(rank) or f'{self._prefix}nccl-'}{rank}"

    def _is_settled(self, rank: int) -> bool:
        try:
            status = os.stat(self._nccl(rank))
        except OSError:
            return False
        return status.st_size > 0 and self._clock.time_ns() - status.st_mtime_ns > _SETTLED_SECONDS * 1e9

    def _load(self, path: str) -> bytes | None:
        """At a place of the user's it may be an earlier job's, or one that another user has planted."""
        try:
            with open(open_checked(path, owner=Owner.OWN), "rb") as file:
                if os.fstat(file.fileno()).st_mtime_ns < self._began_ns:
                    return None
                return file.read(MOST_BYTES + 1)
        except (OSError, UnsafePathError):
            return None


def _write(pipe: str, text: bytes = b"1") -> bool:
    try:
        fd = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False  # no pipe, or no reader
    with suppress(OSError):  # full: it was asked before
        os.write(fd, text)
    os.close(fd)
    return True


def open_call(tail: FlightTail) -> str:
    for track in tail.tracks:
        for sequence, call, is_done in zip(track.sequences, track.calls, track.done, strict=False):
            if not is_done:
                found = tail.calls[call]
                return f"{found.name} #{sequence} of group {found.description or found.group}"
    return ""
