"""The line of an exception's message that says what happened. Pure.

It need not be the first: ``ProcessRaisedException`` begins with blank lines, ``Error(s) in loading state_dict for
Net:`` goes on below, and what a DataLoader's worker raised is quoted with its whole traceback.
"""

from __future__ import annotations

_HEADER = "Traceback (most recent call last):"
_MOST_JOINED = 4


def summary_line(message: str) -> str:
    """One line.

    Args:
        message: With or without the exception's type before it.
    """
    first, more, rest = message.partition("\n")
    if not more:
        return message
    if first.strip() and not first.rstrip().endswith(":") and _HEADER not in rest:
        return first
    return _joined(message.split("\n"))


def _joined(lines: list[str]) -> str:
    said = [line.strip() for line in lines if line.strip()]
    if not said:
        return ""
    words = said[0]
    for line in said[1:_MOST_JOINED]:
        if not words.endswith(":") or line.endswith(_HEADER):
            break
        words += f" {line}"
    quoted = _quoted(lines)
    if not quoted:
        return words
    return f"{words} {quoted}" if words.endswith(":") else f"{words} ({quoted})"


def _quoted(lines: list[str]) -> str:
    """The last line of the last traceback in it: ``ValueError: bad batch 17``."""
    starts = [at for at, line in enumerate(lines) if at and line.endswith(_HEADER)]
    if not starts:
        return ""
    return next((line.strip() for line in lines[starts[-1] + 1 :] if line.strip() and not line[0].isspace()), "")
