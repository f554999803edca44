"""Shows where a hung process stood: the stacks of its threads, and what the kernel says of it.

faulthandler's dump comes with the SIGABRT that ends a hung worker (``PYTHONFAULTHANDLER=1``): all threads, also with
the GIL held in C. A build of a torch C++ extension that was killed leaves its lock file (torch 2.13's `FileBaton`), and
every later start waits for it.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from hpc_elastic.base.host_facts import kernel_fields, kernel_text
from hpc_elastic.base.loop import read_each
from hpc_elastic.base.text import clean_text
from hpc_elastic.failures.failure_text import Frame

DUMP_LIMIT = 512 << 10
"""Bytes at the end of stderr.log in which the dump is looked for: some hundred threads."""
_FATAL = "Fatal Python error: Aborted"
_THREAD = re.compile(r"(?:Current thread|Thread) 0x[0-9a-f]+ (?:\[(.*)\] )?\(most recent call first\):\s*\Z")
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)\Z')
_END = re.compile(r"Extension modules: |Current thread's C stack trace")
_PROCESS = "/multiprocessing/process.py"
_MOST_DUMPS = 9
_SHOWN = 12
"""Frames of a thread in an event."""
_OWN_THREAD = "/hpc_elastic/worker_api/flight_recorder.py"
"""This package's own thread in a worker: nothing that its user asks for."""

T = TypeVar("T")


class ThreadStack(Struct, frozen=True, kw_only=True):
    frames: tuple[Frame, ...]
    """Outermost call first; empty: no Python in it."""
    is_main: bool
    name: str = ""


class StackDump(Struct, frozen=True, kw_only=True):
    threads: tuple[ThreadStack, ...]
    text: str
    children: tuple[StackDump, ...] = ()
    """Dumps of processes that it had forked by multiprocessing, as a DataLoader does."""

    @property
    def main(self) -> tuple[Frame, ...]:
        return next((thread.frames for thread in self.threads if thread.is_main), ())


class RankStacks(Struct, frozen=True, kw_only=True):
    main: tuple[str, ...] = ()
    others: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Each other thread with Python in it: its name, where it has one, and its `short_stack`."""
    where: str = ""


def find_dump(text: str, *, may_be_child: bool = True) -> StackDump | None:
    """Find the last dump of an abort in `text`, with those of the process' children before it; None for no dump.

    The main thread is the last one of at most a hundred: the interpreter lists the newest first (CPython 3.10 to 3.14).
    `may_be_child`: multiprocessing may have started the process itself.
    """
    dumps = [dump for part in text.split(_FATAL)[1:][-_MOST_DUMPS:] if (dump := _read_dump(_FATAL + part))]
    if not dumps or not (may_be_child or forked_frames(dumps[-1]) is None):
        return None
    return replace(dumps[-1], children=tuple(dump for dump in dumps[:-1] if forked_frames(dump) is not None))


def forked_frames(dump: StackDump) -> tuple[Frame, ...] | None:
    """The frames of a process' own code, where multiprocessing started it; None for another process."""
    starts = [
        at for at, frame in enumerate(dump.main) if frame.file.endswith(_PROCESS) and frame.function == "_bootstrap"
    ]
    return dump.main[starts[-1] + 1 :] if starts else None


def _read_dump(text: str) -> StackDump | None:
    lines = clean_text(text).split("\n")
    threads: list[ThreadStack] = []
    frames: list[Frame] | None = None
    name, is_cut = "", False
    last = 0

    def finish() -> None:
        if frames is not None and not any(frame.file.endswith(_OWN_THREAD) for frame in frames):
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


def stacks_of(dump: StackDump | None, *, where: str = "") -> RankStacks:
    """Keep what an event holds of a rank; `where`: what the kernel said of it."""
    if dump is None:
        return RankStacks(where=where)
    others = ((thread.name, tuple(short_stack(thread.frames))) for thread in dump.threads if not thread.is_main)
    return RankStacks(
        main=tuple(short_stack(dump.main)),
        others=tuple((name, stack) for name, stack in others if stack),
        where="" if dump.main else where,
    )


def describe_stack(frames: Iterable[Frame]) -> str:
    lines = [f'  File "{frame.file}", line {frame.line}, in {frame.function}' for frame in frames]
    return "\n".join(["Stack where it hung (most recent call last):", *lines]) if lines else ""


def short_stack(frames: Iterable[Frame]) -> list[str]:
    """Write frames for an event: ``train.py:44 step``, the most recent call last."""
    return [f"{frame.file}:{frame.line} {frame.function}" for frame in list(frames)[-_SHOWN:]]


def fold_ranks(found: Iterable[tuple[int, T]]) -> list[tuple[tuple[int, ...], T]]:
    """Group ranks by what they have in common: the rarest first, then by rank; one with several stands in each."""
    groups: dict[T, list[int]] = {}
    for rank, stack in found:
        groups.setdefault(stack, []).append(rank)
    return sorted(((tuple(ranks), one) for one, ranks in groups.items()), key=lambda group: (len(group[0]), group[0]))


_THREADS = 64
_CHILDREN = 8
_SYSCALL_SECONDS = 0.2
"""On kernels before 5.11 a process that hangs in the middle of an execve keeps a reader of its call waiting."""
# Those in which a process may sit for ever; from the kernel's unistd.h.
_X86_64 = {
    0: "read", 1: "write", 3: "close", 4: "stat", 5: "fstat", 6: "lstat", 7: "poll", 16: "ioctl", 17: "pread64",
    18: "pwrite64", 19: "readv", 20: "writev", 21: "access", 23: "select", 34: "pause", 35: "nanosleep", 42: "connect",
    43: "accept", 44: "sendto", 45: "recvfrom", 46: "sendmsg", 47: "recvmsg", 56: "clone", 57: "fork", 58: "vfork",
    59: "execve", 61: "wait4", 72: "fcntl", 73: "flock", 74: "fsync", 75: "fdatasync", 76: "truncate",
    77: "ftruncate", 78: "getdents", 82: "rename", 83: "mkdir", 87: "unlink", 128: "rt_sigtimedwait",
    130: "rt_sigsuspend", 137: "statfs", 138: "fstatfs", 162: "sync", 202: "futex", 217: "getdents64",
    230: "clock_nanosleep", 232: "epoll_wait", 247: "waitid", 257: "openat", 262: "newfstatat", 270: "pselect6",
    271: "ppoll", 281: "epoll_pwait", 288: "accept4", 322: "execveat", 332: "statx", 435: "clone3",
}  # fmt: skip
_GENERIC = {
    22: "epoll_pwait", 25: "fcntl", 29: "ioctl", 32: "flock", 35: "unlinkat", 43: "statfs", 44: "fstatfs",
    45: "truncate", 46: "ftruncate", 56: "openat", 57: "close", 61: "getdents64", 63: "read", 64: "write",
    65: "readv", 66: "writev", 67: "pread64", 68: "pwrite64", 72: "pselect6", 73: "ppoll", 79: "newfstatat",
    80: "fstat", 81: "sync", 82: "fsync", 83: "fdatasync", 95: "waitid", 98: "futex", 101: "nanosleep",
    115: "clock_nanosleep", 133: "rt_sigsuspend", 137: "rt_sigtimedwait", 202: "accept", 203: "connect",
    206: "sendto", 207: "recvfrom", 211: "sendmsg", 212: "recvmsg", 220: "clone", 221: "execve", 242: "accept4",
    260: "wait4", 276: "renameat2", 281: "execveat", 291: "statx", 435: "clone3",
}  # fmt: skip
_NAMES: Mapping[str, Mapping[int, str]] = {"x86_64": _X86_64, "aarch64": _GENERIC, "riscv64": _GENERIC}
_WAITS = frozenset(
    ("futex", "poll", "ppoll", "select", "pselect6", "epoll_wait", "epoll_pwait", "recvfrom", "recvmsg", "accept",
     "accept4", "connect")
)  # fmt: skip
_FORKS = ("vfork", "clone", "clone3")


class Whereabouts(Struct, frozen=True, kw_only=True):
    pid: int
    name: str
    state: str
    wchan: str = ""
    syscall: str = ""

    @property
    def is_stuck(self) -> bool:
        """It can't go on by itself: in the kernel, stopped, or about to load a program (D state or not)."""
        return self.state[:1] in ("D", "T", "t") or self.syscall in ("execve", "execveat")

    def describe(self) -> str:
        where = f" in {self.wchan}" if self.wchan else ""
        call = f", system call {self.syscall}" if self.syscall else ""
        return f"{self.state or '?'}{where}{call}"


class ProcessState(Struct, frozen=True, kw_only=True):
    """The kernel's report of a process before it was ended."""

    pid: int
    state: str = ""
    """``S (sleeping)``; empty: it was gone."""
    threads: tuple[Whereabouts, ...] = ()
    thread_count: int = 0
    children: tuple[Whereabouts, ...] = ()
    """At most 8; those that are stuck first."""

    @property
    def is_stopped(self) -> bool:
        return self.state[:1] in ("T", "t")

    @property
    def is_uninterruptible(self) -> bool:
        return self.state.startswith("D")

    @property
    def waits_for_process(self) -> bool:
        return bool(self.threads) and self.threads[0].syscall in _WAITS

    @property
    def hung_child(self) -> Whereabouts | None:
        """The child that it waits for in a fork, and that does not come to its program: on a hung mount, say."""
        call = self.threads[0].syscall if self.threads else ""
        if not self.is_uninterruptible or (call and call not in _FORKS):
            return None
        return next((child for child in self.children if child.is_stuck), None)

    def describe(self) -> str:
        return f"state {self.state}, {self.thread_count} threads" if self.state else "gone"

    def whereabouts(self) -> str:
        """Its place, where there is no stack of it; empty: it was gone."""
        if not self.state:
            return ""
        words = self.threads[0].describe() if self.threads else self.state
        child = self.hung_child
        return f"{words}; its child {child.pid} ({child.name}): {child.describe()}" if child else words


def look_at_process(pid: int, *, proc: str = "/proc") -> ProcessState:
    """Look at what the kernel reports of a process, its threads and its children. Never raises."""
    state = kernel_fields(f"{proc}/{pid}/status").get("State", "")
    try:
        names = sorted(os.listdir(f"{proc}/{pid}/task"), key=lambda name: (name != str(pid), len(name), name))
    except OSError:
        names = []
    folders = [f"{proc}/{pid}/task/{name}" for name in names[:_THREADS]]
    children = {child for folder in folders for child in kernel_text(f"{folder}/children").split() if child.isdigit()}
    below = [f"{proc}/{child}" for child in sorted(children, key=int)]
    paths = [f"{folder}/syscall" for folder in (*folders, *below)]
    calls = read_each(paths, kernel_text, patience=_SYSCALL_SECONDS, goes_on=False)
    found = [_look(folder, calls) for folder in below]
    return ProcessState(
        pid=pid,
        state=state,
        threads=tuple(_look(folder, calls) for folder in folders),
        thread_count=len(names),
        children=tuple(sorted(found, key=lambda each: not each.is_stuck)[:_CHILDREN]),
    )


def syscall_name(text: str, machine: str) -> str:
    """Name the call in ``/proc/PID/syscall``; the number where its name is not known, empty where it is in none."""
    number = text.partition(" ")[0]
    if not number.isdigit():
        return ""
    return _NAMES.get(machine, {}).get(int(number), number)


def _look(folder: str, calls: Mapping[str, str]) -> Whereabouts:
    status = kernel_fields(f"{folder}/status")
    wchan = kernel_text(f"{folder}/wchan").strip()
    return Whereabouts(
        pid=int(os.path.basename(folder)),
        name=status.get("Name", "?"),
        state=status.get("State", "?"),
        wchan="" if wchan == "0" else wchan,
        syscall=syscall_name(calls.get(f"{folder}/syscall", ""), platform.machine()),
    )


_WAITS_IN = "torch/utils/file_baton.py"


def explain_lock(frames: Iterable[Frame], environ: Mapping[str, str], *, cwd: str = "") -> str:
    """Say what a worker with these `environ` and `cwd` waits for in `FileBaton.wait`; empty: for nothing."""
    if not any(frame.file.endswith(_WAITS_IN) for frame in frames):
        return ""
    root, locks = _root(environ), list[Path]()
    try:
        # <root>/<name>/lock, or with a folder of the Python and the accelerator between.
        locks = [*root.glob("*/lock"), *root.glob("*/*/lock")]
        if cwd:
            own = (path for depth in ("lock", "*/lock", "*/*/lock") for path in Path(cwd).glob(depth))
            locks += [path for path in own if path not in locks and (path.parent / "build.ninja").exists()]
    except OSError:
        locks = []
    named = " or ".join(map(str, sorted(locks)[:3])) or "lock in the build folder (TORCH_EXTENSIONS_DIR)"
    return (
        f"it waits for the lock file {named} of a C++ extension's build; where the process that built it was killed, "
        "remove the file: every later start waits for it, too"
    )


class HeldLock(Struct, frozen=True):
    """A file that may be a build's lock, of a process that has it open."""

    path: str
    inode: int


def find_held_locks(pids: Iterable[int]) -> tuple[HeldLock, ...]:
    """The files ``lock`` that processes have open. Reads /proc alone, which no filesystem that hangs can hold up."""
    found = []
    for pid in pids:
        try:
            for fd in os.listdir(f"/proc/{pid}/fd"):
                path = os.readlink(f"/proc/{pid}/fd/{fd}")
                if path.endswith("/lock"):
                    info = Path(f"/proc/{pid}/fdinfo/{fd}").read_text()
                    found += [HeldLock(path, int(line[4:])) for line in info.splitlines() if line.startswith("ino:")]
        except (OSError, ValueError):
            continue  # it has just ended; a kernel before 5.14 gives no inode
    return tuple(found)


def remove_locks(held: Iterable[HeldLock], environ: Mapping[str, str]) -> list[str]:
    """Remove what is left of builds whose processes are gone, and return the paths. May wait for a filesystem.

    Only the same empty file in a folder of extensions goes: another process may have begun to build since.
    """
    removed = []
    for lock in held:
        folder = os.path.dirname(lock.path)
        try:
            info = os.lstat(lock.path)
            is_build = Path(folder).is_relative_to(_root(environ)) or os.path.exists(f"{folder}/build.ninja")
            if is_build and (info.st_ino, info.st_size) == (lock.inode, 0):
                os.unlink(lock.path)
                removed.append(lock.path)
        except OSError:
            continue
    return removed


def _root(environ: Mapping[str, str]) -> Path:
    cache = environ.get("XDG_CACHE_HOME") or os.path.join(environ.get("HOME", "/"), ".cache")
    return Path(environ.get("TORCH_EXTENSIONS_DIR") or os.path.join(cache, "torch_extensions"))
