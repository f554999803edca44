"""Slurm's counted strings: ``4(x2),1`` tasks, ``gpu:a100:4(S:0-1)`` GRES, ``0,1`` or ``GPU-…`` device lists."""

from __future__ import annotations

import re

from hpc_elastic.lazy_pattern import pattern

MAX_ITEMS = 1 << 17
_COUNTED = pattern(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?\Z")
_PARENTHESES = pattern(r"\([^()]*\)")


def expand_counts(text: str) -> tuple[int, ...]:
    """``4(x2),1`` → ``(4, 4, 1)``: one number per node, in node order.

    Raises:
        ValueError: with what is wrong, without the text.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = _COUNTED.match(part)
        if match is None:
            raise ValueError("is not of the form 4(x2),1")
        repeat = int(match.group(2) or 1)
        if repeat < 1 or len(counts) + repeat > MAX_ITEMS:
            raise ValueError(f"counts no node, or more than {MAX_ITEMS}")
        counts += [int(match.group(1))] * repeat
    return tuple(counts)


def gpu_count(text: str) -> int:
    """How many GPUs a count or GRES string means: ``4``, ``a100:4``, ``gpu:2(S:0-1)``, ``gres/gpu:a100=2``.

    Where an entry is named ``gpu``, entries of other names (``nic:1``) don't count; where none is, names are GPU
    types.

    Raises:
        ValueError: with what is wrong, without the text.
    """
    entries: list[tuple[list[str], int]] = []
    for raw in _PARENTHESES.sub("", text).split(","):
        entry = raw.strip()
        for prefix in ("gres/", "gres:"):
            entry = entry.removeprefix(prefix)
        if not entry:
            raise ValueError("has an empty entry")
        names = re.split(r"[:=]", entry)
        count = 1
        if names[-1].isascii() and names[-1].isdigit():
            count = int(names.pop()[:9])
        if not all(re.match(r"[A-Za-z0-9_.-]+\Z", name) for name in names):
            raise ValueError("is not a count or a GRES string such as gpu:a100:4")
        entries.append((names, count))
    gpus = [count for names, count in entries if names and names[0].lower() == "gpu"]
    return sum(gpus) if gpus else sum(count for _, count in entries)


def device_count(text: str) -> int:
    """How many devices ``CUDA_VISIBLE_DEVICES`` and its kin name: indices, ranges, UUIDs, or nothing.

    CUDA stops at the first entry that it can't use, such as ``-1``; ``NoDevFiles`` was Slurm's word for none.
    """
    count = 0
    for part in text.split(","):
        entry = part.strip()
        if not entry or entry == "NoDevFiles" or entry.startswith("-"):
            break
        first, dash, last = entry.partition("-")
        if dash and first.isdigit() and last.isdigit():  # SLURM_JOB_GPUS=0-3 in some versions
            count += max(0, int(last[:9]) - int(first[:9]) + 1)
        else:
            count += 1
    return count
