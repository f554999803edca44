"""A failure's message in one line."""

from __future__ import annotations

import re

from hpc_elastic.base.text import cut_end

HEADER = "Traceback (most recent call last):"
_MOST_JOINED = 4
_LIMIT = 1000
_CONTINUES = re.compile(r"Traceback \(most recent call last\):|\A: |^  File \".*\", line \d+, in ", re.MULTILINE)
"""A message whose cause stands below its first line: a traceback, with or without its header, or Py4J's exception."""
# In a message: torch's loader ("Original "), torch.distributed.checkpoint ("(RANK 1)").
QUOTED_HEADER = re.compile(r"\s*(?:Original )?Traceback \(most recent call last\):(?: \(RANK (\d+)\))?\s*\Z")


def summary_line(message: str) -> str:
    """One line of at most a thousand characters.

    Args:
        message: With or without the exception's type before it.
    """
    first, more, rest = message.partition("\n")
    if not more or (first.strip() and not first.rstrip().endswith(":") and not _CONTINUES.search(rest)):
        return cut_end(first, _LIMIT)
    return cut_end(_joined(message.split("\n")), _LIMIT)


def _joined(lines: list[str]) -> str:
    said = [line.strip() for line in lines if line.strip()]
    if not said:
        return ""
    words = said[0]
    for line in said[1:_MOST_JOINED]:
        if line.startswith(": "):
            words = words.rstrip(".") + line
        elif words.endswith(":") and not line.endswith(HEADER):
            words += f" {line}"
        else:
            break
    quoted = _quoted(lines)
    if not quoted:
        return words
    return f"{words} {quoted}" if words.endswith(":") else f"{words} ({quoted})"


def _quoted(lines: list[str]) -> str:
    """The last line of a traceback in it: ``ValueError: bad batch 17``. Of several ranks' ones the first counts."""
    starts = [at for at, line in enumerate(lines) if at and QUOTED_HEADER.match(line)]
    if not starts:  # Ray's have no header
        starts = [at for at, line in enumerate(lines) if at and line.startswith('  File "')]
    if not starts:
        return ""
    start = starts[0] if lines[starts[0]].endswith(")") else starts[-1]
    return next((line.strip() for line in lines[start + 1 :] if line.strip() and not line[0].isspace()), "")
