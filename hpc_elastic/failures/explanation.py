"""Which part of a worker's output explains its end: an exception, a crash's dump, or the lines that were printed last.

Pure functions over text. A caught exception that was logged hours ago explains nothing (`failures.uncaught`).
"""

from __future__ import annotations

import signal
from collections.abc import Callable

from msgspec.structs import replace

from hpc_elastic.failures.classify import signal_of
from hpc_elastic.failures.crash_text import find_cpp_terminate, find_fatal_error
from hpc_elastic.failures.decorated import read_json_line
from hpc_elastic.failures.failure_text import FailureText, TextKind
from hpc_elastic.failures.last_lines import LastLines, find_last_lines
from hpc_elastic.failures.origin import is_in_collective
from hpc_elastic.failures.traceback_text import find_cut_off, find_python_traceback, find_tracebacks
from hpc_elastic.failures.uncaught import ended_soon, find_uncaught, went_on
from hpc_elastic.failures.worker_failure import EvidenceSource, WorkerFailure

_CLOSE = 40
"""A traceback with more lines than this after it did not end a process that ended otherwise than by an exception."""
_RIGHT_BEFORE_NS = 500_000_000
"""A process prints so shortly before it sends itself a signal why it does."""
_SAID_BEFORE = 30
"""Lines before a dump or a KeyboardInterrupt in which the reason may stand."""


def find_explanation(
    facts: WorkerFailure,
    stderr: str,
    read_stdout: Callable[[], str],
    lived_ns: Callable[[FailureText], int | None] = lambda _: None,
) -> tuple[FailureText | None, EvidenceSource, str]:
    """Find what explains the end in stderr, else in stdout (``2>&1 | tee log``).

    Args:
        facts: How it ended.
        stderr: The end of it, cleaned.
        read_stdout: Gives the end of stdout, cleaned; called where stderr says nothing.
        lived_ns: How long it lived after it had printed a traceback on stderr; None where that is not known.

    Returns:
        What explains it, None where nothing does; where it was found; the text that it stands in.
    """
    found = _find_in_text(facts, stderr, lived_ns)
    number = signal_of(facts.exitcode)
    if found is not None or number == signal.SIGKILL or (number == signal.SIGTERM and facts.stopped_by_agent):
        return found, EvidenceSource.STDERR, stderr
    said = find_last_lines(stderr.split("\n"))
    if number == signal.SIGTERM:  # a thread of its own may have sent it, and then printed why
        found = _from_lines(facts, said, stderr.split("\n"))
        lived = lived_ns(found) if found is not None else None
        is_near = found is not None and lived is not None and lived <= _RIGHT_BEFORE_NS
        is_reason = is_near or (found is not None and lived is None and found.kind is TextKind.LINES)
        return found if is_reason else None, EvidenceSource.STDERR, stderr
    if said is None or not said.is_telling:
        stdout = read_stdout()
        found = _find_in_text(facts, stdout, lambda _: None)
        if found is not None:
            return found, EvidenceSource.STDOUT, stdout
        printed = find_last_lines(stdout.split("\n"))
        if printed is not None and (printed.is_telling or said is None):
            return _from_lines(facts, printed, stdout.split("\n")), EvidenceSource.STDOUT, stdout
    return _from_lines(facts, said, stderr.split("\n")), EvidenceSource.STDERR, stderr


def _from_lines(facts: WorkerFailure, said: LastLines | None, lines: list[str]) -> FailureText | None:
    """What a process without an exception printed last. Of one that crashed a line counts only where it tells why."""
    if said is None or (signal_of(facts.exitcode) not in (0, signal.SIGTERM) and not said.is_telling):
        return None
    traceback, logged = read_json_line(lines[said.at])
    span = (said.at, said.at + 1)
    if traceback and (found := find_python_traceback(traceback)) is not None:
        return replace(found, span=span, exception_at=said.at)
    return FailureText(
        kind=TextKind.LINES if said.is_telling else TextKind.LAST_LINE,
        text="",
        exception_type="",
        message=logged or said.text,
        span=span,
    )


def _find_in_text(facts: WorkerFailure, text: str, lived_ns: Callable[[FailureText], int | None]) -> FailureText | None:
    """Choose what in the end of the output explains *this* end: a caught exception that was logged hours ago does not.

    Args:
        facts: How it ended.
        text: Cleaned.
        lived_ns: As of `find_explanation`.
    """
    number = signal_of(facts.exitcode)
    lines = text.split("\n")
    if not number:
        ending = find_uncaught(text, lines, exitcode=facts.exitcode, lived_ns=lived_ns)
        return ending or find_cpp_terminate(text, cleaned=True)
    if number == signal.SIGINT and not facts.stopped_by_agent:
        return _interrupted(text, lines)
    python = find_python_traceback(text, cleaned=True)
    if number in (2, 9, 15):
        # It was hanging in its shutdown after the exception, and was ended: by its agent, or by a person.
        if not facts.stopped_by_agent:
            return None
        begun = find_cut_off(text)
        if begun is not None:  # a victim's would say so only in the lines that are missing
            return None if is_in_collective(begun.chain[0]) else begun
        if python is None or python.lines_after > _CLOSE:
            return None
        return None if went_on(python, lines) else python
    fatal, cpp = find_fatal_error(text, cleaned=True), find_cpp_terminate(text, cleaned=True)
    dumped = max((one.span[1] - one.span[0] for one in (fatal, cpp) if one is not None), default=0)
    lived = lived_ns(python) if python is not None else None
    is_close = python is not None and (python.lines_after <= _CLOSE + dumped or ended_soon(python, lived))
    if python is not None and is_close and not went_on(python, lines, lived):
        return python  # a crash while an exception unwinds: the exception is what one wants to know
    if cpp is not None:
        frames = fatal.frames if fatal is not None else cpp.frames
        start = min(cpp.span[0], fatal.span[0]) if fatal is not None else cpp.span[0]
        return replace(cpp, frames=frames, span=(start, cpp.span[1]))
    if fatal is None:
        return None
    said = find_last_lines(lines[max(0, fatal.span[0] - _SAID_BEFORE) : fatal.span[0]])
    # "free(): invalid pointer" stands before the dump of the fault handler.
    return replace(fatal, message=f"{said.text}\n{fatal.message}") if said is not None and said.is_telling else fatal


def _interrupted(text: str, lines: list[str]) -> FailureText | None:
    """What explains a KeyboardInterrupt, which ``_thread.interrupt_main()`` raises too: something led to that."""
    tracebacks = find_tracebacks(text)
    last = tracebacks[-1] if tracebacks else None
    if last is None or last.exception_type != "KeyboardInterrupt" or last.lines_after > _CLOSE:
        return None
    for earlier in reversed([*tracebacks[:-1], *find_tracebacks(text, threads=True)]):
        if earlier.lines_after <= last.lines_after + _CLOSE + last.span[1] - last.span[0]:
            return earlier
    said = find_last_lines(lines[max(0, last.span[0] - _SAID_BEFORE) : last.span[0]])
    return replace(last, message=said.text) if said is not None and said.is_telling else last
