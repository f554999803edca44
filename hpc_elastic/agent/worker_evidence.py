"""The evidence of one node's failed workers: looked at before the group is ended, described afterwards.

`SocketWatch` notes the workers' TCP sockets while they live, so that an address in a peer's message becomes a rank.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct, field
from msgspec.structs import replace

from hpc_elastic.agent import hang_stop
from hpc_elastic.agent.flight_recorders import FlightRecorders
from hpc_elastic.agent.hang_stop import HungWorker, StacksThenStop, WorkerSlot
from hpc_elastic.agent.part import GroupSite
from hpc_elastic.base.clock import Clock, uptime_ns
from hpc_elastic.base.loop import FilesystemHangsError
from hpc_elastic.base.text import ranges
from hpc_elastic.failures.evidence import describe_exit, describe_failure, find_logged, write_evidence
from hpc_elastic.failures.peers import Address, network_id, read_sockets
from hpc_elastic.failures.ranking import Category, FailureClass
from hpc_elastic.failures.stacks import stacks_of
from hpc_elastic.failures.worker_failure import WorkerFailure, make_excerpt
from hpc_elastic.run.agent_events import OwnEnd
from hpc_elastic.run.log_pieces import holds_at_end
from hpc_elastic.run.progress import RankSockets
from hpc_elastic.workers.linux import node_oom_kill_count, oom_kill_count
from hpc_elastic.workers.spawn import ExitStatus, exit_status_now

if TYPE_CHECKING:
    from hpc_elastic.agent.part import Condemned
    from hpc_elastic.failures.stacks import RankStacks
    from hpc_elastic.run.progress import Activity

logger = logging.getLogger(__name__)


FIRST_SECONDS = 3.0
_OFTEN_SECONDS = 60.0
"""Each look is 1.4 times as far from the start as the one before until then; twice as far later."""
_MOST_SECONDS = 600.0
_MOST_PORTS = 1024
"""Most ports of one rank in the event: a full mesh of more ranks is not worth its size."""


def next_look(age: float) -> float:
    return min(age * (1.4 if age < _OFTEN_SECONDS else 2.0), age + _MOST_SECONDS)


class SocketWatch:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began = clock.monotonic()
        self.due = self._began + FIRST_SECONDS
        self._known: dict[int, frozenset[Address]] = {}
        self.network = ""

    def look(self, running: Mapping[int, int]) -> None:
        found = read_sockets(running.values())
        self._known |= {rank: found[pid] for rank, pid in running.items() if pid in found}
        if running and not self.network:
            self.network = network_id(next(iter(running.values())))
        now = self._clock.monotonic()
        self.due = self._began + next_look(max(FIRST_SECONDS, now - self._began))

    def forget(self, rank: int) -> None:
        self._known.pop(rank, None)

    @property
    def ranks(self) -> tuple[RankSockets, ...]:
        return tuple(_of_rank(rank, addresses) for rank, addresses in sorted(self._known.items()))


def _of_rank(rank: int, addresses: frozenset[Address]) -> RankSockets:
    ports: dict[str, list[int]] = {}
    for ip, port in sorted(addresses)[:_MOST_PORTS]:
        ports.setdefault(ip, []).append(port)
    return RankSockets(rank=rank, ends=tuple((ip, ranges(found)) for ip, found in ports.items()))


EVIDENCE_SECONDS = 10.0
HURRIED_SECONDS = 2.0
DRAIN_SECONDS = 0.5
"""How long the last output of an ended worker is waited for; a descendant may hold its pipes open."""
_MOST_SHOWN = 12
PEERS_NS = 500_000_000
"""A message that names a lost peer this long after the stop is known means no rank that another node's agent ended,
since that one gives its workers a delay, too (`hang_stop.DELAY_SECONDS`).
"""
_TRACEBACK = b"Traceback (most recent call last)"
_TRACEBACK_WITHIN = 16 << 10
_OURS = {-int(signal.SIGTERM), -int(signal.SIGKILL), 128 + int(signal.SIGTERM), 0}
_ABORTED = {-int(signal.SIGABRT), 128 + int(signal.SIGABRT)}


class StopRecord(Struct):
    wants_stacks: bool = False
    wants_look: bool = False
    asked: StacksThenStop | None = None
    noticed_ns: int = 0
    began_ns: int = 0
    waited: float = 0.0


class WorkerEvidence(Struct, eq=False):
    """All methods wait for files within the bounds above, but not when this node is to end."""

    site: GroupSite
    stop: StopRecord
    recorders: FlightRecorders
    condemned: Condemned | None = None
    start_error: tuple[int, Exception] | None = None
    is_nodes_oom: bool = False
    oom_kills: int = field(default_factory=lambda: oom_kill_count() or 0)
    stacks: dict[int, RankStacks] = {}
    observed: dict[int, Activity] = {}
    activities: list[Activity] = []
    unwritten: list[Callable[[], object]] = []
    causes: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Fingerprint → pid and excerpt: what the job log has once it is known that the round ended for a rank here."""

    def _oom_kills_since(self) -> int:
        return ((node_oom_kill_count if self.is_nodes_oom else oom_kill_count)() or 0) - self.oom_kills

    def is_symptom(self, slot: WorkerSlot) -> bool:
        found = self.look_at(slot)
        return found is not None and found.failure_class is FailureClass.SYMPTOM

    def look_at(self, slot: WorkerSlot) -> WorkerFailure | None:
        assert slot.exit is not None
        if slot.is_looked_at:
            return slot.early
        slot.is_looked_at = True
        facts = self._facts(slot, slot.exit, self._oom_kills_since())
        if facts.exitcode > 0 or facts.exitcode in _ABORTED:
            self.site.pump.drained(slot.process.pid, hang_stop.JUDGE_SECONDS)
            try:
                slot.early = self.site.files.do(lambda: _describe(slot, facts), within=hang_stop.JUDGE_SECONDS)
            except FilesystemHangsError:
                pass  # it is ended as if its cause were known
        return slot.early

    def own_ends(self, slots: Sequence[WorkerSlot]) -> tuple[OwnEnd, ...]:
        return tuple(
            OwnEnd(
                rank=slot.global_rank,
                exitcode=slot.exit.exitcode,
                ended_ns=slot.exit.observed_ns,
                ended_uptime_ns=slot.exit.observed_uptime_ns,
                stopped=slot.stopped_by_agent,
                logged=self._logged(slot) if slot.exit.exitcode == 0 else "",
            )
            for slot in slots
            if slot.exit is not None and not (slot.stopped_by_agent and slot.exit.exitcode in self._ours - {0})
        )

    def _logged(self, slot: WorkerSlot) -> str:
        try:
            return self.site.files.do(
                lambda: find_logged(slot.paths.stderr), within=HURRIED_SECONDS, unless=self.site.is_ending
            )
        except FilesystemHangsError:
            return ""

    def describe(self, slots: Sequence[WorkerSlot]) -> list[WorkerFailure]:
        kills = self._oom_kills_since()
        hung = self._asked_for_stacks(slots, kills)
        failed, condemned, stopped = [], [], []
        for slot in slots:
            if slot.exit is None:
                continue
            found, is_named = (slot, self._facts(slot, slot.exit, kills)), slot.local_rank in self._whys
            is_ours = slot.stopped_by_agent and slot.exit.exitcode in self._ours
            # One that fell while it was stopped was failing already: its evidence is worth keeping.
            if (slot.has_failed or (slot.stopped_by_agent and not is_ours)) and not (hung and is_named):
                failed.append(found)
            if is_named and slot.stopped_by_agent and not self._is_hang:
                condemned.append(found)
            elif is_ours and slot.exit.exitcode != 0 and not (hung and self.stop.wants_stacks):
                stopped.append(found)
        unstarted = [] if self.start_error is None else [self.describe_start_failure(*self.start_error)]
        if not (failed or hung or stopped or condemned):
            for slot in slots:
                self._keep_cause(slot, None)
            return unstarted

        def gather() -> list[WorkerFailure]:
            found = [self._describe_hung(worker) for worker in hung]
            found += [self._describe(slot, facts) for slot, facts in failed]
            found += [self._describe_condemned(slot, facts) for slot, facts in condemned]
            found += [self._describe_stopped(slot, facts) for slot, facts in stopped]
            described = [failure for failure in found if failure is not None]
            for slot in slots:
                self._keep_cause(slot, None)
            if self.stop.wants_stacks or self.stop.wants_look:
                latest_ns = self.stop.noticed_ns + PEERS_NS
                self.observed |= {
                    failure.global_rank: each
                    for failure in described
                    if (each := hang_stop.observe_failure(failure, latest_ns=latest_ns))
                }
                self.activities = []
                for rank, activity in sorted(self.observed.items()):
                    tail = self.recorders.read(rank, self.site.attempt.rank(self.site.round, rank).root)
                    self.activities.append(activity if tail is None else replace(activity, flight=tail))
            return described

        hurried = self.site.is_ending()
        try:
            return unstarted + self.site.files.do(
                gather,
                within=HURRIED_SECONDS if hurried else EVIDENCE_SECONDS,
                unless=None if hurried else self.site.is_ending,
            )
        except FilesystemHangsError as error:
            logger.warning("no evidence of the workers' failures: %s: %s", self.site.attempt.root, error.strerror)
            return unstarted + [
                describe_exit(facts, f"its evidence was out of reach: {error.strerror}") for _, facts in failed
            ]

    @property
    def _whys(self) -> Mapping[int, str]:
        return self.condemned.ranks if self.condemned is not None else {}

    @property
    def _is_hang(self) -> bool:
        return self.condemned is not None and self.condemned.failure_class is FailureClass.HANG

    def _describe_condemned(self, slot: WorkerSlot, facts: WorkerFailure) -> WorkerFailure:
        assert self.condemned is not None
        self.site.pump.drained(slot.process.pid, DRAIN_SECONDS)
        failure_class, why = self.condemned.failure_class, self._whys[slot.local_rank]
        is_ours = failure_class is FailureClass.INFRASTRUCTURE
        failure = replace(
            facts,
            stopped_by_agent=False,
            stopped_ns=0,
            message=why,
            reason=f"{why}; ended by its agent",
            failure_class=failure_class,
            category=Category.INFRASTRUCTURE if is_ours else Category.WORKER,
            fingerprint=f"condemned:{failure_class.value}",
            error_file=str(slot.paths.error_file),
        )
        self._write_evidence(failure, slot.paths.error_file)
        return failure

    def _asked_for_stacks(self, slots: Sequence[WorkerSlot], kills: int) -> list[HungWorker]:
        asked, killed = self.stop.asked, exit_status_now(-int(signal.SIGKILL), self.site.clock)
        return [
            HungWorker(
                slot=slot,
                facts=self._facts(slot, slot.exit or killed, kills),
                state=asked.state_of(slot.process.pid),
                why=self._whys.get(slot.local_rank, "") if self._is_hang else "",
                is_spared=slot.process.pid in asked.spared,
            )
            for slot in slots
            if asked is not None and slot.stopped_by_agent
        ]

    def _describe_hung(self, worker: HungWorker) -> WorkerFailure | None:
        slot = worker.slot
        self.site.pump.drained(slot.process.pid, DRAIN_SECONDS)
        dump = hang_stop.read_stacks(worker)
        if self.stop.wants_stacks or worker.is_spared or (dump is not None and dump.main):
            where = worker.state.whereabouts() if worker.state is not None else ""
            self.stacks[slot.global_rank] = stacks_of(dump, where=where)  # else it was about to end
        self.observed[slot.global_rank] = hang_stop.observe_silent(slot.global_rank, worker.state, dump)
        if not worker.why:
            return None
        return hang_stop.describe_hang(
            worker, dump, last_heartbeat_ns=self.site.watch.last_heartbeat_ns(slot.local_rank)
        )

    def _describe(self, slot: WorkerSlot, facts: WorkerFailure) -> WorkerFailure:
        self.site.pump.drained(slot.process.pid, DRAIN_SECONDS)
        failure = _describe(slot, facts, stdout_log=slot.paths.stdout, is_alone=not self.site.is_ending())
        return self._keep(slot, failure)

    def _describe_stopped(self, slot: WorkerSlot, facts: WorkerFailure) -> WorkerFailure | None:
        self.site.pump.drained(slot.process.pid, DRAIN_SECONDS)
        if slot.output is not None and not slot.output.written:
            return None
        if not holds_at_end(slot.paths.stderr, _TRACEBACK, within=_TRACEBACK_WITHIN):
            return None
        failure = _describe(slot, facts)
        return self._keep(slot, failure) if failure.exception_type else None

    def _keep(self, slot: WorkerSlot, failure: WorkerFailure) -> WorkerFailure:
        failure = self._keep_cause(slot, failure) or failure
        self._write_evidence(failure, slot.paths.error_file)
        return failure

    def _keep_cause(self, slot: WorkerSlot, failure: WorkerFailure | None) -> WorkerFailure | None:
        pid = slot.process.pid
        is_cause = failure is not None and (failure.is_own_cause or self.site.layout.world_size == 1)
        if failure is not None and is_cause and failure.fingerprint not in self.causes:
            excerpt = make_excerpt(failure, most=_MOST_SHOWN)
            lines = (excerpt.title, *excerpt.lines) if excerpt is not None else ()
            self.causes[failure.fingerprint] = pid, "".join(f"{line}\n" for line in lines if line)
            return replace(failure, is_shown=bool(failure.traceback) and self.site.pump.holds(pid))
        held = self.site.pump.take_held(pid) if all(pid != kept for kept, _ in self.causes.values()) else None
        if held is not None and failure is None and not slot.stopped_by_agent:
            held.show(held.text)  # it was logged
        return None

    def show_causes(self, *, are_elsewhere: bool) -> None:
        for pid, excerpt in self.causes.values():
            if (held := self.site.pump.take_held(pid)) is None or are_elsewhere:
                continue
            is_long = held.text.count(b"\n") > _MOST_SHOWN
            held.show(excerpt.encode("utf-8", "replace") if is_long and excerpt else held.text)
        self.causes.clear()

    def _write_evidence(self, failure: WorkerFailure, path: Path) -> None:
        if write_evidence(failure, path):
            self.unwritten.append(lambda: write_evidence(failure, path))

    def describe_start_failure(self, local_rank: int, error: Exception) -> WorkerFailure:
        path = self.site.paths_of(local_rank).error_file
        failure = replace(
            self._of_rank(local_rank),
            exitcode=127,
            ended_ns=self.site.clock.time_ns(),
            ended_uptime_ns=uptime_ns(self.site.clock),
            message=str(error),
            exception_type=type(error).__name__,
            fingerprint=f"start:{type(error).__name__}",
            # Too few descriptors or too little memory are no bug in the script, however often they happen.
            failure_class=FailureClass.INFRASTRUCTURE,
            category=Category.INFRASTRUCTURE,
            reason="the worker's process could not be started",
            error_file=str(path),
        )
        self.site.files.post(lambda: write_evidence(failure, path))
        return failure

    def _of_rank(self, local_rank: int) -> WorkerFailure:
        site = self.site
        return WorkerFailure(
            attempt=site.attempt.number,
            round=site.round,
            host=site.host,
            node=site.node,
            local_rank=local_rank,
            global_rank=site.layout.first_rank + local_rank,
        )

    def _facts(self, slot: WorkerSlot, status: ExitStatus, oom_kills: int) -> WorkerFailure:
        return replace(
            self._of_rank(slot.local_rank),
            pid=slot.process.pid,
            exitcode=status.exitcode,
            ended_ns=status.observed_ns,
            ended_uptime_ns=status.observed_uptime_ns,
            oom_kills=max(0, oom_kills),
            is_nodes_oom=self.is_nodes_oom,
            core_dumped=status.core_dumped,
            stopped_by_agent=slot.stopped_by_agent,
            waited=0.0 if slot.stopped_by_agent else round(self.stop.waited, 3),
            stopped_ns=self.stop.began_ns if slot.stopped_by_agent else 0,
            last_step=self.site.watch.last_step(slot.local_rank),
        )

    @property
    def _ours(self) -> AbstractSet[int]:
        return _OURS | _ABORTED if self.stop.asked is not None else _OURS


def _describe(
    slot: WorkerSlot, facts: WorkerFailure, *, stdout_log: Path | str = "", is_alone: bool = False
) -> WorkerFailure:
    return describe_failure(
        facts=facts,
        error_file=slot.paths.error_file,
        stderr_log=slot.paths.stderr,
        stdout_log=stdout_log,
        output=slot.output,
        is_alone=is_alone,
    )
