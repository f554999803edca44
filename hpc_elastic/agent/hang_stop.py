"""Ending a round that hangs: first the stacks of all workers, then the workers; and what is left of them as evidence.

Each worker is stopped where it is: a collective whose peer on another node is gone would raise, and its stack be lost.
When the other nodes have done the same, its main process gets a SIGABRT, on which faulthandler prints the Python stacks
to stderr and ends it (0.1 s): the main thread, which would leave its place while another one printed.
"""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from hpc_elastic.agent.restart_policy import HANG_FINGERPRINT, KERNEL_FINGERPRINT, STOPPED_FINGERPRINT
from hpc_elastic.base.clock import Clock
from hpc_elastic.base.files import write_private
from hpc_elastic.base.text import cut_middle
from hpc_elastic.failures import stacks
from hpc_elastic.failures.collectives import activity_of_failure, activity_of_stack
from hpc_elastic.failures.evidence import describe_failure, write_evidence
from hpc_elastic.failures.failure_text import TEXT_LIMIT, Frame, fingerprint, user_frames
from hpc_elastic.failures.ranking import Category, FailureClass
from hpc_elastic.failures.stacks import ProcessState, StackDump, find_dump, look_at_process
from hpc_elastic.failures.traceback_text import find_python_traceback
from hpc_elastic.failures.worker_failure import EvidenceSource, WorkerFailure
from hpc_elastic.output.log_files import LogFile
from hpc_elastic.run.log_pieces import EndReader
from hpc_elastic.run.paths import RankPaths
from hpc_elastic.run.progress import Activity, Doing
from hpc_elastic.workers import tree
from hpc_elastic.workers.spawn import ExitStatus, WorkerProcess
from hpc_elastic.workers.stop import GroupStopper, Stopped, is_python
from hpc_elastic.workers.tree import Proc

ANSWER_SECONDS = 3.0
ASK_AGAIN_SECONDS = 1.5
"""A worker's main thread may hold the signal back: any thread may answer then."""
CHILDREN_SECONDS = 0.5
"""How long a worker's own processes may take for theirs; it is added to no deadline."""
HEAD_START_SECONDS = 0.3
"""The news reaches all nodes in about 0.1 s: before the first worker ends."""
_LOOK_SECONDS = 0.02


class Target(Struct, frozen=True, kw_only=True):
    worker: WorkerProcess
    pid: int
    is_asked: bool = True
    """It is asked for its stack, which ends it; else it is only looked at."""


class _Asked(Struct):
    proc: Proc | None
    state: ProcessState


def find_targets(
    workers: Sequence[tuple[WorkerProcess, int]], scripts: Mapping[int, int] | None = None
) -> list[Target]:
    """The process of each worker that holds its Python stacks: the one that sends its heartbeats (0: none does), else
    the worker itself where it is a Python, else the first Python below it (a shell script around the training script).
    `scripts`: worker's pid → pid of the script, where that is not below the worker."""
    processes, found = tree.all_processes(), []
    for worker, speaker in workers:
        root = (scripts or {}).get(worker.pid, worker.pid)
        pids = [root, *(proc.pid for proc in tree.subtree(processes, (root,)))]
        pid = speaker if speaker in pids else next(filter(is_python, pids), root)
        found.append(Target(worker=worker, pid=pid))
    return found


class StacksThenStop:
    def __init__(
        self, targets: Sequence[Target], stopper: GroupStopper, *, clock: Clock, head_start: float = 0.0
    ) -> None:
        """`head_start`: seconds in which workers are only stopped, so that other nodes do that too before one ends."""
        self._head_start, self._targets, self._stopper, self._clock = head_start, tuple(targets), stopper, clock
        self._asked: dict[int, _Asked] = {}
        self._children: list[Proc] | None = None
        self._deadline = self._began = 0.0
        self._was_asked = self._was_asked_again = self._is_asking = False

    @property
    def sent_kill(self) -> bool:
        return self._stopper.sent_kill

    def begin(self) -> None:
        self._began = self._clock.monotonic()
        self._deadline = self._began + self._head_start + ANSWER_SECONDS
        self._is_asking = True
        for target in self._targets:
            # All are looked at before the first is touched: its end changes what the others do.
            proc = tree.look_at(target.pid) if target.is_asked else None
            self._asked[target.worker.pid] = _Asked(proc, look_at_process(target.pid))
        for asked in self._asked.values():
            if asked.proc is not None:
                tree.kill_safely(asked.proc, signal.SIGSTOP)
        if not self._head_start:
            self._ask()

    def _ask_children(self) -> bool:
        if self._children is None:
            asked = [one.state for one in self._asked.values() if one.proc is not None]
            pids = [child.pid for state in asked for child in state.children if is_python(child.pid)]
            self._children = [proc for pid in pids if (proc := tree.look_at(pid)) is not None]
            for proc in self._children:
                _forbid_core_dump(proc.pid)
                tree.kill_safely(proc, signal.SIGABRT)
        late = self._clock.monotonic() >= self._began + self._head_start + CHILDREN_SECONDS
        return not late and any(map(tree.lives, self._children))

    def _ask(self) -> None:
        if self._ask_children():
            return
        self._was_asked = True
        for asked in self._asked.values():
            if asked.proc is None:
                continue
            _forbid_core_dump(asked.proc.pid)
            tree.kill_safely(asked.proc, signal.SIGABRT, main_thread=True)
            tree.kill_safely(asked.proc, signal.SIGCONT)

    def kill_now(self) -> None:
        self._is_asking = False
        self._stopper.kill_now()

    def shorten(self, grace: float) -> None:
        self._stopper.shorten(grace)

    def step(self) -> Stopped | float:
        if self._is_asking:
            now = self._clock.monotonic()
            if not self._was_asked:
                if now < self._began + self._head_start:
                    return _LOOK_SECONDS
                self._ask()
            if not self._was_asked:
                return _LOOK_SECONDS
            procs = [asked.proc for asked in self._asked.values() if asked.proc is not None]
            silent = [proc for proc in procs if tree.lives(proc)]
            if silent and not self._was_asked_again and now >= self._deadline - ANSWER_SECONDS + ASK_AGAIN_SECONDS:
                self._was_asked_again = True
                for proc in silent:
                    tree.kill_safely(proc, signal.SIGABRT)
            if silent and now < self._deadline:
                return _LOOK_SECONDS
            self._is_asking = False
            self._stopper.begin()
        return self._stopper.step()

    @property
    def spared(self) -> set[int]:
        return {target.worker.pid for target in self._targets if not target.is_asked}

    def state_of(self, worker_pid: int) -> ProcessState | None:
        asked = self._asked.get(worker_pid)
        return asked.state if asked is not None else None


def _forbid_core_dump(pid: int) -> None:
    """1, not 0: a core that goes to a program (systemd-coredump) is held back by that alone, core(5)."""
    try:
        hard = resource.prlimit(pid, resource.RLIMIT_CORE)[1]
        least = 1 if hard == resource.RLIM_INFINITY or hard >= 1 else 0
        resource.prlimit(pid, resource.RLIMIT_CORE, (least, hard))
    except (OSError, ValueError):
        pass  # it has ended, or is another user's


class WorkerSlot(Struct):
    local_rank: int
    global_rank: int
    process: WorkerProcess
    paths: RankPaths
    environ: Mapping[str, str] = {}
    cwd: str = ""
    exit: ExitStatus | None = None
    stopped_by_agent: bool = False
    output: LogFile | None = None
    """Its stderr."""
    early: WorkerFailure | None = None
    """Its failure as far as its output had come before the group was ended; None: not looked at, or out of reach."""
    is_looked_at: bool = False

    @property
    def has_failed(self) -> bool:
        return self.exit is not None and self.exit.exitcode != 0 and not self.stopped_by_agent

    def note_exit(self, status: ExitStatus, stopper: Stopper | None) -> None:
        """A SIGKILL that the agent has not sent was on its way when the stop began: a failure of its own. (A worker's
        sockets close before its end can be seen: the peers' failures may be here first.)"""
        self.exit = status
        if status.exitcode == -signal.SIGKILL and not (stopper is not None and stopper.sent_kill):
            self.stopped_by_agent = False


class HungWorker(Struct, frozen=True, kw_only=True):
    slot: WorkerSlot
    facts: WorkerFailure
    state: ProcessState | None
    why: str
    is_spared: bool = False


def read_stacks(worker: HungWorker) -> StackDump | None:
    try:
        with EndReader(worker.slot.paths.stderr) as file:
            is_own = worker.state is None or worker.state.pid == worker.facts.pid
            dump = find_dump(file.read(stacks.DUMP_LIMIT).decode("utf-8", "replace"), may_be_child=not is_own)
    except OSError:
        dump = None
    try:
        write_private(worker.slot.paths.stacks, _stacks_text(worker, dump))
    except OSError:
        pass  # a full disk: the event has the main thread's
    return dump


def _stacks_text(worker: HungWorker, dump: StackDump | None) -> str:
    facts = worker.facts
    lines = [f"rank {facts.global_rank} on {facts.host}, pid {worker.state.pid if worker.state else facts.pid}"]
    lines.append(worker.why or "it did not fail; others hung, or lost another rank")
    if worker.state is not None:
        lines.append(f"before it was ended: {worker.state.describe()}")
        lines += [f"  thread {thread.pid} {thread.name}: {thread.describe()}" for thread in worker.state.threads]
        lines += [f"  child {child.pid} {child.name}: {child.describe()}" for child in worker.state.children]
    no_stack = (
        "no stack of its own: it did not answer SIGABRT with one (not Python, stuck in the kernel, or it\n"
        "had ended; PYTHONFAULTHANDLER=1 is needed)"
    )
    texts = [dump.text, *(f"of a child process: {child.text}" for child in dump.children)] if dump else [no_stack]
    return "\n".join([*lines, *(part for text in texts for part in ("", text))]) + "\n"


def describe_hang(worker: HungWorker, dump: StackDump | None, *, last_heartbeat_ns: int) -> WorkerFailure:
    """It failed at `last_heartbeat_ns`, by this host's wall clock. Writes its error.json."""
    facts, state = replace(worker.facts, stopped_by_agent=False), worker.state
    found = describe_failure(facts=facts, error_file=worker.slot.paths.error_file, stderr_log=worker.slot.paths.stderr)
    if found.source is EvidenceSource.ERROR_FILE:
        # It had failed, recorded that, and then did not end.
        failure = replace(found, reason=f"{found.reason}; then it did not end: {worker.why}")
    else:
        frames, is_stuck = dump.main if dump is not None else (), _is_stuck(state, dump)
        if state is not None and state.is_stopped:
            mark = STOPPED_FINGERPRINT
        elif is_stuck:
            mark = KERNEL_FINGERPRINT
        else:
            mark = HANG_FINGERPRINT + fingerprint(exception_type="Hang", frames=frames).partition(":")[2]
        failure = replace(
            found,
            ended_ns=last_heartbeat_ns,
            ended_uptime_ns=max(0, found.ended_uptime_ns - (found.ended_ns - last_heartbeat_ns)),
            message=f"hang: {worker.why}",
            exception_type="",
            traceback=cut_middle(stacks.describe_stack(frames), TEXT_LIMIT),
            fingerprint=mark,
            category=Category.INFRASTRUCTURE if is_stuck else Category.WORKER,
            failure_class=FailureClass.HANG,
            reason=_reason(worker, dump),
            retryable=True,
            source=EvidenceSource.STDERR if dump is not None else EvidenceSource.EXIT,
            problem="",
        )
    write_evidence(failure, worker.slot.paths.error_file)
    return failure


def _is_stuck(state: ProcessState | None, dump: StackDump | None) -> bool:
    """A worker that prints its stack itself sat in the kernel for a moment only."""
    return state is not None and state.is_uninterruptible and dump is None


def _reason(worker: HungWorker, dump: StackDump | None) -> str:
    state = worker.state
    if state is not None and state.is_stopped:
        return "SIGSTOP not sent by hpc-elastic (a debugger, or a manual kill); killed"
    if state is not None and _is_stuck(state, dump):
        if (child := state.hung_child) is not None:
            return (
                f"it waited for its child {child.pid} to begin its program, which sat in {child.describe()} "
                "(a program on a hung mount?); killed"
            )
        where = state.threads[0].describe() if state.threads else state.state
        return f"stuck in an uninterruptible system call (a hung mount or device?): {where}; killed"
    if waits := stacks.explain_lock(dump.main if dump is not None else (), worker.slot.environ, cwd=worker.slot.cwd):
        return f"no progress; {waits}"
    if dump is None:
        return "no progress, and no answer to the request for its stacks; killed"
    return "no progress; killed after the stacks of all ranks were taken (stacks.txt)"


DELAY_SECONDS = 1.0
JUDGE_SECONDS = 0.1
"""How long the last output of a worker that has failed is waited for, before its failure counts as a known cause."""
_SOURCE_BYTES = 1 << 20
_MOST_CHILDREN = 3
_POLLS = ("poll", "ppoll", "select", "pselect6", "epoll_wait", "epoll_pwait")


class DelayedStop(Struct, kw_only=True):
    """The rank behind symptoms is about to fail, or stuck elsewhere: it gets `DELAY_SECONDS`, unless a cause shows, and
    ranks that are silent then are asked for stacks. It has a `Stopper`'s shape.
    """

    is_over: Callable[[], bool]
    then: Callable[[float], Stopper]
    grace: float
    clock: Clock
    seconds: float = DELAY_SECONDS
    deadline: float = 0.0
    stopper: Stopper | None = None

    @property
    def sent_kill(self) -> bool:
        return self.stopper is not None and self.stopper.sent_kill

    def begin(self) -> None:
        self.deadline = self.clock.monotonic() + self.seconds

    def end_delay(self) -> None:
        self.deadline = self.clock.monotonic()

    def kill_now(self) -> None:
        self.stopper = self.stopper or self.then(0.0)
        self.stopper.kill_now()

    def shorten(self, grace: float) -> None:
        if self.stopper is not None:
            self.stopper.shorten(grace)
        elif grace < self.grace:
            self.grace = grace
            self.end_delay()  # less time than was known

    def step(self) -> Stopped | float:
        if self.stopper is None:
            if not self.is_over() and self.clock.monotonic() < self.deadline:
                return _LOOK_SECONDS
            self.stopper = self.then(self.grace)
            self.stopper.begin()
        return self.stopper.step()


Stopper = GroupStopper | StacksThenStop | DelayedStop


def observe_failure(failure: WorkerFailure, *, latest_ns: int) -> Activity | None:
    """A lost peer that it prints after `latest_ns` may be another agent's doing."""
    if failure.failure_class is not FailureClass.SYMPTOM:
        return None
    found, dump = find_python_traceback(failure.traceback), find_dump(failure.traceback)
    frames = found.frames if found is not None else dump.main if dump is not None else ()
    text = "\n".join((failure.message, failure.traceback, failure.stderr_tail))
    mine = user_frames(frames)
    found_activity = activity_of_failure(failure.global_rank, frames, text, line=_source(mine[-1]) if mine else "")
    return found_activity if (failure.printed_ns or failure.ended_ns) <= latest_ns else replace(found_activity, peer="")


def observe_silent(rank: int, state: ProcessState | None, dump: StackDump | None) -> Activity:
    frames = dump.main if dump is not None else ()
    if state is not None and state.is_stopped:
        return replace(activity_of_stack(rank, frames), doing=Doing.STOPPED, call="")
    syscall = state.threads[0].syscall if state is not None and state.threads else ""
    mine = user_frames(frames)
    is_ending = dump is not None and any(thread.is_main and not thread.frames for thread in dump.threads)
    line = _source(mine[-1]) if mine else ""
    found = activity_of_stack(rank, frames, syscall=syscall, line=line, is_ending=is_ending)
    inside = [user_frames(stacks.forked_frames(child) or ()) for child in dump.children] if dump is not None else []
    places = [f"{os.path.basename(at.file)}:{at.line} {at.function}" for *_, at in filter(None, inside)]
    busy = tuple(f"its child process: {place}" for place in dict.fromkeys(places))
    if busy:
        return replace(found, children=busy[:_MOST_CHILDREN])
    if state is None or found.doing not in (Doing.LOADER, Doing.CHILD):
        return found
    # A worker of a DataLoader that has nothing to do polls for its next batch: it comes last.
    children = sorted(state.children, key=lambda child: (not child.is_stuck, child.syscall in _POLLS))
    shown = tuple(f"its child process {child.pid}: {child.describe()}" for child in children[:_MOST_CHILDREN])
    return replace(found, children=shown)


def _source(frame: Frame) -> str:
    try:
        with open(frame.file, "rb") as file:
            lines = file.read(_SOURCE_BYTES).split(b"\n")
    except (OSError, ValueError):
        return ""
    return lines[frame.line - 1].decode("utf-8", "replace").strip() if 0 < frame.line <= len(lines) else ""
