"""Finds that a run hangs: one agent's part in that, over heartbeats, the kernel's counts, and NCCL's RAS.

A node whose workers make no progress has them dump torch's flight recorder, once, and writes what it knows to the run
directory. The node of group rank 0, where it stalls too or has no worker left, reads what the others wrote: where all
nodes stall for longer than ever before, the run hangs. Ranks that wait for a GPU use their CPU: there it asks NCCL.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping, Sequence
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from hpc_elastic.agent.flight_recorders import DUMP_SECONDS, open_call
from hpc_elastic.agent.health import GpuFacts
from hpc_elastic.agent.health_checks import HealthChecks
from hpc_elastic.agent.heartbeat_watch import PAUSED_SECONDS, Hang
from hpc_elastic.agent.nccl_watch import (
    ADDRESS_VARIABLE,
    ENABLE_VARIABLE,
    NcclWatch,
    StallFound,
    choose_address,
    limit_without_progress,
)
from hpc_elastic.agent.part import Condemned, Part, save_if_possible
from hpc_elastic.agent.supervision import Phase
from hpc_elastic.base import codec
from hpc_elastic.base.host_facts import kernel_fields
from hpc_elastic.base.text import duration, plural
from hpc_elastic.failures.peers import moved_bytes, socket_inodes
from hpc_elastic.failures.ranking import FailureClass, Suspect
from hpc_elastic.failures.stacks import look_at_process
from hpc_elastic.rendezvous.state import Member, RoundRecord
from hpc_elastic.run.agent_events import HangFound, HangSuspected
from hpc_elastic.run.progress import Activity, FlightTail, NodeStall, OnHang, Source, StalledRank, Suspicion
from hpc_elastic.workers import tree

if TYPE_CHECKING:
    from hpc_elastic.agent.local_workers import LocalWorkers
    from hpc_elastic.agent.node_agent import NodeAgent
    from hpc_elastic.agent.part import AgentSite

logger = logging.getLogger(__name__)

LOOK_SECONDS = 60.0
FIRST_LOOK_SECONDS = 5.0
LOOKS_PER_LIMIT = 4
TAKE_SECONDS = 1.0
WORK_MEMORY_USE = 5
"""Percent of the time in which a GPU's memory was used: more is work. A kernel that waits for another rank shows the
GPU busy, at 0 or 1 % of its memory's time."""
_TICKS = os.sysconf("SC_CLK_TCK")
_THREADS = 64
IDLE_CPU, IDLE_BYTES, IDLE_SWITCHES = 0.02, 16384.0, 1000.0
"""A worker is idle below this share of a core, and these numbers a second: a thread that looks at times is no work.
Each gloo group of a waiting process has one that looks 100 times a second, at 0.2 % of a core (torch 2.13); a monitor
that reads the machine's load (psutil, every 15 s) reads 1 to 2 KiB a second."""
_CPU_ROUNDING = 0.03
"""Seconds of CPU time by which a look may be wrong: the kernel counts in ticks of 0.01 s."""


class Counts(Struct, frozen=True, kw_only=True):
    cpu: float = 0.0
    bytes: int = 0
    """Read and written, in files and through TCP."""
    switches: int = 0
    beats: int = 0
    """Heartbeats or optimizer steps, which no kernel counts."""


class Stall(Struct, frozen=True, kw_only=True):
    """Times are the agent's monotonic clock."""

    at: float
    counts: Mapping[int, Counts]
    since: Mapping[int, float] = {}
    ended_at: float | None = None
    longest: float = 0.0

    @property
    def began(self) -> float | None:
        if not self.counts:
            return self.ended_at
        return max(self.since.values()) if len(self.since) == len(self.counts) else None


def next_stall(
    before: Stall, counts: Mapping[int, Counts], *, mute: Mapping[int, float], running: int, now: float
) -> Stall:
    """`mute`: since when a worker has not answered. `running` counts those in containers that have not come up, too."""
    seconds, since = now - before.at, {}
    for rank, count in counts.items():
        known = before.counts.get(rank)
        if known is None or count.beats != known.beats:
            continue
        if _is_idle(known, count, seconds):
            since[rank] = before.since.get(rank, before.at)
        elif rank in mute:
            since[rank] = max(mute[rank], before.since.get(rank, mute[rank]))
    ended_at = before.ended_at if before.ended_at is not None or running else before.at
    after = Stall(at=now, counts=counts, since=since, ended_at=ended_at, longest=before.longest)
    if running != len(counts):
        return replace(after, since={})
    if before.began is not None and after.began is None:
        return replace(after, longest=max(before.longest, before.at - before.began))
    return after


def _is_idle(before: Counts, now: Counts, seconds: float) -> bool:
    return (
        abs(now.cpu - before.cpu) < IDLE_CPU * seconds + _CPU_ROUNDING
        and abs(now.bytes - before.bytes) < IDLE_BYTES * seconds
        and abs(now.switches - before.switches) < IDLE_SWITCHES * seconds
    )


def judge_run(
    stalls: Mapping[int, NodeStall | None], *, round_index: int, least: float, hosts: Mapping[int, str]
) -> Hang | None:
    """None where a node makes progress, or wrote nothing readable, and where all workers of all nodes have ended."""
    here = [stall for stall in stalls.values() if stall is not None and stall.round == round_index]
    ranks = sorted((rank for stall in here for rank in stall.ranks), key=lambda rank: rank.rank)
    if len(here) < len(stalls) or not ranks:
        return None
    # A pause of the run is one of each node's: a node that only waited for another one has had longer ones.
    seconds = min(stall.seconds for stall in here)
    if seconds < limit_without_progress(min(stall.longest for stall in here), least):
        return None
    reason = f"no rank of {len(ranks)} has made progress for {duration(seconds)}"
    if ended := len(hosts) - len(ranks):
        reason += f" ({plural(ended, 'other')} ended with 0)"
    if uses := [use for stall in here for use in stall.gpus]:
        reason += f", their GPUs are at {min(uses)}{f' to {max(uses)}' if max(uses) > min(uses) else ''} %"
    suspects = find_odd_ranks(ranks, hosts, have_others_ended=ended > 0)
    if suspects:
        first, more = suspects[0], len(suspects) - 1
        where = f" on {first.host}" if first.host else ""
        reason += f"; rank {first.rank}{where}: {first.why}" + (f"; {plural(more, 'other rank')} too" if more else "")
    return Hang(source=Source.KERNEL, reason=reason, ranks=tuple(suspect.rank for suspect in suspects), seconds=seconds)


def find_odd_ranks(
    ranks: Sequence[StalledRank], hosts: Mapping[int, str], *, have_others_ended: bool = False
) -> tuple[Suspect, ...]:
    """Without a majority of ranks that look alike, none is named, unless the others have ended."""
    from hpc_elastic.failures.collectives import compare_ranks  # not at an agent's start: `rounds.load`

    compared = compare_ranks(
        [Activity(rank=rank.rank, flight=rank.flight) for rank in ranks if rank.flight is not None], hosts=hosts
    )
    if compared.suspects:
        return compared.suspects
    for odd, why, most in (
        ([rank for rank in ranks if rank.flight is None], "it does not answer: ", 0.5),
        ([rank for rank in ranks if rank.is_stuck], "it is in state ", 0.5),
        ([rank for rank in ranks if not rank.waits], "it waits for no other process: ", 0.5),
        (ranks, "it has not ended: ", 1.0 if have_others_ended else 0.0),
    ):
        if odd and len(odd) <= most * len(ranks):
            return tuple(
                Suspect(rank=rank.rank, host=hosts.get(rank.rank, ""), why=f"{why}{rank.at or 'it is gone'}")
                for rank in odd
            )
    return ()


class _Step(Enum):
    LOOK = "look"
    ASKED = "asked"
    JUDGING = "judging"


class HangDetector(Part):
    @classmethod
    def for_agent(cls, site: AgentSite) -> HangDetector:
        chosen = choose_address(site.environ)
        given = "" if site.environ.get(ENABLE_VARIABLE) == "0" else site.environ.get(ADDRESS_VARIABLE, "")
        spec = site.me.spec
        return cls(
            site,
            nccl=NcclWatch(chosen or given, run_uid=spec.uid, least=spec.hangs.least, clock=site.clock),
            gpus=HealthChecks.for_agent(site),
            environment={ADDRESS_VARIABLE: chosen} if chosen else {},
        )

    def __init__(
        self, site: AgentSite, *, nccl: NcclWatch, gpus: HealthChecks | None, environment: Mapping[str, str]
    ) -> None:
        settings = self._settings = site.me.spec.hangs
        self._watch, self._clock, self._files = site.watch, site.clock, site.files
        self._folder, self._write_event = site.me.paths.suspicions, site.events.write
        self._nccl, self._checks, self._gpus = nccl, gpus, GpuFacts(is_there=False)
        self._environment, self._node, self._names = environment, site.me.node, site.me.attempt.nodes
        self._every = min(LOOK_SECONDS, settings.least / LOOKS_PER_LIMIT)
        self._stall = Stall(at=0.0, counts={})
        self._step = _Step.LOOK
        self._round = -1
        self._reported: Source | None = None
        self._found: Hang | None = None
        self._asked: set[int] = set()
        self._flights: dict[int, FlightTail] = {}
        self._has_written = False
        self._even: StallFound | None = None
        """NCCL may show an idle run: the workers' dumps are waited for."""
        self._idle_since: float | None = None
        self._next: float | None = None

    @property
    def pids(self) -> Collection[int]:
        return self._checks.pids if self._checks is not None else ()

    def close(self) -> None:
        if self._checks is not None:
            self._checks.close()

    @property
    def due(self) -> float | None:
        dues = (self._watch.due, self._next, self._nccl.due)
        return min((due for due in dues if due is not None), default=None)

    def on_start(self, workers: LocalWorkers) -> None:
        self._forget()
        self._round, now = workers.round, self._clock.monotonic()
        # The kernel counts from a process' start on.
        counts = dict.fromkeys(range(workers.layout.local_world_size), Counts())
        self._stall = Stall(at=now, counts=counts, longest=self._stall.longest)
        self._next = now + min(self._every, FIRST_LOOK_SECONDS)
        self._nccl.begin()

    def before_stop(self) -> None:
        self._forget()
        self._nccl.end()
        self._next = self._idle_since = None

    def environment(self, given: Mapping[str, str]) -> Mapping[str, str]:
        return self._environment

    def look(self, agent: NodeAgent) -> Condemned | None:
        workers = agent.workers
        if workers is None or agent.phase not in (Phase.RUNNING, Phase.DONE):
            return None
        found = self.judge(workers, agent.record)
        return None if found is None else self._report(found, workers)

    def _report(self, found: Hang, workers: LocalWorkers) -> Condemned | None:
        if found.source is Source.HEARTBEAT:
            logger.error("%s", found.reason)
            self._write_event(HangFound(round=workers.round, limit=found.seconds, reason=found.reason))
        else:
            acts = self._settings.action is OnHang.ACT and not found.may_be_rest
            way_out = "" if acts or found.may_be_rest else " (nothing is ended; --hangs act starts the workers again)"
            logger.warning("the run seems to hang: %s%s", found.reason, way_out)
            self._write_event(
                HangSuspected(round=workers.round, source=found.source.value, ranks=found.ranks, reason=found.reason)
            )
            if not acts:
                return None
            self._watch.declare(found, workers.running)
        return Condemned(reason=found.reason, failure_class=FailureClass.HANG, ranks=self._watch.hung)

    def judge(self, workers: LocalWorkers, record: RoundRecord | None = None) -> Hang | None:
        """Find a hang, once; without a `record` by heartbeats alone."""
        if (found := self._watch.look(workers.running)) is not None:
            return found
        now = self._clock.monotonic()
        if self._next is None or record is None or record.round != self._round:
            return None
        if workers.layout.group_rank != 0:
            self._nccl.end()  # one node asks for all
        found = self._look_at_nccl(workers, record.members) if self._nccl.due is not None else None
        if found is not None or now < self._next:
            return found
        if self._step is _Step.JUDGING:
            return self._take(now)
        if self._step is _Step.LOOK and not self._is_stalled(workers, now):
            return None
        if self._step is _Step.LOOK and self._ask_for_dumps(workers):
            return None
        if self._step is _Step.ASKED:  # to answer is no work
            self._stall = replace(self._stall, at=now, counts=self._read_counts(workers))
        self._step, self._next = _Step.JUDGING, now + TAKE_SECONDS
        if self._even is not None:
            self._judge_even(workers, self._even)
        else:
            self._judge_stall(workers, record.members, now)
        return None

    def _take(self, now: float) -> Hang | None:
        if self._even is not None:
            self._asked.clear()  # a later pause is another one
        self._step, self._next, self._even = _Step.LOOK, now + self._every, None
        found, self._found = self._found, None
        if found is not None:
            self._reported = found.source
        return found

    def _is_stalled(self, workers: LocalWorkers, now: float) -> bool:
        assert self._next is not None
        before, was_paused = self._stall, now - self._next > PAUSED_SECONDS
        self._next = now + self._every
        counts, mute = self._read_counts(workers), workers.find_mute()
        if was_paused:
            self._stall = Stall(at=now, counts=counts, longest=before.longest)
        else:
            self._stall = next_stall(before, counts, mute=mute, running=len(workers.running), now=now)
        began = self._stall.began
        if counts:
            self._watch.note_idle(began)
        if began is None:
            if self._reported is not Source.NCCL:
                self._go_on()
            return False
        return now - began >= self._settings.least

    def _read_counts(self, workers: LocalWorkers) -> dict[int, Counts]:
        beats = {beat.local_rank: beat.changes for beat in self._watch.read()}
        found = read_counts(workers.running_pids)
        return {rank: replace(count, beats=beats.get(rank, 0)) for rank, count in found.items()}

    def _ask_for_dumps(self, workers: LocalWorkers) -> bool:
        new = set(workers.running) - self._asked
        if not new:
            return False
        self._asked |= new
        is_awaited = workers.ask_for_dumps(new)
        if self._checks is not None:
            self._gpus, is_awaited = GpuFacts(is_there=False), True
            self._checks.look_at_gpus(partial(setattr, self, "_gpus"))
        if is_awaited:
            self._step, self._next = _Step.ASKED, self._clock.monotonic() + DUMP_SECONDS
        return is_awaited

    def _look_at_nccl(self, workers: LocalWorkers, members: Sequence[Member]) -> Hang | None:
        if self._nccl.is_due:
            first, hosts = workers.layout.first_rank, self._hosts(members)
            pids = {pid: first + local_rank for local_rank, pid in workers.running_pids.items()}
            self._nccl.look(pids, hosts, beats=sum(beat.changes for beat in self._watch.read()))
        found = self._nccl.found
        if found is None:
            if self._reported is Source.NCCL:
                self._go_on()
        elif self._reported is None and self._step is _Step.LOOK and found.since != self._idle_since:
            if not found.is_even:
                self._reported = Source.NCCL
                self._files.post(partial(self._note, found.hang))
                return found.hang
            self._even = found
            if not self._ask_for_dumps(workers):
                self._step, self._next = _Step.ASKED, self._clock.monotonic()
        return None

    # -- in the files' thread ------------------------------------------------------------------------------------------

    def _judge_stall(self, workers: LocalWorkers, members: Sequence[Member], now: float) -> None:
        stall, index, pids = self._stall, self._round, workers.running_pids
        if any((device.memory_use or 0) >= WORK_MEMORY_USE for device in self._gpus.devices):
            self._stall = replace(stall, since={})  # its GPUs work, and it waits for them
            self._asked.clear()
            return
        if stall.began is None:
            return  # a worker has ended since it was asked
        seconds, first, is_judge = now - stall.began, workers.layout.first_rank, workers.layout.group_rank == 0
        own, gpus = self._path(self._node), tuple(gpu.use for gpu in self._gpus.devices if gpu.use is not None)
        paths = {member.node: self._path(member.node) for member in members}
        hosts, has_reported = self._hosts(members), self._reported is not None
        self._has_written = True

        def write_and_read() -> None:
            if not has_reported:
                self._flights |= workers.read_dumps()
            ranks = tuple(_look_at(first + local, pid, self._flights.get(first + local)) for local, pid in pids.items())
            mine = NodeStall(round=index, seconds=round(seconds, 1), longest=stall.longest, ranks=ranks, gpus=gpus)
            save_if_possible(own, mine)
            if not is_judge or has_reported:
                return
            read = {node: mine if path == own else codec.load(path, NodeStall) for node, path in paths.items()}
            stalls = {node: found if isinstance(found, NodeStall) else None for node, found in read.items()}
            self._found = judge_run(stalls, round_index=index, least=self._settings.least, hosts=hosts)
            if self._found is not None:
                self._note(self._found)

        self._files.post(write_and_read)

    def _judge_even(self, workers: LocalWorkers, even: StallFound) -> None:
        """Each worker waits in a collective in a hang of all, and none does while all are idle."""

        def read() -> None:
            flights = workers.read_dumps()
            waits = {rank: call for rank, tail in flights.items() if (call := open_call(tail))}
            if flights and not waits:
                self._idle_since = even.since
                return
            hang = even.hang
            if waits:
                rank, call = min(waits.items())
                found = replace(hang, reason=f"{hang.reason}; rank {rank} waits in {call}")
            else:
                found = replace(hang, reason=f"{hang.reason}: they all hang, or do without", may_be_rest=True)
            self._note(found)
            self._found = found

        self._files.post(read)

    def _note(self, found: Hang) -> None:
        value = Suspicion(
            round=self._round,
            source=found.source,
            reason=found.reason,
            ranks=found.ranks,
            written_ns=self._clock.time_ns(),
            seconds=round(found.seconds, 1),
            may_be_rest=found.may_be_rest,
        )
        save_if_possible(self._folder / "now.json", value)

    def _hosts(self, members: Sequence[Member]) -> dict[int, str]:
        return dict(enumerate(self._names[member.node] for member in members for _ in range(member.local_world_size)))

    def _go_on(self) -> None:
        if self._reported is not None:
            logger.info("the workers go on")
        self._forget()

    def _forget(self) -> None:
        self._step, self._found, self._even = _Step.LOOK, None, None
        self._asked, self._flights = set(), {}
        paths = [self._path(self._node)] if self._has_written else []
        paths += [self._folder / "now.json"] if self._reported is not None else []
        self._reported, self._has_written = None, False
        for path in paths:
            self._files.post(partial(path.unlink, missing_ok=True))

    def _path(self, node: int) -> Path:
        return self._folder / f"node-{node:05d}.json"


def _look_at(rank: int, pid: int, flight: FlightTail | None) -> StalledRank:
    state = look_at_process(pid)
    is_stuck = state.is_stopped or state.is_uninterruptible
    return StalledRank(
        rank=rank, at=state.whereabouts(), waits=state.waits_for_process, is_stuck=is_stuck, flight=flight
    )


def read_counts(pids: Mapping[int, int], *, proc: str = "/proc") -> dict[int, Counts]:
    below, moved = tree.below(pids.values()), moved_bytes()
    found = {}
    for rank, pid in pids.items():
        each = [_counts_of(one, moved, proc) for one in (pid, *below[pid])]
        cpu, size, switches = (sum(values) for values in zip(*each, strict=True))
        found[rank] = Counts(cpu=cpu, bytes=int(size), switches=int(switches))
    return found


def _counts_of(pid: int, moved: Mapping[int, int], proc: str) -> tuple[float, int, int]:
    folder, switches = f"{proc}/{pid}", 0
    try:
        with open(f"{folder}/stat", "rb") as file:
            words = file.read().rpartition(b")")[2].split()
        for thread in os.listdir(f"{folder}/task")[:_THREADS]:
            status = kernel_fields(f"{folder}/task/{thread}/status")
            switches += int(status["voluntary_ctxt_switches"]) + int(status["nonvoluntary_ctxt_switches"])
        moves = kernel_fields(f"{folder}/io")
        size = sum(int(moves[name]) for name in ("rchar", "wchar", "read_bytes"))
        size += sum(moved.get(inode, 0) for inode in socket_inodes(pid, proc))
        # Its own and that of children which have ended: a script may start many short programs.
        return sum(map(int, words[11:15])) / _TICKS, size, switches
    except (OSError, ValueError, LookupError):
        return 0.0, 0, 0
