"""The few system calls that Python's `os` lacks, or lacks in some builds.

Python as conda builds it is compiled against a C library so old that `os.pidfd_open`, `signal.pidfd_send_signal` and a
fast `os.closerange` are missing on a kernel that has them all, so these go through ``syscall(2)``. The numbers are the
same on every architecture (Linux gave new calls one number for all from 424 on).
"""

from __future__ import annotations

import ctypes
import errno
import os

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37
_SYS_PIDFD_SEND_SIGNAL = 424
_SYS_PIDFD_OPEN = 434
_SYS_CLOSE_RANGE = 436

_libc = ctypes.CDLL(None, use_errno=True)
_prctl = _libc.prctl
_prctl.argtypes = (ctypes.c_int, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong)
_prctl.restype = ctypes.c_int
_prctl_name = _libc["prctl"]
_prctl_name.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong)
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long


def _check(result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def set_child_subreaper(*, on: bool = True) -> None:
    """Orphaned descendants become children of this process. Not inherited by a fork.

    Raises:
        OSError: refused by a sandbox.
    """
    _check(_prctl(_PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0))


def is_child_subreaper() -> bool:
    """Whether this process is one already."""
    found = ctypes.c_int(0)
    _check(_prctl(_PR_GET_CHILD_SUBREAPER, ctypes.addressof(found), 0, 0, 0))
    return bool(found.value)


def set_parent_death_signal(signal_number: int) -> None:
    """Get `signal_number` when the *thread* that forked this process ends. Survives exec, not a fork."""
    _check(_prctl(_PR_SET_PDEATHSIG, signal_number, 0, 0, 0))


def set_name(name: str) -> None:
    """Set the name that ps shows (15 bytes at most)."""
    _check(_prctl_name(_PR_SET_NAME, name.encode()[:15], 0, 0, 0))


def pidfd_open(pid: int) -> int | None:
    """A descriptor (close-on-exec) that names the process `pid` and becomes readable when it ends.

    Returns:
        None where the kernel has none (before Linux 5.3: RHEL 8), or a sandbox refuses it.

    Raises:
        ProcessLookupError: there is no such process.
        OSError: out of descriptors.
    """
    try:
        return _check(_syscall(_SYS_PIDFD_OPEN, ctypes.c_int(pid), ctypes.c_uint(0)))
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.EPERM):
            return None
        raise


def pidfd_send_signal(pidfd: int, signal_number: int) -> None:
    """Signal exactly the process that `pidfd` names.

    Raises:
        ProcessLookupError: it has ended and was waited for.
        PermissionError: it is another user's.
    """
    _check(
        _syscall(
            _SYS_PIDFD_SEND_SIGNAL,
            ctypes.c_int(pidfd),
            ctypes.c_int(signal_number),
            ctypes.c_void_p(None),
            ctypes.c_uint(0),
        )
    )


def close_from(first: int) -> None:
    """Close every descriptor from `first` on, at a cost that doesn't grow with the descriptor limit."""
    if _syscall(_SYS_CLOSE_RANGE, ctypes.c_uint(first), ctypes.c_uint(0xFFFFFFFF), ctypes.c_uint(0)) == 0:
        return
    for name in os.listdir("/proc/self/fd"):
        if int(name) >= first:
            try:
                os.close(int(name))
            except OSError:
                pass  # the one that listed the folder
