"""Which of the tracebacks in a process's output ended it. A traceback that was logged is not one that nothing caught.

torch's hook puts ``[rank3]: `` before every line of what nothing caught: that is certain. Else the place decides: what
Python prints of an exception that nothing caught begins at the script's ``<module>``, what a handler logs begins in the
function that caught it. Such a one ended the process only where the output ends soon after it ("except: log it, exit
with 1"). A process that prints the same lines as before after a traceback went on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from hpc_elastic.failures.failure_text import FailureText
from hpc_elastic.failures.last_lines import find_last_lines, goes_on, has_progress, speaking_lines
from hpc_elastic.failures.traceback_text import find_python_traceback, find_tracebacks, is_top_frame

_SOON = 5
"""So many speaking lines after a logged traceback a process may print before it ends for it."""
_LOOKED_AT = 100
"""Lines before and after a traceback that are compared."""
_SHUTDOWN_NS = 2_000_000_000
"""A process ends so soon after what nothing caught; a table or C++ logs that it prints then are no progress."""
_LOGGER = re.compile(r".{0,80}?\b(?:ERROR|CRITICAL|WARNING|INFO|DEBUG|EXCEPTION)\b")


def find_uncaught(
    text: str, lines: Sequence[str], *, exitcode: int, lived_ns: Callable[[FailureText], int | None] = lambda _: None
) -> FailureText | None:
    """Find the exception that ended a process, be it one of its threads' that the process ended for.

    Args:
        text: The output, cleaned.
        lines: The same, by lines.
        exitcode: Of the process.
        lived_ns: How long the process lived after it had printed one; None where that is not known.
    """
    tracebacks = find_tracebacks(text)
    found = find_ending(tracebacks, lines, exitcode=exitcode, lived_ns=lived_ns)
    if found is None:
        found = find_ending(find_tracebacks(text, threads=True), lines, exitcode=exitcode)
    if found is None and not tracebacks:
        found = find_python_traceback(text, cleaned=True)  # a script that can't be compiled
    return found


def find_ending(
    tracebacks: Sequence[FailureText],
    lines: Sequence[str],
    *,
    exitcode: int,
    lived_ns: Callable[[FailureText], int | None] = lambda _: None,
) -> FailureText | None:
    """Choose the traceback of the exception that ended a process.

    Args:
        tracebacks: All that were found, in the order of the output.
        lines: The output, cleaned.
        exitcode: Of the process; 1 is Python's own after an exception.
        lived_ns: As of `find_uncaught`.

    Returns:
        None where the process ended for another reason.
    """
    certain = [found for found in tracebacks if found.is_prefixed]
    if certain:
        return certain[-1]
    logged: FailureText | None = None
    for found in reversed(tracebacks):
        after = lines[found.exception_at + 1 : found.exception_at + 1 + _LOOKED_AT]
        if goes_on(lines[max(0, found.span[0] - _LOOKED_AT) : found.span[0]], after):
            break
        spoken = len(speaking_lines(after))
        if exitcode != 1 and has_progress(after) and not ended_soon(found, lived_ns(found)):
            break
        says_why = _says_why(lines[max(found.exception_at + 1, len(lines) - _LOOKED_AT) :])
        if reaches_top(found) and not (_is_logged(lines, found) and says_why and spoken > _SOON):
            return found
        if spoken > _SOON and (exitcode != 1 or says_why):
            break
        logged = logged or found
    return logged


def ended_soon(found: FailureText, lived_ns: int | None) -> bool:
    """Whether nothing caught it and the process ended soon after, whatever it printed meanwhile."""
    return found.is_prefixed or (reaches_top(found) and lived_ns is not None and lived_ns <= _SHUTDOWN_NS)


def went_on(found: FailureText, lines: Sequence[str], lived_ns: int | None = None) -> bool:
    """Whether a process went on with its work after it had printed a traceback."""
    if found.is_prefixed:
        return False
    after = lines[found.exception_at + 1 : found.exception_at + 1 + _LOOKED_AT]
    return (has_progress(after) and not ended_soon(found, lived_ns)) or goes_on(
        lines[max(0, found.span[0] - _LOOKED_AT) : found.span[0]], after
    )


def reaches_top(found: FailureText) -> bool:
    """Whether it went all the way up: nothing in the script caught it."""
    return not found.frames or is_top_frame(found.frames[0])


def _is_logged(lines: Sequence[str], found: FailureText) -> bool:
    """Whether a logger's line stands right before it."""
    return found.span[0] > 0 and _LOGGER.match(lines[found.span[0] - 1]) is not None


def _says_why(after: Sequence[str]) -> bool:
    last = find_last_lines(after)
    return last is not None and last.is_telling
