"""What is known of a chaotic run when it is over: gathered from outside, by this machine's CLOCK_BOOTTIME."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpc_elastic.base.clock import SystemClock
from hpc_elastic.rendezvous.state import RoundRecord, decode_record
from hpc_elastic.store.file_store import FileStore, FoldedStore
from tests.rigs.chaos.schedule import Action, Schedule


def now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(slots=True, kw_only=True)
class Injection:
    action: Action
    nodes: tuple[int, ...]
    """Whom it hit."""
    began: float
    ended: float

    def __str__(self) -> str:
        return f"{self.action} on {','.join(map(str, self.nodes))} ({self.began:.2f}-{self.ended:.2f})"


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenRecord:
    """A record of the log, and when it was first seen."""

    at: float
    record: RoundRecord


@dataclass(slots=True, kw_only=True)
class Work:
    node: int
    agent: str
    pid: int
    round: int
    rank: int
    world: int
    began: float
    last: float
    """Its last sign of life."""
    units: int = 0
    finished: bool = False


@dataclass(slots=True, kw_only=True)
class Evidence:
    schedule: Schedule
    injections: list[Injection] = field(default_factory=list)
    records: list[SeenRecord] = field(default_factory=list)
    works: list[Work] = field(default_factory=list)
    stalls: list[tuple[float, float]] = field(default_factory=list)
    """From when to when the driver itself did not get to run: the machine stood still, and the run with it."""
    recoveries: list[float] = field(default_factory=list)
    """Seconds from the end of each burst until all nodes worked in one round again."""
    finish_said: float = float("inf")
    ended: bool = False
    """Whether the run came to its end by itself: only then has everybody written all down."""
    events: dict[str, list[dict[str, object]]] = field(default_factory=dict)
    """By file, of agents and the supervisor."""
    outputs: dict[tuple[int, int], bytes] = field(default_factory=dict)
    """(round, rank) → what was kept of the worker's stdout."""


def read_journals(folder: Path) -> list[Work]:
    """All workers' journals; a last line that was cut off is left out."""
    found: list[Work] = []
    for path in sorted(folder.iterdir()):
        found += _read_journal(path)
    return found


def _read_journal(path: Path) -> list[Work]:
    found: list[Work] = []
    for raw in path.read_bytes().splitlines():
        try:
            line = json.loads(raw)
        except ValueError:
            continue
        at = float(line["t"])
        if line["event"] == "start":
            facts = {key: line[key] for key in ("node", "agent", "pid", "round", "rank", "world")}
            found.append(Work(**facts, began=at, last=at))
            continue
        found[-1].last = at
        if line["event"] == "unit":
            found[-1].units += 1
        elif line["event"] == "end":
            found[-1].finished = True
    return found


class Recorder:
    """Follows the log from outside, in a thread of its own: compaction removes old records."""

    def __init__(self, store: Path) -> None:
        self.records: list[SeenRecord] = []
        self.errors: list[str] = []
        self._path = store
        self._members: dict[int, object] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()

    @property
    def newest(self) -> RoundRecord | None:
        return self.records[-1].record if self.records else None

    def stop(self) -> None:
        """After a last look."""
        self._stop.set()
        self._thread.join(20)

    def _run(self) -> None:
        while not self._path.is_dir() and not self._stop.wait(0.02):
            pass
        store: FileStore | None = None
        while True:
            last = self._stop.is_set()
            try:
                if last:  # the run has folded it
                    store = FoldedStore(self._path, clock=SystemClock(), largest=1 << 20)
                store = store or FileStore(self._path, clock=SystemClock())
                self._look(store)
            except OSError as error:
                self.errors.append(str(error))
            if last:
                return
            self._stop.wait(0.03)

    def _look(self, store: FileStore) -> None:
        known = self.records[-1].record.number if self.records else 0
        at = now()
        for number in sorted(int(name) for name in store.list("log") if name.isdecimal()):
            if number <= known:
                continue
            raw = store.get(f"log/{number:016d}")
            if raw is None:
                return  # not whole yet
            value = json.loads(raw)
            if isinstance(value["members"], int):  # those of an earlier record
                value["members"] = self._members[value["members"]]
            self._members[number] = value["members"]
            self.records.append(SeenRecord(at=at, record=decode_record(number, value, run_id="chaos")))


def told_records(records: Sequence[SeenRecord]) -> str:
    """The log's tail, for a person."""
    lines = []
    for seen in records:
        r = seen.record
        members = ",".join(uid_host(m.uid) for m in r.members)
        lines.append(
            f"  {seen.at:.2f} #{r.number} term {r.term} by {uid_host(r.leader)}: round {r.round} {r.status.value} "
            f"[{members}] lost {list(r.lost)} suspects {[uid_host(u) for u in r.suspects]} {r.reason}"
        )
    return "\n".join(lines)


def uid_host(uid: str) -> str:
    """``00003-n3-18a0…-9f3c`` → ``n3``."""
    parts = uid.split("-")
    return parts[1] if len(parts) > 1 else uid


def host_node(uid: str) -> int:
    """The node of the rig that a participant ran on: a handler's own node index is another one after a restart."""
    host = uid_host(uid)
    return int(host[1:]) if host[:1] == "n" and host[1:].isdigit() else -1
