"""Wraps what this package needs of Linux: system calls that `os` lacks, signals as events, hung threads, OOM kills.

Python as conda builds it is compiled against so old a C library that `os.pidfd_open`, `signal.pidfd_send_signal` and a
fast `os.closerange` are missing on a kernel that has them all, so these go through ``syscall(2)``.
"""

from __future__ import annotations

import ctypes
import errno
import os
import pwd
import select
import signal
import stat
import struct
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn, TypeVar

from hpc_elastic.base.host_facts import kernel_fields, kernel_text, unescape_mount
from hpc_elastic.base.loop import Waker

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37
_SYS_PIDFD_SEND_SIGNAL = 424
_SYS_PIDFD_OPEN = 434
_SYS_CLOSE_RANGE = 436
_SYS_TGKILL = {"x86_64": 234, "aarch64": 131, "riscv64": 131, "ppc64le": 250}
"""An older call: one number for each architecture. glibc has a function for it from 2.30 on, RHEL 8 an older one."""

_libc = ctypes.CDLL(None, use_errno=True)
_prctl = _libc.prctl
_prctl.argtypes = (ctypes.c_int, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong)
_prctl.restype = ctypes.c_int
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long


def _check(result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def set_child_subreaper(*, on: bool = True) -> None:
    """Make orphaned descendants children of this process; a fork does not inherit that. Raises OSError in a sandbox."""
    _check(_prctl(_PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0))


def is_child_subreaper() -> bool:
    found = ctypes.c_int(0)
    _check(_prctl(_PR_GET_CHILD_SUBREAPER, ctypes.addressof(found), 0, 0, 0))
    return bool(found.value)


def set_parent_death_signal(signal_number: int) -> None:
    """Get `signal_number` when the *thread* that forked this process ends. Survives exec, not a fork."""
    _check(_prctl(_PR_SET_PDEATHSIG, signal_number, 0, 0, 0))


def pidfd_open(pid: int) -> int | None:
    """None where the kernel has none (before Linux 5.3: RHEL 8), or a sandbox refuses it. Raises ProcessLookupError, or
    another OSError where there is no descriptor left.
    """
    try:
        return _check(_syscall(_SYS_PIDFD_OPEN, ctypes.c_int(pid), ctypes.c_uint(0)))
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.EPERM):
            return None
        raise


def pidfd_send_signal(pidfd: int, signal_number: int) -> None:
    arguments = ctypes.c_int(pidfd), ctypes.c_int(signal_number), ctypes.c_void_p(None), ctypes.c_uint(0)
    _check(_syscall(_SYS_PIDFD_SEND_SIGNAL, *arguments))


def signal_main_thread(pid: int, signal_number: int) -> None:
    """Raises ProcessLookupError, PermissionError, or OSError where this architecture's number of it is not known."""
    number = _SYS_TGKILL.get(os.uname().machine)
    if number is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    _check(_syscall(number, ctypes.c_int(pid), ctypes.c_int(pid), ctypes.c_int(signal_number)))


def reset_signals() -> None:
    """A signal that a nohup or the agent ignores is not ignored by the workers. Runs between fork and exec."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def close_from(first: int) -> None:
    if _syscall(_SYS_CLOSE_RANGE, ctypes.c_uint(first), ctypes.c_uint(0xFFFFFFFF), ctypes.c_uint(0)) == 0:
        return
    for name in os.listdir("/proc/self/fd"):
        if int(name) >= first:
            with suppress(OSError):  # the one that listed the folder
                os.close(int(name))


def output_pipes() -> list[int]:
    """Those of stdout and stderr that can be closed without asking a filesystem. To be called while all answer."""
    found = []
    for fd in (1, 2):
        with suppress(OSError):
            mode = os.fstat(fd).st_mode
            if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or stat.S_ISCHR(mode):
                found.append(fd)
    return found


def leave_hung_threads(code: int, pipes: Sequence[int]) -> NoReturn:
    """End at once: a mount that does not answer can hold a thread so that not even the process' own end takes it. A
    reader of its output would wait as long for the end of file, so the output is let go by hand.
    """
    try:
        null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        for fd in pipes:
            os.dup2(null, fd)
    finally:
        os._exit(code)


T = TypeVar("T")

OUT_OF_DESCRIPTORS = frozenset({errno.EMFILE, errno.ENFILE})


class SpareDescriptor:
    """One descriptor, kept for when there is none left: held by `hold`, given up while `lend` needs its number.

    Without a descriptor ``/proc`` can't be read, and workers would be taken for gone that still run. For any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fd = -1

    def hold(self) -> None:
        with self._lock:
            self._take()

    def lend(self, action: Callable[[], T]) -> T:
        """Raises `action`'s OSError, or for no descriptor: the spare one was not held, or was taken meanwhile."""
        try:
            return action()
        except OSError as error:
            if error.errno not in OUT_OF_DESCRIPTORS:
                raise
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1
            try:
                return action()
            finally:
                self._take()

    def _take(self) -> None:
        if self._fd < 0:
            with suppress(OSError):  # the next one that needs it finds out
                self._fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)


SPARE = SpareDescriptor()
"""This process'. Nothing is opened before `hold`."""


def not_ignored(signals: Iterable[signal.Signals]) -> list[signal.Signals]:
    """Those that a user's process handles: nohup's SIGHUP, and a script's ``&``, which ignores SIGINT, stay ignored."""
    left_alone = (signal.SIGHUP, signal.SIGINT)
    return [number for number in signals if number not in left_alone or signal.getsignal(number) != signal.SIG_IGN]


@contextmanager
def signals_unblocked() -> Iterator[None]:
    """A program that is started within inherits no signal that `SignalQueue` blocks."""
    mask = signal.pthread_sigmask(signal.SIG_SETMASK, ())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


_SIGNALFD = struct.Struct("=IiiII28xQ72x")
"""``struct signalfd_siginfo``: number, errno, code, pid, uid, …, the value of a queued signal."""
_SI_QUEUE = -1


class _SignalValue(ctypes.Union):
    _fields_ = (("number", ctypes.c_int), ("pointer", ctypes.c_void_p))


def relay_signal(pid: int, number: signal.Signals, *, sender: int) -> None:
    """Send a child a signal that process `sender` has sent to this one; the child's `SignalQueue` knows it then."""
    _check(_libc.sigqueue(pid, int(number), _SignalValue(pointer=sender)))


def _describe_sender(pid: int, uid: int | None) -> str:
    """``from pid 4021 (bash, user bob)``; empty: the kernel, or this process itself."""
    if pid in (0, os.getpid()):
        return ""
    name = "gone"
    with suppress(OSError, UnicodeDecodeError):
        uid = os.stat(f"/proc/{pid}").st_uid if uid is None else uid
        name = Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").strip()
    if uid is None or (uid == 0 and name.startswith("slurm")):
        return f"from pid {pid} ({name})"
    user = str(uid)
    with suppress(KeyError):
        user = pwd.getpwuid(uid).pw_name
    return f"from pid {pid} ({name}, user {user})"


class SignalQueue:
    """The signals of this process, with their senders, as something a selector can wait on. Main thread only.

    All but SIGCHLD are blocked in this thread and in those that it starts, and read from a signalfd, which knows the
    sender. What comes while `signals_unblocked` takes Python's own handler, which writes the number to the socket at
    once; nothing runs in the middle of other code.
    """

    def __init__(self, signals: Iterable[signal.Signals]) -> None:
        self._waker = Waker()
        self._meant: dict[signal.Signals, signal.Signals] = {}
        self._senders: dict[signal.Signals, tuple[int, str]] = {}
        self._signalfd, self._blocked = -1, 0
        self._watched = select.epoll()
        self._watched.register(self._waker.fileno(), select.EPOLLIN)
        signal.set_wakeup_fd(self._waker.write_fd, warn_on_full_buffer=False)
        for number in signals:
            self._hear(number)

    def hear_as(self, meant: signal.Signals, names: Iterable[str]) -> None:
        for name in names:
            self._meant[signal.Signals[name]] = meant
            self._hear(signal.Signals[name])

    def _hear(self, number: signal.Signals) -> None:
        signal.signal(number, lambda *_: None)  # the number goes through the wake-up socket
        signal.siginterrupt(number, False)
        if number is signal.SIGCHLD:
            return
        is_new, self._blocked = self._signalfd < 0, self._blocked | 1 << (number - 1)
        numbers = struct.pack("=Q120x", self._blocked)
        self._signalfd = _check(_libc.signalfd(self._signalfd, numbers, os.O_NONBLOCK | os.O_CLOEXEC))
        if is_new:
            self._watched.register(self._signalfd, select.EPOLLIN)
        signal.pthread_sigmask(signal.SIG_BLOCK, [number])

    def _read_senders(self) -> None:
        while self._signalfd >= 0:
            try:
                number, _, code, pid, uid, value = _SIGNALFD.unpack(os.read(self._signalfd, _SIGNALFD.size))
            except BlockingIOError:
                return
            if code == _SI_QUEUE and pid == os.getppid():
                self._senders[signal.Signals(number)] = value, _describe_sender(value, None)
            else:
                self._senders[signal.Signals(number)] = pid, _describe_sender(pid, uid)
            with suppress(OSError):  # full: there are signals enough
                os.write(self._waker.write_fd, bytes([number]))

    def fileno(self) -> int:
        return self._watched.fileno()

    def take(self) -> list[signal.Signals]:
        self._read_senders()
        found = []
        for number in self._waker.drain():
            try:
                heard = signal.Signals(number)
            except ValueError:
                continue  # a real-time signal without a name
            meant = self._meant.get(heard, heard)
            self._senders[meant] = self._senders.pop(heard, (0, ""))
            found.append(meant)
        return found

    def holds(self, numbers: Container[signal.Signals]) -> bool:
        self._read_senders()
        return any(number in numbers for number in self._waker.peek())

    def sender_pid(self, number: signal.Signals) -> int:
        """The process that sent the newest `number` that was taken; 0: not known."""
        return self._senders.get(number, (0, ""))[0]

    def sender(self, number: signal.Signals) -> str:
        return self._senders.get(number, (0, ""))[1]


def oom_kill_count(pid: int | str = "self", *, proc: str = "/proc") -> int | None:
    """None where no cgroup with a counter can be read. Under Slurm with task/cgroup the kill is counted in the *task's*
    cgroup, the agent's own (seen on 22.05.8, cgroup v1 and v2).
    """
    if (found := _memory_cgroup(pid, proc)) is None:
        return None
    folder, _, is_v2 = found
    return _counter(folder, "memory.events" if is_v2 else "memory.oom_control")


def node_oom_kill_count(*, proc: str = "/proc") -> int | None:
    """OOM kills since the boot, in whichever cgroup (Linux 4.13); None where that is not known."""
    return _counter(proc, "vmstat")


def memory_folders(pid: int | str = "self", *, proc: str = "/proc") -> list[tuple[str, bool]]:
    """The memory cgroup of a process and all above it that can be seen, the closest first; True: version 2."""
    if (found := _memory_cgroup(pid, proc)) is None:
        return []
    folder, top, is_v2 = found
    folders = [(folder, is_v2)]
    while folder != top and folder.startswith(top):
        folder = os.path.dirname(folder)
        folders.append((folder, is_v2))
    return folders


def _memory_cgroup(pid: int | str, proc: str) -> tuple[str, str, bool] | None:
    memberships, mounts = kernel_text(f"{proc}/{pid}/cgroup"), kernel_text(f"{proc}/self/mountinfo")
    v1_path = v2_path = None
    for line in memberships.splitlines():
        parts = line.split(":", 2)
        if len(parts) != 3:
            continue
        if parts[1] == "" and parts[0] == "0":
            v2_path = parts[2]
        elif "memory" in parts[1].split(","):
            v1_path = parts[2]
    # With both mounted (hybrid), the memory controller is where v1 lists it.
    if v1_path is not None:
        where = _folder(mounts, "cgroup", v1_path, controller="memory")
    else:
        where = _folder(mounts, "cgroup2", v2_path, controller=None) if v2_path is not None else None
    return (*where, v1_path is None) if where is not None else None


def _folder(mounts: str, kind: str, path: str, *, controller: str | None) -> tuple[str, str] | None:
    """Returns its mount point, too: mountinfo's fields 4 (root) and 5, proc(5). The last mount lies on top."""
    found = guessed = None
    for line in mounts.splitlines():
        left, separator, right = line.partition(" - ")
        fields, after = left.split(" "), right.split(" ")
        if not separator or len(fields) < 5 or len(after) < 3 or after[0] != kind:
            continue
        if controller is not None and controller not in after[2].split(","):
            continue
        root, point = unescape_mount(fields[3]), unescape_mount(fields[4])
        if "/../" in root + "/":  # mounted outside our cgroup namespace, whose place in it is not known
            continue
        if root == "/":
            relative = path
        elif path == root or path.startswith(root + "/"):
            relative = path[len(root) :] or "/"
        else:
            # A container sees a part of the tree; a path outside of it can't be reached from here.
            guessed = point, point
            continue
        if "/../" in relative + "/":  # a cgroup outside our cgroup namespace
            continue
        found = point + ("" if relative == "/" else relative), point
    return found or guessed


def _counter(folder: str, name: str) -> int | None:
    count = kernel_fields(os.path.join(folder, name), " ").get("oom_kill", "")
    return int(count) if count.isdigit() else None
