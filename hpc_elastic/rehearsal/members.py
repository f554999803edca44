"""The members of a run, by its events: which worker has which rank, where."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from hpc_elastic.rehearsal.journal import Place
from hpc_elastic.run.event_reader import EventFile, EventLine, event_files
from hpc_elastic.run.paths import RunPaths


class Worker(Struct, frozen=True, kw_only=True):
    """A worker of a round."""

    rank: int
    node: int
    """The node's index in the attempt."""
    host: str
    pid: int
    """As its host numbers it."""


class RunMembers:
    """Follows a run's events."""

    def __init__(self, paths: RunPaths) -> None:
        self.paths = paths
        self._files: dict[Path, EventFile] = {}
        self._ranks: dict[tuple[Place, int], tuple[int, ...]] = {}
        self._pids: dict[tuple[Place, int], tuple[str, tuple[int, ...]]] = {}

    def read(self) -> None:
        """Read what is new in the events."""
        for attempt in self.paths.begun_attempts():
            for path in event_files(attempt.events):
                if path not in self._files:
                    self._files[path] = EventFile(path, attempt=attempt.number)
                for line in self._files[path].read() or ():
                    self._take(line)

    def _take(self, line: EventLine) -> None:
        value, node = line.value, line.writer
        if line.name == "round_final":
            self._ranks[(line.attempt, value["round"]), node] = tuple(value.get("ranks", ()))
        if line.name == "workers_started":
            self._pids[(line.attempt, value["round"]), node] = (line.host, tuple(value.get("pids", ())))

    @property
    def place(self) -> Place | None:
        """The newest round whose workers have been started."""
        return max((place for place, _ in self._pids), default=None)

    def workers(self) -> list[Worker]:
        """Of the newest round, by rank."""
        place, found = self.place, []
        for (where, node), (host, pids) in self._pids.items():
            if where == place:
                ranks = self._ranks.get((where, node), ())
                found += [
                    Worker(rank=rank, node=node, host=host, pid=pid) for rank, pid in zip(ranks, pids, strict=False)
                ]
        return sorted(found, key=lambda worker: worker.rank)
