"""Where the threads of a process stood: faulthandler's dump, found in its stderr, or py-spy's.

The dump comes with the SIGABRT that ends a hung worker (``PYTHONFAULTHANDLER=1``): all threads, also with the GIL held
in C. py-spy, where it is installed, tells of who does not answer; `process_state` of who is no Python.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TypeVar

from hpc_elastic.failures.traceback_text import Frame, clean_text
from hpc_elastic.light_dataclasses import dataclass, replace

DUMP_LIMIT = 512 << 10
"""Bytes at the end of stderr.log in which the dump is looked for: some hundred threads."""
_FATAL = "Fatal Python error: Aborted"
_THREAD = re.compile(r"(?:Current thread|Thread) 0x[0-9a-f]+ (?:\[(.*)\] )?\(most recent call first\):\s*\Z")
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)\Z')
_SPY_THREAD = re.compile(r"Thread (?:\d+|0x[0-9A-Fa-f]+) \([^)]*\)(?:: \"(.*)\")?\Z")
_SPY_FRAME = re.compile(r"    (\S.*) \((.*?)(?::(\d+))?\)\Z")
_END = re.compile(r"Extension modules: |Current thread's C stack trace")


T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadStack:
    """One thread of a dump."""

    frames: tuple[Frame, ...]
    """Outermost call first; empty: no Python in it."""
    is_main: bool
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StackDump:
    """What faulthandler printed."""

    threads: tuple[ThreadStack, ...]
    text: str
    """As printed."""

    @property
    def main(self) -> tuple[Frame, ...]:
        """Of the main thread, outermost call first."""
        return next((thread.frames for thread in self.threads if thread.is_main), ())


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStacks:
    """Where a rank's threads stood, for an event."""

    main: tuple[str, ...] = ()
    """`short_stack` of its main thread; empty: none could be had."""
    others: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Of each other thread with Python in it: its name, where that is told, and its `short_stack`."""
    where: str = ""
    """What the kernel said of it, where there is no stack."""


def find_dump(text: str) -> StackDump | None:
    """The last dump of an abort in `text`, None where there is none.

    Any thread may have got the signal, also one without Python, where the process had been stopped. The main thread is
    the last of a dump: the interpreter lists the newest first (CPython 3.10 to 3.14). Where it stopped after a hundred,
    the main thread is not among them.
    """
    start = text.rfind(_FATAL)
    if start < 0:
        return None
    lines = clean_text(text[start:]).split("\n")
    threads: list[ThreadStack] = []
    frames: list[Frame] | None = None
    name, is_cut = "", False
    last = 0

    def finish() -> None:
        if frames is not None:
            threads.append(ThreadStack(frames=tuple(reversed(frames)), is_main=False, name=name))

    for number, line in enumerate(lines[1:], 1):
        if _END.match(line):
            break
        header = _THREAD.match(line)
        found = _FRAME.match(line)
        if header:
            finish()
            frames, name = [], header[1] or ""
            last = number
        elif found and frames is not None:
            frames.append(Frame(file=found[1], line=int(found[2]), function=found[3]))
            last = number
        elif line == "..." and frames is not None:
            is_cut = True
        elif line.startswith("  ") and frames is not None:
            last = number  # "  <no Python frame>", "  ..."
    finish()
    if not threads:
        return None
    if not is_cut:
        threads[-1] = replace(threads[-1], is_main=True)
    return StackDump(threads=tuple(threads), text="\n".join(lines[: last + 1]))


def find_py_spy(text: str) -> StackDump | None:
    """What ``py-spy dump`` printed (0.3 and 0.4); None where it could not tell."""
    threads: list[ThreadStack] = []
    frames: list[Frame] = []
    name: str | None = None

    def finish() -> None:
        if name is not None:
            is_main = name == "MainThread" or (not threads and not name)
            threads.append(ThreadStack(frames=tuple(reversed(frames)), is_main=is_main, name=name))

    for line in clean_text(text).split("\n"):
        header = _SPY_THREAD.match(line)
        found = _SPY_FRAME.match(line)
        if header:
            finish()
            frames, name = [], header[1] or ""
        elif found and name is not None:
            frames.append(Frame(file=found[2], line=int(found[3] or 0), function=found[1]))
    finish()
    return StackDump(threads=tuple(threads), text=text) if any(thread.frames for thread in threads) else None


def stacks_of(dump: StackDump | None, *, where: str = "") -> RankStacks:
    """What an event tells of a rank.

    Args:
        dump: Its stacks, where there are any.
        where: What the kernel said of it.
    """
    if dump is None:
        return RankStacks(where=where)
    others = ((thread.name, tuple(short_stack(thread.frames))) for thread in dump.threads if not thread.is_main)
    return RankStacks(
        main=tuple(short_stack(dump.main)),
        others=tuple((name, stack) for name, stack in others if stack),
        where="" if dump.main else where,
    )


def describe_stack(frames: Iterable[Frame]) -> str:
    """As a traceback has it, the most recent call last."""
    lines = [f'  File "{frame.file}", line {frame.line}, in {frame.function}' for frame in frames]
    return "\n".join(["Stack where it hung (most recent call last):", *lines]) if lines else ""


def short_stack(frames: Iterable[Frame], limit: int = 12) -> list[str]:
    """For an event: ``train.py:44 step``, the most recent call last, at most `limit`."""
    return [f"{frame.file}:{frame.line} {frame.function}" for frame in list(frames)[-limit:]]


def fold_stacks(stacks: Mapping[int, tuple[str, ...]]) -> list[tuple[list[int], tuple[str, ...]]]:
    """Ranks by identical stack: the rarest stack first, which is the odd one out; then by rank.

    Args:
        stacks: Global rank → `short_stack`.
    """
    return _fold((rank, stacks[rank]) for rank in sorted(stacks))


def fold_threads(stacks: Mapping[int, RankStacks]) -> list[tuple[list[int], tuple[str, tuple[str, ...]]]]:
    """The other threads, each kind (name and stack) with its ranks; the rarest first. A rank may have several alike."""
    return _fold((rank, thread) for rank in sorted(stacks) for thread in dict.fromkeys(stacks[rank].others))


def _fold(found: Iterable[tuple[int, T]]) -> list[tuple[list[int], T]]:
    groups: dict[T, list[int]] = {}
    for rank, stack in found:
        groups.setdefault(stack, []).append(rank)
    return sorted(((ranks, stack) for stack, ranks in groups.items()), key=lambda group: (len(group[0]), group[0]))
