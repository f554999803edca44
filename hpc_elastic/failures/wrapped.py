"""What stands behind an exception that only reports the end of something else: a child process, a launcher, a worker.

``CalledProcessError: … returned non-zero exit status 1`` has its cause in what the child printed before it; so has the
RuntimeError into which a script turned another one (``raise RuntimeError("step failed") from None``).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from hpc_elastic.failures.last_lines import find_last_lines, speaking_lines
from hpc_elastic.failures.origin import explain, explain_chain, explain_text, find_origin, is_raised_by_script
from hpc_elastic.failures.ranking import FailureClass
from hpc_elastic.failures.traceback_text import FailureText, RaisedException, find_tracebacks

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
"""So many speaking lines before its traceback the script may have printed what it hides."""
_SOON = 3
"""The same for a traceback that it hides."""
_DEEPEST = 4
_GENERAL = frozenset({"RuntimeError", "Exception", "SystemExit", "OSError", "SubprocessError", "AssertionError"})
_WAITING = frozenset({"Empty", "TimeoutError", "CancelledError", "BrokenBarrierError", "InvalidStateError"})
"""What a thread raises for which another one's result did not come."""
_FAILED = r"(?i)fail|error|abort|crash|could not|unable|died|exit|return|ended with|terminated|gone"

_LACKS = r"(?i)\b(?:no|not|never|nothing|without|missing|lost|empty)\b|n't\b"
"""What a thread should have done: ``the checkpoint of step 100 was not written``."""


def find_wrapped(found: FailureText, lines: Sequence[str]) -> RaisedException | None:
    """Find what an exception hides.

    Args:
        found: The exception that ended the process, with its place in `lines`.
        lines: The output, cleaned.

    Returns:
        The exception of the child, or a line that it printed (then without a type); None where nothing is hidden, or
        nothing of it was printed.
    """
    before = lines[max(0, found.span[0] - _LOOKED_BACK) : found.span[0]]
    if not before or not found.exception_type:
        return None
    if is_wrapper(found) or _is_wrapper(found.chain[-1]):
        return _of_child(before)
    last = found.chain[0]
    if (lost := _symptom_before(before)) is not None:
        return lost
    if _waits(last):
        return _of_thread(before)
    if not _is_general(last) or any(explain(raised) is not None for raised in found.chain):
        return None
    # Which other exception the script may have coped with: any that was printed, or one that ended a thread.
    has_failed = re.search(_FAILED, last.message) is not None
    for threads in (True, False) if has_failed else (True,) if re.search(_LACKS, last.message) else ():
        for earlier in find_tracebacks("\n".join(before), threads=threads):
            if len(speaking_lines(before[earlier.exception_at + 1 :])) <= _SOON:
                return earlier.chain[0]
    if not has_failed:
        return None
    near = [line for _, line in speaking_lines(before)[-_NEAR:]]
    for line in reversed(near):
        if explain_text(line) is not None:
            return RaisedException(exception_type="", message=line.strip())
    return None


def _symptom_before(before: Sequence[str]) -> RaisedException | None:
    """A lost connection that the script logged right before: what then fails in its cleanup follows from that."""
    tracebacks = find_tracebacks("\n".join(before))
    if not tracebacks or len(speaking_lines(before[tracebacks[-1].exception_at + 1 :])) > _SOON:
        return None
    row = explain_chain(tracebacks[-1].chain)
    return find_origin(tracebacks[-1].chain) if row is not None and row.failure_class is FailureClass.SYMPTOM else None


def _is_general(raised: RaisedException) -> bool:
    """Whether the script may have raised it in place of something else: ``RuntimeError("preprocessing failed")``."""
    return raised.exception_type.rsplit(".", 1)[-1] in _GENERAL and is_raised_by_script(raised)


def _waits(raised: RaisedException) -> bool:
    return raised.exception_type.rsplit(".", 1)[-1] in _WAITING


def _of_thread(before: Sequence[str]) -> RaisedException | None:
    """A thread's exception, printed before that of the main thread, which waited for it."""
    threads = find_tracebacks("\n".join(before), threads=True)
    if not threads or len(speaking_lines(before[threads[-1].exception_at + 1 :])) > _NEAR:
        return None
    return threads[-1].chain[0]


def is_wrapper(found: FailureText) -> bool:
    """Whether it says no more than that something else has failed."""
    return bool(found.chain) and _is_wrapper(found.chain[0])


def _is_wrapper(raised: RaisedException) -> bool:
    name = raised.exception_type.rsplit(".", 1)[-1]
    return re.match(_WRAPPERS, name) is not None or re.match(_WORKER_GONE, raised.message) is not None


def _of_child(before: Sequence[str]) -> RaisedException | None:
    for _ in range(_DEEPEST):
        tracebacks = find_tracebacks("\n".join(before))
        if not tracebacks or len(speaking_lines(before[tracebacks[-1].span[1] :])) > _CHILD_LINES:
            break
        if not is_wrapper(tracebacks[-1]):
            return tracebacks[-1].chain[0]
        before = before[: tracebacks[-1].span[0]]
    last = find_last_lines(before)
    return RaisedException(exception_type="", message=last.text) if last is not None and last.is_telling else None
