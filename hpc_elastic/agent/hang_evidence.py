"""What is left of a hung round: each worker's stacks in its stacks.txt, and the failure of those that hung."""

from __future__ import annotations

from pathlib import Path

from hpc_elastic.agent.hang import HANG_FINGERPRINT, KERNEL_FINGERPRINT, STOPPED_FINGERPRINT
from hpc_elastic.atomic_file import write_private
from hpc_elastic.failures.classify import Category, FailureClass
from hpc_elastic.failures.evidence import ExitFacts, describe_failure, write_evidence
from hpc_elastic.failures.fingerprint import fingerprint
from hpc_elastic.failures.process_state import ProcessState
from hpc_elastic.failures.stacks import (
    DUMP_LIMIT,
    RankStacks,
    StackDump,
    describe_stack,
    find_dump,
    find_py_spy,
    stacks_of,
)
from hpc_elastic.failures.traceback_text import TEXT_LIMIT, cut_middle
from hpc_elastic.failures.worker_failure import EvidenceSource, WorkerFailure
from hpc_elastic.light_dataclasses import dataclass, replace
from hpc_elastic.log_pieces import EndReader
from hpc_elastic.run_paths import RankPaths


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
    """Find its dump in what it printed, or in what py-spy said, and write stacks.txt. Raises nothing."""
    dump = find_dump(_tail(worker.paths.stderr)) or find_py_spy(worker.py_spy)
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
        lines += [f"  thread {thread.pid} {thread.name}: {thread.describe()}" for thread in worker.state.threads]
        lines += [f"  child {child.pid} {child.name}: {child.describe()}" for child in worker.state.children]
    lines.append("")
    if dump is not None and dump.text != worker.py_spy:
        lines.append(dump.text)
    else:
        lines.append("no stack of its own: it did not answer SIGABRT with one (not Python, stuck in the kernel, or it")
        lines.append("had ended; PYTHONFAULTHANDLER=1 is needed)")
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
        failure = replace(
            found,
            ended_ns=told_ns,
            ended_uptime_ns=max(0, found.ended_uptime_ns - (found.ended_ns - told_ns)),
            message=f"hang: {worker.why}",
            exception_type="",
            traceback=cut_middle(describe_stack(frames), TEXT_LIMIT),
            fingerprint=hang_fingerprint(worker.state, dump),
            category=Category.INFRASTRUCTURE if _is_stuck(worker.state, dump) else Category.WORKER,
            failure_class=FailureClass.HANG,
            reason=_reason(worker, dump),
            retryable=True,
            source=EvidenceSource.STDERR if dump is not None else EvidenceSource.EXIT,
            problem="",
        )
    write_evidence(failure, worker.paths.error_file)
    return failure


def hang_fingerprint(state: ProcessState | None, dump: StackDump | None) -> str:
    """Equal for two hangs at the same place, or for the same reason from outside the script."""
    if state is not None and state.is_stopped:
        return STOPPED_FINGERPRINT
    if _is_stuck(state, dump):
        return KERNEL_FINGERPRINT
    frames = dump.main if dump is not None else ()
    return HANG_FINGERPRINT + fingerprint(exception_type="Hang", frames=frames).partition(":")[2]


def rank_stacks(worker: HungWorker, dump: StackDump | None) -> RankStacks:
    """For an event: its stacks, or where the kernel had it."""
    return stacks_of(dump, where=worker.state.whereabouts() if worker.state is not None else "")


def _is_stuck(state: ProcessState | None, dump: StackDump | None) -> bool:
    """Whether it sat in the kernel: who prints its stack itself did so for a moment only."""
    return state is not None and state.is_uninterruptible and (dump is None or not dump.text.startswith("Fatal"))


def _reason(worker: HungWorker, dump: StackDump | None) -> str:
    state = worker.state
    if state is not None and state.is_stopped:
        return "it was stopped from outside (SIGSTOP, or a debugger), not by this job's agent; ended for that"
    if state is not None and _is_stuck(state, dump):
        if (child := state.hung_child) is not None:
            return (
                f"it waited for its child {child.pid} to begin its program, which sat in {child.describe()} "
                "(a program on a hung mount?); ended for that"
            )
        where = state.threads[0].describe() if state.threads else state.state
        return f"it sat in an uninterruptible system call (a hung mount or device?): {where}; ended for that"
    if dump is None:
        return "it gave no sign of life, and no stack when it was asked; ended for that"
    return "it gave no sign of life; ended for that, after all ranks' stacks were taken (stacks.txt)"


def _tail(path: Path) -> str:
    try:
        with EndReader(path) as file:
            return file.read(DUMP_LIMIT).decode("utf-8", "replace")
    except OSError:
        return ""
