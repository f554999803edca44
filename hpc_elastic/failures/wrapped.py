"""What stands behind an exception that only reports the end of something else: a child process, a launcher, a worker.

``CalledProcessError: … returned non-zero exit status 1`` has its cause in what the child printed before it; what a
process logged just before an exception that the script raised may be why it raised it (``raise RuntimeError("giving
up")``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from hpc_elastic.failures.failure_text import FailureText, RaisedException
from hpc_elastic.failures.fingerprint import user_frames
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
_READS = r"(?i)\b\w*(?:load|read|restore|resume|open)\w*\("
"""A line of code that reads a file."""
_LITERAL = r"""["']([^"'\n]*[^"'\n/.]\.[A-Za-z]\w{0,11}|[^"'\n]*\w/\w[^"'\n]*)["']"""
"""A text in code that may be a file's name, fields of an f-string included."""
_PATH = (
    r"""(?:(?:~|\.{0,2})/[\w./@+=-]*\w|(?:[\w@+=-]+/)+[\w.@+=-]*\.(?!\d)\w{1,11}|["'][\w./@+=-]+\.(?!\d)\w{1,11}["'])"""
)
_PRINTED_PATH = rf"(?:(?<=[\s=:(\['\"])|\A){_PATH}"
_ABOVE = 40
"""Lines of the script in which a name of the line that reads may get its value."""


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
    logged = next((one for one in reversed(find_tracebacks(text)) if is_near(one, before)), None)
    row = explain_chain(logged.chain) if logged is not None else None
    if logged is not None and row is not None and row.failure_class is FailureClass.SYMPTOM:
        return find_origin(logged.chain)  # what fails in the cleanup after a lost connection follows from that
    known = [row for raised in found.chain if (row := explain(raised)) is not None]
    waits = last.exception_type.rsplit(".", 1)[-1] in _WAITING
    if waits or (is_raised_by_script(last) and not known):
        threads = (one for one in reversed(find_tracebacks(text, threads=True)) if is_near(one, before))
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


def is_near(found: FailureText, before: Sequence[str]) -> bool:
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


def find_file_read(found: FailureText, lines: Sequence[str], read_script: Callable[[str], Sequence[str]]) -> str:
    """Name the file in whose reading an exception was raised, where its message names none.

    The line of the script that reads names it, else an earlier line that sets a name which stands there, else what
    the process printed last before its traceback.

    Args:
        found: The exception, with its place in `lines`.
        lines: The output, cleaned.
        read_script: Gives a file's lines; none where it can't be read.

    Returns:
        The file, as the code or the output has it; empty where the exception is of no reading.
    """
    frames = user_frames(found.frames)
    if not frames or not found.exception_type or re.search(_PRINTED_PATH, found.message.split("\n", 1)[0]):
        return ""
    code = found.text.split("\n")
    places = {line.strip(): code[at + 1].strip() for at, line in enumerate(code[:-1]) if line.startswith('  File "')}
    calls = [places.get(f'File "{one.file}", line {one.line}, in {one.function}', "") for one in frames]
    is_own = frames[-1] is found.frames[-1] and is_raised_by_script(found.chain[0])
    if is_own or not re.search(_READS, calls[-1]):
        return ""
    for frame, call in zip(reversed(frames), reversed(calls), strict=True):
        if literal := re.search(_LITERAL, call):
            return literal[1]
        names = "|".join(re.findall(r"[A-Za-z_]\w*", call)) or "-"
        for line in reversed(read_script(frame.file)[max(0, frame.line - 1 - _ABOVE) : frame.line - 1]):
            is_set = re.search(rf"\b(?:{names})\s*=[^=]|\bas\s+(?:{names})\s*:", line)
            if is_set and (literal := re.search(_LITERAL, line)):
                return literal[1]
    for _, line in reversed(speaking_lines(lines[max(0, found.span[0] - _LOOKED_BACK) : found.span[0]])[-_NEAR:]):
        if printed := re.findall(_PRINTED_PATH, line):
            return str(printed[-1]).strip("'\"")
    return ""
