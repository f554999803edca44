"""The workers of one node in one round: started, watched, ended, and described where they failed."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from hpc_elastic.agent.hang_stop import (
    HEAD_START_SECONDS,
    HungWorker,
    StacksThenStop,
    describe_hang,
    find_targets,
    rank_stacks,
    read_stacks,
)
from hpc_elastic.agent.hang_watch import HangWatch, silent_watch
from hpc_elastic.agent.restart_group import DeadWorker, keep_apart
from hpc_elastic.base.clock import Clock, uptime_ns
from hpc_elastic.base.file_executor import FilesystemHangsError, FileThread, is_refusal
from hpc_elastic.base.files import make_private_dir
from hpc_elastic.base.outcome import ExitCode
from hpc_elastic.failures.evidence import describe_exit, describe_failure, write_evidence
from hpc_elastic.failures.ranking import Category, FailureClass
from hpc_elastic.failures.worker_failure import WorkerFailure
from hpc_elastic.options.worker_values import Std
from hpc_elastic.output.pump import Pump
from hpc_elastic.rendezvous.ranks import RankLayout
from hpc_elastic.run.log_pieces import holds_at_end
from hpc_elastic.run.paths import AttemptPaths, RankPaths
from hpc_elastic.workers import linux
from hpc_elastic.workers.cgroup import oom_kill_count
from hpc_elastic.workers.spawn import EXEC_WAIT_S, ExitStatus, Inherited, WorkerProcess, pipe_bytes_for, start_worker
from hpc_elastic.workers.stop import GroupStopper, Stopped

if TYPE_CHECKING:
    from hpc_elastic.failures.stacks import RankStacks

logger = logging.getLogger(__name__)

FOLDERS_SECONDS = 60.0
"""How long a filesystem is waited for that hangs, or refuses, just when workers are to be started."""
EVIDENCE_SECONDS = 10.0
"""For reading what failed workers left, and writing it down."""
HURRIED_SECONDS = 2.0
"""The same when this node is to end."""
DRAIN_SECONDS = 0.5
"""How long the last words of an ended worker are waited for; a descendant may hold its pipes open."""
_TRACEBACK = b"Traceback (most recent call last)"
_GLANCE = 16 << 10
_OURS = {-int(signal.SIGTERM), -int(signal.SIGKILL), 128 + int(signal.SIGTERM), 0}
_ABORTED = {-int(signal.SIGABRT), 128 + int(signal.SIGABRT)}


T = TypeVar("T")


class _Slot(Struct):
    local_rank: int
    global_rank: int
    process: WorkerProcess
    paths: RankPaths
    exit: ExitStatus | None = None
    stopped_by_agent: bool = False
    unwritten: Callable[[], bytes] = bytes
    """The end of its stderr that a full disk refused."""


class Place(Struct, frozen=True, kw_only=True):
    """Where the workers are, for their evidence."""

    attempt: AttemptPaths
    host: str
    node: int


class LocalWorkers:
    """One group of worker processes. All methods are for the main thread.

    None waits for files but `start` and the two that describe failures: so long as said above, and not when this node
    is to end.
    """

    def __init__(
        self,
        place: Place,
        *,
        round_index: int,
        layout: RankLayout,
        inherited: Inherited,
        pump: Pump,
        clock: Clock,
        shown: Callable[[int], Std],
        excluding: Callable[[], AbstractSet[int]],
        files: FileThread,
        is_ending: Callable[[], bool],
        watch: HangWatch | None = None,
    ) -> None:
        """Args:
        place: Where this is.
        round_index: The round.
        layout: This node's place in it.
        inherited: What the workers get back of the user's shell.
        pump: Takes their output.
        clock: For all times.
        shown: Local rank → what of its output goes to the job log.
        excluding: Pids that are no workers, asked for when the group is ended.
        files: Touches the files.
        is_ending: Whether this node is to end: nothing is waited for any more.
        watch: Reads the workers' heartbeats; None: they have none.
        """
        self.round = round_index
        self.layout = layout
        self._place = place
        self._inherited = inherited
        self._pump = pump
        self._clock = clock
        self._shown = shown
        self._excluding = excluding
        self._files = files
        self._is_ending = is_ending
        self._watch = watch or silent_watch()
        self._slots: list[_Slot] = []
        self._replaced: list[WorkerProcess] = []
        """Ended, and kept until the group is ended: what they started may still run."""
        self._start_one: Callable[[int, Mapping[str, str], float], WorkerProcess] | None = None
        self._stopper: GroupStopper | StacksThenStop | None = None
        self._asked: StacksThenStop | None = None
        self._wants_stacks = False
        self.stacks: dict[int, RankStacks] = {}
        """Global rank → its main thread's stack, once `describe_failures` has read what a hung round left;
        empty where there was none."""
        self.unwritten_evidence: list[Callable[[], object]] = []
        """Each writes a failure's evidence that the filesystem refused when `describe_failures` wrote it."""
        self._started_at = clock.monotonic()
        self._oom_kills = oom_kill_count() or 0

    def start(
        self,
        argv: Sequence[str],
        environment: Callable[[int, str], Mapping[str, str]],
        *,
        cwd: str,
    ) -> None:
        """Start all workers of the node.

        Args:
            argv: The same for all.
            environment: (local rank, path of its error file) → the whole environment.
            cwd: Where they run.

        Raises:
            WorkerStartError: one could not be; the others, if any, run and are to be stopped.
            OSError: their folders could not be made.
        """
        self._files.do(self._make_folders, within=FOLDERS_SECONDS, unless=self._is_ending, again=is_refusal)
        self._watch.begin(self.round, first_rank=self.layout.first_rank, count=self.layout.local_world_size)
        deadline = self._clock.monotonic() + EXEC_WAIT_S

        def start_one(local_rank: int, extra: Mapping[str, str], exec_wait: float) -> WorkerProcess:
            own = environment(local_rank, str(self.paths_of(local_rank).error_file))
            return start_worker(
                argv=argv,
                env={**own, **self._watch.environment(local_rank), **extra},
                cwd=cwd,
                inherited=self._inherited,
                clock=self._clock,
                pipe_bytes=pipe_bytes_for(self.layout.local_world_size),
                exec_wait=exec_wait,
            )

        self._start_one = start_one
        for local_rank, global_rank in enumerate(self.layout.global_ranks):
            process = start_one(local_rank, {}, deadline - self._clock.monotonic())
            slot = _Slot(local_rank, global_rank, process, self.paths_of(local_rank))
            self._slots.append(slot)
            self._take_output(slot)

    def _take_output(self, slot: _Slot) -> None:
        slot.unwritten = self._pump.add(
            rank=slot.global_rank,
            worker=slot.process,
            stdout=slot.paths.stdout,
            stderr=slot.paths.stderr,
            shown=self._shown(slot.local_rank),
        )

    @property
    def dead(self) -> list[DeadWorker]:
        """Who has ended badly, and not by us."""
        return [
            DeadWorker(local_rank=s.local_rank, rank=s.global_rank, pid=s.process.pid, exitcode=s.exit.exitcode)
            for s in self._slots
            if s.exit is not None and self._is_failure(s)
        ]

    def replace(self, local_rank: int, extra: Mapping[str, str]) -> int:
        """Put a fresh process in the place of a dead one, and leave the others alone. Returns its pid.

        Args:
            local_rank: Whose.
            extra: What it finds in its environment besides.

        Raises:
            WorkerStartError: it could not be started.
        """
        slot = self._slots[local_rank]
        assert self._start_one is not None
        slot.process.signal_group(signal.SIGKILL)  # what it started holds memory, and the GPU
        error_file, number = slot.paths.error_file, len(self._replaced)
        self._files.post(lambda: keep_apart(error_file, number))
        self._watch.begin_again(local_rank)
        process = self._start_one(local_rank, extra, EXEC_WAIT_S)
        self._replaced.append(slot.process)
        slot.process, slot.exit = process, None
        self._take_output(slot)
        return process.pid

    def _make_folders(self) -> None:
        make_private_dir(self._place.attempt.round_dir(self.round))
        for local_rank in range(self.layout.local_world_size):
            make_private_dir(self.paths_of(local_rank).root)

    def paths_of(self, local_rank: int) -> RankPaths:
        return self._place.attempt.rank(self.round, self.layout.first_rank + local_rank)

    @property
    def pids(self) -> list[int]:
        return [*(slot.process.pid for slot in self._slots), *(process.pid for process in self._replaced)]

    def watched(self) -> list[int]:
        """Descriptors of the workers that run: readable when one has ended."""
        return [s.process.pidfd for s in self._slots if s.exit is None and s.process.pidfd is not None]

    def poll(self) -> bool:
        """Note who has ended. Returns whether somebody has since the last call."""
        changed = False
        now, uptime = self._clock.time_ns(), uptime_ns(self._clock)
        for slot in self._slots:
            if slot.exit is None and (status := slot.process.poll()) is not None:
                # Whom one look finds ended are told with one time: which of them was first can't be known.
                slot.exit = replace(status, observed_ns=now, observed_uptime_ns=uptime)
                changed = True
        return changed

    @property
    def failed(self) -> bool:
        """Whether a worker has ended badly, and not by us."""
        return any(self._is_failure(slot) for slot in self._slots)

    @property
    def want_no_other_try(self) -> bool:
        """One of them said so by its exit code."""
        return any(slot.exit is not None and slot.exit.exitcode == ExitCode.NOT_RETRYABLE for slot in self._slots)

    @property
    def succeeded(self) -> bool:
        """Whether all have ended with 0."""
        return all(slot.exit is not None and slot.exit.exitcode == 0 for slot in self._slots)

    @property
    def took_stacks(self) -> bool:
        """Whether the workers were asked for their stacks before they were ended."""
        return self._asked is not None

    @property
    def running(self) -> list[int]:
        """Local ranks whose worker has not ended."""
        return [slot.local_rank for slot in self._slots if slot.exit is None]

    @property
    def stopping(self) -> bool:
        return self._stopper is not None

    @property
    def seconds(self) -> float:
        """Since the start, monotonic."""
        return self._clock.monotonic() - self._started_at

    def send(self, number: signal.Signals) -> None:
        """A signal to every worker that runs; not to what it started."""
        for slot in self._slots:
            if slot.exit is None and slot.process.pidfd is not None:
                linux.pidfd_send_signal(slot.process.pidfd, number)

    def take_stacks_first(self) -> None:
        """The round hangs: when the workers are ended, they get SIGABRT in place of SIGTERM, and leave their stacks."""
        self._wants_stacks = True

    def begin_stop(self, *, grace: float) -> None:
        """SIGTERM to all; SIGKILL after `grace` seconds. A second call can only shorten that."""
        self.poll()
        if self._stopper is not None:
            if grace <= 0:
                self._stopper.kill_now()
            else:
                self._stopper.shorten(grace)
            return
        for slot in self._slots:
            slot.stopped_by_agent = slot.exit is None
        ended = [*self._replaced, *(slot.process for slot in self._slots)]
        self._stopper = GroupStopper(ended, grace=grace, clock=self._clock, excluding=self._excluding())
        if self._wants_stacks:
            running = [(slot.process, self._speaker(slot)) for slot in self._slots if slot.exit is None]
            targets = find_targets(running)
            alone = self.layout.group_world_size == 1
            self._asked = self._stopper = StacksThenStop(
                targets, self._stopper, clock=self._clock, head_start=0.0 if alone else HEAD_START_SECONDS
            )
        self._stopper.begin()

    def _speaker(self, slot: _Slot) -> int:
        beat = self._watch.beat(slot.local_rank)
        return beat.pid if beat is not None else 0

    def step_stop(self) -> Stopped | float:
        """Go on ending them: what became of them, or seconds until the next call."""
        assert self._stopper is not None
        result = self._stopper.step()
        if isinstance(result, Stopped):
            self._stopper = None
            for slot in self._slots:
                slot.exit = slot.exit or result.exits.get(slot.process.pid)
        else:
            self.poll()
        return result

    def describe_failures(self) -> list[WorkerFailure]:
        """Gather and write the evidence of all who ended badly. When they have ended; waits for their last words."""
        kills = (oom_kill_count() or 0) - self._oom_kills
        told = [
            (slot, self._facts(slot, slot.exit, kills))
            for slot in self._slots
            if slot.exit is not None and (self._is_failure(slot) or self._fell_while_stopping(slot))
        ]
        asked = self._asked_workers(kills)
        told = [(slot, facts) for slot, facts in told if slot.local_rank not in self._watch.hung or not asked]
        silenced = [] if asked else self._silenced()
        if not told and not asked and not silenced:
            return []
        try:
            return self._on_disk(
                lambda: [
                    *self._gather_stacks(asked),
                    *(self._gather(slot, facts) for slot, facts in told),
                    *self._gather_talking(silenced, kills),
                ]
            )
        except FilesystemHangsError as error:
            logger.warning("no evidence of the workers' failures: %s: %s", self._place.attempt.root, error.strerror)
            return [describe_exit(facts, f"its evidence was out of reach: {error.strerror}") for _, facts in told]

    def _asked_workers(self, kills: int) -> list[tuple[_Slot, HungWorker]]:
        """The workers that were to leave their stacks."""
        if self._asked is None:
            return []
        found = []
        for slot in self._slots:
            if not slot.stopped_by_agent:
                continue
            status = slot.exit or ExitStatus(
                exitcode=-int(signal.SIGKILL),
                core_dumped=False,
                observed_ns=self._clock.time_ns(),
                observed_uptime_ns=uptime_ns(self._clock),
            )
            worker = HungWorker(
                facts=self._facts(slot, status, kills),
                paths=slot.paths,
                state=self._asked.state_of(slot.process.pid),
                py_spy=self._asked.py_spy_of(slot.process.pid),
                why=self._watch.hung.get(slot.local_rank, ""),
            )
            found.append((slot, worker))
        return found

    def _gather_stacks(self, asked: Sequence[tuple[_Slot, HungWorker]]) -> list[WorkerFailure]:
        if not asked:
            return []
        failures = []
        for slot, worker in asked:
            self._pump.drained(slot.process.pid, DRAIN_SECONDS)
            dump = read_stacks(worker)
            self.stacks[slot.global_rank] = rank_stacks(worker, dump)
            if worker.why:
                failures.append(describe_hang(worker, dump, told_ns=self._watch.told_ns(slot.local_rank)))
        return failures

    def _gather(self, slot: _Slot, facts: WorkerFailure) -> WorkerFailure:
        self._pump.drained(slot.process.pid, DRAIN_SECONDS)
        failure = describe_failure(
            facts=facts,
            error_file=slot.paths.error_file,
            stderr_log=slot.paths.stderr,
            unwritten=slot.unwritten(),
        )
        self._write_evidence(failure, slot.paths.error_file)
        return failure

    def _write_evidence(self, failure: WorkerFailure, path: Path) -> None:
        if write_evidence(failure, path):
            self.unwritten_evidence.append(lambda: write_evidence(failure, path))

    def _silenced(self) -> list[_Slot]:
        """Those whom our signal ended."""
        return [s for s in self._slots if s.exit is not None and s.stopped_by_agent and s.exit.exitcode in _OURS - {0}]

    def _gather_talking(self, silenced: Sequence[_Slot], kills: int) -> list[WorkerFailure]:
        """Whoever had printed an exception when our signal came: it was about to end, or hung in its shutdown."""
        failures = []
        for slot in silenced:
            self._pump.drained(slot.process.pid, DRAIN_SECONDS)
            if slot.exit is None or not holds_at_end(slot.paths.stderr, _TRACEBACK, within=_GLANCE):
                continue
            facts = self._facts(slot, slot.exit, kills)
            failure = describe_failure(facts=facts, error_file=slot.paths.error_file, stderr_log=slot.paths.stderr)
            if failure.exception_type:
                self._write_evidence(failure, slot.paths.error_file)
                failures.append(failure)
        return failures

    def _on_disk(self, action: Callable[[], T]) -> T:
        hurried = self._is_ending()
        return self._files.do(
            action,
            within=HURRIED_SECONDS if hurried else EVIDENCE_SECONDS,
            unless=None if hurried else self._is_ending,
        )

    def describe_start_failure(self, error: Exception, *, retryable: bool) -> WorkerFailure:
        """The evidence where a worker could not even be started."""
        local_rank = min(len(self._slots), self.layout.local_world_size - 1)
        paths = self.paths_of(local_rank)
        failure = WorkerFailure(
            attempt=self._place.attempt.number,
            round=self.round,
            host=self._place.host,
            node=self._place.node,
            local_rank=local_rank,
            global_rank=self.layout.first_rank + local_rank,
            exitcode=127,
            ended_ns=self._clock.time_ns(),
            ended_uptime_ns=uptime_ns(self._clock),
            message=str(error),
            exception_type=type(error).__name__,
            fingerprint=f"start:{type(error).__name__}",
            # Too few descriptors or too little memory are no bug in the script, however often they happen.
            failure_class=FailureClass.INFRASTRUCTURE if retryable else FailureClass.ROOT,
            category=Category.INFRASTRUCTURE if retryable else Category.INPUT,
            reason="the worker's process could not be started",
            retryable=retryable,
            error_file=str(paths.error_file),
        )
        self._files.post(lambda: write_evidence(failure, paths.error_file))
        return failure

    def exit_summary(self) -> str:
        """The first failure in a few words, before any evidence is read."""
        slot = next(s for s in self._slots if self._is_failure(s))
        assert slot.exit is not None
        code = slot.exit.exitcode
        how = signal.Signals(-code).name if -code in set(signal.Signals) else f"exit code {code}"
        return f"rank {slot.global_rank} ended with {how}"

    def _facts(self, slot: _Slot, status: ExitStatus, oom_kills: int) -> WorkerFailure:
        return WorkerFailure(
            attempt=self._place.attempt.number,
            round=self.round,
            host=self._place.host,
            node=self._place.node,
            local_rank=slot.local_rank,
            global_rank=slot.global_rank,
            pid=slot.process.pid,
            exitcode=status.exitcode,
            ended_ns=status.observed_ns,
            ended_uptime_ns=status.observed_uptime_ns,
            oom_kills=max(0, oom_kills),
            core_dumped=status.core_dumped,
            stopped_by_agent=slot.stopped_by_agent,
            last_step=self._watch.last_step(slot.local_rank),
        )

    def _is_failure(self, slot: _Slot) -> bool:
        return slot.exit is not None and slot.exit.exitcode != 0 and not slot.stopped_by_agent

    def _fell_while_stopping(self, slot: _Slot) -> bool:
        # It was failing already when our signal came: its own words are worth keeping.
        ours = _OURS | _ABORTED if self._asked is not None else _OURS
        return slot.exit is not None and slot.stopped_by_agent and slot.exit.exitcode not in ours
