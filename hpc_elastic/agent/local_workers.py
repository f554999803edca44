"""The workers of one node in one round: started, watched and ended."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from hpc_elastic.agent import hang_stop
from hpc_elastic.agent.flight_recorders import DUMP_SECONDS, FlightRecorders
from hpc_elastic.agent.hang_stop import DelayedStop, Stopper, WorkerSlot
from hpc_elastic.agent.part import Condemned, GroupSite
from hpc_elastic.agent.worker_environment import enter_container, exit_of_script
from hpc_elastic.agent.worker_evidence import SocketWatch, StopRecord, WorkerEvidence
from hpc_elastic.base.clock import uptime_ns
from hpc_elastic.base.files import check_private_dir, make_private_dir
from hpc_elastic.base.loop import is_refusal
from hpc_elastic.errors import HpcElasticError
from hpc_elastic.failures.classify import signal_of
from hpc_elastic.failures.ranking import FailureClass
from hpc_elastic.failures.stacks import HeldLock, find_held_locks, remove_locks
from hpc_elastic.failures.worker_failure import WorkerFailure
from hpc_elastic.run.agent_events import OwnEnd
from hpc_elastic.run.option_values import Std
from hpc_elastic.run.paths import ExitCode
from hpc_elastic.run.spec import Container, Runtime
from hpc_elastic.workers import tree
from hpc_elastic.workers.linux import node_oom_kill_count
from hpc_elastic.workers.spawn import (
    EXEC_WAIT_S,
    Inherited,
    WorkerProcess,
    describe_exitcode,
    pipe_bytes_for,
    start_worker,
)
from hpc_elastic.workers.stop import GroupStopper, Inside, Stopped, acts_on, send_to_handler

if TYPE_CHECKING:
    from pathlib import Path

    from hpc_elastic.run.progress import FlightTail

logger = logging.getLogger(__name__)

_NVIDIA = "/dev/nvidiactl"
FOLDERS_SECONDS = 60.0


ForkWorkers = Callable[
    [Sequence[Mapping[str, str]], Sequence[frozenset[int]]],
    Sequence[WorkerProcess | None],
]
"""Environments and CPUs of workers → each as a fork; None where it is to be started fresh."""


class DeadWorker(Struct, frozen=True, kw_only=True):
    local_rank: int
    rank: int
    pid: int
    exitcode: int

    def __str__(self) -> str:
        return f"rank {self.rank} ended with {describe_exitcode(self.exitcode)}"


class LocalWorkers:
    def __init__(
        self,
        site: GroupSite,
        *,
        inherited: Inherited,
        shown: Callable[[int, int], Std],
        excluding: Callable[[], AbstractSet[int]],
        fork: ForkWorkers | None = None,
        were_ended: Callable[[], bool] = lambda: False,
    ) -> None:
        self.round, self.layout, self.paths_of = site.round, site.layout, site.paths_of
        self._site, self._clock, self._files, self._watch = site, site.clock, site.files, site.watch
        self._inherited = inherited
        self._shown = shown
        self._excluding = excluding
        self._were_ended, self._by_guardian = were_ended, False
        self._fork = fork or (lambda environments, cpus: [None] * len(environments))
        self._slots: list[WorkerSlot] = []
        self._replaced: list[WorkerProcess] = []
        """Ended, and kept until the group is ended: what they started may still run."""
        self._start_one: Callable[[int, Mapping[str, str]], WorkerProcess] | None = None
        self._container: Container | None = None
        self._inside: Inside | None = None
        """Containers' runtimes may have processes of their own."""
        self._is_wrapped = False
        self._stopper: Stopper | None = None
        self._stop = StopRecord()
        self._held_locks: tuple[HeldLock, ...] = ()
        self._recorders = FlightRecorders(self._watch.pages.path, round_index=site.round, clock=site.clock)
        self.evidence = WorkerEvidence(site, self._stop, self._recorders)
        self.sockets = SocketWatch(site.clock)
        self._grace_since: float | None = None
        self._started_at = site.clock.monotonic()

    def start(
        self,
        argv: Sequence[str],
        environment: Callable[[int, str], Mapping[str, str]],
        *,
        cwd: str,
        container: Container | None = None,
        cpus: Sequence[frozenset[int]] = (),
        is_wrapped: bool = False,
    ) -> None:
        """`environment`: (local rank, path of its error file) → the whole environment. `is_wrapped`: `argv` begins with
        a program that may report a signal N of the script as 128 + N. Raises `WorkerStartError` (the others run, and
        are to be stopped), and `OSError` for folders."""
        self._is_wrapped = is_wrapped
        self._were_ended()  # in an earlier round: no news
        self._files.do(self._make_folders, within=FOLDERS_SECONDS, unless=self._site.is_ending, again=is_refusal)
        self._watch.begin(self.round, first_rank=self.layout.first_rank, count=self.layout.local_world_size)
        deadline = self._clock.monotonic() + EXEC_WAIT_S
        self._container = container
        self._inside = Inside() if container is not None and container.image.runtime is not Runtime.PYXIS else None
        if container is not None and container.image.runtime is Runtime.PODMAN:
            # The workers' containers have cgroups of their own, which end with them.
            self.evidence.is_nodes_oom, self.evidence.oom_kills = True, node_oom_kill_count() or 0

        def env_of(local_rank: int, extra: Mapping[str, str]) -> Mapping[str, str]:
            own = environment(local_rank, str(self.paths_of(local_rank).error_file))
            recorder = self._recorders.environment(self.layout.first_rank + local_rank, own)
            return {**own, **self._watch.environment(local_rank), **recorder, **extra}

        def start_fresh(local_rank: int, own: Mapping[str, str], exec_wait: float) -> WorkerProcess:
            command, env = list(argv), dict(own)
            if container is not None:
                command, env = enter_container(
                    container, argv, env, local_rank=local_rank, cwd=cwd, has_nvidia=os.path.exists(_NVIDIA)
                )
            return start_worker(
                argv=command,
                env=env,
                cwd=cwd,
                inherited=self._inherited,
                clock=self._clock,
                pipe_bytes=pipe_bytes_for(self.layout.local_world_size),
                exec_wait=exec_wait,
                cpus=cpus[local_rank] if cpus else (),
            )

        def start_one(local_rank: int, extra: Mapping[str, str]) -> WorkerProcess:
            env = env_of(local_rank, extra)
            forked = self._fork([env], cpus[local_rank : local_rank + 1])
            return forked[0] or start_fresh(local_rank, env, EXEC_WAIT_S)

        self._start_one = start_one
        environments = [env_of(local_rank, {}) for local_rank in range(self.layout.local_world_size)]
        forked = self._fork(environments, cpus)
        for local_rank, global_rank in enumerate(self.layout.global_ranks):
            try:
                process = forked[local_rank] or start_fresh(
                    local_rank, environments[local_rank], deadline - self._clock.monotonic()
                )
            except (OSError, HpcElasticError):
                self._replaced += [later for later in forked[local_rank:] if later is not None]
                raise
            own = environments[local_rank]
            slot = WorkerSlot(local_rank, global_rank, process, self.paths_of(local_rank), environ=own, cwd=cwd)
            self._slots.append(slot)
            self._watch.note_pid(local_rank, process.pid)
            self._take_output(slot)

    def _make_folders(self) -> None:
        for local_rank in range(self.layout.local_world_size):
            folder = self.paths_of(local_rank).root
            try:
                os.mkdir(folder, 0o700)  # in a folder that only this user may enter
            except FileNotFoundError:
                with suppress(FileExistsError):
                    os.mkdir(folder.parent, 0o700)
                make_private_dir(folder)
            except FileExistsError:
                check_private_dir(folder)

    def _take_output(self, slot: WorkerSlot) -> None:
        slot.output = self._site.pump.add(
            rank=slot.global_rank,
            worker=slot.process,
            stdout=slot.paths.stdout,
            stderr=slot.paths.stderr,
            shown=self._shown(slot.local_rank, slot.global_rank),
        )

    @property
    def dead(self) -> list[DeadWorker]:
        return [
            DeadWorker(local_rank=s.local_rank, rank=s.global_rank, pid=s.process.pid, exitcode=s.exit.exitcode)
            for s in self._slots
            if s.exit is not None and s.has_failed
        ]

    def replace(self, local_rank: int, extra: Mapping[str, str]) -> int:
        slot = self._slots[local_rank]
        assert self._start_one is not None
        slot.process.signal_group(signal.SIGKILL)  # what it started holds memory, and the GPU
        self._files.post(partial(keep_apart, slot.paths.error_file, len(self._replaced)))
        self._watch.begin_again(local_rank)
        process = self._start_one(local_rank, extra)
        self._watch.note_pid(local_rank, process.pid)
        self._replaced.append(slot.process)
        self.sockets.forget(slot.global_rank)
        slot.process, slot.exit = process, None
        slot.early, slot.is_looked_at = None, False
        self._take_output(slot)
        return process.pid

    @property
    def pids(self) -> list[int]:
        return [*(slot.process.pid for slot in self._slots), *(process.pid for process in self._replaced)]

    def watched(self) -> list[int]:
        return [s.process.pidfd for s in self._slots if s.exit is None and s.process.pidfd is not None]

    def poll(self) -> bool:
        changed = False
        now, uptime = self._clock.time_ns(), uptime_ns(self._clock)
        for slot in self._slots:
            if slot.exit is None and (status := slot.process.poll()) is not None:
                # All that one look finds ended get the same time: which of them was first can't be known.
                code = exit_of_script(self._container, status.exitcode)
                code = -signal_of(code) or code if self._is_wrapped else code
                seen = replace(status, exitcode=code, observed_ns=now, observed_uptime_ns=uptime)
                slot.note_exit(seen, self._stopper)
                changed = True
        if changed and not self._by_guardian and self._were_ended():
            self._by_guardian = True
            logger.warning("this agent was stopped, and the run went on without it: its guardian has ended the workers")
        for slot in self._slots if self._by_guardian else ():
            slot.stopped_by_agent = slot.stopped_by_agent or slot.exit is not None
        return changed

    def look_at_sockets(self) -> None:
        self.sockets.look({self._slots[rank].global_rank: pid for rank, pid in self.running_pids.items()})

    @property
    def failed(self) -> bool:
        return any(slot.has_failed for slot in self._slots)

    def look_at_failure(self) -> WorkerFailure | None:
        """`None`: a signal, or its output is out of reach."""
        slot = next((one for one in self._slots if one.has_failed), None)
        return self.evidence.look_at(slot) if slot is not None else None

    def begin_grace(self) -> None:
        self._grace_since = self._clock.monotonic()

    @property
    def want_no_other_try(self) -> bool:
        return any(slot.exit is not None and slot.exit.exitcode == ExitCode.NOT_RETRYABLE for slot in self._slots)

    @property
    def succeeded(self) -> bool:
        return all(slot.exit is not None and slot.exit.exitcode == 0 for slot in self._slots)

    @property
    def running(self) -> list[int]:
        """Local ranks whose script has not ended; its container's runtime may still clean up then."""
        ranks = [slot.local_rank for slot in self._slots if slot.exit is None]
        return [rank for rank in ranks if self._inside is None or not self._inside.has_ended(rank)]

    @property
    def stopping(self) -> bool:
        return self._stopper is not None

    @property
    def seconds(self) -> float:
        return self._clock.monotonic() - self._started_at

    def send(self, number: signal.Signals, speakers: Mapping[int, int]) -> list[int]:
        """Signal the workers in `speakers` that run: the process of each that catches it. `speakers`: local rank → pid
        of the process that sends its heartbeats, or 0. Returns the local ranks that did not get it."""
        pids = self.running_pids
        return [
            rank
            for rank, speaker in speakers.items()
            if not (rank in pids and send_to_handler(pids[rank], number, speaker=speaker))
        ]

    @property
    def running_pids(self) -> dict[int, int]:
        """Local rank → pid of each script that runs: its container's may not have come up yet."""
        if self._inside is None:
            return {slot.local_rank: slot.process.pid for slot in self._slots if slot.exit is None}
        scripts = self._inside.scripts(tree.descendants(os.getpid(), excluding=self._excluding()))
        return {rank: scripts[rank].pid for rank in self.running if rank in scripts}

    def ask_for_dumps(self, local_ranks: Iterable[int]) -> bool:
        return self._recorders.ask(self.layout.first_rank + local_rank for local_rank in local_ranks)

    def ask_for_arrivals(self) -> None:
        self._recorders.ask_for_arrivals(self._slots[rank].global_rank for rank in self.running)

    def take_arrivals(self) -> dict[int, bytes]:
        """Global rank → what it wrote, as JSON. Reads files of the node's own disk."""
        return self._recorders.take_arrivals(slot.global_rank for slot in self._slots)

    def find_mute(self) -> dict[int, float]:
        return self._recorders.find_mute({rank: self._slots[rank].global_rank for rank in self.running})

    def read_dumps(self) -> dict[int, FlightTail]:
        ranks = [(slot.global_rank, slot.paths.root) for slot in self._slots]
        found = {rank: self._recorders.read(rank, root) for rank, root in ranks}
        return {rank: tail for rank, tail in found.items() if tail is not None}

    def condemn(self, found: Condemned) -> None:
        """Those named are described as failures once they have ended. In a hang all get SIGABRT instead of SIGTERM."""
        if found.ranks or self.evidence.condemned is None:
            self.evidence.condemned = found
        self._stop.wants_stacks |= found.failure_class is FailureClass.HANG

    def condemn_unstarted(self, error: Exception) -> Condemned:
        local_rank = min(len(self._slots), self.layout.local_world_size - 1)
        self.evidence.start_error = local_rank, error
        return Condemned(reason=str(error), failure_class=FailureClass.INFRASTRUCTURE, ranks={local_rank: str(error)})

    def look_first(self) -> None:
        """Symptoms are known alone: workers get a delay to fail by themselves, and silent ones leave stacks."""
        self._stop.wants_look = True

    def end_delay(self) -> None:
        if isinstance(self._stopper, DelayedStop):
            self._stopper.end_delay()

    @property
    def has_symptoms_only(self) -> bool:
        failed = [slot for slot in self._slots if slot.has_failed]
        return bool(failed) and all(self.evidence.is_symptom(slot) for slot in failed)

    def begin_stop(self, *, grace: float, at_once: bool = False) -> None:
        """SIGTERM to all; SIGKILL after `grace` seconds. A second call can only shorten that. `at_once`: SIGKILL."""
        self.poll()
        if self._stopper is not None:
            if at_once or grace <= 0:
                self._stopper.kill_now()
            else:
                self._stopper.shorten(grace)
            return
        self._stop.noticed_ns = self._clock.time_ns()
        if self.wants_look:
            self.look_at_sockets()
        ranks = [slot.global_rank for slot in self._slots if slot.exit is None]
        is_unknown = self._stop.wants_look or self._stop.wants_stacks
        listens = is_unknown and self._recorders.ask(ranks)  # what is stopped can dump nothing
        delayed = partial(DelayedStop, then=self._stop_now, grace=grace, clock=self._clock)
        if self._stop.wants_look and not self._stop.wants_stacks:
            self._stopper = delayed(is_over=self._is_delay_over)
        elif listens:
            self._stopper = delayed(is_over=self._recorders.have_answered, seconds=DUMP_SECONDS)
        else:
            self._stopper = self._stop_now(grace)
        if at_once:
            self._stopper.kill_now()
        else:
            self._stopper.begin()

    def _is_delay_over(self) -> bool:
        self.poll()
        if any(slot.has_failed and not self.evidence.is_symptom(slot) for slot in self._slots):
            self._stop.wants_look = False
        return not self._stop.wants_look or not self.running

    def _stop_now(self, grace: float) -> Stopper:
        if self._grace_since is not None:
            self._stop.waited = self._clock.monotonic() - self._grace_since
        self._stop.began_ns = self._clock.time_ns()
        for slot in self._slots:
            slot.stopped_by_agent = self._by_guardian or slot.exit is None
        scripts = self.running_pids
        pids = list(scripts.values())
        for pid in pids:  # it grows: the script may be below a wrapper
            pids += tree.main_children(pid) or ()
        self._held_locks = find_held_locks(pids)
        beats = {slot.local_rank: self._watch.beat(slot.local_rank) for slot in self._slots if slot.exit is None}
        speakers = {
            self._slots[rank].process.pid if self._inside is None else scripts[rank]: beat.pid
            for rank, beat in beats.items()
            if beat is not None and rank in scripts
        }
        ended, excluding = [*self._replaced, *(slot.process for slot in self._slots)], self._excluding()
        stopper = GroupStopper(
            ended, grace=grace, clock=self._clock, excluding=excluding, inside=self._inside, speakers=speakers
        )
        if not self._stop.wants_stacks and not self._stop.wants_look:
            return stopper
        targets = hang_stop.find_targets(
            [(self._slots[local_rank].process, beat.pid if beat else 0) for local_rank, beat in beats.items()],
            {self._slots[rank].process.pid: pid for rank, pid in scripts.items()},
        )
        if not self._stop.wants_stacks:
            # SIGABRT in place of SIGTERM, but not where that would keep a script from saving.
            targets = [replace(target, is_asked=not acts_on(signal.SIGTERM, target.pid)) for target in targets]
        has_peers = self._stop.wants_stacks and self.layout.group_world_size > 1
        asked = self._stop.asked = hang_stop.StacksThenStop(
            targets, stopper, clock=self._clock, head_start=hang_stop.HEAD_START_SECONDS if has_peers else 0.0
        )
        return asked

    def step_stop(self) -> Stopped | float:
        assert self._stopper is not None
        result = self._stopper.step()
        if isinstance(result, Stopped):
            for slot in self._slots:
                if slot.exit is None and (status := result.exits.get(slot.process.pid)) is not None:
                    code = exit_of_script(self._container, status.exitcode)
                    slot.note_exit(replace(status, exitcode=code), self._stopper)
            self._stopper = None
            if self._held_locks and not result.left:
                self._files.post(self._remove_locks)
        else:
            self.poll()
        return result

    def _remove_locks(self) -> None:
        """The next round would wait for the locks of a build that the stop broke off forever."""
        for path in remove_locks(self._held_locks, self._slots[0].environ):
            logger.info("removed the lock file %s of a C++ extension's build, which the stop broke off", path)

    def exit_summary(self) -> str:
        return str(self.dead[0]) if self.failed else "the guardian of the stopped agent has ended the workers"

    @property
    def own_ends(self) -> tuple[OwnEnd, ...]:
        return self.evidence.own_ends(self._slots)

    def show_causes(self, reason: str) -> None:
        """Show what ended workers here in the job log, unless the next round's `reason` names another node's rank."""
        after = reason.partition("rank ")[2]
        named = after[: len(after) - len(after.lstrip("0123456789"))]
        elsewhere = bool(named) and int(named) not in self.layout.global_ranks
        self.evidence.show_causes(are_elsewhere=elsewhere)

    def describe_failures(self) -> list[WorkerFailure]:
        """Gather and write the evidence of all that ended badly. To be called once the group has ended."""
        found = self.evidence.describe(self._slots)
        for slot in self._slots:
            self._recorders.forget(slot.global_rank)
        return found

    @property
    def wants_look(self) -> bool:
        return self._stop.wants_look

    @property
    def took_stacks(self) -> bool:
        return self._stop.asked is not None and (self._stop.wants_stacks or bool(self.evidence.stacks))


def keep_apart(error_file: Path, number: int) -> None:
    """The error file must not be taken for that of the process in the dead one's place."""
    with suppress(OSError):  # it left none
        error_file.rename(error_file.with_name(f"{error_file.stem}-replaced-{number}{error_file.suffix}"))
