"""Where the threads of a process stood: faulthandler's dump, found in its stderr, and what the kernel says of it.

The dump comes with the SIGABRT that ends a hung worker (``PYTHONFAULTHANDLER=1``): all threads, also with the GIL held
in C. What does not answer, since it sits in the kernel or is no Python, is told by ``/proc``: state and wait channel.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping

from hpc_elastic.failures.traceback_text import Frame, clean_text
from hpc_elastic.light_dataclass import dataclass

DUMP_LIMIT = 512 << 10
"""Bytes at the end of stderr.log in which the dump is looked for: some hundred threads."""
_FATAL = "Fatal Python error: Aborted"
_THREAD = re.compile(r"(?:Current thread|Thread) 0x[0-9a-f]+ (?:\[(.*)\] )?\(most recent call first\):\s*\Z")
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)\Z')
_END = re.compile(r"Extension modules: |Current thread's C stack trace")
_THREADS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadStack:
    """One thread of a dump."""

    frames: tuple[Frame, ...]
    """Outermost call first; empty: no Python in it."""
    current: bool
    """The one that got the signal: the main thread, but where it had blocked it."""
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StackDump:
    """What faulthandler printed."""

    threads: tuple[ThreadStack, ...]
    text: str
    """As printed."""

    @property
    def main(self) -> tuple[Frame, ...]:
        """Of the thread that got the signal, outermost call first."""
        return next((thread.frames for thread in self.threads if thread.current), ())


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessState:
    """What the kernel told of a process before it was ended."""

    pid: int
    state: str = ""
    """``S (sleeping)``; empty: it was gone."""
    threads: tuple[str, ...] = ()
    """For each: its name, state and wait channel; at most 64."""
    thread_count: int = 0

    @property
    def is_stopped(self) -> bool:
        """By SIGSTOP, or a debugger: from outside."""
        return self.state[:1] in ("T", "t")

    @property
    def is_uninterruptible(self) -> bool:
        return self.state.startswith("D")

    def describe(self) -> str:
        """One line."""
        return f"state {self.state}, {self.thread_count} threads" if self.state else "gone"


def find_dump(text: str) -> StackDump | None:
    """The last dump of an abort in `text`, None where there is none."""
    start = text.rfind(_FATAL)
    if start < 0:
        return None
    lines = clean_text(text[start:]).split("\n")
    threads: list[ThreadStack] = []
    frames: list[Frame] | None = None
    current, name = False, ""
    last = 0

    def finish() -> None:
        if frames is not None:
            threads.append(ThreadStack(frames=tuple(reversed(frames)), current=current, name=name))

    for number, line in enumerate(lines[1:], 1):
        if _END.match(line):
            break
        header = _THREAD.match(line)
        found = _FRAME.match(line)
        if header:
            finish()
            frames, current, name = [], line.startswith("Current"), header[1] or ""
            last = number
        elif found and frames is not None:
            frames.append(Frame(file=found[1], line=int(found[2]), function=found[3]))
            last = number
        elif line.startswith("  ") and frames is not None:
            last = number  # "  <no Python frame>", "  ..."
    finish()
    if not threads:
        return None
    return StackDump(threads=tuple(threads), text="\n".join(lines[: last + 1]))


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
    groups: dict[tuple[str, ...], list[int]] = {}
    for rank in sorted(stacks):
        groups.setdefault(stacks[rank], []).append(rank)
    return sorted(((ranks, stack) for stack, ranks in groups.items()), key=lambda group: (len(group[0]), group[0]))


def look_at_process(pid: int, *, proc: str = "/proc") -> ProcessState:
    """What the kernel tells of a process and its threads. Never raises, never waits for it."""
    state = _status(f"{proc}/{pid}/status").get("State", "")
    try:
        names = sorted(os.listdir(f"{proc}/{pid}/task"), key=lambda name: (name != str(pid), len(name), name))
    except OSError:
        names = []
    threads = []
    for name in names[:_THREADS]:
        folder = f"{proc}/{pid}/task/{name}"
        status = _status(f"{folder}/status")
        wchan = _read(f"{folder}/wchan")
        waits = f" in {wchan}" if wchan not in ("", "0") else ""
        threads.append(f"{name} {status.get('Name', '?')}: {status.get('State', '?')}{waits}")
    return ProcessState(pid=pid, state=state, threads=tuple(threads), thread_count=len(names))


def _status(path: str) -> dict[str, str]:
    found = {}
    for line in _read(path).splitlines():
        key, colon, value = line.partition(":")
        if colon:
            found[key] = value.strip()
    return found


def _read(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return file.read(64 << 10).decode("utf-8", "replace").strip()
    except OSError:
        return ""
