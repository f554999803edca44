"""The workers of one node in one round: started, watched, ended, and described where they failed."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from hpc_elastic.agent.hang import HangWatch, silent_watch
from hpc_elastic.agent.hang_stop import (
    HEAD_START_SECONDS,
    HungWorker,
    StacksThenStop,
    describe_hang,
    find_targets,
    rank_stacks,
    read_stacks,
)
from hpc_elastic.agent.last_look import JUDGE_SECONDS, MomentThenStop, Stopper, acts_on, observe_failure, observe_silent
from hpc_elastic.agent.restart_group import DeadWorker, keep_apart
from hpc_elastic.base.clock import Clock, uptime_ns
from hpc_elastic.base.file_executor import FileExecutor, FilesystemHangsError, is_refusal
from hpc_elastic.base.files import make_private_dir
from hpc_elastic.base.outcome import ExitCode
from hpc_elastic.failures.evidence import describe_exit, describe_failure, write_evidence
from hpc_elastic.failures.ranking import Category, FailureClass
from hpc_elastic.failures.worker_failure import WorkerFailure
from hpc_elastic.output.pump import LogPump, WorkerOutput
from hpc_elastic.rendezvous.ranks import RankLayout
from hpc_elastic.run.agent_events import OwnEnd
from hpc_elastic.run.log_pieces import holds_at_end
from hpc_elastic.run.option_values import Std
from hpc_elastic.run.paths import AttemptPaths, RankPaths
from hpc_elastic.workers import linux
from hpc_elastic.workers.linux import oom_kill_count
from hpc_elastic.workers.spawn import (
    EXEC_WAIT_S,
    ExitStatus,
    Inherited,
    WorkerProcess,
    exit_status_now,
    pipe_bytes_for,
    start_worker,
)
from hpc_elastic.workers.stop import GroupStopper, Stopped

if TYPE_CHECKING:
    from hpc_elastic.failures.stacks import RankStacks
    from hpc_elastic.run.activities import Activity

logger = logging.getLogger(__name__)

FOLDERS_SECONDS = 60.0
"""How long a filesystem is waited for that hangs, or refuses, just when workers are to be started."""
EVIDENCE_SECONDS = 10.0
"""For reading what failed workers left, and writing it down."""
HURRIED_SECONDS = 2.0
"""The same when this node is to end."""
DRAIN_SECONDS = 0.5
"""How long the last output of an ended worker is waited for; a descendant may hold its pipes open."""
_TRACEBACK = b"Traceback (most recent call last)"
_TRACEBACK_WITHIN = 16 << 10
"""Bytes at the end of stderr.log."""
_OURS = {-int(signal.SIGTERM), -int(signal.SIGKILL), 128 + int(signal.SIGTERM), 0}
_ABORTED = {-int(signal.SIGABRT), 128 + int(signal.SIGABRT)}


class _Slot(Struct):
    local_rank: int
    global_rank: int
    process: WorkerProcess
    paths: RankPaths
    exit: ExitStatus | None = None
    stopped_by_agent: bool = False
    output: WorkerOutput | None = None
    early: WorkerFailure | None = None
    """Its failure as far as its output had come before the group was ended; None: not looked at, or out of reach."""
    is_looked_at: bool = False

    @property
    def has_failed(self) -> bool:
        """Whether it has ended badly, and not by the agent."""
        return self.exit is not None and self.exit.exitcode != 0 and not self.stopped_by_agent

    def note_exit(self, status: ExitStatus, stopper: Stopper | None) -> None:
        """It has ended. A SIGKILL that the agent has not sent was on its way when the stop began: a failure of its own.

        A worker's sockets close before its end can be seen, so the peers' failures may be here first.
        """
        self.exit = status
        if status.exitcode == -signal.SIGKILL and not (stopper is not None and stopper.sent_kill):
            self.stopped_by_agent = False


class Place(Struct, frozen=True, kw_only=True):
    """Where the workers are, for their evidence."""

    attempt: AttemptPaths
    host: str
    node: int


class LocalWorkers:
    """One group of worker processes. All methods are for the main thread.

    None waits for files but `start` and the two that describe failures: in the bounds above, and not when this node is
    to end.
    """

    def __init__(
        self,
        place: Place,
        *,
        round_index: int,
        layout: RankLayout,
        inherited: Inherited,
        pump: LogPump,
        clock: Clock,
        shown: Callable[[int], Std],
        excluding: Callable[[], AbstractSet[int]],
        files: FileExecutor,
        is_ending: Callable[[], bool],
        watch: HangWatch | None = None,
    ) -> None:
        """`excluding` gives the pids that are no workers; once `is_ending`, nothing is waited for any more."""
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
        self._stopper: Stopper | None = None
        self._asked: StacksThenStop | None = None
        self._wants_stacks = False
        self.wants_look = False
        """Whether nothing but symptoms is known of the round."""
        self._stopped_ns = 0
        self.stacks: dict[int, RankStacks] = {}
        """Global rank → its main thread's stack, once `describe_failures` has read what a hung round left;
        empty where there was none."""
        self._observed: dict[int, Activity] = {}
        self.activities: list[Activity] = []
        """What each worker here was doing, once `describe_failures` has found nothing but symptoms, or a hang."""
        self.unwritten_evidence: list[Callable[[], object]] = []
        """Each writes a failure's evidence that the filesystem refused when `describe_failures` wrote it."""
        self._waits_since: float | None = None
        """Since when the workers elsewhere are let go on after a failure here that may be the node's."""
        self._waited = 0.0
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

        `environment`: (local rank, path of its error file) → the whole environment.

        Raises:
            WorkerStartError: one could not be; the others, if any, run and are to be stopped.
            OSError: their folders could not be made.
        """

        def make_folders() -> None:
            make_private_dir(self._place.attempt.round_dir(self.round))
            for local_rank in range(self.layout.local_world_size):
                make_private_dir(self.paths_of(local_rank).root)

        self._files.do(make_folders, within=FOLDERS_SECONDS, unless=self._is_ending, again=is_refusal)
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
        slot.output = self._pump.add(
            rank=slot.global_rank,
            worker=slot.process,
            stdout=slot.paths.stdout,
            stderr=slot.paths.stderr,
            shown=self._shown(slot.local_rank),
        )

    @property
    def dead(self) -> list[DeadWorker]:
        """The workers that have ended badly, and not by the agent."""
        return [
            DeadWorker(local_rank=s.local_rank, rank=s.global_rank, pid=s.process.pid, exitcode=s.exit.exitcode)
            for s in self._slots
            if s.exit is not None and s.has_failed
        ]

    def replace(self, local_rank: int, extra: Mapping[str, str]) -> int:
        """Put a fresh process in the place of a dead one, and leave the others alone. Returns its pid.

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

    def paths_of(self, local_rank: int) -> RankPaths:
        return self._place.attempt.rank(self.round, self.layout.first_rank + local_rank)

    @property
    def pids(self) -> list[int]:
        return [*(slot.process.pid for slot in self._slots), *(process.pid for process in self._replaced)]

    def watched(self) -> list[int]:
        """Descriptors of the workers that run: readable when one has ended."""
        return [s.process.pidfd for s in self._slots if s.exit is None and s.process.pidfd is not None]

    def poll(self) -> bool:
        """Note which workers have ended. Returns whether one has since the last call."""
        changed = False
        now, uptime = self._clock.time_ns(), uptime_ns(self._clock)
        for slot in self._slots:
            if slot.exit is None and (status := slot.process.poll()) is not None:
                # All that one look finds ended get the same time: which of them was first can't be known.
                slot.note_exit(replace(status, observed_ns=now, observed_uptime_ns=uptime), self._stopper)
                changed = True
        return changed

    @property
    def failed(self) -> bool:
        """Whether a worker has ended badly, and not by the agent."""
        return any(slot.has_failed for slot in self._slots)

    def look_at_failure(self) -> WorkerFailure | None:
        """The failure of the first worker that has ended badly, as far as its output has come; None where a signal
        ended it, or its output is out of reach. Some milliseconds."""
        slot = next((one for one in self._slots if one.has_failed), None)
        return self._look_at(slot) if slot is not None else None

    def begin_moment(self) -> None:
        """The workers that run are let go on, since the failure here may be the node's."""
        self._waits_since = self._clock.monotonic()

    @property
    def want_no_other_try(self) -> bool:
        """Whether the exit code of one of them asks for no other try."""
        return any(slot.exit is not None and slot.exit.exitcode == ExitCode.NOT_RETRYABLE for slot in self._slots)

    @property
    def succeeded(self) -> bool:
        """Whether all have ended with 0."""
        return all(slot.exit is not None and slot.exit.exitcode == 0 for slot in self._slots)

    @property
    def took_stacks(self) -> bool:
        """Whether workers were asked for their stacks before they were ended."""
        return self._asked is not None and (self._wants_stacks or bool(self.stacks))

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

    def look_first(self) -> None:
        """Nothing but symptoms is known: before the workers are ended, they get a moment to fail by themselves, and
        those that are silent then leave their stacks."""
        self.wants_look = True

    def end_moment(self) -> None:
        """What happened is known: nothing is waited for any more."""
        if isinstance(self._stopper, MomentThenStop):
            self._stopper.end_moment()

    @property
    def has_symptoms_only(self) -> bool:
        """Whether workers have failed here, and each failure only shows that another rank is gone.

        Reads the ends of their stderr, where their exit codes do not say what happened: some milliseconds.
        """
        failed = [slot for slot in self._slots if slot.has_failed]
        return bool(failed) and all(self._is_symptom(slot) for slot in failed)

    def _is_symptom(self, slot: _Slot) -> bool:
        found = self._look_at(slot)
        return found is not None and found.failure_class is FailureClass.SYMPTOM

    def _look_at(self, slot: _Slot) -> WorkerFailure | None:
        """A failure before the group is ended, where its exit code does not say what happened."""
        assert slot.exit is not None
        if slot.is_looked_at:
            return slot.early
        slot.is_looked_at = True
        facts = self._facts(slot, slot.exit, (oom_kill_count() or 0) - self._oom_kills)
        if facts.exitcode > 0 or facts.exitcode in _ABORTED:
            self._pump.drained(slot.process.pid, JUDGE_SECONDS)
            try:
                slot.early = self._files.do(
                    lambda: describe_failure(
                        facts=facts, error_file=slot.paths.error_file, stderr_log=slot.paths.stderr, output=slot.output
                    ),
                    within=JUDGE_SECONDS,
                )
            except FilesystemHangsError:
                pass  # it is ended as if its cause were known
        return slot.early

    def begin_stop(self, *, grace: float) -> None:
        """SIGTERM to all; SIGKILL after `grace` seconds. A second call can only shorten that."""
        self.poll()
        if self._stopper is not None:
            if grace <= 0:
                self._stopper.kill_now()
            else:
                self._stopper.shorten(grace)
            return
        if self.wants_look and not self._wants_stacks:
            self._stopper = MomentThenStop(
                is_over=self._is_moment_over, then=self._stop_now, grace=grace, clock=self._clock
            )
        else:
            self._stopper = self._stop_now(grace)
        self._stopper.begin()

    def _is_moment_over(self) -> bool:
        self.poll()
        if any(slot.has_failed and not self._is_symptom(slot) for slot in self._slots):
            self.wants_look = False
        return not self.wants_look or not self.running

    def _stop_now(self, grace: float) -> Stopper:
        """What ends the workers that run now."""
        if self._waits_since is not None:
            self._waited = self._clock.monotonic() - self._waits_since
        self._stopped_ns = self._clock.time_ns()
        for slot in self._slots:
            slot.stopped_by_agent = slot.exit is None
        ended = [*self._replaced, *(slot.process for slot in self._slots)]
        stopper = GroupStopper(ended, grace=grace, clock=self._clock, excluding=self._excluding())
        if not self._wants_stacks and not self.wants_look:
            return stopper
        beats = {slot.local_rank: self._watch.beat(slot.local_rank) for slot in self._slots if slot.exit is None}
        targets = find_targets(
            [(self._slots[local_rank].process, beat.pid if beat else 0) for local_rank, beat in beats.items()]
        )
        if not self._wants_stacks:
            # SIGABRT in place of SIGTERM, but not where that would keep a script from saving.
            targets = [replace(target, is_asked=not acts_on(signal.SIGTERM, target.pid)) for target in targets]
        has_peers = self._wants_stacks and self.layout.group_world_size > 1
        self._asked = StacksThenStop(
            targets, stopper, clock=self._clock, head_start=HEAD_START_SECONDS if has_peers else 0.0
        )
        return self._asked

    def step_stop(self) -> Stopped | float:
        """Go on ending them. Returns what became of them, or the seconds until the next call."""
        assert self._stopper is not None
        result = self._stopper.step()
        if isinstance(result, Stopped):
            for slot in self._slots:
                if slot.exit is None and (status := result.exits.get(slot.process.pid)) is not None:
                    slot.note_exit(status, self._stopper)
            self._stopper = None
        else:
            self.poll()
        return result

    @property
    def own_ends(self) -> tuple[OwnEnd, ...]:
        """How the workers ended that the agent's signal did not end: a few, however many ranks there are."""
        return tuple(
            OwnEnd(
                rank=slot.global_rank,
                exitcode=slot.exit.exitcode,
                ended_ns=slot.exit.observed_ns,
                ended_uptime_ns=slot.exit.observed_uptime_ns,
                stopped=slot.stopped_by_agent,
            )
            for slot in self._slots
            if slot.exit is not None and not (slot.stopped_by_agent and slot.exit.exitcode in self._ours - {0})
        )

    def describe_failures(self) -> list[WorkerFailure]:
        """Gather and write the evidence of all that ended badly. To be called once the group has ended."""
        kills = (oom_kill_count() or 0) - self._oom_kills
        hung = self._asked_for_stacks(kills)
        failed = [
            (slot, self._facts(slot, slot.exit, kills))
            for slot in self._slots
            if slot.exit is not None
            and (slot.has_failed or self._fell_while_stopping(slot))
            and not (hung and slot.local_rank in self._watch.hung)
        ]
        stopped = [
            (slot, self._facts(slot, slot.exit, kills))
            for slot in self._slots
            if not (hung and self._wants_stacks)
            and slot.exit is not None
            and slot.stopped_by_agent
            and slot.exit.exitcode in self._ours - {0}
        ]
        if not (failed or hung or stopped):
            return []

        def gather() -> list[WorkerFailure]:
            found = [self._describe_hung(slot, worker) for slot, worker in hung]
            found += [self._describe(slot, facts) for slot, facts in failed]
            found += [self._describe_stopped(slot, facts) for slot, facts in stopped]
            described = [failure for failure in found if failure is not None]
            if self._wants_stacks or self.wants_look:
                self._observed |= {
                    failure.global_rank: each for failure in described if (each := observe_failure(failure))
                }
                self.activities = [self._observed[rank] for rank in sorted(self._observed)]
            return described

        hurried = self._is_ending()
        try:
            return self._files.do(
                gather,
                within=HURRIED_SECONDS if hurried else EVIDENCE_SECONDS,
                unless=None if hurried else self._is_ending,
            )
        except FilesystemHangsError as error:
            logger.warning("no evidence of the workers' failures: %s: %s", self._place.attempt.root, error.strerror)
            return [describe_exit(facts, f"its evidence was out of reach: {error.strerror}") for _, facts in failed]

    def _asked_for_stacks(self, kills: int) -> list[tuple[_Slot, HungWorker]]:
        """The workers that were to leave their stacks before they ended."""
        if self._asked is None:
            return []
        found = []
        for slot in self._slots:
            if not slot.stopped_by_agent:
                continue
            status = slot.exit or exit_status_now(-int(signal.SIGKILL), self._clock)
            worker = HungWorker(
                facts=self._facts(slot, status, kills),
                paths=slot.paths,
                state=self._asked.state_of(slot.process.pid),
                py_spy=self._asked.py_spy_of(slot.process.pid),
                why=self._watch.hung.get(slot.local_rank, ""),
                is_spared=slot.process.pid in self._asked.spared,
            )
            found.append((slot, worker))
        return found

    def _describe_hung(self, slot: _Slot, worker: HungWorker) -> WorkerFailure | None:
        """Keep its stacks; a failure only where it hung itself, and did not wait for one that did."""
        self._pump.drained(slot.process.pid, DRAIN_SECONDS)
        dump = read_stacks(worker)
        if self._wants_stacks or worker.is_spared or (dump is not None and dump.main):
            self.stacks[slot.global_rank] = rank_stacks(worker, dump)  # else it was about to end
        self._observed[slot.global_rank] = observe_silent(slot.global_rank, worker.state, dump)
        if not worker.why:
            return None
        return describe_hang(worker, dump, last_heartbeat_ns=self._watch.last_heartbeat_ns(slot.local_rank))

    def _describe(self, slot: _Slot, facts: WorkerFailure) -> WorkerFailure:
        self._pump.drained(slot.process.pid, DRAIN_SECONDS)
        failure = describe_failure(
            facts=facts,
            error_file=slot.paths.error_file,
            stderr_log=slot.paths.stderr,
            stdout_log=slot.paths.stdout,
            output=slot.output,
        )
        self._write_evidence(failure, slot.paths.error_file)
        return failure

    def _describe_stopped(self, slot: _Slot, facts: WorkerFailure) -> WorkerFailure | None:
        """A worker that the agent's signal ended, where it had printed an exception before: it was about to end, or
        hung in its shutdown."""

        self._pump.drained(slot.process.pid, DRAIN_SECONDS)
        if not holds_at_end(slot.paths.stderr, _TRACEBACK, within=_TRACEBACK_WITHIN):
            return None
        failure = describe_failure(
            facts=facts, error_file=slot.paths.error_file, stderr_log=slot.paths.stderr, output=slot.output
        )
        if not failure.exception_type:
            return None
        self._write_evidence(failure, slot.paths.error_file)
        return failure

    def _write_evidence(self, failure: WorkerFailure, path: Path) -> None:
        if write_evidence(failure, path):
            self.unwritten_evidence.append(lambda: write_evidence(failure, path))

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
        """One line about the first failure, before any evidence is read."""
        return str(self.dead[0])

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
            waited=0.0 if slot.stopped_by_agent else round(self._waited, 3),
            stopped_ns=self._stopped_ns if slot.stopped_by_agent else 0,
            last_step=self._watch.last_step(slot.local_rank),
        )

    def _fell_while_stopping(self, slot: _Slot) -> bool:
        # It was failing already when the agent's signal came: its evidence is worth keeping.
        return slot.exit is not None and slot.stopped_by_agent and slot.exit.exitcode not in self._ours

    @property
    def _ours(self) -> AbstractSet[int]:
        """Exit codes of workers that the agent ended."""
        return _OURS | _ABORTED if self._asked is not None else _OURS
