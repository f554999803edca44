"""What is left of a hung round: each worker's stacks in its stacks.txt, and the failure of those that hung."""

from __future__ import annotations

from pathlib import Path

from hpc_elastic.atomic_file import write_private
from hpc_elastic.failures.classify import Category, FailureClass
from hpc_elastic.failures.evidence import ExitFacts, describe_failure, write_evidence
from hpc_elastic.failures.fingerprint import fingerprint
from hpc_elastic.failures.stacks import (
    DUMP_LIMIT,
    ProcessState,
    StackDump,
    describe_stack,
    find_dump,
    short_stack,
)
from hpc_elastic.failures.traceback_text import TEXT_LIMIT, cut_middle
from hpc_elastic.failures.worker_failure import EvidenceSource, WorkerFailure
from hpc_elastic.light_dataclass import dataclass, replace
from hpc_elastic.log_pieces import EndReader
from hpc_elastic.run_paths import RankPaths

HANG_FINGERPRINT = "hang:"
"""What every hang's fingerprint begins with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HungWorker:
    """What is known of one worker of a hung round when it has ended."""

    facts: ExitFacts
    paths: RankPaths
    state: ProcessState | None
    """Before it was touched; None: it had ended by itself."""
    py_spy: str
    why: str
    """Why it counts as hung; empty: it only waited."""


def read_stacks(worker: HungWorker) -> StackDump | None:
    """Find its dump in what it printed, and write stacks.txt. Reads and writes files; raises nothing."""
    dump = find_dump(_tail(worker.paths.stderr))
    try:
        write_private(worker.paths.stacks, stacks_text(worker, dump))
    except OSError:
        pass  # a full disk: the event has the main thread's
    return dump


def stacks_text(worker: HungWorker, dump: StackDump | None) -> str:
    """The contents of stacks.txt."""
    facts = worker.facts
    lines = [f"rank {facts.global_rank} on {facts.host}, pid {worker.state.pid if worker.state else facts.pid}"]
    lines.append(worker.why or "it gave signs of life; others hung")
    if worker.state is not None:
        lines.append(f"before it was ended: {worker.state.describe()}")
        lines += [f"  thread {thread}" for thread in worker.state.threads]
    lines.append("")
    if dump is not None:
        lines.append(dump.text)
    else:
        lines.append("no Python stack: it did not answer SIGABRT with one (not Python, stuck in the kernel, or it had")
        lines.append("ended; PYTHONFAULTHANDLER=1 is needed)")
    if worker.py_spy:
        lines += ["", "py-spy:", worker.py_spy]
    return "\n".join(lines) + "\n"


def describe_hang(worker: HungWorker, dump: StackDump | None, *, told_ns: int) -> WorkerFailure:
    """The failure of a worker that hung, written to its error.json.

    Args:
        worker: It.
        dump: Its stacks.
        told_ns: Its last sign of life by this host's wall clock: that is when it failed.
    """
    facts = replace(worker.facts, stopped_by_agent=False)
    found = describe_failure(facts=facts, error_file=worker.paths.error_file, stderr_log=worker.paths.stderr)
    if found.source is EvidenceSource.ERROR_FILE:
        # It had failed, told so, and then did not end.
        failure = replace(found, reason=f"{found.reason}; then it did not end: {worker.why}")
    else:
        frames = dump.main if dump is not None else ()
        stopped = worker.state is not None and worker.state.is_stopped
        failure = replace(
            found,
            ended_ns=told_ns,
            ended_uptime_ns=max(0, found.ended_uptime_ns - (found.ended_ns - told_ns)),
            message=f"hang: {worker.why}",
            exception_type="",
            traceback=cut_middle(describe_stack(frames), TEXT_LIMIT),
            # Who stops a process from outside is no bug in the script.
            fingerprint="" if stopped else hang_fingerprint(dump),
            category=Category.WORKER,
            failure_class=FailureClass.HANG,
            reason=_reason(worker, dump),
            retryable=True,
            source=EvidenceSource.STDERR if dump is not None else EvidenceSource.EXIT,
            problem="",
        )
    write_evidence(failure, worker.paths.error_file)
    return failure


def hang_fingerprint(dump: StackDump | None) -> str:
    """Equal for two hangs at the same place."""
    frames = dump.main if dump is not None else ()
    return HANG_FINGERPRINT + fingerprint(exception_type="Hang", frames=frames).partition(":")[2]


def stack_of(dump: StackDump | None) -> tuple[str, ...]:
    """The main thread's stack for an event; empty where there is none."""
    return tuple(short_stack(dump.main)) if dump is not None else ()


def _reason(worker: HungWorker, dump: StackDump | None) -> str:
    state = worker.state
    if state is not None and state.is_stopped:
        return "it was stopped from outside (SIGSTOP, or a debugger), not by this job's agent; ended for that"
    if state is not None and state.is_uninterruptible:
        return "it sat in an uninterruptible system call (a hung mount or device?); ended for that"
    if dump is None:
        return "it gave no sign of life, and no stack when it was asked; ended for that"
    return "it gave no sign of life; ended for that, after all ranks' stacks were taken (stacks.txt)"


def _tail(path: Path) -> str:
    try:
        with EndReader(path) as file:
            return file.read(DUMP_LIMIT).decode("utf-8", "replace")
    except OSError:
        return ""
