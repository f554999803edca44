"""What stands behind an exception that only reports the end of something else: a child process, a launcher, a worker.

``CalledProcessError: … returned non-zero exit status 1`` has its cause in what the child printed before it; what a
process logged just before an exception that the script raised may be why it raised it (``raise RuntimeError("giving
up")``).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from hpc_elastic.failures.failure_text import FailureText, RaisedException
from hpc_elastic.failures.last_lines import find_last_lines, has_progress, speaking_lines
from hpc_elastic.failures.origin import explain, explain_chain, explain_text, find_origin, is_raised_by_script
from hpc_elastic.failures.patterns import KERNEL_CHECK, FailurePattern
from hpc_elastic.failures.ranking import FailureClass
from hpc_elastic.failures.traceback_text import find_tracebacks

_WAITING = frozenset({"Empty", "TimeoutError", "CancelledError", "BrokenBarrierError", "InvalidStateError"})
"""What a thread raises for which another one's result did not come."""
_WRAPPERS = (
    r"(?:CalledProcessError|ChildFailedError|ProcessExitedException|BrokenProcessPool|SubprocessError|ExecutionError"
    r"|TerminatedWorkerError)\Z"
)
_WORKER_GONE = r"DataLoader worker \(pid.*?(?:exited unexpectedly|is killed by signal)"
_LOOKED_BACK = 400
"""Lines before its traceback in which a child's output may stand."""
_CHILD_LINES = 60
"""So many speaking lines may stand between a child's traceback and that of its parent."""
_NEAR = 8
"""So many speaking lines before its traceback the process may have logged what led to it."""
_DEEPEST = 4


def find_wrapped(found: FailureText, lines: Sequence[str]) -> RaisedException | None:
    """Find what an exception hides: what its child printed, or what was logged just before.

    Args:
        found: The exception that ended the process, with its place in `lines`.
        lines: The output, cleaned.

    Returns:
        The exception, or a line that stands for one (then without a type); None where nothing was printed.
    """
    before = lines[max(0, found.span[0] - _LOOKED_BACK) : found.span[0]]
    if not before or not found.exception_type:
        return None
    if is_wrapper(found.chain[0]) or is_wrapper(found.chain[-1]):
        return _of_child(before)
    text, last = "\n".join(before), found.chain[0]
    logged = next((one for one in reversed(find_tracebacks(text)) if _is_near(one, before)), None)
    row = explain_chain(logged.chain) if logged is not None else None
    if logged is not None and row is not None and row.failure_class is FailureClass.SYMPTOM:
        return find_origin(logged.chain)  # what fails in the cleanup after a lost connection follows from that
    known = [row for raised in found.chain if (row := explain(raised)) is not None]
    waits = last.exception_type.rsplit(".", 1)[-1] in _WAITING
    if waits or (is_raised_by_script(last) and not known):
        threads = (one for one in reversed(find_tracebacks(text, threads=True)) if _is_near(one, before))
        headlines = {raised.headline for raised in found.chain}
        for one in filter(None, (next(threads, None), None if waits else logged)):
            if one.chain[0].headline not in headlines:
                return one.chain[0]
    near = [line for _, line in speaking_lines(before)[-_NEAR:]]
    for line in reversed(near):
        row = None if waits or (not known and not is_raised_by_script(last)) else explain_text(line)
        if row is not None and (not known or known[0] is row is KERNEL_CHECK or _is_local(row, line, known[0])):
            return RaisedException(exception_type="", message=line.strip())
    return None


def _is_local(row: FailurePattern, line: str, known: FailurePattern) -> bool:
    """Whether NCCL had warned of a failure on this node, and its exception does not show that."""
    return " NCCL WARN " in line and FailureClass.SYMPTOM is known.failure_class is not row.failure_class


def _is_near(found: FailureText, before: Sequence[str]) -> bool:
    """Whether a traceback was printed a few lines before the end of `before`, with no progress between."""
    after = before[found.exception_at + 1 :]
    return len(speaking_lines(after)) <= _NEAR and not has_progress(after)


def is_wrapper(raised: RaisedException) -> bool:
    """Whether it says no more than that something else has failed."""
    name = raised.exception_type.rsplit(".", 1)[-1]
    return re.match(_WRAPPERS, name) is not None or re.match(_WORKER_GONE, raised.message) is not None


def _of_child(before: Sequence[str]) -> RaisedException | None:
    for _ in range(_DEEPEST):
        tracebacks = find_tracebacks("\n".join(before))
        if not tracebacks or len(speaking_lines(before[tracebacks[-1].span[1] :])) > _CHILD_LINES:
            break
        if not is_wrapper(tracebacks[-1].chain[0]):
            return tracebacks[-1].chain[0]
        before = before[: tracebacks[-1].span[0]]
    last = find_last_lines(before)
    return RaisedException(exception_type="", message=last.text) if last is not None and last.is_telling else None
