"""A size that was asked for, against what the node or the GPU has: too large a request is a bug, and no full memory."""

from __future__ import annotations

import re

from hpc_elastic.failures.patterns import MEMORY_FULL, FailurePattern
from hpc_elastic.failures.ranking import FailureClass

_ASKED = re.compile(
    r"tried to allocate (\d+)( )bytes|(?:tried|unable) to allocate ([\d.]+) ?([KMGTPE]i?B)\b", re.IGNORECASE
)
_GPU_HAS = re.compile(r"total capacity of ([\d.]+) ?([KMGTPE]i?B)\b")
_POWER = {letter: 10 * at for at, letter in enumerate("KMGTPE", 1)}


def asked_bytes(text: str) -> int | None:
    """How much memory an exception's text asks for; None where it gives no size."""
    match = _ASKED.search(text)
    if match is None:
        return None
    return int(match[1]) if match[1] else _bytes(match[3], match[4])


def judge_size(text: str, *, node_bytes: int) -> FailurePattern | None:
    """Whether a text asks for more memory than there is at all.

    Args:
        text: An exception's text: of torch's allocators, numpy.
        node_bytes: The node's memory; 0 for not known. A GPU's is in the text.

    Returns:
        What it means; None where the size could be had, or is not known.
    """
    asked = asked_bytes(text)
    if asked is None:
        return None
    gpu = _GPU_HAS.search(text)
    has, whose = (_bytes(gpu[1], gpu[2]), "the whole GPU") if gpu is not None else (node_bytes, "the whole node")
    if not has or asked <= has:
        return None
    return FailurePattern(
        FailureClass.ROOT, f"one allocation of {size_text(asked)}, and {whose} has {size_text(has)}: a wrong size", ()
    )


def limit_of_process(text: str, row: FailurePattern, *, overcommits: bool) -> FailurePattern:
    """What a failed allocation means where its size is known: the kernel gives what the node has, full or not.

    Args:
        text: As of `judge_size`, which finds the size to be none that the node can't have.
        row: What the text means by itself; returned where no limit of the process shows.
        overcommits: Whether the kernel does (`host_facts.overcommits_memory`).
    """
    asked = asked_bytes(text) if overcommits and row is MEMORY_FULL else None
    if asked is None:
        return row
    return FailurePattern(
        FailureClass.ROOT, f"an allocation of {size_text(asked)} was refused: a limit of the process (ulimit -v)", ()
    )


def size_text(count: int) -> str:
    """``36.4 TiB``."""
    value, unit = float(count), "B"
    for letter in "KMGTPE":
        if value < 1024:
            break
        value, unit = value / 1024, f"{letter}iB"
    return f"{value:.1f} {unit}" if unit != "B" else f"{count} B"


def _bytes(number: str, unit: str) -> int:
    return int(float(number.rstrip(".")) * (1 << _POWER[unit[0].upper()]))
