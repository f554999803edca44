"""Whether a run seems to hang that sends no heartbeats: by what the kernel counts of its workers, and NCCL too.

Each agent looks at its workers once a minute: CPU time of all threads and children, bytes read and written, context
switches. Workers that did work before, and then none for longer than `limit_of` allows, are resting; one that works is
enough for the node not to be. A resting node asks its workers for their flight recorder dumps, which disturbs none, and
writes what it knows to the run directory. The node of group rank 0, where it rests too, reads what the others wrote:
where all nodes rest, that is a suspicion, with the culprit by the dumps. Ranks that wait for a GPU in a loop do not
rest: what NCCL says of them is asked by the same node (`nccl_watch`).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import replace

from hpc_elastic.agent.flight_recorder import ANSWER_SECONDS
from hpc_elastic.agent.health import GpuFacts
from hpc_elastic.agent.nccl_watch import NcclWatch, StallFound, open_call
from hpc_elastic.base import codec
from hpc_elastic.base.clock import Clock, SystemClock
from hpc_elastic.base.file_executor import FileExecutor
from hpc_elastic.base.files import make_private_dir
from hpc_elastic.base.text import duration, plural
from hpc_elastic.failures.collectives import compare_ranks
from hpc_elastic.failures.ranking import Suspect
from hpc_elastic.failures.stacks import look_at_process
from hpc_elastic.rendezvous.state import Member, RoundRecord
from hpc_elastic.run.activities import Activity
from hpc_elastic.run.suspicions import HangSettings, NodeRest, RestingRank, Source, Suspicion
from hpc_elastic.workers import tree

if TYPE_CHECKING:
    from hpc_elastic.agent.local_workers import LocalWorkers

logger = logging.getLogger(__name__)

LOOK_SECONDS = 60.0
LOOKS_PER_LIMIT = 4
"""Where the user gave a short limit, looks are as far apart as this share of it."""
READ_SECONDS = 1.0
MOST_READS = 5
"""In one look; the next look goes on."""
LONGEST_FACTOR = 3.0
"""Of the run's own longest rest so far, which was none."""
REST_CPU, REST_BYTES, REST_SWITCHES = 0.02, 1024.0, 1000.0
"""Below this share of a core, and these numbers a second, a worker rests: a thread that looks at times is no work.
Each gloo group of a waiting process has one that looks 100 times a second, at 0.2 % of a core (torch 2.13)."""
_CPU_ROUNDING = 0.03
"""Seconds of CPU time by which a look may be wrong: the kernel counts in ticks of 0.01 s."""
WORK_MEMORY_USE = 5
"""Percent of the time in which a GPU's memory was used: more is work. A kernel that waits for another rank shows the
GPU busy, at 0 or 1 % of its memory's time."""
WORK_CPU = 0.1
"""What a worker must have used once, as a share of a core, to have worked before."""


class Counts(Struct, frozen=True, kw_only=True):
    """What the kernel has counted of one worker and all that it started."""

    cpu: float = 0.0
    """Seconds, of all threads."""
    bytes: int = 0
    """Read and written."""
    switches: int = 0
    """Context switches."""


class Rest(Struct, frozen=True, kw_only=True):
    """How long a node's workers have stood still."""

    at: float
    """When the last counts were taken, monotonic."""
    counts: Mapping[int, Counts]
    """By local rank."""
    since: float | None = None
    """From when on all of them rest; None: one works."""
    longest: float = 0.0
    """The longest rest that has ended, seconds."""
    has_worked: bool = False


def next_rest(before: Rest | None, counts: Mapping[int, Counts], now: float) -> Rest:
    """Take another look in.

    Args:
        before: After the look before; None: this is the first.
        counts: Of the workers that run, by local rank.
        now: Monotonic.
    """
    if before is None or now <= before.at:
        return Rest(at=now, counts=counts)
    seconds = now - before.at
    has_worked = before.has_worked or any(
        count.cpu - before.counts[rank].cpu >= WORK_CPU * seconds
        for rank, count in counts.items()
        if rank in before.counts
    )
    rests = counts.keys() == before.counts.keys() and all(
        _rests(before.counts[rank], count, seconds) for rank, count in counts.items()
    )
    if rests and has_worked:
        since = before.at if before.since is None else before.since
        return Rest(at=now, counts=counts, since=since, longest=before.longest, has_worked=True)
    ended = 0.0 if before.since is None else before.at - before.since
    return Rest(at=now, counts=counts, longest=max(before.longest, ended), has_worked=has_worked)


def _rests(before: Counts, now: Counts, seconds: float) -> bool:
    return (
        abs(now.cpu - before.cpu) < REST_CPU * seconds + _CPU_ROUNDING
        and abs(now.bytes - before.bytes) < REST_BYTES * seconds
        and abs(now.switches - before.switches) < REST_SWITCHES * seconds
    )


def limit_of(rest: Rest, least: float) -> float:
    """Seconds of rest that are suspicious: more than `least`, and than the run's own pauses."""
    return max(least, LONGEST_FACTOR * rest.longest)


def judge_nodes(
    rests: Mapping[int, NodeRest | None], *, round_index: int, hosts: Mapping[int, str], now_ns: int
) -> Suspicion | None:
    """Whether the run seems to hang.

    Args:
        rests: Node → what it wrote; None: nothing that can be read.
        round_index: The round that runs.
        hosts: Of every rank of the round.
        now_ns: For `Suspicion.written_ns`.

    Returns:
        None where a node works, or may.
    """
    here = [rest for rest in rests.values() if rest is not None and rest.round == round_index]
    if len(here) < len(rests):
        return None
    ranks = sorted((rank for rest in here for rank in rest.ranks), key=lambda rank: rank.rank)
    compared = compare_ranks(
        [Activity(rank=rank.rank, flight=rank.flight) for rank in ranks if rank.flight is not None], hosts=hosts
    )
    told = f"no rank of {len(ranks)} has done anything for {duration(min(rest.seconds for rest in here))}"
    if uses := [use for rest in here for use in rest.gpus]:
        told += f", their GPUs are at {min(uses)}{f' to {max(uses)}' if max(uses) > min(uses) else ''} %"
    silent = [
        Suspect(rank=rank.rank, host=hosts.get(rank.rank, ""), why=f"it does not answer: {rank.at or 'it is gone'}")
        for rank in ranks
        if rank.flight is None
    ]
    suspects = compared.suspects or (tuple(silent) if 2 * len(silent) <= len(ranks) else ())  # the odd ones out
    if suspects:
        first = suspects[0]
        where = f" on {first.host}" if first.host else ""
        told += f"; rank {first.rank}{where}: {first.why}"
        if len(suspects) > 1:
            told += f"; {plural(len(suspects) - 1, 'other rank')} too"
    return Suspicion(
        round=round_index,
        source=Source.KERNEL,
        reason=told,
        ranks=tuple(suspect.rank for suspect in suspects),
        written_ns=now_ns,
    )


def read_counts(pids: Mapping[int, int], *, proc: str = "/proc") -> dict[int, Counts]:
    """What the kernel has counted of workers and their descendants, by local rank; one look at the process table.

    Args:
        pids: Local rank → the worker's pid.
        proc: Where the kernel's files are.
    """
    processes = tree.all_processes()
    return {
        rank: _sum(
            _counts_of(f"{proc}/{each}") for each in (pid, *(below.pid for below in tree.subtree(processes, (pid,))))
        )
        for rank, pid in pids.items()
    }


_TICKS = os.sysconf("SC_CLK_TCK")
_THREADS = 64


def _counts_of(folder: str) -> Counts:
    """Of one process; nothing where it is gone."""
    switches = 0
    try:
        with open(f"{folder}/stat", "rb") as file:
            words = file.read().rpartition(b")")[2].split()
        for thread in os.listdir(f"{folder}/task")[:_THREADS]:
            switches += _numbers(
                f"{folder}/task/{thread}/status", ("voluntary_ctxt_switches", "nonvoluntary_ctxt_switches")
            )
        moved = _numbers(f"{folder}/io", ("rchar", "wchar", "read_bytes"))
        return Counts(cpu=(int(words[11]) + int(words[12])) / _TICKS, bytes=moved, switches=switches)
    except (OSError, ValueError, IndexError):
        return Counts()


def _numbers(path: str, names: Sequence[str]) -> int:
    with open(path, encoding="ascii", errors="replace") as file:
        lines = (line.partition(":") for line in file)
        return sum(int(value) for name, _, value in lines if name in names)


def _sum(counts: Iterable[Counts]) -> Counts:
    found = list(counts)
    return Counts(
        cpu=sum(one.cpu for one in found),
        bytes=sum(one.bytes for one in found),
        switches=sum(one.switches for one in found),
    )


class _Step(Enum):
    LOOK = "look"
    ASKED = "asked"
    """The workers were asked for their dumps."""
    READING = "reading"
    """The other nodes' files are being read."""


class SuspicionWatch:
    """One agent's. All methods are for its main thread, and none waits: files are read and written elsewhere."""

    def __init__(
        self,
        folder: Path | None,
        settings: HangSettings,
        *,
        node: int,
        names: Sequence[str],
        clock: Clock,
        files: FileExecutor,
        nccl: NcclWatch | None = None,
        look_at_gpus: Callable[[Callable[[GpuFacts], None]], None] | None = None,
    ) -> None:
        """
        Args:
            folder: Of the attempt, for `NodeRest` and `Suspicion`; None: nothing is watched.
            settings: What the user gave.
            node: This node's index.
            names: The attempt's nodes', by index.
            clock: Its monotonic clock is used, and its time of day shown.
            files: Reads and writes the folder.
            nccl: Asks NCCL's RAS; None: nobody does.
            look_at_gpus: Has NVML asked, and calls what it is given with the answer, in another thread.
        """
        self._nccl = nccl or NcclWatch("", run_uid="", least=settings.least, clock=clock)
        self._look_at_gpus = look_at_gpus
        self._gpus = GpuFacts(is_there=False)
        self._folder = folder
        self._settings = settings
        self._node = node
        self._names = names
        self._clock = clock
        self._files = files
        self._every = min(LOOK_SECONDS, settings.least / LOOKS_PER_LIMIT)
        self._rest: Rest | None = None
        self._step = _Step.LOOK
        self._round = -1
        self._told: Source | None = None
        """What the suspicion comes from that stands."""
        self._has_written = False
        self._reads = 0
        self._found: Suspicion | None = None
        self._even: StallFound | None = None
        """What NCCL shows, which may be a rest: the workers' dumps are waited for."""
        self._rests_since: float | None = None
        """Since when it has been a rest, by the dumps."""
        self._next: float | None = None

    @property
    def due(self) -> float | None:
        """When `look` is to be called next, monotonic; None: nothing is watched."""
        return min((due for due in (self._next, self._nccl.due) if due is not None), default=None)

    def begin(self, round_index: int) -> None:
        """A round's workers have been started."""
        self._forget()
        self._round = round_index
        self._rest = None
        if self._folder is not None:
            self._next = self._clock.monotonic() + self._every
            self._nccl.begin()

    def end(self) -> None:
        """They are being ended."""
        self._forget()
        self._nccl.end()
        self._next = self._rests_since = None

    def look(self, workers: LocalWorkers, record: RoundRecord | None) -> Suspicion | None:
        """Look at the workers if it is time to.

        Args:
            workers: The round's.
            record: The newest one.

        Returns:
            A suspicion, once, on the node of group rank 0.
        """
        now = self._clock.monotonic()
        if self._next is None or record is None or record.round != self._round:
            return None
        if workers.layout.group_rank != 0:
            self._nccl.end()  # one node asks for all
        found = self._look_at_nccl(workers, record.members) if self._nccl.due is not None else None
        if found is not None or now < self._next:
            return found
        if self._step is _Step.ASKED:
            if self._rest is not None:  # to answer is no work
                self._rest = replace(self._rest, at=now, counts=read_counts(workers.running_pids))
            self._write(workers)
            self._step = _Step.READING if workers.layout.group_rank == 0 or self._even is not None else _Step.LOOK
            self._next = now + (READ_SECONDS if self._step is _Step.READING else self._every)
            return None
        if self._step is _Step.READING:
            return self._take(record.members)
        rest = self._rest = next_rest(self._rest, read_counts(workers.running_pids), now)
        self._next = now + self._every
        if rest.since is None:
            if self._told is Source.KERNEL:
                logger.info("the workers go on")
            if self._told is not Source.NCCL:
                self._forget()
        elif now - rest.since >= limit_of(rest, self._settings.least) and self._told is None:
            self._ask_for_dumps(workers)
            if self._look_at_gpus is not None:
                self._gpus = GpuFacts(is_there=False)
                self._look_at_gpus(self._take_gpus)
        return None

    def _ask_for_dumps(self, workers: LocalWorkers) -> None:
        workers.ask_for_dumps()
        self._step, self._next = _Step.ASKED, self._clock.monotonic() + ANSWER_SECONDS

    def _take_gpus(self, facts: GpuFacts) -> None:
        self._gpus = facts

    def _look_at_nccl(self, workers: LocalWorkers, members: Sequence[Member]) -> Suspicion | None:
        """What NCCL's RAS shows, which is a suspicion where ranks differ; where they don't, after a look at dumps."""
        first, hosts = workers.layout.first_rank, self._hosts(members)
        pids = {pid: first + local_rank for local_rank, pid in workers.running_pids.items()}
        self._nccl.look(pids, hosts, beats=workers.heartbeats)
        found = self._nccl.found
        if found is None:
            if self._told is Source.NCCL:
                logger.info("the workers go on")
                self._forget()
        elif self._told is None and self._step is _Step.LOOK and found.since != self._rests_since:
            if not found.is_even:
                return self._tell_nccl(found)
            self._even = found
            self._ask_for_dumps(workers)
        return None

    def _tell_nccl(self, found: StallFound, **more: Any) -> Suspicion:
        self._told = Source.NCCL
        suspicion = Suspicion(
            round=self._round,
            source=Source.NCCL,
            reason=found.reason,
            ranks=found.ranks,
            written_ns=self._clock.time_ns(),
        )
        suspicion = replace(suspicion, **more)
        assert self._folder is not None
        path = self._folder / "now.json"

        def write() -> None:
            make_private_dir(path.parent)
            codec.save(path, suspicion)

        self._files.post(write)
        return suspicion

    def _write(self, workers: LocalWorkers) -> None:
        if self._even is not None:
            self._judge_even(workers, self._even)
            return
        assert self._rest is not None
        assert self._rest.since is not None
        seconds = self._clock.monotonic() - self._rest.since
        index, path = self._round, self._path(self._node)
        pids = workers.running_pids
        self._has_written = True

        def write() -> None:
            flights = workers.read_dumps()
            first, gpus = workers.layout.first_rank, self._gpus.devices
            if any((device.memory_use or 0) >= WORK_MEMORY_USE for device in gpus):
                return  # its GPUs work, and it waits for them
            ranks = tuple(
                RestingRank(
                    rank=first + local, at=look_at_process(pid).whereabouts(), flight=flights.get(first + local)
                )
                for local, pid in pids.items()
            )
            try:
                make_private_dir(path.parent)
                uses = tuple(device.use for device in gpus if device.use is not None)
                codec.save(path, NodeRest(round=index, seconds=round(seconds, 1), ranks=ranks, gpus=uses))
            except OSError as error:
                logger.debug("the suspicion could not be written: %s", error)

        self._files.post(write)

    def _judge_even(self, workers: LocalWorkers, even: StallFound) -> None:
        """Have the dumps of the workers here read: in a hang of all each waits in a collective, in a rest none does."""

        def read() -> None:
            flights = workers.read_dumps()
            waits = {rank: call for rank, tail in flights.items() if (call := open_call(tail))}
            if flights and not waits:
                self._rests_since = even.since
            elif waits:
                rank, call = min(waits.items())
                self._found = self._tell_nccl(replace(even, reason=f"{even.reason}; rank {rank} waits in {call}"))
            else:
                reason = f"{even.reason}: they all hang, or do without"
                self._found = self._tell_nccl(replace(even, reason=reason), may_be_rest=True)

        self._files.post(read)

    def _hosts(self, members: Sequence[Member]) -> dict[int, str]:
        """Rank → its node's name."""
        return dict(enumerate(self._names[member.node] for member in members for _ in range(member.local_world_size)))

    def _take(self, members: Sequence[Member]) -> Suspicion | None:
        """Read what all nodes wrote; the answer comes with the next look that finds it."""
        now = self._clock.monotonic()
        found, self._found = self._found, None
        if found is not None or (self._even is not None and self._rests_since == self._even.since):
            self._step, self._next, self._even = _Step.LOOK, now + self._every, None
            self._told = None if found is None else found.source
            return found
        self._step, self._next = _Step.READING, now + READ_SECONDS
        self._reads += 1
        if self._reads > MOST_READS:
            self._reads, self._step, self._next, self._even = 0, _Step.LOOK, now + self._every, None
        if self._even is not None or self._step is _Step.LOOK:
            return None
        assert self._folder is not None
        paths = {member.node: self._path(member.node) for member in members}
        hosts = self._hosts(members)
        index, now_ns, now_path = self._round, self._clock.time_ns(), self._folder / "now.json"

        def read() -> None:
            rests = {node: _load(path) for node, path in paths.items()}
            found = judge_nodes(rests, round_index=index, hosts=hosts, now_ns=now_ns)
            if found is not None:
                try:
                    codec.save(now_path, found)
                except OSError as error:
                    logger.debug("the suspicion could not be written: %s", error)
                self._found = found

        self._files.post(read)
        return None

    def _forget(self) -> None:
        """The workers go on, or are gone."""
        self._step, self._found, self._reads, self._even = _Step.LOOK, None, 0, None
        paths = [self._path(self._node)] if self._has_written else []
        paths += [self._folder / "now.json"] if self._told is not None and self._folder is not None else []
        self._told, self._has_written = None, False
        for path in paths:
            self._files.post(partial(path.unlink, missing_ok=True))

    def _path(self, node: int) -> Path:
        assert self._folder is not None
        return self._folder / f"node-{node:05d}.json"


def _load(path: Path) -> NodeRest | None:
    found = codec.load(path, NodeRest)
    return found if isinstance(found, NodeRest) else None


def no_suspicions() -> SuspicionWatch:
    """A watch that watches nothing."""
    files = FileExecutor(name="suspicions")
    return SuspicionWatch(None, HangSettings(), node=0, names=(), clock=SystemClock(), files=files)
